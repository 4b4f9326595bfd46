"""Metrics of classification through evaluate's interface, without the hub."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
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


def compute_metrics(prediction: Any, views: int = 1, top: Sequence[int] = ()) -> dict[str, float]:
    """Metrics of a transformers EvalPrediction whose predictions are logits (examples * views, classes).

    Args:
        prediction: logits and labels. Views of an example stand next to each other.
        views: number of views of each example; their scores are averaged (`average_views`).
        top: for 5, "top5_accuracy" is the share of examples whose class has one of the 5 largest scores. It is left out
            where there are no more classes than that.
    """
    scores, labels = average_views(prediction.predictions, prediction.label_ids, views)
    scores, labels = scores[labels != IGNORED], labels[labels != IGNORED]
    metrics = accuracy_metric().compute(predictions=np.argmax(scores, -1), references=labels)
    best = np.argsort(-scores, axis=-1, kind="stable")
    for count in top:
        if count < scores.shape[-1]:
            found = (best[:, :count] == labels[:, None]).any(-1)
            metrics[f"top{count}_accuracy"] = float(found.mean()) if len(found) else 0.0
    return metrics


def average_views(logits: np.ndarray, labels: np.ndarray, views: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (examples, classes) and labels (examples,) of logits (examples * views, classes), an example's views next
    to each other.

    Scores are the mean over an example's views of their softmax, in float64, as SlowFast and MMAction2 test with many
    views. With one view they are the logits as they are.

    Raises:
        ValueError: if the number of logits is no multiple of `views`.
    """
    if views == 1:
        return logits, labels
    if len(logits) % views:
        raise ValueError(f"{len(logits)} predictions must be a multiple of the {views} views of an example")
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    scores = np.exp(shifted)
    scores /= scores.sum(-1, keepdims=True)
    return scores.reshape(-1, views, logits.shape[-1]).mean(1), labels.reshape(-1, views)[:, 0]


def what_was_not_learned(counts: np.ndarray, classes: Sequence[str], split: str) -> list[str]:
    """A line for a classifier that predicts one class, or is no better than the most frequent class; [] for others.

    Args:
        counts: confusion matrix (true, predicted). classes: names. split: what the examples are of.
    """
    true, predicted, total = counts.sum(1), counts.sum(0), int(counts.sum())
    if (true > 0).sum() < 2:
        return []  # there is nothing to tell apart
    said = []
    if (predicted > 0).sum() == 1:
        said.append(f"predicts one class, {classes[predicted.argmax()]}, for all {total} examples")
    if (right := int(counts.diagonal().sum())) <= true.max():
        said.append(
            f"is with {100 * right / total:.2f} % no better than always answering the most frequent class, "
            f"{classes[true.argmax()]} ({100 * true.max() / total:.2f} %)"
        )
    return [f"on {split} the model {' and '.join(said)}"] if said else []


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
