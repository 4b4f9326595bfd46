"""Swin of transformers, both ways.

As with ViT, version 5 has new names for its parameters in memory and keeps version 4's names in files. Version 4's are
written, and both are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from hf_sparseprior.convert.common import (
    field_problems,
    is_of_stock_prior,
    one_if_square,
    plain_weights,
    recorded_prior,
    refuse,
    save_for_transformers,
)
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.configuration_sparseprior_swin import SparsePriorSwinConfig
from hf_sparseprior.priors.prior import is_prior_weight

TARGETS = ("swin",)
FAMILY = SparsePriorSwinConfig.model_type

FIRST = re.compile(r"(^|\.)encoder\.layers\.0\.blocks\.0\.layernorm_before\.weight$")
# Version 5's own names as version 4's, then our part of a name and version 4's; tried from the first to the last,
# because earlier ones contain later ones.
VERSION_5 = (".relative_position_bias.relative_position_bias_table", ".self.relative_position_bias_table")
NAMES = (
    ("embeddings.projection.", "embeddings.patch_embeddings.projection."),
    (".attention.q_proj.", ".attention.self.query."),
    (".attention.k_proj.", ".attention.self.key."),
    (".attention.v_proj.", ".attention.self.value."),
    (".attention.relative_position_bias.bias_table", ".attention.self.relative_position_bias_table"),
    (".attention.o_proj.", ".attention.output.dense."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
)
# A layer, or the patch merging after a stage, in our names and in theirs.
OUR_PLACE = re.compile(r"^stages\.(\d+)\.(?:layers\.(\d+)\.)?")
THEIR_PLACE = re.compile(r"^encoder\.layers\.(\d+)\.(?:blocks\.(\d+)\.)?")
TABLE = "bias_table"
BLOCK = re.compile(r"(?:^|\.)encoder\.layers\.(\d+)\.blocks\.(\d+)\.")
LAYER = re.compile(r"layers\.(\d+)\.")  # of all stages in one row, as `stock_saving` numbers them
INDEX = ".relative_position_index"  # made from the window alone
# Masked image modeling's, on which no output of ours depends.
UNUSED = ("embeddings.mask_token", "decoder.0.weight", "decoder.0.bias")
SHARED = (
    *("image_size", "patch_size", "num_channels", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio"),
    *("qkv_bias", "hidden_act", "drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("layer_norm_eps", "initializer_range"),
)
NORM_EPS = 1e-5  # what some of their norms have whatever the config says


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of transformers' Swin, or of a model that is built like it."""
    return any(FIRST.search(key) for key in keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorSwinConfig from the source's config.json, with the prior of `apply_prior` if it has one. As
    there, its support is in the first stages alone. Missing fields have the default of SwinConfig.

    Raises:
        ValueError: without a config.json, for what has no counterpart in SparsePriorSwin, and for a prior that
            config.json does not name.
    """
    if settings is None:
        raise ValueError("a checkpoint of transformers needs its config.json next to the weights")
    if settings.get("model_type") != "swin":
        raise ValueError(f"model_type={settings.get('model_type')!r} must be 'swin'")
    config = {**transformers.SwinConfig().to_dict(), **settings}
    if config["use_absolute_embeddings"]:
        raise ValueError("use_absolute_embeddings=True must be False: SparsePriorSwin has relative positions alone")
    if config["layer_norm_eps"] != NORM_EPS:
        raise ValueError(
            f"layer_norm_eps={config['layer_norm_eps']} must be {NORM_EPS:g}, which Swin of transformers has in the "
            "norms of its embedding and patch mergings in any case"
        )
    names = config.get("architectures") or [""]
    if str(names[0]).endswith("ForImageClassification") and settings.get("id2label") == {}:
        raise ValueError("num_labels=0 must be at least 1: a classifier without classes has no counterpart")
    optional = ("id2label", "label2id", "problem_type", "image_mean", "image_std")
    taken = {name: config[name] for name in SHARED} | {name: settings[name] for name in optional if settings.get(name)}
    if (prior := recorded_prior(state, settings)) is not None:
        taken["prior"] = prior
    our_config = SparsePriorSwinConfig(**taken)
    if our_config.windows != [our_config.window_size] * len(our_config.windows):
        raise ValueError(
            f"window_size={our_config.window_size} must not be larger than a stage, and "
            f"image_size={our_config.image_size} gives stages of {_sizes(our_config.grids)} patches: "
            "Swin of transformers cannot run at this size"
        )
    return taken


def _sizes(grids: Iterable[Iterable[int]]) -> str:
    return ", ".join("x".join(map(str, grid)) for grid in grids)


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names of those left out. Unknown names stay as they are.

    A prior's scalars are called "layers.2.decay_bias.beta" in `stock_saving`, with the layers of all stages numbered in
    one row.
    """
    places = sorted({(int(place[1]), int(place[2])) for key in state if (place := BLOCK.search(key))})
    renamed, unused = {}, []
    for key, value in state.items():
        name = key.removeprefix("swin.")
        if name.endswith(INDEX) or is_of_stock_prior(name):
            continue
        if name in UNUSED:
            unused.append(key)
        elif name.startswith("classifier."):
            renamed[name] = value
        elif is_prior_weight(name) and (layer := LAYER.match(name)) and int(layer[1]) < len(places):
            stage, number = places[int(layer[1])]
            renamed[f"swin.stages.{stage}.layers.{number}.attention.{name[layer.end() :]}"] = value
        else:
            name = THEIR_PLACE.sub(_our_place, name.replace(*VERSION_5))
            for ours, theirs in NAMES:
                name = name.replace(theirs, ours)
            renamed["swin." + name] = our_table(value) if name.endswith(TABLE) else value
    return renamed, unused


def _our_place(match: re.Match[str]) -> str:
    stage, layer = match.groups()
    return f"stages.{stage}." + (f"layers.{layer}." if layer else "")


def our_table(value: Tensor) -> Tensor:
    """A bias table (offsets, heads) as (heads, rows, columns); one that is of no square window stays as it is."""
    offsets = value.shape[0] if value.dim() == 2 else 0
    side = math.isqrt(offsets)
    if side % 2 == 0 or side**2 != offsets:
        return value
    return value.mT.unflatten(1, (side, side)).contiguous()


def their_table(value: Tensor) -> Tensor:
    """A bias table (heads, rows, columns) as (offsets, heads)."""
    return value.flatten(1).mT.contiguous()


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that Swin of transformers cannot express."""
    config = model.config
    problems = field_problems(config, {"layer_norm_eps": (NORM_EPS,)})
    if len(set(config.windows)) > 1:
        problems.append(
            f"window_size={config.window_size} must not be larger than a stage, and image_size={config.image_size} "
            f"gives stages of {_sizes(config.grids)} patches"
        )
    refuse(target, problems)


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write config.json, model.safetensors and preprocessor_config.json that transformers' Swin loads.

    Returns:
        The class that was written.

    Raises:
        OSError: if transformers' own class does not find exactly its weights in the folder.
    """
    ours, classifies = model.config, hasattr(model, "classifier")
    cls = transformers.SwinForImageClassification if classifies else transformers.SwinModel
    taken = {name: getattr(ours, name) for name in SHARED}
    taken["window_size"] = ours.windows[0]
    for name in ("image_size", "patch_size"):
        taken[name] = one_if_square(as_pair(taken[name]))
    for name in ("layer_norm_eps", "initializer_range", "drop_path_rate", "mlp_ratio"):  # their configs are typed
        taken[name] = float(taken[name])
    taken |= {name: getattr(ours, name) for name in ("id2label", "label2id", "problem_type")}
    config = cls.config_class(**taken, dtype=model.dtype, architectures=[cls.__name__])
    weights = {_their_name(key, classifies): value for key, value in plain_weights(model).items()}
    weights = {key: their_table(value) if key.endswith(TABLE) else value for key, value in weights.items()}
    save_for_transformers(cls, config, weights, folder, ours)
    return [f"{type(model).__name__} as {cls.__name__}"]


def _their_name(key: str, classifies: bool) -> str:
    if not key.startswith("swin."):
        return key  # a classifier
    name = OUR_PLACE.sub(_their_place, key.removeprefix("swin."))
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return f"swin.{name}" if classifies else name


def _their_place(match: re.Match[str]) -> str:
    stage, layer = match.groups()
    return f"encoder.layers.{stage}." + (f"blocks.{layer}." if layer else "")
