"""`gather`: every patch gathers the keys that it sees, with PyTorch operations only. Shape letters as in `ops`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.attention.choice import Crossover, register_backend
from hf_sparseprior.attention.plain_operations import plain
from hf_sparseprior.attention.request import (
    AttentionRequest,
    copies_of_lists,
    is_transformed,
    listed_decay,
    needs_all_logits,
    request_keys,
)
from hf_sparseprior.patterns.decay import prefix_weights

# Bytes of a layer's lists over a clip from which on `frames` runs, which lists one frame. It takes some twice the time
# of the C++ kernel, but a model of 12 layers would keep 3 GiB of lists.
LONGEST = 1 << 28


def gather_can_run(request: AttentionRequest) -> str | None:
    """Requests whose pairs can be listed before the logits are known."""
    if request.key_ids is None and (size := request.plan.list_bytes * copies_of_lists(request)) > LONGEST:
        return f"lists of keys that are the same in every frame would take {size / 2**30:.2f} GiB in each layer"
    return not_listed(request)


def not_listed(request: AttentionRequest) -> str | None:
    """Why the pairs of a request cannot be listed before the logits are known, however long the lists; None if so."""
    if request.plan.offsets is None and request.key_ids is None:
        return "every patch sees every token"
    if request.plan.mask_fill == "zero" and request.plan.offsets is not None:
        return "mask_fill='zero' keeps exp(0) for masked pairs, which are not listed"
    if request.dropout_p > 0:
        return "there is no dropout over lists of keys"
    if request.needs_all_weights():
        return "attention weights over lists of keys are not returned"
    if request.token_ids is not None and request.key_ids is None:
        return "only some patches of the grid are there, others in each image"
    return needs_all_logits(request) or is_transformed()


def gather(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """Every patch gathers the keys and values that it sees; nothing grows with N x N. Prefix rows are dense."""
    plan, dtype = request.plan, request.compute_dtype()
    prefix = plan.num_prefix_tokens
    q, k, v = request.q.to(dtype) * request.logit_scale(), request.k.to(dtype), request.v.to(dtype)
    key_ids = request_keys(request)
    factor = None
    if request.decay is not None:
        if (alpha_H := request.decay.get("alpha")) is not None:
            q = q * alpha_H.to(dtype).view(-1, 1, 1)
        factor = listed_decay(request, key_ids, dtype)
    run = GatheredAttention.apply if plain() is None else gathered_at_once
    out = run(q[:, :, prefix:], k, v, key_ids, factor)
    if prefix:
        out = torch.cat([prefix_rows(request, q, k, v), out], 2)
    return out.to(request.q.dtype), None


def prefix_rows(request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of the prefix tokens, which see every token. q is scaled already."""
    logits = q[:, :, : request.plan.num_prefix_tokens] @ k.transpose(-1, -2)
    if request.decay is not None and (gamma_H := prefix_weights(request.decay, q.dtype)) is not None:
        logits = logits * gamma_H.view(-1, 1, 1)
    return torch.softmax(logits, -1) @ v


def gathered_at_once(q: Tensor, k: Tensor, v: Tensor, key_ids: Tensor, factor: Tensor | None) -> Tensor:
    """`GatheredAttention` without blocks, which would depend on the batch, for graphs of any batch."""
    seen = key_ids.clamp_min(0).long()
    if seen.shape[0] == 1:  # the same keys in all images: one list over the rows of all heads
        heads, total = k.shape[1:3]
        rows = (seen[0] + total * torch.arange(heads, device=k.device).view(-1, 1, 1)).flatten()
        keys, values = (
            tokens.flatten(1, 2).index_select(1, rows).unflatten(1, (heads, *seen.shape[2:])) for tokens in (k, v)
        )
    else:
        places = seen.flatten(2).unsqueeze(-1)
        keys, values = (
            tokens.gather(2, places.expand(-1, -1, -1, tokens.shape[-1])).unflatten(2, (-1, seen.shape[-1]))
            for tokens in (k, v)
        )
    logits = (keys @ q.unsqueeze(-1)).squeeze(-1)
    logits = logits if factor is None else logits * factor
    probs = torch.softmax(logits.masked_fill(key_ids < 0, -math.inf), -1)
    return (probs.unsqueeze(-2) @ values).squeeze(-2)


# Numbers in the gathered keys of a block, by whether they are on a GPU, where many small blocks would wait for Python.
GATHERED_BLOCK = {False: 1 << 22, True: 1 << 26}


