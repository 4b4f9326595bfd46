"""Attention over a support, with a decay, and the choice of how to run it.

`reference` is the specification: dense tensors, a few lines, any dtype. Every other backend agrees with it, forward and
backward. A backend is a pair of functions, `can_run` (None, or the reason why not) and `run`.

Shape letters: B batch, H heads, D head width, N patch tokens, P prefix tokens, T = P + N, C curves, A axes,
K offsets of a head counted with both signs.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import check_integer, check_keys, split_spec
from .decay import (
    DECAYS,
    SETTING_CHECKS,
    decay_mask,
    decay_weights,
    offset_distances,
    prefix_weights,
    resized_order,
)
from .relative_offsets import relative_table
from .supports import (
    Pairs,
    key_lists,
    layer_offsets,
    layer_pairs,
    mask_from_offsets,
    pruning_ratio,
    resolve_support,
    self_rows,
)

try:  # a saved model runs without the package, and then without compiled kernels
    from hf_sparseprior.kernels import decayed_cpu, diagonal_cpu, listed_cpu, predicted_cpu, triton_device
except ImportError:
    decayed_cpu = diagonal_cpu = listed_cpu = predicted_cpu = triton_device = None  # type: ignore[assignment]

logger = logging.getLogger("hf_sparseprior.ops")


class AttentionPlan:
    """Everything about one layer's attention that follows from its settings and the grid, not from the data.

    Built once per (layer, grid) and kept by the layer; the tables it makes for a device are kept in it.

    Args:
        num_heads: H.
        grid: (height, width) of the patch tokens.
        num_prefix_tokens: P, tokens in front of the patches.
        support: resolved support.
        decay: resolved settings of the decay, no tensors, or None.
        layer: layer number from 0.
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        support: dict[str, Any],
        decay: dict[str, Any] | None,
        layer: int,
    ) -> None:
        self.num_heads = num_heads
        self.grid = grid
        self.num_tokens = grid[0] * grid[1]
        self.num_prefix_tokens = num_prefix_tokens
        self.total = num_prefix_tokens + self.num_tokens
        self.support = support
        self.mask_fill = support["mask_fill"]
        self.decay = decay
        self.layer = layer
        # None stands for the dense support: no mask, no offsets.
        self.offsets: list[list[int]] | None = None
        self.pairs: Pairs = None  # off the diagonals
        self.density = 1.0
        if support["name"] != "dense":
            sizes = {"num_heads": num_heads, "num_tokens": self.num_tokens, "layer": layer}
            self.offsets, self.pairs = layer_offsets(support, **sizes), layer_pairs(support, **sizes)
            self.density = 1.0 - pruning_ratio(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs) / 100.0
        self.tables: dict[tuple[str, torch.device], Tensor] = {}
        # The arguments as text: `from_key` makes the same plan again.
        self.key = json.dumps([num_heads, grid, num_prefix_tokens, support, decay, layer], sort_keys=True)

    @classmethod
    def from_key(cls, key: str) -> AttentionPlan:
        """The plan whose `key` this is."""
        num_heads, grid, *rest = json.loads(key)
        return cls(num_heads, tuple(grid), *rest)

    def build_table(self, name: str) -> np.ndarray:
        """A table as an array.

        "mask": bool (H, T, T), True = attended. "keys": int32 (H, N, K), see `key_lists`. "attended": bool (H, N), at
        which distances, of a support without other pairs. "positions" of the decay:
        int64 (C, A, N); "positions_int32" and "positions_float32". "relative_...": see `relative_table`. For the
        compiled kernels: "signed_offsets", int32, head after head, "offset_counts", int32 (H,), and "offset_begin",
        int32 (H + 1,), where those of each head begin; with a decay "pair_distances", float32 (C, pairs), the N - o
        pairs (j, j + o) of each offset, "pair_counts", int64 (H,), how many each head has, and "pair_begin", int64,
        where those of each signed offset begin.
        """
        if name.startswith("relative_"):
            return relative_table(name, self.grid, self.num_prefix_tokens)
        if name == "positions":
            assert self.decay is not None
            return DECAYS[self.decay["name"]].positions(self.decay, self.grid)
        if name in ("positions_int32", "positions_float32"):
            return self.build_table("positions").astype(name.removeprefix("positions_"))
        assert self.offsets is not None
        if name == "mask":
            return mask_from_offsets(self.offsets, self.num_tokens, self.num_prefix_tokens, self.pairs)
        if name == "keys":
            return key_lists(self.offsets, self.num_tokens, self.num_prefix_tokens, self.pairs)
        if name == "attended":
            return np.array([np.isin(np.arange(self.num_tokens), own) for own in self.offsets])
        if name == "pair_distances":
            positions = self.build_table("positions")
            blocks = [
                np.abs(positions[..., offset:] - positions[..., : self.num_tokens - offset]).sum(1)
                for own in self.offsets
                for offset in own
            ]
            empty = np.zeros((positions.shape[0], 0))
            return np.concatenate([empty, *blocks], axis=1).astype(np.float32)
        signed = [[(offset, -offset) if offset else (0,) for offset in own] for own in self.offsets]
        if name == "signed_offsets":
            return np.array([value for own in signed for pair in own for value in pair], dtype=np.int32)
        if name == "offset_counts":
            return np.array([sum(map(len, own)) for own in signed], dtype=np.int32)
        if name == "offset_begin":
            return np.cumsum([0, *(sum(map(len, own)) for own in signed)]).astype(np.int32)
        lengths = [[self.num_tokens - offset for offset in own] for own in self.offsets]
        if name == "pair_counts":
            return np.array([sum(own) for own in lengths], dtype=np.int64)
        assert name == "pair_begin"
        begins = np.cumsum([0, *(length for own in lengths for length in own)])[:-1]
        return np.repeat(begins, [len(pair) for own in signed for pair in own]).astype(np.int64)


def plan_table(plan: AttentionPlan, name: str, device: torch.device) -> Tensor:
    """A table of a plan on a device, made once for each.

    A function, not a method: dynamo cannot guard methods of an object that a constant function returned.
    """
    if torch.compiler.is_compiling():
        return _table_in_graph(plan.key, name, str(device))
    if (table := plan.tables.get((name, device))) is not None:
        return table
    # A table made under inference_mode could not be used in a later training step.
    with torch.inference_mode(False):
        table = torch.tensor(plan.build_table(name)).to(device)
    if type(table) is Tensor:  # a table made while tracing with fake tensors must not outlive the trace
        plan.tables[(name, device)] = table
    return table


# Tables come from numpy and Python integers. A compiled graph or an exported program does not trace how they are made
# but calls this function while it is built and keeps the result as a constant.
@torch.compiler.allow_in_graph
def _table_in_graph(key: str, name: str, device: str) -> Tensor:
    return torch.tensor(AttentionPlan.from_key(key).build_table(name)).to(device)


