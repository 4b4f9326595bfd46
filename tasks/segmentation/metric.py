"""mmsegmentation's IoUMetric, which keeps what it knows of single classes."""

from __future__ import annotations

from typing import Any

from mmseg.evaluation import IoUMetric
from mmseg.registry import METRICS


@METRICS.register_module()
class ClassIoUMetric(IoUMetric):
    """IoUMetric with `by_class`: after each evaluation, IoU and accuracy of every class as fractions.

    The accuracy of a class is the share of its pixels that are found. None where no pixel is of the class.
    """

    by_class: dict[str, dict[str, float | None]]

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
