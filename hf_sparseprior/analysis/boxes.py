"""Attention inside the box of an object (Fibottention section 6.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class InsideAttention(NamedTuple):
    """Numbers of the weights from each patch of a box to each patch of the same box, scalars in float64.

    mean: over all of them. variance: over the pairs, after the mean over the heads. head_variance: over the pairs of
    each head, then the mean over the heads. patch_variance: over the patches, of what each receives in the mean over
    heads and querying patches.
    """

    mean: float
    variance: float
    head_variance: float
    patch_variance: float


def inside_attention(weights: Tensor, inside: Tensor, num_prefix_tokens: int) -> InsideAttention:
    """Mean and variances of the "inside-to-inside" attention of one image in one layer.

    The paper gives no formula for its variance; these are the three that its text can mean. Variances are divided by
    the number of values; a pair outside a head's support has weight 0 and counts.

    Args:
        weights: (H, T, T).
        inside: bool, one for each patch, True for the patches in the box; two or more are True.
        num_prefix_tokens: P.

    Raises:
        ValueError: for fewer than two patches.
    """
    chosen = num_prefix_tokens + inside.flatten().nonzero()[:, 0]
    if len(chosen) < 2:
        raise ValueError(f"a box of {len(chosen)} patches must hold two or more")
    pairs = weights[:, chosen][:, :, chosen].to(torch.float64)
    return InsideAttention(
        pairs.mean().item(),
        pairs.mean(0).var(correction=0).item(),
        pairs.flatten(1).var(1, correction=0).mean().item(),
        pairs.mean((0, 1)).var(correction=0).item(),
    )


def patch_coverage(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The share of each patch that a mask covers: (height, width) of the grid.

    Args:
        mask: (pixel rows, pixel columns), 0 to 1, whole multiples of the grid.
        grid: (height, width) in patches.
    """
    patch = (mask.shape[0] // grid[0], mask.shape[1] // grid[1])
    if (grid[0] * patch[0], grid[1] * patch[1]) != tuple(mask.shape):
        raise ValueError(f"a mask of {mask.shape[0]}x{mask.shape[1]} pixels must be a multiple of the {grid} grid")
    return F.avg_pool2d(mask[None, None].to(torch.float64), patch)[0, 0]
