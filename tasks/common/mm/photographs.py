"""Real photographs with pseudo-labels: python -m tasks.common.mm.photographs OUT [--size 128]

Four photographs that scikit-image carries; nothing is downloaded. Masks are pseudo-labels: classical methods made them,
and no person looked at their pixels.

coins     coins from Pompeii, Brooklyn Museum; no known copyright restrictions. coin: watershed of the gradient from
          dark and bright markers, holes filled.
ihc       glands of a colon, stained, CMMI; no known copyright restrictions. gland, nucleus: the two stains unmixed
          (Ruifrok and Johnston 2001), Otsu's threshold of each; nuclei are parted by a watershed of distances.
retina    fundus of a left eye, Mikael Häggström; CC0 1.0. vessel: Sato's ridge filter (1998), two thresholds.
hubble    Hubble eXtreme Deep Field, NASA; public domain. galaxy: Otsu's threshold of the smoothed brightness; some
          stars are among them.

Every photograph is cut into three regions: training has the left 60 %, validation the upper part of the rest, test the
lower. `GAP` pixels between them belong to none, so no pixel is in two splits. Masks are made before the cut; what a
split's masks know of another is a threshold. Images are square tiles: of validation and test side by side, of training
at half their side from each other, so that they overlap.

    OUT/images/{training,validation,test}/NAME.png             RGB
    OUT/annotations/{training,validation,test}/NAME.png        ADE20K's layout: uint8, 1 background, 2... the classes
    OUT/annotations/instances_{training,validation,test}.json  COCO's layout: coins, nuclei and galaxies
    OUT/classes.txt                                            background first, then the classes
    OUT/photographs.json                                       the settings, where each tile was cut, versions
    OUT/contact_sheet.png                                      some tiles with their masks and boxes

COCO's category ids are 1 to 3. Objects with fewer than `MIN_PIXELS` pixels in a tile are not among its instances.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import pyplot, save
from hf_sparseprior.base.files import whole_folder, write_text
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.locks import make_once
from tasks.common.mm import commands
from tasks.common.mm.pictures import draw_instances
from tasks.common.mm.scenes import BACKGROUND, SPLITS, corner_boxes, mask_box, run_lengths

CLASSES = ("coin", "gland", "nucleus", "vessel", "galaxy")
THINGS = ("coin", "nucleus", "galaxy")  # classes whose objects are labelled one by one
TRAINING_SHARE, VALIDATION_SHARE = 0.6, 0.36  # of a photograph's width, and of the height of the rest
GAP = 8  # pixels between regions, more than any resizing or filter of a tile reaches
MIN_PIXELS = 20


@dataclass(frozen=True)
class Settings:
    """What the data set is made with: side of a tile in pixels."""

    size: int = 128

    def __post_init__(self) -> None:
        if not 32 <= self.size <= 192:
            raise ValueError(f"--size {self.size} must be between 32 and 192 pixels")


@dataclass
class Labelled:
    """A photograph with pseudo-labels.

    image: uint8 RGB (height, width, 3). labels: uint8 (height, width), 1 background, 2 and more `CLASSES`.
    objects: int (height, width), 0 where no object of `THINGS` is, else its number.
    """

    image: np.ndarray
    labels: np.ndarray
    objects: np.ndarray


# ---- pseudo-labels --------------------------------------------------------------------------------------------------


def photograph(name: str, scale: float) -> np.ndarray:
    """A photograph of scikit-image, resized: uint8 RGB (height, width, 3).

    Raises:
        ImportError: without scikit-image.
    """
    try:
        from skimage import data, transform
    except ImportError as error:
        raise ImportError("the photographs need skimage: pip install scikit-image") from error
    image = getattr(data, name)()
    image = np.stack([image] * 3, -1) if image.ndim == 2 else image[..., :3]
    shape = tuple(round(scale * side) for side in image.shape[:2])
    return np.round(255 * transform.resize(image, shape, order=1, anti_aliasing=scale < 1)).astype(np.uint8)


def without_specks(mask: np.ndarray, pixels: int) -> np.ndarray:
    """A bool mask without its connected parts of fewer pixels."""
    from scipy import ndimage

    parts, _ = ndimage.label(mask, np.ones((3, 3)))
    return mask & (np.bincount(parts.ravel())[parts] >= pixels)


def labelled(image: np.ndarray, masks: dict[str, np.ndarray], objects: np.ndarray | None = None) -> Labelled:
    """A photograph from the masks of its classes, which are disjoint, and the numbers of its objects."""
    labels = np.ones(image.shape[:2], dtype=np.uint8)
    for name, mask in masks.items():
        labels[mask] = CLASSES.index(name) + 2
    return Labelled(image, labels, np.zeros(labels.shape, dtype=int) if objects is None else objects)


def coins() -> Labelled:
    """Bright coins before a background that is as bright in places."""
    from scipy import ndimage
    from skimage import filters, segmentation

    image = photograph("coins", 2.0)
    grey = filters.gaussian(image[..., 0], 2, preserve_range=True)
    markers = np.where(grey < 60, 1, np.where(grey > 150, 2, 0))
    found = segmentation.watershed(filters.sobel(grey), markers) == 2
    mask = without_specks(ndimage.binary_fill_holes(found), 800)
    return labelled(image, {"coin": mask}, ndimage.label(mask, np.ones((3, 3)))[0])


def glands() -> Labelled:
    """Glands are where the brown stain is, nuclei where the blue one is and the brown is not."""
    from scipy import ndimage
    from skimage import color, feature, filters, segmentation

    image = photograph("immunohistochemistry", 1.5)
    stains = color.rgb2hed(image)
    blue, brown = (filters.gaussian(stains[..., channel], 2) for channel in (0, 2))
    stained = brown > filters.threshold_otsu(brown)
    disk = np.hypot(*np.mgrid[-3:4, -3:4]) <= 3
    nuclei = without_specks(ndimage.binary_opening((blue > filters.threshold_otsu(blue)) & ~stained, disk), 80)
    glands = without_specks(ndimage.binary_opening(stained, disk), 120) & ~nuclei
    depth = filters.gaussian(ndimage.distance_transform_edt(nuclei), 2)
    parts = ndimage.label(nuclei, np.ones((3, 3)))[0]
    peaks = feature.peak_local_max(depth, min_distance=7, labels=parts, exclude_border=False)
    markers = np.zeros(nuclei.shape, dtype=int)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    return labelled(image, {"gland": glands, "nucleus": nuclei}, segmentation.watershed(-depth, markers, mask=nuclei))


def vessels() -> Labelled:
    """Dark ridges of the green channel within the round field of view."""
    from scipy import ndimage
    from skimage import filters

    image = photograph("retina", 0.75)
    field = ndimage.binary_erosion(image[..., 0] > 40, iterations=8)
    ridges = np.where(field, filters.sato(image[..., 1] / 255, sigmas=[2, 3, 4], black_ridges=True), 0)
    threshold = filters.threshold_otsu(ridges[field])
    mask = filters.apply_hysteresis_threshold(ridges, 0.8 * threshold, 1.6 * threshold)
    return labelled(image, {"vessel": without_specks(mask, 200)})


def galaxies() -> Labelled:
    """What is bright in the sky; the faintest of it is background."""
    from scipy import ndimage
    from skimage import color, filters

    image = photograph("hubble_deep_field", 1.0)
    bright = filters.gaussian(color.rgb2gray(image), 1)
    mask = without_specks(bright > filters.threshold_otsu(bright), 30)
    return labelled(image, {"galaxy": mask}, ndimage.label(mask, np.ones((3, 3)))[0])


SOURCES: dict[str, Callable[[], Labelled]] = {"coins": coins, "ihc": glands, "retina": vessels, "hubble": galaxies}


# ---- tiles ----------------------------------------------------------------------------------------------------------


def regions(height: int, width: int) -> dict[str, tuple[slice, slice]]:
    """Rows and columns of each split of a photograph; they share no pixel."""
    column = round(TRAINING_SHARE * width)
    row = round(VALIDATION_SHARE * height)
    right = slice(column + GAP, width)
    return {
        "training": (slice(0, height), slice(0, column)),
        "validation": (slice(0, row), right),
        "test": (slice(row + GAP, height), right),
    }


def corners(region: tuple[slice, slice], size: int, step: int) -> Iterator[tuple[int, int]]:
    """Top left corners of square tiles that lie in a region, row by row, so many pixels apart."""
    rows, columns = region
    for top in range(rows.start, rows.stop - size + 1, step):
        for left in range(columns.start, columns.stop - size + 1, step):
            yield top, left


def cut(photo: Labelled, top: int, left: int, size: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[str]]:
    """A tile: image, labels, masks of its objects and their classes."""
    square = np.s_[top : top + size, left : left + size]
    labels, objects = photo.labels[square], photo.objects[square]
    numbers, counts = np.unique(objects[objects > 0], return_counts=True)
    masks = [objects == number for number in numbers[counts >= MIN_PIXELS]]
    return photo.image[square], labels, masks, [CLASSES[int(labels[mask][0]) - 2] for mask in masks]


def write_split(folder: Path, photos: dict[str, Labelled], split: str, size: int) -> tuple[list[Any], list[str]]:
    """Write the images and annotations of a split.

    Returns:
        What the contact sheet shows of every photograph's first tiles (image, masks, classes), and a line
        "NAME: PHOTOGRAPH TOP LEFT" for each tile.
    """
    from PIL import Image

    for part in ("images", "annotations"):
        (folder / part / split).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    shown, places = [], []
    for source, photo in photos.items():
        region = regions(*photo.labels.shape)[split]
        tiles = list(corners(region, size, size // 2 if split == "training" else size))
        for number, (top, left) in enumerate(tiles):
            image, labels, masks, classes = cut(photo, top, left, size)
            name = f"{source}_{number:03d}.png"
            Image.fromarray(image).save(folder / "images" / split / name)
            Image.fromarray(labels).save(folder / "annotations" / split / name)
            places.append(f"{split}/{name}: {source} {top} {left}")
            for mask, thing in zip(masks, classes, strict=True):
                annotations.append(
                    {
                        "id": len(annotations) + 1,  # pycocotools takes 0 to mean unmatched
                        "image_id": len(images),
                        "category_id": THINGS.index(thing) + 1,
                        "bbox": mask_box(mask),
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "segmentation": run_lengths(mask),
                    }
                )
            images.append({"id": len(images), "file_name": name, "height": size, "width": size})
            if number in (len(tiles) // 3, 2 * len(tiles) // 3):
                shown.append((image, labels, masks, classes))
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(THINGS)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_text(folder / "annotations" / f"instances_{split}.json", json.dumps(content) + "\n")
    return shown, places


def draw_contact_sheet(shown: list[Any], path: Path) -> Path:
    """Some tiles, below them the classes of their pixels, and below these their objects."""
    plt = pyplot()
    figure, axes = plt.subplots(3, len(shown), figsize=(1.9 * len(shown), 6.2), layout="constrained", squeeze=False)
    for column, (image, labels, masks, classes) in zip(axes.T, shown, strict=True):
        column[0].imshow(image)
        column[1].imshow(labels, vmin=1, vmax=len(CLASSES) + 1, cmap="tab10", interpolation="nearest")
        boxes = corner_boxes(np.array(masks).reshape(-1, *labels.shape))
        draw_instances(column[2], image, masks, boxes, [THINGS.index(name) for name in classes], THINGS)
        for axis in column:
            axis.set_axis_off()
    for axis, heading in zip(axes[:, 0], ("photograph", "pseudo-labels", "objects"), strict=True):
        axis.set_title(heading, fontsize=10, loc="left")
    return save(figure, path)


def write_photographs(out: Path, settings: Settings) -> str:
    """Write the data set unless it is there already.

    Returns:
        One line that says what the folder holds.

    Raises:
        ImportError: without scikit-image.
        OSError: if `out` is something else.
        ValueError: if `out` holds photographs of other settings.
    """
    written = make_once(out, lambda: _is_complete(out, settings), lambda: _write_photographs(out, settings))
    return written or f"{out} is complete already"


def _is_complete(out: Path, settings: Settings) -> bool:
    marker = out / "photographs.json"
    if not marker.is_file():
        return False
    found = read_json(marker)["settings"]
    if found != asdict(settings):
        raise ValueError(f"{out} holds photographs of other settings ({found}); choose another folder")
    return True


def _write_photographs(out: Path, settings: Settings) -> str:
    photos = {name: make() for name, make in SOURCES.items()}
    with whole_folder(out) as folder:
        written = {split: write_split(folder, photos, split, settings.size) for split in SPLITS}
        write_text(folder / "classes.txt", "\n".join([BACKGROUND, *CLASSES]) + "\n")
        draw_contact_sheet(written["test"][0], folder / "contact_sheet.png")
        places = [place for _, own in written.values() for place in own]
        versions = {name: version(name) for name in ("numpy", "scipy", "scikit-image")}
        content = {"settings": asdict(settings), "versions": versions, "tiles": places}
        write_text(folder / "photographs.json", json.dumps(content, indent=1) + "\n")
    return f"{out}: " + ", ".join(f"{len(places)} {split}" for split, (_, places) in written.items())


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.photographs()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: print(write_photographs(arguments.out, Settings(arguments.size))))


if __name__ == "__main__":
    sys.exit(main())
