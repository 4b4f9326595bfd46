"""Differences that priors make: python -m tasks.classification.evidence COMPARISON.yaml ... --records FOLDER

The comparisons' rows are called METHOD-PRIOR, and one prior of each method is `plain`. Every row is compared with the
plain row of its method, seed by seed. The command reads the records that `compare` left in FOLDER/COMPARISON and writes
evidence.md and evidence.png. What is missing is shown as missing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.classification import commands
from tasks.classification.compare import load_comparison
from tasks.common.compare import Comparison, all_records
from tasks.common.comparison_table import spread

PLAIN = "plain"

SPREAD = (
    "± is the standard deviation over seeds: over the order of the training images, and over what starts anew, "
    "which is adapters, decays and the classifier (where the number of classes is the checkpoint's, its classifier "
    "starts the same in every seed). Training and test images, the checkpoint and the permutation of a random order "
    "are the same in every seed; what another draw of them would change is not in it."
)


@dataclass
class Row:
    """One method with one prior on one task, over seeds.

    method, prior: the two parts of the row's name.
    seeds: all seeds that there should be.
    accuracy: {seed: share of the test images} of the runs that exist.
    difference: {seed: accuracy minus that of the plain row} of the seeds for which both exist; {} for the plain row.
    records: those of the runs, as `compare` wrote them.
    """

    method: str
    prior: str
    seeds: list[int]
    accuracy: dict[int, float]
    difference: dict[int, float]
    records: list[dict[str, Any]]


def make_rows(comparison: Comparison, records: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
    """Every row of a comparison, with or without runs.

    Raises:
        ValueError: for a row that is not called METHOD-PRIOR, or whose method has no plain row.
    """
    accuracy = {
        name: {record["seed"]: record["metrics"]["test_accuracy"] for record in records.get(name, [])}
        for name in comparison.configs
    }
    rows = []
    for name in comparison.configs:
        method, dash, prior = name.partition("-")
        plain = f"{method}-{PLAIN}"
        if not dash or plain not in accuracy:
            raise ValueError(f"{comparison.name}: row {name!r} must be called METHOD-PRIOR and needs a row {plain!r}")
        shared = sorted(set(accuracy[name]) & set(accuracy[plain])) if name != plain else []
        difference = {seed: accuracy[name][seed] - accuracy[plain][seed] for seed in shared}
        seeds = sorted({*comparison.seeds, *accuracy[name]})
        rows.append(Row(method, prior, seeds, accuracy[name], difference, list(records.get(name, []))))
    return rows


# ---- table ----------------------------------------------------------------------------------------------------------


def task_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one task."""
    head = (
        *("method", "prior", "test accuracy, %", "minus plain, by seed", "mean ± std", "above plain"),
        *("max abs(M - 1), start → end", "mean(1 - M)", "max abs(alpha - 1)", "trained", "adapter, kB"),
    )
    return markdown_table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    if not row.records:
        return [row.method, row.prior, "missing", *[""] * 8]
    missing = [str(seed) for seed in row.seeds if seed not in row.accuracy]
    accuracy = spread(list(row.accuracy.values())) + (f" (seed {', '.join(missing)} missing)" if missing else "")
    by_seed = ", ".join(f"{100 * value:+.2f}" for value in row.difference.values())
    adapter = row.records[0].get("adapter_bytes")
    return [
        *(row.method, row.prior, accuracy, by_seed),
        spread(list(row.difference.values())) if row.difference else "",
        agreement(row),
        change(row, ("decay_change_at_start", "max_decay_change"), max),
        change(row, ("mean_decay_change_at_start", "mean_decay_change"), statistics.fmean),
        change(row, ("alpha_change_at_start", "max_alpha_change"), max),
        str(row.records[0].get("trainable_parameters", row.records[0]["parameters"])),
        "" if adapter is None else f"{adapter / 1000:.1f}",
    ]


def agreement(row: Row) -> str:
    """ "2 of 3": how many seeds the prior is better with; equal is not better."""
    above = sum(value > 0 for value in row.difference.values())
    return f"{above} of {len(row.difference)}" if row.difference else ""


def change(row: Row, keys: Sequence[str], combine: Callable[[list[float]], float]) -> str:
    """What the records have under two keys, before and after training, combined over seeds. "" without a decay."""
    known = [[record[key] for record in row.records if record.get(key) is not None] for key in keys]
    return " → ".join(f"{combine(values):.2g}" for values in known if values)


def by_chance(rows: Sequence[Row]) -> str:
    """How many rows are above plain in every seed, and how many would be if each were above with probability 1/2."""
    above = sum(all(value > 0 for value in row.difference.values()) for row in rows)
    expected = sum(0.5 ** len(row.difference) for row in rows)
    return (
        f"{above} of {len(rows)} differences are above plain in every seed; if no prior changed anything, up to "
        f"{expected:.1f} would be on average, by chance."
    )


