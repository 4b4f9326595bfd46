"""SigLIP's vision tower of transformers, both ways: `SiglipVisionModel` and `SiglipForImageClassification`.

The tower is a ViT without a class token. Its classifier averages the patches, as "mean" pooling does. The attention
pooling of the bare tower has no counterpart in SparsePriorViT and is left out by --drop-classifier. Of a `SiglipModel`
the text tower is left out. Names in files are those of version 4, where the tower is "vision_model" in every class.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import SiglipConfig, SiglipForImageClassification, SiglipVisionConfig, SiglipVisionModel

from hf_sparseprior.convert.common import (
    ATTENTION_POOLING,
    ONLY_OURS,
    field_problems,
    is_of_stock_prior,
    plain_weights,
    prior_weight_name,
    recorded_prior,
    refuse,
    save_for_transformers,
    square_problems,
)
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair

TARGETS = ("siglip",)
FAMILY = SparsePriorViTConfig.model_type
KINDS = ("siglip", "siglip_vision_model")  # of a config with both towers, of one with this tower alone
TOWER = "vision_model."
MEAN = [0.5, 0.5, 0.5]  # normalisation of every published model

# Our part of a name, theirs.
NAMES = (
    ("embeddings.projection.", "embeddings.patch_embedding."),
    ("embeddings.position_embeddings", "embeddings.position_embedding.weight"),
    ("layers.", "encoder.layers."),
    (".layernorm_before.", ".layer_norm1."),
    (".layernorm_after.", ".layer_norm2."),
    (".attention.o_proj.", ".self_attn.out_proj."),
    (".attention.", ".self_attn."),
    ("layernorm.", "post_layernorm."),
)
# Our field, theirs.
FIELDS = {
    **{
        name: name
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
            *("image_size", "patch_size", "hidden_act", "layer_norm_eps"),
        )
    },
    "attention_probs_dropout_prob": "attention_dropout",
}
ALLOWED: dict[str, tuple[Any, ...]] = {
    **ONLY_OURS,
    "use_class_token": (False,),
    "num_register_tokens": (0,),
    "pooling": ("mean",),
    "position_embedding": ("learned",),
    "interpolation": ("bicubic",),
    "qkv_bias": (True,),
    "proj_bias": (True,),
    "mlp_bias": (True,),
    "layerscale_value": (None,),
}
# What ours may have in training and theirs has not.
LEFT_OUT = ("hidden_dropout_prob", "drop_path_rate")


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of SigLIP's vision tower, or of another one of CLIP's kind."""
    return any(key.removeprefix(TOWER) == "embeddings.patch_embedding.weight" for key in keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the source's config.json, with the prior of `apply_prior` if it has one.
    Missing fields have the default of the source's class.

    Raises:
        ValueError: without a config.json, for other models, and for a prior that config.json does not name.
    """
    if settings is None:
        raise ValueError("a checkpoint of transformers needs its config.json next to the weights")
    kind = settings.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"model_type={kind!r} must be {' or '.join(KINDS)}")
    tower = settings if kind == "siglip_vision_model" else settings.get("vision_config") or {}
    config = {**SiglipVisionConfig().to_dict(), **tower}
    taken = {ours: config[theirs] for ours, theirs in FIELDS.items()}
    taken |= {"use_class_token": False, "pooling": "mean"}
    if (prior := recorded_prior(state, settings)) is not None:
        taken["prior"] = prior
    for name in ("id2label", "label2id", "problem_type", "image_mean", "image_std"):
        if settings.get(name):
            taken[name] = settings[name]
    return taken


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """The normalisation of the published models, with these words."""
    return {name: (list(MEAN), f"SigLIP's {MEAN}") for name in ("image_mean", "image_std")}


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names of those left out. Unknown names stay as they are.

    With a classifier no output depends on the attention pooling. Without one it is a part of the classifier here, so
    that --drop-classifier leaves it out.
    """
    renamed, unused, classifies = {}, [], any(key.startswith("classifier.") for key in state)
    for key, value in state.items():
        name = key.removeprefix(TOWER)
        if is_of_stock_prior(name):
            continue
        if key.startswith("text_model.") or key in ("logit_scale", "logit_bias"):
            unused.append("the text tower")
        elif name == "embeddings.position_ids" or (classifies and name.startswith("head.")):
            unused.append(name)
        elif name.startswith("head."):
            renamed[ATTENTION_POOLING + name.removeprefix("head.")] = value
        elif (scalar_name := prior_weight_name(name)) is not None:
            renamed[scalar_name] = value
        elif name.startswith("classifier."):
            renamed[name] = value
        else:
            for ours, theirs in NAMES:
                name = name.replace(theirs, ours)
            renamed["vit." + name] = value[None] if name == "embeddings.position_embeddings" else value
    return renamed, list(dict.fromkeys(unused))


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that SigLIP's classes cannot express."""
    config = model.config
    refuse(target, [*field_problems(config, ALLOWED), *square_problems(config, "image_size", "patch_size")])


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write config.json, model.safetensors and preprocessor_config.json that SigLIP's classes load.

    Returns:
        The class that was written, then notes for the user.

    Raises:
        OSError: if transformers' own class does not find exactly its weights in the folder.
    """
    ours, weights = model.config, {_their_name(key): value for key, value in plain_weights(model).items()}
    positions = f"{TOWER}embeddings.position_embedding.weight"
    weights[positions] = weights[positions][0].contiguous()
    dtype = weights[positions].dtype
    taken = {theirs: getattr(ours, name) for name, theirs in FIELDS.items()}
    taken |= {name: as_pair(taken[name])[0] for name in ("image_size", "patch_size")}
    taken |= {"layer_norm_eps": float(ours.layer_norm_eps), "vision_use_head": False}
    cls, config = _their_config(model, taken, dtype)
    config.architectures = [cls.__name__]
    save_for_transformers(cls, config, weights, folder, ours)
    notes = [
        f"note: {name}={getattr(ours, name):g} is left out, {target} has none"
        for name in LEFT_OUT
        if getattr(ours, name)
    ]
    if not hasattr(model, "classifier"):
        notes.append("note: the tower has no head, and so no pooler_output")
    return [f"{type(model).__name__} as {cls.__name__}", *notes]


def _their_config(model: Any, tower: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The class that holds the model, and its config."""
    if not hasattr(model, "classifier"):
        return SiglipVisionModel, SiglipVisionConfig(**tower, dtype=dtype)
    labels = {name: getattr(model.config, name) for name in ("id2label", "label2id", "problem_type")}
    return SiglipForImageClassification, SiglipConfig(vision_config=tower, **labels, dtype=dtype)


def _their_name(key: str) -> str:
    if not key.startswith("vit."):
        return key  # a classifier
    name = key.removeprefix("vit.")
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return TOWER + name
