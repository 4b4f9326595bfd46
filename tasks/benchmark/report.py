"""What the benchmarks print, write and draw."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from tasks.classification.report import command_line, environment

BOUND_COLOUR = "#8a8a8a"
COLOURS = (ACCENT, "#2a7f9e", "#7a9e3f", "#8e5ea2", "#d9a441", "#4b6a53", "#b0578d", "#5f5f9e")
MARKERS = "osD^vPX*"


def provenance(name: str) -> dict[str, Any]:
    """What every results file of a benchmark begins with."""
    return {
        **{"task": "benchmark", "benchmark": name, "command": command_line()},
        **environment(),
        "load_average": os.getloadavg()[0],
    }


def print_provenance(results: Mapping[str, Any]) -> None:
    """Command, hardware and versions, and a warning if the machine is busy."""
    hardware, versions = results["hardware"], results["versions"]
    gpu = f", {hardware['gpu']}" if "gpu" in hardware else ""
    print(results["command"])
    print(f"{hardware['cpu']}, {hardware['cpu_cores']} cores, {hardware['cpu_threads']} threads{gpu}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if results["load_average"] > 0.5:
        print(f"other programs are running: load average {results['load_average']:.1f}")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def milliseconds(seconds: Mapping[str, float]) -> str:
    """Median and quartiles: "1.23 (1.20-1.31)"."""
    median, lower, upper = (_digits(1000 * seconds[key]) for key in ("median", "lower", "upper"))
    return f"{median} ({lower}-{upper})"


def megabytes(count: float) -> str:
    """Bytes in units of 10^6."""
    return _digits(count / 1e6)


def _digits(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def parse_sizes(flag: str, text: str) -> list[tuple[int, int]]:
    """ "196x8,1024x2" as pairs in ascending order.

    Raises:
        ValueError: for anything else.
    """
    pairs = []
    for part in filter(None, text.split(",")):
        numbers = part.split("x")
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"{flag} {text!r}: {part!r} must be two positive numbers, like 196x8")
        pairs.append((int(numbers[0]), int(numbers[1])))
    return sorted(set(pairs))


def check_positive(**values: float) -> None:
    """Raise ValueError for a flag whose value is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be above 0")


def parse_dtype(text: str) -> torch.dtype:
    """A torch dtype by name.

    Raises:
        ValueError: for another than the four floating ones.
    """
    names = ("float32", "bfloat16", "float16", "float64")
    if text not in names:
        raise ValueError(f"--dtype {text!r} must be one of {', '.join(names)}")
    return getattr(torch, text)


def parse_device(text: str) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: for one that is not.
    """
    if text not in ("cpu", "cuda"):
        raise ValueError(f"--device {text!r} must be cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device 'cuda': there is no CUDA device")
    return torch.device(text)


# ---- picture --------------------------------------------------------------------------------------------------------


@dataclass
class Panel:
    """Lines over the size: name to (x, spread of seconds). bound: the line drawn as what nothing can beat."""

    title: str
    lines: dict[str, list[tuple[int, dict[str, float]]]]
    bound: str
    crossing: tuple[float | None, str] = (None, "")


def crossover(
    sparse: Sequence[tuple[int, dict[str, float]]], dense: Sequence[tuple[int, dict[str, float]]], unit: str
) -> tuple[float | None, str]:
    """Size from which `sparse` stays faster than `dense`, between measured sizes along straight lines in log-log.

    Returns:
        the size, None where there is none to mark, and what to write.
    """
    dense_at = {x: seconds["median"] for x, seconds in dense}
    points = [(x, np.log(seconds["median"] / dense_at[x])) for x, seconds in sparse if x in dense_at]
    if not points:
        return None, ""
    if points[-1][1] >= 0:
        return None, f"not faster than dense up to {points[-1][0]} {unit}"
    for (x0, y0), (x1, y1) in reversed(list(pairwise(points))):
        if y0 >= 0 > y1:
            at = float(np.exp(np.log(x0) + (np.log(x1) - np.log(x0)) * y0 / (y0 - y1)))
            return at, f"faster than dense from {at:.0f} {unit}"
    return None, f"faster than dense at every size from {points[0][0]} {unit}"


def draw_times(panels: Sequence[Sequence[Panel]], path: Path, heading: str, xlabel: str) -> Path:
    """Time over size, both logarithmic: one panel each, quartiles as a band, the bound dashed, the crossover marked."""
    plt = pyplot()
    rows, columns = len(panels), max(len(row) for row in panels)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.8 * columns + 0.6, 3.9 * rows + 1.1), squeeze=False, layout="constrained", sharex=True
    )
    names = list(dict.fromkeys(name for row in panels for panel in row for name in panel.lines))
    bounds = {panel.bound for row in panels for panel in row}
    others = [name for name in names if name not in bounds]
    styles = {
        name: (COLOURS[(i - 1) % len(COLOURS)] if i else INK, MARKERS[i % len(MARKERS)])
        for i, name in enumerate(others)
    }
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, (panel for row in panels for panel in row), strict=True):
        handles |= _draw_panel(axis, panel, styles)
    for axis in axes[-1]:
        axis.set_xlabel(xlabel)
    for axis in axes[:, 0]:
        axis.set_ylabel("time an image, ms")
    figure.suptitle(heading, fontsize=11)
    order = [name for name in names if name in handles]
    figure.legend(
        [handles[n] for n in order], order, loc="outside lower center", ncols=min(5, len(order)), frameon=False
    )
    return save(figure, path)


def _draw_panel(axis: Any, panel: Panel, styles: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    handles = {}
    for name, points in panel.lines.items():
        x = [size for size, _ in points]
        median, lower, upper = ([1000 * seconds[key] for _, seconds in points] for key in ("median", "lower", "upper"))
        if name == panel.bound:
            style = {"color": BOUND_COLOUR, "linestyle": "--", "zorder": 1}
        else:
            style = {"color": styles[name][0], "marker": styles[name][1], "markersize": 4.5}
        (handles[name],) = axis.plot(x, median, linewidth=1.6, **style)
        axis.fill_between(x, lower, upper, color=style["color"], alpha=0.18, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = sorted({x for points in panel.lines.values() for x, _ in points})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(pyplot().NullLocator())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    at, text = panel.crossing
    if at is not None:
        axis.axvline(at, color=INK, linestyle=":", linewidth=1.2)
    axis.set_title(panel.title + (f"\n{text}" if text else ""), fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return handles
