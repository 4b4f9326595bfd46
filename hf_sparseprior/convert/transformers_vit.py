"""ViT, DeiT and DINOv2 (with and without registers) of transformers, under the names of version 4 and of version 5."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers)\.")
RENAMES = [
    (r"^embeddings\.cls_token$", "embeddings.class_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "embeddings.projection."),
    (r"^encoder\.layer\.(\d+)\.", r"layers.\1."),
    (r"\.attention\.attention\.query\.", ".attention.q_proj."),
    (r"\.attention\.attention\.key\.", ".attention.k_proj."),
    (r"\.attention\.attention\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(layers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"\.layer_scale1\.lambda1$", ".layerscale_attention.scale"),
    (r"\.layer_scale2\.lambda1$", ".layerscale_mlp.scale"),
]
# Parts that image models carry for pretraining and that no output of ours depends on.
UNUSED = ("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias")
SHARED = [
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps", "image_size"),
    *("patch_size", "num_channels", "qkv_bias", "initializer_range", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "drop_path_rate", "num_register_tokens"),
]


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of transformers."""
    return any(PREFIX.sub("", key) == "embeddings.patch_embeddings.projection.weight" for key in keys)


def fields(state: dict[str, Tensor], config: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the source's config.json."""
    if config is None:
        raise ValueError("a checkpoint of transformers needs its config.json beside the weights")
    kind = config.get("model_type")
    if kind not in ("vit", "deit", "dinov2", "dinov2_with_registers"):
        raise ValueError(f"model_type={kind!r} must be one of vit, deit, dinov2, dinov2_with_registers")
    if config.get("use_swiglu_ffn"):
        raise ValueError("use_swiglu_ffn=True: a gated MLP has no counterpart in SparsePriorViT")
    taken = {name: config[name] for name in SHARED if name in config}
    taken["use_distillation_token"] = kind == "deit"
    if kind.startswith("dinov2"):
        taken["intermediate_size"] = int(config["hidden_size"] * config.get("mlp_ratio", 4))
        taken["layerscale_value"] = config.get("layerscale_value", 1.0)
    else:
        taken["intermediate_size"] = config["intermediate_size"]
    for name in ("id2label", "label2id"):
        if config.get(name):
            taken[name] = config[name]
    return taken


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names; names that are not known stay as they are, for the list of what is left over."""
    renamed = {}
    for key, value in state.items():
        name = PREFIX.sub("", key)
        if name in UNUSED:
            continue
        if name.startswith(("classifier.", "cls_classifier.", "distillation_classifier.")):
            renamed[name.replace("cls_classifier.", "classifier.")] = value
            continue
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        renamed["vit." + name] = value
    return renamed
