"""Curves of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Losses over steps and, if the simulator was asked, success on validation seeds."""
    plt = pyplot()
    simulated = [
        (entry["step"], 100 * entry["validation_success"]) for entry in history if "validation_success" in entry
    ]
    figure, axes = plt.subplots(1, 2 if simulated else 1, figsize=(9 if simulated else 5, 3.6), layout="constrained")
    left = axes[0] if simulated else axes
    for key, label, colour in (("diffusion", "training", INK), ("validation_loss", "validation, EMA", ACCENT)):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, label=label, marker="." if len(points) < 3 else None)
    left.set_yscale("log")
    left.set_ylabel("mean squared error of the noise")
    left.legend(frameon=False)
    if simulated:
        axes[1].plot(*zip(*simulated, strict=True), color=ACCENT, marker=".")
        axes[1].set_ylim(-4, 104)
        axes[1].set_ylabel("success on validation seeds, %")
    for axis in axes if simulated else [axes]:
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(heading)
    return save(figure, path)
