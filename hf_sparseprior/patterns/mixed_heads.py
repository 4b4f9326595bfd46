"""Several supports in one layer: {"name": "heads", "heads": {"0-2": {...}, "3-5": {...}}}.

Heads are numbered from 0. Each group of heads has the pattern that its support makes for as many heads, which is
shuffled among them alone. One call computes all heads: the offsets and pairs of each are those of its group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_keys
from hf_sparseprior.base.numbered import numbered
from hf_sparseprior.base.resolved import PER_HEAD, ResolvedSupport
from hf_sparseprior.patterns.masks import Pairs
from hf_sparseprior.patterns.pattern import COMMON_SETTINGS, SUPPORTS, Pattern, Support, own_of
from hf_sparseprior.patterns.token_order import RASTER


def is_mixed(support: Any) -> bool:
    """Whether a support, in any form, is of groups of heads."""
    return isinstance(support, Mapping) and support.get("name") == PER_HEAD


def given_groups(support: Mapping[str, Any], num_heads: int) -> list[tuple[range, Any]]:
    """The heads and the support of each group, as given.

    Raises:
        ValueError: for further settings, and for numbers that are not those of the heads.
    """
    check_keys(support, ("name", PER_HEAD, *COMMON_SETTINGS), f"support {PER_HEAD!r}")
    if support.get("shuffle_seed") is not None:
        raise ValueError(
            f"shuffle_seed={support['shuffle_seed']!r} of support {PER_HEAD!r} must be in the supports of its groups"
        )
    return numbered(support.get(PER_HEAD), num_heads, PER_HEAD)


def entries_of(support: Any) -> list[Support]:
    """The registered supports in one, in any form; names that are none are left out."""
    if is_mixed(support):
        groups = support.get(PER_HEAD)
        parts = groups.values() if isinstance(groups, Mapping) else groups if isinstance(groups, Sequence) else ()
        return [entry for part in parts for entry in entries_of(part)]
    name = support.get("name") if isinstance(support, Mapping) else "dense" if support is None else support
    return [SUPPORTS[name]] if isinstance(name, str) and name in SUPPORTS else []


def kinds_of(support: ResolvedSupport) -> list[ResolvedSupport]:
    """The supports of the groups of heads of a resolved one; itself if all heads have one."""
    return list(support["heads"].values()) if is_mixed(support) else [support]


def groups_of(support: ResolvedSupport, num_heads: int) -> list[tuple[range, ResolvedSupport]]:
    """The heads and the support of each group of a resolved support."""
    return numbered(support["heads"], num_heads, PER_HEAD) if is_mixed(support) else [(range(num_heads), support)]


def unshuffled(support: ResolvedSupport) -> ResolvedSupport:
    """A resolved support of which head i has the i-th pattern in every layer."""
    changed: ResolvedSupport = {**support, "shuffle_seed": None}
    if is_mixed(support):
        changed["heads"] = {key: unshuffled(kind) for key, kind in support["heads"].items()}
    return changed


def support_name(support: ResolvedSupport) -> str:
    """Name of a resolved support; of groups of heads each once, "fibottention&dense"."""
    return "&".join(dict.fromkeys(kind["name"] for kind in kinds_of(support)))


def made_pattern(
    support: ResolvedSupport, num_heads: int, num_tokens: int, grid: Sequence[int] | None = None
) -> Pattern:
    """The pattern of a resolved support for all heads."""
    parts = [
        SUPPORTS[kind["name"]].pattern(len(heads), num_tokens, grid, own_of(kind))
        for heads, kind in groups_of(support, num_heads)
    ]
    if len(parts) == 1:
        return parts[0]
    further = functools.partial(_further_pairs, parts)
    return Pattern(
        [offsets for part in parts for offsets in part.offsets],
        further if any(part.pairs is not None for part in parts) else None,
        further if any(part.redrawn is not None for part in parts) else None,
    )


def _further_pairs(parts: Sequence[Pattern], layer: int, draw: int = 0) -> list[np.ndarray]:
    """The pairs besides the offsets of all heads, in a layer; none of those of a group that has offsets alone."""
    every: list[np.ndarray] = []
    for part in parts:
        pairs: Pairs = part.layer_pairs(layer, draw)
        every += [np.empty((0, 2), np.int64)] * len(part.offsets) if pairs is None else pairs
    return every


def support_orders(support: ResolvedSupport, num_heads: int) -> str | list[str]:
    """The order of the patches of each support, before heads are shuffled; one name if all have the same."""
    orders: list[str] = []
    for heads, kind in groups_of(support, num_heads):
        order = kind.get("order", RASTER)
        orders += [order] * len(heads) if isinstance(order, str) else order
    return orders[0] if len(set(orders)) == 1 else orders