def overview(tasks: Mapping[str, Sequence[Row]]) -> str:
    """Mean difference to plain of every row, percentage points, with a column for each task, as a Markdown table."""
    names = {(row.method, row.prior): None for rows in tasks.values() for row in rows if row.prior != PLAIN}
    lines = []
    for method, prior in names:
        cells = [method, prior]
        for rows in tasks.values():
            row = next((row for row in rows if (row.method, row.prior) == (method, prior)), None)
            known = row.difference if row else {}
            cells.append(f"{spread(list(known.values()))} ({agreement(row)})" if row and known else "missing")
        lines.append(cells)
    return markdown_table(["method", "prior", *tasks], lines)


def report(tasks: Mapping[str, Sequence[Row]]) -> str:
    """The whole text in Markdown.

    Raises:
        ValueError: if the runs started from different checkpoints.
    """
    records = [record for rows in tasks.values() for row in rows for record in row.records]
    known = {record.get("pretrained_sha256") for record in records}
    checkpoints = sorted(checkpoint or "one not recorded" for checkpoint in known)
    if len(checkpoints) > 1:
        raise ValueError(
            f"the runs started from {len(checkpoints)} checkpoints ({', '.join(checkpoints)}), not from one"
        )
    total = sum(len(row.seeds) for rows in tasks.values() for row in rows)
    start = f"the checkpoint with SHA-256 `{checkpoints[0]}`" if any(known) else "a checkpoint that no record names"
    parts = [f"{len(records)} of {total} runs, from {start}."]
    parts += ["Test accuracy minus that of plain, percentage points, mean ± std (seeds above plain):", overview(tasks)]
    parts.append(SPREAD)
    if compared := [row for rows in tasks.values() for row in rows if row.difference]:
        parts.append(by_chance(compared))
    for task, rows in tasks.items():
        data = next((record["data"] for row in rows for record in row.records), "no run yet")
        parts += [f"## {task}", data, task_table(rows)]
    return "\n\n".join(parts) + "\n"


# ---- picture --------------------------------------------------------------------------------------------------------


def draw_rows(tasks: Mapping[str, Sequence[Row]], path: Path) -> Path:
    """A panel for each task: test accuracy of every seed, with one seed and method joined by a line. Bars are means."""
    plt = pictures.pyplot()
    columns = min(2, len(tasks))
    lines = -(-len(tasks) // columns)
    size = (6.4 * columns, 3.9 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(tasks) :]:
        axis.axis("off")
    for axis, (task, rows) in zip(axes.flat, tasks.items(), strict=False):
        _draw_task(axis, rows)
        axis.set_title(task.removeprefix("evidence_"))
        axis.set_ylabel("test accuracy, %")
    handles, names = axes[0, 0].get_legend_handles_labels()
    if named := dict(zip(names, handles, strict=True)):  # each once
        axes[0, 0].legend(named.values(), named, frameon=False, fontsize=8)
    return pictures.save(figure, path)


def _draw_task(axis: Any, rows: Sequence[Row]) -> None:
    seeds = sorted({seed for row in rows for seed in row.accuracy})
    for method in dict.fromkeys(row.method for row in rows):
        places = [place for place, row in enumerate(rows) if row.method == method]
        for number, seed in enumerate(seeds):
            values = [100 * rows[place].accuracy.get(seed, np.nan) for place in places]
            style = {"marker": "os^Dv"[number % 5], "linestyle": ("-", "--", ":")[number % 3], "color": pictures.INK}
            axis.plot(places, values, **style, label=f"seed {seed}", alpha=0.6, linewidth=0.9, markersize=4)
    for place, row in enumerate(rows):
        if row.accuracy:
            mean = 100 * np.mean(list(row.accuracy.values()))
            bar = {"color": pictures.ACCENT, "markersize": 16, "markeredgewidth": 2.5, "label": "mean"}
            axis.plot([place], [mean], "_", **bar)
    labels = [f"{row.method} {row.prior}" + ("" if row.accuracy else " (missing)") for row in rows]
    axis.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=8)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.evidence()
    arguments = parser.parse_args(argv)

    def work() -> None:
        if not arguments.records.is_dir():
            raise OSError(f"--records {arguments.records} is not a folder; give the one that `compare` left records in")
        tasks = {}
        for path in arguments.comparisons:
            comparison = load_comparison(path, arguments.set)
            tasks[comparison.name] = make_rows(comparison, all_records(comparison, arguments.records / comparison.name))
        out = arguments.out or arguments.records
        text = report(tasks)
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "evidence.md", text)
        print(f"{text}\npicture: {draw_rows(tasks, out / 'evidence.png')}, text: {out}/evidence.md")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
