"""ConViT under timm's names, which are those of its original .pth files, both ways.

Shapes give the architecture. A file says neither the pooling, nor the image size where there are no positions; folders
in timm's layout have a config.json that does. The original saves the weights alone, without a "model" around them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.convert.common import field_problems, one_if_square, plain_weights, refuse, write_timm
from hf_sparseprior.convert.timm_vit import data_fields, replace_stem, swapped
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.configuration_sparseprior_convit import PRESETS, SparsePriorConvitConfig

TARGETS = ("timm", "original")
FAMILY = SparsePriorConvitConfig.model_type
NORM_EPS = 1e-6  # of every norm; files do not say it

# timm's stem of a name, ours.
STEMS = {
    "cls_token": "convit.embeddings.class_token",
    "pos_embed": "convit.embeddings.position_embeddings",
    "patch_embed.proj": "convit.embeddings.projection",
    "norm": "convit.layernorm",
    "head": "classifier",
}
BLOCK_STEMS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "attn.v": "attention.v_proj",
    "attn.pos_proj": "attention.pos_proj",
    "attn.gating_param": "attention.gate",
}
# Joint projections, of gated and of plain layers.
JOINT = {"attn.qk": ("q_proj", "k_proj"), "attn.qkv": ("q_proj", "k_proj", "v_proj")}
GATE = re.compile(r"blocks\.(\d+)\.attn\.gating_param")
# Arguments of timm's class that SparsePriorConvit has only one value of.
DEFAULTS = {"norm_layer": None, "hybrid_backbone": None}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are timm's parameter names of a ConViT."""
    return {"patch_embed.proj.weight", "cls_token", "blocks.0.attn.gating_param"} <= set(keys)


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorConvitConfig from the shapes and, in timm's folders, config.json.

    Raises:
        ValueError: for what has no counterpart in SparsePriorConvit.
    """
    settings = settings or {}
    arguments = settings.get("model_args") or {}
    pool = settings.get("global_pool") or arguments.get("global_pool") or "token"
    if pool not in ("token", "avg"):
        raise ValueError(f"global_pool={pool!r} must be 'token' or 'avg'")
    for name, value in DEFAULTS.items():
        if arguments.get(name, value) not in (value, *(["layernorm"] if name == "norm_layer" else [])):
            raise ValueError(f"{name}={arguments[name]!r} must be timm's default ({value})")
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    blocks = sorted({int(key.split(".")[1]) for key in state if key.startswith("blocks.")})
    gated = sorted(int(match[1]) for match in map(GATE.fullmatch, state) if match)
    if gated != blocks[: len(gated)]:
        raise ValueError(f"blocks {', '.join(map(str, gated))} have a gate; they must be the first ones")
    taken: dict[str, Any] = {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": one_if_square(patch),
        "num_hidden_layers": len(blocks),
        "num_local_layers": len(gated),
        "num_attention_heads": len(state["blocks.0.attn.gating_param"]),
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": "blocks.0.attn.qk.bias" in state,
        "position_embedding": "learned" if "pos_embed" in state else "none",
        "pooling": "mean" if pool == "avg" else "class_token",
        "layer_norm_eps": NORM_EPS,
        "num_labels": state["head.weight"].shape[0] if "head.weight" in state else 2,
        **{name: arguments[name] for name in ("locality_strength", "drop_path_rate") if name in arguments},
    }
    if size := _image_size(state, patch, settings, arguments):
        taken["image_size"] = size
    return {**taken, **data_fields(settings, taken["num_labels"])}


def _image_size(
    state: dict[str, Tensor], patch: list[int], settings: dict[str, Any], arguments: dict[str, Any]
) -> int | list[int] | None:
    """That of config.json, or of the square grid that the positions are for; None: nothing says it."""
    data = settings.get("pretrained_cfg") or settings
    size = arguments.get("img_size") or (data.get("input_size") or [None])[1:]
    given = list(as_pair(size)) if size else None
    if "pos_embed" not in state:
        return one_if_square(given) if given else None
    positions = state["pos_embed"].shape[1]
    side = math.isqrt(positions)
    sides = given or [side * each for each in patch]
    if math.prod(pixels // each for pixels, each in zip(sides, patch, strict=True)) != positions:
        wanted = "square grid" if given is None else f"grid of {one_if_square(sides)} pixels"
        raise ValueError(f"pos_embed: {positions} positions are no {wanted}")
    return one_if_square(sides)


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """The image size of the published models, with these words."""
    return {"image_size": (224, "224, that of the published models,")}


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names. Unknown names stay as they are, and nothing is left out."""
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if not (block := re.fullmatch(r"blocks\.(\d+)\.(.+)", key)):
            renamed[replace_stem(key, STEMS)] = value
            continue
        layer, (stem, _, leaf) = f"convit.layers.{block[1]}", block[2].rpartition(".")
        if stem not in JOINT:
            renamed[f"{layer}.{replace_stem(block[2], BLOCK_STEMS)}"] = value
            continue
        for part, chunk in zip(JOINT[stem], value.chunk(len(JOINT[stem])), strict=True):
            renamed[f"{layer}.attention.{part}.{leaf}"] = chunk.contiguous()
    return renamed, []


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that the target, or a file without config, cannot hold."""
    config = model.config
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("gelu",),
        "layer_norm_eps": (NORM_EPS,),
        "interpolation": ("bicubic",),
    }
    problems = field_problems(config, allowed)
    if not config.num_local_layers:
        problems.append("num_local_layers=0 must be at least 1; without gated layers its weights are those of a ViT")
    if config.grid[0] != config.grid[1]:
        problems.append(
            f"image_size={config.image_size} has {config.grid[0]}x{config.grid[1]} patches, which must be a square"
        )
    if config.pooling == "mean" and (target == "original" or out.suffix == ".safetensors"):
        problems.append("pooling='mean' must be 'class_token' in a file, which cannot say it; a folder can")
    refuse(target, problems)


def write(model: Any, target: str, out: Path) -> list[str]:
    """Write a .safetensors file or folder that timm loads, or a .pth file as in the original repository.

    Returns:
        What was written.
    """
    weights = _their_weights(plain_weights(model), model.config.num_local_layers)
    if target == "original":
        torch.save(weights, out)
        return ["weights as ConViT's own repository names them"]
    return [write_timm(weights, timm_config(model.config, weights), out)]


def _their_weights(weights: dict[str, Tensor], num_local_layers: int) -> dict[str, Tensor]:
    """Weights under timm's names, with joint projections."""
    theirs: dict[str, Tensor] = {}
    for key, value in weights.items():
        if not (layer := re.fullmatch(r"convit\.layers\.(\d+)\.(.+)", key)):
            theirs[replace_stem(key, swapped(STEMS))] = value
            continue
        block, name = f"blocks.{layer[1]}", layer[2]
        stem = "attn.qk" if int(layer[1]) < num_local_layers else "attn.qkv"
        part, _, leaf = name.removeprefix("attention.").rpartition(".")
        if not name.startswith("attention.") or part not in JOINT[stem]:
            theirs[f"{block}.{replace_stem(name, swapped(BLOCK_STEMS))}"] = value
        elif part == JOINT[stem][0]:
            parts = [weights[key.replace(f".{part}.", f".{each}.")] for each in JOINT[stem]]
            theirs[f"{block}.{stem}.{leaf}"] = torch.cat(parts)
    return theirs


