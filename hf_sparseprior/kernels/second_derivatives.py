"""Gradients of the compiled operators that have gradients themselves, for create_graph=True.

The backward passes of the kernels are compiled, and autograd cannot see into them. Where a graph of the gradients is
wanted (a gradient penalty, a Hessian), the backward pass of each operator takes the same attention written with PyTorch
operations, from here. That is right to any order, but (B, H, T, T) weights are in memory.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, K places of a list, S signed offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gradients(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor, **options: Any
) -> list[Tensor | None]:
    """Gradients of attend(*inputs, **options) by each input, in a graph; None for inputs that need none.

    Args:
        attend: what a kernel computes, in PyTorch's operations.
        inputs: its tensors that may need a gradient.
        grad: gradient of its output.
        options: its other arguments.
    """
    # Views, so that one tensor in two places, or made from another one, gets what belongs to each place alone.
    places = [None if x is None else x.view_as(x) for x in inputs]
    wanted = [x for x in places if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(attend(*places, **options), wanted, grad, create_graph=True, allow_unused=True))
    return [next(grads) if x is not None and x.requires_grad else None for x in places]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: Tensor | None, mask: Tensor | None,
    zero_fill: bool = False, keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T * factor) v. mask: pairs that exist. keep (B, H, T, T): what dropout multiplies with."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) * scale) @ k.to(wide).transpose(-1, -2)
    if factor is not None:
        logits = logits * factor
    if mask is not None:
        logits = logits.masked_fill(~mask, 0.0 if zero_fill else -math.inf)
    weights = torch.softmax(logits, -1)
    if keep is not None:
        weights = weights * keep
    return (weights @ v.to(wide)).to(q.dtype)


def decayed(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, alpha: Tensor, prefix_gamma: Tensor | None, *,
    positions: Tensor, scale: float, keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `decayed_attention` computes. log_gamma (C, H), positions (C, A, N)."""
    positions = positions.to(log_gamma.dtype)
    distances = (positions.unsqueeze(-1) - positions.unsqueeze(-2)).abs().sum(1)  # (C, N, N)
    factor = torch.exp(distances.unsqueeze(1) * log_gamma[:, :, None, None]).mean(0)
    prefix = q.shape[2] - positions.shape[-1]
    if prefix:
        gamma = torch.ones_like(alpha) if prefix_gamma is None else prefix_gamma
        factor = _with_prefix(factor, gamma, prefix)
    return _dense(q, k, v, scale, factor * alpha.view(-1, 1, 1), None, keep=keep)


def listed(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, prefix_factor: Tensor | None, *, keys: Tensor, scale: float
) -> Tensor:
    """What `listed_attention` computes. keys, factor (1 or B, H, N, K)."""
    total = q.shape[2]
    prefix = total - keys.shape[2]
    places = torch.where(keys < 0, total, keys).long()  # "no key" is a column after the last
    shape = (*keys.shape[:-1], total + 1)
    mask = torch.zeros(shape, dtype=torch.bool, device=q.device).scatter(-1, places, True)[..., :total]
    mask = F.pad(mask, (0, 0, prefix, 0), value=True)
    if factor is None and prefix_factor is None:
        return _dense(q, k, v, scale, None, mask)
    of_patches = torch.ones(keys.shape, device=q.device) if factor is None else factor
    batch = max(keys.shape[0], of_patches.shape[0])
    of_patches, places = (x.expand(batch, -1, -1, -1) for x in (of_patches, places))
    scattered = torch.zeros(batch, *shape[1:], device=q.device).scatter(-1, places, of_patches)[..., :total]
    of_prefix = torch.ones(q.shape[1], device=q.device) if prefix_factor is None else prefix_factor
    rows = of_prefix.view(1, -1, 1, 1).expand(batch, -1, prefix, total)
    return _dense(q, k, v, scale, torch.cat([rows, scattered], 2), mask)


def on_diagonals(
    q: Tensor, k: Tensor, v: Tensor, pair_weights: Tensor | None, prefix_weight: Tensor | None,
    self_weight: Tensor | None, *, offsets: Tensor, counts: Tensor, pair_begin: Tensor | None, prefix: int,
    scale: float, zero_fill: bool, keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `diagonal_attention` computes. offsets (S,), signed, head after head; counts (H,)."""
    heads, patches = q.shape[1], q.shape[2] - prefix
    number, row, key = offset_pairs(offsets, patches)
    head = torch.arange(heads, device=q.device).repeat_interleave(counts)[number]
    mask = torch.zeros(heads, patches, patches, dtype=torch.bool, device=q.device)
    mask[head, row, key] = True
    alone = torch.zeros(heads, patches, dtype=torch.bool, device=q.device) if prefix else ~mask.any(-1)
    factor = None
    if pair_weights is not None and pair_begin is not None and prefix_weight is not None and self_weight is not None:
        weights = pair_weights[pair_begin[number] + torch.minimum(row, key)]
        factor = pair_weights.new_zeros(mask.shape).index_put((head, row, key), weights)
        factor = _with_prefix(factor + torch.diag_embed(alone * self_weight.unsqueeze(-1)), prefix_weight, prefix)
    mask = F.pad(mask | torch.diag_embed(alone), (prefix, 0, prefix, 0), value=True)
    return _dense(q, k, v, scale, factor, mask, zero_fill, keep)


def offset_pairs(offsets: Tensor, patches: int) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs at signed offsets (S,): the number of the offset, the row, the key."""
    keys = torch.arange(patches, device=offsets.device) + offsets.unsqueeze(-1)
    number, row = ((keys >= 0) & (keys < patches)).nonzero(as_tuple=True)
    return number, row, keys[number, row]


def _with_prefix(factor: Tensor, of_prefix: Tensor, prefix: int) -> Tensor:
    """A factor of pairs of patches (H, N, N), with that of pairs with a prefix token (H,): (H, T, T)."""
    rows = torch.arange(factor.shape[-1] + prefix, device=factor.device) < prefix
    return torch.where(rows | rows.unsqueeze(-1), of_prefix.view(-1, 1, 1), F.pad(factor, (prefix, 0, prefix, 0)))
