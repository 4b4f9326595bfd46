"""What `gpu --count` writes: tables and a picture of what was counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.runs.tables import markdown_table

Row = dict[str, Any]

NEVER = "**Nothing here was measured on a GPU.** No number below is a time."
HOW_COUNTED = """By `python -m tasks.benchmark gpu --count`, which needs no GPU: heads of width 64, one image, one class
token. Launches are compiled by Triton for compute capability 9.0 (H100, H200); registers and spills are ptxas's. Bytes
are what the kernels touch in Triton's interpreter, in copies (read q, k and v once and write the output once). Of
memory: each launch reads a byte once. Through L2: each program does. Forward needs 1 copy at least, backward 2. How
many of its 64 warps a multiprocessor holds follows from registers and shared memory."""


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


def counted_text(rows: Sequence[Row]) -> str:
    """A page of what was counted."""
    return "\n\n".join(
        ["# Triton kernels, counted", NEVER, HOW_COUNTED, counted_tables(rows), "![copies](counted.png)\n"]
    )