class GatheredAttention(torch.autograd.Function):
    """softmax(q k^T * factor) v over lists of keys, one block of rows at a time, so that few keys are copied at once.

    q: (B, H, N, D), scaled. k: (B, H, T, D). v: (B, H, T, E). key_ids: integers (1 or B, H, N, K), -1 for no key, at
    least one key in each row. factor: (1 or B, H, N, K) or None. Returns (B, H, N, E).
    """

    @staticmethod
    def blocks(q: Tensor, key_ids: Tensor) -> range:
        """First rows of the blocks."""
        batch, heads, tokens, width = q.shape
        rows = max(1, GATHERED_BLOCK[q.is_cuda] // max(1, batch * heads * key_ids.shape[-1] * width))
        return range(0, tokens, rows)

    @staticmethod
    def gathered(tokens: Tensor, places: Tensor) -> Tensor:
        """Rows of (B, H, T, D) at places (B, H, R, K), which count all B H T rows: (B, H, R, K, D)."""
        return tokens.reshape(-1, tokens.shape[-1])[places]

    @staticmethod
    def block(
        q: Tensor, k: Tensor, key_ids: Tensor, factor: Tensor | None, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """For some rows: queries, gathered keys, their places in all rows of k, their dot products, probabilities."""
        batch, heads, total = k.shape[:3]
        block_ids = key_ids[:, :, rows].long().expand(batch, -1, -1, -1)
        places = block_ids.clamp_min(0) + total * torch.arange(batch * heads, device=k.device).view(batch, heads, 1, 1)
        queries, gathered = q[:, :, rows], GatheredAttention.gathered(k, places)
        scores = (gathered @ queries.unsqueeze(-1)).squeeze(-1)
        logits = scores if factor is None else scores * factor[:, :, rows]
        return queries, gathered, places, scores, torch.softmax(logits.masked_fill(block_ids < 0, -math.inf), -1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_ids: Tensor, factor: Tensor | None) -> Tensor:
        """See the class."""
        k, v = k.contiguous(), v.contiguous()  # or each block would copy them
        ctx.save_for_backward(q, k, v, key_ids, factor)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        blocks = GatheredAttention.blocks(q, key_ids)
        for first in blocks:
            rows = slice(first, first + blocks.step)
            _, _, places, _, probs = GatheredAttention.block(q, k, key_ids, factor, rows)
            out[:, :, rows] = (probs.unsqueeze(-2) @ GatheredAttention.gathered(v, places)).squeeze(-2)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Recomputes each block's probabilities."""
        q, k, v, key_ids, factor = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        grad_factor = None if factor is None else torch.empty_like(factor)
        blocks = GatheredAttention.blocks(q, key_ids)
        for first in blocks:
            rows = slice(first, first + blocks.step)
            queries, gathered, places, scores, probs = GatheredAttention.block(q, k, key_ids, factor, rows)
            own_grad, flat = grad[:, :, rows].unsqueeze(-1), places.flatten()
            values = GatheredAttention.gathered(v, places)
            shares = probs.unsqueeze(-1) * own_grad.mT
            grad_v.view(-1, v.shape[-1]).index_add_(0, flat, shares.reshape(-1, v.shape[-1]))
            grad_probs = (values @ own_grad).squeeze(-1)
            grad_logits = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))
            grad_scores = grad_logits
            if factor is not None and grad_factor is not None:
                grad_scores = grad_logits * factor[:, :, rows]
                grads = grad_logits * scores
                grad_factor[:, :, rows] = grads if factor.shape[0] == grads.shape[0] else grads.sum(0, keepdim=True)
            grad_q[:, :, rows] = (grad_scores.unsqueeze(-2) @ gathered).squeeze(-2)
            pairs = grad_scores.unsqueeze(-1) * queries.unsqueeze(-2)
            grad_k.view(-1, k.shape[-1]).index_add_(0, flat, pairs.reshape(-1, k.shape[-1]))
        return grad_q, grad_k, grad_v, None, grad_factor


# CPU: measured with keys of a predictor, 64 to 2304 patches, 6 heads of 64, on one busy core
# (`tasks.benchmark predictor`). Copying a key costs as much as thirty to fifty keys of dense attention. CUDA: not
# measured, but counted for an H100: a listed pair moves some 1.5 KB, 0.4 ns, where a pair of dense attention with a
# mask takes 256 operations, 1.3 ps in half precision and four times as long in float32.
register_backend(
    "gather",
    can_run=gather_can_run,
    run=gather,
    priority=20,
    crossovers={
        **{("cpu", False, dense): Crossover(400, 1 / 50) for dense in ("sdpa", "reference")},
        **{("cpu", True, dense): Crossover(1024, 1 / 64) for dense in ("sdpa", "reference")},
        **{
            ("cuda", trains, dense): Crossover(4096, 1 / 64)
            for trains in (False, True)
            for dense in ("sdpa", "reference")
        },
        **{
            ("cuda", trains, "sdpa", dtype): Crossover(4096, 1 / 400)
            for trains in (False, True)
            for dtype in (torch.float16, torch.bfloat16)
        },
    },
)
