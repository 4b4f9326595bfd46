"""Triton kernels along diagonals, backward. `diagonal_triton` launches them and says what the letters mean.

The support is symmetric: if a token sees another, it is seen by it. So one program computes all gradients of its
tokens, dq, dk and dv, from the same neighbours, which are read once. "Own" are the tokens of the program, "others"
those that they see and are seen by; each pair of an own token and another is two pairs of a row and a key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_sparseprior.kernels.diagonal_triton_forward import count_keys, head_weight, pair_weight
from hf_sparseprior.kernels.triton_blocks import (
    keep_factor,
    load_rows,
    load_softmax,
    place,
    probability,
    row_pointers,
    store_block,
    store_row,
)


@triton.jit
def _pointers(
    grad, q, k, v, out, grad_strides, q_strides, k_strides, v_strides, out_strides, batch, head, tokens,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pointers to rows of q, k, v, grad and out."""
    return (
        row_pointers(q, q_strides, batch, head, tokens, COLUMNS),
        row_pointers(k, k_strides, batch, head, tokens, COLUMNS),
        row_pointers(v, v_strides, batch, head, tokens, COLUMNS),
        row_pointers(grad, grad_strides, batch, head, tokens, COLUMNS),
        row_pointers(out, out_strides, batch, head, tokens, COLUMNS),
    )


