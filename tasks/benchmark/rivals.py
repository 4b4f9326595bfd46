"""What a user would pick instead of sparse attention, side by side on CPU: python -m tasks.benchmark.rivals

One image through a ViT with random weights, without gradients, at several sizes and in float32 and bfloat16: dense
attention eager, compiled, in ONNX Runtime and in OpenVINO; token merging; windows; Fibottention. Every measurement is a
process of its own. Rounds go through all sizes, models, dtypes and contenders and then start again; ratios to dense
eager attention are taken in the same dtype, round by round. In the first round each contender's tokens are compared
with what is plainly computed in float32, and a wrong one is not timed.

OUT/records.json holds every measurement as soon as it is done, OUT/table.md the medians, OUT/rivals.png a picture. The
same command goes on where it was stopped, and may ask for more. A contender that does not run in a dtype, whose package
is missing, or that needs more memory or time than allowed leaves the reason as its result.
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
from hf_sparseprior.training import StopRequest
from tasks.benchmark import commands, lone_process, records, report, rival_process
from tasks.benchmark.contenders_of_rivals import BFLOAT16, RIVALS, check_problem
from tasks.benchmark.model import DENSE
from tasks.benchmark.records import Entry, Measurements, in_turns
from tasks.common.command import run_command
from tasks.common.tables import markdown_table

DTYPES = ("float32", BFLOAT16)
PICTURE = "rivals.png"
COMPILED = "_compiled"


# ---- what is measured -----------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> list[Entry]:
    """All measurements in order: rounds, in each of them sizes, models, dtypes and contenders, these in turns."""
    chosen = (sorted(arguments.sizes), arguments.models, arguments.dtypes, arguments.rivals)
    sizes, models, dtypes, rivals = (list(dict.fromkeys(values)) for values in chosen)
    return [
        {"model": model, "rival": rival, "dtype": dtype, "pixels": pixels, "round": number}
        for number in range(arguments.rounds)
        for pixels in sizes
        for model in models
        for dtype in dtypes
        for rival in in_turns(rivals, number)
    ]


def measure(
    server: Any, entry: Entry, settings: Mapping[str, Any], limit: int, seconds: float, stop: StopRequest
) -> Any:
    """One measurement, as `Measurements` asks for it; a refusal needs no process."""
    if (refused := RIVALS[entry["rival"]].why_not(entry["dtype"])) is not None:
        return refused
    return lone_process.measured_alone(server, rival_process.measure, (entry, settings), limit, seconds, stop)


def say(found: Mapping[str, Any]) -> str:
    """A measurement in a few words."""
    return f"{found['seconds']:.3f} s, first call {before_calls(found):.1f} s, {found['memory'] / 2**20:.0f} MiB"


def before_calls(record: Mapping[str, Any]) -> float:
    """Seconds until a first call has returned: export, compilation, and the call."""
    return sum(record["prepared"].values()) + record["first_call"]


# ---- table and picture ----------------------------------------------------------------------------------------------


def summary(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, size, dtype and contender: as `records.summary_row`, what happened before the first call,
    and the difference from what is plainly computed.
    """
    keys = ("model", "pixels", "dtype", "rival")
    groups = records.rounds_by_kind(measured, keys)
    rows = []
    for kind, rounds in groups.items():
        row = dict(zip(keys, kind, strict=True))
        row |= records.summary_row(rounds, groups.get((*kind[:-1], DENSE), {}))
        good = [record for record in rounds.values() if "failed" not in record]
        if good:
            row["before"] = max(before_calls(record) for record in good)
            row["counted"] = good[0]["counted"]
            row["difference"] = next((record["difference"] for record in good if "difference" in record), None)
        rows.append(row)
    places = [{name: number for number, name in enumerate(names)} for names in (_named(rows, "model"), DTYPES, RIVALS)]
    return sorted(
        rows,
        key=lambda r: (places[0][r["model"]], r["pixels"], places[1][r["dtype"]], places[2][r["rival"]]),
    )


