"""Metrics of classification through evaluate's interface, without the hub."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score
from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix

IGNORED = -100  # label of a sample that is no image; torch's cross entropy ignores it


class Accuracy(evaluate.Metric):
    """Share of right predictions, computed as by `evaluate.load("accuracy")`, which needs the hub."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Share of predictions that equal the reference.",
            citation="",
            inputs_description="predictions, references: lists of class indices",
            features=datasets.Features({"predictions": integer, "references": integer}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}


def accuracy_metric() -> Accuracy:
    """The metric, kept in memory, so that parallel runs share no cache file."""
    return Accuracy(keep_in_memory=True)


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Metrics of a transformers EvalPrediction whose predictions are logits (images, classes)."""
    predicted = np.argmax(prediction.predictions, -1)
    counted = prediction.label_ids != IGNORED
    return accuracy_metric().compute(predictions=predicted[counted], references=prediction.label_ids[counted])


def pack_correct(labels: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Which predictions are right, in order, small enough for JSON: how many there are, and a bit each in base64."""
    right = (labels == predicted)[labels != IGNORED]
    return {"count": len(right), "bits": base64.b64encode(np.packbits(right).tobytes()).decode()}


def unpack_correct(packed: Mapping[str, Any]) -> np.ndarray:
    """What `pack_correct` packed: bool (predictions,)."""
    bits = np.frombuffer(base64.b64decode(packed["bits"]), np.uint8)
    return np.unpackbits(bits, count=packed["count"]).astype(bool)


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts (true class, predicted class)."""
    labels, predicted = labels[labels != IGNORED], predicted[labels != IGNORED]
    return sklearn_confusion_matrix(labels, predicted, labels=range(num_classes))
