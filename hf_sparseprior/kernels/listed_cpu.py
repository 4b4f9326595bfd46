"""Attention over lists of keys by the C++ kernel, as PyTorch operators with fake kernels and gradients.

Shapes as in listed_cpu.cpp: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, K places of a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels.calling import call, records
from hf_sparseprior.kernels.decayed_cpu import fake_forward, setup_context
from hf_sparseprior.kernels.diagonal_cpu import like_projection, when_loaded
from hf_sparseprior.kernels.second_derivatives import gradients, listed


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    num_prefix_tokens: int,
    scale: float,
    factor: Tensor | None = None,
    prefix_factor: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each patch over the tokens of its list. Prefix tokens see everything.

    Args:
        q, k, v: (B, H, T, D) float32 or bfloat16, any strides.
        keys: int32 (1 or B, H, N, K), the tokens that each patch sees, at least one; -1 after the last.
        num_prefix_tokens: P.
        scale: factor of the logits.
        factor: float32 (1 or B, H, N, K), further factors of the patches' logits.
        prefix_factor: float32 (H,), further factors of the prefix tokens' logits.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D).
    """
    arguments = (q, k, v, keys, factor, prefix_factor, num_prefix_tokens, scale)
    trains = records(q, k, v, factor, prefix_factor)
    return call(torch.ops.hf_sparseprior.listed_forward, trains, *arguments)


def register() -> None:
    """Register shapes for tracing, and gradients."""
    torch.library.register_fake("hf_sparseprior::listed_forward", fake_forward)
    torch.library.register_fake("hf_sparseprior::listed_backward", _fake_backward)
    torch.library.register_autograd("hf_sparseprior::listed_forward", _backward, setup_context=setup_context)


def _fake_backward(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    factors = rest[3:5]
    like = (q.new_empty((0,) if x is None else x.shape, dtype=torch.float32) for x in factors)
    return (*(like_projection(q) for _ in range(3)), *like)


def _backward(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 8
    q, k, v, keys, factor, prefix_factor = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        inputs = (q, k, v, factor, prefix_factor)
        grads = gradients(listed, inputs, grad, keys=keys, scale=ctx.options[1])
        return *grads[:3], None, *grads[3:], None, None
    dq, dk, dv, d_factor, d_prefix = torch.ops.hf_sparseprior.listed_backward(
        grad, q, k, v, keys, factor, prefix_factor, *ctx.options
    )
    d_factor, d_prefix = (None if x is None else d for x, d in ((factor, d_factor), (prefix_factor, d_prefix)))
    return dq, dk, dv, None, d_factor, d_prefix, None, None


when_loaded(register)
