"""Tables of a VTAB-1K sweep: python -m tasks.classification.vtab.report --config FILE --records FOLDER

The tables have the layout of VIOLIN's Table 3 (groups) and Tables 19 to 21 (tasks), once with the mean of all seeds and
once with the mean of the best three, as VIOLIN prints. `Avg.` is the mean over the 19 tasks, not over the three groups.
A number that needs a missing run is left out and never made from the other runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.images.vtab_tasks import GROUPS, TASKS, Task
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.locks import REPORT_LOCK, turn
from hf_sparseprior.runs.tables import count_of_seeds, markdown_table, plus_minus
from tasks.classification.vtab import commands
from tasks.classification.vtab.plan import Records, load_sweep, point_name

BEST = 3
AVERAGE = "Avg."
MISSING = "-"
# Names of the groups in VIOLIN's Table 3.
SHORT = {"Natural": "NAT.", "Specialized": "SPE.", "Structured": "STR.", AVERAGE: AVERAGE}


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def mean_of_seeds(accuracies: Sequence[float | None]) -> float | None:
    """The mean over seeds; None if one is missing."""
    whole = [value for value in accuracies if value is not None]
    return float(np.mean(whole)) if whole and len(whole) == len(accuracies) else None


def best_of_seeds(accuracies: Sequence[float | None]) -> float | None:
    """The mean of the three best seeds (VIOLIN, Section 4.1 and Appendix G.2); None if any seed is missing.

    The best are chosen by the test accuracy that is reported, which makes it an optimistic number.
    """
    whole = [value for value in accuracies if value is not None]
    return float(np.mean(sorted(whole)[-BEST:])) if whole and len(whole) == len(accuracies) else None


def deviation(accuracies: Sequence[float | None]) -> float | None:
    """Sample standard deviation over seeds; None if one is missing or there is only one."""
    whole = [value for value in accuracies if value is not None]
    return float(np.std(whole, ddof=1)) if len(whole) > 1 and len(whole) == len(accuracies) else None


def means(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The mean of each group and over all 19 tasks, each None if one of its tasks is missing.

    Args:
        values: accuracy by name of the task.

    Returns:
        By group, and "Avg.": the mean over tasks, in which a group counts by its number of tasks (7, 4 and 8), as in
        VIOLIN's Tables 3 and 19 to 21.
    """
    members = {group: [name for name, task in TASKS.items() if task.group == group] for group in GROUPS}
    return {
        group: mean_of_seeds([values.get(name) for name in names])
        for group, names in {**members, AVERAGE: list(TASKS)}.items()
    }


def paired_deviations(
    tasks: Mapping[str, Mapping[str, Any]], baseline: Mapping[str, Mapping[str, Any]]
) -> dict[str, float | None]:
    """Sample standard deviation over seeds of a row's difference to the baseline, of each group and of the average.

    Args:
        tasks, baseline: results by task, whose `accuracies` are of the same seeds in the same order.
    """

    def difference(task: str, seed: int) -> float | None:
        pair = [results[task]["accuracies"][seed] for results in (tasks, baseline)]
        return None if None in pair else pair[0] - pair[1]

    seeds = range(max((len(result["accuracies"]) for result in tasks.values()), default=0))
    by_seed = [means({task: difference(task, seed) for task in tasks}) for seed in seeds]
    return {group: deviation([row[group] for row in by_seed]) for group in SHORT}


# ---- what the records say -------------------------------------------------------------------------------------------


def summarize(records: Records) -> dict[str, Any]:
    """Everything the tables and the picture need, in percent, as JSON values; None for what is missing."""
    sweep = records.sweep
    summary: dict[str, Any] = {"title": sweep.title, "seeds": sweep.seeds, "variants": {}}
    for variant in sweep.configs:
        tasks = {task: _summarize_task(records, variant, task) for task in sweep.tasks}
        summary["variants"][variant] = {
            "tasks": tasks,
            **{
                f"groups_{statistic}": means({task: tasks[task][statistic] for task in tasks})
                for statistic in ("mean", "best")
            },
        }
    return summary


