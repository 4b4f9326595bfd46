"""VisionTransformer of mmsegmentation, read only: timm's ViT under the names that mm's vit2mmseg.py gives it.

Files carry no config. Those of a model without `patch_bias` have no bias of the embedding, which is 0 here. Those of a
model without `final_norm` lack the last norm, which every model of ours has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_sparseprior.convert import timm_vit

TARGETS = ()  # nothing is written in this format
FAMILY = timm_vit.FAMILY
# mm's part of a name and timm's.
NAMES = (
    (r"^layers\.", "blocks."),
    (r"^ln1\.", "norm."),
    (r"\.ln([12])\.", r".norm\1."),
    (r"\.attn\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.attn\.out_proj\.", ".attn.proj."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
)


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of mmsegmentation's VisionTransformer."""
    return {"patch_embed.projection.weight", "pos_embed", "layers.0.attn.attn.in_proj_weight"} <= set(keys)


def timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under timm's names. Unknown names stay as they are."""
    renamed = {}
    for key, value in state.items():
        for theirs, timms in NAMES:
            key = re.sub(theirs, timms, key)
        renamed[key] = value
    weight = renamed["patch_embed.proj.weight"]
    renamed.setdefault("patch_embed.proj.bias", weight.new_zeros(len(weight)))
    return renamed


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """As of timm's files; `settings` may give num_attention_heads."""
    taken = timm_vit.fields(timm_names(state), settings)
    del taken["layer_norm_eps"]
    return taken


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """What mm's configs choose and files do not say, with these words."""
    return {"layer_norm_eps": (timm_vit.NORM_EPS, f"{timm_vit.NORM_EPS} (as in mmsegmentation's configs)")}


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names of those left out."""
    return timm_vit.rename(timm_names(state))
