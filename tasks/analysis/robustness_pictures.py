"""Pictures of `tasks.analysis.robustness`, in the layout of Fibottention Figures 4, 6 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_sparseprior.analysis.pictures import COLOURS, MARKERS, pyplot, save
from tasks.analysis.corruptions import corrupt

if TYPE_CHECKING:
    from tasks.analysis.robustness import Robustness

FOUR = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression")  # one of each family


def draw_severities(models: Sequence[Robustness], path: Path, heading: str) -> Path:
    """Mean accuracy over corruptions by severity (Fibottention Figure 4)."""
    figure, axis = pyplot().subplots(figsize=(6.2, 4.2), layout="constrained")
    for place, model in enumerate(models):
        severities = list(next(iter(model.accuracy.values())))
        _line(axis, place, severities, [model.of_severity(severity) for severity in severities], model)
    _finish(axis, f"mean of {len(models[0].accuracy)} corruptions" if len(models[0].accuracy) > 1 else "")
    axis.legend(frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def draw_four(models: Sequence[Robustness], path: Path, heading: str) -> Path:
    """Accuracy by severity, a panel for each of four corruptions (Fibottention Figure 7)."""
    known = list(models[0].accuracy)
    names = FOUR if set(FOUR) <= set(known) else known[:4]
    figure, axes = pyplot().subplots(
        1, len(names), figsize=(3.2 * len(names) + 0.4, 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for place, model in enumerate(models):
            severities = model.accuracy[name]
            _line(axis, place, list(severities), list(severities.values()), model)
        _finish(axis, name)
        axis.label_outer()
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def _line(axis: Any, place: int, severities: Sequence[int], shares: Sequence[float], model: Robustness) -> None:
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    axis.plot(
        severities, [100 * share for share in shares], color=colour, marker=marker, markersize=5, label=model.name
    )
    axis.plot([0], [100 * model.clean], color=colour, marker=marker, markersize=5, fillstyle="none")
    axis.set_xticks([0, *severities], ["clean", *map(str, severities)])


def _finish(axis: Any, title: str) -> None:
    axis.set_xlabel("severity")
    axis.set_ylabel("test accuracy, %")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def draw_corruptions(models: Sequence[Robustness], path: Path, heading: str) -> Path:
    """Bars of the mean accuracy over severities, by corruption (Fibottention Figure 6)."""
    names = list(models[0].accuracy)
    width = 0.8 / len(models)
    figure, axis = pyplot().subplots(figsize=(max(5.0, 1.6 + 0.55 * len(names)), 4.4), layout="constrained")
    for place, model in enumerate(models):
        shift = (place - (len(models) - 1) / 2) * width
        shares = [100 * model.of_corruption(name) for name in names]
        axis.bar(np.arange(len(names)) + shift, shares, width, color=COLOURS[place % len(COLOURS)], label=model.name)
    _finish(axis, "mean over severities")
    axis.set_xlabel("")
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.grid(axis="x", visible=False)
    axis.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def draw_image(image: np.ndarray, names: Sequence[str], severities: Sequence[int], benchmark: str, path: Path) -> Path:
    """One image as it is and under each corruption at the middle severity.

    Args:
        image: (height, width, 3) uint8.
        names: names of the corruptions.
        severities: the middle one of these is drawn.
        benchmark: the benchmark whose constants are used.
        path: where the PNG is written.
    """
    severity = severities[len(severities) // 2]
    panels = {"clean": image} | {name: corrupt(image, name, severity, benchmark) for name in names}
    columns = min(5, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(1.9 * columns, 2.1 * rows + 0.4), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, pixels) in zip(axes.flat, panels.items(), strict=False):
        axis.imshow(pixels, interpolation="nearest")
        axis.set_title(name, fontsize=9)
    figure.suptitle(f"{benchmark}, severity {severity}", fontsize=11)
    return save(figure, path)