def _summarize_task(records: Records, variant: str, task: str) -> dict[str, Any]:
    sweep, chosen = records.sweep, records.chosen_point(variant, task)
    final = [] if chosen is None else sweep.final_runs(variant, task, chosen)
    accuracies = [records.accuracy(run) for run in final] or [None] * len(sweep.seeds)
    read = [record for run in final if (record := records.read(run)) is not None]
    changes = [record["max_decay_change"] for record in read if record["max_decay_change"] is not None]
    return {
        "validation": dict(zip(map(point_name, sweep.points), records.selection(variant, task), strict=True)),
        "chosen": None if chosen is None else sweep.points[chosen],
        "accuracies": accuracies,
        "mean": mean_of_seeds(accuracies),
        "deviation": deviation(accuracies),
        "best": best_of_seeds(accuracies),
        "decay_change": max(changes, default=None),
        "images_judged": read[0]["images_judged"] if read else None,
        "warned": [lines[0] for record in read if (lines := record.get("warnings"))],
    }


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(summary: Mapping[str, Any]) -> str:
    """All tables of a sweep and what is missing from them, in Markdown."""
    count = len(summary["seeds"])
    parts = [f"# {summary['title']} on VTAB-1K", "Test accuracy in %. Avg.: mean over the 19 tasks."]
    for statistic, words in (
        ("mean", f"Mean of {count_of_seeds(count)}"),
        ("best", f"Mean of the best {min(BEST, count)} of {count_of_seeds(count)}, chosen on test"),
    ):
        parts += [f"## {words}", group_table(summary, statistic)]
        for group in GROUPS:
            tasks = [task for task in TASKS.values() if task.group == group]
            parts.append(f"{group}:\n\n{task_table(summary, tasks, statistic)}")
    if decays := decay_table(summary):
        parts += ["## Largest abs(M - 1) after training, of all seeds", decays]
    parts += [lines for lines in (_missing(summary), _unpublished(summary), _warned(summary)) if lines]
    return "\n\n".join(parts) + "\n"


def group_table(summary: Mapping[str, Any], statistic: str) -> str:
    """Groups and average, with the difference to the first variant (VIOLIN, Table 3). For the means of all seeds, the
    difference has its standard deviation, seed by seed.
    """
    rows = {name: variant[f"groups_{statistic}"] for name, variant in summary["variants"].items()}
    baseline, *others = rows
    lines = [[baseline, *(_cell(rows[baseline][group]) for group in SHORT)]]
    for name in others:
        tasks = [summary["variants"][row]["tasks"] for row in (name, baseline)]
        spreads = paired_deviations(*tasks) if statistic == "mean" else dict.fromkeys(SHORT)
        cells = [_compared(rows[name][group], rows[baseline][group], spreads[group]) for group in SHORT]
        lines.append([name, *cells])
    return markdown_table(["row", *SHORT.values()], lines)


def decay_table(summary: Mapping[str, Any]) -> str:
    """max |M - 1| after training over all final runs that exist, for each group and for all; "" without a decay."""
    groups = {**{SHORT[group]: (group,) for group in GROUPS}, "all": GROUPS}
    rows = []
    for name, variant in summary["variants"].items():
        changes = {task: result.get("decay_change") for task, result in variant["tasks"].items()}
        within = [
            [value for task, value in changes.items() if value is not None and TASKS[task].group in members]
            for members in groups.values()
        ]
        rows += [[name, *(f"{max(values):.2g}" if values else MISSING for values in within)]] if any(within) else []
    return markdown_table(["row", *groups], rows) if rows else ""


def task_table(summary: Mapping[str, Any], tasks: Sequence[Task], statistic: str) -> str:
    """One column a task (VIOLIN, Tables 19 to 21), the mean of all seeds with its standard deviation."""
    rows = [
        [name, *(_task_cell(variant["tasks"].get(task.name), statistic) for task in tasks)]
        for name, variant in summary["variants"].items()
    ]
    return markdown_table(["row", *(task.title for task in tasks)], rows)


def _task_cell(result: Mapping[str, Any] | None, statistic: str) -> str:
    if result is None or result[statistic] is None:
        return MISSING
    return plus_minus(result[statistic], result["deviation"] if statistic == "mean" else None)


