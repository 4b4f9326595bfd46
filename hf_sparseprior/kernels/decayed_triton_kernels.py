"""The Triton kernels of `decayed_triton`: the table of a decay, attention with it, and the gradients.

A table holds M of some heads and some rows, (heads, rows, width) with rows and width padded to whole blocks by zeros,
so that blocks of it are read without a mask. M is symmetric, so the rows of a table are also the columns of keys.

Neighbouring programs work on one block of one head in all images, and find its tile of the table in the cache.
Logits are in units of log 2, so that a weight is one exp2.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from hf_sparseprior.kernels.triton_blocks import (
    keep_factor,
    load_softmax,
    place,
    row_mask,
    row_pointers,
    store_block,
    store_softmax,
)

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Triton's interpreter would multiply the bits of bfloat16 as integers, so there blocks are converted to float32 first.
# And it multiplies by numpy, where the order of a sum depends on the processor and the shapes. On a GPU it is the same
# in all kernels; that is why gradients are exactly 0 where one key has all the weight.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


# ---- blocks ---------------------------------------------------------------------------------------------------------


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b, summed in float32. PRECISION: of float32 factors, "ieee" or "tf32"."""
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _block(x, strides, batch, head, tokens, exists, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Tokens of one head (rows, COLUMNS) in their own dtype, 0 where no element exists. WHOLE: all tokens exist."""
    pointers = row_pointers(x, strides, batch, head, tokens, COLUMNS)
    if WHOLE and WIDTH == COLUMNS:
        return tl.load(pointers)
    return tl.load(pointers, mask=row_mask(exists, WIDTH, COLUMNS), other=0.0)


@triton.jit
def _place(blocks, images, first_head):
    """(block, image, head, head in the table) of this program, image after image for each block of each head."""
    program = tl.program_id(0)
    own = program // images
    head = (own // blocks).to(tl.int64)
    return own % blocks, (program % images).to(tl.int64), first_head + head, head


@triton.jit
def _tile(table, shape, head, rows, first_row, columns):
    """M (rows, columns) in float32. shape: rows and width of the table; first_row: the token that its rows begin at."""
    start = table + head * shape[0] * shape[1]
    return tl.load(start + (rows - first_row).to(tl.int64)[:, None] * shape[1] + columns[None, :]).to(tl.float32)


@triton.jit
def _distances(positions, curve, rows, keys, patches, AXES: tl.constexpr, PREFIX: tl.constexpr):
    """Distances (rows, keys) of tokens along one curve, float32. They have no meaning for prefix tokens."""
    # Ranks are integers below 2^24, exact in float32. A conversion for each pair would cost as much as exp2.
    total = tl.zeros((rows.shape[0], keys.shape[0]), tl.float32)
    for axis in tl.static_range(AXES):
        line = positions + (curve * AXES + axis) * patches - PREFIX
        of_rows = tl.load(line + rows, mask=(rows >= PREFIX) & (rows < patches + PREFIX), other=0).to(tl.float32)
        of_keys = tl.load(line + keys, mask=(keys >= PREFIX) & (keys < patches + PREFIX), other=0).to(tl.float32)
        total += tl.abs(of_rows[:, None] - of_keys[None, :])
    return total


@triton.jit
def _probability(logits, valid, high, share):
    """Probabilities of pairs, from logits that are computed as in the forward pass.

    The selection stands between product and difference, so that the compiler rounds the product as it did there.
    """
    logits = tl.where(valid, logits, float("-inf"))
    return tl.math.exp2(tl.minimum(logits - high, 0.0, propagate_nan=tl.PropagateNan.ALL)) * share


# ---- the table ------------------------------------------------------------------------------------------------------


@triton.jit
def _scalars_differ(log_gamma, prefix_gamma, made_of, head, heads, CURVES: tl.constexpr, CURVE_COLUMNS: tl.constexpr):
    """Whether a head's scalars are others than those that the table was made of, float32 (C + 1, H)."""
    curves = tl.arange(0, CURVE_COLUMNS)
    places = curves * heads + head
    of_now = tl.load(log_gamma + places, mask=curves < CURVES, other=0.0)
    before = tl.load(made_of + places, mask=curves < CURVES, other=0.0)
    changed = tl.sum((of_now != before).to(tl.int32), 0)
    if prefix_gamma is not None:
        changed += (tl.load(prefix_gamma + head) != tl.load(made_of + CURVES * heads + head)).to(tl.int32)
    return changed > 0


@triton.jit
def _remember(log_gamma, prefix_gamma, made_of, heads, CURVES: tl.constexpr, HEADS: tl.constexpr):
    """The first program of a launch after the table's notes what the table is made of."""
    if tl.program_id(0) == 0:
        own = tl.arange(0, HEADS)
        for curve in range(CURVES):
            at = curve * heads + own
            tl.store(made_of + at, tl.load(log_gamma + at, mask=own < heads), mask=own < heads)
        if prefix_gamma is not None:
            tl.store(made_of + CURVES * heads + own, tl.load(prefix_gamma + own, mask=own < heads), mask=own < heads)


@triton.jit
def _forward_table(
    table, shape, positions, log_gamma, prefix_gamma, made_of, heads, first_head, first_row, patches, programs,
    CURVES: tl.constexpr, CURVE_COLUMNS: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, SIDE: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """M of one head, in blocks of SIDE rows and SIDE columns, which `programs` programs share. With `made_of`, only if
    the scalars are others by now. SYMMETRIC: the table has all rows, and a block is written with the one that mirrors
    it."""
    across = shape[1] // SIDE
    blocks = (shape[0] // SIDE) * across
    own = (tl.program_id(0) // programs).to(tl.int64)
    first, end = tl.program_id(0) % programs, blocks
    if made_of is not None:
        differ = _scalars_differ(log_gamma, prefix_gamma, made_of, first_head + own, heads, CURVES, CURVE_COLUMNS)
        end = tl.where(differ, end, first)
    for block in range(first, end, programs):
        _table_block(
            table, shape, positions, log_gamma, prefix_gamma, heads, first_head, first_row, patches, own,
            block // across, block % across, CURVES, AXES, PREFIX, SIDE, SYMMETRIC,
        )  # fmt: skip


@triton.jit
def _table_block(
    table, shape, positions, log_gamma, prefix_gamma, heads, first_head, first_row, patches, own, row, column,
    CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, SIDE: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """A block of `_forward_table`."""
    needed = row <= column if SYMMETRIC else row >= 0
    if needed:
        tokens, head = patches + PREFIX, first_head + own
        rows = row * SIDE + tl.arange(0, SIDE)
        columns = column * SIDE + tl.arange(0, SIDE)
        total = tl.zeros((SIDE, SIDE), tl.float32)
        for curve in range(CURVES):
            rate = tl.load(log_gamma + curve * heads + head) * LOG2E
            distance = _distances(positions, curve, first_row + rows, columns, patches, AXES, PREFIX)
            total += tl.math.exp2(distance * rate)
        total = total / CURVES
        if PREFIX:
            of_prefix = 1.0 if prefix_gamma is None else tl.load(prefix_gamma + head)
            total = tl.where((first_row + rows < PREFIX)[:, None] | (columns < PREFIX)[None, :], of_prefix, total)
        total = tl.where((first_row + rows < tokens)[:, None] & (columns < tokens)[None, :], total, 0.0)
        total = total.to(table.dtype.element_ty)
        start = table + own * shape[0] * shape[1]
        tl.store(start + rows.to(tl.int64)[:, None] * shape[1] + columns[None, :], total)
        if SYMMETRIC:
            tl.store(start + columns.to(tl.int64)[None, :] * shape[1] + rows[:, None], total)


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _see_keys(
    q_rows, high, total, acc, start, k, v, table, shape, factor, k_strides, v_strides, seed, slot, batch, head, own,
    rows, first_row, tokens, dropout_p, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of rows after one more block of keys. WHOLE: all of its keys exist."""
    keys = start + tl.arange(0, KEYS)
    valid = keys < tokens
    k_rows = _block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS, WHOLE)
    decay = factor * _tile(table, shape, own, rows, first_row, keys)
    logits = _product(q_rows, tl.trans(k_rows), PRECISION) * decay
    if not WHOLE:
        logits = tl.where(valid[None, :], logits, float("-inf"))
    higher = tl.maximum(high, tl.max(logits, 1))
    shrink = tl.math.exp2(high - higher)
    weight = tl.math.exp2(logits - higher[:, None])
    total = total * shrink + tl.sum(weight, 1)
    weight = weight * keep_factor(seed, slot, rows[:, None], keys[None, :], dropout_p)
    v_rows = _block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS, WHOLE)
    acc = acc * shrink[:, None] + _product(weight.to(v_rows.dtype), v_rows, PRECISION)
    return higher, total, acc


@triton.jit
def _forward_rows(
    q, k, v, out, stats, table, shape, log_gamma, alpha, prefix_gamma, made_of, seed, q_strides, k_strides, v_strides,
    out_strides, images, heads, first_head, first_row, blocks, tokens, scale, dropout_p, CURVES: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows, and what `load_softmax` gives the backward pass."""
    if made_of is not None:
        _remember(log_gamma, prefix_gamma, made_of, heads, CURVES, HEADS)
    block, batch, head, own = _place(blocks, images, first_head)
    slot = batch * heads + head
    rows = first_row + block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    q_rows = _block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
    factor = tl.load(alpha + head) * scale * LOG2E
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Blocks whose keys all exist need no masks. Of float32 that is little of the time, and twice the registers.
    whole = 0 if q.dtype.element_ty == tl.float32 else tokens // KEYS * KEYS
    for start in range(0, whole, KEYS):
        high, total, acc = _see_keys(
            q_rows, high, total, acc, start, k, v, table, shape, factor, k_strides, v_strides, seed, slot, batch, head,
            own, rows, first_row, tokens, dropout_p, WIDTH, COLUMNS, KEYS, True, PRECISION,
        )  # fmt: skip
    for start in range(whole, tokens, KEYS):
        high, total, acc = _see_keys(
            q_rows, high, total, acc, start, k, v, table, shape, factor, k_strides, v_strides, seed, slot, batch, head,
            own, rows, first_row, tokens, dropout_p, WIDTH, COLUMNS, KEYS, False, PRECISION,
        )  # fmt: skip
    store_block(out, out_strides, batch, head, rows, exists, acc / total[:, None], WIDTH, COLUMNS)
    store_softmax(stats, slot * tokens + rows, high, total, exists)


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def _backward_delta(
    grad, out, delta, grad_strides, out_strides, heads, tokens,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta float32 (B, H, T): the product of output and gradient of a block of rows."""
    block, slot, batch, head = place(tl.cdiv(tokens, ROWS), heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    g_rows = _block(grad, grad_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
    out_rows = _block(out, out_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
    tl.store(delta + slot * tokens + rows, tl.sum(g_rows.to(tl.float32) * out_rows.to(tl.float32), 1), mask=exists)


@triton.jit
def _backward_mean(
    grad, q, k, v, stats, delta, table, shape, alpha, seed, grad_strides, q_strides, k_strides, v_strides, images,
    heads, first_head, first_row, blocks, tokens, scale, dropout_p, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows as the mean gradient of their probabilities, weighted by them.

    The product of output and gradient (`_backward_delta`) is the same number and needs no pass over the keys. But the
    output was rounded, and so were the weights of its sum, and the gradients of the decay are sums in which these
    errors stay. Rounding of a share changes all probabilities of a row alike, which does not change the mean.
    """
    block, batch, head, own = _place(blocks, images, first_head)
    slot = batch * heads + head
    rows = first_row + block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    factor = tl.load(alpha + head) * scale * LOG2E
    q_rows = _block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
    g_rows = _block(grad, grad_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
    high, share = load_softmax(stats, slot * tokens + rows, exists)
    weighted = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        valid = keys < tokens
        k_rows = _block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS, False)
        v_rows = _block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS, False)
        decay = factor * _tile(table, shape, own, rows, first_row, keys)
        logits = _product(q_rows, tl.trans(k_rows), PRECISION) * decay
        prob = _probability(logits, exists[:, None] & valid[None, :], high[:, None], share[:, None])
        d_prob = _product(g_rows, tl.trans(v_rows), PRECISION)
        d_prob *= keep_factor(seed, slot, rows[:, None], keys[None, :], dropout_p)
        weighted += tl.sum(prob * d_prob, 1)
        total += tl.sum(prob, 1)
    tl.store(delta + slot * tokens + rows, weighted / total, mask=exists)


@triton.jit
def _backward_keys(
    grad, q, k, v, stats, delta, dk, dv, dq_parts, table, shape, log_gamma, alpha, prefix_gamma, made_of, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, images, heads, first_head, first_key, blocks, tokens,
    scale, dropout_p, splits, CURVES: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of some blocks of keys, and their part of dq.

    A program goes over its blocks of keys, and for each over all rows. What a block adds to dq it adds in memory, which
    no other program touches: dq_parts is float32 (splits, B, H, T, D), and `_backward_queries` sums it in order. So
    logits and the gradients of probabilities are computed once, and two runs give the same bits.
    """
    if made_of is not None:
        _remember(log_gamma, prefix_gamma, made_of, heads, CURVES, HEADS)
    split, batch, head, own = _place(splits, images, first_head)
    slot = batch * heads + head
    factor = tl.load(alpha + head) * scale * LOG2E
    columns = tl.arange(0, COLUMNS)
    parts = dq_parts + (split.to(tl.int64) * images * heads + slot) * tokens * WIDTH
    first = split * blocks // splits
    for block in range(first, (split + 1) * blocks // splits):
        keys = first_key + block * KEYS + tl.arange(0, KEYS)
        exists = keys < tokens
        fresh = (block == first) & (first_key == 0)  # nothing is in the program's part of dq yet
        k_rows = _block(k, k_strides, batch, head, keys, exists, WIDTH, COLUMNS, False)
        v_rows = _block(v, v_strides, batch, head, keys, exists, WIDTH, COLUMNS, False)
        dk_rows = tl.zeros((KEYS, COLUMNS), tl.float32)
        dv_rows = tl.zeros((KEYS, COLUMNS), tl.float32)
        for start in range(0, tokens, ROWS):
            rows = start + tl.arange(0, ROWS)
            valid = rows < tokens
            q_rows = _block(q, q_strides, batch, head, rows, valid, WIDTH, COLUMNS, False)
            g_rows = _block(grad, grad_strides, batch, head, rows, valid, WIDTH, COLUMNS, False)
            high, share = load_softmax(stats, slot * tokens + rows, valid)
            delta_rows = tl.load(delta + slot * tokens + rows, mask=valid, other=0.0)
            decay = factor * _tile(table, shape, own, keys, first_key, rows)
            logits = _product(k_rows, tl.trans(q_rows), PRECISION) * decay
            prob = _probability(logits, exists[:, None] & valid[None, :], high[None, :], share[None, :])
            keep = keep_factor(seed, slot, rows[None, :], keys[:, None], dropout_p)
            dv_rows += _product((prob * keep).to(g_rows.dtype), g_rows, PRECISION)
            d_prob = _product(v_rows, tl.trans(g_rows), PRECISION) * keep
            by_product = (prob * (d_prob - delta_rows[None, :]) * decay).to(q_rows.dtype)
            dk_rows += _product(by_product, q_rows, PRECISION)
            pointers = parts + rows[:, None] * WIDTH + columns[None, :]
            own_rows = row_mask(valid, WIDTH, COLUMNS)
            before = tl.load(pointers, mask=own_rows & (not fresh), other=0.0)
            tl.store(pointers, before + _product(tl.trans(by_product), k_rows, PRECISION), mask=own_rows)
        store_block(dk, out_strides, batch, head, keys, exists, dk_rows * LN2, WIDTH, COLUMNS)
        store_block(dv, out_strides, batch, head, keys, exists, dv_rows, WIDTH, COLUMNS)
        tl.debug_barrier()  # all threads of the program see what it has added


@triton.jit
def _backward_queries(
    dq_parts, dq, out_strides, images, heads, tokens, splits,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows, the parts summed in order."""
    block, slot, batch, head = place(tl.cdiv(tokens, ROWS), heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    pointers = dq_parts + (slot * tokens + rows)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(splits):
        total += tl.load(pointers, mask=row_mask(exists, WIDTH, COLUMNS), other=0.0)
        pointers += (slot * 0 + images) * heads * tokens * WIDTH
    store_block(dq, out_strides, batch, head, rows, exists, total * LN2, WIDTH, COLUMNS)


@triton.jit
def _backward_decay(
    grad, q, k, v, stats, delta, parts, table, shape, positions, log_gamma, alpha, seed, grad_strides, q_strides,
    k_strides, v_strides, images, heads, first_head, first_row, blocks, patches, scale, dropout_p, splits,
    CURVES: tl.constexpr, CURVE_COLUMNS: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of the gradients of a head's log_gamma, prefix_gamma and alpha: float32 (H, blocks, splits, C + 2).

    A program sums over the images what each pair of its rows and keys adds, and then makes the distances and powers of
    those pairs once.
    """
    split, _, head, own = _place(splits, 1, first_head)
    block = (own % blocks).to(tl.int32)
    own = own // blocks
    head = first_head + own
    tokens = patches + PREFIX
    rows = first_row + block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    head_alpha = tl.load(alpha + head)
    factor = head_alpha * scale * LOG2E
    curves = tl.arange(0, CURVE_COLUMNS)
    by_curve = tl.zeros((CURVE_COLUMNS,), tl.float32)
    by_prefix, by_alpha = 0.0, 0.0
    across = tl.cdiv(tokens, KEYS)
    for tile in range(split * across // splits, (split + 1) * across // splits):
        keys = tile * KEYS + tl.arange(0, KEYS)
        valid = keys < tokens
        decay = _tile(table, shape, own, rows, first_row, keys)
        slope = tl.zeros((ROWS, KEYS), tl.float32)
        for image in range(images):
            batch = head * 0 + image  # int64
            slot = batch * heads + head
            q_rows = _block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
            k_rows = _block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS, False)
            product = _product(q_rows, tl.trans(k_rows), PRECISION)
            high, share = load_softmax(stats, slot * tokens + rows, exists)
            pairs = exists[:, None] & valid[None, :]
            prob = _probability(product * (factor * decay), pairs, high[:, None], share[:, None])
            g_rows = _block(grad, grad_strides, batch, head, rows, exists, WIDTH, COLUMNS, False)
            v_rows = _block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS, False)
            d_prob = _product(g_rows, tl.trans(v_rows), PRECISION)
            d_prob *= keep_factor(seed, slot, rows[:, None], keys[None, :], dropout_p)
            delta_rows = tl.load(delta + slot * tokens + rows, mask=exists, other=0.0)
            slope += prob * (d_prob - delta_rows[:, None]) * product
        slope *= scale
        by_alpha += tl.sum(tl.sum(slope * decay, 1), 0)
        if PREFIX:
            with_prefix = (rows < PREFIX)[:, None] | (keys < PREFIX)[None, :]
            by_prefix += tl.sum(tl.sum(tl.where(with_prefix, slope, 0.0), 1), 0)
            slope = tl.where(with_prefix, 0.0, slope)
        for curve in range(CURVES):
            rate = tl.load(log_gamma + curve * heads + head) * LOG2E
            distance = _distances(positions, curve, rows, keys, patches, AXES, PREFIX)
            of_curve = tl.sum(tl.sum(slope * distance * tl.math.exp2(distance * rate), 1), 0)
            by_curve += tl.where(curves == curve, of_curve, 0.0)
    all_blocks = tl.cdiv(tokens, ROWS)
    part = parts + ((head * all_blocks + first_row // ROWS + block) * splits + split) * (CURVES + 2)
    tl.store(part + curves, by_curve * (head_alpha / CURVES), mask=curves < CURVES)
    tl.store(part + CURVES, by_prefix * head_alpha)
    tl.store(part + CURVES + 1, by_alpha)
