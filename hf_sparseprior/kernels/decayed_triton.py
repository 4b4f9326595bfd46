"""Dense attention with a decay by Triton kernels, as PyTorch operators with fake kernels and gradients.

Y = softmax(alpha_h * scale * Q K^T * M) V, M_ij = mean over curves c of gamma_c^|position_c(i) - position_c(j)| (VIOLIN
Eqs. 12 and 13), computed as in flash attention 2: softmax runs over the blocks of keys one after the other, and the
backward pass computes probabilities again from the softmax of each row.

M depends on neither image nor input, and to make a number of it takes one exponential for each curve, more than
attention itself has. So it is made once a call for all images, in a table of float16 (float32 for float32), and blocks
are read from it. Without gradients of the decay the table stays, and the next call finds on the device whether its
scalars are still the same. Tables that stay, or wait for the backward pass, take `decay_memory()` bytes at most
together; beyond that M is made again, and where one layer's is larger, for some heads or rows at a time.

Products of blocks are computed in the dtype of q and summed in float32; products of float32 are exact, unless torch's
setting allows tf32. Sums over blocks are taken in the order of the blocks, so that two runs give the same bits.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C curves, A axes of a position.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sparseprior.kernels import decayed_triton_kernels as compiled
from hf_sparseprior.kernels.calling import is_eager, records
from hf_sparseprior.kernels.decay_memory import decay_memory
from hf_sparseprior.kernels.diagonal_cpu import like_projection
from hf_sparseprior.kernels.flop_formulas import register_decayed_triton
from hf_sparseprior.kernels.second_derivatives import decayed, gradients
from hf_sparseprior.kernels.triton_blocks import draw_seed, kept_pairs, outputs
from hf_sparseprior.kernels.triton_launch import cdiv, launch, next_power_of_2
from hf_sparseprior.kernels.triton_sizes import LARGEST_BLOCK, block_sizes

# Multiprocessors of an H100 or H200. The same number on all devices, because the order of sums depends on it.
MULTIPROCESSORS = 132
COMPARING = 48  # programs of a head that see whether its table is still right


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
    tables: Tables | None = None,
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
        tables: where a table stays that no gradient needs; None: it is made anew in each call. All calls with it have
            the same positions and prefix.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D). Gradients reach q, k, v, log_gamma, alpha and prefix_gamma.
    """
    seed = draw_seed(q, dropout_p)
    tensors = (q, k, v, positions, log_gamma, alpha, prefix_gamma, seed)
    options = (num_prefix_tokens, scale, dropout_p)
    if not is_eager(q):
        return torch.ops.hf_sparseprior.decayed_triton(*tensors, *options)[0]
    if records(q, k, v, log_gamma, alpha, prefix_gamma):
        return _Decayed.apply(*tensors, *options, tables)
    call = _call_of(*tensors, *options)
    return _run_forward(call, _Parts(call, _kept(call, tables)))[0]


# ---- tables ---------------------------------------------------------------------------------------------------------


class DecayTable:
    """M of all heads, (H, rows, width), which stays. made_of float32 (C + 1, H): what it is made of, on the device."""

    def __init__(self, table: Tensor, made_of: Tensor | None) -> None:
        self.table, self.made_of = table, made_of
        _in_use[table.device] = _in_use.get(table.device, 0) + table.nbytes
        weakref.finalize(self, _release, table.device, table.nbytes)


Tables = dict[tuple[torch.device, torch.dtype], DecayTable]
_in_use: dict[torch.device, int] = {}  # bytes of the tables that stay


def _release(device: torch.device, size: int) -> None:
    _in_use[device] -= size


def _fits(device: torch.device, size: int) -> bool:
    return _in_use.get(device, 0) + size <= decay_memory()


