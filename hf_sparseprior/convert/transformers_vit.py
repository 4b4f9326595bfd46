"""ViT, DeiT and DINOv2 (with and without registers) of transformers, both ways.

Version 5 has new names for its parameters in memory and keeps version 4's names in files. So version 4's are written,
and both are read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

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
    square_problems,
)
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair

TARGETS = ("vit", "deit", "dinov2", "dinov2_with_registers")
FAMILY = SparsePriorViTConfig.model_type
# Base model, classifier, and classifier with a second head on the distillation token.
CLASSES = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
}

PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers)\.")
# Our part of a name and version 4's, tried from the first to the last, because earlier ones contain later ones.
NAMES = (
    ("embeddings.class_token", "embeddings.cls_token"),
    ("embeddings.projection.", "embeddings.patch_embeddings.projection."),
    ("layers.", "encoder.layer."),
    (".attention.q_proj.", ".attention.attention.query."),
    (".attention.k_proj.", ".attention.attention.key."),
    (".attention.v_proj.", ".attention.attention.value."),
    (".attention.o_proj.", ".attention.output.dense."),
)
VIT_NAMES = (
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
)
DINOV2_NAMES = (
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".layerscale_attention.scale", ".layer_scale1.lambda1"),
    (".layerscale_mlp.scale", ".layer_scale2.lambda1"),
)
# Parts that image models carry for pretraining and that no output of ours depends on.
UNUSED = ("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias")
SHARED = [
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps", "image_size"),
    *("patch_size", "num_channels", "qkv_bias", "initializer_range", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "drop_path_rate", "num_register_tokens", "layerscale_value"),
    *("apply_layernorm", "reshape_hidden_states"),
]
# What the classes compute without a field in their configs.
_FIXED: dict[str, tuple[Any, ...]] = {
    **ONLY_OURS,
    "use_class_token": (True,),
    "position_embedding": ("learned",),
    "position_embedding_for_class_token": (True,),
    "interpolation": ("bicubic",),
    "proj_bias": (True,),
    "mlp_bias": (True,),
}
_VIT = {**_FIXED, "pooling": ("class_token",), "num_register_tokens": (0,), "layerscale_value": (None,)}
ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "vit": {**_VIT, "use_distillation_token": (False,)},
    "deit": {**_VIT, "use_distillation_token": (True,)},
    "dinov2": {**_FIXED, "use_distillation_token": (False,), "num_register_tokens": (0,)},
    "dinov2_with_registers": {**_FIXED, "use_distillation_token": (False,)},
}


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of transformers."""
    return any(PREFIX.sub("", key) == "embeddings.patch_embeddings.projection.weight" for key in keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the source's config.json, with the prior of `apply_prior` if it has one.
    Missing fields have the default of the source's class.

    Raises:
        ValueError: without a config.json, for other models, a gated MLP, and a prior that config.json does not name.
    """
    if settings is None:
        raise ValueError("a checkpoint of transformers needs its config.json next to the weights")
    kind = settings.get("model_type")
    if kind not in TARGETS:
        raise ValueError(f"model_type={kind!r} must be one of {', '.join(TARGETS)}")
    config = {**getattr(transformers, CLASSES[kind][0]).config_class().to_dict(), **settings}
    if config.get("use_swiglu_ffn"):
        raise ValueError("use_swiglu_ffn=True: a gated MLP has no counterpart in SparsePriorViT")
    taken = {name: config[name] for name in SHARED if name in config}
    if (prior := recorded_prior(state, settings)) is not None:
        taken["prior"] = prior
    classifies = any(key.startswith(("classifier.", "cls_classifier.")) for key in state)
    if kind.startswith("dinov2"):
        taken["intermediate_size"] = int(config["hidden_size"] * config["mlp_ratio"])
        taken["pooling"] = "class_token_and_mean" if classifies else "class_token"
    else:
        taken["intermediate_size"] = config["intermediate_size"]
        taken["use_distillation_token"] = kind == "deit"
        if kind == "deit" and classifies:
            taken["use_distillation_classifier"] = "distillation_classifier.weight" in state
    for name in ("id2label", "label2id", "problem_type", "image_mean", "image_std"):
        if settings.get(name):
            taken[name] = settings[name]
    return taken


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names of those left out. Unknown names stay as they are.

    A prior's scalars are called "layers.0.decay_bias.beta" in `stock_saving`, whatever the model is.
    """
    renamed, unused = {}, []
    for key, value in state.items():
        name = PREFIX.sub("", key)
        if is_of_stock_prior(name):
            continue
        if name in UNUSED:
            unused.append(key)
        elif (scalar_name := prior_weight_name(name)) is not None:
            renamed[scalar_name] = value
        elif name.startswith(("classifier.", "cls_classifier.", "distillation_classifier.")):
            renamed[name.replace("cls_classifier.", "classifier.")] = value
        else:
            for ours, theirs in (*NAMES, *VIT_NAMES, *DINOV2_NAMES):
                name = name.replace(theirs, ours)
            renamed["vit." + name] = value
    return renamed, unused


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that the target's classes cannot express."""
    config, classifies = model.config, hasattr(model, "classifier")
    allowed = dict(ALLOWED[target])
    problems = []
    if target.startswith("dinov2"):
        # Dinov2Model itself pools from the class token; its classifier takes both.
        allowed["pooling"] = ("class_token_and_mean",) if classifies else ("class_token", "class_token_and_mean")
        if config.layerscale_value is None:
            problems.append("layerscale_value=None must be a number")
        if target == "dinov2_with_registers" and not config.num_register_tokens:
            problems.append("num_register_tokens=0 must be at least 1")
        if config.intermediate_size % config.hidden_size:
            problems.append(
                f"intermediate_size={config.intermediate_size} must be a multiple of hidden_size={config.hidden_size}"
            )
        problems += square_problems(config, "image_size")  # their interpolation takes every grid to be so
    refuse(target, [*field_problems(config, allowed), *problems])


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write config.json, model.safetensors and preprocessor_config.json that the target's classes load.

    Returns:
        The class that was written, then notes for the user.

    Raises:
        OSError: if transformers' own class does not find exactly its weights in the folder.
    """
    cls, weights = _their_weights(model, target)
    dtype = next(value.dtype for key, value in weights.items() if key.endswith("embeddings.cls_token"))
    config = _their_config(cls, model.config, target, dtype)
    notes = []
    if model.config.drop_path_rate and not hasattr(config, "drop_path_rate"):
        notes.append(f"note: drop_path_rate={model.config.drop_path_rate:g} is left out, {target} has none")
    width = model.config.hidden_size
    if target == "dinov2_with_registers":  # it always has a mask token; dinov2 has one only if its config says so
        key = next(key for key in weights if key.endswith("embeddings.cls_token"))
        weights[key.replace("cls_token", "mask_token")] = torch.zeros(1, width, dtype=dtype)
        notes.append("note: mask_token, which only pretraining uses, is 0")
    if cls.__name__ in ("ViTModel", "DeiTModel"):
        # Their pooler is a layer; this one passes the class token on, as ours does.
        config.pooler_act = "linear"
        weights["pooler.dense.weight"] = torch.eye(width, dtype=dtype)
        weights["pooler.dense.bias"] = torch.zeros(width, dtype=dtype)
        notes.append("note: the pooler is the identity, pooler_output the class token")
    save_for_transformers(cls, config, weights, folder, model.config)
    return [f"{type(model).__name__} as {cls.__name__}", *notes]


def _their_weights(model: Any, target: str) -> tuple[Any, dict[str, Tensor]]:
    """The class that can hold the model's weights, and the weights under version 4's names."""
    weights = {_their_name(key, target): value for key, value in plain_weights(model).items()}
    base, *heads = CLASSES[target]
    if not hasattr(model, "classifier"):
        return getattr(transformers, base), {PREFIX.sub("", key): value for key, value in weights.items()}
    if "distillation_classifier.weight" in weights:
        weights = {re.sub("^classifier", "cls_classifier", key): value for key, value in weights.items()}
        return getattr(transformers, heads[1]), weights
    return getattr(transformers, heads[0]), weights


def _their_config(cls: Any, ours: Any, target: str, dtype: torch.dtype) -> Any:
    known = {field.name for field in dataclasses.fields(cls.config_class)}
    taken = {name: getattr(ours, name) for name in SHARED if name in known}
    for name in ("image_size", "patch_size"):
        taken[name] = one_if_square(as_pair(taken[name]))
    for name in ("layer_norm_eps", "initializer_range", "layerscale_value"):
        if name in taken:  # their configs are typed, and an integer is no float to them
            taken[name] = float(taken[name])
    if target.startswith("dinov2"):
        taken["mlp_ratio"] = ours.intermediate_size // ours.hidden_size
    else:
        taken["intermediate_size"] = ours.intermediate_size
    if target == "dinov2":
        taken["use_mask_token"] = False
    labels = {name: getattr(ours, name) for name in ("id2label", "label2id", "problem_type")}
    return cls.config_class(**taken, **labels, dtype=dtype, architectures=[cls.__name__])


def _their_name(key: str, target: str) -> str:
    if not key.startswith("vit."):
        return key  # a classifier
    name = key.removeprefix("vit.")
    for ours, theirs in (*NAMES, *(DINOV2_NAMES if target.startswith("dinov2") else VIT_NAMES)):
        name = name.replace(ours, theirs)
    return f"{target}.{name}"
