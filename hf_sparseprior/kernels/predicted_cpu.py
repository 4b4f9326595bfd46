"""The keys that Sparsifiner predicts, by the C++ kernel, as a PyTorch operator with a fake kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def predicted_keys(
    coefficients: Tensor, basis: Tensor, num_prefix_tokens: int, budget: int, threshold: float
) -> Tensor:
    """The tokens with the largest scores for each patch, without a table of all pairs.

    Args:
        coefficients: (B, H, N, R) float32, A_down; values up to `threshold` count as 0.
        basis: (R, N) float32, W_up.
        num_prefix_tokens: P.
        budget: 1 to N, how many patches a patch sees at most.
        threshold: tau.

    Returns:
        int32 (B, H, N, P + budget): the prefix tokens, then the patches with nonzero scores, ascending, then -1. A
        patch without any key, which is possible with P = 0, sees itself.
    """
    return torch.ops.hf_sparseprior.predicted_keys(coefficients, basis, num_prefix_tokens, budget, threshold)


def register() -> None:
    """Shapes for tracing."""
    torch.library.register_fake("hf_sparseprior::predicted_keys", _fake)


def _fake(coefficients: Tensor, basis: Tensor, num_prefix_tokens: int, budget: int, threshold: float) -> Tensor:
    batch, heads, patches, _ = coefficients.shape
    return coefficients.new_empty((batch, heads, patches, num_prefix_tokens + budget), dtype=torch.int32)
