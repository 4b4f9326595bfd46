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
from hf_sparseprior.base.resolved import MASK_FILLS, TIMES, ResolvedSupport, Time
from hf_sparseprior.patterns.masks import (
    Pairs,
    attended_pairs,
    check_listed,
    count_nonzeros,
    key_lists,
    mask_from_offsets,
    pairs_in_frames,
    pruning_ratio,
    self_rows,
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
from hf_sparseprior.patterns.token_order import RASTER, check_order, mask_in_raster, order_ranks

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
    "Pairs",
    "Pattern",
    "Support",
    "attended_pairs",
    "build_mask",
    "check_time",
    "count_nonzeros",
    "frame_pairs",
    "has_pairs",
    "head_offsets",
    "key_lists",
    "layer_offsets",
    "layer_order",
    "layer_pairs",
    "layer_ranks",
    "mask_from_offsets",
    "needs_grid",
    "own_grid",
    "pruning_ratio",
    "register_support",
    "resolve_support",
    "seen_pairs",
    "self_rows",
    "shared_pattern",
    "support_notes",
    "support_of_heads",
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
    name, spec = split_spec("dense" if support is None else support, "support", SUPPORTS)
    settings = support_settings(name)
    _check_settings(name, spec)
    settings.update((key, python_value(value)) for key, value in spec.items())
    common = {key: settings[key] for key in COMMON_SETTINGS}
    if common["shuffle_seed"] is not None:
        common["shuffle_seed"] = check_integer("shuffle_seed", common["shuffle_seed"], 0, ", or None")
    if common["mask_fill"] not in MASK_FILLS:
        raise ValueError(f"mask_fill={common['mask_fill']!r} must be one of {', '.join(MASK_FILLS)}")
    own = SUPPORTS[name].check(own_of(settings))
    resolved = cast("ResolvedSupport", {"name": name, **own, **common})
    order = check_order(settings.get("order", RASTER), num_heads)
    if order != RASTER:  # left out otherwise, so that configs stay what they were before there was an order
        resolved["order"] = order
        order_ranks(order, grid_of(num_tokens, grid, f"order={order!r}"))
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
    _check_settings(name, spec)
    return SUPPORTS[name].pattern(num_heads, num_tokens, grid, own_of(spec))


# Patterns of plans, for as long as a plan has them. All layers of a model have one: what differs between layers is only
# which head has which offsets, and the pairs that are drawn.
_patterns: weakref.WeakValueDictionary[tuple, Pattern] = weakref.WeakValueDictionary()


def shared_pattern(support: ResolvedSupport, num_heads: int, grid: tuple[int, ...]) -> Pattern:
    """The pattern of a support over a grid, made once for all that keep it. Its offsets must not be changed."""
    # The function too, as a name can be registered anew.
    key = (SUPPORTS[support["name"]].function, json.dumps(support, sort_keys=True), num_heads, grid)
    if (pattern := _patterns.get(key)) is None:
        pattern = support_pattern(support, num_heads=num_heads, num_tokens=math.prod(grid), grid=grid)
        _patterns[key] = pattern
    return pattern


def _check_settings(name: str, spec: Mapping[str, Any]) -> None:
    settings = support_settings(name)
    if "order" in spec and "order" not in settings:
        raise ValueError(f"support {name!r} has no order, its pairs are no offsets; leave order={spec['order']!r} out")
    check_keys(spec, list(settings), f"support {name!r}")


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
    pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    return _shuffled(support, pattern.offsets, layer)


def _shuffled(support: SupportSpec, offsets: list[list[int]], layer: int) -> list[list[int]]:
    seed = COMMON_SETTINGS["shuffle_seed"]
    if not isinstance(support, str):
        seed = support.get("shuffle_seed", seed)
    return [offsets[number] for number in layer_order(len(offsets), layer, seed)]


def layer_pairs(
    support: SupportSpec, *, num_heads: int, num_tokens: int, layer: int, grid: Sequence[int] | None = None
) -> list[np.ndarray] | None:
    """Pairs (query, key) of patches off the diagonals, int64 (n, 2) for each head of a layer; None: there are none.

    As in `layer_offsets`, patches are numbered in the support's order.
    """
    pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    return None if pattern.pairs is None else pattern.pairs(layer)


def support_of_heads(
    support: SupportSpec,
    *,
    num_heads: int,
    num_tokens: int,
    layer: int,
    grid: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    pattern: Pattern | None = None,
) -> tuple[list[list[int]], Pairs]:
    """Offsets and further pairs of some heads of a layer, shuffled as the support's `shuffle_seed` says.

    Args:
        support, num_tokens, layer, grid: as in `build_mask`.
        num_heads: for which the support is made.
        heads: numbers of those that the layer has, from 0; None: all.
        pattern: that of the support for these numbers, if it is known.
    """
    if pattern is None:
        pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    offsets = _shuffled(support, pattern.offsets, layer)
    pairs = None if pattern.pairs is None else pattern.pairs(layer)
    if heads is None:
        return offsets, pairs
    return [offsets[head] for head in heads], None if pairs is None else [pairs[head] for head in heads]


def layer_ranks(
    support: SupportSpec,
    *,
    num_heads: int,
    num_tokens: int,
    layer: int,
    grid: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> np.ndarray | None:
    """Rank of every patch in the order of each head, int64 (H, N), or (1, N) if all heads have one order; None: raster.

    A list of orders is shuffled with the offsets: support i has the i-th. Arguments as in `support_of_heads`.
    """
    _, spec = split_spec(support, "support", SUPPORTS)
    order = check_order(spec.get("order", RASTER), num_heads)
    if order == RASTER:
        return None
    if not isinstance(order, str):
        numbers = layer_order(num_heads, layer, spec.get("shuffle_seed", COMMON_SETTINGS["shuffle_seed"]))
        order = [order[numbers[head]] for head in (range(num_heads) if heads is None else heads)]
    return order_ranks(order, grid_of(num_tokens, grid, f"order={order!r}"))


def seen_pairs(
    support: SupportSpec,
    *,
    num_heads: int,
    grid: Sequence[int],
    time: Time = "frame",
    layer: int = 0,
    heads: Sequence[int] | None = None,
    pattern: Pattern | None = None,
) -> tuple[list[list[int]], Pairs, np.ndarray | None]:
    """Offsets and further pairs of a layer's heads, of an image or over the frames of a clip, and their order.

    Args:
        support, layer: as in `build_mask`.
        num_heads, heads: as in `support_of_heads`.
        grid: (height, width), or (frames, height, width); of a clip all patches are numbered, frame after frame.
        time: of a clip, as in `build_mask`.
        pattern: that of the support over the grid that it is made for (`own_grid`), if it is known.

    Returns:
        Offsets and pairs as of `support_of_heads`, and the ranks of the patches in whose order they are, as of
        `layer_ranks`.
    """
    name, _ = split_spec(support, "support", SUPPORTS)
    own = own_grid(grid, "clip" if name == "dense" else time)
    offsets, pairs, ranks = _support_of_grid(support, num_heads, own, layer, heads, pattern)
    if math.prod(own) == math.prod(grid):
        return offsets, pairs, ranks
    repeats = grid[0] ** 2 if time == "frame" else grid[0]
    others: Sequence[np.ndarray | None] = [None] * len(offsets) if pairs is None else pairs
    listed = {
        (tuple(head), id(other)): repeats * count_nonzeros(head, math.prod(own), 0, other)
        for head, other in zip(offsets, others, strict=True)
    }
    size = "x".join(map(str, grid))
    check_listed([*listed.values()], len(offsets), f"support {name!r} with time={time!r} over {size} patches")
    # Offsets of one frame would cross from a frame into the next. Those along time stay in their patch.
    pairs = pairs_in_frames(offsets, math.prod(own), grid[0], pairs, ranks, same_frame=time == "axes")
    if time == "frame":
        return [[] for _ in offsets], pairs, None
    return [[o * math.prod(own) for o in head if 0 < o < grid[0]] for head in offsets], pairs, None


def _support_of_grid(
    support: SupportSpec,
    num_heads: int,
    grid: Sequence[int],
    layer: int,
    heads: Sequence[int] | None,
    pattern: Pattern | None,
) -> tuple[list[list[int]], Pairs, np.ndarray | None]:
    """Offsets and further pairs of a layer's heads, and the ranks of their order, over one grid."""
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_tokens": math.prod(grid), "grid": grid, "layer": layer}
    offsets, pairs = support_of_heads(support, heads=heads, pattern=pattern, **sizes)
    return offsets, pairs, layer_ranks(support, heads=heads, **sizes)


def frame_pairs(
    support: SupportSpec,
    *,
    num_heads: int,
    grid: Sequence[int],
    time: Time = "frame",
    layer: int = 0,
    heads: Sequence[int] | None = None,
    pattern: Pattern | None = None,
) -> tuple[list[list[int]], Pairs, np.ndarray | None] | None:
    """Offsets, pairs and ranks of one frame, if those of a clip are the same in and between all of its frames.

    Arguments are as in `seen_pairs`, which lists the pairs of all frames. None: they are not the same.
    """
    if len(grid) == 2 or grid[0] == 1 or time != "frame" or split_spec(support, "support", SUPPORTS)[0] == "dense":
        return None
    return _support_of_grid(support, num_heads, grid[1:], layer, heads, pattern)


def check_time(time: Any) -> Time:
    """A name of how support and decay see time."""
    if not isinstance(time, str) or time not in TIMES:
        raise ValueError(f"time={time!r} must be one of {', '.join(TIMES)}")
    return time


def has_pairs(name: str) -> bool:
    """Whether a support has pairs off its diagonals, which not every backend can take."""
    grid = (1, 2, 2) if SUPPORTS[name].sees_time else (2, 2)
    return support_pattern(name, num_heads=1, num_tokens=4, grid=grid).pairs is not None


def needs_grid(support: SupportSpec | None) -> bool:
    """Whether a support is a pattern in two or three dimensions, or counts its offsets along a curve."""
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
    name, spec = split_spec(support, "support", SUPPORTS)
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0)
    layer, time = check_integer("layer", layer, 0), check_time(time)
    whole = (1, num_tokens) if grid is None else grid_of(num_tokens, grid, "build_mask")
    own = grid if grid is None or len(grid) == 2 else own_grid(grid, time)
    count = num_tokens if own is None else math.prod(own)
    resolved = resolve_support({"name": name, **spec, **settings}, num_heads, count, own)
    if len(whole) == 2:
        sizes: dict[str, Any] = {"num_heads": num_heads, "num_tokens": num_tokens, "layer": layer, "grid": grid}
        (offsets, pairs), ranks = support_of_heads(resolved, **sizes), layer_ranks(resolved, **sizes)
    else:
        offsets, pairs, ranks = seen_pairs(resolved, num_heads=num_heads, grid=whole, time=time, layer=layer)
    mask = mask_from_offsets(offsets, num_tokens, num_prefix_tokens, pairs)
    return mask if ranks is None else mask_in_raster(mask, ranks, num_prefix_tokens)


def support_notes(
    support: ResolvedSupport, num_heads: int, grid: Sequence[int], num_prefix_tokens: int, time: Time = "frame"
) -> list[str]:
    """What a user should know about this support on this grid: its own notes, and heads that see nothing.

    `grid` and `time` are as in `seen_pairs`.
    """
    whole, grid = tuple(grid), own_grid(grid, time)
    num_tokens, size = math.prod(grid), "x".join(map(str, grid))
    pattern = support_pattern(support, num_heads=num_heads, num_tokens=num_tokens, grid=grid)
    notes = SUPPORTS[support["name"]].notes(cast("Mapping[str, Any]", support), pattern, grid)
    if time == "axes" and support["name"] != "dense":
        still = [str(number) for number, own in enumerate(pattern.offsets, 1) if not any(0 < o < whole[0] for o in own)]
        if still:
            notes.append(
                f"{support['name']}: supports {', '.join(still)} of {num_heads} have no offset below the {whole[0]} "
                "frames; patches of those heads see no other frame"
            )
    empty = [str(number) for number, own in enumerate(pattern.offsets, start=1) if not own]
    if empty and num_tokens > 1 and pattern.pairs is None:
        partner = "prefix tokens" if num_prefix_tokens else "themselves"
        notes.append(
            f"{support['name']}: supports {', '.join(empty)} of {num_heads} have no offset within their window on "
            f"the {size} grid; patches of those heads attend to {partner} only"
        )
    return notes
