"""Dense attention with a decay by the C++ kernel, as PyTorch operators with fake kernels and gradients.

Of the T x T weights only one block of query rows is in memory at a time. Shapes as in decayed_cpu.cpp: B batch, H
heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels.calling import call, records
from hf_sparseprior.kernels.diagonal_cpu import like_projection, when_loaded
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
    arguments = (q, k, v, positions, *scalars, num_prefix_tokens, scale)
    return call(torch.ops.hf_sparseprior.decayed_forward, records(q, k, v, *scalars), *arguments)


def register() -> None:
    """Register shapes for tracing, and gradients."""
    torch.library.register_fake("hf_sparseprior::decayed_forward", fake_forward)
    torch.library.register_fake("hf_sparseprior::decayed_backward", _fake_backward)
    torch.library.register_autograd("hf_sparseprior::decayed_forward", _backward, setup_context=setup_context)


def fake_forward(q: Tensor, *rest: Any) -> Tensor:
    """Shape of an output."""
    return like_projection(q)


def _fake_backward(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    log_gamma, alpha = rest[3:5]
    like = (torch.empty_like(log_gamma), torch.empty_like(alpha), torch.empty_like(alpha))
    return (*(like_projection(q) for _ in range(3)), *like)


def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep for the backward pass what an operator (tensors, prefix, scale) was given."""
    *tensors, prefix, scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (prefix, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 9
    q, k, v, positions, log_gamma, alpha, prefix_gamma = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        inputs = (q, k, v, log_gamma, alpha, prefix_gamma)
        grads = gradients(decayed, inputs, grad, positions=positions, scale=ctx.options[1])
        return *grads[:3], None, *grads[3:], None, None
    dq, dk, dv, *scalars = torch.ops.hf_sparseprior.decayed_backward(
        grad, q, k, v, positions, log_gamma, alpha, prefix_gamma, *ctx.options
    )
    return dq, dk, dv, None, *scalars, None, None


when_loaded(register)
