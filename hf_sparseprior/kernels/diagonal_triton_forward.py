"""Triton kernels along diagonals, forward. `diagonal_triton` launches them and says what the letters mean."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_sparseprior.kernels.triton_blocks import (
    keep_factor,
    load_block,
    load_row,
    load_rows,
    place,
    row_mask,
    row_pointers,
    store_block,
    store_row,
    store_softmax,
)


@triton.jit
def head_weight(weights, head):
    """A factor of the head, 1 without weights."""
    if weights is None:
        return 1.0
    else:
        return tl.load(weights + head)


@triton.jit
def pair_weight(pair_weights, pair_begin, number, rows, keys, valid):
    """Factors of the logits of pairs at signed offset `number`, 1 without weights."""
    if pair_weights is None:
        return 1.0
    else:
        return tl.load(pair_weights + tl.load(pair_begin + number) + tl.minimum(rows, keys), mask=valid, other=0.0)


@triton.jit
def count_keys(signed_offsets, first, last, rows, patches):
    """How many patches each row sees at its head's offsets."""
    count = tl.zeros_like(rows)
    for number in range(first, last):
        key = rows + tl.load(signed_offsets + number)
        count += ((key >= 0) & (key < patches)).to(tl.int32)
    return count


@triton.jit
def _taken_out(outside, finite):
    """exp(0) of a key as a share of exp(finite), where keys outside count. Without a key there, its v is 0."""
    return tl.where(outside > 0, tl.exp(-finite), 0.0)


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
        gain -= _taken_out(outside, finite)
    acc = acc * shrink[:, None] + gain[:, None] * v_rows
    return higher, total, acc


@triton.jit
def _join_two(high, total, acc, logits, v_rows, keep, logits_2, v_rows_2, keep_2, outside):
    """`_join` with two keys at once: what is there is scaled once instead of twice."""
    higher = tl.maximum(high, tl.maximum(logits, logits_2))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(high - finite)
    weight, weight_2 = tl.exp(logits - finite), tl.exp(logits_2 - finite)
    total = total * shrink + (weight + weight_2)
    gain, gain_2 = weight * keep, weight_2 * keep_2
    if outside is not None:
        gain -= _taken_out(outside, finite)
        gain_2 -= _taken_out(outside, finite)
    acc = acc * shrink[:, None] + (gain[:, None] * v_rows + gain_2[:, None] * v_rows_2)
    return higher, total, acc


