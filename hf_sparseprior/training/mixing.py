"""Mixup, CutMix and MixToken in batch mode, and label smoothing, as soft targets.

Which images are mixed, and how, depends on the seed, the epoch and an image's position in the epoch's order alone. So
one process with a large batch, several with small ones, and gradient accumulation give the same global batch.

Papers: mixup (Zhang et al. 2018, Eq. 1), CutMix (Yun et al. 2019, Eq. 1), MixToken (Jiang et al. 2021),
recipe of DeiT (Touvron et al. 2021).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.training.sampling import Draw


def check_mixtoken(model: Any, name: str = "the model") -> None:
    """Raise ValueError unless a model of our families, which may be inside a peft model, can mix its patches."""
    base = getattr(model, "get_base_model", lambda: model)()
    if "token_sources" not in inspect.signature(base.forward).parameters:
        raise ValueError(f"mixtoken mixes patches, which {name}, a {type(base).__name__}, cannot do")


@dataclass(frozen=True)
class Mixing:
    """Settings of mixup, CutMix and MixToken; the defaults switch all off.

    mixup, cutmix: alpha of Beta(alpha, alpha), from which the share of the first image is drawn; 0 for off.
    mixtoken: the same for MixToken, CutMix of patch tokens, which cannot be combined with the others.
    probability: probability that a batch is mixed at all.
    switch_probability: probability of CutMix if both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5
    mixtoken: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix", "mixtoken"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 (off) or more, and finite")
        if self.mixtoken and (self.mixup or self.cutmix):
            raise ValueError(f"mixtoken={self.mixtoken!r} goes with neither mixup nor cutmix; set both to 0")
        for name in ("probability", "switch_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be in 0..1")

    @property
    def enabled(self) -> bool:
        """Whether anything is mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0 or self.mixtoken > 0)

    def draw(self, random: np.random.Generator, height: int, width: int) -> Mix:
        """What happens to one batch of images of this size; for MixToken the size is in patches."""
        mixed, switch = random.random() < self.probability, random.random() < self.switch_probability
        if not self.enabled or not mixed:
            return Mix(1.0)
        if self.mixtoken > 0:
            return cut_box(float(random.beta(self.mixtoken, self.mixtoken)), random, height, width)
        if self.cutmix > 0 and (self.mixup == 0 or switch):
            return cut_box(float(random.beta(self.cutmix, self.cutmix)), random, height, width)
        return Mix(float(random.beta(self.mixup, self.mixup)))


@dataclass(frozen=True)
class Mix:
    """share: of an image's own label; box: (top, bottom, left, right) taken from its partner, None for mixup."""

    share: float
    box: tuple[int, int, int, int] | None = None


