"""Small images read into memory at once: scikit-learn's digits, CIFAR's original archives, files in MNIST's format."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources import cifar
from hf_sparseprior.images.sources.images import ImageData, array_images, counts, data_folder
from hf_sparseprior.images.sources.tables import read_parquet

# Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
IDX_FILES = {"train": "train", "test": "t10k"}
IDX_IMAGES, IDX_LABELS = 2051, 2049  # magic numbers: unsigned bytes in 3 dimensions and in 1


def read_digits(config: DataConfig) -> ImageData:
    """scikit-learn's 1797 handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.clip(digits.images * (255.0 / 16.0), 0, 255).round().astype(np.uint8)
    splits = {"train": array_images(pixels, digits.target, "digits")}
    return ImageData(splits, [str(digit) for digit in range(10)], "scikit-learn digits, 1797 images of 8x8")


# ---- CIFAR ----------------------------------------------------------------------------------------------------------


def read_cifar10(config: DataConfig) -> ImageData:
    """CIFAR-10's original archive, the folder of its files, or the parquet files of fetch_cifar10."""
    return _read_cifar(config, "label", "label")


def read_cifar100(config: DataConfig) -> ImageData:
    """CIFAR-100's original archive, the folder of its files, or the hub's parquet; `label_column`: fine or coarse."""
    label = (config.label_column or "fine").removesuffix("_label")
    if label not in ("fine", "coarse"):
        raise ValueError(f"data.label_column={config.label_column!r} of cifar100 must be fine or coarse")
    return _read_cifar(config, label, f"{label}_label")


def _read_cifar(config: DataConfig, label: str, column: str) -> ImageData:
    version, path = config.source, Path(config.path or "")
    archive = cifar.find_archive(path, version)
    if archive is None and path.is_dir() and any(path.glob("train*.parquet")):
        return read_parquet(replace(config, source="parquet", label_column=column))
    if archive is None:
        layout = cifar.LAYOUTS[version]
        raise OSError(
            f"data.path={config.path} must be {layout.stem}-python.tar.gz or {layout.stem}-binary.tar.gz, a folder "
            f"that holds one of them or what it extracts to ({' or '.join(layout.folders)}), or a folder of "
            "train.parquet and test.parquet"
        )
    splits = {}
    for split, (images, labels) in cifar.read_archive(archive, version, label).items():
        cifar.check(split, images, labels, version, label)
        splits[split] = array_images(images, labels, f"{version} {split}")
    classes = list(cifar.CLASSES) if version == "cifar10" else cifar.read_class_names(archive, label)
    return ImageData(splits, classes, f"{version} from {archive.name} ({counts(splits)})")


# ---- MNIST's format -------------------------------------------------------------------------------------------------


def read_mnist(config: DataConfig) -> ImageData:
    """MNIST: its four idx files, plain or .gz."""
    return _read_idx_folder(data_folder(config), [str(digit) for digit in range(10)], "MNIST")


def read_fashion_mnist(config: DataConfig) -> ImageData:
    """Fashion-MNIST: its four idx files, plain or .gz. Without `data.path` it takes those of Debian's package."""
    if config.path is None and not Path(FASHION_MNIST).is_dir():
        raise OSError(
            f"{FASHION_MNIST} is not there; install it with `apt-get install dataset-fashion-mnist`, or give the "
            "folder of the four .gz files as data.path"
        )
    folder = data_folder(replace(config, path=config.path or FASHION_MNIST))
    return _read_idx_folder(folder, list(FASHION_CLASSES), "Fashion-MNIST")


def _read_idx_folder(folder: Path, classes: list[str], title: str) -> ImageData:
    splits = {}
    for split, prefix in IDX_FILES.items():
        images_file, labels_file = (_find_idx(folder, prefix, kind) for kind in ("images-idx3", "labels-idx1"))
        images, labels = _read_idx(images_file, IDX_IMAGES), _read_idx(labels_file, IDX_LABELS)
        if len(images) != len(labels) or not len(images):
            raise ValueError(f"{images_file} holds {len(images)} images, {labels_file} {len(labels)} labels")
        if labels.max() >= len(classes):
            raise ValueError(f"{labels_file}: label {labels.max()} must be below {len(classes)}")
        splits[split] = array_images(images, labels, f"{title} {split}")
    return ImageData(splits, classes, f"{title} in {folder} ({counts(splits)})")


def _find_idx(folder: Path, prefix: str, kind: str) -> Path:
    names = [f"{prefix}-{kind}-ubyte{ending}" for ending in (".gz", "")]
    names += [name.replace("-idx", ".idx") for name in names]  # some mirrors have renamed them like this
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise OSError(f"{folder} has no {names[0]} (nor {names[1]})")
    return found


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """An idx file of unsigned bytes: magic number, one size a dimension (all big-endian int32), values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read((limit := cifar.archive_limit()) + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OSError(f"{path} is not a whole gzip file ({error})") from None
    if len(content) > limit:
        raise OSError(f"{path} unpacks to more than the {limit} bytes of {cifar.ARCHIVE_LIMIT}")
    dimensions = magic & 255
    header = np.frombuffer(content[: 4 * (1 + dimensions)], dtype=">i4") if len(content) > 4 * dimensions + 3 else [0]
    if header[0] != magic:
        raise ValueError(f"{path}: magic number {int.from_bytes(content[:4], 'big')} must be {magic}")
    shape = tuple(int(size) for size in header[1:])
    values = np.frombuffer(content, dtype=np.uint8, offset=4 * (1 + dimensions))
    if min(shape) < 0 or len(values) != np.prod(shape):
        raise ValueError(f"{path}: {len(values)} bytes of values, its header says {'x'.join(map(str, shape))}")
    return values.reshape(shape)
