"""What segmentation and detection each add to a run of mmengine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

PICTURE = "predictions.png"
MM_SPLITS = {"test": "test", "validation": "val"}  # our names and mm's


@dataclass(frozen=True)
class Task:
    """What a task adds to a run.

    name: name of the task's folder.
    draw: draws what models, by their headings, predict for a dataset's first images into a file.
    baseline: metrics of the best constant predictor on the test dataset of an mm Config, by the framework's own metric,
        as results.json has them.
    metric: the one that comparisons judge, as results.json names it. also: others that they judge.
    look: (a built data set, whether it is learned from) -> what looks wrong with it, one line each.
    in_percent: whether that metric is in percent; in results.json it is a fraction.
    """

    name: str
    draw: Callable[[Mapping[str, Any], Any, Any], Any]
    baseline: Callable[[Any], dict[str, Any]]
    metric: str
    also: Sequence[str] = ()
    look: Callable[[Any, bool], list[str]] = lambda dataset, training: []
    in_percent: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its name, for other processes."""
        return task_named, (self.name,)

    @property
    def module(self) -> str:
        """Name of the module that defines it."""
        return f"tasks.{self.name}.task"

    def metrics(self, split: str, values: Mapping[str, Any]) -> dict[str, float]:
        """The framework's metrics as results.json has them, SPLIT_NAME."""
        scale = 100 if self.in_percent else 1
        return {f"{split}_{name}": float(value) / scale for name, value in values.items()}


def task_named(name: str) -> Task:
    """The task of this name; needs the extra `dense`."""
    return getattr(import_module(f"tasks.{name}.task"), name.upper())