def _named(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table. A contender without times has its reason in the last column."""
    cells = []
    for row in rows:
        line = [row["model"], str(row["pixels"]), row["dtype"], row["rival"]]
        if "seconds" not in row:
            cells.append([*line, *["-"] * 6, row["failed"]])
            continue
        line += [report.milliseconds(row["seconds"]), str(row["seconds"]["rounds"])]
        line += [records.ratio_text(row.get("times_dense")), f"{row['before']:.1f}"]
        line += [f"{row['memory'] / 2**20:.0f}{'*' * (row['counted'] == 'resident')}"]
        line += ["-" if row["difference"] is None else f"{row['difference']:.1e}"]
        cells.append([*line, row.get("failed", row["ran"])])
    columns = ("model", "px", "dtype", "contender", "ms (quartiles)", "rounds", "times dense eager")
    return markdown_table((*columns, "first call, s", "MiB", "difference", "ran on, or why not"), cells)


NOTES = """\
First call: seconds until it has returned, with export and compilation. MiB: what torch allocates beyond model and
image; with * what the process has in memory more than before the program was loaded, its weights included. Difference:
the largest one of the tokens, which have variance 1, from what is plainly computed in float32; with token merging, of
the class token. A contender whose difference is too large is not timed."""


def draw(rows: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Time in units of dense eager attention's over the size of the image: a row a dtype, a column a model."""
    plt = pictures.pyplot()
    models, sizes = _named(rows, "model"), sorted({row["pixels"] for row in rows})
    dtypes = [dtype for dtype in DTYPES if dtype in _named(rows, "dtype")]
    figure, axes = plt.subplots(
        *(len(dtypes), len(models)),
        figsize=(4.4 * len(models) + 0.8, 3.6 * len(dtypes) + 1.4),
        **{"layout": "constrained", "squeeze": False, "sharex": True, "sharey": True},
    )
    styles = _styles()
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, model in zip(line, models, strict=True):
            for rival, style in styles.items():
                place = (model, dtype, rival)
                own = [r for r in rows if (r["model"], r["dtype"], r["rival"]) == place and "times_dense" in r]
                if own:
                    axis.plot([r["pixels"] for r in own], [r["times_dense"]["median"] for r in own], **style)
            axis.set_title(f"{model}, {dtype}", fontsize=10)
            records.label_sizes(axis, sizes)
            report.label_numbers(axis)
        line[0].set_ylabel("times dense eager")
    for axis in axes[-1]:
        axis.set_xlabel("pixels a side")
    figure.suptitle(heading, fontsize=10)
    handles = {label: h for a in axes.flat for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
    names = [name for name in styles if name in handles]
    columns = max(1, int(figure.get_figwidth() // report.LEGEND_INCHES))
    figure.legend(
        [handles[n] for n in names], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    return pictures.save(figure, path)


def _styles() -> dict[str, dict[str, Any]]:
    """How each contender is drawn; compiled ones as their eager form, dashed."""
    colours = {DENSE: pictures.INK, "fibottention": pictures.ACCENT, "window": report.BOUND_COLOUR}
    free = iter(zip(report.COLOURS, report.MARKERS, strict=False))
    styles: dict[str, dict[str, Any]] = {}
    for name in RIVALS:
        eager = name.removesuffix(COMPILED)
        if eager in styles:
            styles[name] = {**styles[eager], "label": name, "linestyle": "--", "fillstyle": "none"}
            continue
        colour, marker = (colours[name], "o") if name in colours else next(free)
        width = 2.0 if name in colours else 1.3
        styles[name] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": width, "label": name}
    return styles


def write_report(
    arguments: argparse.Namespace, measured: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> None:
    """Table and picture of the measurements, and the table printed."""
    rows = summary(measured)
    machine = report.machine({**about, "hardware": {**about["hardware"], "cpu_threads": arguments.threads}}, "cpu")
    heading = f"Forward pass of one image, {machine}"
    text = table(rows)
    written = records.write_table(arguments.out, f"{heading}\n\n{NOTES}", text)
    picture = draw(rows, arguments.out / PICTURE, heading)
    print(f"\n{text}\n\n{NOTES}\n\n{written}, {picture}")


# ---- command --------------------------------------------------------------------------------------------------------

MEASUREMENTS = Measurements(
    name="rivals",
    module=rival_process.__name__,
    keys=("model", "rival", "dtype", "pixels"),
    same=("threads", "keep_memory"),
    plan=plan,
    measure=measure,
    say=say,
    write_report=write_report,
)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, then print, write and draw all of it."""
    records.check_arguments(arguments)
    for flag, known in (("dtypes", DTYPES), ("rivals", RIVALS)):
        for name in getattr(arguments, flag):
            if name not in known:
                raise ValueError(f"--{flag} {name!r} must be one of {', '.join(known)}")
    report.set_cpu(arguments)
    arguments.threads = arguments.threads or torch.get_num_threads()
    for model in arguments.models:  # a bad name or size ends the command before the first measurement
        for pixels in arguments.sizes:
            check_problem(model, pixels, arguments.rivals)
    records.measure_into(arguments, MEASUREMENTS)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.rivals()
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
