"""What the benchmarks check, print, write and draw: one table and one picture for every entry."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.tables import markdown_table
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark.commands import DTYPES
from tasks.benchmark.timing import ratio_spread, spread

if TYPE_CHECKING:
    from tasks.benchmark.entry import Benchmark, Case, Row

COLOURS = ("#2a7f9e", "#7a9e3f", "#8e5ea2", "#d9a441", "#4b6a53", "#b0578d", "#5f5f9e")
# Environment variables that change times: of the C library, OpenMP and this library.
VARIABLES = ("GLIBC_", "MALLOC_", "LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "MKL_", "SPARSEPRIOR_")
MARKERS = "s^vPX*<"
NOT_MEASURED = "not measured"


# ---- options --------------------------------------------------------------------------------------------------------


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


def check_machine(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options of all entries that are not allowed."""
    limits = ("rounds", "seconds", "memory_gib", "for_seconds", "threads")
    given = {name: getattr(arguments, name) for name in limits}
    check_positive(
        **{name: value for name, value in given.items() if value is not None and (name, value) != ("rounds", 0)}
    )
    if arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype {arguments.dtype!r} must be one of {', '.join(DTYPES)}")
    if arguments.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {arguments.device!r} must be cpu or cuda")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device 'cuda': there is no CUDA device")


def set_cpu(threads: int | None, keep_memory: bool) -> None:
    """Set torch's threads and the allocator.

    Raises:
        ValueError: if this C library keeps no memory.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if keep_memory and not keep_freed_memory():
        raise ValueError("--keep-memory: this C library has no such setting")


def from_yaml(flag: str, text: str) -> Any:
    """A value as configurations write it.

    Raises:
        ValueError: if it is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {text!r} must be a name or a dict in YAML: {first_line(error)}") from None


# ---- provenance -----------------------------------------------------------------------------------------------------


def provenance(name: str) -> dict[str, Any]:
    """What every records file starts with."""
    variables = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(VARIABLES)}
    about = {"task": "benchmark", "benchmark": name, "command": command_line(), "environment": variables}
    return {**about, **environment()}


def print_provenance(results: Mapping[str, Any]) -> None:
    """Command, hardware and versions, and a warning if the machine is busy."""
    hardware, versions = results["hardware"], results["versions"]
    gpu = f", {hardware['gpu']}" if "gpu" in hardware else ""
    variables = [f"{key}={shlex.quote(value)}" for key, value in results["environment"].items()]
    print(" ".join([*variables, results["command"]]))
    print(f"{hardware['cpu']}, {hardware['cpu_cores']} cores, {hardware['cpu_threads']} threads{gpu}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other programs are running: load average {load:.1f}")


def machine(results: Mapping[str, Any], device: str) -> str:
    """The hardware in a few words."""
    hardware = results["hardware"]
    if device == "cuda":
        return hardware["gpu"]
    threads = hardware["cpu_threads"]
    return f"{hardware['cpu']}, {threads} thread{'s' * (threads > 1)}"


# ---- table ----------------------------------------------------------------------------------------------------------


def milliseconds(seconds: Mapping[str, float]) -> str:
    """Median and quartiles: "1.23 (1.20-1.31)"."""
    median, lower, upper = (digits(1000 * seconds[key]) for key in ("median", "lower", "upper"))
    return f"{median} ({lower}-{upper})"


def megabytes(count: float) -> str:
    """Bytes in units of 10^6."""
    return digits(count / 1e6)