class Call(NamedTuple):
    """One call of attention, as backends see it. q, k, v: (B, H, T, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    decay: dict[str, Any] | None
    scale: float
    dropout_p: float
    need_weights: bool
    bias: Tensor | None  # added to the logits last, broadcastable to (B, H, T, T)
    token_ids: Tensor | None  # (B, N): which of the grid's patches the tokens are, -1 none; None: all, in raster order
    keys: Tensor | None  # (B, H, N, K): the tokens that each image's patches see, -1 behind the last; None: all
    top_k: int | None  # a query keeps as many keys, those of its largest logits; None: all
    kept: Tensor | None  # (B, T): 1 for keys that are there, 0 for dropped ones, with a gradient for both; None: all
    mask: Tensor | None  # this and the next: filled in by the caller for backends that need it
    positions: Tensor | None
    unnormalised: bool | None = None  # the softmax runs over all keys, of whose weights those of `keys` are taken

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32 for half precision, else the dtype of q: logits, decay and softmax are never in half precision."""
        return torch.promote_types(self.q.dtype, torch.float32)


@dataclass(frozen=True)
class Backend:
    """A way to run attention."""

    can_run: Callable[[Call], str | None]
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    needs_mask: bool
    needs_positions: bool = False  # of a decay, as int64; the kernels have tables of their own


# ---- reference ------------------------------------------------------------------------------------------------------


def _reference_can_run(call: Call) -> str | None:
    return None


def _reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """Dense attention with the mask and the decay written out (Fibottention Eq. 1, VIOLIN Eq. 12)."""
    dtype = call.compute_dtype
    logits = (call.q.to(dtype) * call.scale) @ call.k.to(dtype).transpose(-1, -2)
    decay_HTT = None
    if call.decay is not None:
        decay_HTT = _dense_decay(call, dtype)
        logits = _decayed_logits(call.decay, decay_HTT, logits)
    if call.mask is not None and not call.unnormalised:
        logits = logits.masked_fill(~call.mask, -math.inf if call.plan.mask_fill == "neg_inf" else 0.0)
    if call.bias is not None:
        logits = logits + call.bias
    there = None if call.kept is None else _kept_pairs(call.kept)
    mask = call.mask
    if call.top_k is not None and call.top_k < logits.shape[-1]:
        candidates = logits if there is None else logits.masked_fill(there == 0, -math.inf)
        chosen = largest(candidates, call.top_k)
        logits = logits.masked_fill(~chosen, -math.inf)
        mask = chosen if mask is None else mask & chosen
    weights = torch.softmax(logits, -1) if there is None else _kept_softmax(logits, there)
    if call.mask is not None and call.unnormalised:
        weights = weights * call.mask
    if call.decay is not None and decay_HTT is not None:
        if there is not None:
            mask = there > 0 if mask is None else mask & (there > 0)
        weights = _decayed_weights(call.decay, decay_HTT, weights, mask)
    weights = F.dropout(weights, call.dropout_p)
    out = weights @ call.v.to(dtype)
    return out.to(call.q.dtype), weights.to(call.q.dtype) if call.need_weights else None