@triton.jit
def _together(high, total, acc):
    """One softmax (largest logit, sum, weighted sum of v) of those that the rows hold."""
    top = tl.max(high, 0)
    share = tl.exp(high - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.sum(total * share, 0), tl.sum(acc * share[:, None], 0)


@triton.jit
def _prefix_parts(
    q, k_rows, v_rows, parts, part_stats, q_strides, factor, seed, slot, batch, head, tokens, exists, block, blocks,
    scale, dropout_p, PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prefix rows over a block of keys: parts float32 (B, H, P, blocks, D), part_stats (B, H, P, blocks, 2)."""
    columns = tl.arange(0, COLUMNS)
    for token in range(PREFIX):
        q_row = load_row(q, q_strides, batch, head, token, WIDTH, COLUMNS)
        logits = tl.where(exists, tl.sum(k_rows * q_row[None, :], 1) * scale * factor, float("-inf"))
        high = tl.max(logits, 0)
        weight = tl.exp(logits - tl.where(high == float("-inf"), 0.0, high))
        keep = keep_factor(seed, slot, token, tokens, dropout_p)
        at = (slot * PREFIX + token) * blocks + block
        acc = tl.sum((weight * keep)[:, None] * v_rows, 0)
        tl.store(parts + at * WIDTH + columns, acc, mask=columns < WIDTH)
        tl.store(part_stats + 2 * at, high)
        tl.store(part_stats + 2 * at + 1, tl.sum(weight, 0))


@triton.jit
def _join_parts(
    high, total, acc, parts, part_stats, begin, first, last,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The softmax of each of ROWS lanes with parts `first` to `last` of a prefix row, whose parts start at `begin`."""
    columns = tl.arange(0, COLUMNS)
    for start in range(first, last, ROWS):
        part = start + tl.arange(0, ROWS)
        valid = part < last
        at = begin + part
        highs = tl.load(part_stats + 2 * at, mask=valid, other=float("-inf"))
        totals = tl.load(part_stats + 2 * at + 1, mask=valid, other=0.0)
        mask = row_mask(valid, WIDTH, COLUMNS)
        values = tl.load(parts + at[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
        higher = tl.maximum(high, highs)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, share = tl.exp(high - finite), tl.exp(highs - finite)
        total = total * shrink + share * totals
        acc = acc * shrink[:, None] + share[:, None] * values
        high = higher
    return high, total, acc


@triton.jit
def _prefix_row(
    q, k, v, out, stats, parts, part_stats, prefix_weight, seed, q_strides, k_strides, v_strides, out_strides,
    token, slot, batch, head, tokens, last, blocks, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A prefix token's output: over the tokens before `last`, and the parts of blocks of patches if there are any.

    Each of ROWS lanes has a softmax of its own, over every ROWS-th key; at the end they become one. So nothing is
    summed across the lanes within the loop.
    """
    lanes = tl.arange(0, ROWS)
    factor = head_weight(prefix_weight, head)
    q_row = load_row(q, q_strides, batch, head, token, WIDTH, COLUMNS)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, last, ROWS):
        keys = start + lanes
        valid = keys < last
        k_rows = load_block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS).to(tl.float32)
        v_rows = load_block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS).to(tl.float32)
        logits = tl.where(valid, tl.sum(k_rows * q_row[None, :], 1) * scale * factor, float("-inf"))
        keep = keep_factor(seed, slot, token, keys, dropout_p)
        high, total, acc = _join(high, total, acc, logits, v_rows, keep, None)
    if parts is not None:
        high, total, acc = _join_parts(
            high, total, acc, parts, part_stats, (slot * PREFIX + token) * blocks, 0, blocks, WIDTH, ROWS, COLUMNS
        )
    top, total_of_all, acc_of_all = _together(high, total, acc)
    store_row(out, out_strides, batch, head, token, acc_of_all / total_of_all, WIDTH, COLUMNS)
    store_softmax(stats, slot * tokens + token, top, total_of_all, True)


@triton.jit
def _patch_rows(
    q, k, v, out, stats, parts, part_stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin,
    prefix_weight, self_weight, seed, q_strides, k_strides, v_strides, out_strides, block, blocks, slot, batch, head,
    patches, scale, dropout_p, PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output of a block of patch rows and its softmax; with `parts`, also what prefix rows get from its keys."""
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < patches
    tokens = rows + PREFIX
    first, last = tl.load(offset_begin + head), tl.load(offset_begin + head + 1)
    k_pointers = row_pointers(k, k_strides, batch, head, tokens, COLUMNS)
    v_pointers = row_pointers(v, v_strides, batch, head, tokens, COLUMNS)
    prefix_factor = head_weight(prefix_weight, head)
    if parts is not None:
        _prefix_parts(
            q, load_rows(k_pointers, exists, WIDTH, COLUMNS), load_rows(v_pointers, exists, WIDTH, COLUMNS), parts,
            part_stats, q_strides, prefix_factor, seed, slot, batch, head, tokens, exists, block, blocks, scale,
            dropout_p, PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
    q_rows = load_block(q, q_strides, batch, head, tokens, exists, WIDTH, COLUMNS).to(tl.float32)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    outside = None
    if PREFIX == 0 or v_sum is not None:
        seen = count_keys(signed_offsets, first, last, rows, patches)
    if v_sum is not None:
        outside = patches - (tl.maximum(seen, 1) if PREFIX == 0 else seen)
        columns = tl.arange(0, COLUMNS)
        everything = tl.load(v_sum + slot * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        high = tl.where(outside > 0, 0.0, high)
        total = outside.to(tl.float32)
        acc = tl.where((outside > 0)[:, None], everything[None, :], acc)
    for token in range(PREFIX):
        k_row = load_row(k, k_strides, batch, head, token, WIDTH, COLUMNS)
        v_row = load_row(v, v_strides, batch, head, token, WIDTH, COLUMNS)
        # The selection keeps the compiler from joining the product with the difference in `_join`, which would round it
        # otherwise than the backward pass does.
        logits = tl.where(exists, tl.sum(q_rows * k_row[None, :], 1) * scale * prefix_factor, float("-inf"))
        keep = keep_factor(seed, slot, tokens, token, dropout_p)
        high, total, acc = _join(high, total, acc, logits, v_row[None, :], keep, outside)
    # Two offsets at a time, mostly o and -o: four loads are under way together.
    for number in range(first, last, 2):
        logits, v_rows, keep = _keys_at(
            q_rows, k_pointers, v_pointers, k_strides, v_strides, signed_offsets, pair_weights, pair_begin, number,
            last, rows, exists, patches, seed, slot, scale, dropout_p, PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
        logits_2, v_rows_2, keep_2 = _keys_at(
            q_rows, k_pointers, v_pointers, k_strides, v_strides, signed_offsets, pair_weights, pair_begin, number + 1,
            last, rows, exists, patches, seed, slot, scale, dropout_p, PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
        high, total, acc = _join_two(high, total, acc, logits, v_rows, keep, logits_2, v_rows_2, keep_2, outside)
    if PREFIX == 0:
        alone = exists & (seen == 0)
        k_rows = load_rows(k_pointers, alone, WIDTH, COLUMNS)
        v_rows = load_rows(v_pointers, alone, WIDTH, COLUMNS)
        logits = tl.sum(q_rows * k_rows, 1) * scale * head_weight(self_weight, head)
        keep = keep_factor(seed, slot, tokens, tokens, dropout_p)
        high, total, acc = _join(high, total, acc, tl.where(alone, logits, float("-inf")), v_rows, keep, outside)
    total = tl.where(exists, total, 1.0)
    store_block(out, out_strides, batch, head, tokens, exists, acc / total[:, None], WIDTH, COLUMNS)
    store_softmax(stats, slot * (PREFIX + patches) + tokens, high, total, exists)


@triton.jit
def _keys_at(
    q_rows, k_pointers, v_pointers, k_strides, v_strides, signed_offsets, pair_weights, pair_begin, number, last,
    rows, exists, patches, seed, slot, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Logits, values and dropout factors of the keys at a signed offset; logits are -inf if there is none."""
    there = tl.minimum(number, last - 1)
    offset = tl.load(signed_offsets + there).to(tl.int64)
    keys = rows + offset.to(tl.int32)
    valid = exists & (keys >= 0) & (keys < tl.where(number < last, patches, 0))
    k_rows = load_rows(k_pointers + offset * k_strides[2], valid, WIDTH, COLUMNS)
    v_rows = load_rows(v_pointers + offset * v_strides[2], valid, WIDTH, COLUMNS)
    weight = pair_weight(pair_weights, pair_begin, there, rows, keys, valid)
    logits = tl.sum(q_rows * k_rows, 1) * scale * weight
    keep = keep_factor(seed, slot, rows + PREFIX, keys + PREFIX, dropout_p)
    return tl.where(valid, logits, float("-inf")), v_rows, keep


@triton.jit
def _forward_tokens(
    q, k, v, out, stats, parts, part_stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin,
    prefix_weight, self_weight, seed, q_strides, k_strides, v_strides, out_strides, heads, patches, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each block of patch rows, and without `parts` one for each prefix token, which goes over all keys.

    v_sum: float32 (B, H, D), the sum of all v, with zero fill.
    """
    blocks = tl.cdiv(patches, ROWS)
    first = PREFIX if parts is None else 0
    block, slot, batch, head = place(first + blocks, heads)
    if first > 0:  # noqa: SIM102 (the compiler drops one of them, the other runs)
        if block < first:
            _prefix_row(
                q, k, v, out, stats, None, None, prefix_weight, seed, q_strides, k_strides, v_strides, out_strides,
                block, slot, batch, head, PREFIX + patches, PREFIX + patches, blocks, scale, dropout_p,
                PREFIX, WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
    if block >= first:
        _patch_rows(
            q, k, v, out, stats, parts, part_stats, v_sum, signed_offsets, offset_begin, pair_weights, pair_begin,
            prefix_weight, self_weight, seed, q_strides, k_strides, v_strides, out_strides, block - first, blocks, slot,
            batch, head, patches, scale, dropout_p, PREFIX, WIDTH, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _forward_prefix(
    q, k, v, out, stats, parts, part_stats, prefix_weight, seed, q_strides, k_strides, v_strides, out_strides, heads,
    tokens, blocks, scale, dropout_p,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for each prefix token, which joins the parts of all blocks with the prefix tokens as keys."""
    token, slot, batch, head = place(PREFIX, heads)
    _prefix_row(
        q, k, v, out, stats, parts, part_stats, prefix_weight, seed, q_strides, k_strides, v_strides, out_strides,
        token, slot, batch, head, tokens, PREFIX, blocks, scale, dropout_p, PREFIX, WIDTH, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _forward_parts(
    parts, part_stats, joined, joined_stats, blocks, groups, PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """PER_GROUP parts of a prefix row as one: joined float32 (B, H, P, groups, D), joined_stats with 2 for D."""
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    columns = tl.arange(0, COLUMNS)
    first = group * PER_GROUP
    high, total, acc = _join_parts(
        tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32), parts, part_stats, row * blocks, first,
        tl.minimum(first + PER_GROUP, blocks), WIDTH, ROWS, COLUMNS,
    )  # fmt: skip
    top, total_of_all, acc_of_all = _together(high, total, acc)
    at = row * groups + group
    tl.store(joined + at * WIDTH + columns, acc_of_all, mask=columns < WIDTH)
    tl.store(joined_stats + 2 * at, top)
    tl.store(joined_stats + 2 * at + 1, total_of_all)
