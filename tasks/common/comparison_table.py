"""Table and picture of a comparison, from the records of its runs (tasks/common/compare.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import pictures
from hf_sparseprior.files import write_text
from tasks.common.tables import count_of_seeds, markdown_table, plus_minus


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Accuracy, interactions kept, parameters and time of each variant, as a Markdown table.

    It has three more columns if they say something: what was trained, if that is not everything; how far the mask is
    from none after training (the largest of all seeds), with a decay; multiply-adds of attention, if runs recorded
    them.
    """
    results = {name: runs for name, runs in results.items() if runs}
    records = [record for runs in results.values() for record in runs]
    seeds = max(map(len, results.values()))
    averaged = any("test_ema_accuracy" in record["metrics"] for record in records)
    decayed = any(record.get("max_decay_change") is not None for record in records)
    tuned = any(record.get("method", "full") != "full" for record in records)
    columns = ["run" if tuned else "prior", f"test accuracy, %, mean ± std of {seeds}"]
    columns += ["of the moving average, %"] if averaged else []
    columns += ["max abs(M - 1)"] if decayed else []
    counted = any(record.get("attention_flops") is not None for record in records)
    columns += ["interactions kept, %", *(["MHSA, MFLOPs"] if counted else []), "parameters"]
    columns += ["trained", "adapter, kB"] if tuned else []
    columns += ["ms a step", "seconds a run"]
    rows = []
    for name, runs in results.items():
        cells = [name, spread([record["metrics"]["test_accuracy"] for record in runs])]
        cells[-1] += "" if len(runs) == seeds else f" ({count_of_seeds(len(runs))})"
        if averaged:
            cells.append(spread(_known(record["metrics"].get("test_ema_accuracy") for record in runs)))
        if decayed:
            changes = _known(record.get("max_decay_change") for record in runs)
            cells.append(f"{max(changes):.2g}" if changes else "-")
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


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def spread(shares: Sequence[float]) -> str:
    """Mean and sample standard deviation of fractions, in percent."""
    if not shares:
        return "-"
    percent = 100 * np.array(shares)
    return plus_minus(percent.mean(), percent.std(ddof=1) if len(percent) > 1 else None)


def draw_results(results: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    """Test accuracy of every seed and the mean of each variant."""
    plt = pictures.pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 1.2 + 0.4 * len(results)), layout="constrained")
    for row, runs in enumerate(results.values()):
        accuracy = [100 * record["metrics"]["test_accuracy"] for record in runs]
        axis.plot(accuracy, [row] * len(accuracy), "o", color=pictures.INK, alpha=0.7)
        axis.plot([np.mean(accuracy)], [row], "|", color=pictures.ACCENT, markersize=22, markeredgewidth=2.5)
    axis.set_yticks(range(len(results)), list(results))
    axis.set_ylim(len(results) - 0.5, -0.5)
    axis.set_xlabel("test accuracy, % (dots: seeds, bar: mean)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    return pictures.save(figure, path)


def write_comparison(results: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write table, summary and picture of the records into their folder, and print the table."""
    lines = table(results)
    write_text(folder / "table.md", lines + "\n")
    summary = {name: [record["metrics"] for record in runs] for name, runs in results.items()}
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    picture = draw_results(results, folder / "results.png")
    print(f"\n{next(iter(results.values()))[0]['data']}\n\n{lines}\n\npicture: {picture}, table: {folder}/table.md")
