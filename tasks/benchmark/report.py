"""What the benchmarks print, write and draw."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark.commands import DTYPES
from tasks.common.environment import command_line, environment
from tasks.common.run_folder import check_place

BOUND_COLOUR = "#8a8a8a"
COLOURS = ("#2a7f9e", "#7a9e3f", "#8e5ea2", "#d9a441", "#4b6a53", "#b0578d", "#5f5f9e")
# Environment variables that change times: of the C library, OpenMP and this library.
VARIABLES = ("GLIBC_", "MALLOC_", "LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "MKL_", "SPARSEPRIOR_")
MARKERS = "s^vPX*<"


def provenance(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What every results file of a benchmark starts with."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    return {
        **{"task": "benchmark", "benchmark": name, "command": command_line(), "settings": settings},
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(VARIABLES)},
        **environment(),
        "load_average": os.getloadavg()[0],
    }


def print_provenance(results: Mapping[str, Any]) -> None:
    """Command, hardware and versions, and a warning if the machine is busy."""
    hardware, versions = results["hardware"], results["versions"]
    gpu = f", {hardware['gpu']}" if "gpu" in hardware else ""
    variables = [f"{key}={shlex.quote(value)}" for key, value in results["environment"].items()]
    print(" ".join([*variables, results["command"]]))
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


def machine(results: Mapping[str, Any], device: str) -> str:
    """The hardware in a few words."""
    hardware = results["hardware"]
    if device == "cuda":
        return hardware["gpu"]
    threads = hardware["cpu_threads"]
    return f"{hardware['cpu']}, {threads} thread{'s' * (threads > 1)}"


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


def check_file(out: Path) -> None:
    """Raise ValueError or OSError if results cannot be written into a file, before anything is measured."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; it must be a file, like {out / 'results.json'}")
    check_place(out.parent, "--out")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In what an earlier measurement differs from this one, in words; "" if in nothing. `here` has what is compared."""
    different = {key: (there.get(key), value) for key, value in here.items() if there.get(key) != value}
    return "; ".join(f"{key}: {before!r} there, {now!r} here" for key, (before, now) in different.items())


def machine_of(arguments: argparse.Namespace) -> tuple[torch.dtype, torch.device]:
    """What `add_machine_arguments` asked for, checked; sets torch's threads and the allocator.

    Raises:
        ValueError: for a value that is not allowed.
    """
    if arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype {arguments.dtype!r} must be one of {', '.join(DTYPES)}")
    if arguments.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {arguments.device!r} must be cpu or cuda")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device 'cuda': there is no CUDA device")
    set_cpu(arguments)
    return getattr(torch, arguments.dtype), torch.device(arguments.device)


def set_cpu(arguments: argparse.Namespace) -> None:
    """Set torch's threads and the allocator as `add_cpu_arguments` asked for.

    Raises:
        ValueError: for a value that is not allowed.
    """
    if arguments.threads is not None:
        check_positive(threads=arguments.threads)
        torch.set_num_threads(arguments.threads)
    if arguments.keep_memory and not keep_freed_memory():
        raise ValueError("--keep-memory: this C library has no such setting")


def from_yaml(flag: str, text: str) -> Any:
    """A value as configurations write it.

    Raises:
        ValueError: if it is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {text!r} must be a name or a dict in YAML: {str(error).splitlines()[0]}") from None


def an_image(seconds: Mapping[str, float], batch: int) -> dict[str, float]:
    """A spread of seconds a call as seconds an image."""
    return {part: seconds[part] / batch for part in ("median", "lower", "upper")}


# ---- picture --------------------------------------------------------------------------------------------------------

LEGEND_INCHES = 2.1  # for a single entry
LEGEND_INCHES_OF_LINE, LEGEND_INCHES_OF_LETTER = 0.6, 0.08  # of size 9
RING = "faster than dense from here on"
Line = list[tuple[int, dict[str, float]]]


@dataclass
class Panel:
    """Time over size.

    lines: name to (size, spread of seconds). base: the line that others may cross. bound: the dashed line that nothing
    should beat. best: the line that stands out, if any. remark: a second line of the title.
    """

    title: str
    lines: dict[str, Line]
    base: str
    bound: str
    best: str | None = None
    remark: str = ""

    def crossovers(self) -> dict[str, tuple[float, float]]:
        """Where each line falls below the base for good, if it does: (size, seconds)."""
        base = self.lines.get(self.base, [])
        others = {name: line for name, line in self.lines.items() if name not in (self.base, self.bound)}
        return {name: place for name, line in others.items() if (place := crossover(line, base)) is not None}


