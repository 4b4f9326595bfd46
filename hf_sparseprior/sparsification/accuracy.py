"""How good models are on the test images, all on the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from hf_sparseprior.runs.tables import paired_interval, wilson_interval
from hf_sparseprior.sparsification.data import Images
from hf_sparseprior.sparsification.subject import CHANGE, Subject

ACCURACY, AGREEMENT = "accuracy", "agreement with the dense model's top class"
BATCH = 16
SAID_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class Scored:
    """A model on the test images.

    value, low, high: what `measure_name` says, with its 95 % interval. difference: of accuracy to the dense model,
    image by image, with its 95 % interval: (difference, low, high).
    """

    value: float
    low: float
    high: float
    difference: tuple[float, float, float] | None = None


def measure_name(subject: Subject, images: Images) -> str:
    """What is measured."""
    if not subject.classifies:
        return CHANGE
    return AGREEMENT if images.labels is None else ACCURACY


@torch.no_grad()
def measured(
    subject: Subject,
    images: Images,
    test: list[int],
    models: Mapping[str, Callable[[Tensor], Tensor]],
    say: Callable[[str], None],
) -> dict[str, Scored]:
    """What `measure_name` says, of each model, which maps images to outputs. Images that cannot be read are left out.

    Args:
        say: gets a line of progress each `SAID_EVERY` seconds.

    Raises:
        OSError: if none can be read.
    """
    values: dict[str, list[float]] = {name: [] for name in models}
    by_dense: list[float] = []
    said = monotonic()
    for number, wanted in enumerate(images.batches(test, BATCH)):
        if monotonic() - said >= SAID_EVERY:
            said = monotonic()
            say(f"testing: {number * BATCH} of {len(test)} images")
        if not (read := images.readable(wanted)):
            continue
        numbers, pixels = list(read), torch.stack(list(read.values()))
        dense = subject.outputs(pixels, subject.dense)
        classes = dense.argmax(-1) if subject.classifies else None
        if classes is not None and images.labels is not None:
            classes = torch.tensor([images.labels[number] for number in numbers], device=classes.device)
            by_dense += (dense.argmax(-1) == classes).double().tolist()
        for name, run in models.items():
            outputs = run(pixels)
            results = subject.loss(outputs, dense) if classes is None else outputs.argmax(-1) == classes
            values[name] += results.double().tolist()
    if not all(values.values()):
        raise OSError(f"none of {len(test)} test images can be read; {images.unreadable[test[0]]}")
    return {
        name: Scored(*_interval(results, subject.classifies), _difference(results, by_dense) if by_dense else None)
        for name, results in values.items()
    }


def _difference(right: list[float], before: list[float]) -> tuple[float, float, float]:
    changes = [after - first for after, first in zip(right, before, strict=True)]
    return sum(changes) / len(changes), *paired_interval(changes.count(1), changes.count(-1), len(changes))


def _interval(values: list[float], are_shares: bool) -> tuple[float, float, float]:
    mean = sum(values) / len(values)
    if are_shares:
        return (mean, *wilson_interval(round(sum(values)), len(values)))
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
    half = 1.96 * deviation / math.sqrt(len(values))
    return mean, max(0.0, mean - half), mean + half
