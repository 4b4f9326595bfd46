"""Pictures of a run: training curves, confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save

JUDGED = ("accuracy", "mean_average_precision", "mean_absolute_error")  # on validation, by kind of labels


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Loss and validation accuracy, or what else chooses the best epoch, over epochs, from results.json."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for key, label, colour in (("loss", "training", INK), ("validation_loss", "validation", ACCENT)):
        points = [(entry["epoch"], entry[key]) for entry in history if key in entry]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, label=label)
    left.set_xlabel("epoch")
    left.set_ylabel("loss")
    if left.lines:
        left.legend(frameon=False)
    name = next((name for name in JUDGED for entry in history if f"validation_{name}" in entry), JUDGED[0])
    factor, unit = (1, "") if name == "mean_absolute_error" else (100, ", %")
    key = f"validation_{name}"
    points = [(entry["epoch"], factor * entry[key]) for entry in history if key in entry]
    if points:
        right.plot(*zip(*points, strict=True), color=ACCENT)
    right.set_xlabel("epoch")
    right.set_ylabel(key.replace("_", " ") + unit)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(heading)
    return save(figure, path)


def draw_kept(
    layers: Mapping[str, Sequence[tuple[int, int]]], path: Path, heading: str, places: Mapping[str, str]
) -> Path:
    """What pruning left of each layer: a panel for each structure, with (left, before) of the layers.

    `places`: what the numbers are of, by structure, if they are not of layers.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, len(layers), figsize=(3.2 * len(layers), 3.2), layout="constrained", squeeze=False)
    for axis, (name, sizes) in zip(axes[0], layers.items(), strict=True):
        numbers = range(1, len(sizes) + 1)
        axis.bar(numbers, [before for _, before in sizes], color="0.88")
        axis.bar(numbers, [left for left, _ in sizes], color=ACCENT)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(places.get(name, "layer"))
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(numbers if len(sizes) <= 12 else numbers[::4])
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)


def draw_confusion(
    counts: np.ndarray, classes: Sequence[str], path: Path, heading: str, calibration: np.ndarray | None = None
) -> Path:
    """Confusion matrix: colours are shares of each true class, with counts as text if there is room.

    `calibration`: bins of `ClassReport.calibration`, which are drawn beside it.
    """
    plt = pyplot()
    size = min(12.0, 2.4 + 0.42 * len(classes))
    widths = [size + 1.0] if calibration is None else [size + 1.0, 3.6]
    figure = plt.figure(figsize=(sum(widths), max(size, 3.6)), layout="constrained")
    axis, *further = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axis, shrink=0.7, label="share of the true class", pad=0.02)
    if len(classes) <= 30:
        for row in range(len(classes)):
            for column in range(len(classes)):
                if counts[row, column]:
                    colour = "white" if shares[row, column] > 0.5 else INK
                    axis.text(column, row, counts[row, column], ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axis.set_yticks(range(len(classes)), classes)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    figure.suptitle(heading, fontsize=10)
    if calibration is not None:
        _draw_calibration(further[0], calibration)
    return save(figure, path)


def draw_pairs(counts: np.ndarray, classes: Sequence[str], path: Path, heading: str, calibration: np.ndarray) -> Path:
    """Of several labels an image a matrix for each class, at most 30, and calibration (`calibration_bins`).

    `counts`: (classes, 2, 2), whether examples have the label and whether it is given.
    """
    plt = pyplot()
    shown = min(len(classes), 30)
    columns = min(6, shown)
    rows = -(-shown // columns)
    figure = plt.figure(figsize=(1.7 * columns + 3.8, max(1.9 * rows, 3.4)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.7 * columns, 3.8])
    for axis, name, own in zip(left.subplots(rows, columns, squeeze=False).flat, classes, counts, strict=False):
        axis.imshow(own / np.maximum(own.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
        for row, column in np.ndindex(2, 2):
            colour = "white" if own[row, column] > own[row].sum() / 2 else INK
            axis.text(column, row, own[row, column], ha="center", va="center", fontsize=8, color=colour)
        axis.set_title(name[:20], fontsize=8)
        axis.set_xticks((0, 1), ("no", "given"), fontsize=7)
        axis.set_yticks((0, 1), ("no", "has"), fontsize=7)
    for axis in left.axes[shown:]:
        axis.set_axis_off()
    _draw_calibration(right.subplots(), calibration)
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)


def draw_fit(true: np.ndarray, found: np.ndarray, names: Sequence[str], path: Path, heading: str) -> Path:
    """Numbers (examples, numbers) as they are and as a model found them, a panel each, at most 12."""
    plt = pyplot()
    columns = min(4, len(names))
    rows = -(-min(len(names), 12) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name, own, seen in zip(axes.flat, names, true.T, found.T, strict=False):
        axis.axline((own.mean(), own.mean()), slope=1, color="0.7", linewidth=1)
        axis.scatter(own, seen, s=10, alpha=0.6, color=ACCENT)
        axis.set(xlabel=f"{name[:20]}, true", ylabel="found")
        axis.grid(alpha=0.25)
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)


def _draw_calibration(axis: Any, bins: np.ndarray) -> None:
    """How often a model is right, by its confidence; below the diagonal it is surer than right."""
    sizes, confidence, right = bins[bins[:, 0] > 0].T
    axis.plot([0, 100], [0, 100], color="0.7", linewidth=1)
    axis.scatter(100 * confidence, 100 * right, s=12 + 150 * sizes / sizes.sum(), color=ACCENT, alpha=0.8)
    axis.set(xlim=(0, 102), ylim=(0, 102), aspect="equal", xlabel="confidence, %", ylabel="right, %")
    axis.set_title("calibration", fontsize=10)
    axis.grid(alpha=0.25)
