"""What `tasks.benchmark.gpu` writes: Markdown tables and pictures of what was counted and of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from tasks.common.tables import markdown_table

Row = dict[str, Any]

NEVER = "**Nothing here was measured on a GPU.** No number below is a time."
HOW_COUNTED = """By `python -m tasks.benchmark.gpu --count`, which needs no GPU: heads of width 64, one image, one class
token. Launches are compiled by Triton for compute capability 9.0 (H100, H200); registers and spills are ptxas's. Bytes
are what the kernels touch in Triton's interpreter, in copies (read q, k and v once and write the output once). Of
memory: each launch reads a byte once. Through L2: each program does. Forward needs 1 copy at least, backward 2. How
many of its 64 warps a multiprocessor holds follows from registers and shared memory."""
WINDOWS = ("flash_window", "flex_window", "natten")
# The project's targets on an H200 in bfloat16: times of a copy, from and to these numbers of tokens; times of flash
# attention.
COPIES, COPIES_FROM, COPIES_TO, DENSE_TIMES = 1.5, 4096, 65536, 1.15


# ---- counted --------------------------------------------------------------------------------------------------------


def total(row: Row, direction: str, key: str) -> float:
    """Sum of a number over the launches of one pass."""
    return sum(launch.get(key, 0) for launch in row["launches"] if launch["pass"] == direction)


def counted_tables(rows: Sequence[Row]) -> str:
    """Two tables: each pass of each case, and each launch of the largest size of each case."""
    passes = [
        [row["case"], str(row["tokens"]), direction, str(sum(x["pass"] == direction for x in row["launches"]))]
        + [f"{total(row, direction, key):.2f}" for key in ("memory", "cache")]
        for row in rows
        for direction in ("forward", "backward")
    ]
    largest = {row["case"]: row for row in rows}
    smallest = {row["case"]: row for row in reversed(rows)}
    shown = [row for case in largest for row in (smallest[case], largest[case])]
    launches = [
        [row["case"], str(row["tokens"]), f"`{x['name']}`"]
        + [str(x.get(key, "-")) for key in ("programs", "warps", "registers", "spilled", "shared")]
        + [f"{100 * x['occupancy']:.0f} %" if "occupancy" in x else "-"]
        for number, row in enumerate(shown)
        if row not in shown[:number]
        for x in row["launches"]
    ]
    return "\n\n".join(
        [
            markdown_table(["case", "patches", "pass", "launches", "copies of memory", "copies through L2"], passes),
            markdown_table(
                ["case", "patches", "launch", "programs", "warps", "registers", "spilled", "shared", "warps held"],
                launches,
            ),
        ]
    )  # fmt: skip


def draw_counted(rows: Sequence[Row], path: Path) -> Path:
    """Copies of memory of each case at its largest size, forward and backward, next to the least there can be."""
    plt = pyplot()
    largest = list({row["case"]: row for row in rows}.values())
    figure, axis = plt.subplots(figsize=(7.5, 0.7 * len(largest) + 1.6), layout="constrained")
    for number, row in enumerate(largest):
        for shift, direction, colour, least in ((-0.18, "forward", ACCENT, 1.0), (0.18, "backward", INK, 2.0)):
            height = {"height": 0.32, "color": colour, "label": direction if number == 0 else None}
            axis.barh(number + shift, total(row, direction, "memory"), **height)
            axis.plot([least] * 2, [number + shift - 0.17, number + shift + 0.17], color="0.6", linewidth=2)
    axis.set_yticks(range(len(largest)), [f"{row['case']}\n{row['tokens']} patches" for row in largest], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("bytes of memory in copies (read q, k, v, write the output), counted; grey: the least")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return save(figure, path)


# ---- measured -------------------------------------------------------------------------------------------------------


def add_ratios(rows: Sequence[Row], bandwidth: float) -> None:
    """Add how many times a copy's time a row takes, and how many times faster it is than dense attention."""
    for row in rows:
        if "median" not in row:
            continue
        same = [r for r in rows if all(r[key] == row[key] for key in ("part", "pass", "tokens", "batch"))]
        dense = next((r for r in same if r["contender"] in ("flash", "dense") and "median" in r), None)
        row["times_faster_than_dense"] = dense["median"] / row["median"] if dense else None
        if row["pass"] == "forward":
            row["times_copy_bound"] = row["median"] * bandwidth / row["bytes"]


