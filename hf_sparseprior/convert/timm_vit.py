"""ViT, DeiT, DeiT-III and DINO under timm's names, which the original DeiT and DINO files share.

timm files carry no config: the architecture is read off the shapes, the number of heads off the width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

# Width to heads of the published models: tiny, small, base, large, huge.
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}
RENAMES = [
    (r"^cls_token$", "vit.embeddings.class_token"),
    (r"^dist_token$", "vit.embeddings.distillation_token"),
    (r"^reg_token$", "vit.embeddings.register_tokens"),
    (r"^pos_embed$", "vit.embeddings.position_embeddings"),
    (r"^patch_embed\.proj\.", "vit.embeddings.projection."),
    (r"^blocks\.(\d+)\.", r"vit.layers.\1."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.(ls1\.gamma|gamma_1)$", ".layerscale_attention.scale"),
    (r"\.(ls2\.gamma|gamma_2)$", ".layerscale_mlp.scale"),
    (r"^norm\.", "vit.layernorm."),
    (r"^head_dist\.", "distillation_classifier."),
    (r"^head\.", "classifier."),
]


def matches(keys: Iterable[str]) -> bool:
    """Whether these are timm's parameter names of a ViT."""
    return {"patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"} <= set(keys)


def fields(state: dict[str, Tensor], config: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes; `config` may give num_attention_heads."""
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    heads = (config or {}).get("num_attention_heads") or HEADS.get(width)
    if heads is None:
        raise ValueError(f"width {width} is of no published model ({', '.join(map(str, HEADS))}): give --heads")
    prefix = int("cls_token" in state) + int("dist_token" in state)
    positions = state["pos_embed"].shape[1]
    # DeiT-III gives the class token no position.
    counts = [count for count in (prefix, 0) if math.isqrt(positions - count) ** 2 == positions - count]
    if not counts:
        raise ValueError(f"pos_embed: {positions} positions are no square grid, with or without {prefix} prefix tokens")
    side = math.isqrt(positions - counts[0])
    scale = next((state[key] for key in ("blocks.0.ls1.gamma", "blocks.0.gamma_1") if key in state), None)
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": list(patch),
        "image_size": [side * patch[0], side * patch[1]],
        "num_hidden_layers": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        "num_attention_heads": heads,
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "use_class_token": "cls_token" in state,
        "pooling": "class_token" if "cls_token" in state else "mean",
        "use_distillation_token": "dist_token" in state,
        "num_register_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "position_embedding_for_class_token": counts[0] > 0,
        "layerscale_value": None if scale is None else float(scale.float().mean()),
        "layer_norm_eps": 1e-6,
        "num_labels": state["head.weight"].shape[0] if "head.weight" in state else 2,
    }


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names, the joint query, key and value projection in three."""
    renamed = {}
    for key, value in state.items():
        name = key
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        if ".attn.qkv." in name:
            for part, third in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
                renamed[name.replace(".attn.qkv.", f".attention.{part}.")] = third.contiguous()
        else:
            renamed[name] = value
    return renamed
