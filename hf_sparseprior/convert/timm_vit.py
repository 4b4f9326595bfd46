"""ViT, DeiT, DeiT-III, DINO, DINOv2 and SigLIP under timm's names, both ways.

The original files of all but SigLIP share most of these names. Such files carry no config: the shapes give the
architecture, and the width gives the number of heads. Folders in timm's layout (model.safetensors, config.json) carry
one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.convert.common import (
    ATTENTION_POOLING,
    IN_PLACE,
    ONLY_OURS,
    field_problems,
    one_if_square,
    plain_weights,
    refuse,
    write_timm,
)
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair

TARGETS = ("timm", "original")
FAMILY = SparsePriorViTConfig.model_type
# Width to heads of the published models: tiny, small, base, large, so400m (SigLIP), huge.
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}
# timm's `act_layer`, ours.
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
# timm's architectures with gelu_tanh, which their folders do not say.
TANH = re.compile(r"vit_(?:(?:base_patch32|so400m_patch16|giantopt_patch16)_siglip_|large_patch16_siglip_(?:gap_)?512)")
ROTARY = re.compile(r"vit_\w+_rope_|vit_pe_|eva02_(?!enormous)")  # and those with rotary positions next to learned ones
NORM_EPS = 1e-6  # layer_norm_eps of every model here; files do not say it

# timm's stem of a name, ours.
STEMS = {
    "cls_token": "vit.embeddings.class_token",
    "dist_token": "vit.embeddings.distillation_token",
    "reg_token": "vit.embeddings.register_tokens",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.projection",
    "norm": "vit.layernorm",
    "attn_pool": ATTENTION_POOLING.rstrip("."),
    "head_dist": "distillation_classifier",
    "head": "classifier",
}
BLOCK_STEMS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layerscale_attention.scale",
    "ls2.gamma": "layerscale_mlp.scale",
}
# The original files' names of some of these: DINOv2's registers, DeiT-III's LayerScale. Old ViT files have a layer
# before the classifier, which is dropped together with it.
ALIASES = {"register_tokens": "reg_token", "pre_logits": "head.pre_logits"}
BLOCK_ALIASES = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
# Parts for pretraining that no output of ours depends on.
UNUSED = ("mask_token",)
QKV = ("q_proj", "k_proj", "v_proj")


def matches(keys: Iterable[str]) -> bool:
    """Whether these are timm's parameter names of a ViT."""
    return {"patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"} <= set(keys)


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes and, in timm's folders, config.json.

    `settings` may also give num_attention_heads.

    Raises:
        ValueError: for what has no counterpart in SparsePriorViT, and if the number of heads or the grid is not clear.
    """
    settings = settings or {}
    arguments = settings.get("model_args") or {}
    _refuse_other_architectures(state, settings, arguments)
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    heads = settings.get("num_attention_heads") or arguments.get("num_heads") or HEADS.get(width)
    if heads is None:
        raise ValueError(f"width {width} is of no published model ({', '.join(map(str, HEADS))}): give --heads")
    grid, prefix_positions = _grid(state, patch, arguments.get("img_size"))
    scale = next((state[key] for key in ("blocks.0.ls1.gamma", "blocks.0.gamma_1") if key in state), None)
    registers = next((state[key] for key in ("reg_token", "register_tokens") if key in state), None)
    averages = "cls_token" not in state or (settings.get("global_pool") or arguments.get("global_pool")) == "avg"
    taken: dict[str, Any] = {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": one_if_square(patch),
        "image_size": one_if_square([grid[0] * patch[0], grid[1] * patch[1]]),
        "num_hidden_layers": 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        "num_attention_heads": heads,
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "proj_bias": "blocks.0.attn.proj.bias" in state,
        "mlp_bias": "blocks.0.mlp.fc1.bias" in state,
        "use_class_token": "cls_token" in state,
        "pooling": "mean" if averages else "class_token",
        "use_distillation_token": "dist_token" in state,
        "use_distillation_classifier": not {"dist_token", "head.weight"} <= set(state) or "head_dist.weight" in state,
        "num_register_tokens": 0 if registers is None else registers.shape[1],
        "position_embedding_for_class_token": prefix_positions > 0 or "cls_token" not in state,
        "layerscale_value": None if scale is None else float(scale.float().mean()),
        "layer_norm_eps": NORM_EPS,
        **_activation(state, settings, arguments),
        "num_labels": state["head.weight"].shape[0] if "head.weight" in state else 2,
    }
    return {**taken, **data_fields(settings, taken["num_labels"])}


def _activation(state: dict[str, Tensor], settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The field hidden_act, unless neither names nor config.json say which of two it is (`assumed`)."""
    if not settings.get("architecture") and "act_layer" not in arguments:
        return {} if "cls_token" not in state else {"hidden_act": "gelu"}
    tanh = TANH.match(settings.get("architecture") or "")
    return {"hidden_act": ACTIVATIONS[arguments.get("act_layer") or ("gelu_tanh" if tanh else "gelu")]}


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """What files of models without a class token do not say, with these words."""
    if "cls_token" in state:
        return {}
    taken: dict[str, tuple[Any, str]] = {"hidden_act": ("gelu", "gelu (some SigLIP models have gelu_tanh)")}
    if "attn_pool.latent" in state:
        taken |= {name: ([0.5] * 3, "SigLIP's 0.5") for name in ("image_mean", "image_std")}
    return taken


