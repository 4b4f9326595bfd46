"""Time and memory of backbones at the sizes of dense prediction: python -m tasks.benchmark.backbones

A forward pass of one image without gradients, as `backbone` of mmsegmentation and mmdetection runs it. Every
measurement is a process of its own: it makes the model and the image, calls once to make tables, and then times calls.
Memory is what torch allocates beyond model and image: tables that stay, and the peak of a call. Rounds go through all
sizes, models and priors and then start again, so that an early end leaves a fair comparison, and ratios to dense are
taken round by round.

OUT/records.json holds every measurement as soon as it is done, OUT/table.md the medians, OUT/backbones.png a picture.
The same command goes on where it was stopped; more models, priors, sizes or rounds may be asked for then. A measurement
that needs more memory or time than allowed leaves the reason instead, and is not tried in later rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.training import StopRequest
from tasks.benchmark import backbone_process, commands, records, report
from tasks.benchmark.model import DENSE, preset_config
from tasks.benchmark.records import LOCK as LOCK  # with `locked`, whoever must not disturb a folder takes it
from tasks.benchmark.records import Entry, Measurements, in_turns
from tasks.common.command import run_command
from tasks.common.locks import locked as locked
from tasks.common.tables import markdown_table

PRIORS = (DENSE, "fibottention", "violin", "fibottention+violin")
PICTURE = "backbones.png"
KEYS = ("model", "prior", "pixels")  # what makes a measurement this one, with its round


# ---- what is measured -----------------------------------------------------------------------------------------------


def plan(models: Sequence[str], priors: Sequence[str], sizes: Sequence[int], rounds: int) -> list[Entry]:
    """All measurements in order: rounds, in each of them sizes, models and priors, the priors in turns."""
    return [
        {"model": model, "prior": prior, "pixels": pixels, "round": number}
        for number in range(rounds)
        for pixels in sizes
        for model in models
        for prior in in_turns(priors, number)
    ]


def asked_for(arguments: argparse.Namespace) -> list[Entry]:
    """`plan` of the arguments."""
    chosen = (arguments.models, arguments.priors, sorted(arguments.sizes))
    models, priors, sizes = (list(dict.fromkeys(values)) for values in chosen)
    return plan(models, priors, sizes, arguments.rounds)


def measure(
    server: Any, entry: Entry, settings: Mapping[str, Any], limit: int, seconds: float, stop: StopRequest
) -> Any:
    """One measurement, as `Measurements` asks for it."""
    given = (entry["model"], entry["prior"], entry["pixels"], settings)
    return backbone_process.measured_alone(server, given, limit, seconds, stop)


def say(found: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    return f"{found['seconds']:.3f} s, {found['memory'] / 2**20:.0f} MiB, {found['ran']}"


def summary(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, size and prior: spreads of seconds and of the ratio to dense in the same rounds, the
    largest peak of memory, backend; or why it failed.
    """
    groups = records.rounds_by_kind(measured, ("model", "pixels", "prior"))
    rows = [
        {"model": model, "pixels": pixels, "prior": prior}
        | records.summary_row(rounds, groups.get((model, pixels, DENSE), {}))
        for (model, pixels, prior), rounds in groups.items()
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(row["model"] for row in rows))}
    return sorted(rows, key=lambda row: (order[row["model"]], row["pixels"]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    cells = []
    for row in rows:
        line = [row["model"], str(row["pixels"]), row["prior"]]
        if "seconds" not in row:
            cells.append([*line, *["-"] * 4, row["failed"]])
            continue
        line += [report.milliseconds(row["seconds"]), str(row["seconds"]["rounds"])]
        line += [records.ratio_text(row.get("times_dense"))]
        cells.append([*line, f"{row['memory'] / 2**20:.0f}", row.get("failed", row["ran"])])
    columns = ("backbone", "px", "prior", "ms (quartiles)", "rounds", "times dense", "MiB", "attention ran on")
    return markdown_table(columns, cells)


def draw(rows: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Time and memory over the size of the image, a column for each backbone."""
    plt = pictures.pyplot()
    models, priors = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "prior"))
    sizes = sorted({row["pixels"] for row in rows})
    figure, axes = plt.subplots(
        2, len(models), figsize=(3.6 * len(models) + 0.6, 6.6), layout="constrained", squeeze=False, sharex=True
    )
    colours = dict(zip(priors, [pictures.INK, pictures.ACCENT, *report.COLOURS], strict=False))
    for column, model in zip(axes.T, models, strict=True):
        for prior in priors:
            own = [r for r in rows if (r["model"], r["prior"]) == (model, prior) and "seconds" in r]
            style = {"color": colours[prior], "marker": "o", "markersize": 4, "label": prior}
            style |= {"linestyle": "--"} if "violin" in prior else {}
            column[0].plot([r["pixels"] for r in own], [r["seconds"]["median"] for r in own], **style)
            column[1].plot([r["pixels"] for r in own], [r["memory"] / 2**20 for r in own], **style)
        column[0].set_title(model, fontsize=10)
        column[1].set_xlabel("pixels a side")
        for axis in column:
            records.label_sizes(axis, sizes)
    axes[0, 0].set_ylabel("seconds an image")
    axes[1, 0].set_ylabel("memory of a call, MiB")
    figure.suptitle(heading, fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return pictures.save(figure, path)


# ---- command --------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, then print, write and draw all of it."""
    records.check_arguments(arguments)
    report.machine_of(arguments)
    arguments.threads = arguments.threads or torch.get_num_threads()
    for model in arguments.models:  # a bad name or size ends the command before the first measurement
        if preset_family(model).backbone is None:
            raise ValueError(f"--models {model}: {preset_family(model).title} has no backbone")
        for pixels in arguments.sizes:
            for prior in arguments.priors:
                preset_config(model, pixels, prior)
    records.measure_into(arguments, BACKBONES)


def write_report(
    arguments: argparse.Namespace, measured: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    """Table and picture of the measurements, and the table printed."""
    rows = summary(measured)
    hardware = {**about["hardware"], "cpu_threads": arguments.threads}
    machine = report.machine({**about, "hardware": hardware}, arguments.device)
    text = table(rows)
    written = records.write_table(arguments.out, f"{machine}, {arguments.dtype}, one image, no gradients", text)
    picture = draw(rows, arguments.out / PICTURE, f"Forward pass of one image, {arguments.dtype}, {machine}")
    print(f"\n{text}\n\n{written}, {picture}")


BACKBONES = Measurements(
    name="backbones",
    module=backbone_process.__name__,
    keys=KEYS,
    same=("dtype", "device", "threads", "keep_memory"),
    plan=asked_for,
    measure=measure,
    say=say,
    write_report=write_report,
)
todo = BACKBONES.todo


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.backbones()
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
