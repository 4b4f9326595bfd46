"""What exporting trained models costs: python -m tasks.benchmark.deployment NAME=FOLDER ... --images FOLDER

Each model is exported in every format and with every kind of weights that the format takes, by what `python -m
hf_sparseprior export --format` calls. Of each file there are its size, its accuracy on labelled images and that of the
model in PyTorch, and the time of one image: of the file, of a dense model of the same size in the same program, and of
the model in PyTorch with its kernels, in turns.

OUT/records.json holds every file as soon as it is measured, OUT/table.md all of them, OUT/deployment.png a picture. The
same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import file_sha256, write_text
from hf_sparseprior.cli.deployment import DEPLOYMENT, deploy
from hf_sparseprior.cli.export import saved_source
from hf_sparseprior.cli.runtimes import FORMATS, WEIGHTS
from tasks.benchmark import commands, report
from tasks.benchmark.records import TABLE, kept_of, measure_left, read_records, sole_use
from tasks.common.command import RunStopped, run_command
from tasks.common.tables import markdown_table

PICTURE = "deployment.png"
KEYS = ("model", "format", "weights")
MARKERS = {"float32": "o", "bfloat16": "s", "int8": "^"}
KEPT = ("prior", "image_size", "attention", "versions", "compared", "accuracy", "milliseconds", "quartiles")


def run(arguments: argparse.Namespace) -> None:
    """Measure what is left, and write table and picture."""
    transformers_logging.disable_progress_bar()
    report.set_cpu(arguments)
    if not arguments.images.exists():
        raise OSError(f"--images={arguments.images} does not exist")
    if arguments.limit is not None:
        report.check_positive(limit=arguments.limit)
        if arguments.images.suffix != ".parquet":
            raise ValueError(f"--limit {arguments.limit} is for a .parquet file, not for --images {arguments.images}")
    for name in arguments.formats:
        FORMATS[name].check_packages()
    models = named_models(arguments.models)
    with sole_use(arguments.out), tempfile.TemporaryDirectory() as scratch:
        images = arguments.images
        if images.suffix == ".parquet":
            images = unpacked(images, Path(scratch), arguments.limit)
        measure_all(arguments, models, images)


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


def measure_all(arguments: argparse.Namespace, models: Mapping[str, Path], images: Path) -> None:
    """`run` in a folder that no other process measures in."""
    settings = {
        "threads": torch.get_num_threads(),
        "keep_memory": arguments.keep_memory,
        "images": sum(path.is_file() for path in images.rglob("*")),
        "images_sha256": images_sha256(images),
    }
    records = read_records(arguments.out, settings)
    hashes = {name: file_sha256(folder / "model.safetensors") for name, folder in models.items()}
    for record in records:
        if hashes.get(record["model"], record["model_sha256"]) != record["model_sha256"]:
            raise ValueError(f"--out={arguments.out} has files of another model {record['model']!r}; choose another")
    done = {tuple(record[key] for key in KEYS) for record in records}
    plan = [
        (name, format_name, weights)
        for name in models
        for format_name in arguments.formats
        for weights in ("float32", *(own for own, formats in WEIGHTS.items() if format_name in formats))
    ]
    left = [entry for entry in plan if entry not in done]
    about = report.provenance("deployment", arguments)
    report.print_provenance(about)

    def measure(entry: tuple[str, str, str]) -> dict[str, Any]:
        name, format_name, weights = entry
        found = measured(models[name], format_name, None if weights == "float32" else weights, images)
        extra = {"model_sha256": hashes[name], "load_average": os.getloadavg()[0]}
        return {**dict(zip(KEYS, entry, strict=True)), **extra, **found}

    def say(entry: tuple[str, str, str], record: dict[str, Any]) -> str:
        return f"{' '.join(entry)}: {said(record)}"

    content = {**kept_of(about), "settings": settings}
    stopped = measure_left(arguments.out, content, records, left, measure, say)
    if records:
        write_report(arguments, sorted(records, key=lambda own: plan_place(plan, own)), about, settings["images"])
    if stopped:
        raise RunStopped("stopped; the same command goes on")


def plan_place(plan: Sequence[tuple[str, ...]], record: Mapping[str, Any]) -> int:
    """Where a record is in the plan; those of earlier commands come last."""
    entry = tuple(record[key] for key in KEYS)
    return plan.index(entry) if entry in plan else len(plan)


def measured(model: Path, format_name: str, weights: str | None, images: Path) -> dict[str, Any]:
    """A file's size in bytes and what its deployment.json says; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            deploy(model, out, format_name, weights=weights, labelled=images)
        except ValueError as error:  # of a model that a program cannot run
            return {"failed": str(error)}
        about = json.loads((out / DEPLOYMENT).read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in out.iterdir() if path.suffix != ".json")
    return {"bytes": size, **{key: about[key] for key in KEPT}}


