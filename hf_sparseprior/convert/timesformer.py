"""TimeSformer of transformers, both ways, with each of its kinds of attention."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor

from hf_sparseprior.convert.common import (
    ONLY_OURS,
    field_problems,
    one_if_square,
    plain_weights,
    refuse,
    save_for_transformers,
    square_problems,
)
from hf_sparseprior.models.configuration_sparseprior_timesformer import AttentionType, SparsePriorTimesformerConfig
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair

TARGETS = ("timesformer",)
FAMILY = SparsePriorTimesformerConfig.model_type

# Our part of a name and theirs, tried from the first to the last, because earlier ones contain later ones.
NAMES = (
    ("embeddings.class_token", "embeddings.cls_token"),
    ("embeddings.projection.", "embeddings.patch_embeddings.projection."),
    ("layers.", "encoder.layer."),
    ("attention.qkv.", "attention.attention.qkv."),
    ("attention.o_proj.", "attention.output.dense."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
)
# q, k and v are one layer in TimeSformer.
PROJECTION = re.compile(r"attention\.([qkv])_proj\.")
SHARED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps"),
    *("image_size", "patch_size", "num_channels", "num_frames", "qkv_bias", "initializer_range"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_type"),
)
# What the classes compute without a field in their config.
ALLOWED: dict[str, tuple[Any, ...]] = {
    **ONLY_OURS,
    "frame_average": ("after_norm",),
    "use_class_token": (True,),
    "num_register_tokens": (0,),
    "pooling": ("class_token",),
    "position_embedding": ("learned",),
    "position_embedding_for_class_token": (True,),
    "proj_bias": (True,),
    "mlp_bias": (True,),
    "layerscale_value": (None,),
}


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of transformers' TimeSformer."""
    names = {key.removeprefix("timesformer.") for key in keys}
    # Time embeddings are missing where attention is in space only.
    return {"embeddings.patch_embeddings.projection.weight", "encoder.layer.0.attention.attention.qkv.weight"} <= names


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorTimesformerConfig from the source's config.json.

    Raises:
        ValueError: without a config.json, and for an unknown kind of attention.
    """
    if settings is None:
        raise ValueError("a checkpoint of transformers needs its config.json next to the weights")
    config = {**transformers.TimesformerConfig().to_dict(), **settings}
    if config["attention_type"] not in get_args(AttentionType):
        raise ValueError(
            f"attention_type={config['attention_type']!r} must be one of {', '.join(get_args(AttentionType))}"
        )
    optional = ("id2label", "label2id", "problem_type", "image_mean", "image_std")
    taken = {name: settings[name] for name in optional if settings.get(name)}
    return {**{name: config[name] for name in (*SHARED, "drop_path_rate")}, **taken}


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, with q, k and v apart. Unknown names stay as they are."""
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removeprefix("timesformer.")
        if name.startswith("classifier."):
            renamed[name] = value
            continue
        for ours, theirs in NAMES:
            name = name.replace(theirs, ours)
        if "attention.qkv." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                renamed["vit." + name.replace(".qkv.", f".{letter}_proj.")] = part.contiguous()
        else:
            renamed["vit." + name] = value
    return renamed, []


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that TimeSformer cannot express."""
    square = square_problems(model.config, "image_size", "patch_size")  # their layers take the grid to be so
    refuse(target, [*field_problems(model.config, ALLOWED), *square])


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write config.json, model.safetensors and preprocessor_config.json that transformers' TimeSformer loads.

    Returns:
        The class that was written, then notes for the user.

    Raises:
        OSError: if transformers' own class does not find exactly its weights in the folder.
    """
    ours, classifies = model.config, hasattr(model, "classifier")
    cls = transformers.TimesformerForVideoClassification if classifies else transformers.TimesformerModel
    taken = {name: getattr(ours, name) for name in SHARED}
    for name in ("image_size", "patch_size"):
        taken[name] = one_if_square(as_pair(taken[name]))
    for name in ("layer_norm_eps", "initializer_range"):  # their configs are typed
        taken[name] = float(taken[name])
    taken |= {name: getattr(ours, name) for name in ("id2label", "label2id", "problem_type")}
    config = cls.config_class(**taken, dtype=model.dtype, architectures=[cls.__name__])
    weights = _their_weights(model, "timesformer." if classifies else "")
    save_for_transformers(cls, config, weights, folder, ours)
    notes = []
    if ours.drop_path_rate:  # an integer in their config
        notes.append(f"note: drop_path_rate={ours.drop_path_rate:g} is left out, {target} has none")
    if classifies and ours.attention_type == "space_only":
        notes.append(
            "note: transformers' class gives the logits of each frame; ours are their mean over a clip's frames"
        )
    return [f"{type(model).__name__} as {cls.__name__}", *notes]


def _their_weights(model: Any, prefix: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    apart: dict[str, dict[str, Tensor]] = {}
    for key, value in plain_weights(model).items():
        if not key.startswith("vit."):
            weights[key] = value
            continue
        name = key.removeprefix("vit.")
        if projection := PROJECTION.search(name):
            apart.setdefault(PROJECTION.sub("attention.qkv.", name), {})[projection[1]] = value
        else:
            weights[prefix + _their_name(name)] = value
    for name, parts in apart.items():
        weights[prefix + _their_name(name)] = torch.cat([parts[letter] for letter in "qkv"])
    return weights


def _their_name(name: str) -> str:
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name
