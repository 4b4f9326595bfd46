"""`frames`: pairs that are those of a frame, in and between all frames of a clip, with PyTorch operations only.

What a place of a frame sees is listed once, and the queries of all frames at that place share what is gathered. Nothing
is listed for pairs of frames. Shape letters as in `ops`, F frames, S places of a frame, K places of a list, R rows of
keys: the S places, and behind them the prefix tokens, F to a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.attention.choice import Crossover, register_backend
from hf_sparseprior.attention.gather import GATHERED_BLOCK, not_listed, prefix_rows
from hf_sparseprior.attention.plan import AttentionPlan, decay_positions, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import decay_weights, prefix_weights


def frames_can_run(request: AttentionRequest) -> str | None:
    """Requests with the same pattern in and between all frames."""
    if not request.plan.repeats_frame or request.key_ids is not None:
        return "pairs are not those of one frame repeated over a clip"
    return not_listed(request)


def frames(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """Every place of a frame gathers the keys that it sees in all frames, once for all of its queries."""
    plan, dtype = request.plan, request.compute_dtype()
    prefix, clip = plan.num_prefix_tokens, plan.frames
    q, k, v = request.q.to(dtype) * request.logit_scale(), request.k.to(dtype), request.v.to(dtype)
    rows, valid, alone = _rows(plan, q.device)
    factor = None
    if request.decay is not None:
        if (alpha_H := request.decay.get("alpha")) is not None:
            q = q * alpha_H.to(dtype).view(-1, 1, 1)
        factor = _decay(request, rows, dtype)
    by_place = [tokens[:, :, prefix:].unflatten(2, (clip, -1)).transpose(2, 3) for tokens in (q, k, v)]
    keys, values = (
        torch.cat([patches, _in_rows(tokens[:, :, :prefix], clip)], 2)
        for patches, tokens in zip(by_place[1:], (k, v), strict=True)
    )
    out = PlaceAttention.apply(by_place[0], keys, values, rows, valid, factor)
    if alone is not None:  # their list has themselves in all frames
        out = torch.where(alone[:, :, None, None], by_place[2], out)
    out = out.transpose(2, 3).flatten(2, 3)
    if prefix:
        out = torch.cat([prefix_rows(request, q, k, v), out], 2)
    return out.to(request.q.dtype), None


def _rows(plan: AttentionPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows of keys that each place sees (H, S, K), -1 for none; which slots of the rows hold a token (R, F); and
    the places that see themselves alone (H, S), None if there are none.
    """
    lists = plan_table(plan, "frame_keys", device)
    heads, places, _ = lists.shape
    prefix, clip = plan.num_prefix_tokens, plan.frames
    more = -(-prefix // clip)
    valid = torch.arange((places + more) * clip, device=device) < places * clip + prefix
    if prefix:
        seen = places + torch.arange(more, device=device)
        return torch.cat([seen.expand(heads, places, -1), lists], 2), valid.view(-1, clip), None
    alone = (lists < 0).all(-1)
    itself = torch.arange(places, device=device).expand(heads, -1)
    lists = torch.cat([torch.where(alone, itself, -1)[..., None], lists], 2)
    return lists, valid.view(-1, clip), alone


def _in_rows(tokens: Tensor, clip: int) -> Tensor:
    """Prefix tokens (B, H, P, D), F to a row: (B, H, rows, F, D), with zeros after the last."""
    return F.pad(tokens, (0, 0, 0, -tokens.shape[2] % clip)).unflatten(2, (-1, clip))


def _decay(request: AttentionRequest, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """M of each place and each row of keys, (H, S, K). Its value at places without a key has no effect."""
    assert request.decay is not None
    places = rows.shape[1]
    positions = decay_positions(request.plan, request.decay, request.q.device)[..., :places]
    gamma_H, heads = prefix_weights(request.decay, dtype), []
    for head, head_rows in enumerate(rows):
        distances = (positions[:, :, :, None] - positions[:, :, head_rows.clamp(0, places - 1)]).abs().sum(1)
        weights = decay_weights(request.decay["beta"][:, head : head + 1], distances, dtype)[0]
        heads.append(torch.where(head_rows < places, weights, 1.0 if gamma_H is None else gamma_H[head]))
    return torch.stack(heads)


class PlaceAttention(torch.autograd.Function):
    """softmax(q k^T * factor) v over lists of rows of keys, which F queries share, some places at a time.

    q: (B, H, S, F, D), scaled. k: (B, H, R, F, D). v: (B, H, R, F, E). rows: int64 (H, S, K), -1 for none. valid: bool
    (R, F), at least one slot in the rows of each place. factor: (H, S, K) or None. Returns (B, H, S, F, E).
    """

    @staticmethod
    def blocks(q: Tensor, rows: Tensor) -> range:
        """First places of the blocks."""
        batch, heads, places, clip, width = q.shape
        each = batch * heads * rows.shape[-1] * clip * width
        return range(0, places, max(1, GATHERED_BLOCK[q.is_cuda] // max(1, each)))

    @staticmethod
    def gathered(tokens: Tensor, numbers: Tensor) -> Tensor:
        """Rows of (B, H, R, F, D) at numbers (B, H, r, K), which count all B H R rows: (B, H, r, K F, D)."""
        clip, width = tokens.shape[-2:]
        return tokens.reshape(-1, clip * width)[numbers].unflatten(-1, (clip, width)).flatten(3, 4)

    @staticmethod
    def block(
        q: Tensor, k: Tensor, rows: Tensor, valid: Tensor, factor: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """For some places: queries, gathered keys, their rows among all, dot products, probabilities."""
        batch, heads, total, clip, _ = k.shape
        part_rows = rows[:, part]
        numbers = part_rows.clamp_min(0) + total * torch.arange(batch * heads, device=k.device).view(batch, heads, 1, 1)
        queries, gathered = q[:, :, part], PlaceAttention.gathered(k, numbers)
        scores = queries @ gathered.mT
        logits = scores if factor is None else scores * PlaceAttention.wide(factor[:, part], clip)
        seen = ((part_rows >= 0)[..., None] & valid[part_rows.clamp_min(0)]).flatten(2).unsqueeze(-2)
        return queries, gathered, numbers, scores, torch.softmax(logits.masked_fill(~seen, -math.inf), -1)

    @staticmethod
    def wide(factor: Tensor, clip: int) -> Tensor:
        """What belongs to rows (H, r, K), for all of their slots: (H, r, 1, K F)."""
        return factor.unsqueeze(-1).expand(*factor.shape, clip).flatten(2).unsqueeze(-2)

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, valid: Tensor, factor: Tensor | None
    ) -> Tensor:
        """See the class."""
        ctx.save_for_backward(q, k, v, rows, valid, factor)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        blocks = PlaceAttention.blocks(q, rows)
        for first in blocks:
            part = slice(first, first + blocks.step)
            _, _, numbers, _, probs = PlaceAttention.block(q, k, rows, valid, factor, part)
            out[:, :, part] = probs @ PlaceAttention.gathered(v, numbers)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Recomputes each block's probabilities."""
        q, k, v, rows, valid, factor = ctx.saved_tensors
        clip = q.shape[-2]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros(k.shape).to(k), torch.zeros(v.shape).to(v)
        grad_factor = None if factor is None else torch.empty_like(factor)
        blocks = PlaceAttention.blocks(q, rows)
        for first in blocks:
            part = slice(first, first + blocks.step)
            queries, gathered, numbers, scores, probs = PlaceAttention.block(q, k, rows, valid, factor, part)
            grad_part, flat = grad[:, :, part], numbers.flatten()
            _add(grad_v, flat, probs.mT @ grad_part)
            grad_probs = grad_part @ PlaceAttention.gathered(v, numbers).mT
            grad_scores = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))
            if factor is not None and grad_factor is not None:
                of_rows = (grad_scores * scores).sum((0, -2)).unflatten(-1, (-1, clip)).sum(-1)
                grad_factor[:, part] = of_rows
                grad_scores = grad_scores * PlaceAttention.wide(factor[:, part], clip)
            grad_q[:, :, part] = grad_scores @ gathered
            _add(grad_k, flat, grad_scores.mT @ queries)
        return grad_q, grad_k, grad_v, None, None, grad_factor


def _add(total: Tensor, numbers: Tensor, parts: Tensor) -> None:
    """Add what belongs to gathered tokens (B, H, r, K F, D) to all of them (B, H, R, F, D), by their rows."""
    size = total.shape[-2] * total.shape[-1]
    total.view(-1, size).index_add_(0, numbers, parts.reshape(-1, size))


# CPU: measured with windows of 2 and 5 in 2 to 8 frames of 4x4 to 14x14 patches, 6 heads of 64, on one busy core. CUDA:
# not measured.
register_backend(
    "frames",
    can_run=frames_can_run,
    run=frames,
    priority=45,
    crossovers={
        **{("cpu", False, dense): Crossover(256, 1 / 8) for dense in ("sdpa", "reference")},
        **{("cpu", True, dense): Crossover(392, 1 / 16) for dense in ("sdpa", "reference")},
        **{
            ("cuda", trains, dense): Crossover(4096, 1 / 16)
            for trains in (False, True)
            for dense in ("sdpa", "reference")
        },
    },
)