def crossover(line: Line, base: Line) -> tuple[float, float] | None:
    """(size, seconds) where `line` falls below `base` for good, along straight lines in log-log between measured sizes.

    None if it is below from the first size that both have, or not below at the last.
    """
    base_at = {size: seconds["median"] for size, seconds in base}
    points = [
        (np.log(size), np.log(seconds["median"]), np.log(base_at[size])) for size, seconds in line if size in base_at
    ]
    if not points or points[-1][1] >= points[-1][2]:
        return None
    for (x0, y0, base0), (x1, y1, base1) in reversed(list(pairwise(points))):
        if y0 >= base0:
            share = (y0 - base0) / ((y0 - base0) - (y1 - base1))
            return float(np.exp(x0 + share * (x1 - x0))), float(np.exp(y0 + share * (y1 - y0)))
    return None


def crossover_text(name: str, line: Line, base: Line, unit: str) -> str:
    """From which size on a line is below the base, in words."""
    base_at = {size: seconds["median"] for size, seconds in base}
    shared = [(size, seconds["median"]) for size, seconds in line if size in base_at]
    if not shared:
        return ""
    if (crossing := crossover(line, base)) is not None:
        return f"{name} is faster than dense from {crossing[0]:.0f} {unit} on"
    if shared[-1][1] < base_at[shared[-1][0]]:
        return f"{name} is faster than dense wherever both ran"
    return f"{name} is not faster than dense at {shared[-1][0]} {unit}"


def draw_times(panels: Sequence[Sequence[Panel]], path: Path, heading: str, xlabel: str) -> Path:
    """Rows of panels, both axes logarithmic: quartiles as a band, the bound dashed, crossovers with the base ringed."""
    plt = pyplot()
    rows, columns = len(panels), max(len(row) for row in panels)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns + 0.8, 3.9 * rows + 1.2), squeeze=False, layout="constrained", sharex=True
    )
    flat = [panel for row in panels for panel in row]
    styles = _styles(flat)
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, flat, strict=True):
        handles |= _draw_panel(axis, panel, styles)
    for axis in axes[-1]:
        axis.set_xlabel(xlabel)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms an image")
    figure.suptitle(heading, fontsize=11)
    names = [name for name in (*styles, RING) if name in handles]
    widest = max(LEGEND_INCHES, LEGEND_INCHES_OF_LINE + LEGEND_INCHES_OF_LETTER * max(map(len, names), default=0))
    columns = max(1, int(figure.get_figwidth() // widest))
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    return save(figure, path)


def _styles(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """How each line is drawn, the same in every panel."""
    styles: dict[str, dict[str, Any]] = {}
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    others = ((COLOURS[n % len(COLOURS)], MARKERS[(n + n // len(COLOURS)) % len(MARKERS)]) for n in count())
    for name in names:
        if any(name == panel.bound for panel in panels):
            styles[name] = {"color": BOUND_COLOUR, "linestyle": "--", "linewidth": 1.4, "zorder": 1}
        elif any(name == panel.base for panel in panels):
            styles[name] = {"color": INK, "marker": "o", "linewidth": 2.2, "zorder": 3}
        elif any(name == panel.best for panel in panels):
            styles[name] = {"color": ACCENT, "marker": "D", "linewidth": 2.2, "zorder": 3}
        else:
            colour, marker = next(others)
            styles[name] = {"color": colour, "marker": marker, "linewidth": 1.3, "zorder": 2}
    return styles


def _draw_panel(axis: Any, panel: Panel, styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    handles = {}
    for name, points in panel.lines.items():
        sizes = [size for size, _ in points]
        median, lower, upper = ([1000 * seconds[key] for _, seconds in points] for key in ("median", "lower", "upper"))
        (handles[name],) = axis.plot(sizes, median, markersize=4.5, **styles[name])
        axis.fill_between(sizes, lower, upper, color=styles[name]["color"], alpha=0.18, linewidth=0)
    handles |= _mark_crossovers(axis, panel, styles)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = sorted({size for points in panel.lines.values() for size, _ in points})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(pyplot().NullLocator())
    label_numbers(axis)
    axis.set_title("\n".join(filter(None, (panel.title, panel.remark))), fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return handles


def label_numbers(axis: Any) -> None:
    """Plain numbers on a logarithmic y axis: powers of ten, and 2 and 5 between them where these are few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if axis.get_yscale() != "log":  # it has no lines
        return
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _mark_crossovers(axis: Any, panel: Panel, styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    from matplotlib.patheffects import withStroke

    handles = {}
    found = sorted((*place, styles[name]["color"]) for name, place in panel.crossovers().items())
    # The numbers of neighbours on the same line go to one side of it and the other by turns.
    for number, (size, seconds, colour) in enumerate(found):
        at = (size, 1000 * seconds)
        axis.plot(*at, "o", markersize=10, fillstyle="none", color=colour, zorder=4)
        (handles[RING],) = axis.plot([], [], "o", markersize=10, fillstyle="none", color=INK)
        offset, side = ((-9, 7), "right") if number % 2 else ((9, -14), "left")
        axis.annotate(
            f"{size:.0f}",
            at,
            offset,
            textcoords="offset points",
            ha=side,
            color=colour,
            fontsize=9,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
    return handles