def digits(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rounds_of(records: Iterable[Case]) -> dict[int, float]:
    """Seconds by round, of the records of one case."""
    found: dict[int, float] = {}
    for record in records:
        seconds = record.get("seconds", [])
        if isinstance(seconds, list):
            found |= dict(enumerate(seconds, record.get("round", 0)))
        elif "failed" not in record:
            found[record["round"]] = seconds
    return found


def summary(benchmark: Benchmark, records: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each case, in the order of the records, those of a size together.

    Returns:
        The case's keys; "seconds", a spread; "times" and "memory_times", by base, the spread of ratios of the same
        rounds, and the ratio; "memory", the largest one; "ran"; "failed", why a round was not measured; "records".
    """
    groups: dict[str, list[Case]] = {}
    for record in records:
        groups.setdefault(repr([record[key] for key in benchmark.keys]), []).append(record)
    rows: dict[str, dict[str, Any]] = {}
    for kind, own in groups.items():
        row: dict[str, Any] = {key: own[0][key] for key in benchmark.keys} | {"keys": benchmark.keys, "records": own}
        if failed := [record["failed"] for record in own if "failed" in record]:
            row["failed"] = failed[0]
        good = [record for record in own if "failed" not in record]
        if seconds := rounds_of(own):
            row["seconds"] = spread(list(seconds.values()))
        if memory := [record["memory"] for record in good if "memory" in record]:
            row["memory"] = max(memory)
        row["ran"] = next((record["ran"] for record in good if record.get("ran")), "")
        rows[kind] = row
    for row in rows.values():
        row["times"], row["memory_times"] = {}, {}
        for base in benchmark.bases:
            other = rows.get(repr([*(row[key] for key in benchmark.keys[:-1]), base]), {})
            mine, theirs = rounds_of(row["records"]), rounds_of(other.get("records", []))
            if both := [number for number in mine if number in theirs]:
                row["times"][base] = ratio_spread([mine[n] for n in both], [theirs[n] for n in both])
            if other.get("memory") and "memory" in row:
                row["memory_times"][base] = row["memory"] / other["memory"]
        benchmark.complete(row)
    benchmark.complete_all(list(rows.values()))
    places = {repr([row[key] for key in benchmark.keys[:-1]]): n for n, row in reversed(list(enumerate(rows.values())))}
    return sorted(rows.values(), key=lambda row: places[repr([row[key] for key in benchmark.keys[:-1]])])


def ratio_text(ratio: Mapping[str, float] | None) -> str:
    """Median and quartiles of a ratio: "0.34 (0.33-0.36)"; "-" if there is none."""
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})" if ratio else "-"


def ratio_cell(ratio: float | None) -> str:
    """A ratio without a spread."""
    return "-" if ratio is None else f"{ratio:.3f}"


def key_text(value: Any) -> str:
    """A value of a case in a cell."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {part}" for key, part in value.items() if part is not None)
    return f"{value:g}" if isinstance(value, float) else str(value)


def said(benchmark: Benchmark, record: Case) -> str:
    """A measurement in a line."""
    name = " ".join(key_text(record[key]) for key in (*benchmark.keys, "round") if key in record)
    if "failed" in record:
        return f"{name}: {record['failed']}"
    (row,) = summary(benchmark, [record])
    cells = [
        f"{column} {text}"
        for column, text in cells_of(benchmark, row).items()
        if text not in ("", "-") and not any(base in column for base in benchmark.bases)
    ]
    return f"{name}: {', '.join(cells)}"


def cells_of(benchmark: Benchmark, row: Row) -> dict[str, str]:
    """The cells of a row besides its keys, by column."""
    own = {
        name: cell(row) if "failed" not in row or "seconds" in row else "-" for name, cell in benchmark.columns.items()
    }
    if benchmark.only_these_columns:
        return own
    cells = {"ms (quartiles)": milliseconds(row["seconds"]) if "seconds" in row else "-"}
    cells["rounds"] = str(row["seconds"]["rounds"]) if "seconds" in row else "-"
    cells |= {f"times {base}": ratio_text(row["times"].get(base)) for base in benchmark.bases}
    cells["MiB"] = f"{row['memory'] / 2**20:.1f}" if "memory" in row else "-"
    for base in benchmark.bases[:1]:
        cells[f"of {base}'s"] = ratio_cell(row["memory_times"].get(base))
    return {**cells, **own, "ran on, or why not": row.get("failed", row["ran"])}


def table(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """The summary as a Markdown table."""
    cells = []
    for row in rows:
        own = cells_of(benchmark, row)
        if benchmark.only_these_columns and "failed" in row:
            own = {**dict.fromkeys(own, "-"), next(iter(own)): row["failed"]}
        cells.append([*(key_text(row[key]) for key in benchmark.keys), *own.values()])
    columns = [*benchmark.keys, *cells_of(benchmark, rows[0])]
    return markdown_table(columns, cells)


def targets_text(benchmark: Benchmark, rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """The project's targets next to what was measured, for each row that one is for; "" if there are none."""
    cells = []
    for target in benchmark.targets(settings):
        what = {"times": "time", "memory_times": "memory"}[target.value]
        limit = f"at least {target.limit:g} times as fast as {target.base}"
        limit = limit if target.faster else f"{what} at most {target.limit:.3g} times {target.base}"
        limit = target.says or limit
        reached = target.reached(rows)
        cells += [
            [limit, name, digits(value), "met" if target.is_met(value) else "MISSED"] for name, value in reached.items()
        ]
        if not reached:
            cells.append(
                [limit, " ".join(map(key_text, (*target.where.values(), *target.among[:1]))), NOT_MEASURED, ""]
            )
    return markdown_table(["target", "for", "measured", ""], cells) if cells else ""


def crossovers(benchmark: Benchmark, rows: Sequence[Row]) -> list[str]:
    """From which size on each contender is faster than the first base, along straight lines in log-log: in words."""
    lines: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows if benchmark.size and benchmark.bases else ():
        others = tuple(
            row[key] for key in benchmark.keys if key != benchmark.size and not benchmark.goes_with_size(key)
        )
        if row[benchmark.keys[-1]] not in benchmark.bases and (ratio := row["times"].get(benchmark.bases[0])):
            lines.setdefault(others, []).append((row[benchmark.size], ratio["median"]))
    found = {others: place for others, line in lines.items() if (place := crossover(sorted(line))) is not None}
    unit = f"{benchmark.size} on"
    return [f"{', '.join(map(key_text, others))}: faster than {benchmark.bases[0]} from {place:.0f} {unit}"
            for others, place in found.items()]  # fmt: skip


def crossover(line: Sequence[tuple[int, float]]) -> float | None:
    """The size from which a ratio, of ascending sizes, is below 1 for good.

    None if it is below from the first size, or not below at the last.
    """
    if not line or line[-1][1] >= 1:
        return None
    for (size, ratio), (next_size, next_ratio) in reversed(list(pairwise(line))):
        if ratio >= 1:
            share = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
            return math.exp(math.log(size) + share * (math.log(next_size) - math.log(size)))
    return None


def write_report(benchmark: Benchmark, out: Path, content: Mapping[str, Any]) -> None:
    """OUT/table.md and OUT/picture.png of all measurements, and the table printed."""
    records, settings = content["measured"], content["settings"]
    rows = summary(benchmark, benchmark.shown(records, settings))
    threads = settings.get("threads") or content["hardware"]["cpu_threads"]
    hardware = {**content["hardware"], "cpu_threads": threads}
    where = machine({"hardware": hardware}, settings.get("device", "cpu"))
    heading = ", ".join([benchmark.name, *([settings["dtype"]] if "dtype" in settings else []), where])
    parts = [f"`{content['command']}`", table(benchmark, rows), targets_text(benchmark, rows, settings)]
    parts += [benchmark.notes(rows, records, settings), "\n".join(f"- {line}" for line in crossovers(benchmark, rows))]
    text = "\n\n".join(filter(None, parts))
    write_text(out / "table.md", f"{heading}\n\n{text}\n")
    measured = [row for row in rows if row.get("failed") != NOT_MEASURED]
    picture = draw(benchmark, measured, out / f"{benchmark.name}.png", heading)
    print(f"\n{text}\n\n{out / 'table.md'}, {picture}")


# ---- picture --------------------------------------------------------------------------------------------------------


def draw(benchmark: Benchmark, rows: Sequence[Row], path: Path, heading: str) -> Path:
    """A line for each contender over the size, a panel for each of the other keys; or, without a size, bars."""
    if not benchmark.size:
        return draw_bars(benchmark, rows, path, heading)
    plt = pyplot()
    timed = [row for row in rows if "seconds" in row or any(own.get("predicted") for own in row["records"])]
    rows = [row for row in timed if row[benchmark.size]] or rows
    others = [key for key in benchmark.keys[:-1] if key != benchmark.size and not benchmark.goes_with_size(key)]
    panels = list(dict.fromkeys(tuple(row[key] for key in others) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        *(lines, columns),
        figsize=(4.2 * columns + 0.8, 3.6 * lines + 1.4),
        **{"layout": "constrained", "squeeze": False, "sharex": True},
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    styles = line_styles(benchmark, rows)
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        own = [row for row in rows if tuple(row[key] for key in others) == panel]
        for name in dict.fromkeys(key_text(row[benchmark.keys[-1]]) for row in own):
            points = [row for row in own if key_text(row[benchmark.keys[-1]]) == name]
            handles |= draw_line(axis, benchmark, points, {**styles[name], "label": name})
        axis.set_title(", ".join(map(key_text, panel)), fontsize=10)
        label_axes(axis, sorted({row[benchmark.size] for row in own}))
        axis.set_xlabel(benchmark.size)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"times {benchmark.bases[0]}" if benchmark.by_base and benchmark.bases else "ms a call")
    figure.suptitle(heading, fontsize=10)
    columns = max(1, int(figure.get_figwidth() // 2.4))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    return save(figure, path)


def line_styles(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How each contender is drawn: the base black, the others by colour and marker."""
    names = list(dict.fromkeys(key_text(row[benchmark.keys[-1]]) for row in rows))
    styles: dict[str, dict[str, Any]] = {}
    others = [name for name in names if name not in benchmark.bases]
    for name in names:
        if name in benchmark.bases:
            first = name == benchmark.bases[0]
            styles[name] = {"color": INK if first else "#8a8a8a", "linestyle": "-" if first else "--", "marker": "o"}
            continue
        number = others.index(name)
        colour = ([ACCENT, *COLOURS] * (number + 1))[number]
        styles[name] = {"color": colour, "marker": MARKERS[(number + number // (len(COLOURS) + 1)) % len(MARKERS)]}
    return styles


def draw_line(axis: Any, benchmark: Benchmark, rows: Sequence[Row], style: dict[str, Any]) -> dict[str, Any]:
    """A contender's medians and quartiles; hollow where a call was predicted, not run."""
    points = []
    for row in rows:
        value = row["times"].get(benchmark.bases[0]) if benchmark.by_base and benchmark.bases else row.get("seconds")
        if value:
            unit = 1 if benchmark.by_base and benchmark.bases else 1000
            points.append((row[benchmark.size], *(unit * value[key] for key in ("median", "lower", "upper"))))
    predicted = [(row[benchmark.size], 1000 * own["predicted"]["seconds"]) for row in rows for own in row["records"]
                 if "failed" in own and own.get("predicted") and not benchmark.by_base]  # fmt: skip
    if predicted:
        axis.plot(
            *zip(*sorted(predicted), strict=True), **{**style, "linestyle": ":", "fillstyle": "none", "label": None}
        )
    if not points:
        return {}
    sizes, median, lower, upper = zip(*sorted(points), strict=True)
    (line,) = axis.plot(sizes, median, markersize=4.5, linewidth=1.5, **style)
    axis.fill_between(sizes, lower, upper, color=style["color"], alpha=0.18, linewidth=0)
    return {style["label"]: line}


def label_axes(axis: Any, sizes: Sequence[int]) -> None:
    """Both axes logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(pyplot().NullLocator())
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    if axis.lines:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def draw_bars(benchmark: Benchmark, rows: Sequence[Row], path: Path, heading: str) -> Path:
    """A bar for each row that has a number."""
    what, length = benchmark.bar or ("ms", lambda row: 1000 * row["seconds"]["median"])
    shown = [
        (", ".join(key_text(row[key]) for key in benchmark.keys), length(row)) for row in rows if "failed" not in row
    ]
    names, values = [name for name, value in shown if value is not None], [v for _, v in shown if v is not None]
    figure, axes = pyplot().subplots(figsize=(8, 0.9 + 0.26 * len(names)), layout="constrained")
    axes.barh(names[::-1], values[::-1], color=COLOURS[0])
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(what)
    axes.set_title(heading, fontsize=8)
    return save(figure, path)
