"""Attention along diagonals by the C++ kernel, as PyTorch operators with fake kernels and gradients.

Shapes as in diagonal_cpu.cpp: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, C_h columns of head h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.kernels import flop_formulas
from hf_sparseprior.kernels.build import load
from hf_sparseprior.kernels.calling import call, records
from hf_sparseprior.kernels.second_derivatives import gradients, offset_pairs, on_diagonals

ROWS = 16  # rows of a block; arrays over pairs are padded to whole blocks
DTYPES = (torch.float32, torch.bfloat16)
_waiting: list[Callable[[], None]] = []
_loaded: list[bool] = []


def can_run(q: Tensor) -> str | None:
    """None if the kernel can take these q, k, v, otherwise why not."""
    if q.device.type != "cpu":
        return f"the C++ kernel is for the CPU, not for {q.device.type}"
    if q.dtype not in DTYPES:
        return f"the C++ kernel is for float32 and bfloat16, not for {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] < 1:
        return f"head width {q.shape[-1]} must be 1 or more"
    return ready()


@torch._dynamo.assume_constant_result
def ready() -> str | None:
    """None if the operators are available, otherwise why not. Compiles them at the first use on a machine."""
    reason = load()
    if reason is None and not _loaded:
        _loaded.append(True)
        while _waiting:
            _waiting.pop(0)()
    return reason


def when_loaded(register: Callable[[], None]) -> None:
    """Call a function as soon as the operators are available, which `ready` makes them."""
    if _loaded:
        register()
    else:
        _waiting.append(register)


def diagonal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    counts: Tensor,
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
        q, k, v: (B, H, T, D) float32 or bfloat16, any strides, never copied as a whole.
        offsets: int32, signed, for each o also -o, head after head. counts: int32 (H,), how many each head has.
        num_prefix_tokens: P; they see everything and are seen by everything.
        scale: factor of the logits.
        zero_fill: pairs outside the support count exp(0) instead of nothing.
        pair_weights: float32, factors of the logits of pairs at an offset. Each pair of offsets +-o of a head has N - o
            values, ordered by the lower of both rows. pair_begin: int64, where the values of each of `offsets` begin.
        prefix_weight: float32 (H,), the factor for pairs with a prefix token. self_weight: float32 (H,), that for
            patches that only see themselves.
        dropout_p: dropout probability of the attention weights; not with zero_fill.

    Returns:
        (B, H, T, D), in memory as (B, T, H, D).
    """
    weights = (pair_weights, pair_begin, prefix_weight, self_weight)
    drop = None
    if dropout_p > 0.0:
        batch, heads, tokens, _ = q.shape
        size = _pairs(q, offsets, num_prefix_tokens) + batch * heads * num_prefix_tokens * tokens
        keep = torch.rand(size, device=q.device) >= dropout_p
        drop = keep.to(torch.float32) / max(1.0 - dropout_p, 1e-30)
    trains = records(q, k, v, pair_weights, prefix_weight, self_weight)
    arguments = (q, k, v, offsets, counts, num_prefix_tokens, scale, zero_fill, *weights, drop)
    if trains:
        return torch.ops.hf_sparseprior.diagonal_forward(*arguments, True)[0]
    return call(torch.ops.hf_sparseprior.diagonal_output, False, *arguments)


def register() -> None:
    """Register shapes for tracing, and gradients."""
    torch.library.register_fake("hf_sparseprior::diagonal_forward", _fake_forward)
    torch.library.register_fake("hf_sparseprior::diagonal_output", lambda q, *rest: like_projection(q))
    torch.library.register_fake("hf_sparseprior::diagonal_backward", _fake_backward)
    torch.library.register_autograd("hf_sparseprior::diagonal_forward", _backward, setup_context=_setup_context)
    flop_formulas.register_cpu()  # of all operators: they are loaded together


def like_projection(q: Tensor) -> Tensor:
    """An empty (B, H, T, D), in memory as (B, T, H, D)."""
    batch, heads, tokens, width = q.shape
    return q.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


