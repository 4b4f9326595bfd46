"""Attention of transformers' TimeSformer with a prior, whose modules compute it without `AttentionInterface`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, StockPrior
from hf_sparseprior.attention.request import AttentionRequest


def timesformer_attention(module: Any, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
    """The forward of a `TimesformerSelfAttention` in which `apply_prior` put a `StockPrior`.

    Args:
        module: the attention module.
        hidden_states: (B, T, C), the tokens of a frame, or of joint attention those of a clip, each patch's frames in a
            row.
        output_attentions: also return the weights (B, H, T, T).
    """
    prior: StockPrior = getattr(module, PRIOR_MODULE)
    if prior.is_idle:
        return type(module).forward(module, hidden_states, output_attentions)
    q, k, v = module.qkv(hidden_states).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    grid, prefix, _ = prior.layout.locate(q.shape[2])
    frames = grid[0] if len(grid) == 3 else 1
    q, k, v = (_frames_first(tokens, prefix, frames, 2) for tokens in (q, k, v))
    request = AttentionRequest(
        q,
        k,
        v,
        prior.plan(grid, prefix),
        scale=module.scale,
        dropout_p=module.attn_drop.p if module.training else 0.0,
        need_weights=output_attentions,
    )
    out, weights = prior.attend(request)
    context = _frames_last(out, prefix, frames, 2).transpose(1, 2).flatten(2)
    if weights is None:
        return (context,)
    return context, _frames_last(_frames_last(weights, prefix, frames, 2), prefix, frames, 3)


def _frames_first(tokens: Tensor, num_prefix_tokens: int, frames: int, axis: int) -> Tensor:
    """Tokens with each patch's frames in a row along an axis, frame after frame."""
    return _turned(tokens, num_prefix_tokens, (-1, frames), axis)


def _frames_last(tokens: Tensor, num_prefix_tokens: int, frames: int, axis: int) -> Tensor:
    """The inverse of `_frames_first`."""
    return _turned(tokens, num_prefix_tokens, (frames, -1), axis)


def _turned(tokens: Tensor, num_prefix_tokens: int, sizes: tuple[int, int], axis: int) -> Tensor:
    if 1 in sizes:
        return tokens
    prefix, patches = tokens.tensor_split([num_prefix_tokens], axis)
    turned = patches.unflatten(axis, sizes).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return torch.cat([prefix, turned], axis)
