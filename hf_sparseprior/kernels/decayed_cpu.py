"""Dense attention with a decay by the C++ kernel, as PyTorch operators with fake kernels and gradients.

Of the T x T weights only one block of query rows is in memory at a time. Shapes as in decayed_cpu.cpp: B batch, H
heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels.diagonal_cpu import like_projection
from hf_sparseprior.kernels.second_derivatives import decayed, gradients


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    log_gamma: Tensor,
    alpha: Tensor,
    prefix_gamma: Tensor,
    num_prefix_tokens: int,
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T * W) v, with W = alpha * M for two patches and alpha * prefix_gamma with a prefix token.

    M is the mean over curves of gamma to the power of the distance (VIOLIN Eqs. 12 and 13).

    Args:
        q, k, v: (B, H, T, D) float32 or bfloat16, any strides.
        positions: float32 (C, A, N), integers; the distance of two patches is the sum over the axes.
        log_gamma: float32 (C, H), at most 0; alpha, prefix_gamma: float32 (H,).
        num_prefix_tokens: P.
        scale: factor of the logits.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D).
    """
    scalars = (log_gamma, alpha, prefix_gamma)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *scalars))
    return torch.ops.hf_sparseprior.decayed_forward(q, k, v, positions, *scalars, num_prefix_tokens, scale, trains)[0]


def register() -> None:
    """Register shapes for tracing, and gradients."""
    torch.library.register_fake("hf_sparseprior::decayed_forward", fake_forward)
    torch.library.register_fake("hf_sparseprior::decayed_backward", _fake_backward)
    torch.library.register_autograd("hf_sparseprior::decayed_forward", _backward, setup_context=setup_context)


def fake_forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shapes of an output and of its log-sum-exp, which an operator returns if its last argument says so."""
    batch, heads, tokens, _ = q.shape
    keep = rest[-1]
    return like_projection(q), q.new_empty((batch if keep else 0, heads, tokens), dtype=torch.float32)


def _fake_backward(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    log_gamma, alpha = rest[4:6]
    like = (torch.empty_like(log_gamma), torch.empty_like(alpha), torch.empty_like(alpha))
    return (*(like_projection(q) for _ in range(3)), *like)


def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep for the backward pass what an operator (tensors, prefix, scale, keep) was given, and its log-sum-exp."""
    *tensors, prefix, scale, keep = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (prefix, scale)
    ctx.kept = keep
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *others: Any) -> tuple:
    if grad is None:
        return (None,) * 10
    if not ctx.kept:
        raise RuntimeError("the forward pass of decayed attention kept nothing to differentiate with")
    q, k, v, positions, log_gamma, alpha, prefix_gamma, log_sums = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        inputs = (q, k, v, log_gamma, alpha, prefix_gamma)
        found = gradients(decayed, inputs, grad, positions=positions, scale=ctx.options[1])
        return *found[:3], None, *found[3:], None, None, None
    dq, dk, dv, *scalars = torch.ops.hf_sparseprior.decayed_backward(
        grad, q, k, v, log_sums, positions, log_gamma, alpha, prefix_gamma, *ctx.options
    )
    return dq, dk, dv, None, *scalars, None, None, None
