"""Tasks with spatial structure from real images: python -m tasks.classification.spatial OUT --cifar10 FOLDER

Four data sets of 32x32 pixels, OUT/TASK/{train,validation,test}.parquet with 1,000, 500 and 2,000 images:

    count        how many handwritten digits (1 to 6) lie on a photo
    position     in which cell of a 4x4 grid a garment lies on a photo
    orientation  which way a shoe on a photo is turned, in steps of 45 degrees
    fashion      what a garment is, without a photo

Digits are scikit-learn's, garments Fashion-MNIST's, photos CIFAR-10's test images, which no model here is trained on.
No photo, digit or garment is in two splits of a task. The same seed gives the same files, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import binary_fill_holes

from hf_sparseprior.analysis import pictures
from hf_sparseprior.images.config import SPLITS, DataConfig
from hf_sparseprior.images.sources import READERS, Images
from hf_sparseprior.images.sources.arrays import FASHION_CLASSES
from hf_sparseprior.images.sources.cifar import checksum
from hf_sparseprior.images.sources.tables import write_parquet
from hf_sparseprior.runs.command import run_command
from tasks.classification import commands

SIDE = 32
SIZES = {"train": 1000, "validation": 500, "test": 2000}

MOST_DIGITS = 6
GRID, STEP, JITTER = 4, 6, 2  # cells a side, pixels from cell to cell, largest shift inside a cell
GARMENT = 12  # pixels a side, so that GARMENT + STEP * (GRID - 1) + JITTER = SIDE
TURNS = 8
TURN_JITTER = 10.0  # degrees, less than half of the 45 between two classes
SHOE = 20  # pixels a side, before it is turned
SHOES = ("Sneaker", "Ankle boot")  # all with the toe to the left
DARK, BRIGHT = 50, 210  # mean brightness of an object on a bright and on a dark place

# SHA-256 over the pixels and then the labels of each split with seed 0, Pillow 12 and numpy 2; others may round
# otherwise.
CHECKSUMS: dict[str, dict[str, str]] = {
    "count": {
        "train": "bbf79a0e4fd5dc5bdcdb49498371c775aab7d04db234a357c8c8eb5585271229",
        "validation": "0b85101027d89530772d833ea39e236783a909127ea1c3561432c4794d4880c1",
        "test": "906ae04aec26717fbe1d1ba3f7fdcc96ef24bb9f24d59e09fb959fa159df6ceb",
    },
    "position": {
        "train": "49a452fbcf85be37bc23993eb91890f6859f994e2cbed9c51f22ba17c3714a11",
        "validation": "5c33427b86452812dfbbbfd05fb441a64d9e5e8504d76fec5e3017dcb442723b",
        "test": "e32582b47133304c6cb0fa2c3b9960cc1ce6ce24bd5106943959a3aad147d4b8",
    },
    "orientation": {
        "train": "0bfa9214c799490d2e6ac8159f488617fdfbad54de980438c0d703090356ed1b",
        "validation": "bcd1f9e0af6d24bc2f92debb4202247d28851c7d4a7f8c3645199fea3afe4d12",
        "test": "781536bfb0dc6b344de3e9ecc08d18fb541a9bbfb08025bcd87c107247fbe330",
    },
    "fashion": {
        "train": "a3240faa40df65bd67bbbd436211f438256e62538fc0faeceb3b89fae53f7ca4",
        "validation": "4b186604366ed271c8d83117b1851390876cef4aa5d78192fe2b1bcafea9b266",
        "test": "ebb38c66cdad4c9e11ae6a70def48dfc61043b5aa8082a9282bc81e79ede6dd8",
    },
}


@dataclass(frozen=True)
class Sources:
    """The images that tasks are made from, all pixels uint8.

    photos: (count, 32, 32, 3). digits: (count, 8, 8), ink is bright. garments: (count, 28, 28), background 0, the
    training images before the test images. kinds: (count,) class of each garment. test_garments: index of the first
    garment of the test images.
    """

    photos: np.ndarray
    digits: np.ndarray
    garments: np.ndarray
    kinds: np.ndarray
    test_garments: int


@dataclass(frozen=True)
class Pool:
    """What one split of a task is made from: indices into the arrays of `Sources`."""

    photos: np.ndarray
    digits: np.ndarray
    garments: np.ndarray


@dataclass(frozen=True)
class Example:
    """One image of a task, and how it was made.

    pixels: (32, 32, 3) uint8. label: class. photo: its index, None without one. objects: indices of the digits or of
    the garment. boxes: (left, top, width, height) in pixels that each object fills. angle: degrees, counter-clockwise.
    """

    pixels: np.ndarray
    label: int
    photo: int | None
    objects: list[int]
    boxes: list[tuple[int, int, int, int]]
    angle: float = 0.0


# ---- pasting --------------------------------------------------------------------------------------------------------


def paste(pixels: np.ndarray, light: np.ndarray, opacity: np.ndarray, left: int, top: int) -> None:
    """Lay an object over an image, in place: a dark object on a bright place, a bright one on a dark place.

    Args:
        pixels: (height, width, 3) uint8.
        light: (h, w) uint8, the object's brightness times opacity / 255; its mean is scaled to DARK or BRIGHT.
        opacity: (h, w) uint8, not all 0.
        left, top: its upper left corner.
    """
    height, width = opacity.shape
    below = pixels[top : top + height, left : left + width]
    wanted = DARK if np.average(below.mean(-1), weights=opacity) >= 128 else BRIGHT
    gain = wanted / 255.0 * opacity.sum() / max(light.sum(), 1)
    above = np.minimum(light * gain, opacity)
    below[:] = np.rint(above[..., None] + below * (1.0 - opacity[..., None] / 255.0)).astype(np.uint8)


def cut_out(garment: np.ndarray) -> tuple[Image.Image, Image.Image]:
    """A garment's (light, opacity) as grey images: light is 0 where it is transparent."""
    inside = binary_fill_holes(garment >= 8)
    return Image.fromarray(garment * inside), Image.fromarray(inside * np.uint8(255))


