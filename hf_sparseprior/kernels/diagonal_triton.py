"""Attention along diagonals by Triton kernels, as PyTorch operators with fake kernels and gradients.

Patch token j of head h sees the prefix tokens and the patches j + o, with o in the head's signed offsets. Prefix tokens
see everything. For a block of rows each offset is one contiguous, shifted load of K and of V. Softmax runs over the
offsets one after the other, in registers. Products and sums are elementwise in float32, without tensor cores.

The backward pass computes probabilities again from the softmax of each row. It only gathers: one kernel goes over
rows (dq, and what prefix keys and decay weights get from each block of rows), one over keys (dk, dv, and what prefix
rows get from each block of keys). If many blocks add to a sum, they do it in the order of the blocks, so that two runs
give the same bits.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, S signed offsets over all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparseprior.kernels.second_derivatives import gradients, on_diagonals
from hf_sparseprior.kernels.triton_blocks import (
    draw_seed,
    keep_factor,
    kept_pairs,
    load_block,
    load_row,
    load_rows,
    load_softmax,
    outputs,
    place,
    probability,
    row_mask,
    row_pointers,
    store_block,
    store_row,
    store_softmax,
    sum_parts,
)

# Elements of a block of rows (rows x padded head width) and its limit in rows. Not tuned on a GPU. They are chosen so
# that the live values of a loop (two blocks forward, three backward, and the K and V that are loaded) need fewer than
# 128 registers a thread.
FORWARD_ELEMENTS = 4096
BACKWARD_ELEMENTS = 2048
MAX_ROWS = 128
WARPS = 4


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
    return torch.ops.hf_sparseprior.diagonal_triton(
        q, k, v, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
        num_prefix_tokens, scale, zero_fill, dropout_p,
    )[0]  # fmt: skip


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _head_weight(weights, head):
    """A factor of the head, 1 without weights."""
    if weights is None:
        return 1.0
    else:
        return tl.load(weights + head)


@triton.jit
def _pair_weight(pair_weights, pair_begin, number, rows, keys, valid):
    """Factors of the logits of pairs at signed offset `number`, 1 without weights."""
    if pair_weights is None:
        return 1.0
    else:
        return tl.load(pair_weights + tl.load(pair_begin + number) + tl.minimum(rows, keys), mask=valid, other=0.0)


@triton.jit
def _count_keys(signed_offsets, first, last, rows, patches):
    """How many patches each row sees at its head's offsets."""
    count = tl.zeros_like(rows)
    for number in range(first, last):
        key = rows + tl.load(signed_offsets + number)
        count += ((key >= 0) & (key < patches)).to(tl.int32)
    return count


@triton.jit
def _join(high, total, acc, logits, v_rows, keep, outside):
    """The running softmax of each row with one key more. Logits are -inf where a row has no such key.

    `outside` is the number of keys outside the support, each of which counts exp(0). At the start `total` and `acc`
    hold exp(0) for all keys, as the sum of all v; each key inside takes its exp(0) out again.
    """
    higher = tl.maximum(high, logits)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(high - finite)
    weight = tl.exp(logits - finite)
    total = total * shrink + weight
    gain = weight * keep
    if outside is not None:
        gain -= tl.where((outside > 0) & (logits > float("-inf")), tl.exp(-finite), 0.0)
    acc = acc * shrink[:, None] + gain[:, None] * v_rows
    return higher, total, acc


