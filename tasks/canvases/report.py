"""The table and the figure, from the records alone: python -m tasks.canvases.report --scale cpu

Writes table.md, canvases.png and patches.png (dense and Fibottention, by patch size) into the folder of records.
Differences are paired by seed, and significant by the rule of all comparisons (tasks/common/paired.py). What has no
record is not in them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.locks import REPORT_LOCK, turn
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.tables import markdown_table, wilson_interval
from tasks.canvases import commands
from tasks.canvases.contenders import CONTENDERS, DENSE, SCALES, Scale, start_name
from tasks.common.comparison_table import spread
from tasks.common.paired import DETECTABLE, RULE, difference_table, differences
from tasks.common.records import read_records

TIMES = "times.json"
TABLE, FIGURE, PATCHES = "table.md", "canvases.png", "patches.png"
MARKS = "os^D"  # of patch sizes, from small to large
LINE, BESIDE = 1.8, 2.0  # points of accuracy of a line of text, and times of inference that lie beside one another
NO_TIMES = "inference is not measured yet"
SAME_PATCHES = "dense with the same patches"
BY_PATCHES = {  # of `PATCHES`: dense, and the same with Fibottention
    name: f"{name}-fibottention".removeprefix("dense-") for name in ("dense", "patch-x2", "patch-x4")
}

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class RecordedGroup:
    """Runs with the same images that have records. folder: its name."""

    variant: str
    side: int

    @property
    def folder(self) -> str:
        """Name of the folder of its records."""
        return f"{self.side}_{self.variant}"


def records_folder(scale: Scale, given: Path | None = None) -> Path:
    """Where the records of a scale are; those of smoke are with its runs."""
    default = Path("outputs/canvases") if scale.name == "smoke" else Path(commands.RESULTS)
    return given or default / scale.name


def groups_of(scale: Scale, records: Path) -> list[RecordedGroup]:
    """The groups of a scale that have records, in order of variant and side."""
    groups = {RecordedGroup(group.variant, group.side): None for group in scale.groups}
    order = list(dict.fromkeys(group.variant for group in scale.groups))
    recorded = [group for group in groups if read_records(records / group.folder)]
    return sorted(recorded, key=lambda group: (order.index(group.variant), group.side))


def read_machine(records: Path) -> list[dict[str, Any]]:
    """Where times of inference were measured; nothing without them."""
    return [read_results(records / TIMES)] if (records / TIMES).is_file() else []


def machines(measured: Sequence[Mapping[str, Any]]) -> str:
    """Processors and versions of torch of what was measured."""
    about = [(each.get("hardware", {}), each.get("versions", {})) for each in measured]
    names = [
        f"{hardware.get('gpu') or hardware.get('cpu')}, torch {versions.get('torch')}" for hardware, versions in about
    ]
    if len(kinds := sorted(set(names))) > 1:
        return "several machines: " + "; ".join(f"{kind} ({names.count(kind)})" for kind in kinds)
    return kinds[0] if kinds else "not measured yet"


def learns_nothing(record: Mapping[str, Any]) -> bool:
    """Whether a run stayed below twice chance at every evaluation."""
    return max(point["validation_accuracy"] for point in record["history"]) < 2 * record["chance"]


def read_times(records: Path) -> dict[str, Any]:
    """What `times` measured, by group and row; {} without it."""
    return read_results(records / TIMES)["times"] if (records / TIMES).is_file() else {}


# ---- table ----------------------------------------------------------------------------------------------------------


def group_table(runs: Runs, times: Mapping[str, Any]) -> str:
    """A row for each contender of one group, as a Markdown table."""
    columns = (
        *("contender", "patch, pixels", "tokens", "seeds", "test accuracy, %, mean ± std over seeds"),
        *("95 % interval of one seed over its test images", "minutes", "minutes before training"),
        *("images trained on", "ms a training image", "ms of inference an image"),
    )
    rows = []
    for row, by_seed in runs.items():
        records = list(by_seed.values())
        right = unpack_correct(records[0]["test_correct"])
        low, high = wilson_interval(int(right.sum()), len(right))
        begun = [record["history"][0] for record in records]  # after a predictor's phase, or a search
        before, minutes = fmean(point["minutes"] for point in begun), fmean(r["minutes"] for r in records)
        images = fmean(r["images"] - point["images"] for r, point in zip(records, begun, strict=True))
        rows.append(
            [
                *(row, str(records[0]["patch"]), str(records[0]["tokens"]), str(len(records))),
                spread([record["metrics"]["test_accuracy"] for record in records]),
                f"{100 * low:.1f} to {100 * high:.1f} (seed {records[0]['seed']})",
                *(f"{minutes:.1f}", f"{before:.1f}" if before else "", f"{images:.0f}"),
                f"{60_000 * (minutes - before) / images:.1f}" if images else "",
                f"{times[row]['ms']:.2f}" if row in times else "not measured",
            ]
        )
    return markdown_table(columns, rows)


def group_text(scale: Scale, group: RecordedGroup, runs: Runs, times: Mapping[str, Any]) -> str:
    """Table, differences, and what was left out, of one group."""
    first = next(iter(next(iter(runs.values())).values()))
    parts = [f"## {group.side} pixels, {group.variant}", f"{first['data']}. Chance is {100 * first['chance']:.1f} %."]
    parts.append(group_table(runs, times))
    listed = {row: list(by_seed.values()) for row, by_seed in runs.items()}
    if scale.reference in listed and (paired := differences(listed, scale.reference)):
        parts.append(difference_table(paired, scale.reference, rule=False))
    if paired := differences(listed, {row: dense_twin(row) for row in listed}):
        parts.append(f"Sparse rows minus {SAME_PATCHES}:")
        parts.append(difference_table(paired, SAME_PATCHES, rule=False))
    pilot = runs.get(DENSE, {}).get(0)
    if pilot is not None and learns_nothing(pilot):
        best = 100 * max(point["validation_accuracy"] for point in pilot["history"])
        parts.append(
            f"dense has no further seeds at {group.side} pixels: in {pilot['minutes']:.1f} minutes seed 0 reached "
            f"{best:.1f} % of the selection set at most, below twice chance."
        )
    starts = {record["start_sha256"] for by_seed in runs.values() for record in by_seed.values()}
    if len(starts) > 1:
        parts.append(f"The runs began from {len(starts)} starts, made in the same way; runs of one seed share one.")
    wanted = dict.fromkeys(
        name
        for planned in scale.groups
        if (planned.variant, planned.side) == (group.variant, group.side)
        for name in planned.contenders
    )
    if lacking := [name for name in wanted if name not in runs]:
        parts.append(f"Without a record: {', '.join(lacking)}.")
    return "\n\n".join(parts)


def dense_twin(row: str) -> str:
    """The contender that sees an image in the same patches as this one, with dense attention."""
    own = CONTENDERS[row]
    return next(name for name, one in CONTENDERS.items() if not one.is_sparse and one.sees == own.sees)


def check_starts(runs: Mapping[str, Runs]) -> None:
    """Raise ValueError if runs of one group and seed began with different models."""
    for group, rows in runs.items():
        known: dict[int, set[str]] = {}
        for seed, record in (item for by_seed in rows.values() for item in by_seed.items()):
            known.setdefault(seed, set()).add(record["start_sha256"])
        for seed, starts in known.items():
            if len(starts) > 1:
                raise ValueError(f"{group}: the runs of seed {seed} started from {len(starts)} models, not from one")


def report_text(scale: Scale, records: Path) -> str:
    """The whole text in Markdown.

    Raises:
        ValueError: without records, and if runs of one seed of a group began with different models.
    """
    groups = groups_of(scale, records)
    if not groups:
        raise ValueError(f"--records {records} has no records of scale {scale.name}; `run` makes them")
    runs = {group.folder: read_records(records / group.folder) for group in groups}
    check_starts(runs)
    times = read_times(records)
    counted = "processor time of one thread" if scale.device == "cpu" else "wall time of the GPU"
    every = [record for rows in runs.values() for by_seed in rows.values() for record in by_seed.values()]
    parts = [
        f"Minutes are {counted}, without evaluations and without making images. Those before training are of a "
        "predictor's phase or of a search.",
        f"Runs: {machines(every)}. Times of inference: {machines(read_machine(records))}.",
    ]
    for start in dict.fromkeys(start_name(group.variant) for group in groups):
        for row, by_seed in read_records(records / start).items():
            record = by_seed[0]
            variant, minutes = start.removeprefix("start_"), record["minutes"]
            parts.append(
                f"Dense start of {variant} at {row} pixels: {minutes:.1f} minutes, {record['images']} "
                f"images, test accuracy {100 * record['metrics']['test_accuracy']:.1f} %."
            )
    parts += [group_text(scale, group, runs[group.folder], times.get(group.folder, {})) for group in groups]
    parts += ["## Differences", f"{RULE} {DETECTABLE}"]
    return "\n\n".join(parts) + "\n"


# ---- figure ---------------------------------------------------------------------------------------------------------


def draw(scale: Scale, records: Path) -> Path:
    """A row of panels for each group: accuracy over minutes of training, and over ms of inference."""
    plt = pictures.pyplot()
    groups, times = groups_of(scale, records), read_times(records)
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(14, 4.6 * len(groups)), squeeze=False, layout="constrained", width_ratios=(1, 1)
    )
    for (left, right), group in zip(axes, groups, strict=True):
        runs = read_records(records / group.folder)
        first = next(iter(next(iter(runs.values())).values()))
        _draw_curves(left, runs)
        _draw_frontier(right, runs, times.get(group.folder, {}))
        left.set_title(f"{group.side} pixels, {group.variant}", loc="left", fontsize=11)
        for axis in (left, right):
            axis.axhline(100 * first["chance"], color="0.6", linewidth=0.8, linestyle=":")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    axes[-1][0].set_xlabel(_minutes_label(scale))
    axes[-1][1].set_xlabel("ms of inference an image")
    return pictures.save(figure, records / FIGURE)


def draw_patches(scale: Scale, records: Path) -> Path | None:
    """Dense attention and Fibottention for each size of patches, on the largest canvases of the first variant that have
    both; None without any.
    """
    of_variant = [group for group in groups_of(scale, records) if group.variant == scale.groups[0].variant]
    for group in reversed(of_variant):
        runs = read_records(records / group.folder)
        if any({*pair} <= {*runs} for pair in BY_PATCHES.items()):
            times = read_times(records).get(group.folder, {})
            return pictures.save(_patches_figure(scale, group.side, runs, times), records / PATCHES)
    return None


def _patches_figure(scale: Scale, side: int, runs: Runs, times: Mapping[str, Any]) -> Any:
    figure, (left, right) = pictures.pyplot().subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for number, pair in enumerate(BY_PATCHES.items()):
        points: list[tuple[float, float]] = []
        rows = [runs[row] for row in pair if row in runs]
        seeds = [seed for seed in rows[0] if all(seed in row for row in rows)] if rows else []
        for row, marker in zip(pair, ("white", f"C{number}"), strict=True):
            if row not in runs or not seeds:
                continue
            records = [runs[row][seed] for seed in seeds]
            kind = "Fibottention" if CONTENDERS[row].is_sparse else "dense"
            style = {"color": f"C{number}", "markerfacecolor": marker, "marker": "o", "markersize": 6}
            line = {**style, "linestyle": "-" if CONTENDERS[row].is_sparse else "--", "linewidth": 1.6}
            label = f"patches of {records[0]['patch']} pixels, {kind}, {_seeds(len(records))}"
            left.plot(*_curve(records), label=label, **line)
            if row in times:
                tests = [100 * record["metrics"]["test_accuracy"] for record in records]
                spread_of = [[fmean(tests) - min(tests)], [max(tests) - fmean(tests)]]
                points.append((times[row]["ms"], fmean(tests)))
                right.errorbar([points[-1][0]], [points[-1][1]], spread_of, linestyle="none", capsize=2, **style)
        if len(points) == 2:
            arrow = {"arrowstyle": "->", "color": f"C{number}", "shrinkA": 6, "shrinkB": 6}
            right.annotate("", points[1], points[0], arrowprops=arrow)
    first = next(iter(next(iter(runs.values())).values()))
    left.set_title(f"{side} pixels, {first['minutes']:.0f} minutes from a dense start", loc="left", fontsize=11)
    left.set(xlabel=_minutes_label(scale), ylabel="accuracy on the selection set, %")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=3, loc="outside lower center")
    right.set_title("after it: dense (open) to Fibottention; bars: all seeds", loc="left", fontsize=11)
    right.set(xlabel="ms of inference an image", ylabel="test accuracy, %", xscale="log")
    pictures.plain_numbers(right.xaxis)
    right.margins(0.12)
    if not times:
        right.text(0.5, 0.5, NO_TIMES, ha="center", transform=right.transAxes, color="0.5")
    for axis in (left, right):
        axis.axhline(100 * first["chance"], color="0.6", linewidth=0.8, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure


def _curve(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Minutes, and selection accuracy in percent, each the mean over seeds: evaluations are at about the same times."""
    points = list(zip(*(record["history"] for record in records), strict=False))
    minutes = [fmean(point["minutes"] for point in same_time) for same_time in points]
    return minutes, [100 * fmean(point["validation_accuracy"] for point in same_time) for same_time in points]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _minutes_label(scale: Scale) -> str:
    return f"minutes of training, {'of one thread' if scale.device == 'cpu' else 'on the GPU'}"


