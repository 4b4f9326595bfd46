"""Which layer gets which candidate: the exact solution of a multiple-choice knapsack, for every budget at once.

A layer is dense or has one of its candidates, which saves a share of the dense model's time and adds a loss. Savings
and losses of layers add up. Savings are counted in units of 1 / UNITS of the dense model's time and rounded down, so a
choice never seems faster than the sum of its measured times: a saving is underestimated by less than 1 / UNITS a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 10_000  # of the dense model's time
DENSE = 0  # the number of the dense candidate
FEW, CLEARLY = 4, 2.0  # images and standard errors, see `promising`


@dataclass(frozen=True)
class Point:
    """A choice that no other one beats in both time and loss.

    share: of the dense model's time. loss: sum over layers. choice: the number of each layer's candidate.
    """

    share: float
    loss: float
    choice: tuple[int, ...]


def frontier(savings: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> list[Point]:
    """All choices of least loss, from the slowest, which is dense, to the fastest.

    Args:
        savings: for each layer and candidate, the share of the dense model's time that it saves; 0 for `DENSE`. A
            candidate that saves nothing is never chosen; -inf is one that the layer cannot have.
        losses: for each layer and candidate, of 0 or more; 0 for `DENSE`.

    Returns:
        Points with falling share and rising loss. Of choices with equal loss it is the fastest.
    """
    units = [[math.floor(UNITS * saved) if saved > 0 else 0 for saved in layer] for layer in savings]
    size = sum(map(max, units)) + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    chosen = np.zeros((len(units), size), np.int64)
    for number, layer in enumerate(units):
        after = best.copy()  # dense
        for candidate, saved in enumerate(layer):
            if not saved:
                continue
            changed = np.full(size, np.inf)
            changed[saved:] = best[: size - saved] + losses[number][candidate]
            better = changed < after
            after[better] = changed[better]
            chosen[number, better] = candidate
        best = after
    points, least = [], np.inf
    for saved in reversed(range(size)):
        if best[saved] < least:
            least = best[saved]
            points.append(Point(1.0 - saved / UNITS, float(least), _choice(units, chosen, saved)))
    return points[::-1]


def _choice(units: Sequence[Sequence[int]], chosen: np.ndarray, saved: int) -> tuple[int, ...]:
    """The candidates that save so many units with the least loss."""
    choice = []
    for number in reversed(range(len(units))):
        candidate = int(chosen[number, saved])
        choice.append(candidate)
        saved -= units[number][candidate]
    return tuple(reversed(choice))


def least_loss(points: Sequence[Point], share: float) -> Point | None:
    """The point of least loss that takes no more than this share of the dense model's time; None: no point does."""
    return next((point for point in points if point.share <= share), None)


def promising(savings: Sequence[float], losses: Sequence[Sequence[float]]) -> list[bool]:
    """Which candidates may still be the best at some budget, judged by their losses on a few images.

    One is not if another that saves as much or more has a mean loss that is lower by more than `CLEARLY` standard
    errors of the difference, which is taken image by image. Of fewer than `FEW` images nothing is concluded.

    Args:
        savings: of each candidate. losses: of each candidate on each image, all on the same.
    """
    if not losses or len(losses[0]) < FEW:
        return [True] * len(losses)
    values = np.asarray(losses)

    def is_beaten(one: int, other: int) -> bool:
        difference = values[one] - values[other]
        return difference.mean() > CLEARLY * difference.std(ddof=1) / math.sqrt(len(difference))

    every = range(len(savings))
    return [not any(savings[other] >= savings[one] and is_beaten(one, other) for other in every) for one in every]
