"""Where images and labels come from: one reader a source, registered by its name in a configuration's `data.source`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.classification.config import DataConfig

SPLITS = ("train", "validation", "test")
# Names that data sets in the wild give to each split's folder or file.
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass
class Images:
    """One split: `read(index)` gives a PIL image, `labels[index]` its class."""

    read: Callable[[int], Any]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: np.ndarray) -> Images:
        """The images at these indices."""
        return Images(lambda index: self.read(int(indices[index])), self.labels[indices])


@dataclass
class ImageData:
    """Every split of a source and the names of its classes."""

    splits: dict[str, Images]
    classes: list[str]
    description: str


def _digits(config: DataConfig) -> ImageData:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.clip(digits.images * (255.0 / 16.0), 0, 255).round().astype(np.uint8)
    images = Images(lambda index: Image.fromarray(pixels[index]).convert("RGB"), digits.target.astype(np.int64))
    return ImageData({"train": images}, [str(digit) for digit in range(10)], "scikit-learn digits, 1797 images of 8x8")


def _image_folder(config: DataConfig) -> ImageData:
    from PIL import Image

    root = Path(config.path or "")
    if not root.is_dir():
        raise OSError(f"data.path={config.path} is not a folder")
    folders = {
        split: next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), None) for split in SPLITS
    }
    # A folder of class folders without any split is all training images.
    if all(folder is None for folder in folders.values()):
        folders["train"] = root
    if folders["train"] is None:
        raise ValueError(f"{root} has no folder train")
    classes = sorted(entry.name for entry in os.scandir(folders["train"]) if _is_class(entry))
    if len(classes) < 2:
        raise ValueError(f"{folders['train']} must hold one folder for each of two or more classes, found {classes}")
    splits = {}
    for split, folder in folders.items():
        if folder is None:
            continue
        files, labels = _list_images(folder, classes)
        splits[split] = Images(_file_reader(Image, files), np.array(labels, dtype=np.int64))
    counts = ", ".join(f"{len(images)} {split}" for split, images in splits.items())
    return ImageData(splits, classes, f"images in {root.name} ({counts})")


def _is_class(entry: os.DirEntry) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    files: list[Path] = []
    labels: list[int] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_file() and Path(entry.name).suffix.lower() in IMAGE_ENDINGS:
            raise ValueError(f"{entry.path} lies outside the class folders, so it has no label")
        if not _is_class(entry):
            continue
        if entry.name not in classes:
            raise ValueError(f"{entry.path}: class {entry.name!r} is not among the training classes {list(classes)}")
        own = sorted(path for path in Path(entry.path).rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)
        if not own:
            raise ValueError(f"{entry.path} holds no image ({', '.join(IMAGE_ENDINGS)})")
        files += own
        labels += [classes.index(entry.name)] * len(own)
    if not files:
        raise ValueError(f"{folder} holds no class folder with images")
    return files, labels


def _file_reader(image_module: Any, files: Sequence[Path]) -> Callable[[int], Any]:
    def read(index: int) -> Any:
        try:
            with image_module.open(files[index]) as image:
                return to_rgb(image)
        except (OSError, ValueError, SyntaxError) as error:
            raise OSError(f"{files[index]} is not a readable image ({error})") from None

    return read


def to_rgb(image: Any) -> Any:
    """A PIL image as 8-bit RGB. Pillow's own conversion clips 16-bit grey to 255; here it is scaled."""
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save 8-bit or 16-bit images")
    return image.convert("RGB")


def _parquet(config: DataConfig) -> ImageData:
    from datasets import ClassLabel, Image, load_dataset

    root = Path(config.path or "")
    if not root.is_dir():
        raise OSError(f"data.path={config.path} is not a folder")
    files = {
        split: [str(path) for name in SPLIT_NAMES[split] for path in sorted(root.glob(f"{name}*.parquet"))]
        for split in SPLITS
    }
    files = {split: paths for split, paths in files.items() if paths}
    if "train" not in files:
        raise ValueError(f"{root} has no train*.parquet")
    try:
        tables = load_dataset("parquet", data_files=files)
    except Exception as error:  # datasets raises its own types, pyarrow's among their causes
        cause = error.__cause__ or error
        raise OSError(f"{root}: the parquet files cannot be read ({str(cause).splitlines()[0]})") from None
    columns = tables["train"].column_names
    for name, field in ((config.image_column, "image_column"), (config.label_column, "label_column")):
        if name not in columns:
            raise ValueError(f"data.{field}={name!r} is not among the columns {columns} of {root}")
    feature = tables["train"].features[config.label_column]
    splits = {}
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        encode = {index: index for index in range(len(classes))}
    else:
        values = set(tables["train"][config.label_column])
        if None in values:
            raise ValueError(f"{root}, train: {config.label_column} is missing for some images")
        values = sorted(values)
        classes = [str(value) for value in values]
        encode = {value: index for index, value in enumerate(values)}
    if len(classes) < 2:
        raise ValueError(f"{root} must hold two or more classes, found {classes}")
    for split in files:
        try:
            table = tables[split].cast_column(config.image_column, Image())
        except Exception as error:  # pyarrow's own types
            raise ValueError(f"{root}: column {config.image_column!r} holds no images ({error})") from None
        raw = tables[split][config.label_column]
        unknown = Counter(value for value in raw if value not in encode)
        if unknown:
            value, count = unknown.most_common(1)[0]
            raise ValueError(f"{root}, {split}: label {value!r} ({count} images) is not among the classes {classes}")
        labels = np.array([encode[value] for value in raw], dtype=np.int64)
        splits[split] = Images(_table_reader(table, config.image_column, f"{root}, {split}"), labels)
    counts = ", ".join(f"{len(images)} {split}" for split, images in splits.items())
    return ImageData(splits, classes, f"parquet in {root.name} ({counts})")


def _table_reader(table: Any, column: str, where: str) -> Callable[[int], Any]:
    def read(index: int) -> Any:
        try:
            return to_rgb(table[index][column])
        except (OSError, ValueError, SyntaxError, AttributeError) as error:
            raise OSError(f"{where}: row {index} is not a readable image ({error})") from None

    return read


READERS: dict[str, Callable[[DataConfig], ImageData]] = {
    "digits": _digits,
    "imagefolder": _image_folder,
    "parquet": _parquet,
}
