"""Reads Sparsifiner's own checkpoints (lim142857/Sparsifiner): DeiT or LV-ViT with a predictor in every layer.

The files hold the predictors' weights, but not the settings of the run: how many keys were kept, how many of a row of
A_down counted, and up to which size weights of W_up counted as 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor

from hf_sparseprior.convert import lvvit, timm_vit
from hf_sparseprior.priors.sparsifiner_published import PublishedSparsifiner

TARGETS = ()  # nothing is written in this format
FAMILY = timm_vit.FAMILY
PREDICTOR = re.compile(r"blocks\.(\d+)\.attn\.mask_predictor\.(.+)")
FIRST = "blocks.0.attn.mask_predictor."
PROJECTIONS = {f"proj_c_{name}.{part}": f"{name}_{part}" for name in "qk" for part in ("weight", "bias")}
COLUMNS = {"proj_n": "down", "proj_back_n": "up"}  # (T, R) each, the class token first


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of Sparsifiner's own code."""
    keys = set(keys)
    return timm_vit.matches(keys) and f"{FIRST}proj_n" in keys


def _backbone(keys: Iterable[str]) -> ModuleType:
    return lvvit if lvvit.matches(keys) else timm_vit


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes; what the files do not say is the published configuration's."""
    width, (reduced, head_dim) = state["patch_embed.proj.weight"].shape[0], state[f"{FIRST}proj_c_q.weight"].shape
    if width % head_dim or head_dim % reduced:
        raise ValueError(f"{FIRST}proj_c_q.weight: {reduced} must divide {head_dim}, and {head_dim} the width {width}")
    taken = _backbone(state).fields(state, {"num_attention_heads": width // head_dim})
    num_down = state[f"{FIRST}proj_n"].shape[1]
    top = PublishedSparsifiner.SETTINGS["top_coefficients"]
    predictor = {
        **{"name": "sparsifiner_published", "num_down": num_down, "width_factor": head_dim // reduced},
        "top_coefficients": min(num_down, top),
    }
    return {**taken, "prior": {"predictor": predictor}}


def remarks(state: dict[str, Tensor]) -> list[str]:
    """Notes for the user."""
    return [
        "note: keep_rate, top_coefficients and up_threshold are not in the file; 0.25, 8 and 0.02 of the published "
        "configuration are assumed; `convert_checkpoint(..., prior={...})` gives others"
    ]


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names left out."""
    rest: dict[str, Tensor] = {}
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if (match := PREDICTOR.fullmatch(key)) is None:
            rest[key] = value
            continue
        predictor, part = f"vit.layers.{match[1]}.attention.predictor", match[2]
        if part in COLUMNS:
            renamed[f"{predictor}.class_{COLUMNS[part]}"] = value[:1].T.contiguous()
            renamed[f"{predictor}.w_{COLUMNS[part]}"] = value[1:].T.contiguous()
        else:
            renamed[f"{predictor}.{PROJECTIONS.get(part, part)}"] = value
    vit, unused = _backbone(state).rename(rest)
    return {**vit, **renamed}, unused
