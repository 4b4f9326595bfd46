"""Attention of timm's vision transformers with a prior: the forwards of modules in which `apply_prior` put a
`StockPrior`.

They have the arguments of timm's own. `qkv` is called, not its weight as in EvaAttention, so that LoRA on it acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, StockPrior, within_regions
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest


def class_path(module: nn.Module) -> str:
    """The full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def plain_attention(module: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The forward of timm's `Attention`. Arguments as in `rotary_attention`."""
    if _prior_of(module).is_idle:
        return type(module).forward(module, x, attn_mask, is_causal)
    return _self_attention(module, x, None, attn_mask, is_causal)


def rotary_attention(
    module: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The forward of timm's `AttentionRope` and `EvaAttention`.

    Args:
        module: the attention module.
        x: (B, T, C).
        rope: rotary positions of the patches, in the form of timm's `apply_rot_embed_cat`.
        attn_mask: added to the logits after decay and support, or boolean, True = attended; broadcastable to
            (B, H, T, T).
        is_causal: each token sees itself and those before it, and `attn_mask` is left out, as in timm.
    """
    if _prior_of(module).is_idle:
        return type(module).forward(module, x, rope, attn_mask, is_causal)
    return _self_attention(module, x, rope, attn_mask, is_causal)


def window_attention(module: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The forward of the `WindowAttention` of timm's Swin.

    Args:
        module: the attention module.
        x: (B * windows, T, C), the windows of one image in a row.
        mask: (windows, T, T), added to the logits where the windows are shifted.
    """
    prior = _prior_of(module)
    if prior.is_idle:
        return type(module).forward(module, x, mask)
    bias, plan = module._get_rel_pos_bias(), prior.plan(module.window_size)
    if mask is not None:
        bias, plan = within_regions(bias + mask[:, None], prior, module.window_size)
    q, k, v = _split(module, module.qkv(x))
    return module.proj_drop(module.proj(_attend(module, q, k, v, plan, bias)))


# By the class of the attention.
FORWARDS: dict[str, Callable[..., Tensor]] = {
    "timm.layers.attention.Attention": plain_attention,
    "timm.layers.attention.AttentionRope": rotary_attention,
    "timm.models.eva.EvaAttention": rotary_attention,
    "timm.models.swin_transformer.WindowAttention": window_attention,
}


def _self_attention(module: Any, x: Tensor, rope: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Attention of all tokens, with everything that timm's three modules for it have around it."""
    prior = _prior_of(module)
    q, k, v = _project(module, x)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = (_rotate(module, tokens, rope).type_as(v) for tokens in (q, k))
    if (group := q.shape[1] // k.shape[1]) > 1:  # grouped queries
        k, v = (tokens.repeat_interleave(group, dim=1) for tokens in (k, v))
    grid, num_prefix_tokens, _ = prior.layout.locate(q.shape[2])
    bias = _mask_bias(attn_mask, is_causal, q)
    out = module.norm(_attend(module, q, k, v, prior.plan(grid, num_prefix_tokens), bias))
    if module.gate is not None:
        out = out * module.gate(x).sigmoid()
    return module.proj_drop(module.proj(out))


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, bias: Tensor | None) -> Tensor:
    """Outputs of the heads side by side, (B, T, H * D)."""
    dropout_p = module.attn_drop.p if module.training else 0.0
    # Norms of queries and keys come out in float32 under autocast, values do not.
    q, k = q.to(v.dtype), k.to(v.dtype)
    request = AttentionRequest(q, k, v, plan, scale=module.scale, dropout_p=dropout_p, bias=bias)
    return _prior_of(module).attend(request)[0].transpose(1, 2).flatten(2)


def _project(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries (B, H, T, D), keys and values, of which there may be fewer heads."""
    if module.qkv is None:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        return tuple(layer(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for layer in projections)
    qkv = module.qkv(x)
    if getattr(module, "q_bias", None) is not None:  # EvaAttention, whose keys have none
        qkv = qkv + torch.cat([module.q_bias, module.k_bias, module.v_bias]).to(qkv.dtype)
    return _split(module, qkv)


def _split(module: Any, qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _rotate(module: Any, tokens: Tensor, rope: Tensor) -> Tensor:
    """Tokens (B, H, T, D) with the patches turned by their positions."""
    try:  # the module is timm's; what is imported elsewhere, transformers asks of everybody who loads a saved folder
        from timm.layers import apply_rot_embed_cat
    except ImportError:
        raise
    prefix, patches = tokens.tensor_split([module.num_prefix_tokens], 2)
    return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=module.rotate_half)], 2)


def _mask_bias(mask: Tensor | None, is_causal: bool, q: Tensor) -> Tensor | None:
    """The bias (1 or B, 1 or H, T, T) that a mask is."""
    if is_causal:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    return mask[(None,) * (4 - mask.dim())]


def _prior_of(module: nn.Module) -> StockPrior:
    return getattr(module, PRIOR_MODULE)
