"""DINOv3's ViT under timm's names and in its original files, to ours. Other models with rotary positions, known by
their names alone, are refused in clear words.

Names of timm's models with fused queries, keys and values: `vit_small_patch16_dinov3` and those with biases (`_qkvb`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from hf_sparseprior.convert.common import IN_PLACE, one_if_square
from hf_sparseprior.convert.timm_vit import HEADS, data_fields, rename_block, replace_stem, split_qkv
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig

TARGETS: tuple[str, ...] = ()
FAMILY = SparsePriorViTConfig.model_type
QKV = {"blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight"}
REGISTERS = 4  # of every DINOv3
SIZE = 256  # of the images of timm's published models, if its folder does not say another
# Their stem of a name, ours.
STEMS = {
    "cls_token": "vit.embeddings.class_token",
    "reg_token": "vit.embeddings.register_tokens",
    "storage_tokens": "vit.embeddings.register_tokens",
    "patch_embed.proj": "vit.embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
# What no output depends on: of pretraining, and tables that follow from the config.
UNUSED = re.compile(r"mask_token|rope_embed\.periods|blocks\.\d+\.attn\.qkv\.bias_mask")
BIASES = {"q_bias": "q_proj.bias", "v_bias": "v_proj.bias"}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of a ViT whose positions are no weights, or of EVA-02."""
    names = set(keys)
    separate = "blocks.0.attn.q_proj.weight" in names
    return "patch_embed.proj.weight" in names and bool(QKV & names) and (separate or "pos_embed" not in names)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes and, in timm's folders, config.json.

    Raises:
        ValueError: for other models, and for a gated MLP.
    """
    settings = settings or {}
    arguments, architecture = settings.get("model_args") or {}, settings.get("architecture") or ""
    registers = next((state[name] for name in ("reg_token", "storage_tokens") if name in state), None)
    is_dinov3 = registers is not None and registers.shape[1] == REGISTERS and "cls_token" in state
    is_dinov3 &= any(name in state for name in ("blocks.0.gamma_1", "blocks.0.ls1.gamma"))
    is_dinov3 &= not any(name in state for name in ("rope.freqs", "fc_norm.weight", "blocks.0.attn.q_proj.weight"))
    if not is_dinov3 or (architecture and "_dinov3" not in architecture):
        refuse_rotary(architecture or "this model")
    if "blocks.0.mlp.fc1.weight" not in state:
        raise ValueError(f"{architecture or 'this model'}: a gated MLP (SwiGLU) has no counterpart in SparsePriorViT")
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    heads = arguments.get("num_heads") or HEADS.get(width)
    if heads is None:
        raise ValueError(f"width {width} is of no published model ({', '.join(map(str, HEADS))})")
    size = arguments.get("img_size") or SIZE
    pool = settings.get("global_pool") or arguments.get("global_pool") or ("avg" if architecture else "token")
    if pool not in ("token", "avg"):
        raise ValueError(f"global_pool={pool!r} must be 'token' or 'avg'")
    for name, known in (("act_layer", "gelu"), ("norm_layer", "layernorm"), ("rope_type", "dinov3")):
        if arguments.get(name) not in (None, known):
            raise ValueError(f"{name}={arguments[name]!r} must be {known}")
    labels = state["head.weight"].shape[0] if "head.weight" in state else 2
    biased = any(name in state for name in ("blocks.0.attn.q_bias", "blocks.0.attn.qkv.bias"))
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": one_if_square(patch),
        "image_size": size if isinstance(size, int) else one_if_square(size),
        "num_hidden_layers": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        "num_attention_heads": heads,
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": biased,
        "key_bias": not biased,
        "use_class_token": True,
        "pooling": "mean" if pool == "avg" else "class_token",
        "num_register_tokens": REGISTERS,
        "position_embedding": "rotary",
        "rotary_base": arguments.get("rope_temperature") or 100.0,
        "layerscale_value": 1e-5,
        "layer_norm_eps": 1e-5,
        "num_labels": labels,
        **data_fields(settings, labels),
    }


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, with the joint query, key and value projection split, and the names left out.

    Keys have no bias. The original files have zeros and a mask in its place.
    """
    renamed: dict[str, Tensor] = {}
    unused = [key for key in state if UNUSED.fullmatch(key)]
    for key, value in state.items():
        if key in unused:
            continue
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", key)
        if block is None:
            renamed[replace_stem(key, STEMS)] = value
        elif (bias := block[2].removeprefix("attn.")) in BIASES:
            renamed[f"vit.layers.{block[1]}.attention.{BIASES[bias]}"] = value
        else:
            renamed |= split_qkv(rename_block(block), value)
    if any(key.endswith("attn.qkv.bias") for key in state):
        renamed = {key: value for key, value in renamed.items() if not key.endswith("attention.k_proj.bias")}
    return renamed, unused


def refuse_rotary(name: str) -> NoReturn:
    """Raise ValueError for a model of this name."""
    raise ValueError(f"{name}: of models with rotary positions only DINOv3 is converted; {IN_PLACE}")