def data_fields(settings: dict[str, Any], num_labels: int) -> dict[str, Any]:
    """Normalisation and names of the classes, as far as config.json in timm's layout has them."""
    data = settings.get("pretrained_cfg") or settings
    pairs = (("image_mean", "mean"), ("image_std", "std"))
    taken: dict[str, Any] = {ours: list(data[theirs]) for ours, theirs in pairs if theirs in data}
    names = settings.get("label_names") or data.get("label_names")
    if isinstance(names, list) and len(names) == num_labels:
        taken["id2label"] = dict(enumerate(names))
        taken["label2id"] = {name: index for index, name in enumerate(names)}
    return taken


def _refuse_other_architectures(state: dict[str, Tensor], settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    architecture = settings.get("architecture") or ""
    if ROTARY.match(architecture) or arguments.get("use_rot_pos_emb"):
        raise ValueError(
            f"{architecture or 'use_rot_pos_emb=True'}: rotary next to learned positions have no counterpart in "
            f"SparsePriorViT; {IN_PLACE}"
        )
    if "fc_norm.weight" in state:
        raise ValueError(
            "fc_norm.weight: this model averages its tokens before the last norm, SparsePriorViT after it; "
            "of timm's averaging models only those with norm.weight can be converted"
        )
    inner, outer = state.get("blocks.0.mlp.fc1.weight"), state.get("blocks.0.mlp.fc2.weight")
    if inner is None or outer is None or inner.shape[0] != outer.shape[1]:
        raise ValueError("blocks.0.mlp: a gated MLP (SwiGLU) has no counterpart in SparsePriorViT")
    pool = settings.get("global_pool") or arguments.get("global_pool") or "token"
    if pool not in ("token", "avg") and not (pool == "map" and "attn_pool.latent" in state):
        raise ValueError(f"global_pool={pool!r} must be 'token' or 'avg'")
    if pool == "avg" and arguments.get("pool_include_prefix"):
        raise ValueError("pool_include_prefix=True must be False: 'mean' pooling averages the patch tokens alone")
    for name, known in (("act_layer", tuple(ACTIVATIONS)), ("norm_layer", ("layernorm",))):
        if arguments.get(name) not in (None, *known):
            raise ValueError(f"{name}={arguments[name]!r} must be {' or '.join(known)}")


def _grid(state: dict[str, Tensor], patch: list[int], image_size: Any) -> tuple[tuple[int, int], int]:
    """Patch grid (height, width) and the number of prefix tokens that have a position."""
    positions = state["pos_embed"].shape[1]
    prefix = int("cls_token" in state) + int("dist_token" in state)
    for count in (prefix, 0):  # DeiT-III gives the class token no position
        patches = positions - count
        if image_size is not None:
            height, width = (side // size for side, size in zip(as_pair(image_size), patch, strict=True))
        else:
            height = width = math.isqrt(max(patches, 0))
        if patches > 0 and height * width == patches:
            return (height, width), count
    wanted = "square grid" if image_size is None else f"grid of {image_size} pixels"
    raise ValueError(f"pos_embed: {positions} positions are no {wanted}, with or without {prefix} prefix tokens")


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, with the joint query, key and value projection split, and the names left out."""
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if key in UNUSED:
            continue
        renamed |= split_qkv(_our_name(key), value)
    return renamed, [key for key in UNUSED if key in state]


def split_qkv(name: str, value: Tensor) -> dict[str, Tensor]:
    """A weight of a joint query, key and value projection as three by their names; any other as it is."""
    if ".attn.qkv." not in name:
        return {name: value}
    thirds = zip(QKV, value.chunk(3), strict=True)
    return {name.replace(".attn.qkv.", f".attention.{part}."): third.contiguous() for part, third in thirds}


def _our_name(name: str) -> str:
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
        return rename_block(block)
    return replace_stem(replace_stem(name, ALIASES), STEMS)


def rename_block(block: re.Match[str]) -> str:
    """Our name of a weight of a block, whose number and name in the block were matched."""
    return f"vit.layers.{block[1]}.{replace_stem(replace_stem(block[2], BLOCK_ALIASES), BLOCK_STEMS)}"


def _their_name(name: str) -> str:
    if block := re.fullmatch(r"vit\.layers\.(\d+)\.(.+)", name):
        return f"blocks.{block[1]}.{replace_stem(block[2], swapped(BLOCK_STEMS))}"
    return replace_stem(name, swapped(STEMS))


def swapped(stems: dict[str, str]) -> dict[str, str]:
    """Our names as the keys."""
    return {ours: theirs for theirs, ours in stems.items()}


def replace_stem(name: str, stems: dict[str, str]) -> str:
    """The name with its beginning replaced, if that is one of the stems."""
    for stem, other in stems.items():
        if name == stem or name.startswith(stem + "."):
            return other + name.removeprefix(stem)
    return name


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that the target's ViT, or a file without config, cannot hold."""
    config = model.config
    allowed: dict[str, tuple[Any, ...]] = {
        **ONLY_OURS,
        "hidden_act": tuple(ACTIVATIONS.values()) if target == "timm" else ("gelu",),
        "position_embedding": ("learned",),
        "interpolation": ("bicubic",),
        "mlp_bias": (config.proj_bias,),  # timm has one setting for both
        "pooling": ("class_token", "mean"),
    }
    if target == "original":
        allowed |= {"use_class_token": (True,), "pooling": ("class_token",), "proj_bias": (True,), "mlp_bias": (True,)}
        if not _is_dinov2(config):
            allowed["num_register_tokens"] = (0,)
    if config.use_distillation_token:
        allowed |= {"pooling": ("class_token",), "num_register_tokens": (0,)}
        allowed |= {"position_embedding_for_class_token": (True,)}
        if hasattr(model, "classifier"):
            allowed["use_distillation_classifier"] = (True,)
    problems = field_problems(config, allowed)
    if config.layer_norm_eps > 10 * NORM_EPS:
        problems.append(f"layer_norm_eps={config.layer_norm_eps:g} must be about {NORM_EPS:g}, as in every such model")
    if out.suffix == ".safetensors" and config.pooling == "mean" and config.use_class_token:
        problems.append("pooling='mean' must be 'class_token' in a file, which cannot say it; a folder can")
    if out.suffix == ".safetensors" and config.hidden_act == "gelu_pytorch_tanh":
        problems.append("hidden_act='gelu_pytorch_tanh' must be 'gelu' in a file, which cannot say it; a folder can")
    refuse(target, problems)


def write(model: Any, target: str, out: Path) -> list[str]:
    """Write a .safetensors file or folder that timm loads, or a .pth file as in the original repositories.

    Returns:
        What was written, then notes for the user.
    """
    config, notes = model.config, []
    weights = timm_weights(model)
    if config.layer_norm_eps != NORM_EPS:
        notes.append(f"note: such models have layer_norm_eps={NORM_EPS:g}, this one {config.layer_norm_eps:g}")
    if target == "original":
        family, content = original_content(config, weights)
        torch.save(content, out)
        return [f"weights as {family} names them", *notes]
    positions = weights["pos_embed"]
    if config.num_register_tokens and positions.shape[1] > config.grid[0] * config.grid[1]:
        # timm gives a position either to all prefix tokens or to none, and reads DINOv2's registers like this.
        weights["cls_token"] = weights["cls_token"] + positions[:, :1]
        weights["pos_embed"] = positions[:, 1:].contiguous()
        notes.append("note: the class token's position is added to the class token, as timm has it with registers")
    return [write_timm(weights, timm_config(config, weights), out), *notes]


def _is_dinov2(config: Any) -> bool:
    """Among the original models with LayerScale, DINOv2's class token has a position and DeiT-III's has none."""
    return config.layerscale_value is not None and config.position_embedding_for_class_token


def original_content(config: Any, weights: dict[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """Family and content of a .pth file. Only a classifier's weights are under "model", as in DeiT."""
    if _is_dinov2(config):
        family = "DINOv2"
        weights = {"register_tokens" if key == "reg_token" else key: value for key, value in weights.items()}
        # Only pretraining uses it, but its code expects it.
        weights["mask_token"] = torch.zeros(1, config.hidden_size, dtype=weights["pos_embed"].dtype)
    elif config.layerscale_value is not None:
        family = "DeiT-III"
        weights = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key): value for key, value in weights.items()}
    else:
        family = "DeiT" if "head.weight" in weights else "DINO"
    return family, {"model": weights} if "head.weight" in weights else weights


def timm_weights(model: Any) -> dict[str, Tensor]:
    """The weights under timm's names, with query, key and value projection joined."""
    return {_their_name(key): value for key, value in join_qkv(plain_weights(model)).items()}


def join_qkv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under our names, but with query, key and value projection as one layer "attn.qkv"."""
    joined = {}
    for key, value in weights.items():
        if ".attention.q_proj." in key:
            parts = [weights[key.replace(".q_proj.", f".{part}.")] for part in QKV]
            joined[key.replace(".attention.q_proj.", ".attn.qkv.")] = torch.cat(parts)
        elif not any(f".attention.{part}." in key for part in QKV):
            joined[key] = value
    return joined


def timm_config(config: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """config.json of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    distilled = config.use_distillation_token
    # timm wants a registered name; the arguments below say what the model is.
    names = {192: "tiny", 384: "small", 768: "base"}
    size = names.get(config.hidden_size, "base")
    num_classes = weights["head.weight"].shape[0] if "head.weight" in weights else 0
    height, width = as_pair(config.image_size)
    ratio = config.intermediate_size / config.hidden_size
    if not ratio.is_integer():  # timm rounds hidden_size * ratio down, so the ratio is a little larger
        ratio = (config.intermediate_size + 0.5) / config.hidden_size
    pool = "avg" if config.pooling == "mean" else "token"
    return {
        "architecture": f"deit_{size}_distilled_patch16_224" if distilled else f"vit_{size}_patch16_224",
        "num_classes": num_classes,
        "num_features": config.hidden_size,
        "global_pool": pool,
        "label_names": [config.id2label[index] for index in range(num_classes)],
        "model_args": {
            "img_size": [height, width],
            "patch_size": one_if_square(as_pair(config.patch_size)),
            "in_chans": config.num_channels,
            "embed_dim": config.hidden_size,
            "depth": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "mlp_ratio": ratio,
            "qkv_bias": config.qkv_bias,
            "proj_bias": config.proj_bias,
            "init_values": config.layerscale_value,
            "class_token": config.use_class_token,
            "no_embed_class": config.num_register_tokens > 0 or not config.position_embedding_for_class_token,
            "reg_tokens": config.num_register_tokens,
            "global_pool": pool,
            "fc_norm": False,  # the last norm comes before the average
            **({} if config.hidden_act == "gelu" else {"act_layer": swapped(ACTIVATIONS)[config.hidden_act]}),
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
            "classifier": ["head", "head_dist"] if distilled else "head",
        },
    }
