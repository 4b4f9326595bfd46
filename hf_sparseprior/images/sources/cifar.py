"""The original archives of CIFAR-10 and CIFAR-100, Python and binary versions.

The Python versions are pickles. They are read by walking their opcodes; nothing in them is ever executed.
"""

from __future__ import annotations

import hashlib
import pickletools
import tarfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.limits import limit_of

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
PIXELS = 32 * 32 * 3
# SHA-256 over the pixels of all images in the original order (row, column, channel; uint8) and then the labels (uint8).
CHECKSUMS = {
    "train": "f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b",
    "test": "8193b3fbce55bec361cd1b8fd4880cb1649832dc4d6de6da1e7a21847a4843aa",
}

# Environment variable: the bytes that the files of an archive, which are all held in memory, may have unpacked. The
# default, 1 GiB, is five times what CIFAR's archives hold.
ARCHIVE_LIMIT = "SPARSEPRIOR_ARCHIVE_BYTES"

Split = tuple[np.ndarray, np.ndarray]  # images (count, 32, 32, 3) uint8, labels (count,) uint8


@dataclass(frozen=True)
class Layout:
    """The names inside one version's archives.

    stem: the archives are called stem-python.tar.gz and stem-binary.tar.gz.
    folders: what they extract to.
    batches: the files of each split; those of the binary version end in .bin.
    labels: {kind of label: number of classes}, in the order of the binary version's label bytes.
    """

    stem: str
    folders: tuple[str, str]
    batches: dict[str, tuple[str, ...]]
    labels: dict[str, int]


LAYOUTS = {
    "cifar10": Layout(
        "cifar-10",
        ("cifar-10-batches-py", "cifar-10-batches-bin"),
        {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
        {"label": 10},
    ),
    "cifar100": Layout(
        "cifar-100",
        ("cifar-100-python", "cifar-100-binary"),
        {"train": ("train",), "test": ("test",)},
        {"coarse": 20, "fine": 100},
    ),
}


def find_archive(path: Path, version: str) -> Path | None:
    """The archive, or the folder of its files, that a path is or contains; None if there is none."""
    layout = LAYOUTS[version]
    first = layout.batches["train"][0]
    candidates = [path, *(path / name for name in layout.folders)]
    for folder in candidates:
        if (folder / first).is_file() or (folder / f"{first}.bin").is_file():
            return folder
    files = [path, *(path / f"{layout.stem}-{kind}.tar.gz" for kind in ("python", "binary"))]
    return next((file for file in files if file.is_file()), None)


def read_archive(path: Path, version: str, label: str) -> dict[str, Split]:
    """Every split of an archive or of a folder of its files.

    Args:
        path: as `find_archive` gives it.
        version: "cifar10" or "cifar100".
        label: "label" of CIFAR-10, "fine" or "coarse" of CIFAR-100.

    Raises:
        OSError: for missing or unreadable files.
    """
    layout = LAYOUTS[version]
    names = [name for batch in layout.batches.values() for name in batch]
    files = read_members(path, [*names, *(f"{name}.bin" for name in names)])
    place = list(layout.labels).index(label)
    result = {}
    for split, batches in layout.batches.items():
        parts = []
        for name in batches:
            if f"{name}.bin" in files:
                parts.append(_read_binary_batch(files[f"{name}.bin"], f"{path}: {name}.bin", len(layout.labels), place))
            elif name in files:
                key = "labels" if version == "cifar10" else f"{label}_labels"
                parts.append(read_python_batch(files[name], f"{path}: {name}", key))
            else:
                raise OSError(f"{path} holds neither {name} nor {name}.bin")
        planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
        result[split] = planes.transpose(0, 2, 3, 1), np.concatenate([labels for _, labels in parts])
    return result


def read_class_names(path: Path, label: str) -> list[str]:
    """The class names of a CIFAR-100 archive, "fine" or "coarse"; those of CIFAR-10 are `CLASSES`."""
    files = read_members(path, ["meta", f"{label}_label_names.txt"])
    if f"{label}_label_names.txt" in files:
        names = files[f"{label}_label_names.txt"].decode().split()
    elif "meta" in files:
        names = _strings_after(files["meta"], f"{label}_label_names", f"{path}: meta")
    else:
        raise OSError(f"{path} holds neither meta nor {label}_label_names.txt, so the classes have no names")
    count = LAYOUTS["cifar100"].labels[label]
    if len(set(names)) != count:
        raise OSError(f"{path}: {len(set(names))} different {label} class names, expected {count}")
    return names


def _read_binary_batch(content: bytes, name: str, label_bytes: int, place: int) -> Split:
    """Pixels (count, 3072) and labels (count,) of an original binary batch: label bytes and pixels, image by image."""
    if not content or len(content) % (label_bytes + PIXELS):
        raise OSError(f"{name} is not a CIFAR batch: {len(content)} bytes, expected {label_bytes + PIXELS} an image")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, label_bytes + PIXELS)
    return rows[:, label_bytes:], rows[:, place]


