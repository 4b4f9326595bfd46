"""Attention written out, in blocks of query rows: what contenders at large sizes are compared with.

`reference`, the library's specification, has the weights of all pairs at once, 4 GB for ViT-B at 1536 px.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_sparseprior.attention.choice import register_backend, unregister_backend
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.token_order import RASTER
from tasks.benchmark.model_contenders import forced_backend

PLAIN = "plain_rows"
ROWS = 256


def can_run(request: AttentionRequest) -> str | None:
    """None, or why not: it knows dense attention and supports of offsets in raster order, for prefix tokens or not."""
    plan = request.plan
    if request.decay is not None or request.bias is not None or request.need_weights:
        return "written without decay, bias and weights"
    if plan.pairs is not None or plan.ranks is not None or plan.layout != RASTER or plan.mask_fill != "neg_inf":
        return "written for offsets in raster order"
    return None


def run(request: AttentionRequest) -> tuple[Tensor, None]:
    """softmax(q k^T / sqrt(D)) v over the pairs that a support keeps, (B, H, T, D), in the dtype of q."""
    q, k, v = (tokens.to(request.compute_dtype()) for tokens in (request.q, request.k, request.v))
    parts = []
    for start in range(0, q.shape[2], ROWS):
        rows = range(start, min(start + ROWS, q.shape[2]))
        logits = q[:, :, start : rows.stop] @ k.transpose(-1, -2) * request.logit_scale()
        if (seen := seen_rows(request.plan, rows)) is not None:
            logits = logits.masked_fill(~seen, -math.inf)
        parts.append(logits.softmax(-1) @ v)
    return torch.cat(parts, 2).to(request.q.dtype), None


def seen_rows(plan: AttentionPlan, rows: range) -> Tensor | None:
    """Bool (H, rows, T): two patches see each other if their distance is an offset; prefix tokens see and are seen, and
    so is each token by itself where it would see nothing. None: everything is seen.
    """
    if plan.offsets is None:
        return None
    tokens, prefix = torch.arange(plan.total), plan.num_prefix_tokens
    queries = tokens[rows.start : rows.stop, None]
    distance = (queries - tokens).abs()
    is_offset = torch.zeros(plan.num_heads, plan.total, dtype=torch.bool)
    for head, own in enumerate(plan.offsets):
        is_offset[head, list(own)] = True
    seen = is_offset[:, distance]
    seen |= (queries < prefix) | (tokens < prefix)
    return seen | ((distance == 0) & ~seen.any(-1, keepdim=True))


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, every attention is `run`."""
    register_backend(PLAIN, can_run=can_run, run=run, priority=-1)
    try:
        with forced_backend(PLAIN):
            yield
    finally:
        unregister_backend(PLAIN)
