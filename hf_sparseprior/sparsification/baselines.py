"""What else takes the time of a choice: one candidate in all layers, or the dense model on smaller images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.adapters.token_layout import patch_projection
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.cli.exportable import vision_config
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.sparsification.choice import DENSE, promising
from hf_sparseprior.sparsification.search import MET, Search

STEPS = 20  # of the share of patches that token merging leaves


@dataclass(frozen=True)
class Compared:
    """A model in the report.

    share: of the dense model's time. model: itself. outputs: (the model, images of the full size) -> its outputs.
    changes: what makes it from the dense model, in fields of a config. recovers, steps: the name of what this is after
    recovery, and the steps of that.
    """

    name: str
    share: float
    model: Any
    outputs: Callable[[Any, Tensor], Tensor]
    changes: dict[str, Any] = field(default_factory=dict)
    recovers: str | None = None
    steps: int | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Outputs of images of the full size."""
        return self.outputs(self.model, pixels)


def of_dense(search: Search) -> Compared:
    """The dense model."""
    return Compared("dense", 1.0, search.subject.dense, _outputs(search))


def of_choice(search: Search, name: str, choice: Sequence[int], share: float) -> Compared:
    """The model with a choice."""
    priors = search.priors_of(choice)
    return Compared(name, share, search.subject.built(priors), _outputs(search), {"prior": search.subject.spec(priors)})


def _outputs(search: Search) -> Callable[[Any, Tensor], Tensor]:
    return lambda model, pixels: search.subject.outputs(pixels, model)


def best_uniform(search: Search, budget: float) -> Compared | str:
    """The model with the candidate that has the least loss in all layers that can have it and save time by it, within
    the budget; or why there is none.
    """
    choices: dict[tuple[int, ...], int] = {}
    for candidate in range(1, len(search.candidates) + 1):
        choice = tuple(candidate if saved[candidate] > 0 else DENSE for saved in search.table)
        predicted = 1 - search.gain * sum(saved[one] for saved, one in zip(search.table, choice, strict=True))
        if any(choice) and predicted <= MET * budget:
            choices[choice] = candidate
    left = list(choices)
    while left:
        kept = promising([0.0] * len(left), [search.first_losses(choice) for choice in left])
        better = [choice for choice, keep in zip(left, kept, strict=True) if keep]
        fast = {choice: share for choice in better if (share := search.share(choice, "uniform")) <= MET * budget}
        if fast:
            best = min(fast, key=search.loss)
            name = f"{search.candidates[choices[best] - 1].name} in all layers"
            return of_choice(search, name, best, fast[best])
        left = [choice for choice in left if choice not in better]
    return "no candidate in all layers meets the budget"


def smaller_images(search: Search, share: float) -> Compared | str:
    """The dense model, which makes images smaller first, at the largest size at which it takes no more than a share of
    its time; or why there is none.
    """
    subject, settings = search.subject, search.settings
    full, patch = subject.sides, _patch(search)
    steps = min(side // size for side, size in zip(full, patch, strict=True))

    if subject.windows and not subject.ours:  # transformers' Swin keeps the window that a small image makes it take
        return "its windows would follow the smaller images, and stay so"

    def sides(step: int) -> tuple[int, int]:
        high, wide = (max(1, round(side / size * step / steps)) * size for side, size in zip(full, patch, strict=True))
        return high, wide

    def outputs(model: Any, pixels: Tensor, step: int) -> Tensor:
        return subject.outputs(_resized(pixels, sides(step)), model)

    def share_of(step: int) -> float:
        size, pixels = "x".join(map(str, sides(step))), subject.images(settings.batch)
        small = _resized(pixels, sides(step))

        def measure() -> float:
            return search.ratio(f"resolution {size}", lambda: subject.outputs(small, subject.dense))

        return search.plan.value(f"share of {size} pixels", measure)

    def why_not(step: int) -> str | None:
        alone = f"the model takes images of {full[0]}x{full[1]} pixels alone"
        if step < 1:
            return alone
        try:
            with torch.no_grad():
                small = outputs(subject.dense, subject.images(1), step)
        except (ValueError, RuntimeError, AssertionError) as error:
            return f"{alone} ({first_line(error):.80})"
        return None if small.shape[1:] == search.dense[0].shape[1:] else "its outputs grow with the image"

    if (reason := why_not(steps - 1)) is not None:
        return reason
    step = largest_step(steps, lambda step: why_not(step) is not None or share_of(step) <= share)
    if not step or why_not(step) is not None:
        return "no smaller image takes so little time"
    high, wide = sides(step)
    name, changes = f"dense at {high}x{wide} pixels", {"image_size": (high, wide)}
    return Compared(name, share_of(step), subject.dense, partial(outputs, step=step), changes)


def token_merging(search: Search, share: float) -> Compared | str:
    """The dense model that merges similar patches, as few as it may to take no more than a share of its time; with the
    fewest patches that it can leave where that takes longer; or why there is none.
    """
    subject, settings = search.subject, search.settings

    def share_of(step: int) -> float:
        def measure() -> float:
            pixels, model = subject.images(settings.batch), subject.merging(step / STEPS)
            return search.ratio(f"merging {step / STEPS:g}", lambda: subject.outputs(pixels, model))

        return search.plan.value(f"share of merging {step / STEPS:g}", measure)

    def why_not(step: int) -> str | None:
        try:
            with torch.no_grad():
                merged = subject.outputs(subject.images(1), subject.merging(step / STEPS))
        except ValueError as error:
            return str(error)
        return None if merged.shape[1:] == search.dense[0].shape[1:] else "its outputs are of single tokens"

    if (reason := why_not(STEPS - 1)) is not None:
        return reason
    fewest = 1 + largest_step(STEPS, lambda step: why_not(step) is not None)  # a block merges half of them at most
    step = max(fewest, largest_step(STEPS, lambda step: step <= fewest or share_of(step) <= share))
    taken, model = share_of(step), subject.merging(step / STEPS)
    name, changes = f"dense, patches merged to {step / STEPS:g} of them", {"prior": model.config.prior}
    name += ", the fewest that it can leave" if taken > share else ""
    return Compared(name, taken, model, _outputs(search), changes)


def largest_step(steps: int, is_fast: Callable[[int], bool]) -> int:
    """The largest step below `steps` that is fast, of times that rise with the step; 0: none is."""
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_fast(middle) else (low, middle)
    return low


def _patch(search: Search) -> tuple[int, int]:
    """(height, width) that sides of images are multiples of."""
    size = getattr(vision_config(search.subject.dense), "patch_size", None)
    return as_pair(patch_projection(search.subject.dense).stride if size is None else size)


def _resized(pixels: Tensor, sides: tuple[int, int]) -> Tensor:
    """Images (B, channels, height, width) of another size."""
    return F.interpolate(pixels, sides, mode="bilinear", antialias=True, align_corners=False)
