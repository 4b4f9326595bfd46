"""Mixup and CutMix in batch mode, and label smoothing, as soft targets.

Which images are mixed, and how, depends on the seed, the epoch and an image's position in the epoch's order alone: the
same global batch comes out of one process with a large batch, of several with small ones, and of gradient accumulation.

Papers: mixup (Zhang et al. 2018, Eq. 1), CutMix (Yun et al. 2019, Eq. 1), recipe of DeiT (Touvron et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.training.sampling import Draw


@dataclass(frozen=True)
class Mixing:
    """Settings of mixup and CutMix; the defaults switch both off.

    mixup, cutmix: alpha of Beta(alpha, alpha), from which the share of the first image is drawn; 0 for off.
    probability: that a batch is mixed at all.
    switch_probability: that CutMix is taken where both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 (off) or more, and finite")
        for name in ("probability", "switch_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in 0..1")

    @property
    def enabled(self) -> bool:
        """Whether anything is mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    def draw(self, random: np.random.Generator, height: int, width: int) -> Mix:
        """What happens to one batch of images of this size."""
        mixed, switch = random.random() < self.probability, random.random() < self.switch_probability
        if not self.enabled or not mixed:
            return Mix(1.0)
        if self.cutmix > 0 and (self.mixup == 0 or switch):
            return cut_box(float(random.beta(self.cutmix, self.cutmix)), random, height, width)
        return Mix(float(random.beta(self.mixup, self.mixup)))


@dataclass(frozen=True)
class Mix:
    """share: of an image's own label; box: (top, bottom, left, right) taken from its partner, None for mixup."""

    share: float
    box: tuple[int, int, int, int] | None = None


def cut_box(share: float, random: np.random.Generator, height: int, width: int) -> Mix:
    """CutMix's box: sides sqrt(1 - share) of the image's, centre uniform, clipped; the share corrected for that."""
    cut_height, cut_width = int(height * (1 - share) ** 0.5), int(width * (1 - share) ** 0.5)
    row, column = int(random.integers(height)), int(random.integers(width))
    top, bottom = np.clip([row - cut_height // 2, row + cut_height // 2], 0, height).tolist()
    left, right = np.clip([column - cut_width // 2, column + cut_width // 2], 0, width).tolist()
    return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


class SoftTargetCollator:
    """Stacks samples; mixes their images and makes labels (B, num_classes) float32 of them. Where nothing is mixed or
    smoothed, labels stay (B,) class indices.

    A sample is {"pixel_values": (channels, height, width), "labels": int} with or without "draw", the `Draw` it came
    from. Images at positions 2i and 2i + 1 of an epoch are each other's partners; one whose partner is in another batch
    stays as it is. To mix, samples need their draws.

    Args:
        num_classes: number of classes.
        mixing: what is mixed.
        label_smoothing: each target is (1 - s) one-hot + s / num_classes.
        seed: of the run.
        batch_size: images that share one draw of mixing, an even number: the global batch, over processes and
            accumulation.
    """

    def __init__(
        self, num_classes: int, mixing: Mixing, label_smoothing: float = 0.0, seed: int = 0, batch_size: int = 2
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing!r} must be in [0, 1)")
        if mixing.enabled and (batch_size < 2 or batch_size % 2):
            raise ValueError(f"batch_size={batch_size!r} must be even, because images are mixed in pairs")
        self.num_classes = num_classes
        self.mixing = mixing
        self.label_smoothing = label_smoothing
        self.seed = seed
        self.batch_size = batch_size

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """{"pixel_values": (B, channels, height, width), "labels": (B, num_classes) or (B,)}."""
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        labels = torch.tensor([sample["labels"] for sample in samples])
        if not self.mixing.enabled and not self.label_smoothing:
            return {"pixel_values": pixels, "labels": labels}
        targets = self.targets(labels)
        if self.mixing.enabled:
            if any("draw" not in sample for sample in samples):
                raise ValueError("mixing needs samples that carry their draw; index the data set by DrawSampler's")
            pixels, targets = self._mix(pixels, targets, [sample["draw"] for sample in samples])
        return {"pixel_values": pixels, "labels": targets}

    def targets(self, labels: Tensor) -> Tensor:
        """Smoothed one-hot targets (B, num_classes) of class indices (B,)."""
        off = self.label_smoothing / self.num_classes
        targets = torch.full((len(labels), self.num_classes), off)
        return targets.scatter_(1, labels[:, None], 1.0 - self.label_smoothing + off)

    def _mix(self, pixels: Tensor, targets: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        rows = {draw.position: row for row, draw in enumerate(draws)}
        mixed, mixed_targets = pixels.clone(), targets.clone()
        mixes: dict[int, Mix] = {}
        for row, draw in enumerate(draws):
            partner = rows.get(draw.position ^ 1)
            if partner is None:
                continue
            batch = draw.position // self.batch_size
            if batch not in mixes:
                # "mix": other uses of the same seed and epoch must not draw the same numbers.
                random = np.random.default_rng([self.seed, draw.epoch, batch, *b"mix"])
                mixes[batch] = self.mixing.draw(random, *pixels.shape[-2:])
            mix = mixes[batch]
            mixed_targets[row] = mix.share * targets[row] + (1 - mix.share) * targets[partner]
            if mix.box is None:
                mixed[row] = mix.share * pixels[row] + (1 - mix.share) * pixels[partner]
            else:
                top, bottom, left, right = mix.box
                mixed[row, :, top:bottom, left:right] = pixels[partner, :, top:bottom, left:right]
        return mixed, mixed_targets
