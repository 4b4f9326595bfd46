"""Supports: which keys each head of each layer sees, known before the data.

A support is a function of heads and patches that returns a pattern (`register_support`). A registered support is a
value of `prior` in every config, of `explain`, and of the tests that run over the registry. Prefix tokens (class,
distillation, registers) attend to everything and everything attends to them; they are what Longformer and BigBird call
global tokens.

N is the number of patch tokens, P of prefix tokens, T = P + N.
"""

from __future__ import annotations

import json
import math
import random
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from hf_sparseprior.base.checks import check_integer, check_keys, python_value, split_spec
from hf_sparseprior.base.numbered import counted, key_of
from hf_sparseprior.base.resolved import MASK_FILLS, PER_HEAD, TIMES, ResolvedSupport, Time
from hf_sparseprior.patterns.layer_pattern import LayerKey, LayerPattern
from hf_sparseprior.patterns.masks import (
    Pairs,
    attended_pairs,
    count_nonzeros,
    key_lists,
    mask_from_offsets,
    pruning_ratio,
    self_rows,
)
from hf_sparseprior.patterns.mixed_heads import (
    entries_of,
    given_groups,
    groups_of,
    is_mixed,
    kinds_of,
    made_pattern,
    support_name,
    support_orders,
)
from hf_sparseprior.patterns.pattern import (
    COMMON_SETTINGS,
    SUPPORTS,
    Pattern,
    Support,
    grid_of,
    own_grid,
    own_of,
    register_support,
    support_settings,
)
from hf_sparseprior.patterns.token_order import RASTER, check_order, order_ranks

# isort: split
# These files register their supports, in the order of these imports.
from hf_sparseprior.patterns.fibottention import fibottention  # noqa: F401

# isort: split
from hf_sparseprior.patterns.radial import radial  # noqa: F401

# isort: split
from hf_sparseprior.patterns.baselines import longformer  # noqa: F401

# isort: split
from hf_sparseprior.patterns.neighborhood import neighborhood  # noqa: F401

