"""Small scenes with exact masks: python -m tasks.common.mm.scenes OUT [--train N --validation N --size 128 ...]

Handwritten digits (scikit-learn) and garments (Fashion-MNIST, Debian's package dataset-fashion-mnist) are pasted on
crops of the photos that scikit-image and scikit-learn carry; nothing is downloaded. There are eight classes: four
digits that differ in shape, and four kinds of garments that Fashion-MNIST's labels are grouped into. Dresses, which
look like several of these, and the other digits are left out.

A class has an eighth of the circle of hues, and an object has any colour of it. Shape alone takes longer to learn than
the few minutes that these scenes are for, and the photos have every colour too.

An object's pixels are set, not blended, and a later object covers an earlier one, so its mask is exactly the pixels
that show it. Training, validation and test scenes share neither a digit, nor a garment, nor a photo.

    OUT/images/{training,validation,test}/NAME.png             RGB
    OUT/annotations/{training,validation,test}/NAME.png        ADE20K's layout: uint8, 1 background, 2... the classes
    OUT/annotations/instances_{training,validation,test}.json  COCO's layout: masks as run lengths, exact areas, boxes
    OUT/classes.txt                                            background first, then the classes
    OUT/scenes.json                                            the settings
    OUT/contact_sheet.png                                      some scenes with their masks and boxes

0 is unused in the annotations: mmseg's `reduce_zero_label=True` makes background class 0. COCO's category ids are 1 to
8. A scene depends on the seed, its split and its number alone, so a smaller data set is the start of a larger one.
"""

from __future__ import annotations

import colorsys
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import pyplot, save
from hf_sparseprior.base.files import whole_folder, write_text
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources.arrays import read_digits, read_fashion_mnist
from hf_sparseprior.images.sources.images import Images
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.locks import make_once
from tasks.common.mm import commands
from tasks.common.mm.pictures import draw_instances

SPLITS = ("training", "validation", "test")
# Source and its labels (of Fashion-MNIST: T-shirt, pullover, coat and shirt; sandal, sneaker and ankle boot).
CLASSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "zero": ("digits", (0,)),
    "one": ("digits", (1,)),
    "four": ("digits", (4,)),
    "seven": ("digits", (7,)),
    "top": ("garments", (0, 2, 4, 6)),
    "trouser": ("garments", (1,)),
    "shoe": ("garments", (5, 7, 9)),
    "bag": ("garments", (8,)),
}
BACKGROUND = "background"
# Both motorcycle pictures show the same scene.
PHOTOS = {
    "training": (
        *("skimage/data/astronaut.png", "skimage/data/brick.png", "skimage/data/camera.png"),
        *("skimage/data/chelsea.png", "skimage/data/coffee.png", "skimage/data/gravel.png"),
        *("skimage/data/motorcycle_left.png", "skimage/data/motorcycle_right.png"),
        "sklearn/datasets/images/china.jpg",
    ),
    "validation": ("skimage/data/coins.png", "skimage/data/moon.png", "sklearn/datasets/images/flower.jpg"),
    "test": ("skimage/data/grass.png", "skimage/data/hubble_deep_field.jpg", "skimage/data/rocket.jpg"),
}
SHARES = {"training": 0.7, "validation": 0.1, "test": 0.2}  # shares of the digits and garments
THRESHOLDS = {"digits": 110, "garments": 40}  # grey value (of 255) from which an enlarged pixel belongs to the object
MAX_OBJECTS = 4
SIDES = (0.24, 0.5)  # sides of an object's square, as shares of the scene's side
MIN_VISIBLE = 0.25  # share of an object's pixels that must be seen, or it is left out
MIN_PIXELS = 40


@dataclass(frozen=True)
class SceneSettings:
    """What a data set is made from: number of scenes of each split, side in pixels, seed."""

    training: int = 1200
    validation: int = 100
    test: int = 200
    size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for split in SPLITS:
            if getattr(self, split) < 1:
                raise ValueError(f"number of {split} scenes {getattr(self, split)} must be at least 1")
        if not 64 <= self.size <= 512:
            raise ValueError(f"--size {self.size} must be between 64 and 512 pixels")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed} must not be negative")


@dataclass
class Layer:
    """One object before it is pasted.

    label: index into `CLASSES`; mask: bool (side, side); colours: uint8 RGB (side, side, 3);
    top, left: corner of its square in the scene.
    """

    label: int
    mask: np.ndarray
    colours: np.ndarray
    top: int
    left: int


@dataclass
class Scene:
    """A composed scene.

    image: uint8 RGB (size, size, 3). masks: bool (objects, size, size), the visible pixels of each object, disjoint.
    labels: indices into `CLASSES`.
    """

    image: np.ndarray
    masks: np.ndarray
    labels: list[int]

    def semantic(self) -> np.ndarray:
        """uint8 (size, size) as ADE20K stores it: 1 background, 2 and more the classes."""
        annotation = np.ones(self.image.shape[:2], dtype=np.uint8)
        for mask, label in zip(self.masks, self.labels, strict=True):
            annotation[mask] = label + 2
        return annotation


