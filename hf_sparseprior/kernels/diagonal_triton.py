"""Attention along diagonals by Triton kernels, as PyTorch operators with fake kernels and gradients.

Patch token j of head h sees the prefix tokens and the patches j + o, with o in the head's signed offsets. Prefix tokens
see everything. For a block of rows each offset is one contiguous, shifted load of K and of V. Softmax runs over the
offsets one after the other, in registers. Products and sums are elementwise in float32, without tensor cores.

The backward pass computes probabilities again from the softmax of each row. It only gathers: offsets have both signs,
so the patches that a patch sees are those that see it, and one kernel computes dq, dk and dv of a block from them. If
many blocks add to a sum, they do it in the order of the blocks, so that two runs give the same bits.

What bounds these kernels is memory: a layer reads q, k, v and writes its output once, and its backward pass reads q, k,
v, the output and its gradient and writes three gradients once. The rows that a block shares with others come from the
caches. A layer of up to `ONE_LAUNCH_TOKENS` tokens is one launch each way. Nothing waits for the device or depends on
what it computes, so calls can be captured in a CUDA graph.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, S signed offsets over all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels.calling import is_eager, records
from hf_sparseprior.kernels.diagonal_triton_backward import _backward_prefix, _backward_rows, _backward_tokens
from hf_sparseprior.kernels.diagonal_triton_forward import _forward_parts, _forward_prefix, _forward_tokens
from hf_sparseprior.kernels.flop_formulas import register_diagonal_triton
from hf_sparseprior.kernels.second_derivatives import gradients, on_diagonals
from hf_sparseprior.kernels.triton_blocks import draw_seed, kept_pairs, outputs
from hf_sparseprior.kernels.triton_launch import cdiv, launch
from hf_sparseprior.kernels.triton_sizes import block_sizes

# Up to so many tokens a layer is one launch: a program for each prefix token goes over all tokens. Of more it would
# work longer than all others together, so blocks write parts, which launches after it sum up.
ONE_LAUNCH_TOKENS = 1100
# Of more parts than this, another launch joins so many at a time first. The few programs of prefix tokens would still
# be at it when all others are done: at 65,536 patches in blocks of 16, 256 loads that wait for each other.
JOINED_PARTS = 128
# From so many patches on that a patch sees on average, the products of output and gradient are computed before, once,
# rather than anew for each of the neighbours: two more tensors are read, and one less for each neighbour.
NEIGHBOURS = 12


def diagonal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    signed_offsets: Tensor,
    offset_begin: Tensor,
    num_prefix_tokens: int,
    scale: float,
    zero_fill: bool = False,
    pair_weights: Tensor | None = None,
    pair_begin: Tensor | None = None,
    prefix_weight: Tensor | None = None,
    self_weight: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of each patch over the prefix tokens and the patches at its head's offsets.

    Args:
        q, k, v: (B, H, T, D) float16, bfloat16 or float32, any strides, no copies; D up to 256.
        signed_offsets: int32 (S,), head after head, -o right after each o > 0.
        offset_begin: int32 (H + 1,), where each head's begin.
        num_prefix_tokens: P; they see everything and are seen by everything.
        scale: factor of the logits.
        zero_fill: pairs outside the support count exp(0) instead of nothing.
        pair_weights: float32, factors of the logits of pairs at an offset. Each pair of offsets +-o of a head has N - o
            values, ordered by the lower of both rows. pair_begin: int64 (S,), where the values of each signed offset
            begin.
        prefix_weight: float32 (H,), the factor for pairs with a prefix token. self_weight: float32 (H,), that for
            patches that only see themselves.
        dropout_p: dropout probability of the attention weights, drawn from torch's generator; not with zero_fill.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D).
    """
    seed = draw_seed(q, dropout_p)
    inputs = (
        q, k, v, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
        num_prefix_tokens, scale, zero_fill, dropout_p,
    )  # fmt: skip
    if not is_eager(q):
        return torch.ops.hf_sparseprior.diagonal_triton(*inputs)[0]
    if records(q, k, v, pair_weights, prefix_weight, self_weight):
        return _Diagonal.apply(*inputs)
    return _run_forward(*inputs)[0]


# ---- launches -------------------------------------------------------------------------------------------------------


