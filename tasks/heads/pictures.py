"""Test images with what is there and what a head finds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import pyplot, save
from tasks.common.mm.pictures import class_colours, draw_instances
from tasks.common.mm.scenes import corner_boxes
from tasks.heads.kinds import IGNORED, Kind

SHOWN = 6
SURE = 0.5  # score from which an object is drawn


def draw_findings(
    source: Any, kind: Kind, found: Sequence[Any], classes: Sequence[str], path: Path, heading: str
) -> Path:
    """The first images, their annotations, and what was found in them: a column each."""
    count = min(SHOWN, len(found))
    figure, axes = pyplot().subplots(3, count, figsize=(2 * count, 6.4), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, title in zip(axes, ("image", "annotation", "found"), strict=True):
        row[0].set_title(title, loc="left", fontsize=10)
    for number in range(count):
        image, annotation = source.image(number), source.annotation(number)
        axes[0, number].imshow(image)
        if kind.finds == "classes":
            for axis, labels in ((axes[1, number], annotation), (axes[2, number], found[number])):
                axis.imshow(coloured(image, labels, len(classes)), interpolation="nearest")
            continue
        masks, _, labels = annotation
        draw_instances(axes[1, number], image, masks, corner_boxes(masks), labels, classes)
        scores, labels, places = (part[found[number][0] >= SURE] for part in found[number])
        masks = places if kind.finds == "masks" else np.zeros((len(scores), *image.shape[:2]), dtype=bool)
        seen = masks.any((1, 2)) if kind.finds == "masks" else np.ones(len(scores), dtype=bool)
        boxes = corner_boxes(masks[seen]) if kind.finds == "masks" else places
        draw_instances(axes[2, number], image, masks[seen], boxes, labels[seen], classes, scores[seen])
    figure.suptitle(heading)
    return save(figure, path)


def coloured(image: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """An image in which each class but the first, the background, has its colour."""
    shown = image.astype(np.float32)
    marked = (labels > 0) & (labels != IGNORED)
    shown[marked] = 0.45 * shown[marked] + 0.55 * class_colours(num_classes)[labels[marked]]
    return shown.astype(np.uint8)
