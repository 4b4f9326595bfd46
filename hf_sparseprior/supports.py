"""Supports: which keys each head of each layer sees, known before the data.

A support is a function of heads and patches that returns a pattern (`register_support`). A registered support is a
value of `prior` in every config, of `explain`, and of the tests that run over the registry. Prefix tokens (class,
distillation, registers) attend to everything and everything attends to them; they are what Longformer and BigBird call
global tokens.

N is the number of patch tokens, P of prefix tokens, T = P + N.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from .checks import check_integer, check_keys, python_value, split_spec
from .fibottention import fibottention  # noqa: F401  the file registers its supports, the first in lists of names
from .masks import (
    Pairs,
    attended_pairs,
    count_nonzeros,
    key_lists,
    mask_from_offsets,
    pruning_ratio,
    self_rows,
)
from .pattern import COMMON_SETTINGS, SUPPORTS, Pattern, Support, register_support, support_settings
from .resolved import MASK_FILLS, ResolvedSupport
from .support_baselines import longformer  # noqa: F401  as does this one

__all__ = [
    "COMMON_SETTINGS",
    "MASK_FILLS",
    "SUPPORTS",
    "Pairs",
    "Pattern",
    "Support",
    "attended_pairs",
    "build_mask",
    "count_nonzeros",
    "has_pairs",
    "head_offsets",
    "key_lists",
    "layer_offsets",
    "layer_order",
    "layer_pairs",
    "mask_from_offsets",
    "needs_grid",
    "pruning_ratio",
    "register_support",
    "resolve_support",
    "self_rows",
    "support_notes",
    "support_pattern",
    "support_settings",
]

SupportSpec = str | Mapping[str, Any] | ResolvedSupport


def resolve_support(
    support: SupportSpec | None, num_heads: int, num_tokens: int, grid: Sequence[int] | None = None
) -> ResolvedSupport:
    """The full form of a support: its name with every setting, checked for this number of heads and patch tokens.

    Args:
        support: a registered name or {"name": ..., settings}; None: dense.
        num_heads: 1 or more.
        num_tokens: patch tokens N.
        grid: (height, width) of the patch tokens, for supports in two dimensions; may be left out if N is a square.

    Raises:
        ValueError: the message has the field, the value and what is allowed.
    """
    name, spec = split_spec("dense" if support is None else support, "support", SUPPORTS)
    settings = support_settings(name)
    check_keys(spec, list(settings), f"support {name!r}")
    settings.update((key, python_value(value)) for key, value in spec.items())
    common = {key: settings[key] for key in COMMON_SETTINGS}
    if common["shuffle_seed"] is not None:
        common["shuffle_seed"] = check_integer("shuffle_seed", common["shuffle_seed"], 0, ", or None")
    if common["mask_fill"] not in MASK_FILLS:
        raise ValueError(f"mask_fill={common['mask_fill']!r} must be one of {', '.join(MASK_FILLS)}")
    own = SUPPORTS[name].check({key: value for key, value in settings.items() if key not in COMMON_SETTINGS})
    resolved = cast("ResolvedSupport", {"name": name, **own, **common})
    support_pattern(resolved, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    return resolved


def support_pattern(
    support: SupportSpec, *, num_heads: int, num_tokens: int, grid: Sequence[int] | None = None, **settings: Any
) -> Pattern:
    """The pattern of a support; arguments as in `head_offsets`."""
    num_heads = check_integer("num_heads", num_heads, 1)
    num_tokens = check_integer("num_tokens", num_tokens, 1)
    name, spec = split_spec(support, "support", SUPPORTS)
    spec.update(settings)
    check_keys(spec, list(support_settings(name)), f"support {name!r}")
    own = {key: value for key, value in spec.items() if key not in COMMON_SETTINGS}
    return SUPPORTS[name].pattern(num_heads, num_tokens, grid, own)


def head_offsets(
    support: SupportSpec, *, num_heads: int, num_tokens: int, grid: Sequence[int] | None = None, **settings: Any
) -> list[list[int]]:
    """Offsets of each head before shuffling: `num_heads` sorted lists of integers in 0..num_tokens-1.

    Args:
        support: a registered name or {"name": ..., settings}.
        num_heads: 1 or more.
        num_tokens: patch tokens N, 1 or more; prefix tokens are not counted.
        grid: (height, width) of the patch tokens, for supports in two dimensions; may be left out if N is a square.
        settings: the support's settings; they add to those in the dict.
    """
    return support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid, **settings).offsets


def layer_order(num_heads: int, layer: int, shuffle_seed: int | None) -> list[int]:
    """Which support number (from 0) each head of a layer uses.

    A private generator per layer gives every process, platform and reload the same order and leaves the global
    generators alone. `shuffle_seed=None`: no shuffling.
    """
    order = list(range(num_heads))
    if shuffle_seed is not None:
        random.Random(shuffle_seed + layer).shuffle(order)
    return order


def layer_offsets(
    support: SupportSpec, *, num_heads: int, num_tokens: int, layer: int, grid: Sequence[int] | None = None
) -> list[list[int]]:
    """Offsets of each head of one layer, shuffled as the support's `shuffle_seed` says."""
    offsets = head_offsets(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    seed = COMMON_SETTINGS["shuffle_seed"]
    if not isinstance(support, str):
        seed = support.get("shuffle_seed", seed)
    return [offsets[number] for number in layer_order(num_heads, layer, seed)]


def layer_pairs(
    support: SupportSpec, *, num_heads: int, num_tokens: int, layer: int, grid: Sequence[int] | None = None
) -> list[np.ndarray] | None:
    """Pairs (query, key) of patches off the diagonals, int64 (n, 2) for each head of a layer; None: there are none."""
    pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    return None if pattern.pairs is None else pattern.pairs(layer)


def has_pairs(name: str) -> bool:
    """Whether a support has pairs off its diagonals, which not every backend can take."""
    return support_pattern(name, num_heads=1, num_tokens=4).pairs is not None


def needs_grid(support: SupportSpec | None) -> bool:
    """Whether a support is a pattern in two dimensions."""
    name, _ = split_spec("dense" if support is None else support, "support", SUPPORTS)
    return SUPPORTS[name].sees_grid


def build_mask(
    support: SupportSpec,
    *,
    num_heads: int,
    num_tokens: int,
    num_prefix_tokens: int = 0,
    layer: int = 0,
    grid: Sequence[int] | None = None,
    **settings: Any,
) -> np.ndarray:
    """Boolean mask (num_heads, T, T), True where a query (row) attends to a key (column).

    Args:
        support: a registered name or {"name": ..., settings}.
        num_heads: heads of the layer.
        num_tokens: patch tokens N; T = num_prefix_tokens + N.
        num_prefix_tokens: number of first rows and columns, which are all True.
        layer: layer number from 0; with `shuffle_seed` it decides which head has which support.
        grid: (height, width) of the patch tokens, for supports in two dimensions; may be left out if N is a square.
        settings: the support's settings, also `shuffle_seed` (default 0; None: no shuffling).
    """
    name, spec = split_spec(support, "support", SUPPORTS)
    resolved = resolve_support({"name": name, **spec, **settings}, num_heads, num_tokens, grid)
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0)
    layer = check_integer("layer", layer, 0)
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_tokens": num_tokens, "layer": layer, "grid": grid}
    offsets, pairs = layer_offsets(resolved, **sizes), layer_pairs(resolved, **sizes)
    return mask_from_offsets(offsets, num_tokens, num_prefix_tokens, pairs)


def support_notes(support: ResolvedSupport, num_heads: int, grid: Sequence[int], num_prefix_tokens: int) -> list[str]:
    """What a user should know about this support on this grid: its own notes, and heads that see nothing."""
    num_tokens = grid[0] * grid[1]
    pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    notes = SUPPORTS[support["name"]].notes(cast("Mapping[str, Any]", support), pattern, grid)
    empty = [str(number) for number, own in enumerate(pattern.offsets, start=1) if not own]
    if empty and num_tokens > 1 and pattern.pairs is None:
        partner = "prefix tokens" if num_prefix_tokens else "themselves"
        notes.append(
            f"{support['name']}: supports {', '.join(empty)} of {num_heads} have no offset within their window on "
            f"the {grid[0]}x{grid[1]} grid; patches of those heads attend to {partner} only"
        )
    return notes