__all__ = [
    "COMMON_SETTINGS",
    "MASK_FILLS",
    "SUPPORTS",
    "LayerKey",
    "LayerPattern",
    "Pairs",
    "Pattern",
    "Support",
    "attended_pairs",
    "build_mask",
    "check_time",
    "count_nonzeros",
    "has_pairs",
    "head_offsets",
    "key_lists",
    "layer_order",
    "layer_pattern",
    "mask_from_offsets",
    "needs_grid",
    "own_grid",
    "pruning_ratio",
    "redraws",
    "register_support",
    "resolve_support",
    "self_rows",
    "shared_pattern",
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
        grid: (height, width) or (frames, height, width) of the patch tokens, for supports that see it and orders along
            a curve; may be left out if N is a square.

    Raises:
        ValueError: the message has the field, the value and what is allowed.
    """
    if isinstance(support, Mapping) and is_mixed(support):
        return _resolve_mixed(support, check_integer("num_heads", num_heads, 1), num_tokens, grid)
    name, spec = split_spec("dense" if support is None else support, "support", SUPPORTS)
    settings, count = support_settings(name), check_integer("num_tokens", num_tokens, 1)
    _check_settings(name, spec)
    settings.update((key, python_value(value)) for key, value in spec.items())
    common = {key: settings[key] for key in COMMON_SETTINGS}
    if common["shuffle_seed"] is not None:
        common["shuffle_seed"] = check_integer("shuffle_seed", common["shuffle_seed"], 0, ", or None")
    if common["mask_fill"] not in MASK_FILLS:
        raise ValueError(f"mask_fill={common['mask_fill']!r} must be one of {', '.join(MASK_FILLS)}")
    pattern_settings = SUPPORTS[name].check(own_of(settings))
    resolved = cast("ResolvedSupport", {"name": name, **pattern_settings, **common})
    order = check_order(settings.get("order", RASTER), num_heads)
    if order != RASTER:  # left out otherwise, so that configs stay what they were before there was an order
        resolved["order"] = order
        order_ranks(order, grid_of(num_tokens, grid, f"order={order!r}"))
    # Its function checks values that depend on heads and grid.
    SUPPORTS[name].pattern(check_integer("num_heads", num_heads, 1), count, grid, pattern_settings)
    return resolved


def _resolve_mixed(
    support: Mapping[str, Any], num_heads: int, num_tokens: int, grid: Sequence[int] | None
) -> ResolvedSupport:
    """The full form of supports of groups of heads; of the one support where there is only one group, or all is dense.

    Raises:
        ValueError: as `resolve_support`, with the heads; and for groups that one call cannot serve.
    """
    groups: dict[str, ResolvedSupport] = {}
    for heads, spec in given_groups(support, num_heads):
        if is_mixed(spec):
            raise ValueError("heads: the support of a group of heads cannot have groups itself")
        try:
            groups[key_of(heads)] = resolve_support(spec, len(heads), num_tokens, grid)
        except ValueError as error:
            raise ValueError(f"{error} ({counted('head', heads)} of {num_heads})") from None
    kinds = list(groups.values())
    fill = support.get("mask_fill", kinds[0]["mask_fill"])
    if other := next((kind["mask_fill"] for kind in kinds if kind["mask_fill"] != fill), None):
        raise ValueError(f"heads: mask_fill={other!r} must be {fill!r}, the same for all heads of a layer")
    if len(kinds) == 1 or all(kind["name"] == "dense" for kind in kinds):
        return kinds[0]
    return {"name": PER_HEAD, "heads": groups, "shuffle_seed": None, "mask_fill": fill}


def support_pattern(
    support: SupportSpec, *, num_heads: int, num_tokens: int, grid: Sequence[int] | None = None, **settings: Any
) -> Pattern:
    """The pattern of a support; arguments as in `head_offsets`."""
    num_heads = check_integer("num_heads", num_heads, 1)
    num_tokens = check_integer("num_tokens", num_tokens, 1)
    if isinstance(support, Mapping) and is_mixed(support):
        resolved = resolve_support({**support, **settings}, num_heads, num_tokens, grid)
        return made_pattern(resolved, num_heads, num_tokens, grid)
    name, spec = split_spec(support, "support", SUPPORTS)
    spec.update(settings)
    _check_settings(name, spec)
    pattern_settings = SUPPORTS[name].check(own_of({**support_settings(name), **spec}))
    return SUPPORTS[name].pattern(num_heads, num_tokens, grid, pattern_settings)


def _check_settings(name: str, spec: Mapping[str, Any]) -> None:
    settings = support_settings(name)
    if "order" in spec and "order" not in settings:
        raise ValueError(f"support {name!r} has no order, its pairs are no offsets; leave order={spec['order']!r} out")
    check_keys(spec, list(settings), f"support {name!r}")


# No pair is left out.
DENSE = resolve_support(None, num_heads=1, num_tokens=1)

# Patterns of plans, for as long as a plan has them. All layers of a model have one: what differs between layers is only
# which head has which offsets, and the pairs that are drawn.
_patterns: weakref.WeakValueDictionary[tuple, Pattern] = weakref.WeakValueDictionary()


def shared_pattern(support: ResolvedSupport, num_heads: int, grid: tuple[int, ...]) -> Pattern:
    """The pattern of a support over a grid, made once for all that keep it. Its offsets must not be changed."""
    # The functions too, as a name can be registered anew.
    functions = tuple(entry.function for entry in entries_of(support))
    key = (functions, json.dumps(support, sort_keys=True), num_heads, grid)
    if (pattern := _patterns.get(key)) is None:
        _patterns[key] = pattern = made_pattern(support, num_heads, math.prod(grid), grid)
    return pattern


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


def head_order(support: ResolvedSupport, num_heads: int, layer: int) -> list[int]:
    """Which support number (from 0) each head of a layer uses: `layer_order` of each group of heads."""
    order = []
    for heads, kind in groups_of(support, num_heads):
        order += [heads.start + number for number in layer_order(len(heads), layer, kind["shuffle_seed"])]
    return order


def layer_pattern(support: ResolvedSupport, key: LayerKey) -> LayerPattern:
    """The pairs of a layer's heads, shuffled as the support's `shuffle_seed` says.

    Those of all frames of a clip are not listed where they are those of one frame, see `LayerPattern.repeats`.

    Raises:
        ValueError: if lists of pairs over a clip would take too much memory.
    """
    pattern_grid = key.grid if support["name"] == "dense" else key.own_grid
    whole = shared_pattern(support, key.num_heads, pattern_grid)
    order = head_order(support, key.num_heads, key.layer)
    numbers = [order[head] for head in key.head_numbers]
    pairs = whole.layer_pairs(key.layer, key.draw)
    pattern = LayerPattern(
        support=support_name(support),
        key=key,
        offsets=[whole.offsets[number] for number in numbers],
        pairs=None if pairs is None else [pairs[head] for head in key.head_numbers],
        ranks=_ranks(support_orders(support, key.num_heads), pattern_grid, numbers),
        repeats=math.prod(pattern_grid) < key.num_tokens,
        whole=whole,
    )
    return pattern if key.time == "frame" else pattern.listed(same_frame=True)


def _ranks(order: str | list[str], grid: tuple[int, ...], numbers: Sequence[int]) -> np.ndarray | None:
    """Rank of every patch in the order of each head, (H, N), or (1, N) if all heads have one; None: raster.

    A list of orders is shuffled with the offsets: support i has the i-th. `numbers`: which support each head has.
    """
    if not isinstance(order, str):
        order = [order[number] for number in numbers]
    return None if order == RASTER else order_ranks(order, grid)


def check_time(time: Any) -> Time:
    """A name of how support and decay see time."""
    if not isinstance(time, str) or time not in TIMES:
        raise ValueError(f"time={time!r} must be one of {', '.join(TIMES)}")
    return time


def has_pairs(name: str) -> bool:
    """Whether a support has pairs off its diagonals, which not every backend can take."""
    grid = (1, 2, 2) if SUPPORTS[name].sees_time else (2, 2)
    return support_pattern(name, num_heads=1, num_tokens=4, grid=grid).pairs is not None


def redraws(support: ResolvedSupport) -> bool:
    """Whether a support draws its pairs anew in each pass of training."""
    return any(bool(kind.get("redraw", False)) for kind in kinds_of(support))


def needs_grid(support: SupportSpec | None) -> bool:
    """Whether a support is a pattern in two or three dimensions, or counts its offsets along a curve."""
    if isinstance(support, Mapping) and is_mixed(support):
        groups = support.get(PER_HEAD)
        return any(map(needs_grid, groups.values() if isinstance(groups, Mapping) else groups or ()))
    name, spec = split_spec("dense" if support is None else support, "support", SUPPORTS)
    return SUPPORTS[name].sees_grid or spec.get("order", RASTER) != RASTER


def build_mask(
    support: SupportSpec,
    *,
    num_heads: int,
    num_tokens: int,
    num_prefix_tokens: int = 0,
    layer: int = 0,
    grid: Sequence[int] | None = None,
    time: Time = "frame",
    **settings: Any,
) -> np.ndarray:
    """Boolean mask (num_heads, T, T), True where a query (row) attends to a key (column).

    Args:
        support: a registered name or {"name": ..., settings}.
        num_heads: heads of the layer.
        num_tokens: patch tokens N; T = num_prefix_tokens + N.
        num_prefix_tokens: number of first rows and columns, which are all True.
        layer: layer number from 0; with `shuffle_seed` it decides which head has which support.
        grid: (height, width) or (frames, height, width) of the patch tokens, for supports in two or three dimensions
            and orders along a curve; may be left out if N is a square.
        time: of a clip, how the support sees time. "frame": where in their frames two patches are, whenever these are.
            "clip": offsets count over all patches, frame after frame, and an order runs along a curve in three
            dimensions. "axes": offsets count within a frame, and along time at one place of the frames.
        settings: the support's settings, also `shuffle_seed` (default 0; None: no shuffling).
    """
    spec = dict(support) if isinstance(support, Mapping) else {"name": support}
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0)
    layer, time = check_integer("layer", layer, 0), check_time(time)
    given = None if grid is None else grid_of(num_tokens, grid, "build_mask")
    pattern_grid = given if given is None or len(given) == 2 else own_grid(given, time)
    count = num_tokens if pattern_grid is None else math.prod(pattern_grid)
    resolved = resolve_support({**spec, **settings}, num_heads, count, pattern_grid)
    if given is None:
        in_two_dimensions = needs_grid(resolved) and not any(entry.sees_time for entry in entries_of(resolved))
        given = grid_of(num_tokens, None, support_name(resolved)) if in_two_dimensions else (1, num_tokens)
    key = LayerKey(check_integer("num_heads", num_heads, 1), given, layer, time if len(given) == 3 else "frame")
    return layer_pattern(resolved, key).mask(num_prefix_tokens)


def support_notes(support: ResolvedSupport, key: LayerKey, num_prefix_tokens: int) -> list[str]:
    """What a user should know about this support on this grid: its own notes, and heads that see nothing."""
    notes = []
    for heads, kind in groups_of(support, key.num_heads):
        of_group = _notes_of_group(kind, key._replace(num_heads=len(heads)), num_prefix_tokens)
        where = f"{counted('head', heads)}: " if is_mixed(support) else ""
        notes += [f"{where}{note}" for note in of_group]
    return notes


def _notes_of_group(support: ResolvedSupport, key: LayerKey, num_prefix_tokens: int) -> list[str]:
    grid = key.own_grid
    num_tokens, size = math.prod(grid), "x".join(map(str, grid))
    pattern = shared_pattern(support, key.num_heads, grid)
    notes = list(SUPPORTS[support["name"]].notes(cast("Mapping[str, Any]", support), pattern, grid))
    if key.time == "axes" and support["name"] != "dense":
        still = [
            str(number)
            for number, offsets in enumerate(pattern.offsets, 1)
            if not any(0 < o < key.frames for o in offsets)
        ]
        if still:
            notes.append(
                f"{support['name']}: supports {', '.join(still)} of {key.num_heads} have no offset below the "
                f"{key.frames} frames; patches of those heads see no other frame"
            )
    empty = [str(number) for number, offsets in enumerate(pattern.offsets, start=1) if not offsets]
    if empty and num_tokens > 1 and pattern.pairs is None:
        partner = "prefix tokens" if num_prefix_tokens else "themselves"
        notes.append(
            f"{support['name']}: supports {', '.join(empty)} of {key.num_heads} have no offset within their window on "
            f"the {size} grid; patches of those heads attend to {partner} only"
        )
    return notes
