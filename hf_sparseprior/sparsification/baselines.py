"""What else takes the time of a choice: one candidate in all layers, or the dense model on smaller images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.adapters.token_layout import patch_projection
from hf_sparseprior.sparsification.choice import DENSE
from hf_sparseprior.sparsification.search import Search

Forward = Callable[[Tensor], Tensor]


def best_uniform(search: Search, budget: float) -> tuple[str, tuple[int, ...], float] | str:
    """The candidate that has the least loss in all layers that can have it and save time by it, within the budget.

    Returns:
        Its name, the choice and the share of the time; or why there is none.
    """
    found = []
    for own in range(1, len(search.candidates) + 1):
        choice = tuple(own if saved[own] > 0 else DENSE for saved in search.table)
        predicted = 1 - search.gain * sum(saved[one] for saved, one in zip(search.table, choice, strict=True))
        if any(choice) and predicted <= budget:
            found.append((search.loss(choice), own, choice))
    for _, own, choice in sorted(found):
        if (share := search.share(choice, "uniform")) <= 1.05 * budget:
            return search.candidates[own - 1].name, choice, share
    return "no candidate in all layers meets the budget"


def smaller_images(search: Search, share: float) -> tuple[tuple[int, int], float, Forward] | str:
    """The largest size at which the dense model takes no more than a share of its time.

    Returns:
        (height, width), its share of the time, and the model for images of the full size, which it resizes; or why
        there is none.
    """
    subject, settings = search.subject, search.settings
    full, patch = subject.sides, _patch(search)
    steps = min(side // size for side, size in zip(full, patch, strict=True))

    def sides(step: int) -> tuple[int, int]:
        high, wide = (max(1, round(side / size * step / steps)) * size for side, size in zip(full, patch, strict=True))
        return high, wide

    def run(step: int) -> Forward:
        return lambda pixels: subject.outputs(_resized(pixels, sides(step)), subject.dense)

    def measured(step: int) -> float:
        small, large = _resized(subject.images(settings.batch), sides(step)), subject.images(settings.batch)
        calls: dict[str, Callable[[], object]] = {
            "dense": lambda: subject.outputs(large, subject.dense),
            f"resolution {'x'.join(map(str, sides(step)))}": lambda: subject.outputs(small, subject.dense),
        }
        first, second = search.seconds(calls).values()
        return second / first

    def share_of(step: int) -> float:
        return search.plan.value(f"share of {'x'.join(map(str, sides(step)))} pixels", lambda: measured(step))

    try:
        with torch.no_grad():
            run(max(1, steps // 2))(subject.images(1))
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"the model takes images of {full[0]}x{full[1]} pixels alone ({str(error).splitlines()[0]:.80})"
    low, high = 0, steps  # the largest size known to be fast enough, the smallest one that is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share_of(middle) <= share else (low, middle)
    if not low:
        return "no smaller image takes so little time"
    return sides(low), share_of(low), run(low)


def _patch(search: Search) -> Sequence[int]:
    """(height, width) that sides of images are multiples of."""
    strides = patch_projection(search.subject.dense).stride
    return tuple(strides)


def _resized(pixels: Tensor, sides: tuple[int, int]) -> Tensor:
    """Images (B, channels, height, width) of another size."""
    return F.interpolate(pixels, sides, mode="bilinear", antialias=True, align_corners=False)