def cut_box(share: float, random: np.random.Generator, height: int, width: int) -> Mix:
    """CutMix's box, with sides sqrt(1 - share) of the image's and a uniform centre, clipped, and the share corrected
    for it.
    """
    cut_height, cut_width = int(height * (1 - share) ** 0.5), int(width * (1 - share) ** 0.5)
    row, column = int(random.integers(height)), int(random.integers(width))
    top, bottom = np.clip([row - cut_height // 2, row + cut_height // 2], 0, height).tolist()
    left, right = np.clip([column - cut_width // 2, column + cut_width // 2], 0, width).tolist()
    return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def own_shares(mix: Mix, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """How much of each patch is still the image's own (patches,); the box is in units of `size` (height, width)."""
    if mix.box is None:
        return torch.full((grid[0] * grid[1],), mix.share)
    inside = [
        (torch.arange(side) >= start) & (torch.arange(side) < end)
        for side, start, end in zip(size, mix.box[::2], mix.box[1::2], strict=True)
    ]
    rows, columns = (part.float().reshape(patches, -1).mean(1) for part, patches in zip(inside, grid, strict=True))
    return 1 - (rows[:, None] * columns).flatten()


class SoftTargetCollator:
    """Stacks samples, mixes their images and makes labels (B, num_classes) float32. If nothing is mixed, smoothed or
    weighted, labels stay (B,) class indices.

    A sample is {"pixel_values": (channels, height, width), "labels": int}; with several labels an image, or with
    numbers, "labels" is (num_classes,) float32, which may be mixed but not smoothed or weighted. Clips are (F,
    channels, height, width); each frame is mixed in the same way. A sample may have "draw", its `Draw`, and
    "label_map": its map's classes and scores (h, w, k) and the view (2, 3) of the image. Images at positions 2i and
    2i + 1 of an epoch are each other's partners. An image whose partner is in another batch stays as it is. Samples
    need their draws to be mixed. Repetitions of an image (`DrawSampler`) have draws of mixing of their own.

    Args:
        num_classes: number of classes.
        mixing: what is mixed.
        label_smoothing: each target is (1 - s) one-hot + s / num_classes.
        seed: the run's seed.
        batch_size: images that share one draw of mixing, an even number. It is the global batch, over processes and
            accumulation.
        grid: (height, width) of the model's patches, for MixToken and label maps.
        class_weights: (num_classes,) float32, factors of the targets, and so of a sample's loss by its class.
    """

    def __init__(
        self,
        num_classes: int,
        mixing: Mixing,
        label_smoothing: float = 0.0,
        seed: int = 0,
        batch_size: int = 2,
        grid: tuple[int, int] | None = None,
        class_weights: Tensor | None = None,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing!r} must be in [0, 1)")
        if mixing.enabled and (batch_size < 2 or batch_size % 2):
            raise ValueError(f"batch_size={batch_size!r} must be even, because images are mixed in pairs")
        if mixing.mixtoken and grid is None:
            raise ValueError(f"mixtoken={mixing.mixtoken!r} needs the grid of the model's patches")
        self.num_classes = num_classes
        self.mixing = mixing
        self.label_smoothing = label_smoothing
        self.seed = seed
        self.batch_size = batch_size
        self.grid = grid
        self.class_weights = class_weights

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """{"pixel_values": (B, channels, height, width), "labels": (B, num_classes) or (B,)}; with MixToken also
        "token_sources", an argument of the model, and with label maps "token_targets" (`token_labels.token_targets`).
        """
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        given = [sample["labels"] for sample in samples]
        labels = torch.stack(given) if torch.is_tensor(given[0]) else torch.tensor(given)
        batch: dict[str, Any] = {"pixel_values": pixels, "labels": labels}
        if self.mixing.enabled or self.label_smoothing or self.class_weights is not None:
            batch["labels"] = self.targets(labels)
        mixes = self._mixes(samples, tuple(pixels.shape[-2:]))
        if self.mixing.enabled:
            batch |= self._mix(batch["pixel_values"], batch["labels"], mixes)
        if self.class_weights is not None:
            batch["labels"] = batch["labels"] * self.class_weights
        if "label_map" in samples[0]:
            batch["token_targets"] = self._token_targets([sample["label_map"] for sample in samples], mixes, pixels)
        return batch

    def targets(self, labels: Tensor) -> Tensor:
        """Smoothed one-hot targets (B, num_classes) of class indices (B,); labels that are targets stay as they are."""
        if labels.is_floating_point():
            return labels
        off = self.label_smoothing / self.num_classes
        targets = torch.full((len(labels), self.num_classes), off)
        return targets.scatter_(1, labels[:, None], 1.0 - self.label_smoothing + off)

    def _mixes(self, samples: Sequence[dict[str, Any]], size: tuple[int, ...]) -> dict[int, tuple[int, Mix]]:
        """{row: (its partner's row, what happens to it)} of the rows that are mixed."""
        if not self.mixing.enabled:
            return {}
        if any("draw" not in sample for sample in samples):
            raise ValueError("mixing needs samples that carry their draw; index the data set by DrawSampler's")
        draws: list[Draw] = [sample["draw"] for sample in samples]
        rows = {draw.position: row for row, draw in enumerate(draws)}
        drawn: dict[tuple[int, int], Mix] = {}
        mixes = {}
        for row, draw in enumerate(draws):
            partner = rows.get(draw.position ^ 1)
            if partner is None:
                continue
            key = draw.position // self.batch_size, draw.repeat
            if key not in drawn:
                # "mix", because other uses of the same seed and epoch must not draw the same numbers.
                numbers = [self.seed, draw.epoch, key[0], *([draw.repeat] if draw.repeat else []), *b"mix"]
                drawn[key] = self.mixing.draw(np.random.default_rng(numbers), *self._mixed_size(size))
            mixes[row] = partner, drawn[key]
        return mixes

    def _mixed_size(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(height, width) in which boxes are given: in patches for MixToken, otherwise in pixels."""
        return self.grid if self.mixing.mixtoken and self.grid else (size[0], size[1])

    def _own_shares(self, mixes: dict[int, tuple[int, Mix]], pixels: Tensor) -> dict[Mix, Tensor]:
        """`own_shares` of every mix. Rows of a batch may share one."""
        assert self.grid is not None
        size = self._mixed_size(tuple(pixels.shape[-2:]))
        return {mix: own_shares(mix, size, self.grid) for mix in {mix for _, mix in mixes.values()}}

    def _mix(self, pixels: Tensor, targets: Tensor, mixes: dict[int, tuple[int, Mix]]) -> dict[str, Tensor]:
        mixed, mixed_targets = pixels.clone(), targets.clone()
        for row, (partner, mix) in mixes.items():
            mixed_targets[row] = mix.share * targets[row] + (1 - mix.share) * targets[partner]
            if self.mixing.mixtoken:
                continue
            if mix.box is None:
                mixed[row] = mix.share * pixels[row] + (1 - mix.share) * pixels[partner]
            else:
                top, bottom, left, right = mix.box
                mixed[row, ..., top:bottom, left:right] = pixels[partner, ..., top:bottom, left:right]
        batch = {"pixel_values": mixed, "labels": mixed_targets}
        if self.mixing.mixtoken and self.grid:
            sources = torch.arange(len(pixels))[:, None].repeat(1, self.grid[0] * self.grid[1])
            shares = self._own_shares(mixes, pixels)
            for row, (partner, mix) in mixes.items():
                sources[row, shares[mix] == 0] = partner
            batch["token_sources"] = sources
        return batch

    def _token_targets(
        self, maps: Sequence[tuple[Tensor, Tensor, Tensor]], mixes: dict[int, tuple[int, Mix]], pixels: Tensor
    ) -> dict[str, Tensor]:
        if self.grid is None:
            raise ValueError("label maps need the grid of the model's patches")
        classes, scores, views = (torch.stack(parts) for parts in zip(*maps, strict=True))
        partners, shares = torch.arange(len(maps)), torch.ones(len(maps), self.grid[0] * self.grid[1])
        by_mix = self._own_shares(mixes, pixels)
        for row, (partner, mix) in mixes.items():
            partners[row], shares[row] = partner, by_mix[mix]
        return {"classes": classes, "scores": scores, "views": views, "partners": partners, "shares": shares}
