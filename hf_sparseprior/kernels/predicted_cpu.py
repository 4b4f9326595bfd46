"""The keys that Sparsifiner predicts, by the C++ kernel, as PyTorch operators with fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_sparseprior.kernels.diagonal_cpu import when_loaded


def predicted_coefficients(q: Tensor, k: Tensor, down: Tensor, num_prefix_tokens: int, scale: float) -> Tensor:
    """A_down of the patches, softmax(scale * q (W_down k)^T) (Sparsifiner Eq. 1), before the threshold.

    Args:
        q, k: (B, H, T, D) float32 or bfloat16, any strides; prefix tokens come first and are left out.
        down: (R, N) float32, W_down on the grid.
        num_prefix_tokens: P.
        scale: factor of the logits.

    Returns:
        float32 (B, H, N, R), without gradients.
    """
    return torch.ops.hf_sparseprior.predicted_coefficients(q, k, down, num_prefix_tokens, scale)


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
    torch.library.register_fake("hf_sparseprior::predicted_coefficients", _fake_coefficients)


def _fake_coefficients(q: Tensor, k: Tensor, down: Tensor, num_prefix_tokens: int, scale: float) -> Tensor:
    shape = (*q.shape[:2], q.shape[2] - num_prefix_tokens, down.shape[0])
    return q.new_empty(shape, dtype=torch.float32)


def _fake(coefficients: Tensor, basis: Tensor, num_prefix_tokens: int, budget: int, threshold: float) -> Tensor:
    batch, heads, patches, _ = coefficients.shape
    return coefficients.new_empty((batch, heads, patches, num_prefix_tokens + budget), dtype=torch.int32)


when_loaded(register)