# ---- sources --------------------------------------------------------------------------------------------------------


def read_photos(split: str) -> list[np.ndarray]:
    """The photos of a split, uint8 RGB (height, width, 3), from the packages that carry them.

    Raises:
        ImportError: if scikit-image or scikit-learn is not installed.
        OSError: if a photo is missing in it.
    """
    from PIL import Image

    photos = []
    for name in PHOTOS[split]:
        package, _, file = name.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"the photos need {package}: pip install scikit-image scikit-learn")
        path = Path(spec.submodule_search_locations[0]) / file
        if not path.is_file():
            raise OSError(f"{path} is missing; the wheels of scikit-image and scikit-learn carry the photos")
        photos.append(np.asarray(Image.open(path).convert("RGB")))
    return photos


def read_objects(seed: int) -> dict[str, list[Images]]:
    """For each split, the images of each class in the order of `CLASSES`.

    A permutation that follows from the seed gives each split its share of a class. No image is in two splits.
    """
    sources = {
        "digits": read_digits(DataConfig(source="digits")).splits["train"],
        "garments": read_fashion_mnist(DataConfig(source="fashion_mnist")).splits["train"],
    }
    ends = np.cumsum([SHARES[split] for split in SPLITS])[:-1]
    objects: dict[str, list[Images]] = {split: [] for split in SPLITS}
    for index, (source, labels) in enumerate(CLASSES.values()):
        images = sources[source]
        members = np.flatnonzero(np.isin(images.labels, labels))
        order = np.random.default_rng([seed, index]).permutation(members)
        for split, part in zip(SPLITS, np.split(order, (ends * len(order)).astype(int)), strict=True):
            objects[split].append(images.subset(part))
    return objects


# ---- one scene ------------------------------------------------------------------------------------------------------


def crop_photo(photo: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """A random square of a photo, half to all of its shorter side, mirrored at random: uint8 RGB (size, size, 3)."""
    from PIL import Image

    height, width = photo.shape[:2]
    side = int(random.uniform(0.5, 1.0) * min(height, width))
    top, left = int(random.integers(height - side + 1)), int(random.integers(width - side + 1))
    square = Image.fromarray(photo[top : top + side, left : left + side])
    crop = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=2.0))
    return crop[:, ::-1] if random.random() < 0.5 else crop


def make_layer(label: int, grey: Any, size: int, random: np.random.Generator) -> Layer:
    """An object at random in its class's range of hues, size and position; garments are mirrored at random.

    Args:
        label: index into `CLASSES`.
        grey: PIL image, bright on black.
        size: side of the scene, pixels.
        random: generator that is drawn from.
    """
    from PIL import Image
    from scipy.ndimage import binary_fill_holes

    source = list(CLASSES.values())[label][0]
    side = int(random.uniform(*SIDES) * size)
    values = np.asarray(grey.convert("L").resize((side, side), Image.Resampling.BICUBIC))
    mask = values >= THRESHOLDS[source]
    if source == "garments":
        mask = binary_fill_holes(mask)  # black parts of a garment are as dark as what is around it
        if random.random() < 0.5:
            values, mask = values[:, ::-1], mask[:, ::-1]
    hue = (label + random.uniform(-0.5, 0.5)) / len(CLASSES) % 1.0
    colour = 255 * np.array(colorsys.hsv_to_rgb(hue, random.uniform(0.5, 1.0), random.uniform(0.8, 1.0)))
    shade = 0.35 + 0.65 * values[..., None] / 255
    top, left = (int(random.integers(size - side + 1)) for _ in range(2))
    return Layer(label, mask, (colour * shade).astype(np.uint8), top, left)


def compose(background: np.ndarray, layers: Sequence[Layer]) -> Scene:
    """Paste layers on a background, later ones over earlier ones.

    From the top layer down, an object is left out if the objects above it cover too much of it. So every pixel that
    shows an object is in a mask.

    Args:
        background: uint8 RGB (size, size, 3).
        layers: the objects, the lowest first.

    Returns:
        The scene, with its objects from the lowest to the topmost.
    """
    covered = np.zeros(background.shape[:2], dtype=bool)
    image, masks, labels = background.copy(), [], []
    for layer in reversed(layers):
        height, width = layer.mask.shape
        square = np.s_[layer.top : layer.top + height, layer.left : layer.left + width]
        seen = layer.mask & ~covered[square]
        if seen.sum() < max(MIN_PIXELS, MIN_VISIBLE * layer.mask.sum()):
            continue
        image[square][seen] = layer.colours[seen]
        covered[square] |= layer.mask
        mask = np.zeros_like(covered)
        mask[square] = seen
        masks.append(mask)
        labels.append(layer.label)
    stacked = np.stack(masks[::-1]) if masks else np.zeros((0, *covered.shape), dtype=bool)
    return Scene(image, stacked, labels[::-1])


