"""Models with rotary positions in formats that are not converted, known by their names alone, so that they are refused
in clear words: those of timm, and DINOv3's own files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

TARGETS: tuple[str, ...] = ()
QKV = {"blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight"}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of a ViT whose positions are no weights, or of EVA-02."""
    names = set(keys)
    separate = "blocks.0.attn.q_proj.weight" in names
    return "patch_embed.proj.weight" in names and bool(QKV & names) and (separate or "pos_embed" not in names)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> NoReturn:
    """Raise ValueError: such a file is not converted."""
    refuse_rotary((settings or {}).get("architecture") or "DINOv3, or a model like it")


def refuse_rotary(name: str) -> NoReturn:
    """Raise ValueError for a model of this name."""
    raise ValueError(
        f"{name}: of models with rotary positions only DINOv3 in transformers' format is converted; "
        "hf_sparseprior.apply_prior(model, prior) gives one of transformers or timm a prior in place"
    )
