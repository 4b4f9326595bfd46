"""`diagonal`: attention along diagonals with PyTorch operations only. Shape letters as in `ops`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.attention.choice import Crossover, register_backend
from hf_sparseprior.attention.plan import plan_table
from hf_sparseprior.attention.request import (
    AttentionRequest,
    drops_unformed_pairs,
    in_order,
    in_raster,
    leaves_diagonals,
    needs_all_logits,
    token_positions,
)
from hf_sparseprior.patterns.decay import decay_weights, offset_distances, prefix_weights
from hf_sparseprior.patterns.masks import self_rows


def diagonal_can_run(request: AttentionRequest) -> str | None:
    """Supports whose pairs lie on the same diagonals in every image."""
    if request.plan.offsets is None:
        return "the support is dense, it has no offsets"
    return needs_all_logits(request) or leaves_diagonals(request) or drops_unformed_pairs(request)


def diagonal(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """Attention along diagonals with PyTorch operations only; nothing grows with N x N.

    For each head and signed offset o, rows j and keys j + o are two contiguous slices. The logits of a head are
    collected as columns [prefix | offsets], and one softmax runs over them. Prefix rows see everything: they are P rows
    of dense attention. The tokens are in the support's order.
    """
    plan, dtype = request.plan, request.compute_dtype()
    assert plan.offsets is not None
    prefix = plan.num_prefix_tokens
    q, k, v = (in_order(plan, tokens) for tokens in (request.q, request.k, request.v))
    q, k, v = q.to(dtype) * request.logit_scale(), k.to(dtype), v.to(dtype)
    alpha_H = request.decay.get("alpha") if request.decay is not None else None
    if alpha_H is not None:
        q = q * alpha_H.to(dtype).view(-1, 1, 1)
    gamma_H = prefix_weights(request.decay, dtype) if request.decay is not None else None
    positions = None if request.decay is None else ordered_positions(request)
    heads, dense_weights = [], []
    # With unbinding first, the gradient of a slice is as large as one head and not as all heads.
    for head, (q_BTD, k_BTD, v_BTD) in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
        gamma = None if gamma_H is None else gamma_H[head]
        head_positions = None if positions is None else positions[head % len(positions)]
        out, weights = _diagonal_head(request, head_positions, head, q_BTD, k_BTD, v_BTD, gamma)
        heads.append(out)
        if weights is not None:
            dense_weights.append(weights)
    if prefix:
        logits = q[:, :, :prefix] @ k.transpose(-1, -2)
        if gamma_H is not None:
            logits = logits * gamma_H.view(-1, 1, 1)
        prefix_probs = F.dropout(torch.softmax(logits, -1), request.dropout_p)
        out = torch.cat([prefix_probs @ v, torch.stack(heads, 1)], 2)
    else:
        out = torch.stack(heads, 1)
    out = in_raster(plan, out)
    if not request.needs_all_weights():
        return out.to(request.q.dtype), None
    stacked = torch.stack(dense_weights, 1)
    full = torch.cat([prefix_probs, stacked], 2) if prefix else stacked
    if plan.ranks is not None:
        full = in_raster(plan, in_raster(plan, full).mT).mT
    return out.to(request.q.dtype), full.to(request.q.dtype)


def ordered_positions(request: AttentionRequest) -> list[Tensor]:
    """Positions (C, A, N) of the patches in the support's order: one, or one for each head."""
    positions = token_positions(request)
    if request.plan.ranks is None:
        return [positions]
    orders = plan_table(request.plan, "patches_in_order", positions.device)
    return [positions[..., patches] for patches in orders]


