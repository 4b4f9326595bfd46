"""Table and picture of a comparison, from the records of its runs (tasks/common/compare.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.locks import REPORT_LOCK, turn
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.tables import count_of_seeds, markdown_table, plus_minus, wilson_interval
from tasks.common.paired import ACCURACY, Difference, difference_table, differences

SUCCESS = "test_success"  # of robots
# Of PushT: the reward is the share that is covered divided by 0.95, at most 1.
COVERAGE = {"test_max_reward": "highest reward of an episode", "test_final_coverage": "covered at the end"}


def table(results: dict[str, list[dict[str, Any]]], metric: str = ACCURACY, also: Sequence[str] = ()) -> str:
    """Accuracy, interactions kept, parameters and time of each variant, as a Markdown table.

    It has more columns if they say something: other metrics, `also`; what was trained, if that is not everything; how
    far the mask is from none after training (the largest of all seeds), with a decay; solved episodes of robots with
    their interval, and what PushT's block covers; multiply-adds of attention, if runs recorded them; the best constant
    predictor, if there is one.
    """
    results = {name: runs for name, runs in results.items() if runs}
    records = [record for runs in results.values() for record in runs]
    seeds = max(map(len, results.values()))
    averaged = any("test_ema_accuracy" in record["metrics"] for record in records)
    decayed = any(record.get("max_decay_change") is not None for record in records)
    tuned = any(record.get("method", "full") != "full" for record in records)
    heads = {record.get("config", {}).get("head", {}).get("name") for record in records}
    columns = ["head" if len(heads) > 1 else "run" if tuned else "prior", f"{label(metric)}, %, mean ± std of {seeds}"]
    columns += [f"{label(other)}, %" for other in also]
    constants = [name for name in (metric, *also) if any(name in record.get("baseline", {}) for record in records)]
    columns += [f"{label(name)} of the best constant predictor, %" for name in constants]
    columns += ["of the moving average, %"] if averaged else []
    columns += ["max abs(M - 1)"] if decayed else []
    solved = metric == SUCCESS
    columns += ["solved, 95 % interval (Wilson)"] if solved else []
    covered = list(COVERAGE) if all({*COVERAGE} <= {*record["metrics"]} for record in records) else []
    columns += [f"{label(name)}, %" for name in covered]
    counted = any(record.get("attention_flops") is not None for record in records)
    columns += ["interactions kept, %", *(["MHSA, MFLOPs"] if counted else []), "parameters"]
    columns += ["trained", "adapter, kB"] if tuned else []
    columns += ["ms a step", "seconds a run"]
    rows = []
    for name, runs in results.items():
        cells = [name, spread([record["metrics"][metric] for record in runs])]
        cells[-1] += "" if len(runs) == seeds else f" ({count_of_seeds(len(runs))})"
        cells += [spread([record["metrics"][other] for record in runs]) for other in also]
        cells += [_constant(runs, name) for name in constants]
        if averaged:
            cells.append(spread(_known(record["metrics"].get("test_ema_accuracy") for record in runs)))
        if decayed:
            changes = _known(record.get("max_decay_change") for record in runs)
            cells.append(f"{max(changes):.2g}" if changes else "-")
        cells += [solved_episodes(runs)] if solved else []
        cells += [spread([record["metrics"][name] for record in runs]) for name in covered]
        cells.append(f"{100 - runs[0]['pruning_ratio']:.1f}")
        if counted:
            flops = runs[0].get("attention_flops")
            cells.append("-" if flops is None else f"{flops / 1e6:.1f}")
        cells.append(str(runs[0]["parameters"]))
        if tuned:
            adapter = runs[0].get("adapter_bytes")
            cells.append(str(runs[0].get("trainable_parameters", runs[0]["parameters"])))
            cells.append("-" if adapter is None else f"{adapter / 1000:.1f}")
        cells += [
            f"{1000 * np.median([record['seconds_per_step'] for record in runs]):.0f}",
            f"{np.mean([record['seconds'] for record in runs]):.1f}",
        ]
        rows.append(cells)
    return markdown_table(columns, rows)


def label(metric: str) -> str:
    """What a table calls a metric."""
    named = {
        "test_knn_accuracy": "k-NN test accuracy",
        "test_linear_accuracy": "test accuracy of the linear classifier",
        "test_coco/bbox_mAP": "test box AP",
        "test_coco/segm_mAP": "test mask AP",
        **COVERAGE,
    }
    return named.get(metric, metric.replace("_", " "))


def _constant(runs: Sequence[dict[str, Any]], metric: str) -> str:
    """What predicts the same for every image, which is the same for all seeds."""
    found = sorted({f"{100 * record['baseline'][metric]:.2f}" for record in runs if metric in record["baseline"]})
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else "-"


def solved_episodes(runs: Sequence[dict[str, Any]]) -> str:
    """How many episodes of all seeds together were solved, and what the share may be."""
    right = np.concatenate([unpack_correct(record["test_correct"]) for record in runs])
    low, high = wilson_interval(int(right.sum()), len(right))
    return f"{right.sum()} of {len(right)}, {100 * low:.0f} to {100 * high:.0f} %"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def spread(shares: Sequence[float]) -> str:
    """Mean and sample standard deviation of fractions, in percent."""
    if not shares:
        return "-"
    percent = 100 * np.array(shares)
    return plus_minus(percent.mean(), percent.std(ddof=1) if len(percent) > 1 else None)


def draw_results(
    results: dict[str, list[dict[str, Any]]],
    path: Path,
    first: str | None = None,
    metric: str = ACCURACY,
    references: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
) -> Path:
    """The metric of every seed and its mean for each variant; next to it the differences to the variant `first`.

    Below that the same of other metrics, `also`. Differences have their 95 % interval, and stand out where they are
    significant (`paired.RULE`). With fewer seeds than the rule asks for there is no interval. references: of rows that
    are compared with another one.
    """
    plt = pictures.pyplot()
    metrics = (metric, *also)
    found = {name: {} if first is None else differences(results, references or first, name) for name in metrics}
    columns = 1 + any(found.values())
    size = (6.4 + 4.2 * (columns - 1), len(metrics) * (1.2 + 0.4 * len(results)))
    figure, axes = plt.subplots(len(metrics), columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for name, places in zip(metrics, axes, strict=True):
        _draw_metric(places[0], results, name)
        if found[name]:
            _draw_differences(places[1], list(results), found[name], str(first))
        elif columns > 1:
            places[1].axis("off")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    return pictures.save(figure, path)


def _draw_metric(axis: Any, results: Mapping[str, Sequence[Mapping[str, Any]]], metric: str) -> None:
    for row, runs in enumerate(results.values()):
        accuracy = [100 * record["metrics"][metric] for record in runs]
        axis.plot(accuracy, [row] * len(accuracy), "o", color=pictures.INK, alpha=0.7)
        if len(accuracy) > 1:
            axis.plot([np.mean(accuracy)], [row], "|", color=pictures.INK, markersize=22, markeredgewidth=2.5)
    axis.set_yticks(range(len(results)), list(results))
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.set_xlabel(f"{label(metric)}, %\n(dots: seeds, bar: mean)")


def _draw_differences(axis: Any, rows: Sequence[str], found: dict[str, Difference], first: str) -> None:
    axis.axvline(0, color=pictures.INK, linewidth=0.8)
    seen = []
    for name, difference in found.items():
        row = rows.index(name)
        values = [100 * value for value in difference.by_seed.values()]
        axis.plot(values, [row] * len(values), "o", color=pictures.INK, alpha=0.4, markersize=4)
        if difference.significant is not None:
            seen.append(difference.significant)
            style = {
                "color": pictures.ACCENT if difference.significant else pictures.INK,
                "markersize": 16,
                "capsize": 3,
            }
            width = 100 * (difference.half_width or 0.0)
            axis.errorbar([100 * difference.mean], [row], xerr=[width], fmt="|", **style)
        if difference.minus != first:
            place = {"xy": (1.02, row), "xycoords": axis.get_yaxis_transform(), "va": "center", "fontsize": 8}
            axis.annotate(f"minus {difference.minus}", annotation_clip=False, **place)
    named = [name for name, one in (("red: significant", True), ("dark: not significant", False)) if one in seen]
    colours = f"; 95 % interval, {', '.join(named)}" if named else ""
    axis.set_xlabel(f"minus {first}, points\n(dots: seeds{colours})")


def write_comparison(
    results: dict[str, list[dict[str, Any]]],
    folder: Path,
    first: str,
    metric: str = ACCURACY,
    also: Sequence[str] = (),
    references: Mapping[str, str] | None = None,
) -> None:
    """Write table.md and results.png of the records into their folder, and print the table.

    Args:
        results: records by row. folder: gets them. first: the row that the others are compared with. metric: the
            task's. also: other metrics that it judges, those that every record has. references: the row that each row
            is compared with, if it is not the first for all.
    """
    minus = references or first
    also = [name for name in also if all(name in record["metrics"] for runs in results.values() for record in runs)]
    lines, found = table(results, metric, also), differences(results, minus, metric)
    if found:
        lines += "\n\n" + (f"{label(metric)}:\n\n" if also else "") + difference_table(found, first)
    for name in also:
        if other := differences(results, minus, name):
            lines += f"\n\n{label(name)}:\n\n" + difference_table(other, first)
    with turn(folder / REPORT_LOCK):  # commands that do a comparison together end together
        write_text(folder / "table.md", lines + "\n")
        picture = draw_results(results, folder / "results.png", first, metric, references, also)
    print(f"\n{next(iter(results.values()))[0]['data']}\n\n{lines}\n\npicture: {picture}, table: {folder}/table.md")
