"""Pictures of a run: training curves, confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Loss and validation accuracy over epochs, from results.json."""
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
    points = [
        (entry["epoch"], 100 * entry["validation_accuracy"]) for entry in history if "validation_accuracy" in entry
    ]
    if points:
        right.plot(*zip(*points, strict=True), color=ACCENT)
    right.set_xlabel("epoch")
    right.set_ylabel("validation accuracy, %")
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
    axis.set_title(heading, fontsize=10)
    if calibration is not None:
        _draw_calibration(further[0], calibration)
    return save(figure, path)


def _draw_calibration(axis: Any, bins: np.ndarray) -> None:
    """How often a model is right, by its confidence; below the diagonal it is surer than right."""
    sizes, confidence, right = bins[bins[:, 0] > 0].T
    axis.plot([0, 100], [0, 100], color="0.7", linewidth=1)
    axis.scatter(100 * confidence, 100 * right, s=12 + 150 * sizes / sizes.sum(), color=ACCENT, alpha=0.8)
    axis.set(xlim=(0, 102), ylim=(0, 102), aspect="equal", xlabel="confidence, %", ylabel="right, %")
    axis.set_title("calibration", fontsize=10)
    axis.grid(alpha=0.25)
