"""Our own saved models, as a source of conversions and as their usual target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_sparseprior.families import FAMILIES

# Our families by name, including those that are registered later.
TARGETS = FAMILIES


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of a SparsePriorViT or of another family of ours."""
    return any(key.removeprefix("vit.") == "embeddings.projection.weight" for key in keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """The source's config.json, including its prior."""
    if settings is None or settings.get("model_type") not in TARGETS:
        raise ValueError(f"a {' or a '.join(TARGETS)} needs its config.json next to the weights")
    return settings


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights as they are, but a base model's under the classifier's names. Nothing is left out."""
    prefix = "" if any(key.startswith("vit.") for key in state) else "vit."
    return {prefix + key: value for key, value in state.items()}, []


def check(model: Any, target: str, out: Path) -> None:
    """Every model of ours can be written as one."""


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write the model as `save_pretrained` does."""
    model.save_pretrained(folder)
    return [f"{type(model).__name__}, prior {model.config.prior_name}"]