def _floats(q: Tensor, *size: int) -> Tensor:
    return q.new_empty(size, dtype=torch.float32)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, signed_offsets: Tensor, offset_begin: Tensor, pair_weights: Tensor | None,
    pair_begin: Tensor | None, prefix_weight: Tensor | None, self_weight: Tensor | None, seed: Tensor | None,
    prefix: int, scale: float, zero_fill: bool, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, D) and float32 (B, H, T, 2), see `store_softmax`."""
    batch, heads, tokens, width = q.shape
    out, stats = outputs(q)
    slots, patches = batch * heads, tokens - prefix
    if slots == 0:
        return out, stats
    v_sum = v.sum(2, dtype=torch.float32) if zero_fill else None
    sizes = block_sizes("diagonal_forward", q)
    blocks = cdiv(patches, sizes["ROWS"])
    in_parts = prefix > 0 and tokens > ONE_LAUNCH_TOKENS
    parts = _floats(q, slots, prefix, blocks, width) if in_parts else None
    part_stats = _floats(q, slots, prefix, blocks, 2) if in_parts else None
    strides = (q.stride(), k.stride(), v.stride(), out.stride())
    with torch.cuda.device_of(q):
        tokens_of = (
            q, k, v, out, stats, parts, part_stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin,
            prefix_weight, self_weight, seed, *strides, heads, patches, scale, dropout_p,
        )  # fmt: skip
        launch(_forward_tokens, slots * (blocks if in_parts else prefix + blocks), tokens_of, PREFIX=prefix, **sizes)
        if in_parts:
            if blocks > JOINED_PARTS:
                groups = cdiv(blocks, JOINED_PARTS)
                joined = _floats(q, slots, prefix, groups, width), _floats(q, slots, prefix, groups, 2)
                parts_of = (parts, part_stats, *joined, blocks, groups)
                launch(_forward_parts, slots * prefix * groups, parts_of, PER_GROUP=JOINED_PARTS, **sizes)
                (parts, part_stats), blocks = joined, groups
            prefix_of = (
                q, k, v, out, stats, parts, part_stats, prefix_weight, seed, *strides, heads, tokens, blocks, scale,
                dropout_p,
            )  # fmt: skip
            launch(_forward_prefix, slots * prefix, prefix_of, PREFIX=prefix, **sizes)
    return out, stats


def _prepared(
    grad: Tensor, out: Tensor, stats: Tensor, signed_offsets: Tensor, offset_begin: Tensor, prefix: int,
    zero_fill: bool, sizes: dict[str, int],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """delta, floor and floor_sum of `_backward_tokens`."""
    batch, heads, tokens, width = out.shape
    if not zero_fill and signed_offsets.shape[0] < NEIGHBOURS * heads:
        return None, None, None
    blocks = cdiv(tokens - prefix, sizes["ROWS"])
    delta = _floats(out, batch, heads, tokens)
    floor = torch.empty_like(delta) if zero_fill else None
    floor_parts = _floats(out, batch, heads, blocks, width) if zero_fill else None
    rows_of = (
        grad, out, stats, delta, floor, floor_parts, signed_offsets, offset_begin, grad.stride(), out.stride(), heads,
        tokens - prefix,
    )  # fmt: skip
    launch(_backward_rows, batch * heads * blocks, rows_of, PREFIX=prefix, **sizes)
    return delta, floor, None if floor_parts is None else floor_parts.sum(2)


def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, signed_offsets: Tensor,
    offset_begin: Tensor, pair_weights: Tensor | None, pair_begin: Tensor | None, prefix_weight: Tensor | None,
    self_weight: Tensor | None, seed: Tensor | None, prefix: int, scale: float, zero_fill: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, and d_pairs, d_prefix, d_self for the decay's weights; these have no elements without weights."""
    batch, heads, tokens, width = q.shape
    dq, dk, dv = (torch.empty_like(out) for _ in range(3))  # the kernels assume that they have the strides of out
    slots, patches, decays = batch * heads, tokens - prefix, pair_weights is not None
    pairs = 0 if pair_weights is None else pair_weights.shape[0]
    if slots == 0 or not decays:
        d_pairs, d_prefix, d_self = (q.new_zeros(size, dtype=torch.float32) for size in (pairs, *[heads * decays] * 2))
    if slots == 0:
        return dq, dk, dv, d_pairs, d_prefix, d_self
    sizes = block_sizes("diagonal_backward", q)
    blocks = cdiv(patches, sizes["ROWS"])
    one_launch = tokens <= ONE_LAUNCH_TOKENS or not prefix
    prefix_parts = None if one_launch else _floats(q, slots, prefix, blocks, 3, width)
    pair_grads = _floats(q, batch, pairs) if decays else None
    by_prefix = _floats(q, batch, heads, prefix + blocks) if decays and prefix else None
    by_self = _floats(q, batch, heads, blocks) if decays and not prefix else None
    strides = (grad.stride(), q.stride(), k.stride(), v.stride(), out.stride())
    with torch.cuda.device_of(q):
        prepared = _prepared(grad, out, stats, signed_offsets, offset_begin, prefix, zero_fill, sizes)
        tokens_of = (
            grad, q, k, v, out, stats, dq, dk, dv, *prepared, prefix_parts, pair_grads, by_prefix, by_self,
            signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
            *strides, heads, patches, pairs, scale, dropout_p,
        )  # fmt: skip
        programs = slots * (blocks + prefix * one_launch)
        launch(_backward_tokens, programs, tokens_of, ONE_LAUNCH=one_launch, PREFIX=prefix, **sizes)
        if prefix_parts is not None:
            prefix_of = (
                grad, q, k, v, out, stats, dq, dk, dv, prefix_parts.sum(2), by_prefix, prefix_weight, seed, *strides,
                heads, tokens, blocks, scale, dropout_p,
            )  # fmt: skip
            launch(_backward_prefix, slots * prefix, prefix_of, PREFIX=prefix, **sizes)
    if pair_grads is not None:
        none = q.new_zeros(heads, dtype=torch.float32)
        d_pairs = pair_grads.sum(0)
        d_prefix = none if by_prefix is None else by_prefix[..., : prefix if one_launch else None].sum((0, 2))
        d_self = none if by_self is None else by_self.sum((0, 2))
    return dq, dk, dv, d_pairs, d_prefix, d_self