def _pairs(q: Tensor, offsets: Tensor, prefix: int) -> int:
    """Length of an array over pairs. Without prefix tokens a head has a column for patches that see only themselves."""
    batch, heads, tokens, _ = q.shape
    return batch * (offsets.shape[0] + heads * max(prefix, 1)) * _padded(tokens - prefix)


def _kept_pairs(drop: Tensor, q: Tensor, offsets: Tensor, counts: Tensor, prefix: int) -> Tensor:
    """The factors of dropout as (B, H, T, T), from the order in which the kernel has them, see `Problem::at` there."""
    batch, heads, tokens, _ = q.shape
    patches = tokens - prefix
    keep = drop.new_ones(batch, heads, tokens, tokens)
    begin = first = 0
    for head, count in enumerate(counts.tolist()):
        columns = count + max(prefix, 1)
        size = batch * columns * _padded(patches)
        factors = drop[begin : begin + size].view(batch, columns, -1)[..., :patches]
        keep[:, head, prefix:, :prefix] = factors[:, :prefix].mT
        number, row, key = offset_pairs(offsets[first : first + count], patches)
        if not prefix:  # patches that see none else
            keep[:, head].diagonal(0, -2, -1).copy_(factors[:, -1])
        keep[:, head, prefix + row, prefix + key] = factors[:, prefix + number, row]
        begin, first = begin + size, first + count
    keep[:, :, :prefix] = drop[begin:].view(batch, heads, prefix, tokens)
    return keep


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, prefix: int, scale: float, zero_fill: bool,
    pair_weights: Tensor | None, pair_begin: Tensor | None, prefix_weight: Tensor | None, self_weight: Tensor | None,
    drop: Tensor | None, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, heads, tokens, _ = q.shape
    pairs = _pairs(q, offsets, prefix)

    def floats(*size: int) -> Tensor:
        return q.new_empty(size, dtype=torch.float32)

    return (
        like_projection(q),
        floats(pairs if keep else 0),
        floats(pairs if keep and pair_weights is not None else 0),
        floats(batch * heads * _padded(tokens - prefix) if keep and zero_fill else 0),
        floats(batch if keep else 0, heads, prefix, tokens),
    )


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    pair_weights = rest[6]
    sizes = (0, 0, 0) if pair_weights is None else (pair_weights.shape[0], q.shape[1], q.shape[1])
    return (*(like_projection(q) for _ in range(3)), *(q.new_empty(size, dtype=torch.float32) for size in sizes))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, offsets, counts, prefix, scale, zero_fill, *weights, drop, keep = inputs
    ctx.save_for_backward(q, k, v, offsets, counts, *weights, drop, *output)
    ctx.options = (prefix, scale, zero_fill)
    ctx.kept = keep
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *others: Any) -> tuple:
    if grad is None:
        return (None,) * 14
    if not ctx.kept:
        raise RuntimeError("the forward pass of diagonal attention kept nothing to differentiate with")
    q, k, v, offsets, counts, pair_weights, pair_begin, prefix_weight, self_weight, drop, out, *kept = ctx.saved_tensors
    prefix, scale, zero_fill = ctx.options
    if torch.is_grad_enabled():  # create_graph=True
        tables = {"offsets": offsets, "counts": counts, "pair_begin": pair_begin, "prefix": prefix, "scale": scale}
        keep = None if drop is None else _kept_pairs(drop, q, offsets, counts, prefix)
        inputs = (q, k, v, pair_weights, prefix_weight, self_weight)
        grads = gradients(on_diagonals, inputs, grad, **tables, zero_fill=zero_fill, keep=keep)
        return *grads[:3], *(None,) * 5, grads[3], None, *grads[4:], None, None
    dq, dk, dv, d_pairs, d_prefix, d_self = torch.ops.hf_sparseprior.diagonal_backward(
        grad, q, k, v, out, offsets, counts, prefix, scale, zero_fill, pair_weights, pair_begin, prefix_weight,
        self_weight, drop, *kept,
    )  # fmt: skip
    if pair_weights is None:
        d_pairs = d_prefix = d_self = None
    return dq, dk, dv, None, None, None, None, None, d_pairs, None, d_prefix, d_self, None, None


when_loaded(register)