def largest(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest of the last dimension; of equal ones those in front."""
    chosen = largest_indices(values.detach(), count, in_order=False)
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, chosen, True)


def largest_indices(values: Tensor, count: int, in_order: bool = True) -> Tensor:
    """Indices of the `count` largest of the last dimension, of equal ones those in front.

    `in_order`: from the largest on; otherwise in any order, which takes two thirds of the time.
    """
    if values.dtype == torch.float64:
        return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]
    # topk is faster than a stable sort, but takes any of equal values: integers in the order of the floats, followed by
    # the place, are never equal. Adding 0 makes -0 equal to 0.
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return torch.topk(ordered | places, count, dim=-1, sorted=in_order).indices


def predicted_keys(
    coefficients: Tensor, basis: Tensor, num_prefix_tokens: int, budget: int, threshold: float
) -> Tensor:
    """Tokens with the largest scores of each patch: the `budget` largest of c W, of the c above `threshold`.

    By the C++ kernel where it runs, which never forms all pairs. Of equal scores those in front are taken; scores that
    are equal but for their rounding may go either way, so the two ways can differ there.

    Args:
        coefficients: (B, H, n, R), A_down of Sparsifiner.
        basis: W_up, (R, N), or (B, 1, R, n) where each image has its own patches.
        num_prefix_tokens: P.
        budget: 1 to n.
        threshold: tau.

    Returns:
        Integers (B, H, n, P + budget): the prefix tokens, then patches of scores that are not 0, then -1. A patch that
        is left without any key, which needs P = 0, sees itself.
    """
    if basis.dim() == 2 and not _kernel_refuses_scores(coefficients, basis):
        return predicted_cpu.predicted_keys(coefficients, basis, num_prefix_tokens, budget, threshold)
    scores = torch.where(coefficients > threshold, coefficients, 0.0) @ basis
    return keys_of_scores(scores, num_prefix_tokens, budget)


def _kernel_refuses_scores(coefficients: Tensor, basis: Tensor) -> bool:
    if _package_is_there() or not coefficients.dtype == basis.dtype == torch.float32:
        return True
    return diagonal_cpu.can_run(coefficients) is not None


def keys_of_scores(scores: Tensor, num_prefix_tokens: int, budget: int) -> Tensor:
    """As `predicted_keys`, of scores (B, H, n, n)."""
    scores = scores.masked_fill(scores == 0, -math.inf)
    chosen = largest_indices(scores, budget)  # in order, because what is -1 must stand behind the rest
    chosen = torch.where(torch.isneginf(scores.gather(-1, chosen)), -1, chosen + num_prefix_tokens)
    if not num_prefix_tokens:
        own = torch.arange(scores.shape[-1], device=scores.device).unsqueeze(-1)
        return torch.where((chosen < 0).all(-1, keepdim=True), own, chosen)
    always = torch.arange(num_prefix_tokens, device=scores.device).expand(*chosen.shape[:-1], -1)
    return torch.cat([always, chosen], -1)


def _kept_pairs(kept: Tensor) -> Tensor:
    """G (B, 1, T, T) of kept (B, T): 1 where a query sees a key, itself always."""
    eye = torch.eye(kept.shape[1], dtype=kept.dtype, device=kept.device)
    return (kept.unsqueeze(1) + (1.0 - kept.unsqueeze(1)) * eye).unsqueeze(1)


def _kept_softmax(logits: Tensor, there: Tensor) -> Tensor:
    """exp(logit) G over its sum, so that a dropped key has a gradient too (attention masking, Rao et al. 2021).

    The published code adds 1e-6 to every sum; here sums are kept above it, so nothing changes where nothing is dropped.
    """
    weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True)) * there.to(logits.dtype)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)


def _placement(decay: dict[str, Any] | None) -> str:
    return "multiply" if decay is None else decay.get("placement", "multiply")


def _decayed_logits(decay: dict[str, Any], decay_HTT: Tensor, logits: Tensor) -> Tensor:
    """The logits with alpha, and with M where it acts before the softmax (`decay.PLACEMENTS`)."""
    placement, alpha_H = _placement(decay), decay.get("alpha")
    alpha = None if alpha_H is None else alpha_H.to(logits.dtype).view(-1, 1, 1)
    if placement in ("multiply", "residual"):
        factor = decay_HTT if placement == "multiply" else 1.0 + decay_HTT
        return logits * (factor if alpha is None else factor * alpha)
    logits = logits if alpha is None else logits * alpha
    return logits + (decay_HTT - 1.0) if placement == "add" else logits


def _decayed_weights(decay: dict[str, Any], decay_HTT: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax's weights with M where it acts behind it; pairs outside the support are none of its business."""
    placement = _placement(decay)
    if placement == "multiply_after":
        return weights * (decay_HTT if mask is None else decay_HTT.masked_fill(~mask, 1.0))
    if placement in ("add_after", "add_after_as_printed"):
        added = decay_HTT - 1.0 if placement == "add_after" else decay_HTT
        return weights + (added if mask is None else added.masked_fill(~mask, 0.0))
    return weights


def _dense_decay(call: Call, dtype: torch.dtype) -> Tensor:
    """M with the prefix rows and columns, (H, T, T); (B, H, T, T) where each image has its own patches."""
    assert call.decay is not None and call.positions is not None
    weights = decay_mask(call.decay, call.positions, dtype)
    gamma_H = prefix_weights(call.decay, dtype)
    if call.token_ids is not None:
        outside = torch.ones((), dtype=dtype, device=weights.device) if gamma_H is None else gamma_H.view(-1, 1, 1)
        weights = torch.where(_off_grid_pairs(call.token_ids).unsqueeze(1), outside, weights.transpose(0, 1))
    if prefix := call.plan.num_prefix_tokens:
        if gamma_H is None:
            weights = F.pad(weights, (prefix, 0, prefix, 0), value=1.0)
        else:
            *leading, tokens, _ = weights.shape
            columns = gamma_H.view(-1, 1, 1).expand(*leading, tokens, prefix)
            rows = gamma_H.view(-1, 1, 1).expand(*leading, prefix, prefix + tokens)
            weights = torch.cat([rows, torch.cat([columns, weights], -1)], -2)
    return weights


def _off_grid_pairs(token_ids: Tensor) -> Tensor:
    """Mask (B, n, n) of the pairs with a token that lies nowhere in the grid."""
    nowhere = token_ids < 0
    return nowhere.unsqueeze(-1) | nowhere.unsqueeze(-2)


def leading_weights(call: Call, rows: int) -> Tensor:
    """Attention weights (B, H, rows, T) of prefix tokens, before dropout, float32 at least; no (T, T) is formed."""
    dtype = call.compute_dtype
    logits = (call.q[:, :, :rows].to(dtype) * call.scale) @ call.k.to(dtype).transpose(-1, -2)
    decay_H11 = None
    if call.decay is not None:
        gamma_H = prefix_weights(call.decay, dtype)
        decay_H11 = torch.ones_like(logits[:1, :, :1, :1]) if gamma_H is None else gamma_H.view(1, -1, 1, 1)
        logits = _decayed_logits(call.decay, decay_H11, logits)
    chosen = None
    if call.top_k is not None and call.top_k < logits.shape[-1]:
        chosen = largest(logits, call.top_k)
        logits = logits.masked_fill(~chosen, -math.inf)
    weights = torch.softmax(logits, -1)
    if call.decay is not None and decay_H11 is not None:
        weights = _decayed_weights(call.decay, decay_H11, weights, chosen)
    return weights


# ---- sdpa -----------------------------------------------------------------------------------------------------------


def _sdpa_can_run(call: Call) -> str | None:
    if call.decay is not None:
        return "a decay multiplies the logits, which scaled_dot_product_attention cannot do"
    if call.plan.offsets is not None and call.plan.mask_fill == "zero":
        return "mask_fill='zero' keeps exp(0) for masked pairs, which scaled_dot_product_attention cannot do"
    if call.need_weights:
        return "scaled_dot_product_attention does not return attention weights"
    if call.top_k is not None:
        return "only the largest logits are kept, which scaled_dot_product_attention does not return"
    if call.kept is not None:
        return "dropped keys have a gradient, which scaled_dot_product_attention does not compute"
    if call.unnormalised:
        return "the softmax runs over all keys before some are dropped, which scaled_dot_product_attention cannot do"
    return None


def _sdpa(call: Call) -> tuple[Tensor, Tensor | None]:
    """torch's own dense attention, with a boolean mask where there is a support."""
    # Four dimensions: with a mask of three, torch leaves its fused CPU kernel for one two to five times slower.
    mask = call.mask if call.mask is None or call.mask.dim() == 4 else call.mask.unsqueeze(0)
    if call.bias is not None:
        bias = call.bias.to(call.q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    out = F.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=mask, dropout_p=call.dropout_p, scale=call.scale
    )
    return out, None


# ---- diagonal -------------------------------------------------------------------------------------------------------


def _needs_dense(call: Call) -> str | None:
    """Why only a dense path knows the logits that are asked for."""
    if (placement := _placement(call.decay)) != "multiply":
        return f"placement={placement!r} of the decay is for the reference alone"
    if call.bias is not None:
        return "a bias is added to the logits of all pairs"
    if call.top_k is not None:
        return "only the largest logits are kept, so all are needed"
    if call.kept is not None:
        return "dropped keys have a gradient, so the logits of all pairs are needed"
    if call.unnormalised:
        return "renormalise=False: the softmax runs over all keys before some are dropped"
    return None


def _needs_lists(call: Call) -> str | None:
    """Why the pairs do not lie on the same diagonals in every image."""
    if call.token_ids is not None:
        return "only some patches of the grid are there, others in each image"
    if call.keys is not None:
        return "a predictor chose the keys of each image"
    if call.plan.pairs is not None:
        return f"support {call.plan.support['name']!r} has pairs off its diagonals"
    return None


def _diagonal_can_run(call: Call) -> str | None:
    if call.plan.offsets is None:
        return "the support is dense, it has no offsets"
    return _needs_dense(call) or _needs_lists(call) or _sparse_dropout_can_run(call)


def _sparse_dropout_can_run(call: Call) -> str | None:
    """What the paths along diagonals cannot do."""
    if call.dropout_p > 0 and call.plan.mask_fill == "zero":
        return "dropout with mask_fill='zero' would have to drop pairs that are never formed"
    return None


def _diagonal(call: Call) -> tuple[Tensor, Tensor | None]:
    """Attention along diagonals with PyTorch operations only; nothing grows with N x N.

    For each head and signed offset o, rows j meet keys j + o as two contiguous slices. Logits of a head are gathered
    as columns [prefix | offsets], one softmax runs over them. Prefix rows see everything and are P rows of dense
    attention.
    """
    plan, dtype = call.plan, call.compute_dtype
    assert plan.offsets is not None
    prefix = plan.num_prefix_tokens
    q, k, v = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype)
    alpha_H = call.decay.get("alpha") if call.decay is not None else None
    if alpha_H is not None:
        q = q * alpha_H.to(dtype).view(-1, 1, 1)
    gamma_H = prefix_weights(call.decay, dtype) if call.decay is not None else None
    heads, dense_weights = [], []
    # Unbinding first keeps the backward of a slice as large as one head, not as all of them.
    for head, (q_BTD, k_BTD, v_BTD) in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
        gamma = None if gamma_H is None else gamma_H[head]
        out, weights = _diagonal_head(call, plan.offsets[head], head, q_BTD, k_BTD, v_BTD, gamma)
        heads.append(out)
        if weights is not None:
            dense_weights.append(weights)
    if prefix:
        logits = q[:, :, :prefix] @ k.transpose(-1, -2)
        if gamma_H is not None:
            logits = logits * gamma_H.view(-1, 1, 1)
        prefix_probs = F.dropout(torch.softmax(logits, -1), call.dropout_p)
        out = torch.cat([prefix_probs @ v, torch.stack(heads, 1)], 2)
    else:
        out = torch.stack(heads, 1)
    if not call.need_weights:
        return out.to(call.q.dtype), None
    stacked = torch.stack(dense_weights, 1)
    full = torch.cat([prefix_probs, stacked], 2) if prefix else stacked
    return out.to(call.q.dtype), full.to(call.q.dtype)


