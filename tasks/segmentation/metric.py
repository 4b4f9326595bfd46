"""mmsegmentation's IoUMetric, which keeps what it knows of single classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmseg.evaluation import IoUMetric
from mmseg.registry import METRICS

METRIC_NAMES = ("mIoU", "mDice", "mFscore")  # of mmsegmentation


@METRICS.register_module()
class ClassIoUMetric(IoUMetric):
    """IoUMetric with `by_class`: after each evaluation, IoU and accuracy of every class as fractions.

    The accuracy of a class is the share of its pixels that are found. None where no pixel is of the class.
    """

    by_class: dict[str, dict[str, float | None]]

    def __init__(self, iou_metrics: str | Sequence[str] = ("mIoU",), **options: Any) -> None:
        wanted = [iou_metrics] if isinstance(iou_metrics, str) else list(iou_metrics)
        if not wanted or not set(wanted) <= set(METRIC_NAMES):  # mmsegmentation finds out when an evaluation ends
            raise ValueError(f"iou_metrics={iou_metrics!r} must be of {', '.join(METRIC_NAMES)}")
        super().__init__(iou_metrics=wanted, **options)

    def compute_metrics(self, results: list) -> dict[str, float]:
        """mm's metrics, in percent."""
        metrics = super().compute_metrics(results)
        self.by_class = {}
        if metrics:
            shared, union, _, true = (sum(part).double().tolist() for part in zip(*results, strict=True))
            for index, name in enumerate(self.dataset_meta["classes"]):
                accuracy = _share(shared[index], true[index])
                self.by_class[name] = {"IoU": _share(shared[index], union[index]), "accuracy": accuracy}
        return metrics


def _share(part: Any, whole: Any) -> float | None:
    return part / whole if whole else None