def timm_config(config: SparsePriorConvitConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """config.json of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    # timm wants a registered name; the arguments below say what the model is.
    names = {preset["hidden_size"]: name for name, preset in PRESETS.items()}
    num_classes = weights["head.weight"].shape[0] if "head.weight" in weights else 0
    height, width = as_pair(config.image_size)
    ratio = config.intermediate_size / config.hidden_size
    if not ratio.is_integer():  # timm rounds hidden_size * ratio down, so the ratio is a little larger
        ratio = (config.intermediate_size + 0.5) / config.hidden_size
    pool = "avg" if config.pooling == "mean" else "token"
    return {
        "architecture": names.get(config.hidden_size, "convit_base"),
        "num_classes": num_classes,
        "num_features": config.hidden_size,
        "global_pool": pool,
        "label_names": [config.id2label[index] for index in range(num_classes)],
        "model_args": {
            "img_size": [height, width],
            "patch_size": one_if_square(as_pair(config.patch_size)),
            "in_chans": config.num_channels,
            "embed_dim": config.hidden_size // config.num_attention_heads,  # of one head, as timm has it here
            "depth": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "mlp_ratio": ratio,
            "qkv_bias": config.qkv_bias,
            "drop_path_rate": config.drop_path_rate,
            "local_up_to_layer": config.num_local_layers,
            "locality_strength": config.locality_strength,
            "use_pos_embed": config.position_embedding == "learned",
            "global_pool": pool,
        },
        "pretrained_cfg": {
            "input_size": [config.num_channels, height, width],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": config.image_mean,
            "std": config.image_std,
            "num_classes": num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