# ---- operators ------------------------------------------------------------------------------------------------------

_forward = torch.library.custom_op("hf_sparseprior::diagonal_triton", _run_forward, mutates_args=())
_backward = torch.library.custom_op("hf_sparseprior::diagonal_triton_backward", _run_backward, mutates_args=())


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return outputs(q)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, pair_weights, heads = rest[2], rest[6], q.shape[1]
    sizes = (0, 0, 0) if pair_weights is None else (pair_weights.shape[0], heads, heads)
    return (*(torch.empty_like(out) for _ in range(3)), *(_floats(q, size) for size in sizes))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, prefix, scale, zero_fill, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (prefix, scale, zero_fill, dropout_p)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None = None) -> tuple:
    if grad is None:
        return (None,) * 14
    q, k, v, *tables, out, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        offsets, begin, pair_weights, pair_begin, prefix_weight, self_weight, seed = tables
        prefix, scale, zero_fill, dropout_p = ctx.options
        grads = gradients(
            on_diagonals, (q, k, v, pair_weights, prefix_weight, self_weight), grad, offsets=offsets,
            counts=begin.diff(), pair_begin=pair_begin, prefix=prefix, scale=scale, zero_fill=zero_fill,
            keep=kept_pairs(q, seed, dropout_p),
        )  # fmt: skip
        return *grads[:3], None, None, grads[3], None, *grads[4:], *(None,) * 5
    run = _run_backward if is_eager(grad) else torch.ops.hf_sparseprior.diagonal_triton_backward
    dq, dk, dv, *d_weights = run(grad, q, k, v, out, stats, *tables, *ctx.options)
    d_pairs, d_prefix, d_self = d_weights if tables[2] is not None else (None, None, None)
    return dq, dk, dv, None, None, d_pairs, None, d_prefix, d_self, *(None,) * 5


_forward.register_autograd(_differentiate, setup_context=_setup_context)
register_diagonal_triton()


class _Diagonal(torch.autograd.Function):
    """The operator without its dispatcher, which takes longer than the kernels of a small call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, stats = _run_forward(*inputs)
        _setup_context(ctx, inputs, (out, stats))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        return _differentiate(ctx, grad)