def _diagonal_head(
    call: Call, offsets: Sequence[int], head: int, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The patch rows of one head: q scaled, k, v (B, T, D) -> out (B, N, D), weights (B, N, T) if they are wanted."""
    plan = call.plan
    prefix, tokens = plan.num_prefix_tokens, plan.num_tokens
    q, k_prefix, v_prefix, k, v = q[:, prefix:], k[:, :prefix], v[:, :prefix], k[:, prefix:], v[:, prefix:]

    columns: list[tuple[int, int, int]] = []  # (first row, row behind the last, signed offset)
    logits: list[Tensor] = []
    for offset in offsets:
        count = tokens - offset
        decay = _offset_weights(call, offset, head, q.dtype)
        for signed in (offset, -offset) if offset else (0,):
            first = max(0, -signed)
            column = (q[:, first : first + count] * k[:, first + signed : first + signed + count]).sum(-1)
            if decay is not None:
                column = column * decay
            logits.append(F.pad(column, (first, tokens - first - count), value=-math.inf))
            columns.append((first, first + count, signed))
    if rows := self_rows(offsets, tokens, prefix):
        column = (q[:, rows.start : rows.stop] * k[:, rows.start : rows.stop]).sum(-1)
        # No decay: a patch is at distance 0 from itself, where M is 1.
        logits.append(F.pad(column, (rows.start, tokens - rows.stop), value=-math.inf))
        columns.append((rows.start, rows.stop, 0))

    parts = [torch.stack(logits, -1)] if logits else []
    if prefix:
        prefix_logits = q @ k_prefix.transpose(-1, -2)
        parts.insert(0, prefix_logits if gamma is None else prefix_logits * gamma)
    scores = torch.cat(parts, -1)  # (B, N, P + K)
    if plan.mask_fill == "zero":
        # softmax over T logits of which those outside the support are 0. A key in the support gets exp(s), every key
        # outside gets exp(0): the sum of all v takes the floor, the support the rest.
        inside = ~torch.isneginf(scores)
        outside = plan.total - inside.sum(-1, keepdim=True)
        highest = scores.detach().amax(-1, keepdim=True)
        highest = torch.where(outside > 0, highest.clamp_min(0.0), highest)
        floor = torch.where(outside > 0, torch.exp(-highest), 0.0)
        probs = torch.exp(scores - highest)
        total = probs.sum(-1, keepdim=True) + outside * floor
        floor = floor / total
        probs = probs / total - floor * inside
        out = floor * (v_prefix.sum(1, keepdim=True) + v.sum(1, keepdim=True))
    else:
        probs = F.dropout(torch.softmax(scores, -1), call.dropout_p)
        floor = None
        out = torch.zeros_like(q)
    if prefix:
        out = out + probs[..., :prefix] @ v_prefix
    for (first, last, signed), p_BN in zip(columns, probs[..., prefix:].unbind(-1), strict=True):
        part = p_BN[:, first:last, None] * v[:, first + signed : last + signed]
        out = out + F.pad(part, (0, 0, first, tokens - last))
    if not call.need_weights:
        return out, None
    return out, _scatter_weights(probs, floor, columns, prefix, tokens)


def _offset_weights(call: Call, offset: int, head: int, dtype: torch.dtype) -> Tensor | None:
    """M at the pairs (j, j + offset) of one head, (N - offset,)."""
    if call.decay is None:
        return None
    assert call.positions is not None
    distances = offset_distances(call.positions, offset)
    return decay_weights(call.decay["beta"][:, head : head + 1], distances, dtype)[0]


def _scatter_weights(
    probs: Tensor, floor: Tensor | None, columns: Sequence[tuple[int, int, int]], prefix: int, tokens: int
) -> Tensor:
    """Attention weights (B, N, T) of patch rows, only made when a caller asks to see them."""
    dense = probs.new_zeros(*probs.shape[:2], prefix + tokens)
    dense[..., :prefix] = probs[..., :prefix]
    patches = dense[..., prefix:]
    for (first, last, signed), p_BN in zip(columns, probs[..., prefix:].unbind(-1), strict=True):
        diagonal = patches.diagonal(signed, -2, -1)
        diagonal[..., first - max(0, -signed) : last - max(0, -signed)] = p_BN[:, first:last]
    return dense if floor is None else dense + floor


# ---- gather ---------------------------------------------------------------------------------------------------------


def _gather_can_run(call: Call) -> str | None:
    if call.plan.offsets is None and call.keys is None:
        return "every patch sees every token"
    if call.plan.mask_fill == "zero" and call.plan.offsets is not None:
        return "mask_fill='zero' keeps exp(0) for masked pairs, which are not gathered"
    if call.dropout_p > 0:
        return "the gathered path has no dropout"
    if call.need_weights:
        return "the gathered path does not return attention weights"
    if call.token_ids is not None and call.keys is None:
        return "only some patches of the grid are there, others in each image"
    return _needs_dense(call)


def _gather(call: Call) -> tuple[Tensor, Tensor | None]:
    """Every patch gathers the keys and values that it sees; nothing grows with N x N. Prefix rows are dense."""
    plan, dtype = call.plan, call.compute_dtype
    prefix = plan.num_prefix_tokens
    q, k, v = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype)
    keys = _key_lists(call)
    factor = None
    if call.decay is not None:
        if (alpha_H := call.decay.get("alpha")) is not None:
            q = q * alpha_H.to(dtype).view(-1, 1, 1)
        factor = _gathered_decay(call, keys, dtype)
    out = GatheredAttention.apply(q[:, :, prefix:], k, v, keys, factor)
    if prefix:
        logits = q[:, :, :prefix] @ k.transpose(-1, -2)
        if call.decay is not None and (gamma_H := prefix_weights(call.decay, dtype)) is not None:
            logits = logits * gamma_H.view(-1, 1, 1)
        out = torch.cat([torch.softmax(logits, -1) @ v, out], 2)
    return out.to(call.q.dtype), None


def _key_lists(call: Call) -> Tensor:
    """The tokens that each patch sees, (1 or B, H, N, K), -1 behind the last."""
    return plan_table(call.plan, "keys", call.q.device)[None] if call.keys is None else call.keys


def _gathered_decay(call: Call, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """M at the listed pairs, (1 or B, H, N, K); what it is at places without a key has no effect."""
    assert call.decay is not None
    prefix, positions = call.plan.num_prefix_tokens, decay_positions(call.plan, call.decay, call.q.device)
    if call.token_ids is not None:
        positions = positions[..., call.token_ids]
    others = (keys - prefix).clamp_min(0).long()  # patches
    beta_CH = call.decay["beta"]
    gamma_H = prefix_weights(call.decay, dtype)
    heads = []
    for head in range(call.plan.num_heads):
        own = others[:, head]
        if call.token_ids is None:  # positions (C, A, N)
            distances = (positions[:, :, None, :, None] - positions[:, :, own]).abs().sum(1)
        else:  # (C, A, B, n)
            there = (
                positions.unsqueeze(-2)
                .expand(*positions.shape[:-1], *own.shape[-2:-1], -1)
                .gather(-1, own.expand(*positions.shape[:2], *own.shape))
            )
            distances = (positions.unsqueeze(-1) - there).abs().sum(1)
        weights = decay_weights(beta_CH[:, head : head + 1], distances, dtype)[0]
        outside = 1.0 if gamma_H is None else gamma_H[head]
        heads.append(torch.where(keys[:, head] < prefix, outside, weights))
    return torch.stack(heads, 1)


GATHERED_BLOCK = 1 << 22  # numbers in the gathered keys of a block


class GatheredAttention(torch.autograd.Function):
    """softmax(q k^T * factor) v over lists of keys, block of rows after block, so that few keys are copied at a time.

    q: (B, H, N, D), scaled; k, v: (B, H, T, D); keys: (1 or B, H, N, K) of integers, -1 where there is none, at least
    one key a row; factor: (1 or B, H, N, K) or None. Returns (B, H, N, D).
    """

    @staticmethod
    def blocks(q: Tensor, keys: Tensor) -> range:
        """First rows of the blocks."""
        batch, heads, tokens, width = q.shape
        rows = max(1, GATHERED_BLOCK // max(1, batch * heads * keys.shape[-1] * width))
        return range(0, tokens, rows)

    @staticmethod
    def gathered(tokens: Tensor, places: Tensor) -> Tensor:
        """(B, H, T, D) at places (B, H, R, K) in all B H T rows: (B, H, R, K, D)."""
        return tokens.reshape(-1, tokens.shape[-1])[places]

    @staticmethod
    def block(
        q: Tensor, k: Tensor, keys: Tensor, factor: Tensor | None, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of some rows: queries, gathered keys, where in all rows of k they are, products, probabilities."""
        batch, heads, total = k.shape[:3]
        own = keys[:, :, rows].long().expand(batch, -1, -1, -1)
        places = own.clamp_min(0) + total * torch.arange(batch * heads, device=k.device).view(batch, heads, 1, 1)
        queries, gathered = q[:, :, rows], GatheredAttention.gathered(k, places)
        products = (gathered @ queries.unsqueeze(-1)).squeeze(-1)
        logits = products if factor is None else products * factor[:, :, rows]
        return queries, gathered, places, products, torch.softmax(logits.masked_fill(own < 0, -math.inf), -1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, factor: Tensor | None) -> Tensor:
        """See the class."""
        ctx.save_for_backward(q, k, v, keys, factor)
        out = torch.empty_like(q)
        blocks = GatheredAttention.blocks(q, keys)
        for first in blocks:
            rows = slice(first, first + blocks.step)
            _, _, places, _, probs = GatheredAttention.block(q, k, keys, factor, rows)
            out[:, :, rows] = (probs.unsqueeze(-2) @ GatheredAttention.gathered(v, places)).squeeze(-2)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Recomputes each block's probabilities."""
        q, k, v, keys, factor = ctx.saved_tensors
        width = q.shape[-1]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros(k.shape).to(k), torch.zeros(v.shape).to(v)
        grad_factor = None if factor is None else torch.empty_like(factor)
        blocks = GatheredAttention.blocks(q, keys)
        for first in blocks:
            rows = slice(first, first + blocks.step)
            queries, gathered, places, products, probs = GatheredAttention.block(q, k, keys, factor, rows)
            own_grad, flat = grad[:, :, rows].unsqueeze(-1), places.flatten()
            values = GatheredAttention.gathered(v, places)
            grad_v.view(-1, width).index_add_(0, flat, (probs.unsqueeze(-1) * own_grad.mT).reshape(-1, width))
            grad_probs = (values @ own_grad).squeeze(-1)
            grad_logits = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))
            grad_products = grad_logits
            if factor is not None and grad_factor is not None:
                grad_products = grad_logits * factor[:, :, rows]
                own = grad_logits * products
                grad_factor[:, :, rows] = own if factor.shape[0] == own.shape[0] else own.sum(0, keepdim=True)
            grad_q[:, :, rows] = (grad_products.unsqueeze(-2) @ gathered).squeeze(-2)
            pairs = grad_products.unsqueeze(-1) * queries.unsqueeze(-2)
            grad_k.view(-1, width).index_add_(0, flat, pairs.reshape(-1, width))
        return grad_q, grad_k, grad_v, None, grad_factor


