"""Images and labels for classification: the three splits of a source, ready for a model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from tqdm.auto import tqdm

from tasks.classification.config import DataConfig

SPLITS = ("train", "validation", "test")
# Names that data sets in the wild give to each split's folder or file.
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
CACHE_LIMIT = 1 << 30


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


def load_data(config: DataConfig) -> ImageData:
    """Read a source and cut the splits it does not have.

    Raises:
        ValueError, OSError: naming the folder, file or column that is missing, empty or mislabelled.
    """
    reader = {"digits": _digits, "imagefolder": _image_folder, "parquet": _parquet}[config.source]
    data = reader(config)
    if "train" not in data.splits:
        raise ValueError(f"{config.path} has no training split, a folder or file named {SPLIT_NAMES['train'][0]}")
    left = 1.0  # share of the images that came without splits and are still in "train"
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        if split not in data.splits:
            train = data.splits["train"]
            kept, cut = stratified_cut(train.labels, fraction / left, config.split_seed)
            data.splits["train"], data.splits[split] = train.subset(kept), train.subset(cut)
            left -= fraction
    for split in SPLITS:
        if not len(data.splits[split]):
            raise ValueError(f"{data.description}: the {split} split is empty")
    return data


def stratified_cut(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, cut) such that every class gives the same share to `cut`, at least one image of two or more."""
    generator = np.random.default_rng(seed)
    kept, cut = [], []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(members))
        count = min(max(count, 1), len(members) - 1) if len(members) > 1 else 0
        cut.append(members[:count])
        kept.append(members[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(cut))


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


class ImageDataset(Dataset):
    """A split as a torch dataset of {"pixel_values": (channels, height, width) float32, "labels": int}.

    Args:
        images: the split.
        processor: image processor of the model.
        num_channels: 3, or 1 for grey images.
        cache: keep processed images in memory; None: if they stay below 1 GiB. Processing is deterministic, so doing
            it once is enough.
    """

    def __init__(self, images: Images, processor: Any, num_channels: int = 3, cache: bool | None = None) -> None:
        self.images = images
        self.processor = processor
        self.num_channels = num_channels
        size = processor.size
        count = len(images) * num_channels * size["height"] * size["width"] * 4
        self.cache = cache if cache is not None else count < CACHE_LIMIT
        self.pixels: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def fill_cache(self, show_progress: bool = False) -> None:
        """Process every image now; worker processes that start later share the memory."""
        if self.cache and self.pixels is None:
            indices = tqdm(range(len(self)), desc="reading images", disable=not show_progress or len(self) < 2000)
            self.pixels = torch.stack([self._process(index) for index in indices])

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A worker would fill a cache of its own, and again in every epoch.
        if get_worker_info() is None:
            self.fill_cache()
        pixels = self._process(index) if self.pixels is None else self.pixels[index]
        return {"pixel_values": pixels, "labels": int(self.images.labels[index])}

    def _process(self, index: int) -> torch.Tensor:
        image = self.images.read(index)
        if self.num_channels == 1:
            image = np.asarray(image.convert("L"))[..., None]
        return self.processor(image, return_tensors="pt")["pixel_values"][0]
