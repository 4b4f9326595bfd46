"""Dense attention: `reference`, the specification of every backend, and `sdpa`, torch's own.

Shape letters as in `ops`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.attention.choice import register_backend
from hf_sparseprior.attention.key_selection import largest
from hf_sparseprior.attention.plain_operations import plain
from hf_sparseprior.attention.request import (
    AttentionRequest,
    add_bias,
    decay_placement,
    is_transformed,
    is_windowed,
    off_grid_pairs,
    pair_mask,
    token_positions,
)
from hf_sparseprior.base.resolved import DecayTensors
from hf_sparseprior.patterns.decay import decay_mask, prefix_weights

# ---- reference ------------------------------------------------------------------------------------------------------


def reference_can_run(request: AttentionRequest) -> str | None:
    """It runs everything."""
    return None


def reference(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """Dense attention with the mask and the decay written out (Fibottention Eq. 1, VIOLIN Eq. 12)."""
    dtype = request.compute_dtype()
    logits = (request.q.to(dtype) * request.logit_scale()) @ request.k.to(dtype).transpose(-1, -2)
    decay_HTT = None
    if request.decay is not None:
        decay_HTT = dense_decay(request, dtype)
        logits = _decayed_logits(request.decay, decay_HTT, logits)
    support_mask = pair_mask(request)
    if support_mask is not None and not request.drops_after_softmax():
        logits = logits.masked_fill(~support_mask, -math.inf if request.plan.mask_fill == "neg_inf" else 0.0)
    if request.bias is not None:
        logits = add_bias(logits, request.bias)
    presence = None if request.keep_mask is None else _pair_presence(request.keep_mask)
    mask = support_mask
    if request.top_k is not None and request.top_k < logits.shape[-1]:
        candidates = logits if presence is None else logits.masked_fill(presence == 0, -math.inf)
        chosen = largest(candidates, request.top_k)
        logits = logits.masked_fill(~chosen, -math.inf)
        mask = chosen if mask is None else mask & chosen
    weights = torch.softmax(logits, -1) if presence is None else _softmax_of_present(logits, presence)
    if support_mask is not None and request.drops_after_softmax():
        weights = weights * support_mask
    if request.decay is not None and decay_HTT is not None:
        if presence is not None:
            mask = presence > 0 if mask is None else mask & (presence > 0)
        weights = _decayed_weights(request.decay, decay_HTT, weights, mask)
    weights = F.dropout(weights, request.dropout_p)
    out = weights @ request.v.to(dtype)
    return out.to(request.q.dtype), weights.to(request.q.dtype) if request.needs_all_weights() else None


def _pair_presence(keep_mask: Tensor) -> Tensor:
    """G (B, 1, T, T) of keep_mask (B, T): 1 where a query sees a key. A query always sees itself."""
    eye = torch.eye(keep_mask.shape[1], dtype=keep_mask.dtype, device=keep_mask.device)
    return (keep_mask.unsqueeze(1) + (1.0 - keep_mask.unsqueeze(1)) * eye).unsqueeze(1)


def _softmax_of_present(logits: Tensor, presence: Tensor) -> Tensor:
    """exp(logit) G divided by its sum, so that a dropped key has a gradient too (attention masking, Rao et al. 2021).

    The published code adds 1e-6 to every sum. Here sums are kept above 1e-6, so nothing changes if nothing is dropped.
    """
    weights = torch.exp(logits - logits.detach().amax(-1, keepdim=True)) * presence.to(logits.dtype)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)


def _decayed_logits(decay: DecayTensors, decay_HTT: Tensor, logits: Tensor) -> Tensor:
    """The logits with alpha, and with M if it acts before the softmax (`decay.PLACEMENTS`)."""
    placement, (of_logits, of_mask) = decay_placement(decay), _alphas(decay, logits.dtype)
    if placement == "multiply":
        return logits * _multiplied(_multiplied(decay_HTT, of_logits), of_mask)
    if placement == "residual":
        return logits * _multiplied(1.0 + _multiplied(decay_HTT, of_mask), of_logits)
    logits = _multiplied(logits, of_logits)
    return logits + _multiplied(decay_HTT - 1.0, of_mask) if placement == "add" else logits


def _decayed_weights(decay: DecayTensors, decay_HTT: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax's weights, with M if it acts after the softmax. Pairs outside the support stay as they are."""
    placement, (_, of_mask) = decay_placement(decay), _alphas(decay, weights.dtype)
    if placement == "multiply_after":
        factor = _multiplied(decay_HTT, of_mask)
        return weights * (factor if mask is None else factor.masked_fill(~mask, 1.0))
    if placement in ("add_after", "add_after_as_printed"):
        added = _multiplied(decay_HTT - 1.0 if placement == "add_after" else decay_HTT, of_mask)
        return weights + (added if mask is None else added.masked_fill(~mask, 0.0))
    return weights


