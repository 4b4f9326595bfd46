"""Reads VIOLIN's own checkpoints of DeiT and DINO (LIONS-EPFL/VIOLIN): a ViT under timm's names, with its decay.

A layer has a vector `attn.ai_list.C` of beta, one number a head, for each curve C, and `attn.normalize`, which is
alpha. Which curves they are and where M acts stands in the command line that is saved with the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.convert import timm_vit

TARGETS = ()  # nothing is written in this format
FAMILY = timm_vit.FAMILY
# Their curves in the order of their scalars by default, and ours. Two names are those of the transposed curve.
OUR_CURVES = {
    **{"snake": "snake", "snake_T": "snake_t", "hilbert": "hilbert", "hilbert_T": "hilbert_t"},
    **{"peano": "peano_t", "peano_T": "peano", "zigzag": "zigzag_t", "zigzag_T": "zigzag"},
}
# Their `method`, our placement. alpha is a factor of M in all of them.
OUR_PLACEMENTS = {
    **{"mul_v1": "multiply", "mul_v2": "residual", "add_v1": "add"},
    **{"mul_after_sm": "multiply_after", "add_after_sm": "add_after_as_printed"},
}
SCALARS = re.compile(r"blocks\.(\d+)\.attn\.(ai_list|normalize)(?:\.(\d+))?")
LEARNED, FIXED = "blocks.0.attn.ai_list.0", "blocks.0.attn.ai_list"
IMAGE_SIZE = 224  # of their models, unless the command line says another


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of VIOLIN's own code."""
    keys = set(keys)
    return "patch_embed.proj.weight" in keys and not keys.isdisjoint((LEARNED, FIXED))


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes and the command line that lies beside the weights.

    Raises:
        ValueError: if the file does not say which curves its scalars are of, or says what ours has not.
    """
    settings = settings or {}
    fixed = state.get(FIXED)
    heads = (state[LEARNED] if fixed is None else fixed).shape[-1]
    vit = dict(state)
    if "pos_embed" not in state:
        patches = (_image_size(settings) // state["patch_embed.proj.weight"].shape[-1]) ** 2
        vit["pos_embed"] = torch.zeros(1, patches + ("cls_token" in state), 1)  # for the grid alone
    taken = timm_vit.fields(vit, {"num_attention_heads": heads})
    return {
        **taken,
        "hidden_act": "gelu",
        "position_embedding": "learned" if "pos_embed" in state else "none",
        "prior": {"decay": _decay(state, settings, fixed)},
    }


def _image_size(settings: Mapping[str, Any]) -> int:
    size = settings.get("input_size", IMAGE_SIZE)
    if not isinstance(size, int):
        raise ValueError(f"args.input_size={size!r} must be an integer")
    return size


def _decay(state: Mapping[str, Tensor], settings: Mapping[str, Any], fixed: Tensor | None) -> dict[str, Any]:
    count = sum(key.startswith(LEARNED[:-1]) for key in state) if fixed is None else len(fixed)
    curves = settings.get("curves", list(OUR_CURVES))
    if not isinstance(curves, (list, tuple)) or any(curve not in OUR_CURVES for curve in curves):
        raise ValueError(f"args.curves={curves!r} must be a list of {', '.join(OUR_CURVES)}")
    if len(curves) != count:
        where = "args.curves" if "curves" in settings else "a file without args.curves"
        raise ValueError(f"{FIXED} has scalars of {count} curves, and {where} means {len(curves)}: {', '.join(curves)}")
    method = settings.get("method", "mul_v1")
    if method not in OUR_PLACEMENTS:
        raise ValueError(f"args.method={method!r} must be one of {', '.join(OUR_PLACEMENTS)}")
    decay: dict[str, Any] = {
        "name": "violin",
        "curves": [OUR_CURVES[curve] for curve in curves],
        "init": "pretrain_published",
        "learn_alpha": "blocks.0.attn.normalize" in state,
        "placement": OUR_PLACEMENTS[method],
        "alpha_scales": "mask",
    }
    if fixed is None:
        return decay
    gammas = torch.cat([value.flatten() for key, value in state.items() if key.endswith(".attn.ai_list")]).unique()
    if len(gammas) != 1:
        raise ValueError(f"{FIXED}: fixed gammas {gammas.tolist()} must be one number for all curves, heads and layers")
    return {**decay, "learn_beta": False, "gamma": round(gammas.item(), 6)}  # 0.996 in float32


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names left out."""
    rest: dict[str, Tensor] = {}
    renamed: dict[str, Tensor] = {}
    curves: dict[str, dict[int, Tensor]] = {}
    for key, value in state.items():
        if (match := SCALARS.fullmatch(key)) is None:
            rest[key] = value
            continue
        decay = f"vit.layers.{match[1]}.attention.decay_bias"
        if match[2] == "normalize":
            renamed[f"{decay}.alpha"] = value.float()
        elif match[3] is None:  # gamma itself, fixed
            gamma = round(value.flatten()[0].item(), 6)
            renamed[f"{decay}.beta"] = torch.full_like(value.float(), math.log(gamma) - math.log1p(-gamma))
        else:
            curves.setdefault(f"{decay}.beta", {})[int(match[3])] = value.float()
    for name, betas in curves.items():
        renamed[name] = torch.stack([betas[number] for number in sorted(betas)])
    vit, unused = timm_vit.rename(rest)
    return {**vit, **renamed}, unused