def _style(row: str, record: Mapping[str, Any], patches: Sequence[int]) -> dict[str, Any]:
    """A colour for each contender, a mark for the size of its patches; open marks and dashes are dense."""
    sparse, colour = CONTENDERS[row].is_sparse, pictures.pyplot().get_cmap("tab20")(list(CONTENDERS).index(row))
    mark = MARKS[min(patches.index(_seen(row, record)), len(MARKS) - 1)]
    return {
        **{"color": colour, "linestyle": "-" if sparse else "--", "marker": mark, "markersize": 6},
        "markerfacecolor": colour if sparse else "white",
    }


def _seen(row: str, record: Mapping[str, Any]) -> int:
    """Pixels of the canvas that a side of a patch covers."""
    return record["patch"] * CONTENDERS[row].shrink


def _patches(runs: Runs) -> list[int]:
    return sorted({_seen(row, record) for row, by_seed in runs.items() for record in by_seed.values()})


def _draw_curves(axis: Any, runs: Runs) -> None:
    """Selection accuracy over time, the mean over seeds."""
    for row, by_seed in runs.items():
        records = list(by_seed.values())
        label = f"{row}, {_seeds(len(records))}" if len(records) > 1 else row
        axis.plot(*_curve(records), linewidth=1.3, label=label, **_style(row, records[0], _patches(runs)))
    axis.set_ylabel("accuracy on the selection set, %")
    lines = sorted(axis.lines, key=lambda line: -line.get_ydata()[-1])  # as they end
    axis.legend(handles=lines, frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_frontier(axis: Any, runs: Runs, times: Mapping[str, Any]) -> None:
    """Test accuracy over time of inference; for each size of patches a line joins what nothing faster is above."""
    axis.set_ylabel("test accuracy, %")
    shown = {row: by_seed for row, by_seed in runs.items() if row in times}
    if not shown:
        axis.text(0.5, 0.5, NO_TIMES, ha="center", transform=axis.transAxes, color="0.5")
        return
    patches, points_of = _patches(runs), dict[str, tuple[float, float]]()
    groups: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for row, by_seed in shown.items():
        records, ms = list(by_seed.values()), times[row]["ms"]
        accuracy = 100 * fmean(record["metrics"]["test_accuracy"] for record in records)
        groups.setdefault((_seen(row, records[0]), CONTENDERS[row].is_sparse), []).append((ms, accuracy))
        axis.plot([ms], [accuracy], **{**_style(row, records[0], patches), "linestyle": "none"})
        points_of[row] = (ms, accuracy)
    for row, (ms, accuracy) in _spread(points_of).items():
        leader = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5}
        axis.annotate(row, points_of[row], (1.2 * ms, accuracy), fontsize=7, va="center", arrowprops=leader)
    for (_, sparse), points in groups.items():
        line = "-" if sparse else "--"
        axis.plot(*zip(*frontier(points), strict=True), color="0.5", linestyle=line, linewidth=1, zorder=0)
    for number, patch in enumerate(patches):
        mark = MARKS[min(number, len(MARKS) - 1)]
        axis.plot([], [], mark, color="0.4", label=f"patches of {patch} pixels of the canvas")
    axis.plot([], [], "o--", color="0.4", markerfacecolor="white", label="dense")
    axis.plot([], [], "o-", color="0.4", label="sparse")
    axis.set_xscale("log")
    pictures.plain_numbers(axis.xaxis)
    axis.margins(0.15)
    axis.legend(frameon=False, fontsize=7)


def _spread(points: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Where names of (ms, accuracy) stand, so that none hides another: from above, lower where one is near."""
    placed = dict[str, tuple[float, float]]()
    for name, (ms, accuracy) in sorted(points.items(), key=lambda item: -item[1][1]):
        near = [height for other, height in placed.values() if 1 / BESIDE < other / ms < BESIDE]
        while any(abs(height - accuracy) < LINE for height in near):
            accuracy -= LINE / 4
        placed[name] = (ms, accuracy)
    return placed


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (time, accuracy) those that no faster or equally fast one is above, by time."""
    best: list[tuple[float, float]] = []
    for time, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((time, accuracy))
    return best


def write_report(scale: Scale, records: Path) -> None:
    """Write table.md and the pictures, and print the table."""
    text = report_text(scale, records)
    with turn(records / REPORT_LOCK):
        write_text(records / TABLE, text)
        drawn = [str(path) for path in (draw(scale, records), draw_patches(scale, records)) if path is not None]
    print(f"{text}\ntable: {records / TABLE}, pictures: {', '.join(drawn)}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.report()
    arguments = parser.parse_args(argv)

    def work() -> None:
        scale = SCALES[arguments.scale]
        write_report(scale, records_folder(scale, arguments.records))

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
