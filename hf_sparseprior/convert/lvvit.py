"""Reads LV-ViT (Jiang et al. 2021) under the names of its original files.

The files hold neither skip_lam nor the number of heads: both are those of the published model of the same width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hf_sparseprior.convert import timm_vit

TARGETS = ()  # nothing is written in this format
FAMILY = timm_vit.FAMILY
NORM_EPS = 1e-5
# Width to (heads, skip_lam): tiny, small, medium, large.
PUBLISHED = {240: (4, 1.0), 384: (6, 2.0), 512: (8, 2.0), 768: (12, 3.0)}
STEM = re.compile(r"patch_embed\.(conv|bn)([123])\.(.+)")


def matches(keys: Iterable[str]) -> bool:
    """Whether these are LV-ViT's parameter names: a ViT's with a convolutional stem."""
    keys = set(keys)
    return timm_vit.matches(keys) and "patch_embed.conv1.weight" in keys


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorViTConfig from the shapes; a file has no settings.

    Raises:
        ValueError: for a width that no published model has.
    """
    width = state["patch_embed.proj.weight"].shape[0]
    if width not in PUBLISHED:
        raise ValueError(f"width {width} must be of a published LV-ViT: {', '.join(map(str, PUBLISHED))}")
    heads, skip_lam = PUBLISHED[width]
    taken = timm_vit.fields(state, {**(settings or {}), "num_attention_heads": heads})
    channels = state["patch_embed.conv1.weight"].shape[1]
    return {
        **taken,
        "num_channels": channels,
        "stem": "convolution",
        "stem_channels": state["patch_embed.conv1.weight"].shape[0],
        # The stem has halved what the projection sees.
        **{name: _twice(taken[name]) for name in ("patch_size", "image_size")},
        "residual_scale": 1 / skip_lam,
        "layer_norm_eps": NORM_EPS,
        "token_classifier": "aux_head.weight" in state,
    }


def _twice(sides: int | list[int]) -> int | list[int]:
    return 2 * sides if isinstance(sides, int) else [2 * side for side in sides]


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names left out."""
    our_names = {key: name for key in state if (name := _own_name(key)) is not None}
    rest, unused = timm_vit.rename({key: value for key, value in state.items() if key not in our_names})
    return {**rest, **{name: state[key] for key, name in our_names.items()}}, unused


def _own_name(key: str) -> str | None:
    """Our name of a part that a timm ViT lacks."""
    if match := STEM.fullmatch(key):
        part = {"conv": "convolutions", "bn": "norms"}[match[1]]
        return f"vit.embeddings.stem.{part}.{int(match[2]) - 1}.{match[3]}"
    return "token_classifier" + key.removeprefix("aux_head") if key.startswith("aux_head.") else None
