"""Masks and boxes drawn on images. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import pyplot


def class_colours(count: int) -> np.ndarray:
    """One colour for each class, uint8 (count, 3). An index always has the same colour."""
    palette = np.array(pyplot().get_cmap("tab10").colors)
    return (255 * palette[np.arange(count) % len(palette)]).astype(np.uint8)


def draw_instances(
    axis: Any,
    image: np.ndarray,
    masks: Sequence[np.ndarray] | np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[int],
    classes: Sequence[str],
    scores: Sequence[float] | None = None,
) -> None:
    """One image with its objects on a matplotlib axis.

    Args:
        axis: the axis to draw on.
        image: uint8 RGB (height, width, 3).
        masks: bool (height, width) for each object.
        boxes: (objects, 4) left, top, right, bottom in pixels.
        labels: for each object an index into `classes`.
        classes: names.
        scores: each object's score, written after its class.
    """
    colours = class_colours(len(classes))
    shown = image.astype(np.float32)
    for mask, label in zip(masks, labels, strict=True):
        shown[mask] = 0.45 * shown[mask] + 0.55 * colours[label]
    axis.imshow(shown.astype(np.uint8), interpolation="nearest")
    for index, (label, (left, top, right, bottom)) in enumerate(zip(labels, boxes, strict=True)):
        colour = colours[label] / 255
        # A pixel's square reaches half a pixel to either side of its index.
        corner, size = (left - 0.5, top - 0.5), (right - left, bottom - top)
        axis.add_patch(pyplot().Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=1.2))
        text = classes[label] if scores is None else f"{classes[label]} {scores[index]:.2f}"
        # Where there is no room above the box, the name goes inside.
        inside = top < 10
        axis.text(
            left,
            top + 1 if inside else top - 1,
            text,
            fontsize=6,
            color="white",
            va="top" if inside else "bottom",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
        )
    axis.set_axis_off()