@triton.jit
def _load_tokens(pointers, stats, delta, per_row, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(q, k, v, grad, delta, largest logit, share) of tokens in float32.

    delta is for each row the product of output and gradient. It is summed like the gradients of probabilities: where
    one key has all the weight, the difference is exactly 0, whatever large number it is multiplied with.
    """
    q_pointers, k_pointers, v_pointers, g_pointers, o_pointers = pointers
    q_rows = load_rows(q_pointers, valid, WIDTH, COLUMNS)
    k_rows = load_rows(k_pointers, valid, WIDTH, COLUMNS)
    v_rows = load_rows(v_pointers, valid, WIDTH, COLUMNS)
    g_rows = load_rows(g_pointers, valid, WIDTH, COLUMNS)
    if delta is None:
        delta_rows = tl.sum(g_rows * load_rows(o_pointers, valid, WIDTH, COLUMNS), 1)
    else:
        delta_rows = tl.load(delta + per_row, mask=valid, other=0.0)
    high, share = load_softmax(stats, per_row, valid)
    return q_rows, k_rows, v_rows, g_rows, delta_rows, high, share


@triton.jit
def _one_way(q_rows, k_rows, v_rows, g_rows, delta, high, share, weight, keep, valid, scale):
    """For pairs of a row and a key: what dq gets of k and dk of q, what dv gets of grad, and the weight's gradient."""
    product = tl.sum(q_rows * k_rows, 1) * scale
    prob = probability(product * weight, valid, high, share)
    slope = prob * (tl.sum(g_rows * v_rows, 1) * keep - delta)
    return slope * weight * scale, prob * keep, slope * product


@triton.jit
def _both_ways(own_tokens, others, weight, keep, keep_back, valid, scale):
    """`_one_way` with the own tokens as rows, and with the others as rows."""
    q_rows, k_rows, v_rows, g_rows, delta, high, share = own_tokens
    q_others, k_others, v_others, g_others, delta_others, high_others, share_others = others
    there, prob, by_weight = _one_way(
        q_rows, k_others, v_others, g_rows, delta, high, share, weight, keep, valid, scale
    )
    back, prob_back, by_weight_back = _one_way(
        q_others, k_rows, v_rows, g_others, delta_others, high_others, share_others, weight, keep_back, valid, scale
    )
    return there, prob, by_weight, back, prob_back, by_weight_back


@triton.jit
def _gains(own_gains, others, there, back, prob_back):
    """dq, dk, dv of the own tokens, with what the others give."""
    dq_rows, dk_rows, dv_rows = own_gains
    q_others, k_others, _, g_others, _, _, _ = others
    dq_rows += there[:, None] * k_others
    dk_rows += back[:, None] * q_others
    dv_rows += prob_back[:, None] * g_others
    return dq_rows, dk_rows, dv_rows


@triton.jit
def _at_offset(
    own_tokens, own_gains, pointers, strides, stats, delta, floor, pair_weights, pair_begin, pair_grads, pair_stride,
    signed_offsets, number, rows, exists, patches, per_row, seed, slot, batch, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the patches at a signed offset give. The gradient of a pair's weight is stored from its lower patch."""
    offset = tl.load(signed_offsets + number).to(tl.int64)
    others = rows + offset.to(tl.int32)
    valid = exists & (others >= 0) & (others < patches)
    q_pointers, k_pointers, v_pointers, g_pointers, o_pointers = pointers
    q_strides, k_strides, v_strides, grad_strides, out_strides = strides
    moved = (
        q_pointers + offset * q_strides[2], k_pointers + offset * k_strides[2], v_pointers + offset * v_strides[2],
        g_pointers + offset * grad_strides[2], o_pointers + offset * out_strides[2],
    )  # fmt: skip
    other_tokens = _load_tokens(moved, stats, delta, per_row + offset, valid, WIDTH, COLUMNS)
    weight = pair_weight(pair_weights, pair_begin, number, rows, others, valid)
    keep = keep_factor(seed, slot, rows + PREFIX, others + PREFIX, dropout_p)
    keep_back = keep_factor(seed, slot, others + PREFIX, rows + PREFIX, dropout_p)
    there, _, by_weight, back, prob_back, by_weight_back = _both_ways(
        own_tokens, other_tokens, weight, keep, keep_back, valid, scale
    )
    if floor is not None:
        prob_back -= tl.load(floor + per_row + offset, mask=valid, other=0.0)
    if pair_grads is not None:  # noqa: SIM102 (the compiler drops one of them, the other runs)
        if offset >= 0:
            total = by_weight + tl.where(offset > 0, by_weight_back, 0.0)
            at = batch * pair_stride + tl.load(pair_begin + number) + rows
            tl.store(pair_grads + at, total, mask=valid)
    return _gains(own_gains, other_tokens, there, back, prob_back)


@triton.jit
def _alone(own_tokens, own_gains, alone, weight, keep, floor, per_row, scale):
    """What patches give themselves that see nothing else, and the gradient of their weight."""
    q_rows, k_rows, v_rows, g_rows, delta, high, share = own_tokens
    slope, prob, by_weight = _one_way(q_rows, k_rows, v_rows, g_rows, delta, high, share, weight, keep, alone, scale)
    if floor is not None:
        prob -= tl.load(floor + per_row, mask=alone, other=0.0)
    return _gains(own_gains, own_tokens, slope, slope, prob), by_weight


@triton.jit
def _patch_rows(
    grad, q, k, v, out, stats, dq, dk, dv, delta, floor, floor_sum, prefix_parts, pair_grads, prefix_weight_parts,
    self_weight_parts, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, block, blocks, slot, batch, head, patches, pair_stride,
    scale, dropout_p, PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of a block of patches, and its parts of sums over patches."""
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = rows < patches
    tokens = rows + PREFIX
    first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
    strides = (q_strides, k_strides, v_strides, grad_strides, out_strides)
    pointers = _pointers(
        grad, q, k, v, out, grad_strides, q_strides, k_strides, v_strides, out_strides, batch, head, tokens, COLUMNS
    )
    per_row = slot * (PREFIX + patches) + tokens
    own_tokens = _load_tokens(pointers, stats, delta, per_row, exists, WIDTH, COLUMNS)
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    dv_rows = zeros
    if floor_sum is not None:
        dv_rows += tl.load(floor_sum + slot * WIDTH + columns, mask=columns < WIDTH, other=0.0)[None, :]
    gains = (zeros, zeros, dv_rows)

    factor = head_weight(prefix_weight, head)
    by_prefix = tl.zeros((ROWS,), tl.float32)
    for token in range(PREFIX):
        same = tl.full((ROWS,), token, tl.int32)
        of_prefix = _pointers(
            grad, q, k, v, out, grad_strides, q_strides, k_strides, v_strides, out_strides, batch, head, same, COLUMNS
        )
        others = _load_tokens(of_prefix, stats, None, slot * (PREFIX + patches) + same, same >= 0, WIDTH, COLUMNS)
        keep = keep_factor(seed, slot, tokens, token, dropout_p)
        keep_back = keep_factor(seed, slot, token, tokens, dropout_p)
        there, prob, by_weight, back, prob_back, by_weight_back = _both_ways(
            own_tokens, others, factor, keep, keep_back, exists, scale
        )
        gains = _gains(gains, others, there, back, prob_back)
        by_prefix += by_weight + by_weight_back
        if prefix_parts is not None:
            part = prefix_parts + 3 * ((slot * PREFIX + token) * blocks + block) * WIDTH + columns
            tl.store(part, tl.sum(back[:, None] * own_tokens[1], 0), mask=columns < WIDTH)
            tl.store(part + WIDTH, tl.sum(there[:, None] * own_tokens[0], 0), mask=columns < WIDTH)
            tl.store(part + 2 * WIDTH, tl.sum(prob[:, None] * own_tokens[3], 0), mask=columns < WIDTH)
    for number in range(first, last):
        gains = _at_offset(
            own_tokens, gains, pointers, strides, stats, delta, floor, pair_weights, pair_begin, pair_grads,
            pair_stride, signed_offsets, number, rows, exists, patches, per_row, seed, slot, batch, scale, dropout_p,
            PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
    if PREFIX == 0:
        alone = exists & (count_keys(signed_offsets, first, last, rows, patches) == 0)
        keep = keep_factor(seed, slot, tokens, tokens, dropout_p)
        gains, by_weight = _alone(own_tokens, gains, alone, head_weight(self_weight, head), keep, floor, per_row, scale)
        if self_weight_parts is not None:
            tl.store(self_weight_parts + slot * blocks + block, tl.sum(by_weight, 0))
    if prefix_weight_parts is not None:
        tl.store(prefix_weight_parts + slot * (blocks + PREFIX) + PREFIX + block, tl.sum(by_prefix, 0))
    store_block(dq, out_strides, batch, head, tokens, exists, gains[0], WIDTH, COLUMNS)
    store_block(dk, out_strides, batch, head, tokens, exists, gains[1], WIDTH, COLUMNS)
    store_block(dv, out_strides, batch, head, tokens, exists, gains[2], WIDTH, COLUMNS)


@triton.jit
def _prefix_row(
    grad, q, k, v, out, stats, dq, dk, dv, prefix_sums, prefix_weight_parts, prefix_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, token, slot, batch, head, tokens, last, blocks, scale,
    dropout_p, PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of a prefix token: from the tokens before `last`, and the sums over patches if there are any.

    Of the gradient of the prefix weight it stores what follows from pairs whose row the token is, and with all tokens
    before `last` also that of pairs in which a patch is the row. A pair of two prefix tokens belongs to its row.
    """
    lanes = tl.arange(0, ROWS)
    factor = head_weight(prefix_weight, head)
    same = tl.full((ROWS,), 0, tl.int32) + token
    of_token = _pointers(
        grad, q, k, v, out, grad_strides, q_strides, k_strides, v_strides, out_strides, batch, head, same, COLUMNS
    )
    own_tokens = _load_tokens(of_token, stats, None, slot * tokens + same, same >= 0, WIDTH, COLUMNS)
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    gains = (zeros, zeros, zeros)
    by_prefix = tl.zeros((ROWS,), tl.float32)
    for start in range(0, last, ROWS):
        numbers = start + lanes
        valid = numbers < last
        pointers = _pointers(
            grad, q, k, v, out, grad_strides, q_strides, k_strides, v_strides, out_strides, batch, head, numbers,
            COLUMNS,
        )  # fmt: skip
        others = _load_tokens(pointers, stats, None, slot * tokens + numbers, valid, WIDTH, COLUMNS)
        keep = keep_factor(seed, slot, token, numbers, dropout_p)
        keep_back = keep_factor(seed, slot, numbers, token, dropout_p)
        there, _, by_weight, back, prob_back, by_weight_back = _both_ways(
            own_tokens, others, factor, keep, keep_back, valid, scale
        )
        gains = _gains(gains, others, there, back, prob_back)
        by_prefix += by_weight + tl.where(numbers < PREFIX, 0.0, by_weight_back)
    if prefix_weight_parts is not None:
        tl.store(prefix_weight_parts + slot * (blocks + PREFIX) + token, tl.sum(by_prefix, 0))
    dq_row, dk_row, dv_row = tl.sum(gains[0], 0), tl.sum(gains[1], 0), tl.sum(gains[2], 0)
    if prefix_sums is not None:
        columns = tl.arange(0, COLUMNS)
        of_patches = prefix_sums + 3 * (slot * PREFIX + token) * WIDTH + columns
        dq_row += tl.load(of_patches, mask=columns < WIDTH, other=0.0)
        dk_row += tl.load(of_patches + WIDTH, mask=columns < WIDTH, other=0.0)
        dv_row += tl.load(of_patches + 2 * WIDTH, mask=columns < WIDTH, other=0.0)
    store_row(dq, out_strides, batch, head, token, dq_row, WIDTH, COLUMNS)
    store_row(dk, out_strides, batch, head, token, dk_row, WIDTH, COLUMNS)
    store_row(dv, out_strides, batch, head, token, dv_row, WIDTH, COLUMNS)


@triton.jit
def _backward_tokens(
    grad, q, k, v, out, stats, dq, dk, dv, delta, floor, floor_sum, prefix_parts, pair_grads, prefix_weight_parts,
    self_weight_parts, signed_offsets, offset_begin, pair_weights, pair_begin, prefix_weight, self_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, patches, pair_stride, scale, dropout_p,
    ONE_LAUNCH: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each block of patches, and with ONE_LAUNCH one for each prefix token, which goes over all tokens.

    delta, floor, floor_sum: what `_backward_rows` prepares, or None. prefix_parts: without ONE_LAUNCH, float32 (B, H,
    P, blocks, 3, D), parts of dq, dk, dv of prefix tokens. pair_grads: float32 (B, pairs). prefix_weight_parts: float32
    (B, H, P + blocks), of which with ONE_LAUNCH only the first P are written. self_weight_parts: float32 (B, H,
    blocks).
    """
    blocks = tl.cdiv(patches, ROWS)
    first = PREFIX if ONE_LAUNCH else 0
    block, slot, batch, head = place(first + blocks, heads)
    if first > 0:  # noqa: SIM102 (the compiler drops one of them, the other runs)
        if block < first:
            _prefix_row(
                grad, q, k, v, out, stats, dq, dk, dv, None, prefix_weight_parts, prefix_weight, seed,
                grad_strides, q_strides, k_strides, v_strides, out_strides, block, slot, batch, head, PREFIX + patches,
                PREFIX + patches, blocks, scale, dropout_p, PREFIX, WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
    if block >= first:
        _patch_rows(
            grad, q, k, v, out, stats, dq, dk, dv, delta, floor, floor_sum, prefix_parts, pair_grads,
            None if ONE_LAUNCH else prefix_weight_parts, self_weight_parts, signed_offsets, offset_begin, pair_weights,
            pair_begin, prefix_weight, self_weight, seed, grad_strides, q_strides, k_strides, v_strides, out_strides,
            block - first, blocks, slot, batch, head, patches, pair_stride, scale, dropout_p,
            PREFIX, WIDTH, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _backward_prefix(
    grad, q, k, v, out, stats, dq, dk, dv, prefix_sums, prefix_weight_parts, prefix_weight, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, tokens, blocks, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for each prefix token: what all patches give, and the pairs of two prefix tokens.

    prefix_sums: float32 (B, H, P, 3, D), the sums of prefix_parts over the blocks.
    """
    token, slot, batch, head = place(PREFIX, heads)
    _prefix_row(
        grad, q, k, v, out, stats, dq, dk, dv, prefix_sums, prefix_weight_parts, prefix_weight, seed,
        grad_strides, q_strides, k_strides, v_strides, out_strides, token, slot, batch, head, tokens, PREFIX, blocks,
        scale, dropout_p, PREFIX, WIDTH, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _backward_rows(
    grad, out, stats, delta, floor, floor_parts, signed_offsets, offset_begin, grad_strides, out_strides, heads,
    patches, PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What `_backward_tokens` needs of other patches and would compute again for each of their neighbours.

    delta: float32 (B, H, T), see `_load_tokens`; prefix tokens have none. With zero fill, floor: float32 (B, H, T), the
    probability of a key outside the support, and floor_parts: float32 (B, H, blocks, D), the gradients it weighs.
    """
    blocks = tl.cdiv(patches, ROWS)
    block, slot, batch, head = place(blocks, heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < patches
    tokens = rows + PREFIX
    per_row = slot * (PREFIX + patches) + tokens
    g_rows = load_rows(row_pointers(grad, grad_strides, batch, head, tokens, COLUMNS), exists, WIDTH, COLUMNS)
    o_rows = load_rows(row_pointers(out, out_strides, batch, head, tokens, COLUMNS), exists, WIDTH, COLUMNS)
    tl.store(delta + per_row, tl.sum(g_rows * o_rows, 1), mask=exists)
    if floor is not None:
        first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
        seen = count_keys(signed_offsets, first, last, rows, patches)
        outside = patches - (tl.maximum(seen, 1) if PREFIX == 0 else seen)
        high, share = load_softmax(stats, per_row, exists)
        floor_rows = tl.where(exists & (outside > 0), tl.exp(-high) * share, 0.0)
        tl.store(floor + per_row, floor_rows, mask=exists)
        columns = tl.arange(0, COLUMNS)
        part = floor_parts + (slot * blocks + block) * WIDTH + columns
        tl.store(part, tl.sum(floor_rows[:, None] * g_rows, 0), mask=columns < WIDTH)
