"""DINOv3's ViT of transformers, both ways: `DINOv3ViTModel`, and weights of `DINOv3ViTBackbone`.

Its positions are rotary. Files have the names of version 4 ("layer.0"), memory those of version 5 ("model.layer.0"). A
gated MLP, which the models "plus" and of 7 billion parameters have, has no counterpart in SparsePriorViT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DINOv3ViTConfig, DINOv3ViTModel

from hf_sparseprior.convert.common import (
    ONLY_OURS,
    field_problems,
    is_of_stock_prior,
    one_if_square,
    plain_weights,
    prior_weight_name,
    recorded_prior,
    refuse,
    save_for_transformers,
)
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair

KIND = "dinov3_vit"
TARGETS = (KIND,)
FAMILY = SparsePriorViTConfig.model_type
MASK_TOKEN = "embeddings.mask_token"
PREFIX = re.compile(r"^model\.(?=layer\.)")
# Our part of a name, theirs.
NAMES = (
    ("embeddings.class_token", "embeddings.cls_token"),
    ("embeddings.projection.", "embeddings.patch_embeddings."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".layerscale_attention.scale", ".layer_scale1.lambda1"),
    (".layerscale_mlp.scale", ".layer_scale2.lambda1"),
    (".mlp.fc1.", ".mlp.up_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
)
# Our field, theirs.
FIELDS = {
    **{
        name: name
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
            *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "layerscale_value", "drop_path_rate"),
            *("num_register_tokens", "initializer_range", "proj_bias", "mlp_bias", "key_bias"),
        )
    },
    "attention_probs_dropout_prob": "attention_dropout",
    "qkv_bias": "query_bias",
    "rotary_base": "rope_theta",
    "rotary_shift": "pos_embed_shift",
    "rotary_jitter": "pos_embed_jitter",
    "rotary_rescale": "pos_embed_rescale",
}
ALLOWED: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in ONLY_OURS.items() if name != "key_bias"},
    "use_class_token": (True,),
    "use_distillation_token": (False,),
    "pooling": ("class_token",),
    "position_embedding": ("rotary",),
}


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of DINOv3's ViT in transformers."""
    return {"embeddings.patch_embeddings.weight", "embeddings.register_tokens"} <= set(keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the source's config.json, with the prior of `apply_prior` if it has one.
    Missing fields have the default of the source's class.

    Raises:
        ValueError: without a config.json, for other models, for a gated MLP, and for a prior that config.json does not
            name.
    """
    if settings is None:
        raise ValueError("a checkpoint of transformers needs its config.json next to the weights")
    if (kind := settings.get("model_type")) != KIND:
        raise ValueError(f"model_type={kind!r} must be {KIND}")
    config = {**DINOv3ViTConfig().to_dict(), **settings}
    if config["use_gated_mlp"]:
        raise ValueError("use_gated_mlp=True: a gated MLP has no counterpart in SparsePriorViT")
    if config["query_bias"] != config["value_bias"]:
        raise ValueError(f"value_bias={config['value_bias']} must be query_bias={config['query_bias']}")
    if config["key_bias"] and not config["query_bias"]:
        raise ValueError("key_bias=True must be False with query_bias=False")
    taken = {ours: config[theirs] for ours, theirs in FIELDS.items()}
    taken |= {"use_class_token": True, "pooling": "class_token", "position_embedding": "rotary"}
    if (prior := recorded_prior(state, settings)) is not None:
        taken["prior"] = prior
    for name in ("apply_layernorm", "reshape_hidden_states", "image_mean", "image_std"):
        if settings.get(name) is not None:
            taken[name] = settings[name]
    return taken


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names of those left out. Unknown names stay as they are."""
    renamed, unused = {}, []
    for key, value in state.items():
        name = re.sub(r"^layer\.", "layers.", PREFIX.sub("", key))
        if is_of_stock_prior(name):
            continue
        if name == MASK_TOKEN:
            unused.append(key)
        elif name == "embeddings.register_tokens" and not value.numel():
            continue  # an empty one, where ours has none
        elif (scalar_name := prior_weight_name(name)) is not None:
            renamed[scalar_name] = value
        else:
            for ours, theirs in NAMES:
                name = name.replace(theirs, ours)
            renamed["vit." + re.sub(r"^norm\.", "layernorm.", name)] = value
    return renamed, unused


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that DINOv3's class cannot express."""
    problems = field_problems(model.config, ALLOWED)
    if model.config.layerscale_value is None:
        problems.append("layerscale_value=None must be a number")
    if hasattr(model, "classifier"):
        problems.append("it has no classifier of images; --drop-classifier leaves ours out")
    refuse(target, problems)


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write config.json, model.safetensors and preprocessor_config.json that DINOv3ViTModel loads.

    Returns:
        The class that was written, then notes for the user.

    Raises:
        OSError: if transformers' own class does not find exactly its weights in the folder.
    """
    ours, weights = model.config, {_their_name(key): value for key, value in plain_weights(model).items()}
    dtype = weights["embeddings.cls_token"].dtype
    weights[MASK_TOKEN] = torch.zeros(1, 1, ours.hidden_size, dtype=dtype)
    if not ours.num_register_tokens:
        weights["embeddings.register_tokens"] = torch.zeros(1, 0, ours.hidden_size, dtype=dtype)
    taken = {theirs: getattr(ours, name) for name, theirs in FIELDS.items()}
    for name in ("image_size", "patch_size"):
        taken[name] = one_if_square(as_pair(taken[name]))
    for name in ("layer_norm_eps", "initializer_range", "layerscale_value", "rope_theta"):
        taken[name] = float(taken[name])  # their configs are typed, and an integer is no float to them
    for name in ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"):
        taken[name] = None if taken[name] is None else float(taken[name])
    taken |= {"value_bias": ours.qkv_bias, "key_bias": ours.qkv_bias and ours.key_bias, "use_gated_mlp": False}
    config = DINOv3ViTConfig(**taken, dtype=dtype, architectures=[DINOv3ViTModel.__name__])
    save_for_transformers(DINOv3ViTModel, config, weights, folder, ours)
    notes = ["note: mask_token, which only pretraining uses, is 0"]
    if ours.hidden_dropout_prob:
        notes.append(f"note: hidden_dropout_prob={ours.hidden_dropout_prob:g} is left out, {target} has none")
    if ours.drop_path_rate:
        notes.append(f"note: drop_path_rate={ours.drop_path_rate:g} is that of every layer there, of the last one here")
    return [f"{type(model).__name__} as {DINOv3ViTModel.__name__}", *notes]


def _their_name(key: str) -> str:
    name = re.sub(r"^layernorm\.", "norm.", key.removeprefix("vit."))
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return re.sub(r"^layers\.", "layer.", name)