def _diagonal_head(
    request: AttentionRequest,
    positions: Tensor | None,
    head: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The patch rows of one head: (scaled q, k, v (B, T, ...)) -> out (B, N, E), weights (B, N, T) if wanted."""
    plan = request.plan
    assert plan.offsets is not None
    offsets, prefix, tokens = plan.offsets[head], plan.num_prefix_tokens, plan.num_tokens
    q, k_prefix, v_prefix, k, v = q[:, prefix:], k[:, :prefix], v[:, :prefix], k[:, prefix:], v[:, prefix:]

    columns: list[tuple[int, int, int]] = []  # (first row, row after the last, signed offset)
    logits: list[Tensor] = []
    for offset in offsets:
        count = tokens - offset
        decay = _offset_weights(request, positions, offset, head, q.dtype)
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
        # The softmax is over T logits, and logits outside the support are 0. A key in the support has exp(s), every key
        # outside has exp(0). So the sum of all v is weighted by the floor, and the support adds the rest.
        outside = plan_table(plan, "unseen", scores.device)[head].unsqueeze(-1)  # (N, 1); a logit seen can be -inf
        highest = scores.detach().amax(-1, keepdim=True)
        highest = torch.where(outside > 0, highest.clamp_min(0.0), highest)
        floor = torch.where(outside > 0, torch.exp(-highest), 0.0)
        probs = torch.exp(scores - highest)
        total = probs.sum(-1, keepdim=True) + outside * floor
        floor = floor / total
        probs = probs / total - floor  # wrong where a row has no key in a column; those are not read
        out = floor * (v_prefix.sum(1, keepdim=True) + v.sum(1, keepdim=True))
    else:
        probs = F.dropout(torch.softmax(scores, -1), request.dropout_p)
        floor = None
        out = torch.zeros_like(v)
    if prefix:
        out = out + probs[..., :prefix] @ v_prefix
    for (first, last, signed), p_BN in zip(columns, probs[..., prefix:].unbind(-1), strict=True):
        part = p_BN[:, first:last, None] * v[:, first + signed : last + signed]
        out = out + F.pad(part, (0, 0, first, tokens - last))
    if not request.needs_all_weights():
        return out, None
    return out, _scatter_weights(probs, floor, columns, prefix, tokens)


def _offset_weights(
    request: AttentionRequest, positions: Tensor | None, offset: int, head: int, dtype: torch.dtype
) -> Tensor | None:
    """M at the pairs (j, j + offset) of one head, (N - offset,)."""
    if request.decay is None or positions is None:
        return None
    distances = offset_distances(positions, offset)
    return decay_weights(request.decay["beta"][:, head : head + 1], distances, dtype)[0]


def _scatter_weights(
    probs: Tensor, floor: Tensor | None, columns: Sequence[tuple[int, int, int]], prefix: int, tokens: int
) -> Tensor:
    """Attention weights (B, N, T) of patch rows, made only if a caller asks for them."""
    dense = probs.new_zeros(*probs.shape[:2], prefix + tokens)
    dense[..., :prefix] = probs[..., :prefix]
    patches = dense[..., prefix:]
    for (first, last, signed), p_BN in zip(columns, probs[..., prefix:].unbind(-1), strict=True):
        diagonal = patches.diagonal(signed, -2, -1)
        diagonal[..., first - max(0, -signed) : last - max(0, -signed)] = p_BN[:, first:last]
    return dense if floor is None else dense + floor


# CPU: medians, measured interleaved on two cores in float32 with Fibottention, 3 to 12 heads of 16 to 64, batches of 2
# to 64. A pair costs ten times as much as with cpp. CUDA: not measured; hundreds of small launches take milliseconds.
register_backend(
    "diagonal",
    can_run=diagonal_can_run,
    run=diagonal,
    priority=30,
    crossovers={
        ("cpu", False, "sdpa"): Crossover(320, 1 / 16),
        ("cpu", True, "sdpa"): Crossover(400, 1 / 16),
        ("cpu", False, "reference"): Crossover(144, 1 / 16),
        ("cpu", True, "reference"): Crossover(196, 1 / 16),
        **{("cuda", trains, "sdpa"): Crossover(4096, 1 / 16) for trains in (False, True)},
        **{("cuda", trains, "reference"): Crossover(2048, 1 / 16) for trains in (False, True)},
    },
)
