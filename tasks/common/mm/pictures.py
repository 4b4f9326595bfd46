"""Masks and boxes drawn on images. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import pyplot

FONT_SIZE = 6  # of labels, in points
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


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
        scores: each object's score, written after its class. Where labels would lie on each other, those of the
            highest scores are written.
    """
    colours = class_colours(len(classes))
    shown = image.astype(np.float32)
    for mask, label in zip(masks, labels, strict=True):
        shown[mask] = 0.45 * shown[mask] + 0.55 * colours[label]
    axis.imshow(shown.astype(np.uint8), interpolation="nearest")
    order = np.arange(len(labels)) if scores is None else np.argsort(-np.asarray(scores), kind="stable")
    points, taken = _points_in_pixels(axis), list[Rectangle]()
    for index in order:
        label, (left, top, right, bottom) = labels[index], boxes[index]
        colour = colours[label] / 255
        # A pixel's square reaches half a pixel to either side of its index.
        corner, size = (left - 0.5, top - 0.5), (right - left, bottom - top)
        axis.add_patch(pyplot().Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=1.2))
        text = classes[label] if scores is None else f"{classes[label]} {scores[index]:.2f}"
        size_of_text = ((0.6 * len(text) + 0.4) * FONT_SIZE * points, 1.5 * FONT_SIZE * points)  # about
        place = free_place(size_of_text, (left, top, right, bottom), image.shape[:2], taken)
        if place is not None:
            taken.append(place)
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}
            axis.text(*place[:2], text, fontsize=FONT_SIZE, color="white", va="top", bbox=box)
    axis.set_axis_off()


def _points_in_pixels(axis: Any) -> float:
    """How long a point of print is, in pixels of the image that the axis shows."""
    axis.apply_aspect()  # else an image that is narrower than its place would be measured as wide as that
    shown = axis.get_window_extent()
    return abs(axis.get_xlim()[1] - axis.get_xlim()[0]) / (72 * shown.width / axis.figure.dpi)


def free_place(
    size: tuple[float, float], box: Rectangle, shape: tuple[int, int], taken: Sequence[Rectangle]
) -> Rectangle | None:
    """Where a box's label goes: above it, or else inside it at its top or bottom, or below it.

    It lies in the image and on no other label; None if there is no such place.

    Args:
        size: width and height of the label.
        box: left, top, right, bottom; so is what is returned.
        shape: height and width of the image.
        taken: places of other labels.
    """
    (width, height), (left, top, _, bottom) = size, box
    if width > shape[1]:
        return None
    left = max(0.0, min(left, shape[1] - width))
    for upper in (top - height, top, bottom - height, bottom):
        place = (left, upper, left + width, upper + height)
        if upper >= 0 and upper + height <= shape[0] and not any(_overlap(place, other) for other in taken):
            return place
    return None


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
