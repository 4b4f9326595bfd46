"""What exporting trained models costs.

Each model is exported in every format and with every kind of weights that the format takes, by what `python -m
hf_sparseprior export --format` calls. Of each file there are its size, its accuracy on labelled images and that of the
model in PyTorch, and the time of one image: of the file, of a dense model of the same size in the same program, and of
the model in PyTorch with its kernels, in turns.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.cli.deployment import DEPLOYMENT, deploy
from hf_sparseprior.cli.export import saved_source
from hf_sparseprior.cli.runtimes import FORMATS, WEIGHTS
from tasks.benchmark import deployment_times, report
from tasks.benchmark.commands import PRESETS_TIMED
from tasks.benchmark.entry import Benchmark, Case, Row, Session

KEPT = ("prior", "image_size", "attention", "versions", "compared", "accuracy", "milliseconds", "quartiles")


def named_models(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name.

    Raises:
        ValueError: for what is not NAME=FOLDER, and a name that comes twice. OSError: for what is no saved model.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise ValueError(f"{text!r} must be NAME=FOLDER")
        if name in found:
            raise ValueError(f"{text!r}: the name {name!r} is taken by {found[name]}")
        found[name] = saved_source(folder)[0]
    return found


def unpacked(file: Path, folder: Path, limit: int | None = None) -> Path:
    """Write the images of a .parquet file of `datasets`, the first `limit`, into a folder for each class.

    Raises:
        ValueError: for a file without images and classes with names.
    """
    import datasets

    # Not a copy of the file in the user's cache.
    data = datasets.Dataset.from_parquet(str(file), cache_dir=str(folder / ".cache"))
    kinds = {type(feature): name for name, feature in data.features.items()}
    if not {datasets.Image, datasets.ClassLabel} <= set(kinds):
        raise ValueError(f"--images={file} must have a column of images and one of classes with names")
    image, label = kinds[datasets.Image], kinds[datasets.ClassLabel]
    out, names = folder / "images", data.features[label].names
    for name in names:
        (out / name).mkdir(parents=True)
    data = data.cast_column(image, datasets.Image(decode=False))
    for number, row in enumerate(data.select(range(min(len(data), limit or len(data))))):
        (out / names[row[label]] / f"{number:06d}.png").write_bytes(row[image]["bytes"])
    return out


def images_sha256(folder: Path) -> str:
    """SHA-256 of the names and contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def measured_file(model: Path, format_name: str, weights: str | None, images: Path) -> dict[str, Any]:
    """A file's size in bytes and what its deployment.json says; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            deploy(model, out, format_name, weights=weights, labelled=images)
        except ValueError as error:  # of a model that a program cannot run
            return {"failed": str(error)}
        about = read_json(out / DEPLOYMENT, RECORD_BYTES)
        size = sum(path.stat().st_size for path in out.iterdir() if path.suffix != ".json")
    return {"bytes": size, **{key: about[key] for key in KEPT}}


class Deployment(Benchmark):
    """The entry for saved models."""

    def variant(self, arguments: argparse.Namespace) -> Benchmark:
        """Without models, times of presets."""
        return self if arguments.models or arguments.images else deployment_times.BENCHMARK.variant(arguments)

    def check(self, arguments: argparse.Namespace) -> None:
        """Models, images and packages; a .parquet file is unpacked into a folder that goes with the command."""
        transformers_logging.disable_progress_bar()
        if not (arguments.models and arguments.images):
            raise ValueError("NAME=FOLDER and --images go together; without both, times of presets are measured")
        for name in PRESETS_TIMED:
            if (value := getattr(arguments, name)) is not None:
                raise ValueError(
                    f"--{name} {' '.join(map(str, value))} is for presets, without NAME=FOLDER and --images"
                )
        if not arguments.images.exists():
            raise OSError(f"--images={arguments.images} does not exist")
        if arguments.limit is not None:
            report.check_positive(limit=arguments.limit)
            if arguments.images.suffix != ".parquet":
                raise ValueError(
                    f"--limit {arguments.limit} is for a .parquet file, not for --images {arguments.images}"
                )
        for name in arguments.formats:
            FORMATS[name].check_packages()
        arguments.models = named_models(arguments.models)
        arguments.folder = arguments.images
        if arguments.images.suffix == ".parquet":
            arguments.scratch = tempfile.TemporaryDirectory()  # it goes with the arguments
            arguments.folder = unpacked(arguments.images, Path(arguments.scratch.name), arguments.limit)
        files = [path for path in arguments.folder.rglob("*") if path.is_file()]
        arguments.images, arguments.images_sha256 = len(files), images_sha256(arguments.folder)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """A case for each file."""
        for name in arguments.models:
            for form in arguments.formats:
                for weights in ("float32", *(own for own, formats in WEIGHTS.items() if form in formats)):
                    yield [{"model": name, "format": form, "weights": weights}]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """What the file's deployment.json says."""
        name, form, weights = cases[0].values()
        folder = session.arguments.models[name]
        found = measured_file(folder, form, None if weights == "float32" else weights, session.arguments.folder)
        return [{**cases[0], "model_sha256": file_sha256(folder / "model.safetensors"), **found}]

    def check_records(self, records: Sequence[Case], arguments: argparse.Namespace) -> None:
        """Raise ValueError if a model of the folder is another one."""
        hashes = {name: file_sha256(folder / "model.safetensors") for name, folder in arguments.models.items()}
        for record in records:
            if hashes.get(record["model"], record["model_sha256"]) != record["model_sha256"]:
                said = f"--out={arguments.out} has files of another model {record['model']!r}"
                raise ValueError(f"{said}; choose another")

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What was measured."""
        return f"{settings['images']} images; times are medians and quartiles of one image."


def share(where: str) -> Any:
    """A cell of an accuracy."""
    return lambda row: f"{100 * row['records'][0]['accuracy'][where]:.2f}"


def time_of(name: str) -> Any:
    """A cell of a time with its quartiles."""

    def cell(row: Row) -> str:
        record = row["records"][0]
        if name not in record["milliseconds"]:
            return "-"
        lower, upper = record["quartiles"][name]
        return f"{record['milliseconds'][name]:.2f} ({lower:.2f}-{upper:.2f})"

    return cell


BENCHMARK = Deployment(
    name="deployment",
    keys=("model", "format", "weights"),
    machine=("threads", "keep_memory"),
    same=("images", "images_sha256"),
    only_these_columns=True,
    columns={
        "MB": lambda row: report.megabytes(row["records"][0]["bytes"]),
        "accuracy, %": share("file"),
        "in PyTorch, %": share("pytorch"),
        "ms an image": time_of("file"),
        "dense there, ms": time_of("dense"),
        "in PyTorch, ms": time_of("pytorch"),
    },
    bar=("ms an image", lambda row: row["records"][0]["milliseconds"]["file"]),
)
