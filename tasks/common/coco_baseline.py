"""The constant predictor: the same boxes and masks for every image, as good as the training set allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

SHAPE = 28  # side of the mean mask of a class inside its box
POSITIONS = 9  # candidates along each axis
DETECTIONS = 100  # as many as COCO's AP takes from an image


@dataclass
class ConstantPredictor:
    """Its detections (D), the same for every image, the most likely first.

    boxes: (D, 4) left, top, right, bottom as fractions of the image's sides.
    labels: (D,) int64; scores: (D,), the share of training images in which the detection is right at IoU 0.5.
    shapes: (classes, SHAPE, SHAPE) bool, which part of a class's box belongs to the object.
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    shapes: np.ndarray

    def predict(self, height: int, width: int) -> dict[str, np.ndarray]:
        """Detections of an image: boxes (D, 4) in pixels, labels, scores, masks bool (D, height, width)."""
        boxes = self.boxes * [width, height, width, height]
        masks = np.zeros((len(boxes), height, width), dtype=bool)
        for mask, label, box in zip(masks, self.labels, boxes, strict=True):
            left, top, right, bottom = np.round(box).astype(int)
            size = (max(1, right - left), max(1, bottom - top))
            shape = cv2.resize(self.shapes[label].astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)
            target = mask[top : top + size[1], left : left + size[0]]
            target[:] = shape[: target.shape[0], : target.shape[1]]
        return {"bboxes": boxes, "labels": self.labels, "scores": self.scores, "masks": masks}


def fit_constant(coco: Any, category_ids: Sequence[int]) -> ConstantPredictor:
    """The best constant predictor of this form for a training set.

    For each class it has the mean box on a grid of positions, with the mean mask, scored by how often it is right
    there. The best `DETECTIONS` of all classes are kept.

    Args:
        coco: pycocotools' COCO with the training annotations; crowds are left out.
        category_ids: the category of each label.
    """
    images = coco.loadImgs(coco.getImgIds())
    candidates, labels, scores, shapes = [], [], [], []
    for label, category in enumerate(category_ids):
        annotations = coco.loadAnns(coco.getAnnIds(catIds=[category], iscrowd=False))
        if not annotations:
            shapes.append(np.zeros((SHAPE, SHAPE), dtype=bool))
            continue
        sizes = {image["id"]: (image["width"], image["height"]) for image in images}
        boxes = np.array([annotation["bbox"] for annotation in annotations], dtype=np.float64)
        boxes /= np.tile([sizes[annotation["image_id"]] for annotation in annotations], 2)
        boxes[:, 2:] += boxes[:, :2]
        shapes.append(mean_shape(coco, annotations))
        mean = (boxes[:, 2:] - boxes[:, :2]).mean(0)
        corners = np.stack(
            np.meshgrid(*(np.linspace(0, 1 - side, POSITIONS) for side in mean), indexing="ij"), -1
        ).reshape(-1, 2)
        placed = np.concatenate([corners, corners + mean], 1)
        right = overlaps(placed, boxes) >= 0.5
        owners = np.array([annotation["image_id"] for annotation in annotations])
        hit = np.stack([right[:, owners == image].any(1) for image in np.unique(owners)], 1)
        candidates.append(placed)
        labels.append(np.full(len(placed), label))
        scores.append(hit.sum(1) / len(images))
    all_scores = np.concatenate(scores)
    best = np.argsort(-all_scores, kind="stable")[:DETECTIONS]
    return ConstantPredictor(
        np.concatenate(candidates)[best], np.concatenate(labels)[best], all_scores[best], np.stack(shapes)
    )


def mean_shape(coco: Any, annotations: Sequence[dict[str, Any]]) -> np.ndarray:
    """Pixels of a box that belong to the object in at least half of these annotations: bool (SHAPE, SHAPE)."""
    total = np.zeros((SHAPE, SHAPE))
    for annotation in annotations:
        if not annotation.get("segmentation"):  # boxes alone
            continue
        left, top, width, height = np.round(annotation["bbox"]).astype(int)
        inside = coco.annToMask(annotation)[top : top + height, left : left + width]
        if inside.size:
            total += cv2.resize(inside.astype(np.float64), (SHAPE, SHAPE), interpolation=cv2.INTER_AREA)
    return total >= 0.5 * len(annotations)


def overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU (n, m) of boxes (n, 4) and (m, 4): left, top, right, bottom."""
    corner = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    shared = np.clip(corner, 0, None).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)