def _alphas(decay: DecayTensors, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The factors of the logits and of M, (H, 1, 1): alpha of one of them, None for the other."""
    alpha_H = decay.get("alpha")
    alpha = None if alpha_H is None else alpha_H.to(dtype).view(-1, 1, 1)
    return (None, alpha) if decay.get("alpha_scales") == "mask" else (alpha, None)


def _multiplied(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values * factor


def dense_decay(request: AttentionRequest, dtype: torch.dtype) -> Tensor:
    """M with the prefix rows and columns, (H, T, T); (B, H, T, T) if each image has its own patches."""
    assert request.decay is not None
    weights = decay_mask(request.decay, token_positions(request), dtype)
    gamma_H = prefix_weights(request.decay, dtype)
    if request.token_ids is not None:
        outside = torch.ones((), dtype=dtype, device=weights.device) if gamma_H is None else gamma_H.view(-1, 1, 1)
        weights = torch.where(off_grid_pairs(request.token_ids).unsqueeze(1), outside, weights.transpose(0, 1))
    if prefix := request.plan.num_prefix_tokens:
        if gamma_H is None:
            weights = F.pad(weights, (prefix, 0, prefix, 0), value=1.0)
        else:
            *leading, tokens, _ = weights.shape
            columns = gamma_H.view(-1, 1, 1).expand(*leading, tokens, prefix)
            rows = gamma_H.view(-1, 1, 1).expand(*leading, prefix, prefix + tokens)
            weights = torch.cat([rows, torch.cat([columns, weights], -1)], -2)
    return weights


def leading_weights(request: AttentionRequest, rows: int) -> Tensor:
    """Attention weights (B, H, rows, T) of prefix tokens, before dropout, float32 at least; no (T, T) is formed."""
    dtype = request.compute_dtype()
    logits = (request.q[:, :, :rows].to(dtype) * request.logit_scale()) @ request.k.to(dtype).transpose(-1, -2)
    decay_H11 = None
    if request.decay is not None:
        gamma_H = prefix_weights(request.decay, dtype)
        decay_H11 = torch.ones_like(logits[:1, :, :1, :1]) if gamma_H is None else gamma_H.view(1, -1, 1, 1)
        logits = _decayed_logits(request.decay, decay_H11, logits)
    chosen = None
    if request.top_k is not None and request.top_k < logits.shape[-1]:
        chosen = largest(logits, request.top_k)
        logits = logits.masked_fill(~chosen, -math.inf)
    weights = torch.softmax(logits, -1)
    if request.decay is not None and decay_H11 is not None:
        weights = _decayed_weights(request.decay, decay_H11, weights, chosen)
    return weights


# ---- sdpa -----------------------------------------------------------------------------------------------------------


def sdpa_can_run(request: AttentionRequest) -> str | None:
    """None, or which part of the request torch's own attention cannot do."""
    if request.decay is not None:
        return "a decay multiplies the logits, which scaled_dot_product_attention cannot do"
    if request.plan.offsets is not None and request.plan.mask_fill == "zero":
        return "mask_fill='zero' keeps exp(0) for masked pairs, which scaled_dot_product_attention cannot do"
    if request.needs_all_weights():
        return "scaled_dot_product_attention does not return attention weights"
    if request.top_k is not None:
        return "only the largest logits are kept, which scaled_dot_product_attention does not return"
    if request.keep_mask is not None:
        return "dropped keys have a gradient, which scaled_dot_product_attention does not compute"
    if request.drops_after_softmax():
        return "the softmax runs over all keys before some are dropped, which scaled_dot_product_attention cannot do"
    return is_transformed()


def sdpa(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """torch's own dense attention, with a boolean mask if there is a support."""
    mask = pair_mask(request)
    if mask is not None and mask.dim() == 3:  # otherwise torch takes a CPU kernel two to five times slower
        mask = mask.unsqueeze(0)
    if request.bias is not None:
        bias = request.bias.to(request.q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    q, k, v = request.q, request.k, request.v
    windows = mask.shape[0] if mask is not None and is_windowed(mask, q.shape[0]) else 1
    if windows > 1:  # an image's windows become heads, so that their biases are not repeated for every image
        assert mask is not None
        mask = mask.expand(-1, q.shape[1], -1, -1).flatten(0, 1).unsqueeze(0)
        q, k, v = (tensor.unflatten(0, (-1, windows)).flatten(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=request.dropout_p, scale=request.logit_scale()
    )
    if plain() is not None:  # its layout in memory is that of one kernel, and what follows must not rely on it
        out = out.contiguous()
    return out if windows == 1 else out.unflatten(1, (windows, -1)).flatten(0, 1), None


register_backend("reference", can_run=reference_can_run, run=reference, priority=0, dense=True)
register_backend("sdpa", can_run=sdpa_can_run, run=sdpa, priority=10, dense=True)