def measured_table(rows: Sequence[Row]) -> str:
    """Medians with their spread, of rows that `add_ratios` has seen."""
    cells = []
    for row in rows:
        start = [row["part"], row["pass"], str(row["tokens"]), str(row["batch"]), row["contender"]]
        if "median" not in row:
            cells.append([*start, f"not run: {row['failed']}", "", "", ""])
            continue
        spread = f"{1e3 * row['low']:.3f}..{1e3 * row['high']:.3f}"
        faster, copies = row["times_faster_than_dense"], row.get("times_copy_bound")
        ratios = ["-" if value is None else f"{value:.2f}" for value in (copies, faster)]
        cells.append([*start, f"{1e3 * row['median']:.3f}", spread, *ratios])
    columns = ["what", "pass", "patches", "images", "contender", "ms", "10..90 %", "x copy", "x dense"]
    return markdown_table(columns, cells)


def _of(rows: Sequence[Row], part: str, tokens: int, contender: str, what: str = "median") -> float | None:
    """A number of the row of a forward pass, None where there is none."""
    keys = {"part": part, "tokens": tokens, "contender": contender, "pass": "forward"}
    return next((row.get(what) for row in rows if all(row[key] == value for key, value in keys.items())), None)


def targets(rows: Sequence[Row]) -> str:
    """The project's targets next to what was measured, by number of patches; "not measured" where nothing was."""
    cells = []

    def add(target: str, tokens: int, value: float | None, largest: float) -> None:
        said = "not measured" if value is None else f"{value:.2f}, {'met' if value <= largest else 'missed'}"
        cells.append([target, str(tokens), said])

    for tokens in sorted({row["tokens"] for row in rows if row["contender"] == "triton"}):
        own = _of(rows, "fibottention", tokens, "triton")
        windows = [x for name in WINDOWS if (x := _of(rows, "fibottention", tokens, name)) is not None]
        if COPIES_FROM <= tokens <= COPIES_TO:
            copies = _of(rows, "fibottention", tokens, "triton", "times_copy_bound")
            add(f"Fibottention, at most {COPIES} copies", tokens, copies, COPIES)
        ratio = own / min(windows) if own is not None and windows else None
        add("Fibottention, time over that of the fastest window of equal width below 1", tokens, ratio, 1.0)
        flash, violin = (_of(rows, "violin", tokens, name) for name in ("flash", "triton"))
        ratio = violin / flash if violin is not None and flash is not None else None
        add(f"VIOLIN over all pairs, at most {DENSE_TIMES} times flash attention", tokens, ratio, DENSE_TIMES)
    return markdown_table(["target, forward pass", "patches", "measured"], cells)


def draw_measured(rows: Sequence[Row], path: Path) -> Path | None:
    """Copies of time against patches, forward, one panel for each operator; None if there is nothing to draw."""
    timed = [row for row in rows if "times_copy_bound" in row]
    parts = list(dict.fromkeys(row["part"] for row in timed))
    if not parts:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(1, len(parts), figsize=(4.6 * len(parts), 3.8), layout="constrained", squeeze=False)
    for axis, part in zip(axes[0], parts, strict=True):
        for name in dict.fromkeys(row["contender"] for row in timed if row["part"] == part):
            points = [
                (r["tokens"], r["times_copy_bound"]) for r in timed if (r["part"], r["contender"]) == (part, name)
            ]
            style = {"color": ACCENT, "linewidth": 2.5} if name == "triton" else {"linewidth": 1.2}
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(part, fontsize=10)
        axis.set_xlabel("patches")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    axes[0][0].set_ylabel("time in copies")
    return save(figure, path)


# ---- the file -------------------------------------------------------------------------------------------------------


def results_text(records: Mapping[str, Any], counted: Sequence[Row]) -> str:
    """RESULTS.md of a folder: what was measured, if anything was, and what was counted."""
    parts = ["# Triton kernels on a GPU"]
    if records.get("hardware_name"):
        parts.append(
            f"{records['hardware_name']}, torch {records['torch']}, {records['dtype']}: `{records['command']}`"
        )
        parts += [records["note"]] if "note" in records else []
        wrong = [f"{step}: {error}" for step, error in records.get("failed", {}).items()]
        parts += ["Steps that failed: " + "; ".join(wrong)] if wrong else []
        checks = [
            [name, setting, f"{error:.1e}"] for name, x in records["checked"].items() for setting, error in x.items()
        ]
        parts += [
            "## Checked against `reference` in float64",
            markdown_table(["dtype", "setting", "largest difference"], checks),
        ]
        if tuned := records.get("tuned"):
            cells = [[name, str(x["chosen"] or "default"), str(x["tried"])] for name, x in tuned.items()]
            parts += ["## Block sizes", markdown_table(["kernel", "chosen", "tried, seconds"], cells)]
        parts += ["## Targets", targets(records["rows"]), "## Times", measured_table(records["rows"])]
        parts += ["![times](measured.png)"] if any("times_copy_bound" in row for row in records["rows"]) else []
    else:
        parts.append(NEVER)
    if counted:
        parts += [
            "## Counted",
            HOW_COUNTED,
            counted_tables(counted),
            "![copies](counted.png)",
        ]
    return "\n\n".join(parts) + "\n"
