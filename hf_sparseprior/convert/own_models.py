"""Our own saved models of every family, as a source of conversions and as their usual target."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.convert.common import base_prefix


def is_ours(settings: dict[str, Any] | None) -> bool:
    """Whether this is config.json of one of our families."""
    kind = (settings or {}).get("model_type")
    return isinstance(kind, str) and kind in FAMILIES


def matches(keys: Iterable[str]) -> bool:
    """Whether these are parameter names of a model of our families, with or without a classifier.

    Only weights that lie there without their config.json are recognised by names; `fields` refuses them.
    """
    names = {f"{prefix}embeddings.projection.weight" for prefix in ("", *map(base_prefix, FAMILIES))}
    return not names.isdisjoint(keys)


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """The source's config.json, including its prior."""
    if settings is None or not is_ours(settings):
        raise ValueError(f"a {' or a '.join(FAMILIES)} needs its config.json next to the weights")
    return settings


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights as they are. Nothing is left out."""
    return state, []


def check(model: Any, target: str, out: Path) -> None:
    """Every model of ours can be written as one."""


def write(model: Any, target: str, folder: Path) -> list[str]:
    """Write the model as `save_pretrained` does."""
    model.save_pretrained(folder)
    return [f"{type(model).__name__}, prior {model.config.prior_name}"]