def _cell(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _compared(value: float | None, baseline: float | None, spread: float | None) -> str:
    if value is None or baseline is None:
        return _cell(value)
    return f"{value:.2f} ({plus_minus(value - baseline, spread, '+')})"


def _missing(summary: Mapping[str, Any]) -> str:
    """What is not there yet, one line a variant."""
    lines = []
    for name, variant in summary["variants"].items():
        short = []
        for task, result in variant["tasks"].items():
            done = sum(value is not None for value in result["accuracies"])
            if result["chosen"] is None:
                short.append(f"{task} (selection)")
            elif done < len(result["accuracies"]):
                short.append(f"{task} ({done} of {count_of_seeds(len(result['accuracies']))})")
        lines += [f"- {name}: {', '.join(short)}"] if short else []
    return "Missing:\n\n" + "\n".join(lines) if lines else ""


def _unpublished(summary: Mapping[str, Any]) -> str:
    """Tasks whose list of test images is not the published one."""
    judged = {
        (task, result["images_judged"])
        for variant in summary["variants"].values()
        for task, result in variant["tasks"].items()
        if result["images_judged"] not in (None, TASKS[task].test_images)
    }
    lines = [f"- {task}: {count} of {TASKS[task].test_images}" for task, count in sorted(judged)]
    return "Test images, where they are not as many as published:\n\n" + "\n".join(lines) if lines else ""


def _warned(summary: Mapping[str, Any]) -> str:
    """Runs that said that they did not learn, and the first of them in each task."""
    lines = [
        f"- {name}, {task}, {len(said)} of {len(result['accuracies'])} runs: {said[0]}"
        for name, variant in summary["variants"].items()
        for task, result in variant["tasks"].items()
        if (said := result.get("warned"))
    ]
    return "What runs say of themselves:\n\n" + "\n".join(lines) if lines else ""


# ---- picture --------------------------------------------------------------------------------------------------------


def draw(summary: Mapping[str, Any], path: Path) -> Path:
    """Mean of seeds of each task and variant as bars, each seed as a dot; without a bar where a seed is missing."""
    plt = pictures.pyplot()
    figure, axis = plt.subplots(figsize=(13, 4.4), layout="constrained")
    variants, width = summary["variants"], 0.8 / len(summary["variants"])
    shades = plt.colormaps["viridis"](np.linspace(0.15, 0.85, max(1, len(variants) - 1)))
    # Groups stand one place apart.
    places = {name: place + GROUPS.index(task.group) for place, (name, task) in enumerate(TASKS.items())}
    for number, (name, variant) in enumerate(variants.items()):
        colour = pictures.INK if not number else pictures.ACCENT if len(variants) == 2 else shades[number - 1]
        shift = (number - (len(variants) - 1) / 2) * width
        results = {task: result for task, result in variant["tasks"].items() if result["mean"] is not None}
        axis.bar(
            [places[task] + shift for task in results],
            [result["mean"] for result in results.values()],
            width,
            yerr=[result["deviation"] or 0.0 for result in results.values()],
            color=colour,
            ecolor="0.4",
            label=name,
        )
        dots = [(places[task] + shift, value) for task, result in results.items() for value in result["accuracies"]]
        if dots:
            axis.plot(*zip(*dots, strict=True), ".", color="0.6", markersize=3)
    axis.set_xticks(list(places.values()), [TASKS[name].title for name in places], rotation=45, ha="right")
    for group in GROUPS:
        inside = [place for name, place in places.items() if TASKS[name].group == group]
        axis.text(np.mean(inside), 102, group, ha="center")
    axis.set_ylim(0, 108)
    axis.set_ylabel("test accuracy, %")
    seeds = count_of_seeds(len(summary["seeds"]))
    axis.set_title(f"{summary['title']}: mean and standard deviation of {seeds} (dots)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=len(variants), loc="upper left", bbox_to_anchor=(0, -0.3))
    return pictures.save(figure, path)


# ---- command --------------------------------------------------------------------------------------------------------


def write_report(records: Records, folder: Path) -> str:
    """Write table.md, summary.json and results.png into a folder. Returns the tables.

    Commands that do a sweep together end together; they write one after the other.
    """
    summary = summarize(records)
    with turn(folder / REPORT_LOCK):
        write_text(folder / "table.md", tables(summary))
        write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        draw(summary, folder / "results.png")
    return f"{tables(summary)}\ntable: {folder}/table.md, numbers: {folder}/summary.json, picture: {folder}/results.png"


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.report()
    arguments = parser.parse_intermixed_args(argv)

    def work() -> None:
        records = Records(load_sweep(arguments.config, arguments.overrides), arguments.records)
        print(write_report(records, arguments.records))

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
