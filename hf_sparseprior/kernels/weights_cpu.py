"""Weights of pairs under a decay by the C++ kernels, along diagonals and of lists, as PyTorch operators with gradients.

Shapes as in weights_cpu.cpp: H heads, N patches, C curves, A axes of a position, S signed offsets, G images with lists
of their own, K places of a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels.calling import call, records
from hf_sparseprior.kernels.diagonal_cpu import when_loaded
from hf_sparseprior.kernels.second_derivatives import gradients, offset_pairs


def pair_weights(
    positions: Tensor,
    offsets: Tensor,
    counts: Tensor,
    pair_begin: Tensor,
    log_gamma: Tensor,
    alpha: Tensor,
    pairs: int,
) -> Tensor:
    """The `pair_weights` of `diagonal_attention`: alpha * mean over curves of gamma to the power of the distance.

    Args:
        positions: float32 (1 or H, C, A, N), integers; the distance of two patches is the sum over the axes.
        offsets, counts, pair_begin: as in `diagonal_attention`.
        log_gamma: float32 (C, H), at most 0. alpha: float32 (H,).
        pairs: how many weights there are, N - o for each pair of offsets +-o.

    Returns:
        float32 (pairs,).
    """
    arguments = (positions, offsets, counts, pair_begin, log_gamma, alpha, pairs)
    return call(torch.ops.hf_sparseprior.pair_weights, records(log_gamma, alpha), *arguments)


def listed_weights(
    positions: Tensor, keys: Tensor, num_prefix_tokens: int, log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor
) -> Tensor:
    """The `factor` of `listed_attention` under a decay.

    Args:
        positions: float32 (C, A, N), integers; the distance of two patches is the sum over the axes.
        keys: int32 (G, H, N, K) as in `listed_attention`; G is 1 or the number of images.
        num_prefix_tokens: P.
        log_gamma: float32 (C, H), at most 0. alpha, prefix_gamma: float32 (H,).

    Returns:
        float32 (G, H, N, K): alpha * mean over curves of gamma to the power of the distance, alpha * prefix_gamma for
        prefix tokens, 0 where there is no key.
    """
    arguments = (positions, keys, num_prefix_tokens, log_gamma, alpha, prefix_gamma)
    return call(torch.ops.hf_sparseprior.listed_weights, records(log_gamma, alpha, prefix_gamma), *arguments)


def register() -> None:
    """Register shapes for tracing, and gradients."""
    torch.library.register_fake("hf_sparseprior::listed_weights", _fake_listed)
    torch.library.register_fake("hf_sparseprior::listed_weights_backward", _fake_listed_backward)
    torch.library.register_autograd(
        "hf_sparseprior::listed_weights", _listed_backward, setup_context=_listed_setup_context
    )
    torch.library.register_fake("hf_sparseprior::pair_weights", _fake)
    torch.library.register_fake("hf_sparseprior::pair_weights_backward", _fake_backward)
    torch.library.register_autograd("hf_sparseprior::pair_weights", _backward, setup_context=_setup_context)


def _fake(
    positions: Tensor, offsets: Tensor, counts: Tensor, pair_begin: Tensor, log_gamma: Tensor, alpha: Tensor, pairs: int
) -> Tensor:
    return alpha.new_empty(pairs)


def _fake_backward(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[-2]), torch.empty_like(tensors[-1])


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 7
    *tables, log_gamma, alpha = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        names = ("positions", "offsets", "counts", "pair_begin")
        options = dict(zip(names, tables, strict=True))
        grads = gradients(weigh, (log_gamma, alpha), grad, **options, pairs=grad.shape[0])
    else:
        grads = torch.ops.hf_sparseprior.pair_weights_backward(grad, *tables, log_gamma, alpha)
    return None, None, None, None, *grads, None


def weigh(
    log_gamma: Tensor, alpha: Tensor, *, positions: Tensor, offsets: Tensor, counts: Tensor, pair_begin: Tensor,
    pairs: int,
) -> Tensor:  # fmt: skip
    """What `pair_weights` computes, by PyTorch operations."""
    heads, patches = counts.shape[0], positions.shape[-1]
    number, row, key = offset_pairs(offsets, patches)
    number, row, key = (x[key >= row] for x in (number, row, key))
    head = torch.arange(heads, device=counts.device).repeat_interleave(counts)[number]
    gaps = positions.expand(heads, -1, -1, -1)[head, :, :, row] - positions.expand(heads, -1, -1, -1)[head, :, :, key]
    powers = torch.exp(gaps.abs().sum(-1) * log_gamma.t()[head])  # (pairs, C)
    weights = powers.mean(-1) * alpha[head]
    return alpha.new_zeros(pairs).index_put((pair_begin[number] + row,), weights)


# ---- lists ----------------------------------------------------------------------------------------------------------


def _fake_listed(positions: Tensor, keys: Tensor, prefix: int, *scalars: Tensor) -> Tensor:
    return scalars[1].new_empty(keys.shape)


def _fake_listed_backward(
    grad: Tensor, positions: Tensor, keys: Tensor, prefix: int, *scalars: Tensor
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in scalars)


def _listed_setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    positions, keys, ctx.prefix, *scalars = inputs
    ctx.save_for_backward(positions, keys, *scalars)
    ctx.set_materialize_grads(False)


def _listed_backward(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 6
    positions, keys, *scalars = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        grads = gradients(weigh_lists, scalars, grad, positions=positions, keys=keys, prefix=ctx.prefix)
    else:
        grads = torch.ops.hf_sparseprior.listed_weights_backward(grad, positions, keys, ctx.prefix, *scalars)
    return None, None, None, *grads


def weigh_lists(
    log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor, *, positions: Tensor, keys: Tensor, prefix: int
) -> Tensor:
    """What `listed_weights` computes, by PyTorch operations."""
    patches = (keys.long() - prefix).clamp_min(0)
    distances = (positions[:, :, None, None, :, None] - positions[:, :, patches]).abs().sum(1)  # (C, G, H, N, K)
    weights = torch.exp(distances * log_gamma[:, None, :, None, None]).mean(0)
    weights = torch.where(keys < prefix, prefix_gamma.view(-1, 1, 1), weights) * alpha.view(-1, 1, 1)
    return torch.where(keys < 0, 0.0, weights)


when_loaded(register)