# ---- compiled kernels -----------------------------------------------------------------------------------------------


def _package_is_there() -> str | None:
    if diagonal_cpu is None:
        return "the package hf_sparseprior is not installed, its kernels are not part of a saved model"
    return None


def _kernel_can_run(call: Call) -> str | None:
    """What the compiled kernels along diagonals, and over all pairs with a decay, have in common."""
    if call.plan.offsets is None and call.decay is None:
        return "dense attention without a decay is what scaled_dot_product_attention is for"
    if reason := _needs_dense(call) or _needs_lists(call):
        return reason
    if call.need_weights:
        return "the compiled kernels do not return attention weights"
    if call.decay is not None and call.decay.get("order") is not None:
        return "the compiled kernels have tables of whole ranks, and this order is learned"
    return _package_is_there() or _sparse_dropout_can_run(call)


def _cpp_can_run(call: Call) -> str | None:
    if _has_lists(call):
        return _gather_can_run(call) or _package_is_there() or diagonal_cpu.can_run(call.q)
    if call.plan.offsets is None and call.dropout_p > 0:
        return "the C++ kernel has no dropout of dense attention"
    return _kernel_can_run(call) or diagonal_cpu.can_run(call.q)


def _triton_can_run(call: Call) -> str | None:
    return _kernel_can_run(call) or triton_device.can_run(call.q)


