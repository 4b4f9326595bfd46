"""Clips as strips of frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save


def draw_clips(
    clips: Sequence[np.ndarray], labels: Sequence[str], predictions: Sequence[str], path: Path, heading: str
) -> Path:
    """One row for each clip, uint8 (F, height, width, 3), frames from left to right, with class and prediction."""
    plt = pyplot()
    columns = max(len(clip) for clip in clips)
    size = (0.9 * columns + 2.6, 0.95 * len(clips) + 0.5)
    figure, axes = plt.subplots(len(clips), columns + 1, figsize=size, squeeze=False, layout="constrained")
    for row, clip, label, prediction in zip(axes, clips, labels, predictions, strict=True):
        for axis in row:
            axis.axis("off")
        for axis, frame in zip(row, clip, strict=False):
            axis.imshow(frame)
        right = label == prediction
        text = f"{label}\n{'✓' if right else 'predicted ' + prediction}"
        row[-1].text(0.0, 0.5, text, va="center", fontsize=9, color=INK if right else ACCENT)
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)
