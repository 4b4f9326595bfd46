"""What the Triton kernels share: where a program works, blocks of rows, dropout, the tensors they fill.

In all kernels of this folder a slot is one (batch, head), numbered batch * H + head. The blocks of a slot are
neighbouring programs, so that rows which several of them read stay in the cache. A None argument is known when a kernel
is compiled, so what depends on it costs nothing at run time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparseprior.kernels.diagonal_cpu import like_projection


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """An empty output (B, H, T, D), in memory as (B, T, H, D), and float32 (B, H, T, 2) for `store_softmax`."""
    return like_projection(q), q.new_empty((*q.shape[:3], 2), dtype=torch.float32)


def draw_seed(q: Tensor, dropout_p: float) -> Tensor | None:
    """The seed that `keep_factor` draws with, from torch's generator; None without dropout."""
    return torch.randint(2**62, (1,), device=q.device) if dropout_p > 0.0 else None


def kept_pairs(q: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor | None:
    """What dropout multiplies all weights with, (B, H, T, T); None without dropout."""
    if seed is None:
        return None
    batch, heads, tokens, _ = q.shape
    keep = q.new_empty(batch, heads, tokens, tokens, dtype=torch.float32)
    if keep.numel():
        with torch.cuda.device_of(q):
            _write_kept_pairs[(batch * heads * tokens,)](keep, seed, tokens, dropout_p, KEYS=128)
    return keep


@triton.jit
def place(blocks, heads):
    """(block of the slot, slot, batch, head) of this program; the last three are int64, for offsets in memory."""
    program = tl.program_id(0)
    slot = (program // blocks).to(tl.int64)
    return program % blocks, slot, slot // heads, slot % heads


@triton.jit
def row_pointers(x, strides, batch, head, tokens, COLUMNS: tl.constexpr):
    """Pointers (rows, COLUMNS) to tokens of one head of x (B, H, T, D)."""
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    start = x + batch * strides[0] + head * strides[1]
    return start + tokens.to(tl.int64)[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def row_mask(valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Mask (rows, COLUMNS) of the elements that exist."""
    return valid[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]


@triton.jit
def load_rows(pointers, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows in float32, 0 where no element exists."""
    return tl.load(pointers, mask=row_mask(valid, WIDTH, COLUMNS), other=0.0).to(tl.float32)


@triton.jit
def load_block(x, strides, batch, head, tokens, exists, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens of one head (rows, COLUMNS) in their own dtype, 0 where no element exists."""
    pointers = row_pointers(x, strides, batch, head, tokens, COLUMNS)
    return tl.load(pointers, mask=row_mask(exists, WIDTH, COLUMNS), other=0.0)


@triton.jit
def store_block(x, strides, batch, head, tokens, exists, values, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Write tokens of one head."""
    pointers = row_pointers(x, strides, batch, head, tokens, COLUMNS)
    tl.store(pointers, values.to(x.dtype.element_ty), mask=row_mask(exists, WIDTH, COLUMNS))


@triton.jit
def load_row(x, strides, batch, head, token, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """One token of one head in float32, (COLUMNS,)."""
    columns = tl.arange(0, COLUMNS)
    start = x + batch * strides[0] + head * strides[1] + token * strides[2]
    return tl.load(start + columns.to(tl.int64) * strides[3], mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def store_row(x, strides, batch, head, token, values, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Write one token of one head."""
    columns = tl.arange(0, COLUMNS)
    start = x + batch * strides[0] + head * strides[1] + token * strides[2]
    tl.store(start + columns.to(tl.int64) * strides[3], values.to(x.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def store_softmax(stats, rows, high, total, exists):
    """Keep the largest logit of rows, and the share of its key: 1 / the sum of exp(logit - largest).

    As one number, the logarithm of the sum, they would be off by rounding, which at logits of a million is 6 % of each
    probability.
    """
    tl.store(stats + 2 * rows, high, mask=exists)
    tl.store(stats + 2 * rows + 1, 1.0 / total, mask=exists)


@triton.jit
def load_softmax(stats, rows, exists):
    """Largest logit and its share of rows."""
    return tl.load(stats + 2 * rows, mask=exists, other=0.0), tl.load(stats + 2 * rows + 1, mask=exists, other=0.0)


@triton.jit
def probability(logits, valid, high, share):
    """Probabilities of pairs, from logits that are computed as in the forward pass.

    The selection stands between product and difference, so that the compiler rounds the product as it did there.
    """
    logits = tl.where(valid, logits, float("-inf"))
    return tl.exp(tl.minimum(logits - high, 0.0, propagate_nan=tl.PropagateNan.ALL)) * share


@triton.jit
def keep_factor(seed, slot, rows, keys, dropout_p):
    """The factor of dropout for the weights of pairs (token of the row, token of the key); 1 without a seed.

    It follows from the pair's place alone (Philox), so the backward pass finds the same numbers without keeping them.
    """
    if seed is None:
        return 1.0
    else:
        zero = (rows + keys) * 0
        drawn, _, _, _ = tl.philox(tl.load(seed), zero + rows, zero + keys, zero + slot.to(tl.int32), zero)
        scale = 1.0 / tl.maximum(1.0 - dropout_p, 1e-30)
        return tl.where(tl.random.uint_to_uniform_float(drawn) >= dropout_p, scale, 0.0)


@triton.jit
def _write_kept_pairs(keep, seed, tokens, dropout_p, KEYS: tl.constexpr):
    """Row of keep (B, H, T, T)."""
    row, slot, _, _ = place(tokens, 1)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        kept = keep_factor(seed, slot, row, keys, dropout_p)
        tl.store(keep + (slot * tokens + row) * tokens + keys, kept, mask=keys < tokens)