def _has_lists(call: Call) -> bool:
    """Whether pairs lie off diagonals that all images share."""
    return call.keys is not None or call.plan.pairs is not None


def _cpp(call: Call) -> tuple[Tensor, Tensor | None]:
    """The C++ kernels: along diagonals, over lists of keys, or over all pairs with a decay."""
    if _has_lists(call):
        return _listed_kernel(call), None
    if call.plan.offsets is not None:
        return _diagonal_kernel(call, diagonal_cpu.diagonal_attention, "offset_counts"), None
    scalars = _decay_scalars(call)
    positions = plan_table(call.plan, "positions_float32", call.q.device)
    out = decayed_cpu.decayed_attention(
        call.q, call.k, call.v, positions, *scalars, call.plan.num_prefix_tokens, call.scale
    )
    return out, None


def _triton(call: Call) -> tuple[Tensor, Tensor | None]:
    """The Triton kernels: along diagonals, or over all pairs with a decay."""
    diagonal_attention, decayed_attention = triton_device.kernels()
    if call.plan.offsets is not None:
        return _diagonal_kernel(call, diagonal_attention, "offset_begin"), None
    scalars = _decay_scalars(call)
    positions = plan_table(call.plan, "positions_int32", call.q.device)
    out = decayed_attention(
        call.q, call.k, call.v, positions, *scalars, call.plan.num_prefix_tokens, call.scale, dropout_p=call.dropout_p
    )
    return out, None


class DecayScalars(NamedTuple):
    """A decay's scalars in float32: log gamma (C, H), alpha (H,), gamma of pairs with a prefix token (H,)."""

    log_gamma: Tensor
    alpha: Tensor
    prefix_gamma: Tensor


def _decay_scalars(call: Call) -> DecayScalars:
    assert call.decay is not None
    ones = torch.ones(call.plan.num_heads, device=call.q.device)
    alpha_H, gamma_H = call.decay.get("alpha"), prefix_weights(call.decay, torch.float32)
    return DecayScalars(
        F.logsigmoid(call.decay["beta"].float()),
        ones if alpha_H is None else alpha_H.float(),
        ones if gamma_H is None else gamma_H,
    )


def _listed_kernel(call: Call) -> Tensor:
    """Attention over lists of keys by the C++ kernel."""
    keys, factor, prefix_factor = _key_lists(call).int(), None, None
    if call.decay is not None:
        scalars = _decay_scalars(call)
        factor = _gathered_decay(call, keys, torch.float32) * scalars.alpha.view(-1, 1, 1)
        prefix_factor = scalars.alpha * scalars.prefix_gamma
    prefix = call.plan.num_prefix_tokens
    return listed_cpu.listed_attention(call.q, call.k, call.v, keys, prefix, call.scale, factor, prefix_factor)


def _diagonal_kernel(call: Call, kernel: Callable[..., Tensor], heads_table: str) -> Tensor:
    """Attention along diagonals; `heads_table` says how the kernel wants to know which offsets a head has."""
    plan, device = call.plan, call.q.device
    weights = {}
    if call.decay is not None:
        scalars = _decay_scalars(call)
        distances, pairs = (plan_table(plan, name, device) for name in ("pair_distances", "pair_counts"))
        log_gamma = scalars.log_gamma.repeat_interleave(pairs, dim=1, output_size=distances.shape[1])
        alpha = scalars.alpha.repeat_interleave(pairs, output_size=distances.shape[1])
        weights = {
            "pair_weights": torch.exp(distances * log_gamma).mean(0) * alpha,
            "pair_begin": plan_table(plan, "pair_begin", device),
            "prefix_weight": scalars.alpha * scalars.prefix_gamma,
            "self_weight": scalars.alpha,
        }
    return kernel(
        call.q,
        call.k,
        call.v,
        plan_table(plan, "signed_offsets", device),
        plan_table(plan, heads_table, device),
        plan.num_prefix_tokens,
        call.scale,
        zero_fill=plan.mask_fill == "zero",
        dropout_p=call.dropout_p,
        **weights,
    )


# ---- choice ---------------------------------------------------------------------------------------------------------

BACKENDS = {
    "reference": Backend(_reference_can_run, _reference, needs_mask=True, needs_positions=True),
    "sdpa": Backend(_sdpa_can_run, _sdpa, needs_mask=True),
    "diagonal": Backend(_diagonal_can_run, _diagonal, needs_mask=False, needs_positions=True),
    "gather": Backend(_gather_can_run, _gather, needs_mask=False),
    "cpp": Backend(_cpp_can_run, _cpp, needs_mask=False),
    "triton": Backend(_triton_can_run, _triton, needs_mask=False),
}


class Crossover(NamedTuple):
    """Where a sparse path begins to beat the dense path that it replaces."""

    tokens: int  # patches from which on
    density: float  # share of the pairs up to which


# By (sparse path, device type, needs gradients, dense path). CPU: measured on two cores in float32, interleaved,
# medians. cpp: Fibottention and windows of growing width, 4 to 1024 patches, 6 heads of 64, batches of 1 to 8.
# Over lists of keys, 2 to 50 % of them, 64 to 1024 patches, on one busy core, the same limits came out.
# diagonal: Fibottention, 3 to 12 heads of 16 to 64, batches of 2 to 64; a pair costs it ten times as much. gather: keys
# of a predictor, 64 to 2304 patches, 6 heads of 64, on one busy core (`tasks.benchmark.predictor`); copying a key costs
# as much as thirty to fifty dense ones. CUDA: not measured. On a GPU nothing sparse beats ideal dense attention below
# some 400 tokens, and diagonal's hundreds of small launches a layer cost milliseconds.
CROSSOVERS = {
    ("cpp", "cpu", False, "sdpa"): Crossover(16, 0.5),
    ("cpp", "cpu", True, "sdpa"): Crossover(36, 0.45),
    ("cpp", "cpu", False, "reference"): Crossover(1, 0.65),
    ("cpp", "cpu", True, "reference"): Crossover(1, 0.6),
    ("diagonal", "cpu", False, "sdpa"): Crossover(320, 1 / 16),
    ("diagonal", "cpu", True, "sdpa"): Crossover(400, 1 / 16),
    ("diagonal", "cpu", False, "reference"): Crossover(144, 1 / 16),
    ("diagonal", "cpu", True, "reference"): Crossover(196, 1 / 16),
    **{("gather", "cpu", False, dense): Crossover(400, 1 / 50) for dense in ("sdpa", "reference")},
    **{("gather", "cpu", True, dense): Crossover(1024, 1 / 64) for dense in ("sdpa", "reference")},
    **{
        ("triton", "cuda", trains, dense): Crossover(400, 1 / 16)
        for trains in (False, True)
        for dense in ("sdpa", "reference")
    },
    **{("diagonal", "cuda", trains, "sdpa"): Crossover(4096, 1 / 16) for trains in (False, True)},
    **{("diagonal", "cuda", trains, "reference"): Crossover(2048, 1 / 16) for trains in (False, True)},
    **{
        ("gather", "cuda", trains, dense): Crossover(4096, 1 / 64)
        for trains in (False, True)
        for dense in ("sdpa", "reference")
    },
}
# From the fastest on, where they can run and nothing else is faster; `reference` runs everything.
ORDER = ("cpp", "triton", "diagonal", "gather", "sdpa", "reference")


