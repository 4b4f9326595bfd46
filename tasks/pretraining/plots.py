"""Pictures of a pretraining run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Loss, its two parts, and k-NN accuracy on validation images over epochs, from results.json.

    The loss is the entropy of the teacher's output and the student's divergence from it. Where the outputs collapse,
    the divergence falls to 0, and the entropy to 0 or to log K.
    """
    plt = pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    _plot(left, history, "loss", INK)
    left.set_ylabel("loss, nats")
    _plot(middle, history, "loss_entropy", INK)
    middle.set_ylabel("entropy of the teacher, nats")
    divergence = middle.twinx()
    _plot(divergence, history, "loss_kl", ACCENT)
    divergence.set_ylabel("KL of the student, nats", color=ACCENT)
    divergence.set_ylim(bottom=0)
    _plot(right, history, "validation_knn_accuracy", ACCENT, 100)
    right.set_ylabel("validation k-NN accuracy, %")
    if not right.lines:
        right.set_axis_off()
        right.text(0.5, 0.5, "k-NN was not measured during training\n(trainer.eval_strategy)", ha="center", fontsize=9)
    for axis in (left, middle, right):
        axis.set_xlabel("epoch")
        axis.spines["top"].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(heading)
    return save(figure, path)


def _plot(axis: Any, history: Sequence[dict[str, Any]], key: str, colour: str, factor: float = 1.0) -> None:
    points = [(entry["epoch"], factor * entry[key]) for entry in history if key in entry and "epoch" in entry]
    if points:
        axis.plot(*zip(*points, strict=True), color=colour)
