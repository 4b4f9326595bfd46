"""Table and picture of what clips cost (tasks/benchmark/video.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import INK, pyplot, save
from tasks.benchmark.report import COLOURS, MARKERS
from tasks.common.tables import markdown_table

Entry = Mapping[str, Any]
BASES = {"divided": "divided/dense", "joint": "joint/dense"}  # what rows are compared with
MEASURES = {"seconds": "seconds a clip", "gib": "GiB a clip"}


def table(entries: Sequence[Entry], limits: str, command: str, machine: Mapping[str, Any]) -> str:
    """A Markdown table of every size and row, and below it how it was measured.

    Args:
        entries: in order; measured ones have "seconds", "gib", "rounds" and "ran", others "left_out".
        limits: those of one measurement, in words.
        command: that made them.
        machine: `environment()`.
    """
    columns = ["pixels", "frames", "patch tokens", "row", "s a clip", "over dense", "GiB", "over dense"]
    columns += ["rounds", "ran"]
    rows = []
    for entry in entries:
        size = [str(entry[key]) for key in ("pixels", "frames", "tokens", "row")]
        if "left_out" in entry:
            rows.append([*size, entry["left_out"], *["-"] * 5])
            continue
        base = base_of(entry, entries)
        cells = []
        for key in MEASURES:
            cells += [f"{entry[key]:.3g}", "-" if base is None else f"{entry[key] / base[key]:.2f}"]
        rows.append([*size, *cells, str(entry["rounds"]), entry["ran"].split(" (")[0]])
    hardware, versions = machine["hardware"], machine["versions"]
    notes = (
        f"`{command}` on {hardware['cpu']}, torch {versions['torch']}, transformers {versions['transformers']}. A "
        "forward pass of one clip without gradients, whole models. Seconds: the median of the rounds, and in a round "
        "of up to five calls. GiB: weights, clip, tables and the peak of what torch allocates in a call. "
        f"{limits} What was not run was predicted from the row's three next shorter clips of the same size, as "
        "a + b F + c F^2 of F frames."
    )
    return f"{markdown_table(columns, rows)}\n\n{notes}"


def base_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The dense row of the same attention and size, if it was measured."""
    name = BASES.get(entry["row"].partition("/")[0])
    same = (own for own in entries if own["row"] == name and "seconds" in own)
    return next((own for own in same if (own["frames"], own["pixels"]) == (entry["frames"], entry["pixels"])), None)


def draw_clip_costs(entries: Sequence[Entry], path: Path, heading: str, memory_gib: float) -> Path:
    """Seconds and GiB over frames, a column for each size of frame; hollow marks are predictions, never run."""
    plt = pyplot()
    pixels = sorted({entry["pixels"] for entry in entries})
    names = list(dict.fromkeys(entry["row"] for entry in entries))
    figure, axes = plt.subplots(
        2, len(pixels), figsize=(4.8 * len(pixels) + 0.8, 7.6), squeeze=False, layout="constrained", sharex=True,
        sharey="row",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for column, size in enumerate(pixels):
        shown = [entry for entry in entries if entry["pixels"] == size]
        for axis, (key, label) in zip(axes[:, column], MEASURES.items(), strict=True):
            for number, name in enumerate(names):
                own = [entry for entry in shown if entry["row"] == name]
                handles |= _draw_row(axis, own, key, name, number)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            counts = sorted({entry["frames"] for entry in shown})
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.xaxis.set_minor_locator(plt.NullLocator())
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_ylabel(label if column == 0 else "")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        axes[0, column].set_title(f"{size} px", fontsize=10)
        axes[1, column].set_xlabel("frames")
        limit = axes[1, column].axhline(memory_gib, color=INK, linestyle=":", linewidth=1)
    handles["predicted, not run"] = plt.Line2D([], [], color=INK, marker="o", fillstyle="none", linestyle="--")
    handles["memory that was allowed"] = limit
    figure.suptitle(heading, fontsize=11)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save(figure, path)


def _draw_row(axis: Any, entries: Sequence[Entry], key: str, name: str, number: int) -> dict[str, Any]:
    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
    measured = [(entry["frames"], entry[key]) for entry in entries if key in entry]
    wanting = [(entry["frames"], entry["predicted"][key]) for entry in entries if entry.get("predicted")]
    (line,) = axis.plot(*(zip(*measured, strict=True) if measured else ([], [])), linewidth=1.5, **style)
    if wanting:
        axis.plot(*zip(*measured[-1:], *wanting, strict=True), linestyle="--", linewidth=1, fillstyle="none", **style)
    return {name: line}