def slower_than_dense(
    name: str, plan: AttentionPlan, device_type: str, trains: bool, dense_path: str, listed: int | None = None
) -> str | None:
    """Why a backend would be slower than `dense_path` ("sdpa" or "reference"), None if it would not.

    `listed` is how many keys a predictor has listed for each patch.
    """
    if plan.offsets is None and listed is None:
        return None
    density = plan.density if listed is None else listed / plan.total
    device_type = device_type if device_type in ("cpu", "cuda") else "cuda"
    limits = CROSSOVERS.get((name, device_type, trains, dense_path))
    if limits is None:
        return None
    if plan.num_tokens < limits.tokens:
        return f"dense is faster below {limits.tokens} patches"
    if density > limits.density:
        return f"dense is faster with more than {100 * limits.density:.1f} % of the pairs"
    return None


def forced_backend(backend: str) -> tuple[str, str]:
    """Who forces a backend, and its name; "auto" where nobody does. An unknown name is a ValueError."""
    source = "backend"
    if backend == "auto" and (forced := os.environ.get("SPARSEPRIOR_BACKEND")):
        source, backend = "SPARSEPRIOR_BACKEND", forced
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"{source}={backend!r} must be one of auto, {', '.join(BACKENDS)}")
    return source, backend


def choose_backend(call: Call, backend: str = "auto") -> str:
    """Name of the backend to run.

    `backend` forces one, else the environment variable SPARSEPRIOR_BACKEND does, else the fastest that can run is
    taken. A forced backend that cannot run is an error, never another backend.
    """
    source, backend = forced_backend(backend)
    if backend != "auto":
        if reason := BACKENDS[backend].can_run(call):
            raise ValueError(f"{source}={backend!r} cannot run this attention: {reason}")
        if not torch.compiler.is_compiling():
            logger.debug("layer %d: %s (forced)", call.plan.layer, backend)
        return backend
    trains = torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad)
    dense_path = "reference" if _sdpa_can_run(call) else "sdpa"
    device_type = call.q.device.type
    listed = None if call.keys is None else call.keys.shape[-1]
    refused: list[tuple[str, str]] = []
    for name in ORDER:
        reason = slower_than_dense(name, call.plan, device_type, trains, dense_path, listed)
        reason = reason or BACKENDS[name].can_run(call)
        if reason is None:
            if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
                _log_choice(call, name, refused)
            return name
        refused.append((name, reason))
    raise AssertionError("unreachable: reference runs everything")


def _log_choice(call: Call, name: str, refused: list[tuple[str, str]]) -> None:
    plan = call.plan
    if call.keys is None:
        size = f"{plan.num_tokens} patches, {100 * plan.density:.1f} % of the pairs kept"
    else:
        size = f"{plan.num_tokens} patches, up to {call.keys.shape[-1]} keys of each listed"
    others = "".join(f"; not {other}: {reason}" for other, reason in refused)
    logger.debug("layer %d: %s (%s%s)", plan.layer, name, size, others)


def _call_mask(call: Call) -> Tensor:
    """Mask (H, T, T) or (B, H, T, T) of the keys that each query sees."""
    if call.keys is not None:
        return listed_mask(call.keys, call.plan.num_prefix_tokens, call.q.shape[2])
    if call.token_ids is not None:
        return _subset_mask(call.plan, call.token_ids)
    return plan_table(call.plan, "mask", call.q.device)


def listed_mask(keys: Tensor, num_prefix_tokens: int, total: int) -> Tensor:
    """Mask (B, H, T, T) of the lists of keys (B, H, N, K) that the patches see; prefix tokens see everything."""
    seen = torch.zeros(*keys.shape[:-1], total + 1, dtype=torch.bool, device=keys.device)
    seen.scatter_(-1, torch.where(keys < 0, total, keys).long(), True)  # no key is the column behind the last
    return F.pad(seen[..., :total], (0, 0, num_prefix_tokens, 0), value=True)


def _subset_mask(plan: AttentionPlan, token_ids: Tensor) -> Tensor:
    """Mask (B, H, T, T) of some patches of the grid, (B, n), each image's own; one at -1 sees and is seen by all."""
    prefix, patches = plan.num_prefix_tokens, token_ids.clamp_min(0)
    if plan.pairs is None:
        attended = plan_table(plan, "attended", token_ids.device)
        mask = attended[:, (patches.unsqueeze(-1) - patches.unsqueeze(-2)).abs()].transpose(0, 1)
    else:
        places = patches + prefix
        whole = plan_table(plan, "mask", token_ids.device)
        mask = whole[:, places.unsqueeze(-1), places.unsqueeze(-2)].transpose(0, 1)
    mask = mask | _off_grid_pairs(token_ids).unsqueeze(1)
    if not prefix:  # a patch none of whose keys is there attends to itself
        alone = ~mask.any(-1, keepdim=True)
        mask = mask | (alone & torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device))
    return F.pad(mask, (prefix, 0, prefix, 0), value=True)


def decay_positions(plan: AttentionPlan, decay: dict[str, Any], device: torch.device) -> Tensor:
    """Positions (C, A, N) that a decay measures distances along: those of its settings, or learned ones."""
    if (order := decay.get("order")) is not None:
        return resized_order(order, plan.grid)
    return plan_table(plan, "positions", device)