def make_scene(
    photos: Sequence[np.ndarray], objects: Sequence[Images], size: int, random: np.random.Generator
) -> Scene:
    """A random scene: one photo, and one to `MAX_OBJECTS` objects whose classes are equally likely."""
    background = crop_photo(photos[int(random.integers(len(photos)))], size, random)
    layers = []
    for _ in range(random.integers(1, MAX_OBJECTS + 1)):
        label = int(random.integers(len(objects)))
        grey = objects[label].read(int(random.integers(len(objects[label]))))
        layers.append(make_layer(label, grey, size, random))
    return compose(background, layers)


def make_scenes(settings: SceneSettings, split: str, objects: Sequence[Images]) -> Iterator[Scene]:
    """Every scene of a split in order."""
    photos = read_photos(split)
    for number in range(getattr(settings, split)):
        random = np.random.default_rng([settings.seed, SPLITS.index(split), number])
        yield make_scene(photos, objects, settings.size, random)


# ---- annotations ----------------------------------------------------------------------------------------------------


def run_lengths(mask: np.ndarray) -> dict[str, list[int]]:
    """COCO's uncompressed run lengths of a bool mask: down the columns, starting with a run of zeros."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, flat.size]).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat[0] else counts}


def mask_box(mask: np.ndarray) -> list[int]:
    """COCO's box of a mask that is not empty: left, top, width, height in pixels."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1]


def corner_boxes(masks: np.ndarray) -> np.ndarray:
    """Boxes (objects, 4) of masks: left, top, right, bottom, the last two exclusive."""
    boxes = np.array([mask_box(mask) for mask in masks], dtype=np.int64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def scene_name(number: int) -> str:
    """File name of a scene."""
    return f"{number:05d}.png"


def write_split(folder: Path, settings: SceneSettings, split: str, objects: Sequence[Images]) -> Iterator[Scene]:
    """Write the images and annotations of a split, yielding each scene as it is written."""
    from PIL import Image

    for part in ("images", "annotations"):
        (folder / part / split).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, scene in enumerate(make_scenes(settings, split, objects)):
        name = scene_name(number)
        Image.fromarray(scene.image).save(folder / "images" / split / name)
        Image.fromarray(scene.semantic()).save(folder / "annotations" / split / name)
        images.append({"id": number, "file_name": name, "height": settings.size, "width": settings.size})
        for mask, label in zip(scene.masks, scene.labels, strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,  # pycocotools takes 0 to mean unmatched
                    "image_id": number,
                    "category_id": label + 1,
                    "bbox": mask_box(mask),
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": run_lengths(mask),
                }
            )
        yield scene
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(CLASSES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_text(folder / "annotations" / f"instances_{split}.json", json.dumps(content) + "\n")


def draw_contact_sheet(scenes: Mapping[str, Sequence[Scene]], path: Path) -> Path:
    """One row of scenes for each split, with their masks and boxes."""
    columns = max(map(len, scenes.values()))
    figure, axes = pyplot().subplots(
        len(scenes), columns, figsize=(2 * columns, 2.25 * len(scenes)), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for row, (split, shown) in zip(axes, scenes.items(), strict=True):
        row[0].set_title(split, loc="left", fontsize=10)
        for axis, scene in zip(row, shown, strict=False):
            draw_instances(axis, scene.image, scene.masks, corner_boxes(scene.masks), scene.labels, list(CLASSES))
    return save(figure, path)


def write_scenes(out: Path, settings: SceneSettings) -> str:
    """Write the data set unless it is there already.

    Returns:
        One line that says what the folder holds.

    Raises:
        OSError: if `out` is something else, Fashion-MNIST is not installed or a photo is missing.
        ValueError: if `out` holds scenes of other settings.
    """
    written = make_once(out, lambda: _is_complete(out, settings), lambda: _write_scenes(out, settings))
    return written or f"{out} is complete already"


def _is_complete(out: Path, settings: SceneSettings) -> bool:
    marker = out / "scenes.json"
    if not marker.is_file():
        return False
    found = read_json(marker)
    if found != asdict(settings):
        raise ValueError(f"{out} holds scenes of other settings ({found}); choose another folder")
    return True


def _write_scenes(out: Path, settings: SceneSettings) -> str:
    from tqdm import tqdm

    first: dict[str, list[Scene]] = {split: [] for split in SPLITS}
    with whole_folder(out) as folder:
        objects = read_objects(settings.seed)
        for split in SPLITS:
            scenes = write_split(folder, settings, split, objects[split])
            for scene in tqdm(scenes, split, total=getattr(settings, split), unit=" scenes", mininterval=0.5):
                if len(first[split]) < 6:
                    first[split].append(scene)
        write_text(folder / "classes.txt", "\n".join([BACKGROUND, *CLASSES]) + "\n")
        draw_contact_sheet(first, folder / "contact_sheet.png")
        write_text(folder / "scenes.json", json.dumps(asdict(settings), indent=1) + "\n")
    return f"{out}: " + ", ".join(f"{getattr(settings, split)} {split}" for split in SPLITS)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.scenes()
    arguments = vars(parser.parse_args(argv))
    out = arguments.pop("out")
    return run_command(parser.prog, lambda: print(write_scenes(out, SceneSettings(**arguments))))


if __name__ == "__main__":
    sys.exit(main())