@triton.jit
def _forward_patches(
    q, k, v, out, stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight,
    seed, q_strides, k_strides, v_strides, out_strides, heads, patches, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output of a block of patch rows, and its softmax. v_sum: float32 (B, H, D), sum of all v, with zero fill."""
    block, slot, batch, head = place(tl.cdiv(patches, ROWS), heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < patches
    tokens = rows + PREFIX
    first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
    k_pointers = row_pointers(k, k_strides, batch, head, tokens, COLUMNS)
    v_pointers = row_pointers(v, v_strides, batch, head, tokens, COLUMNS)
    q_rows = load_block(q, q_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)

    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    outside = None
    if PREFIX == 0 or v_sum is not None:
        seen = _count_keys(signed_offsets, first, last, rows, patches)
    if v_sum is not None:
        outside = patches - (tl.maximum(seen, 1) if PREFIX == 0 else seen)
        columns = tl.arange(0, COLUMNS)
        everything = tl.load(v_sum + slot * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        high = tl.where(outside > 0, 0.0, high)
        total = outside.to(tl.float32)
        acc = tl.where((outside > 0)[:, None], everything[None, :], acc)

    prefix_factor = _head_weight(prefix_weight, head)
    for token in range(PREFIX):
        k_row = load_row(k, k_strides, batch, head, token, WIDTH, COLUMNS)
        v_row = load_row(v, v_strides, batch, head, token, WIDTH, COLUMNS)
        logits = tl.sum(q_rows * k_row[None, :], 1) * scale * prefix_factor
        keep = keep_factor(seed, slot, tokens, token, dropout_p)
        high, total, acc = _join(high, total, acc, logits, v_row[None, :], keep, outside)
    for number in range(first, last):
        offset = tl.load(signed_offsets + number).to(tl.int64)
        keys = rows + offset.to(tl.int32)
        valid = exists & (keys >= 0) & (keys < patches)
        k_rows = load_rows(k_pointers + offset * k_strides[2], valid, WIDTH, COLUMNS)
        v_rows = load_rows(v_pointers + offset * v_strides[2], valid, WIDTH, COLUMNS)
        weight = _pair_weight(pair_weights, pair_begin, number, rows, keys, valid)
        logits = tl.sum(q_rows * k_rows, 1) * scale * weight
        keep = keep_factor(seed, slot, tokens, keys + PREFIX, dropout_p)
        high, total, acc = _join(high, total, acc, tl.where(valid, logits, float("-inf")), v_rows, keep, outside)
    if PREFIX == 0:
        alone = exists & (seen == 0)
        k_rows = load_rows(k_pointers, alone, WIDTH, COLUMNS)
        v_rows = load_rows(v_pointers, alone, WIDTH, COLUMNS)
        logits = tl.sum(q_rows * k_rows, 1) * scale * _head_weight(self_weight, head)
        keep = keep_factor(seed, slot, tokens, tokens, dropout_p)
        high, total, acc = _join(high, total, acc, tl.where(alone, logits, float("-inf")), v_rows, keep, outside)

    total = tl.where(exists, total, 1.0)
    store_block(out, out_strides, batch, head, tokens, exists, acc / total[:, None], WIDTH, COLUMNS)
    store_softmax(stats, slot * (PREFIX + patches) + tokens, high, total, exists)


@triton.jit
def _forward_prefix_parts(
    q, k, v, parts, part_stats, prefix_weight, seed, q_strides, k_strides, v_strides, heads, tokens, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prefix rows over one block of keys: parts float32 (B, H, P, blocks, D), part_stats (B, H, P, blocks, 2)."""
    blocks = tl.cdiv(tokens, ROWS)
    block, slot, batch, head = place(blocks, heads)
    keys = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = keys < tokens
    k_rows = load_block(k, k_strides, batch, head, keys, exists, WIDTH, COLUMNS).to(tl.float32)
    v_rows = load_block(v, v_strides, batch, head, keys, exists, WIDTH, COLUMNS).to(tl.float32)
    factor = _head_weight(prefix_weight, head)
    for token in range(PREFIX):
        q_row = load_row(q, q_strides, batch, head, token, WIDTH, COLUMNS)
        logits = tl.where(exists, tl.sum(k_rows * q_row[None, :], 1) * scale * factor, float("-inf"))
        high = tl.max(logits, 0)
        weight = tl.exp(logits - high)
        total = tl.sum(weight, 0)
        keep = keep_factor(seed, slot, token, keys, dropout_p)
        place_of_part = (slot * PREFIX + token) * blocks + block
        acc = tl.sum((weight * keep)[:, None] * v_rows, 0)
        tl.store(parts + place_of_part * WIDTH + columns, acc, mask=columns < WIDTH)
        tl.store(part_stats + 2 * place_of_part, high)
        tl.store(part_stats + 2 * place_of_part + 1, total)


@triton.jit
def _forward_prefix(
    parts, part_stats, out, stats, out_strides, heads, tokens, blocks,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The parts of one prefix row, combined in the order of the blocks."""
    token, slot, batch, head = place(PREFIX, heads)
    columns = tl.arange(0, COLUMNS)
    high = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, blocks, ROWS):
        part = start + tl.arange(0, ROWS)
        exists = part < blocks
        at = (slot * PREFIX + token) * blocks + part
        own = tl.load(part_stats + 2 * at, mask=exists, other=float("-inf"))
        totals = tl.load(part_stats + 2 * at + 1, mask=exists, other=0.0)
        values = tl.load(
            parts + at[:, None] * WIDTH + columns[None, :], mask=row_mask(exists, WIDTH, COLUMNS), other=0.0
        )
        higher = tl.maximum(high, tl.max(own, 0))
        shrink, share = tl.exp(high - higher), tl.exp(own - higher)
        total = total * shrink + tl.sum(share * totals, 0)
        acc = acc * shrink + tl.sum(share[:, None] * values, 0)
        high = higher
    store_row(out, out_strides, batch, head, token, acc / total, WIDTH, COLUMNS)
    store_softmax(stats, slot * tokens + token, high, total, True)


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def _pair_gradients(q_rows, k_rows, v_rows, g_rows, high, share, delta, weight, valid, scale, keep):
    """For pairs: scaled product of q and k, probability, and gradient of the logit."""
    product = tl.sum(q_rows * k_rows, 1) * scale
    prob = probability(product * weight, valid, high, share)
    return product, prob, prob * (tl.sum(g_rows * v_rows, 1) * keep - delta)


@triton.jit
def _gradients_of_rows(
    q_rows, g_rows, high, share, delta_rows, k_pointers, v_pointers, valid, weight, scale, keep,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What one key of each row adds to dq, and the gradient of the pair's weight."""
    k_rows = load_rows(k_pointers, valid, WIDTH, COLUMNS)
    v_rows = load_rows(v_pointers, valid, WIDTH, COLUMNS)
    product, _, slope = _pair_gradients(
        q_rows, k_rows, v_rows, g_rows, high, share, delta_rows, weight, valid, scale, keep
    )
    return (slope * weight * scale)[:, None] * k_rows, slope * product


@triton.jit
def _gradients_of_keys(
    k_rows, v_rows, q_pointers, g_pointers, stats, delta, floor, per_row, valid, weight, scale, keep,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What one row of each key adds to dk and to dv; `per_row` says where in stats, delta and floor the rows are."""
    q_rows = load_rows(q_pointers, valid, WIDTH, COLUMNS)
    g_rows = load_rows(g_pointers, valid, WIDTH, COLUMNS)
    high, share = load_softmax(stats, per_row, valid)
    mean = tl.load(delta + per_row, mask=valid, other=0.0)
    _, prob, slope = _pair_gradients(q_rows, k_rows, v_rows, g_rows, high, share, mean, weight, valid, scale, keep)
    prob = prob * keep
    if floor is not None:
        prob -= tl.load(floor + per_row, mask=valid, other=0.0)
    return (slope * weight * scale)[:, None] * q_rows, prob[:, None] * g_rows


@triton.jit
def _store_weighted_sum(part, weights, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Store at `part` the sum of rows (ROWS, COLUMNS), each times its weight."""
    columns = tl.arange(0, COLUMNS)
    tl.store(part + columns, tl.sum(weights[:, None] * rows, 0), mask=columns < WIDTH)


@triton.jit
def _store_floor(floor, part, outside, g_rows, high, share, exists, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """With zero fill, the probability of one key `outside` for each row, and the gradients that it weighs, summed."""
    floor_rows = tl.where(exists & (outside > 0), tl.exp(-high) * share, 0.0)
    tl.store(floor, floor_rows, mask=exists)
    _store_weighted_sum(part, floor_rows, g_rows, WIDTH, COLUMNS)


@triton.jit
def _backward_rows(
    grad, q, k, v, out, stats, dq, delta, floor, floor_parts, prefix_parts, pair_grads, prefix_weight_parts,
    self_weight_parts, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, patches, num_offsets, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a block of patch rows gives: dq and delta of its rows, and its parts of sums over rows.

    delta: float32 (B, H, T), for each row the product of output and gradient. floor (B, H, T): with zero fill, the
    probability of a key outside the support; floor_parts (B, H, blocks, D). prefix_parts: (3, B, H, P, blocks, D), the
    first for dk and the second for dv of prefix keys. pair_grads: (B, S, N), by row. prefix_weight_parts: (B, H, 2
    blocks + P). self_weight_parts: (B, H, blocks).
    """
    blocks = tl.cdiv(patches, ROWS)
    block, slot, batch, head = place(blocks, heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < patches
    tokens = rows + PREFIX
    first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
    k_pointers = row_pointers(k, k_strides, batch, head, tokens, COLUMNS)
    v_pointers = row_pointers(v, v_strides, batch, head, tokens, COLUMNS)
    q_rows = load_block(q, q_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    g_rows = load_block(grad, grad_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    o_rows = load_block(out, out_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    per_row = slot * (PREFIX + patches) + tokens
    high, share = load_softmax(stats, per_row, exists)
    delta_rows = tl.sum(g_rows * o_rows, 1)
    tl.store(delta + per_row, delta_rows, mask=exists)
    if PREFIX == 0 or floor is not None:
        seen = _count_keys(signed_offsets, first, last, rows, patches)
    if floor is not None:
        outside = patches - (tl.maximum(seen, 1) if PREFIX == 0 else seen)
        part = floor_parts + (slot * blocks + block) * WIDTH
        _store_floor(floor + per_row, part, outside, g_rows, high, share, exists, WIDTH, COLUMNS)

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    prefix_factor = _head_weight(prefix_weight, head)
    by_prefix = tl.zeros((ROWS,), tl.float32)
    part_stride = tl.num_programs(0).to(tl.int64) * PREFIX * WIDTH
    for token in range(PREFIX):
        k_row = load_row(k, k_strides, batch, head, token, WIDTH, COLUMNS)
        v_row = load_row(v, v_strides, batch, head, token, WIDTH, COLUMNS)
        keep = keep_factor(seed, slot, tokens, token, dropout_p)
        product, prob, slope = _pair_gradients(
            q_rows, k_row[None, :], v_row[None, :], g_rows, high, share, delta_rows, prefix_factor, exists, scale, keep
        )
        by_prefix += slope * product
        slope = slope * prefix_factor * scale
        acc += slope[:, None] * k_row[None, :]
        part = prefix_parts + ((slot * PREFIX + token) * blocks + block) * WIDTH
        _store_weighted_sum(part, slope, q_rows, WIDTH, COLUMNS)
        _store_weighted_sum(part + part_stride, prob * keep, g_rows, WIDTH, COLUMNS)
    for number in range(first, last):
        offset = tl.load(signed_offsets + number).to(tl.int64)
        keys = rows + offset.to(tl.int32)
        valid = exists & (keys >= 0) & (keys < patches)
        weight = _pair_weight(pair_weights, pair_begin, number, rows, keys, valid)
        keep = keep_factor(seed, slot, tokens, keys + PREFIX, dropout_p)
        dq_part, weight_grads = _gradients_of_rows(
            q_rows, g_rows, high, share, delta_rows, k_pointers + offset * k_strides[2],
            v_pointers + offset * v_strides[2], valid, weight, scale, keep, WIDTH, COLUMNS,
        )  # fmt: skip
        acc += dq_part
        if pair_weights is not None:
            tl.store(pair_grads + (batch * num_offsets + number) * patches + rows, weight_grads, mask=valid)
    if PREFIX == 0:
        alone = exists & (seen == 0)
        weight = _head_weight(self_weight, head)
        keep = keep_factor(seed, slot, tokens, tokens, dropout_p)
        dq_part, weight_grads = _gradients_of_rows(
            q_rows, g_rows, high, share, delta_rows, k_pointers, v_pointers, alone, weight, scale, keep, WIDTH, COLUMNS
        )
        acc += dq_part
        if self_weight is not None:
            tl.store(self_weight_parts + slot * blocks + block, tl.sum(weight_grads, 0))
    if prefix_weight is not None:
        tl.store(prefix_weight_parts + slot * (2 * blocks + PREFIX) + block, tl.sum(by_prefix, 0))
    store_block(dq, out_strides, batch, head, tokens, exists, acc, WIDTH, COLUMNS)


@triton.jit
def _backward_keys(
    grad, q, k, v, out, stats, dk, dv, delta, floor, floor_sum, prefix_parts, prefix_weight_parts,
    signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, patches, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a block of patch keys gets from the rows that see it, and its part of dq of prefix rows.

    floor_sum: with zero fill, float32 (B, H, D), the gradient of v at a key that no row has in its support. The rest is
    as in `_backward_rows`; the third of prefix_parts is for dq of prefix rows.
    """
    blocks = tl.cdiv(patches, ROWS)
    block, slot, batch, head = place(blocks, heads)
    keys = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = keys < patches
    tokens = keys + PREFIX
    first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
    q_pointers = row_pointers(q, q_strides, batch, head, tokens, COLUMNS)
    g_pointers = row_pointers(grad, grad_strides, batch, head, tokens, COLUMNS)
    k_rows = load_block(k, k_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    v_rows = load_block(v, v_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    per_row = slot * (PREFIX + patches) + tokens
    dk_rows = tl.zeros((ROWS, COLUMNS), tl.float32)
    dv_rows = tl.zeros((ROWS, COLUMNS), tl.float32)
    if floor is not None:
        dv_rows += tl.load(floor_sum + slot * WIDTH + columns, mask=columns < WIDTH, other=0.0)[None, :]

    prefix_factor = _head_weight(prefix_weight, head)
    by_prefix = tl.zeros((ROWS,), tl.float32)
    part_stride = tl.num_programs(0).to(tl.int64) * PREFIX * WIDTH
    for token in range(PREFIX):
        q_row = load_row(q, q_strides, batch, head, token, WIDTH, COLUMNS)
        g_row = load_row(grad, grad_strides, batch, head, token, WIDTH, COLUMNS)
        o_row = load_row(out, out_strides, batch, head, token, WIDTH, COLUMNS)
        high, share = load_softmax(stats, slot * (PREFIX + patches) + token, True)
        # Summed like the gradients of probabilities: where one key has all the weight, the difference is exactly 0,
        # whatever large number it is multiplied with.
        row_delta = tl.sum(g_row[None, :] * tl.broadcast_to(o_row[None, :], (ROWS, COLUMNS)), 1)
        keep = keep_factor(seed, slot, token, tokens, dropout_p)
        product, prob, slope = _pair_gradients(
            q_row[None, :], k_rows, v_rows, g_row[None, :], high, share, row_delta, prefix_factor, exists, scale, keep
        )  # fmt: skip
        by_prefix += slope * product
        slope = slope * prefix_factor * scale
        dk_rows += slope[:, None] * q_row[None, :]
        dv_rows += (prob * keep)[:, None] * g_row[None, :]
        at = 2 * part_stride + ((slot * PREFIX + token) * blocks + block) * WIDTH + columns
        tl.store(prefix_parts + at, tl.sum(slope[:, None] * k_rows, 0), mask=columns < WIDTH)
    for number in range(first, last):
        offset = tl.load(signed_offsets + number).to(tl.int64)
        rows = keys - offset.to(tl.int32)
        valid = exists & (rows >= 0) & (rows < patches)
        weight = _pair_weight(pair_weights, pair_begin, number, rows, keys, valid)
        keep = keep_factor(seed, slot, rows + PREFIX, tokens, dropout_p)
        dk_part, dv_part = _gradients_of_keys(
            k_rows, v_rows, q_pointers - offset * q_strides[2], g_pointers - offset * grad_strides[2],
            stats, delta, floor, per_row - offset, valid, weight, scale, keep, WIDTH, COLUMNS,
        )  # fmt: skip
        dk_rows += dk_part
        dv_rows += dv_part
    if PREFIX == 0:
        alone = exists & (_count_keys(signed_offsets, first, last, keys, patches) == 0)
        weight = _head_weight(self_weight, head)
        keep = keep_factor(seed, slot, tokens, tokens, dropout_p)
        dk_part, dv_part = _gradients_of_keys(
            k_rows, v_rows, q_pointers, g_pointers, stats, delta, floor, per_row, alone, weight, scale, keep,
            WIDTH, COLUMNS,
        )  # fmt: skip
        dk_rows += dk_part
        dv_rows += dv_part
    if prefix_weight is not None:
        tl.store(prefix_weight_parts + slot * (2 * blocks + PREFIX) + blocks + block, tl.sum(by_prefix, 0))
    store_block(dk, out_strides, batch, head, tokens, exists, dk_rows, WIDTH, COLUMNS)
    store_block(dv, out_strides, batch, head, tokens, exists, dv_rows, WIDTH, COLUMNS)


@triton.jit
def _backward_prefix(
    grad, q, k, v, out, stats, dq, dk, dv, prefix_parts, prefix_weight_parts, prefix_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, tokens, blocks, scale, dropout_p,
    PREFIX: tl.constexpr, PREFIX_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one prefix token: the parts of all blocks, and the pairs of two prefix tokens."""
    token, slot, batch, head = place(PREFIX, heads)
    others = tl.arange(0, PREFIX_ROWS)
    exists = others < PREFIX
    factor = _head_weight(prefix_weight, head)
    q_rows = load_block(q, q_strides, batch, head, others, exists, WIDTH, COLUMNS).to(tl.float32)
    k_rows = load_block(k, k_strides, batch, head, others, exists, WIDTH, COLUMNS).to(tl.float32)
    v_rows = load_block(v, v_strides, batch, head, others, exists, WIDTH, COLUMNS).to(tl.float32)
    g_rows = load_block(grad, grad_strides, batch, head, others, exists, WIDTH, COLUMNS).to(tl.float32)
    o_rows = load_block(out, out_strides, batch, head, others, exists, WIDTH, COLUMNS).to(tl.float32)
    high_rows, share_rows = load_softmax(stats, slot * tokens + others, exists)
    delta_rows = tl.sum(g_rows * o_rows, 1)
    own = (others == token)[:, None]
    # The token as a row, the others as its keys.
    q_row, g_row = tl.sum(tl.where(own, q_rows, 0.0), 0), tl.sum(tl.where(own, g_rows, 0.0), 0)
    high = tl.sum(tl.where(others == token, high_rows, 0.0), 0)
    share = tl.sum(tl.where(others == token, share_rows, 0.0), 0)
    row_delta = tl.sum(tl.where(others == token, delta_rows, 0.0), 0)
    keep = keep_factor(seed, slot, token, others, dropout_p)
    product, _, slope = _pair_gradients(
        q_row[None, :], k_rows, v_rows, g_row[None, :], high, share, row_delta, factor, exists, scale, keep
    )
    dq_row = tl.sum((slope * factor * scale)[:, None] * k_rows, 0)
    if prefix_weight is not None:
        at = slot * (2 * blocks + PREFIX) + 2 * blocks + token
        tl.store(prefix_weight_parts + at, tl.sum(slope * product, 0))
    # The token as a key, the others as rows that see it.
    k_row, v_row = tl.sum(tl.where(own, k_rows, 0.0), 0), tl.sum(tl.where(own, v_rows, 0.0), 0)
    keep = keep_factor(seed, slot, others, token, dropout_p)
    _, prob, slope = _pair_gradients(
        q_rows, k_row[None, :], v_row[None, :], g_rows, high_rows, share_rows, delta_rows, factor, exists, scale, keep
    )
    dk_row = tl.sum((slope * factor * scale)[:, None] * q_rows, 0)
    dv_row = tl.sum((prob * keep)[:, None] * g_rows, 0)

    part_stride = tl.num_programs(0).to(tl.int64) * blocks * WIDTH
    parts = prefix_parts + (slot * PREFIX + token) * blocks * WIDTH
    dk_row += sum_parts(parts, blocks, WIDTH, ROWS, COLUMNS)
    dv_row += sum_parts(parts + part_stride, blocks, WIDTH, ROWS, COLUMNS)
    dq_row += sum_parts(parts + 2 * part_stride, blocks, WIDTH, ROWS, COLUMNS)
    store_row(dq, out_strides, batch, head, token, dq_row, WIDTH, COLUMNS)
    store_row(dk, out_strides, batch, head, token, dk_row, WIDTH, COLUMNS)
    store_row(dv, out_strides, batch, head, token, dv_row, WIDTH, COLUMNS)


@triton.jit
def _backward_pairs(pair_grads, d_pairs, signed_offsets, pair_begin, batch, sample_stride, patches, ROWS: tl.constexpr):
    """Gradients of the pair weights: the sum of both directions of a pair over the batch, in its order."""
    blocks = tl.cdiv(patches, ROWS)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    offset = tl.load(signed_offsets + number)
    if offset >= 0:
        lower = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
        exists = lower < patches - offset
        total = tl.zeros((ROWS,), tl.float32)
        pointers = pair_grads + number * patches + lower
        for _ in range(batch):
            total += tl.load(pointers, mask=exists, other=0.0)
            if offset > 0:
                total += tl.load(pointers + patches + offset, mask=exists, other=0.0)
            pointers += sample_stride
        tl.store(d_pairs + tl.load(pair_begin + number) + lower, total, mask=exists)


# ---- operators ------------------------------------------------------------------------------------------------------


def _block(width: int, elements: int) -> dict[str, int]:
    """Sizes of a block of rows, as the kernels take them."""
    columns = triton.next_power_of_2(width)
    return {"WIDTH": width, "ROWS": min(MAX_ROWS, elements // columns), "COLUMNS": columns, "num_warps": WARPS}


def _floats(q: Tensor, *size: int) -> Tensor:
    return q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("hf_sparseprior::diagonal_triton", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, signed_offsets: Tensor, offset_begin: Tensor, pair_weights: Tensor | None,
    pair_begin: Tensor | None, prefix_weight: Tensor | None, self_weight: Tensor | None, seed: Tensor | None,
    prefix: int, scale: float, zero_fill: bool, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, D) and float32 (B, H, T, 2), see `store_softmax`."""
    batch, heads, tokens, width = q.shape
    out, stats = outputs(q)
    slots = batch * heads
    if slots == 0:
        return out, stats
    v_sum = v.sum(2, dtype=torch.float32) if zero_fill else None
    strides = (q.stride(), k.stride(), v.stride())
    block = _block(width, FORWARD_ELEMENTS)
    patches = tokens - prefix
    with torch.cuda.device_of(q):
        _forward_patches[(slots * triton.cdiv(patches, block["ROWS"]),)](
            q, k, v, out, stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight,
            self_weight, seed, *strides, out.stride(), heads, patches, scale, dropout_p, PREFIX=prefix, **block,
        )  # fmt: skip
        if prefix:
            blocks = triton.cdiv(tokens, block["ROWS"])
            parts, part_stats = _floats(q, slots, prefix, blocks, width), _floats(q, slots, prefix, blocks, 2)
            _forward_prefix_parts[(slots * blocks,)](
                q, k, v, parts, part_stats, prefix_weight, seed, *strides, heads, tokens, scale, dropout_p,
                PREFIX=prefix, **block,
            )  # fmt: skip
            _forward_prefix[(slots * prefix,)](
                parts, part_stats, out, stats, out.stride(), heads, tokens, blocks, PREFIX=prefix, **block
            )
    return out, stats


@torch.library.custom_op("hf_sparseprior::diagonal_triton_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, signed_offsets: Tensor,
    offset_begin: Tensor, pair_weights: Tensor | None, pair_begin: Tensor | None, prefix_weight: Tensor | None,
    self_weight: Tensor | None, seed: Tensor | None, prefix: int, scale: float, zero_fill: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, and d_pairs, d_prefix, d_self for the decay's weights; these have no elements without weights."""
    batch, heads, tokens, width = q.shape
    dq, dk, dv = (torch.empty_like(out) for _ in range(3))  # the kernels assume that they have the strides of out
    slots, patches, num_offsets = batch * heads, tokens - prefix, signed_offsets.shape[0]
    block = _block(width, BACKWARD_ELEMENTS)
    blocks = triton.cdiv(patches, block["ROWS"])
    decays = pair_weights is not None
    d_pairs = _floats(q, 0 if pair_weights is None else pair_weights.shape[0])
    d_prefix, d_self = (q.new_zeros(heads if decays else 0, dtype=torch.float32) for _ in range(2))
    if slots == 0:
        return dq, dk, dv, d_pairs.zero_(), d_prefix, d_self
    delta = _floats(q, *q.shape[:3])
    floor = torch.empty_like(delta) if zero_fill else None
    floor_parts = _floats(q, slots, blocks, width) if zero_fill else None
    prefix_parts = _floats(q, 3, slots, prefix, blocks, width)
    pair_grads = _floats(q, batch, num_offsets, patches) if decays else None
    by_prefix = _floats(q, batch, heads, 2 * blocks + prefix) if decays else None
    by_self = _floats(q, batch, heads, blocks) if decays and not prefix else None
    strides = (grad.stride(), q.stride(), k.stride(), v.stride(), dq.stride())
    tables = (signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed)
    with torch.cuda.device_of(q):
        _backward_rows[(slots * blocks,)](
            grad, q, k, v, out, stats, dq, delta, floor, floor_parts, prefix_parts, pair_grads, by_prefix, by_self,
            *tables, *strides, heads, patches, num_offsets, scale, dropout_p, PREFIX=prefix, **block,
        )  # fmt: skip
        floor_sum = floor_parts.sum(1) if floor_parts is not None else None
        _backward_keys[(slots * blocks,)](
            grad, q, k, v, out, stats, dk, dv, delta, floor, floor_sum, prefix_parts, by_prefix,
            *tables, *strides, heads, patches, scale, dropout_p, PREFIX=prefix, **block,
        )  # fmt: skip
        if prefix:
            _backward_prefix[(slots * prefix,)](
                grad, q, k, v, out, stats, dq, dk, dv, prefix_parts, by_prefix, prefix_weight, seed, *strides, heads,
                tokens, blocks, scale, dropout_p, PREFIX=prefix, PREFIX_ROWS=triton.next_power_of_2(prefix), **block,
            )  # fmt: skip
        if decays and num_offsets:
            _backward_pairs[(num_offsets * triton.cdiv(patches, MAX_ROWS),)](
                pair_grads,
                d_pairs,
                signed_offsets,
                pair_begin,
                batch,
                num_offsets * patches,
                patches,
                ROWS=MAX_ROWS,
            )
    if by_prefix is not None and prefix:
        d_prefix = by_prefix.sum((0, 2))
    if by_self is not None:
        d_self = by_self.sum((0, 2))
    return dq, dk, dv, d_pairs, d_prefix, d_self


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


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 14
    q, k, v, *tables, out, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        offsets, begin, pair_weights, pair_begin, prefix_weight, self_weight, seed = tables
        prefix, scale, zero_fill, dropout_p = ctx.options
        found = gradients(
            on_diagonals, (q, k, v, pair_weights, prefix_weight, self_weight), grad, offsets=offsets,
            counts=begin.diff(), pair_begin=pair_begin, prefix=prefix, scale=scale, zero_fill=zero_fill,
            keep=kept_pairs(q, seed, dropout_p),
        )  # fmt: skip
        return *found[:3], None, None, found[3], None, *found[4:], *(None,) * 5
    dq, dk, dv, *d_weights = torch.ops.hf_sparseprior.diagonal_triton_backward(
        grad, q, k, v, out, stats, *tables, *ctx.options
    )
    d_pairs, d_prefix, d_self = d_weights if tables[2] is not None else (None, None, None)
    return dq, dk, dv, None, None, d_pairs, None, d_prefix, d_self, *(None,) * 5


_forward.register_autograd(_differentiate, setup_context=_setup_context)