def read_python_batch(content: bytes, name: str, key: str = "labels") -> Split:
    """Pixels (count, 3072) and labels (count,) of an original Python batch, without unpickling it.

    A batch is a pickled dict with lists of small integers, one of them under `key`, and one array `data`, whose bytes
    are the one string constant that is thousands of bytes long. Both are constants of the opcode stream.
    """
    pixels, labels, reading = b"", [], False
    for opcode, argument in _opcodes(content, name):
        text = argument.encode("latin1", "replace") if isinstance(argument, str) else argument
        if isinstance(text, bytes):
            if len(text) > PIXELS:
                pixels = text
            elif text:
                reading = text == key.encode()
        elif reading and opcode in ("BININT1", "BININT", "INT"):
            labels.append(int(argument))
    if not labels or len(pixels) != PIXELS * len(labels) or not 0 <= min(labels) <= max(labels) < 256:
        raise OSError(f"{name} is not a CIFAR batch: {len(labels)} {key} and {len(pixels)} bytes of pixels")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(-1, PIXELS), np.array(labels, dtype=np.uint8)


def _strings_after(content: bytes, key: str, name: str) -> list[str]:
    """The strings of the list under a key of a pickled dict of lists of strings, without unpickling it."""
    names: list[str] = []
    reading = False
    for _, argument in _opcodes(content, name):
        text = argument.decode("latin1") if isinstance(argument, bytes) else argument
        if isinstance(text, str) and text.endswith("_label_names"):
            reading = text == key
        elif isinstance(text, str) and reading:
            names.append(text)
    return names


def _opcodes(content: bytes, name: str) -> list[tuple[str, Any]]:
    try:
        return [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(content)]
    except ValueError as error:
        raise OSError(f"{name} is not a CIFAR batch ({error})") from None


def archive_limit() -> int:
    """Bytes that the files of an archive may have unpacked."""
    return limit_of(ARCHIVE_LIMIT, 1 << 30)


def check_bytes(size: int, what: str) -> None:
    """Raise OSError if so many unpacked bytes are more than the limit."""
    if size > (limit := archive_limit()):
        raise OSError(f"{what} to {size} bytes, more than the {limit} of {ARCHIVE_LIMIT}")


def read_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The files in an archive or a folder that have these names without folders, as far as it has them."""
    if path.is_dir():
        found = [entry for entry in path.rglob("*") if entry.name in names and entry.is_file()]
        check_bytes(sum(entry.stat().st_size for entry in found), f"{path}: what is read comes")
        return {entry.name: entry.read_bytes() for entry in found}
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and Path(member.name).name in names]
            check_bytes(sum(member.size for member in members), "it unpacks")
            files = {Path(member.name).name: archive.extractfile(member) for member in members}
            return {name: file.read() for name, file in files.items() if file is not None}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = first_line(error)  # tarfile has a line for every compression that it tried
        raise OSError(f"{path} is not a readable archive or folder ({reason})") from None


def checksum(images: np.ndarray, labels: np.ndarray) -> str:
    """SHA-256 of pixels and labels."""
    digest = hashlib.sha256(np.ascontiguousarray(images, dtype=np.uint8).data)
    digest.update(np.ascontiguousarray(labels, dtype=np.uint8).data)
    return digest.hexdigest()


def check(split: str, images: np.ndarray, labels: np.ndarray, version: str = "cifar10", label: str = "label") -> None:
    """Raise ValueError unless a split has the published counts and balance, and for CIFAR-10 the published content."""
    where, count, classes = f"{LAYOUTS[version].stem.upper()} {split}", COUNTS[split], LAYOUTS[version].labels[label]
    if images.shape != (count, 32, 32, 3) or labels.shape != (count,):
        raise ValueError(f"{where}: images {images.shape} and labels {labels.shape}, expected {count} of each, 32x32x3")
    per_class = np.bincount(labels, minlength=classes)
    if len(per_class) != classes or (per_class != count // classes).any():
        raise ValueError(f"{where}: {_runs(per_class)} images per class, expected {count // classes} each")
    if version == "cifar10" and (found := checksum(images, labels)) != CHECKSUMS[split]:
        raise ValueError(f"{where}: checksum {found} is not {CHECKSUMS[split]}; the images are not the original")


def _runs(per_class: np.ndarray) -> str:
    return f"{per_class.min()} to {per_class.max()}"