def turned(garment: np.ndarray, angle: float, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(light, opacity) of a garment of `side` pixels, turned counter-clockwise, on a canvas that holds any turn."""
    canvas = int(np.ceil(np.hypot(*garment.shape)))
    margin = (canvas - garment.shape[0]) // 2
    shrunk = round(canvas * side / garment.shape[0])
    layers = []
    for layer in cut_out(garment):
        whole = Image.new("L", (canvas, canvas))
        whole.paste(layer, (margin, margin))
        layers.append(
            whole.rotate(angle, Image.Resampling.BILINEAR).resize((shrunk, shrunk), Image.Resampling.BILINEAR)
        )
    return np.asarray(layers[0]), np.asarray(layers[1])


# ---- tasks ----------------------------------------------------------------------------------------------------------


def make_count(generator: np.random.Generator, label: int, number: int, pool: Pool, sources: Sources) -> Example:
    """label + 1 digits that do not touch."""
    photo = int(pool.photos[number])
    pixels = sources.photos[photo].copy()
    chosen = [int(digit) for digit in generator.choice(pool.digits, label + 1, replace=False)]
    height, width = sources.digits.shape[1:]
    corners = free_places(generator, len(chosen), height, width)
    for digit, (left, top) in zip(chosen, corners, strict=True):
        paste(pixels, sources.digits[digit], sources.digits[digit], left, top)
    return Example(pixels, label, photo, chosen, [(left, top, width, height) for left, top in corners])


def free_places(generator: np.random.Generator, count: int, height: int, width: int) -> list[tuple[int, int]]:
    """Upper left corners of `count` boxes with at least a pixel between any two."""
    places: list[tuple[int, int]] = []
    tries = 0
    while len(places) < count:
        left, top = int(generator.integers(SIDE - width + 1)), int(generator.integers(SIDE - height + 1))
        if all(abs(left - x) > width or abs(top - y) > height for x, y in places):
            places.append((left, top))
        tries += 1
        if tries % 100 == 0:  # the boxes placed so far leave no room
            places.clear()
    return places


def make_position(generator: np.random.Generator, label: int, number: int, pool: Pool, sources: Sources) -> Example:
    """A garment in cell `label` of the grid, counted row by row."""
    photo, garment = int(pool.photos[number]), int(pool.garments[number])
    pixels = sources.photos[photo].copy()
    row, column = divmod(label, GRID)
    left, top = (int(STEP * cell + generator.integers(JITTER + 1)) for cell in (column, row))
    light, opacity = (
        np.asarray(layer.resize((GARMENT, GARMENT), Image.Resampling.BILINEAR))
        for layer in cut_out(sources.garments[garment])
    )
    paste(pixels, light, opacity, left, top)
    return Example(pixels, label, photo, [garment], [(left, top, GARMENT, GARMENT)])


def make_orientation(generator: np.random.Generator, label: int, number: int, pool: Pool, sources: Sources) -> Example:
    """A shoe turned by about label * 45 degrees, near the middle."""
    shoes = pool.garments[np.isin(sources.kinds[pool.garments], [FASHION_CLASSES.index(name) for name in SHOES])]
    photo, shoe = int(pool.photos[number]), int(shoes[number])
    pixels = sources.photos[photo].copy()
    angle = 360.0 / TURNS * label + float(generator.uniform(-TURN_JITTER, TURN_JITTER))
    light, opacity = turned(sources.garments[shoe], angle, SHOE)
    left, top = (int(generator.integers(SIDE - len(light) + 1)) for _ in range(2))
    paste(pixels, light, opacity, left, top)
    return Example(pixels, label, photo, [shoe], [(left, top, *light.shape[::-1])], angle)


def make_fashion(generator: np.random.Generator, label: int, number: int, pool: Pool, sources: Sources) -> Example:
    """A garment of class `label` in the middle of black."""
    classes = len(FASHION_CLASSES)
    garment = int(pool.garments[sources.kinds[pool.garments] == label][number // classes])
    margin = (SIDE - sources.garments.shape[1]) // 2
    pixels = np.pad(sources.garments[garment], margin)[..., None].repeat(3, -1)
    side = sources.garments.shape[1]
    return Example(pixels, label, None, [garment], [(margin, margin, side, side)])


@dataclass(frozen=True)
class Task:
    """classes: their names; make: (generator, label, number of the image, pool, sources) -> image."""

    classes: tuple[str, ...]
    make: Callable[[np.random.Generator, int, int, Pool, Sources], Example]


TASKS = {
    "count": Task(tuple(str(count) for count in range(1, MOST_DIGITS + 1)), make_count),
    "position": Task(
        tuple(f"row {row}, column {column}" for row in range(1, GRID + 1) for column in range(1, GRID + 1)),
        make_position,
    ),
    "orientation": Task(tuple(f"{360 * turn // TURNS} degrees" for turn in range(TURNS)), make_orientation),
    "fashion": Task(FASHION_CLASSES, make_fashion),
}


# ---- data sets ------------------------------------------------------------------------------------------------------


def make_split(task: str, split: str, sources: Sources, size: int, seed: int = 0) -> list[Example]:
    """One split of a task. No class occurs more often than another by more than one.

    Raises:
        ValueError: if there are too few photos or garments for this many images.
    """
    generator = np.random.default_rng([seed, 1 + list(TASKS).index(task), SPLITS.index(split)])
    pool = make_pool(split, sources, generator, seed)
    classes = len(TASKS[task].classes)
    # Labels take turns: the n-th image of a class takes its n-th garment. The order of the images is drawn at the end.
    try:
        made = [TASKS[task].make(generator, number % classes, number, pool, sources) for number in range(size)]
    except IndexError:
        have = f"{len(pool.photos)} photos and {len(pool.garments)} garments"
        raise ValueError(f"{task}, {split}: {have} are too few for {size} images") from None
    return [made[number] for number in generator.permutation(size)]


def make_pool(split: str, sources: Sources, generator: np.random.Generator, seed: int) -> Pool:
    """The split's share of photos, digits and garments in a drawn order. Test garments are for test alone."""
    known, held = sources.test_garments, len(sources.garments)
    garments = np.arange(known, held) if split == "test" else share(known, split, seed, ("train", "validation"))
    whole = (share(len(sources.photos), split, seed), share(len(sources.digits), split, seed), garments)
    return Pool(*(generator.permutation(part) for part in whole))


def share(count: int, split: str, seed: int, splits: Sequence[str] = SPLITS) -> np.ndarray:
    """The indices below `count` that belong to a split. Their number is in proportion to the split's images."""
    order = np.random.default_rng([seed, 0]).permutation(count)
    ends = np.cumsum([SIZES[name] for name in splits]) * count // sum(SIZES[name] for name in splits)
    place = list(splits).index(split)
    return order[(0, *ends)[place] : ends[place]]


def read_sources(cifar10: str, fashion_mnist: str | None = None) -> Sources:
    """Photos, digits and garments from where `data.source` finds them."""
    digits = READERS["digits"](DataConfig(source="digits")).splits["train"]
    garments = READERS["fashion_mnist"](DataConfig(source="fashion_mnist", path=fashion_mnist)).splits
    photos = READERS["cifar10"](DataConfig(source="cifar10", path=cifar10)).splits
    if "test" not in photos:
        raise ValueError(f"{cifar10} has no test images of CIFAR-10")
    known, held = garments["train"], garments["test"]
    return Sources(
        _pixels(photos["test"]),
        _pixels(digits)[..., 0],
        np.concatenate([_pixels(known), _pixels(held)])[..., 0],
        np.concatenate([known.labels, held.labels]),
        len(known),
    )


def _pixels(images: Images) -> np.ndarray:
    return np.stack([np.asarray(images.read(index)) for index in range(len(images))])


def write_split(examples: Sequence[Example], classes: Sequence[str], path: Path) -> str:
    """Write images, labels and how they were made. Returns the SHA-256 of pixels and labels."""
    images = np.stack([example.pixels for example in examples])
    labels = np.array([example.label for example in examples], dtype=np.uint8)
    columns = {
        name: [getattr(example, name) for example in examples] for name in ("photo", "objects", "boxes", "angle")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(images, labels, classes, path, columns)
    return checksum(images, labels)


def draw_examples(made: Mapping[str, Sequence[Example]], path: Path, columns: int = 10) -> Path:
    """A row of examples for each task, with their labels."""
    figure, axes = pictures.pyplot().subplots(
        len(made), columns, figsize=(1.15 * columns, 1.45 * len(made)), layout="constrained", squeeze=False
    )
    for row, (task, examples) in zip(axes, made.items(), strict=True):
        for axis, example in zip(row, examples, strict=False):
            axis.imshow(example.pixels)
            axis.set_title(TASKS[task].classes[example.label], fontsize=8)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(task)
    return pictures.save(figure, path)


def _remark(found: str, task: str, split: str, seed: int) -> str:
    expected = CHECKSUMS.get(task, {}).get(split)
    if seed != 0 or expected is None:
        return ""
    return ", as published" if found == expected else f", published: {expected}"


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.spatial()
    arguments = parser.parse_args(argv)

    def work() -> None:
        if arguments.seed < 0:
            raise ValueError(f"--seed {arguments.seed} must be 0 or more")
        sources = read_sources(arguments.cifar10, arguments.fashion_mnist)
        shown: dict[str, list[Example]] = {}
        for task, about in TASKS.items():
            for split, size in SIZES.items():
                examples = make_split(task, split, sources, size, arguments.seed)
                path = arguments.out / task / f"{split}.parquet"
                found = write_split(examples, about.classes, path)
                print(f"{path}: {size} images, sha256 {found}{_remark(found, task, split, arguments.seed)}")
                shown.setdefault(task, examples)
        print(f"picture: {draw_examples(shown, arguments.picture or arguments.out / 'spatial_tasks.png')}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