def run_plan(
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: dict[str, Any] | None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    backend: str = "auto",
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    keys: Tensor | None = None,
    top_k: int | None = None,
    kept: Tensor | None = None,
    weight_rows: int | None = None,
    renormalise: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention over a prepared plan; `decay` holds the tensors of this step.

    Args:
        bias: added to the logits behind decay and support, broadcastable to (B, H, T, T): relative positions, padding.
        token_ids: int64 (B, n) where the tokens behind the prefix are not all patches of the grid in raster order but
            these of them, others in each image (masked autoencoders, token pruning). Support and decay go by where
            the patches lie in the grid. -1 is a token that lies nowhere in it, and is treated like a prefix token.
        keys: int64 (B, H, n, K), the tokens that each patch of each image sees, prefix tokens counted, -1 where it sees
            fewer than K; the support is dense.
        top_k: a query keeps as many of its keys, those of the largest logits.
        kept: (B, T), 1 for keys that are there and 0 for those that are dropped, with a gradient for both; a query sees
            itself in any case (attention masking of DynamicViT, Rao et al. 2021).
        weight_rows: with `need_weights`, the weights of the first so many tokens only, which are prefix tokens, before
            dropout and without forming all.
        renormalise: the softmax runs over `keys`; False: over all keys, and the weights of the others are dropped.

    Returns:
        out (B, H, T, D) and the attention weights (B, H, T, T) if `need_weights`, else None; with `weight_rows`
        (B, H, weight_rows, T).
    """
    if token_ids is not None:
        if tuple(token_ids.shape) != (q.shape[0], q.shape[2] - plan.num_prefix_tokens):
            raise ValueError(
                f"token_ids of shape {tuple(token_ids.shape)} must name the {q.shape[2] - plan.num_prefix_tokens} "
                f"patches of each of {q.shape[0]} images"
            )
    elif q.shape[2] != plan.total:
        raise ValueError(
            f"{q.shape[2]} tokens must be {plan.num_prefix_tokens} prefix tokens and a patch grid of {plan.grid}, "
            f"{plan.total} in all"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if weight_rows is not None:
        _check_weight_rows(weight_rows, plan, bias, kept)
    all_weights = need_weights and weight_rows is None
    call = Call(q, k, v, plan, decay, scale, dropout_p, all_weights, bias, token_ids, keys, top_k, kept, None, None)
    if keys is not None and not renormalise:
        call = call._replace(unnormalised=True)
    chosen = BACKENDS[choose_backend(call, backend)]
    if chosen.needs_mask and (plan.offsets is not None or keys is not None):
        call = call._replace(mask=_call_mask(call))
    if chosen.needs_positions and decay is not None:
        positions = decay_positions(plan, decay, q.device)
        call = call._replace(positions=positions if token_ids is None else positions[..., token_ids.clamp_min(0)])
    # Autocast has done its work on the projections; it would round the float32 logits of a decay again.
    rounds = q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if rounds else nullcontext():
        out, weights = chosen.run(call)
        if need_weights and weight_rows is not None:
            weights = leading_weights(call, weight_rows)
    return out, weights


def _check_weight_rows(rows: int, plan: AttentionPlan, bias: Tensor | None, kept: Tensor | None) -> None:
    if not 1 <= rows <= plan.num_prefix_tokens:
        raise ValueError(f"weight_rows={rows} must be between 1 and the {plan.num_prefix_tokens} prefix tokens")
    if bias is not None or kept is not None:
        raise ValueError(f"weight_rows={rows} cannot be used with a bias or with dropped keys; take all weights")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    support: str | dict[str, Any] | None = None,
    decay: dict[str, Any] | None = None,
    num_prefix_tokens: int = 0,
    layer: int = 0,
    grid: tuple[int, int] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over a support, with a decay.

    Each call works out its support and tables anew and keeps none of them: nothing is cached globally. Where the same
    settings come again and again, `SparsePriorAttention` keeps them, as does an `AttentionPlan` with `run_plan`.

    Args:
        q, k, v: (B, H, T, D), any floating dtype, same device. T = num_prefix_tokens + N.
        support: a registered name, a dict as in `prior`, or None for dense.
        decay: {"name": "violin", "curves": [...], "alpha": (H,) or None, "beta": (C, H)} with tensors, or None; for
            "learned_order" also "order" (1, height, width), without which it is the order that it starts from.
        num_prefix_tokens: tokens in front of the patches; they attend to and are attended by everything.
        layer: layer number; with the support's `shuffle_seed` it decides which head has which support.
        grid: (height, width) of the patch tokens; may be left out where N is a square.
        scale: factor of the logits, default D ** -0.5.
        backend: "auto", or one of `BACKENDS` by name.
        dropout_p: dropout probability of the attention weights.
        need_weights: also return the weights (B, H, T, T).

    Returns:
        (B, H, T, D) in the dtype of q; with `need_weights` a pair with the weights.

    Raises:
        ValueError: for shapes, dtypes or settings that do not fit, or a forced backend that cannot run.
    """
    layer = check_integer("layer", layer, 0)
    _check_inputs(q, k, v)
    limits = f" and at most {q.shape[2] - 1}, tokens - 1"
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0, limits)
    if num_prefix_tokens >= q.shape[2]:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens} must be 0 or more{limits}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p} must be between 0 and 1")
    num_heads, num_tokens = q.shape[1], q.shape[2] - num_prefix_tokens
    grid = _check_grid(grid, num_tokens, decay is not None)
    if decay is not None:
        decay = _check_decay(decay, num_heads)
    resolved = resolve_support(support, num_heads, num_tokens)
    settings = None if decay is None else {key: value for key, value in decay.items() if not isinstance(value, Tensor)}
    plan = AttentionPlan(num_heads, grid, num_prefix_tokens, resolved, settings, layer)
    out, weights = run_plan(
        plan, q, k, v, decay, scale=scale, dropout_p=dropout_p, need_weights=need_weights, backend=backend
    )
    return (out, weights) if weights is not None else out


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be (batch, heads, tokens, head width)")
        if tensor.shape != q.shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must have the shape of q, {tuple(q.shape)}")
        if tensor.dtype != q.dtype or not tensor.is_floating_point():
            raise ValueError(f"{name} of dtype {tensor.dtype} must be floating and the dtype of q, {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} on {tensor.device} must be on the device of q, {q.device}")


def _check_grid(grid: tuple[int, int] | None, num_tokens: int, needed: bool) -> tuple[int, int]:
    if grid is None:
        side = math.isqrt(num_tokens)
        if side * side == num_tokens:
            return side, side
        if needed:
            raise ValueError(f"grid=None with a decay needs a square number of patch tokens, got {num_tokens}")
        return 1, num_tokens
    sides_are_counts = all(isinstance(side, (int, np.integer)) and side > 0 for side in grid)
    if len(grid) != 2 or not sides_are_counts or grid[0] * grid[1] != num_tokens:
        raise ValueError(f"grid={tuple(grid)} must be (height, width) with {num_tokens} patch tokens")
    return int(grid[0]), int(grid[1])


DECAY_TENSORS = ("alpha", "beta", "prefix_beta", "order")


def _check_decay(decay: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """A decay given with tensors, its defaults filled in."""
    name, given = split_spec(decay, "decay", DECAYS)
    check_keys(given, [*DECAYS[name].SETTINGS, *DECAY_TENSORS], f"decay {name!r}")
    filled = {**DECAYS[name].SETTINGS, **decay}
    filled.update({key: check(filled[key]) for key, check in SETTING_CHECKS.items() if key in filled})
    num_curves = DECAYS[name].positions(filled, (1, 1)).shape[0]
    expected = {"alpha": (num_heads,), "beta": (num_curves, num_heads), "prefix_beta": (num_heads,)}
    for key, shape in expected.items():
        tensor = filled.get(key)
        if tensor is None and key != "beta":
            continue
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ValueError(f"decay {key}={got} must be a tensor of shape {shape}")
    order = filled.get("order")
    if order is not None and (not isinstance(order, Tensor) or order.dim() != 3 or order.shape[0] != num_curves):
        got = tuple(order.shape) if isinstance(order, Tensor) else order
        raise ValueError(f"decay order={got} must be a tensor of shape ({num_curves}, height, width)")
    return filled
