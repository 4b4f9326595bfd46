"""Dense attention with a decay by Triton kernels, as PyTorch operators with fake kernels and gradients.

Y = softmax(alpha_h * scale * Q K^T * M) V, M_ij = mean over curves c of gamma_c^|position_c(i) - position_c(j)| (VIOLIN
Eqs. 12 and 13), computed as in flash attention 2: softmax runs over the blocks of keys one after the other, and the
backward pass computes probabilities again from the softmax of each row. Blocks of M are made from the positions
where they are needed, and nothing of size T x T is in memory. Only for many images of few tokens, where each would make
the same M again, it is made once for all (`_decay_table`).

Products of blocks are computed in the dtype of q and summed in float32; products of float32 are exact (no tf32). Sums
over blocks are taken in the order of the blocks, so that two runs give the same bits.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparseprior.kernels.diagonal_cpu import like_projection
from hf_sparseprior.kernels.second_derivatives import decayed, gradients
from hf_sparseprior.kernels.triton_blocks import (
    draw_seed,
    keep_factor,
    kept_pairs,
    load_block,
    load_softmax,
    outputs,
    place,
    probability,
    store_block,
    store_softmax,
)
from hf_sparseprior.kernels.triton_sizes import block_sizes

LOG2E = tl.constexpr(1.4426950408889634)
# Triton's interpreter would multiply the bits of bfloat16 as integers, so there blocks are converted to float32 first.
# And it multiplies by numpy, where the order of a sum depends on the processor and the shapes. On a GPU it is the same
# in all kernels; that is why gradients are exactly 0 where one key has all the weight.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# M is made once for all images if there are so many, and if it takes no more than a third of the L2 cache of an H100 or
# H200. At 12 heads that is up to 591 tokens. Not measured on a GPU.
TABLE_IMAGES, TABLE_BYTES = 8, 1 << 24


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    log_gamma: Tensor,
    alpha: Tensor,
    prefix_gamma: Tensor | None,
    num_prefix_tokens: int,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention over all pairs of tokens with the logits times alpha * M.

    Args:
        q, k, v: (B, H, T, D) float16, bfloat16 or float32, any strides, no copies; D up to 256.
        positions: int32 (C, A, N) of the patches; the distance of two is the sum over the axes of the differences.
        log_gamma: float32 (C, H), log of the decay per step of distance.
        alpha: float32 (H,), factor of all logits.
        prefix_gamma: float32 (H,), M of pairs with a prefix token; None: 1.
        num_prefix_tokens: P, tokens before the patches.
        scale: factor of the logits.
        dropout_p: dropout probability of the attention weights, drawn from torch's generator.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D). Gradients reach q, k, v, log_gamma, alpha and prefix_gamma.
    """
    seed = draw_seed(q, dropout_p)
    return torch.ops.hf_sparseprior.decayed_triton(
        q, k, v, positions, log_gamma, alpha, prefix_gamma, seed, num_prefix_tokens, scale, dropout_p
    )[0]


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _product(a, b):
    """a @ b, summed in float32."""
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, input_precision="ieee")


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
def _decay_block(
    table, positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches,
    CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """M (rows, keys) of tokens, from the table if there is one.

    M is symmetric, so the backward pass calls it with (keys, rows) in the same way.
    """
    if table is None:
        return _new_decay_block(
            positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches, CURVES, AXES, PREFIX
        )
    else:
        tokens = patches + PREFIX
        pointers = table + head * tokens * tokens + rows[:, None] * tokens + keys[None, :]
        return tl.load(pointers, mask=(rows < tokens)[:, None] & (keys < tokens)[None, :], other=0.0)


@triton.jit
def _new_decay_block(
    positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches,
    CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """M (rows, keys) of tokens, from their positions."""
    total = tl.zeros((rows.shape[0], keys.shape[0]), tl.float32)
    for curve in range(CURVES):
        rate = tl.load(log_gamma + curve * heads + head) * LOG2E
        total += tl.exp2(_distances(positions, curve, rows, keys, patches, AXES, PREFIX) * rate)
    total = total / CURVES
    if PREFIX:
        of_prefix = 1.0 if prefix_gamma is None else tl.load(prefix_gamma + head)
        total = tl.where((rows < PREFIX)[:, None] | (keys < PREFIX)[None, :], of_prefix, total)
    return total


@triton.jit
def _forward_decay(
    table, positions, log_gamma, prefix_gamma, heads, patches, CURVES: tl.constexpr, AXES: tl.constexpr,
    PREFIX: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """M of a block of rows and of keys of one head: table is float32 (H, T, T)."""
    tokens = patches + PREFIX
    across = tl.cdiv(tokens, KEYS)
    blocks = tl.cdiv(tokens, ROWS) * across
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    rows = (block // across) * ROWS + tl.arange(0, ROWS)
    keys = (block % across) * KEYS + tl.arange(0, KEYS)
    decay = _new_decay_block(positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches, CURVES, AXES, PREFIX)
    pointers = table + head * tokens * tokens + rows[:, None] * tokens + keys[None, :]
    tl.store(pointers, decay, mask=(rows < tokens)[:, None] & (keys < tokens)[None, :])


@triton.jit
def _forward_rows(
    q, k, v, out, stats, table, positions, log_gamma, alpha, prefix_gamma, seed, q_strides, k_strides, v_strides,
    out_strides, heads, patches, scale, dropout_p, CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output of a block of rows, and what `load_softmax` gives the backward pass."""
    tokens = patches + PREFIX
    block, slot, batch, head = place(tl.cdiv(tokens, ROWS), heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    q_rows = load_block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS)
    head_alpha = tl.load(alpha + head)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        valid = keys < tokens
        k_rows = load_block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS)
        v_rows = load_block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS)
        decay = _decay_block(
            table, positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches, CURVES, AXES, PREFIX
        )
        logits = _product(q_rows, tl.trans(k_rows)) * scale * (head_alpha * decay)
        logits = tl.where(valid[None, :], logits, float("-inf"))
        higher = tl.maximum(high, tl.max(logits, 1))
        shrink = tl.exp(high - higher)
        weight = tl.exp(logits - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        weight = weight * keep_factor(seed, slot, rows[:, None], keys[None, :], dropout_p)
        acc = acc * shrink[:, None] + _product(weight.to(v_rows.dtype), v_rows)
        high = higher
    store_block(out, out_strides, batch, head, rows, exists, acc / total[:, None], WIDTH, COLUMNS)
    store_softmax(stats, slot * tokens + rows, high, total, exists)


@triton.jit
def _row_pairs(
    q_rows, g_rows, high, share, rows, exists, keys, k, v, table, positions, log_gamma, prefix_gamma, head_alpha,
    seed, k_strides, v_strides, slot, batch, head, heads, patches, scale, dropout_p,
    CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For rows and keys: M, the scaled product of q and k, the probability and its gradient, and the rows of k."""
    valid = keys < patches + PREFIX
    k_rows = load_block(k, k_strides, batch, head, keys, valid, WIDTH, COLUMNS)
    v_rows = load_block(v, v_strides, batch, head, keys, valid, WIDTH, COLUMNS)
    decay = _decay_block(
        table, positions, log_gamma, prefix_gamma, head, heads, rows, keys, patches, CURVES, AXES, PREFIX
    )
    product = _product(q_rows, tl.trans(k_rows)) * scale
    pairs = exists[:, None] & valid[None, :]
    prob = probability(product * (head_alpha * decay), pairs, high[:, None], share[:, None])
    d_prob = _product(g_rows, tl.trans(v_rows)) * keep_factor(seed, slot, rows[:, None], keys[None, :], dropout_p)
    return decay, product, prob, d_prob, k_rows


@triton.jit
def _backward_delta(
    grad, q, k, v, stats, delta, table, positions, log_gamma, alpha, prefix_gamma, seed, grad_strides, q_strides,
    k_strides, v_strides, heads, patches, scale, dropout_p, CURVES: tl.constexpr, AXES: tl.constexpr,
    PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows: float32 (B, H, T), for each row the mean gradient of its probabilities, weighted by
    them.

    The product of output and gradient is the same number and needs no pass over the keys. But the output was rounded,
    and so were the weights of its sum, and the gradients of the decay are sums in which these errors stay. Rounding of
    a share changes all probabilities of a row alike, which does not change the mean.

    It is a kernel of its own, because `_backward_rows` would not have enough registers for it.
    """
    tokens = patches + PREFIX
    block, slot, batch, head = place(tl.cdiv(tokens, ROWS), heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    q_rows = load_block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS)
    g_rows = load_block(grad, grad_strides, batch, head, rows, exists, WIDTH, COLUMNS)
    high, share = load_softmax(stats, slot * tokens + rows, exists)
    head_alpha = tl.load(alpha + head)
    weighted = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tokens, KEYS):
        _, _, prob, d_prob, _ = _row_pairs(
            q_rows, g_rows, high, share, rows, exists, start + tl.arange(0, KEYS), k, v, table, positions,
            log_gamma, prefix_gamma, head_alpha, seed, k_strides, v_strides, slot, batch, head, heads, patches, scale,
            dropout_p, CURVES, AXES, PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
        weighted += tl.sum(prob * d_prob, 1)
        total += tl.sum(prob, 1)
    tl.store(delta + slot * tokens + rows, weighted / total, mask=exists)


@triton.jit
def _backward_rows(
    grad, q, k, v, stats, dq, delta, decay_parts, table, positions, log_gamma, alpha, prefix_gamma, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, patches, scale, dropout_p,
    CURVES: tl.constexpr, CURVE_COLUMNS: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows, and its part of the gradients of the decay.

    decay_parts: float32 (B, H, blocks, C + 2), for log_gamma, prefix_gamma and alpha; None if none is learned.
    """
    tokens = patches + PREFIX
    blocks = tl.cdiv(tokens, ROWS)
    block, slot, batch, head = place(blocks, heads)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < tokens
    q_rows = load_block(q, q_strides, batch, head, rows, exists, WIDTH, COLUMNS)
    g_rows = load_block(grad, grad_strides, batch, head, rows, exists, WIDTH, COLUMNS)
    high, share = load_softmax(stats, slot * tokens + rows, exists)
    delta_rows = tl.load(delta + slot * tokens + rows, mask=exists, other=0.0)
    head_alpha = tl.load(alpha + head)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    curves = tl.arange(0, CURVE_COLUMNS)
    by_curve = tl.zeros((ROWS, CURVE_COLUMNS), tl.float32)
    by_prefix = tl.zeros((ROWS,), tl.float32)
    by_alpha = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        decay, product, prob, d_prob, k_rows = _row_pairs(
            q_rows, g_rows, high, share, rows, exists, keys, k, v, table, positions, log_gamma, prefix_gamma,
            head_alpha, seed, k_strides, v_strides, slot, batch, head, heads, patches, scale, dropout_p,
            CURVES, AXES, PREFIX, WIDTH, COLUMNS,
        )  # fmt: skip
        slope = prob * (d_prob - delta_rows[:, None])
        by_logit = (slope * (head_alpha * decay)).to(k_rows.dtype)
        acc += _product(by_logit, k_rows)
        if decay_parts is not None:
            slope = slope * product
            by_alpha += tl.sum(slope * decay, 1)
            if PREFIX:
                with_prefix = (rows < PREFIX)[:, None] | (keys < PREFIX)[None, :]
                by_prefix += tl.sum(tl.where(with_prefix, slope, 0.0), 1)
                slope = tl.where(with_prefix, 0.0, slope)
            for curve in range(CURVES):
                rate = tl.load(log_gamma + curve * heads + head) * LOG2E
                distance = _distances(positions, curve, rows, keys, patches, AXES, PREFIX)
                of_curve = tl.sum(slope * distance * tl.exp2(distance * rate), 1)
                by_curve += tl.where((curves == curve)[None, :], of_curve[:, None], 0.0)
    if decay_parts is not None:
        part = decay_parts + (slot * blocks + block) * (CURVES + 2)
        tl.store(part + curves, tl.sum(by_curve, 0) * (head_alpha / CURVES), mask=curves < CURVES)
        tl.store(part + CURVES, tl.sum(by_prefix, 0) * head_alpha)
        tl.store(part + CURVES + 1, tl.sum(by_alpha, 0))
    store_block(dq, out_strides, batch, head, rows, exists, acc * scale, WIDTH, COLUMNS)


@triton.jit
def _backward_keys(
    grad, q, k, v, stats, delta, dk, dv, table, positions, log_gamma, alpha, prefix_gamma, seed,
    grad_strides, q_strides, k_strides, v_strides, out_strides, heads, patches, scale, dropout_p,
    CURVES: tl.constexpr, AXES: tl.constexpr, PREFIX: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys (ROWS of them) from blocks of rows that see them (KEYS at a time)."""
    tokens = patches + PREFIX
    block, slot, batch, head = place(tl.cdiv(tokens, ROWS), heads)
    keys = block * ROWS + tl.arange(0, ROWS)
    exists = keys < tokens
    k_rows = load_block(k, k_strides, batch, head, keys, exists, WIDTH, COLUMNS)
    v_rows = load_block(v, v_strides, batch, head, keys, exists, WIDTH, COLUMNS)
    head_alpha = tl.load(alpha + head)
    dk_rows = tl.zeros((ROWS, COLUMNS), tl.float32)
    dv_rows = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, tokens, KEYS):
        rows = start + tl.arange(0, KEYS)
        valid = rows < tokens
        q_rows = load_block(q, q_strides, batch, head, rows, valid, WIDTH, COLUMNS)
        g_rows = load_block(grad, grad_strides, batch, head, rows, valid, WIDTH, COLUMNS)
        high, share = load_softmax(stats, slot * tokens + rows, valid)
        delta_rows = tl.load(delta + slot * tokens + rows, mask=valid, other=0.0)
        decay = head_alpha * _decay_block(
            table, positions, log_gamma, prefix_gamma, head, heads, keys, rows, patches, CURVES, AXES, PREFIX
        )
        product = _product(k_rows, tl.trans(q_rows)) * scale
        prob = probability(product * decay, valid[None, :], high[None, :], share[None, :])
        keep = keep_factor(seed, slot, rows[None, :], keys[:, None], dropout_p)
        dv_rows += _product((prob * keep).to(g_rows.dtype), g_rows)
        slope = prob * (_product(v_rows, tl.trans(g_rows)) * keep - delta_rows[None, :])
        dk_rows += _product((slope * decay).to(q_rows.dtype), q_rows)
    store_block(dk, out_strides, batch, head, keys, exists, dk_rows * scale, WIDTH, COLUMNS)
    store_block(dv, out_strides, batch, head, keys, exists, dv_rows, WIDTH, COLUMNS)


# ---- operators ------------------------------------------------------------------------------------------------------


def _sizes(q: Tensor, positions: Tensor, prefix: int, direction: str) -> dict[str, int]:
    """The sizes that the kernels are compiled for."""
    curves, axes, _ = positions.shape
    return {"CURVES": curves, "AXES": axes, "PREFIX": prefix, **block_sizes(f"decayed_{direction}", q)}


def _decay_table(
    q: Tensor, positions: Tensor, log_gamma: Tensor, prefix_gamma: Tensor | None, prefix: int, sizes: dict[str, int]
) -> Tensor | None:
    """M as float32 (H, T, T), the same numbers that each block would make; None where a table would not pay.

    A block of M is made with one exponential for each pair and curve, more than attention itself has. Read, it is four
    bytes for each pair, from the L2 cache, where all images find the same ones.
    """
    batch, heads, tokens, _ = q.shape
    if batch < TABLE_IMAGES or 4 * heads * tokens**2 > TABLE_BYTES:
        return None
    table = q.new_empty((heads, tokens, tokens), dtype=torch.float32)
    options = {name: sizes[name] for name in ("CURVES", "AXES", "PREFIX", "ROWS", "KEYS", "num_warps")}
    blocks = triton.cdiv(tokens, sizes["ROWS"]) * triton.cdiv(tokens, sizes["KEYS"])
    _forward_decay[(heads * blocks,)](table, positions, log_gamma, prefix_gamma, heads, tokens - prefix, **options)
    return table


@torch.library.custom_op("hf_sparseprior::decayed_triton", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor | None,
    seed: Tensor | None, prefix: int, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, D) and float32 (B, H, T, 2), see `store_softmax`."""
    out, stats = outputs(q)
    slots, tokens = q.shape[0] * q.shape[1], q.shape[2]
    if slots == 0:
        return out, stats
    sizes = _sizes(q, positions, prefix, "forward")
    log_gamma = log_gamma.contiguous()
    with torch.cuda.device_of(q):
        table = _decay_table(q, positions, log_gamma, prefix_gamma, prefix, sizes)
        _forward_rows[(slots * triton.cdiv(tokens, sizes["ROWS"]),)](
            q, k, v, out, stats, table, positions, log_gamma, alpha, prefix_gamma, seed,
            q.stride(), k.stride(), v.stride(), out.stride(), q.shape[1], tokens - prefix, scale, dropout_p, **sizes,
        )  # fmt: skip
    return out, stats


@torch.library.custom_op("hf_sparseprior::decayed_triton_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, positions: Tensor, log_gamma: Tensor,
    alpha: Tensor, prefix_gamma: Tensor | None, seed: Tensor | None, prefix: int, scale: float, dropout_p: float,
    learns_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, and (C + 2, H) gradients of log_gamma, prefix_gamma and alpha, without columns if not learned."""
    batch, heads, tokens, _ = q.shape
    dq, dk, dv = (like_projection(q) for _ in range(3))  # the kernels assume that they have the same strides
    curves = positions.shape[0]
    if batch * heads == 0 or not learns_decay:
        d_decay = q.new_zeros(curves + 2, heads if learns_decay else 0, dtype=torch.float32)
    if batch * heads == 0:
        return dq, dk, dv, d_decay
    sizes = _sizes(q, positions, prefix, "backward")
    blocks = triton.cdiv(tokens, sizes["ROWS"])
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    parts = stats.new_empty(batch, heads, blocks, curves + 2) if learns_decay else None
    log_gamma = log_gamma.contiguous()
    inputs = (grad.stride(), q.stride(), k.stride(), v.stride())
    strides = (*inputs, dq.stride())
    numbers = (heads, tokens - prefix, scale, dropout_p)
    with torch.cuda.device_of(q):
        table = _decay_table(q, positions, log_gamma, prefix_gamma, prefix, sizes)
        decay = (table, positions, log_gamma, alpha, prefix_gamma, seed)
        _backward_delta[(batch * heads * blocks,)](grad, q, k, v, stats, delta, *decay, *inputs, *numbers, **sizes)
        _backward_rows[(batch * heads * blocks,)](
            grad, q, k, v, stats, dq, delta, parts, *decay, *strides, *numbers,
            CURVE_COLUMNS=triton.next_power_of_2(curves), **sizes,
        )  # fmt: skip
        _backward_keys[(batch * heads * blocks,)](
            grad, q, k, v, stats, delta, dk, dv, *decay, *strides, *numbers, **sizes
        )
    if parts is not None:
        d_decay = parts.sum((0, 2)).t().contiguous()
    return dq, dk, dv, d_decay


@_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return outputs(q)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    positions, learns_decay = rest[3], rest[-1]
    shape = (positions.shape[0] + 2, q.shape[1] if learns_decay else 0)
    return (*(like_projection(q) for _ in range(3)), q.new_empty(shape, dtype=torch.float32))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, prefix, scale, dropout_p = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (prefix, scale, dropout_p)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 11
    q, k, v, *tensors, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        positions, *scalars, seed = tensors
        _, scale, dropout_p = ctx.options
        keep = kept_pairs(q, seed, dropout_p)
        grads = gradients(decayed, (q, k, v, *scalars), grad, positions=positions, scale=scale, keep=keep)
        return *grads[:3], None, *grads[3:], *(None,) * 4
    learns_decay = any(ctx.needs_input_grad[4:7])
    dq, dk, dv, d_decay = torch.ops.hf_sparseprior.decayed_triton_backward(
        grad, q, k, v, stats, *tensors, *ctx.options, learns_decay
    )
    if not learns_decay:
        return dq, dk, dv, *(None,) * 8
    d_prefix = None if tensors[3] is None else d_decay[-2]
    return dq, dk, dv, None, d_decay[:-2], d_decay[-1], d_prefix, *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_setup_context)
