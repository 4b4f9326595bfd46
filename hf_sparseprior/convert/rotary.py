"""DINOv3 and other models with rotary positions, known by their names alone, so that they are refused in clear words.

SparsePriorViT adds learned positions to its tokens and does not turn queries and keys. Names of transformers, and those
of timm and of DINOv3's own files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

TARGETS: tuple[str, ...] = ()
TRANSFORMERS = ("embeddings.patch_embeddings.weight", "embeddings.register_tokens")  # after the name of the model
QKV = {"blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight"}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of a ViT whose positions are no weights, or of EVA-02."""
    names = set(keys)
    if all(any(name.endswith(end) for name in names) for end in TRANSFORMERS):
        return True
    separate = "blocks.0.attn.q_proj.weight" in names
    return "patch_embed.proj.weight" in names and bool(QKV & names) and (separate or "pos_embed" not in names)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> NoReturn:
    """Raise ValueError: SparsePriorViT cannot express such a model."""
    settings = settings or {}
    refuse_rotary(settings.get("model_type") or settings.get("architecture") or "DINOv3, or a model like it")


def refuse_rotary(name: str) -> NoReturn:
    """Raise ValueError for a model of this name."""
    raise ValueError(
        f"{name}: rotary positions have no counterpart in SparsePriorViT, whose positions are learned; "
        "hf_sparseprior.apply_prior(model, prior) gives such a model of transformers or timm a prior in place"
    )
