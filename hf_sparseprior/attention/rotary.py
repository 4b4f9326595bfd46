"""Rotary positions of patches: queries and keys are turned by angles that depend on their place (DINOv3).

Shape letters: D width of a head, H heads, N patches, P prefix tokens, T = P + N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """Cosines and sines (T, D) of a grid's angles; the sines of the first half of the channels are negated."""

    cosines: Tensor
    sines: Tensor


class RotaryPositions(nn.Module):
    """Angles of a patch from its place, for each axis D / 4 periods from 1 to nearly `base` (Simeoni et al. 2025).

    Places are the centres of the patches, from -1 to 1 along each side of the image. In training they may change,
    differently in each call and alike for all images of it.

    Args:
        head_dim: D, a multiple of 4.
        base: period of the slowest angles, in half sides of the image.
        shift: both places move by up to so much. jitter: each axis is stretched or shrunk by up to this factor.
        rescale: both axes are, together. None: not.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 100.0,
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.base, self.shift, self.jitter, self.rescale = head_dim, base, shift, jitter, rescale

    @classmethod
    def of(cls, config: Any) -> RotaryPositions:
        """Those of a config with `position_embedding="rotary"`."""
        changes = (config.rotary_shift, config.rotary_jitter, config.rotary_rescale)
        return cls(config.hidden_size // config.num_attention_heads, config.rotary_base, *changes)

    def forward(self, grids: Sequence[tuple[int, int]], num_prefix_tokens: int, like: Tensor) -> list[Rotation]:
        """The rotation of each grid (height, width), in the dtype and on the device of a tensor. Prefix tokens, which
        come first, are not turned.
        """
        precise: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
        factor, offset = self._change(precise) if self.training else (None, None)
        periods = self.base ** torch.arange(0, 1, 4 / self.head_dim, **precise)
        rotations = []
        for height, width in grids:
            sides = [2 * torch.arange(0.5, side, **precise) / side - 1 for side in (height, width)]
            places = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 1)
            if offset is not None:
                places = places + offset
            if factor is not None:
                places = places * factor
            angles = (2 * math.pi * places[:, :, None] / periods).flatten(1)  # (N, D / 2)
            cosines, sines = angles.cos(), angles.sin()
            cosines, sines = torch.cat([cosines, cosines], 1), torch.cat([-sines, sines], 1)
            if num_prefix_tokens:
                still = cosines.new_ones(num_prefix_tokens, self.head_dim)
                cosines, sines = torch.cat([still, cosines]), torch.cat([torch.zeros_like(still), sines])
            rotations.append(Rotation(cosines.to(like.dtype), sines.to(like.dtype)))
        return rotations

    def _change(self, precise: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """What places (N, 2) are multiplied by after an offset is added, and the offset, drawn anew."""

        def drawn(count: int, most: float) -> Tensor:
            return torch.empty(count, **precise).uniform_(-most, most)

        offset = None if self.shift is None else drawn(2, self.shift)
        factor = None if self.jitter is None else drawn(2, math.log(self.jitter)).exp()
        if self.rescale is not None:
            scale = drawn(1, math.log(self.rescale)).exp()
            factor = scale if factor is None else factor * scale
        return factor, offset

    def extra_repr(self) -> str:
        """What `print(model)` shows of it."""
        return f"head_dim={self.head_dim}, base={self.base:g}"


def rotate(tokens: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (B, T, H, D), turned: channel d with channel d + D / 2, as transformers pairs them.

    Their dtype stays. Under autocast it is that of the values, while the rotation has that of the tokens.
    """
    halves = tokens.unflatten(-1, (2, -1))
    swapped = halves.flip(-2).flatten(-2)
    return torch.addcmul(tokens * rotation.cosines[:, None], swapped, rotation.sines[:, None]).to(tokens.dtype)