class _Decay(NamedTuple):
    """What M follows from."""

    positions: Tensor
    log_gamma: Tensor
    prefix_gamma: Tensor | None
    prefix: int

    @property
    def heads(self) -> int:
        return self.log_gamma.shape[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.positions.shape[-1]

    @property
    def side(self) -> int:
        """Rows of the whole table of a head, and its width."""
        return cdiv(self.tokens, LARGEST_BLOCK) * LARGEST_BLOCK


class _Part(NamedTuple):
    """Heads and rows whose M is in a table."""

    table: Tensor
    first_head: int
    heads: int
    first_row: int
    rows: int  # tokens, without those that fill up the last block


def _table_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype == torch.float32 else torch.float16


class _Parts:
    """The table of M, whole or in parts. All parts share one buffer, so asking for the next overwrites the last.

    It can be gone through several times; a table that is whole is made, or compared, once.
    """

    def __init__(self, call: _Call, kept: DecayTable | None = None) -> None:
        self.decay, self.dtype, self.kept = call.decay, _table_dtype(call.q), kept
        self.made_of = None if kept is None else kept.made_of
        self.whole: _Part | None = None

    def __iter__(self) -> Iterator[_Part]:
        decay = self.decay
        if self.whole is not None:
            yield self.whole
            return
        if self.kept is not None:
            self.whole = _Part(self.kept.table, 0, decay.heads, 0, decay.tokens)
            if self.made_of is not None:
                _fill(decay, self.whole, self.made_of)
            yield self.whole
            return
        side, limit = decay.side, decay_memory() // self.dtype.itemsize
        heads = max(1, min(decay.heads, limit // side**2))
        rows = max(LARGEST_BLOCK, min(side, limit // side // LARGEST_BLOCK * LARGEST_BLOCK))
        table = decay.log_gamma.new_empty((heads, rows, side), dtype=self.dtype)
        for first_head in range(0, decay.heads, heads):
            for first_row in range(0, decay.tokens, rows):
                some = min(heads, decay.heads - first_head), first_row, min(rows, decay.tokens - first_row)
                part = _Part(table, first_head, *some)
                _fill(decay, part, None)
                if (part.heads, part.rows) == (decay.heads, decay.tokens):
                    self.whole = part
                yield part


def _fill(decay: _Decay, part: _Part, made_of: Tensor | None) -> None:
    """Write the table, or see that it is what it would be made of."""
    curves, axes, patches = decay.positions.shape
    _, rows, side = part.table.shape
    block = 32 if part.table.dtype == torch.float32 else 64
    programs = (rows // block) * (side // block)
    if made_of is not None:  # most often they only compare
        programs = min(programs, COMPARING)
    given = (
        part.table, (rows, side), decay.positions, decay.log_gamma, decay.prefix_gamma, made_of, decay.heads,
        part.first_head, part.first_row, patches, programs,
    )  # fmt: skip
    launch(
        compiled._forward_table, part.heads * programs, given, CURVES=curves,
        CURVE_COLUMNS=next_power_of_2(curves), AXES=axes, PREFIX=decay.prefix, SIDE=block,
        SYMMETRIC=rows == side, num_warps=8,
    )  # fmt: skip


def _kept(call: _Call, tables: Tables | None) -> DecayTable | None:
    """The layer's table if there is one or may be one."""
    q, decay = call.q, call.decay
    if tables is None or not q.numel():
        return None
    key = (q.device, _table_dtype(q))
    if (found := tables.get(key)) is not None:
        return found
    size = decay.heads * decay.side**2 * key[1].itemsize
    # What is made while a CUDA graph is captured belongs to the graph.
    if not _fits(q.device, size) or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with torch.inference_mode(False):
        made_of = torch.full((decay.positions.shape[0] + 1, decay.heads), torch.nan, device=q.device)
        table = torch.empty(decay.heads, decay.side, decay.side, dtype=key[1], device=q.device)
    return tables.setdefault(key, DecayTable(table, made_of))


# ---- launches -------------------------------------------------------------------------------------------------------


def _precision() -> str:
    """Of products of float32, as torch's own setting for matrices has it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


class _Call(NamedTuple):
    """What all launches of a call take, forward or backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: _Decay
    alpha: Tensor
    seed: Tensor | None
    scale: float
    dropout_p: float

    def constants(self) -> dict[str, Any]:
        """Constants of the kernels that weigh pairs by scalars that were not finite."""
        curves, heads = self.decay.log_gamma.shape
        return {"CURVES": curves, "HEADS": next_power_of_2(heads), "PRECISION": _precision()}


def _call_of(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor | None,
    seed: Tensor | None, prefix: int, scale: float, dropout_p: float,
) -> _Call:  # fmt: skip
    """From the arguments of the operator."""
    prefix_gamma = None if prefix_gamma is None else prefix_gamma.contiguous()
    decay = _Decay(positions, log_gamma.contiguous(), prefix_gamma, prefix)
    return _Call(q, k, v, decay, alpha.contiguous(), seed, scale, dropout_p)


def _run_forward(call: _Call, parts: _Parts) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, D) and float32 (B, H, T, 2), see `store_softmax`."""
    q, k, v, decay = call[:4]
    out, stats = outputs(q)
    if not q.numel():
        return out, stats
    images, heads, tokens, _ = q.shape
    sizes = block_sizes("decayed_forward", q)
    strides = (q.stride(), k.stride(), v.stride(), out.stride())
    with torch.cuda.device_of(q):
        for part in parts:
            blocks = cdiv(part.rows, sizes["ROWS"])
            given = (
                q, k, v, out, stats, part.table, tuple(part.table.shape[1:]), decay.log_gamma, call.alpha,
                decay.prefix_gamma, parts.made_of, call.seed, *strides, images, heads, part.first_head, part.first_row,
                blocks, tokens, call.scale, call.dropout_p,
            )  # fmt: skip
            launch(compiled._forward_rows, part.heads * blocks * images, given, **call.constants(), **sizes)
    return out, stats


def _run_backward(
    call: _Call, parts: _Parts, grad: Tensor, out: Tensor, stats: Tensor, learns_decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and (C + 2, H) gradients of log_gamma, prefix_gamma and alpha, without columns if not learned."""
    q, decay = call.q, call.decay
    images, heads, tokens, _ = q.shape
    curves = decay.log_gamma.shape[0]
    dq, dk, dv = (like_projection(q) for _ in range(3))  # the kernels assume that they have the same strides
    if not q.numel():
        return dq, dk, dv, q.new_zeros(curves + 2, heads if learns_decay else 0, dtype=torch.float32)
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    keys = block_sizes("decayed_backward", q)
    row_sizes = {name: keys[name] for name in ("WIDTH", "COLUMNS")} | {"ROWS": 64}
    row_programs = images * heads * cdiv(tokens, row_sizes["ROWS"])
    dq_parts, d_decay = None, None
    with torch.cuda.device_of(q):
        if learns_decay:
            for part in parts:
                _launch_mean(call, part, grad, stats, delta)
        else:
            of_rows = (grad, out, delta, grad.stride(), out.stride(), heads, tokens)
            launch(compiled._backward_delta, row_programs, of_rows, **row_sizes)
        for part in parts:
            if dq_parts is None:
                blocks = cdiv(part.rows, keys["KEYS"])
                splits = _splits_of_keys(blocks, images * heads, decay_memory() // (4 * q.numel()))
                dq_parts = q.new_empty((splits, *q.shape), dtype=torch.float32)
            _launch_keys(call, part, parts.made_of, grad, stats, delta, dk, dv, dq_parts)
            if learns_decay:
                d_decay = _launch_decay(call, part, grad, stats, delta, d_decay)
        assert dq_parts is not None
        given = (dq_parts, dq, dq.stride(), images, heads, tokens, dq_parts.shape[0])
        launch(compiled._backward_queries, row_programs, given, **row_sizes)
    none = stats.new_empty(curves + 2, 0)
    return dq, dk, dv, none if d_decay is None else d_decay.sum((1, 2)).t().contiguous()


def _launch_mean(call: _Call, part: _Part, grad: Tensor, stats: Tensor, delta: Tensor) -> None:
    """delta by a pass of its own over the pairs, for gradients of a decay; see the kernel."""
    q, k, v = call[:3]
    images, heads, tokens, _ = q.shape
    sizes = block_sizes("decayed_gradients", q)
    blocks = cdiv(part.rows, sizes["ROWS"])
    given = (
        grad, q, k, v, stats, delta, part.table, tuple(part.table.shape[1:]), call.alpha, call.seed, grad.stride(),
        q.stride(), k.stride(), v.stride(), images, heads, part.first_head, part.first_row, blocks, tokens, call.scale,
        call.dropout_p,
    )  # fmt: skip
    launch(compiled._backward_mean, part.heads * blocks * images, given, PRECISION=_precision(), **sizes)


def _launch_keys(
    call: _Call, part: _Part, made_of: Tensor | None, grad: Tensor, stats: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor, dq_parts: Tensor,
) -> None:  # fmt: skip
    """dk, dv and the parts of dq of the part's rows, which are keys here: M is symmetric."""
    q, k, v, decay = call[:4]
    images, heads, tokens, _ = q.shape
    sizes, splits = block_sizes("decayed_backward", q), dq_parts.shape[0]
    given = (
        grad, q, k, v, stats, delta, dk, dv, dq_parts, part.table, tuple(part.table.shape[1:]), decay.log_gamma,
        call.alpha, decay.prefix_gamma, made_of, call.seed, grad.stride(), q.stride(), k.stride(), v.stride(),
        dk.stride(), images, heads, part.first_head, part.first_row, cdiv(part.rows, sizes["KEYS"]), tokens,
        call.scale, call.dropout_p, splits,
    )  # fmt: skip
    launch(compiled._backward_keys, part.heads * splits * images, given, **call.constants(), **sizes)


def _launch_decay(
    call: _Call, part: _Part, grad: Tensor, stats: Tensor, delta: Tensor, d_decay: Tensor | None
) -> Tensor:
    """Parts of the scalars' gradients, (H, blocks of rows, splits, C + 2), in which the part's are filled in."""
    q, k, v, decay = call[:4]
    images, heads, tokens, _ = q.shape
    curves, axes, patches = decay.positions.shape
    sizes = block_sizes("decayed_gradients", q)
    blocks = cdiv(part.rows, sizes["ROWS"])
    if d_decay is None:
        splits = _splits(cdiv(tokens, sizes["KEYS"]), part.heads * blocks, 4)
        d_decay = stats.new_empty(heads, cdiv(tokens, sizes["ROWS"]), splits, curves + 2)
    splits = d_decay.shape[2]
    given = (
        grad, q, k, v, stats, delta, d_decay, part.table, tuple(part.table.shape[1:]), decay.positions,
        decay.log_gamma, call.alpha, call.seed, grad.stride(), q.stride(), k.stride(), v.stride(), images, heads,
        part.first_head, part.first_row, blocks, patches, call.scale, call.dropout_p, splits,
    )  # fmt: skip
    launch(
        compiled._backward_decay, part.heads * blocks * splits, given, CURVES=curves,
        CURVE_COLUMNS=next_power_of_2(curves), AXES=axes, PREFIX=decay.prefix, PRECISION=_precision(), **sizes,
    )  # fmt: skip
    return d_decay


def _splits(blocks: int, programs: int, at_most: int) -> int:
    """Programs that share the blocks of one image and head, so that each multiprocessor has two if that is possible."""
    return max(1, min(blocks, 2 * MULTIPROCESSORS // programs, at_most))


def _splits_of_keys(blocks: int, programs: int, at_most: int) -> int:
    """As `_splits`, where a multiprocessor holds a single program: the number that makes the longest queue shortest."""
    few = cdiv(3 * MULTIPROCESSORS, programs)
    return min(
        range(1, max(1, min(blocks, few, at_most)) + 1),
        key=lambda splits: (cdiv(programs * splits, MULTIPROCESSORS) * cdiv(blocks, splits), splits),
    )


# ---- operators ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("hf_sparseprior::decayed_triton", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor | None,
    seed: Tensor | None, prefix: int, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, D) and float32 (B, H, T, 2), see `store_softmax`."""
    call = _call_of(q, k, v, positions, log_gamma, alpha, prefix_gamma, seed, prefix, scale, dropout_p)
    return _run_forward(call, _Parts(call))


@torch.library.custom_op("hf_sparseprior::decayed_triton_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, positions: Tensor, log_gamma: Tensor,
    alpha: Tensor, prefix_gamma: Tensor | None, seed: Tensor | None, prefix: int, scale: float, dropout_p: float,
    learns_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, and (C + 2, H) gradients of log_gamma, prefix_gamma and alpha, without columns if not learned."""
    call = _call_of(q, k, v, positions, log_gamma, alpha, prefix_gamma, seed, prefix, scale, dropout_p)
    return _run_backward(call, _Parts(call), grad, out, stats, learns_decay)


@_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return outputs(q)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    positions, learns_decay = rest[4], rest[-1]
    shape = (positions.shape[0] + 2, q.shape[1] if learns_decay else 0)
    return (*(like_projection(q) for _ in range(3)), q.new_empty(shape, dtype=torch.float32))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, prefix, scale, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options, ctx.kept = (prefix, scale, dropout_p), None
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None = None) -> tuple:
    if grad is None:
        return (None,) * 11
    q, k, v, positions, *scalars, seed, out, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        _, scale, dropout_p = ctx.options
        keep = kept_pairs(q, seed, dropout_p)
        grads = gradients(decayed, (q, k, v, *scalars), grad, positions=positions, scale=scale, keep=keep)
        return *grads[:3], None, *grads[3:], *(None,) * 4
    learns_decay = any(ctx.needs_input_grad[4:7])
    if not is_eager(grad):
        dq, dk, dv, d_decay = torch.ops.hf_sparseprior.decayed_triton_backward(
            grad, q, k, v, out, stats, positions, *scalars, seed, *ctx.options, learns_decay
        )
    else:
        log_gamma, alpha, prefix_gamma = scalars
        call = _call_of(q, k, v, positions, log_gamma, alpha, prefix_gamma, seed, *ctx.options)
        dq, dk, dv, d_decay = _run_backward(call, _Parts(call, ctx.kept), grad, out, stats, learns_decay)
    if not learns_decay:
        return dq, dk, dv, *(None,) * 8
    d_prefix = None if scalars[2] is None else d_decay[-2]
    return dq, dk, dv, None, d_decay[:-2], d_decay[-1], d_prefix, *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_setup_context)
register_decayed_triton()


class _Decayed(torch.autograd.Function):
    """The operator without its dispatcher, which takes longer than the kernels of a small call; it keeps tables."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        inputs, tables = given[:-1], given[-1]
        call = _call_of(*inputs)
        learns = any(ctx.needs_input_grad[4:7])
        kept = None if learns else _kept(call, tables)
        parts = _Parts(call, kept)
        out, stats = _run_forward(call, parts)
        _setup_context(ctx, inputs, (out, stats))
        if kept is None and any(ctx.needs_input_grad) and parts.whole is not None:
            # The backward pass finds it, if there is room.
            table = parts.whole.table
            kept = DecayTable(table, None) if _fits(table.device, table.nbytes) else None
        ctx.kept = kept
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        return *_differentiate(ctx, grad), None
