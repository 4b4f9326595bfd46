"""How different the heads of a layer are (Fibottention section 6.1, Table 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadDiversity(NamedTuple):
    """relative: (B,) diversity(X) as printed, 0 to 1. distance: (B,) mean of |Y_i - Y_j|_F, not divided by anything."""

    relative: Tensor
    distance: Tensor


def head_diversity(heads: Tensor) -> HeadDiversity:
    """diversity(X) = 2 / (h (h - 1)) sum_{i<j} |Y_i - Y_j|_F / (|Y_i|_F + |Y_j|_F) (Fibottention section 6.1).

    It is 0 for equal heads, 1 if all heads are opposite, and 1 / sqrt 2 for heads of equal norm and orthogonal outputs.
    A pair of heads that are both 0 counts as equal.

    Args:
        heads: outputs Y_i = softmax(...) V of the heads of a layer, (B, H, T, D) with two or more heads.

    Returns:
        Both values for each image, float64.

    Raises:
        ValueError: for a single head.
    """
    if heads.dim() != 4 or heads.shape[1] < 2:
        raise ValueError(f"heads of shape {tuple(heads.shape)} must be (batch, 2 heads or more, tokens, head width)")
    flat = heads.flatten(2).to(torch.float64)
    first, second = torch.triu_indices(heads.shape[1], heads.shape[1], 1, device=heads.device)
    # Not by a matrix product, which loses the small differences of nearly equal heads.
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")[:, first, second]
    norms = flat.norm(dim=-1)
    sums = norms[:, first] + norms[:, second]
    relative = torch.where(sums > 0, distances / sums, 0.0)
    return HeadDiversity(relative.mean(-1), distances.mean(-1))