# ---- report ---------------------------------------------------------------------------------------------------------


def said(record: Mapping[str, Any]) -> str:
    """A record in a line."""
    if "failed" in record:
        return record["failed"]
    times, share = record["milliseconds"], record["accuracy"]
    return (
        f"{report.megabytes(record['bytes'])} MB, {100 * share['file']:.2f} % ({100 * share['pytorch']:.2f} % in "
        f"PyTorch), {times['file']:.2f} ms ({times['pytorch']:.2f} ms in PyTorch)"
    )


def _time(record: Mapping[str, Any], name: str) -> str:
    if name not in record["milliseconds"]:
        return "-"
    lower, upper = record["quartiles"][name]
    return f"{record['milliseconds'][name]:.2f} ({lower:.2f}-{upper:.2f})"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each file."""
    rows = []
    for record in records:
        head = [record["model"], FORMATS[record["format"]].title, record["weights"]]
        if "failed" in record:
            rows.append([*head, "-", record["failed"], "", "", "", ""])
            continue
        share = record["accuracy"]
        rows.append(
            [
                *head,
                report.megabytes(record["bytes"]),
                f"{100 * share['file']:.2f}",
                f"{100 * share['pytorch']:.2f}",
                *(_time(record, name) for name in ("file", "dense", "pytorch")),
            ]
        )
    columns = ["model", "program", "weights", "MB", "accuracy, %", "in PyTorch, %"]
    return markdown_table([*columns, "ms an image", "dense there, ms", "in PyTorch, ms"], rows)


def write_report(
    arguments: argparse.Namespace, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any], images: int
) -> None:
    """Table and picture of the files, and the table printed."""
    machine = f"{report.machine(about, 'cpu')}. {images} images"
    line, text = f"{machine}; times are medians and quartiles of one image.", table(records)
    write_text(arguments.out / TABLE, f"{line}\n\n{text}\n")
    heading = f"{machine}; median time of one image"
    picture = draw_picture([own for own in records if "failed" not in own], arguments.out / PICTURE, heading)
    print(f"\n{text}\n\n{line}\n{arguments.out / TABLE}, {picture}")


def draw_picture(records: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Accuracy over time, a panel for each program; PyTorch with the kernels of this package is hollow."""
    plt = pictures.pyplot()
    formats = list(dict.fromkeys(record["format"] for record in records)) or list(FORMATS)
    figure, axes = plt.subplots(
        1, len(formats), figsize=(3.9 * len(formats) + 0.8, 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    colours = dict(zip(dict.fromkeys(record["model"] for record in records), report.COLOURS * 9, strict=False))
    for axis, name in zip(axes.flat, formats, strict=True):
        for record in (own for own in records if own["format"] == name):
            style = {"color": colours[record["model"]], "linestyle": "none", "markersize": 7}
            times, share = record["milliseconds"], record["accuracy"]
            axis.plot(times["file"], 100 * share["file"], MARKERS[record["weights"]], **style)
            if record["weights"] == "float32":
                axis.plot(times["pytorch"], 100 * share["pytorch"], "o", fillstyle="none", **style)
        axis.set_title(FORMATS[name].title, fontsize=10)
        axis.set_xlabel("ms an image")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("accuracy, %")
    shown = [
        plt.Line2D([], [], color=colour, marker="o", linestyle="none", label=name) for name, colour in colours.items()
    ]
    shown += [
        plt.Line2D([], [], color=pictures.INK, marker=marker, linestyle="none", label=f"weights of {name}")
        for name, marker in MARKERS.items()
        if any(record["weights"] == name for record in records)
    ]
    hollow = {"color": pictures.INK, "marker": "o", "linestyle": "none", "fillstyle": "none"}
    shown.append(plt.Line2D([], [], label="the model in PyTorch, with kernels", **hollow))
    figure.legend(handles=shown, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=10)
    return pictures.save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.deployment()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
