"""Supports of other papers, with the same pattern in every head, as in Fibottention's comparisons (section 6.1).

A pruning ratio is the percentage of pairs left out. The setting `pruning_ratio` counts pairs of patches only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_boolean, check_finite, check_integer, check_not_both
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.masks import count_nonzeros, pruning_ratio, unpruned_pairs
from hf_sparseprior.patterns.pattern import Pattern, register_support


@register_support("window")
def window(
    num_heads: int,
    num_tokens: int,
    *,
    w: int | None = None,
    diagonal: bool = True,
    pruning_ratio: float | None = None,
) -> list[list[int]]:
    """|j - k| <= w, with or without the diagonal, the same for all heads (Fibottention Tables 12, 13; w = 15)."""
    diagonal = check_boolean("diagonal", diagonal)
    first = 0 if diagonal else 1

    def offsets(w: int) -> list[int]:
        return list(range(first, min(w, num_tokens - 1) + 1))

    def pairs(w: int) -> int:
        return count_nonzeros(offsets(w), num_tokens)

    w = setting_for("w", w, pruning_ratio, 15, [range(first, max(first + 1, num_tokens))], pairs, num_tokens)
    return [offsets(w) for _ in range(num_heads)]


def setting_for(
    name: str,
    value: int | None,
    pruning_ratio: float | None,
    default: int,
    choices: Sequence[range],
    pairs: Callable[[int], int],
    num_tokens: int,
) -> int:
    """A support's only number: as given, or the one among `choices` whose pruning ratio is nearest to the given one.

    Args:
        name, value, default: name, value and default of the number; the first of `choices` is the smallest allowed.
        choices: ranges of numbers, none of them empty.
        pairs: how many pairs a head keeps for a number. Within each of `choices` it only rises with the number, or only
            falls.
    """
    check_not_both(name, value, pruning_ratio)
    if pruning_ratio is None:
        return default if value is None else check_integer(name, value, choices[0].start)
    kept = unpruned_pairs(pruning_ratio, num_tokens)

    def nearest(part: range) -> range:
        sign = 1 if pairs(part[0]) <= pairs(part[-1]) else -1
        place = bisect.bisect_left(part, sign * kept, key=lambda choice: sign * pairs(choice))
        return part[max(0, place - 1) : place + 1]

    near = [choice for part in choices for choice in nearest(part)]
    return min(near, key=lambda choice: abs(pairs(choice) - kept))


@register_support("longformer")
def longformer(
    num_heads: int, num_tokens: int, *, w: int | None = None, pruning_ratio: float | None = None
) -> list[list[int]]:
    """A sliding window of w tokens, counted on both sides together, and the diagonal (Beltagy et al. 2020).

    Prefix tokens are the global tokens; registers (`num_register_tokens`) give more of them. w = 2 is that of
    Fibottention's Table 2 (98.47 % at N = 196).
    """
    return sliding_window(num_heads, num_tokens, w, pruning_ratio)


def sliding_window(num_heads: int, num_tokens: int, w: int | None, pruning_ratio: float | None) -> list[list[int]]:
    """The diagonal and w / 2 diagonals on either side of it."""
    check_not_both("w", w, pruning_ratio)
    if w is not None and check_integer("w", w, 0) % 2:
        raise ValueError(f"w={w} must be even, it counts both sides of the diagonal together")

    def offsets(half: int) -> list[int]:
        return list(range(min(half, num_tokens - 1) + 1))

    def pairs(half: int) -> int:
        return count_nonzeros(offsets(half), num_tokens)

    half = None if w is None else w // 2
    half = setting_for("w", half, pruning_ratio, 1, [range(num_tokens)], pairs, num_tokens)
    return [offsets(half) for _ in range(num_heads)]


@register_support("strided")
def strided(
    num_heads: int,
    num_tokens: int,
    *,
    stride: int | None = None,
    local: int = 0,
    separate_heads: bool = False,
    pruning_ratio: float | None = None,
) -> list[list[int]]:
    """Sparse Transformer's strided pattern (Child et al. 2019, sections 4.2 and 4.3), without causality.

    It has two parts: a window of the nearest `local` tokens on either side, and every stride-th token of the whole
    sequence. They are merged in each head, or with `separate_heads` the heads have window and stride in turn. The 588
    of 196^2 pairs of Fibottention's Table 2 (98.47 %) are a window of 1 and stride 195 merged, which is Longformer's
    window and one pair more in each direction; or in separate heads a window of 1 and stride 65. Merged, stride 98 is
    the largest at which every patch sees another by its stride (97.96 %).

    With the default `local=0` it is the stride alone, and stride 65 keeps 592 pairs, 98.46 %.
    """
    local = check_integer("local", local, 0)
    if check_boolean("separate_heads", separate_heads):
        return separate_window_and_stride(num_heads, num_tokens, stride, local, pruning_ratio)

    def offsets(stride: int) -> list[int]:
        return sorted({*range(min(local, num_tokens - 1) + 1), *range(0, num_tokens, stride)})

    window = min(local, num_tokens - 1)
    window_pairs = count_nonzeros(range(window + 1), num_tokens)

    def pairs(stride: int) -> int:
        # In closed form, because there is a choice for each token of the window: window and multiples beyond it.
        first, last = window // stride + 1, (num_tokens - 1) // stride
        return window_pairs + (last - first + 1) * (2 * num_tokens - stride * (first + last))

    # A larger stride keeps fewer pairs only if all its tokens lie outside the window.
    last = max(1, num_tokens - 1)
    inside = min(local, last)
    choices = [range(choice, choice + 1) for choice in range(1, inside + 1)]
    choices += [range(inside + 1, last + 1)] if inside < last else []
    stride = setting_for("stride", stride, pruning_ratio, 65, choices, pairs, num_tokens)
    return [offsets(stride) for _ in range(num_heads)]


def separate_window_and_stride(
    num_heads: int, num_tokens: int, stride: int | None, local: int, pruning_ratio: float | None
) -> list[list[int]]:
    """The offsets of `strided` with heads of two kinds: the window in the first, third, ..., the stride in the others.

    Raises:
        ValueError: for one head, no window, or a pruning ratio, which two numbers could meet in many ways.
    """
    if pruning_ratio is not None:
        raise ValueError(f"pruning_ratio={pruning_ratio} with separate_heads=True must be None; give local and stride")
    if num_heads < 2 or not local:
        raise ValueError(
            f"separate_heads=True with local={local} and {num_heads} head(s): local must be 1 or more, heads 2 or more"
        )
    step = 65 if stride is None else check_integer("stride", stride, 1)
    kinds = [list(range(min(local, num_tokens - 1) + 1)), list(range(0, num_tokens, step))]
    return [kinds[head % 2] for head in range(num_heads)]


def _without_redraw(settings: Settings) -> Settings:
    """`redraw` is left out where it is off, so that configs stay what they were before there was a choice."""
    others = {key: value for key, value in settings.items() if key != "redraw"}
    return {**others, "redraw": True} if check_boolean("redraw", settings["redraw"]) else others


@register_support("random", ordered=False, check=_without_redraw)
def random_support(
    num_heads: int,
    num_tokens: int,
    *,
    pruning_ratio: float = 98.52,
    seed: int = 0,
    per_head: bool = False,
    redraw: bool = False,
) -> Pattern:
    """Pairs drawn uniformly at random: the same for every image, and different in each layer.

    A head has round((1 - pruning_ratio / 100) N^2) pairs (Fibottention Tables 2 and 10). `per_head` draws them for
    every head anew. They are not stored as diagonals.

    `redraw` draws them anew in each training pass of a model. The number of the draw is how many such passes the model
    has made. It is a buffer that is saved with the weights (`models.base_model.DrawCount`), so an interrupted run goes
    on with the draws that it would have had. In evaluation they are those of `redraw: false`.
    """
    count = unpruned_pairs(pruning_ratio, num_tokens)
    return _with_drawn_pairs([[] for _ in range(num_heads)], num_tokens, count, seed, per_head, redraw)


def _with_drawn_pairs(
    offsets: list[list[int]], num_tokens: int, count: int, seed: int, per_head: bool, redraw: bool
) -> Pattern:
    """The same offsets in all heads, and `count` random pairs in each."""
    check_integer("seed", seed, 0)
    check_boolean("per_head", per_head)

    def drawn(layer: int, draw: int = 0) -> list[np.ndarray]:
        return draw_pairs(len(offsets), num_tokens, (layer, draw), count, offsets[0], seed, per_head)

    return Pattern(offsets, pairs=drawn, redrawn=drawn if redraw else None)


def _bigbird_notes(support: Mapping[str, Any], pattern: Pattern, grid: Sequence[int]) -> list[str]:
    wanted, highest = support["pruning_ratio"], pruning_ratio(pattern.offsets, math.prod(grid))
    if wanted is None or wanted <= highest:
        return []
    return [
        f"{support['name']}: pruning_ratio={wanted} is out of reach on the {'x'.join(map(str, grid))} grid; the window "
        f"alone leaves {highest:.2f} %"
    ]


@register_support("bigbird", check=_without_redraw, notes=_bigbird_notes)
def bigbird(
    num_heads: int,
    num_tokens: int,
    *,
    w: int = 2,
    random_keys: float | None = None,
    seed: int = 0,
    per_head: bool = False,
    pruning_ratio: float | None = None,
    redraw: bool = False,
) -> Pattern:
    """A sliding window as in `longformer`, global prefix tokens, and random pairs, which differ between layers.

    From Zaheer et al. 2020. A query has `random_keys` random pairs on average, r = random_keys N in all (Fibottention
    Table 11; 1 in its Table 2: 97.96 % at N = 196). A pruning ratio decides `random_keys` and leaves the window as it
    is. `per_head` and `redraw` are those of `random`.
    """
    offsets = sliding_window(num_heads, num_tokens, w, None)
    count = bigbird_count(num_tokens, offsets[0], random_keys, pruning_ratio)
    return _with_drawn_pairs(offsets, num_tokens, count, seed, per_head, redraw)


def bigbird_count(
    num_tokens: int, offsets: Sequence[int], random_keys: float | None, pruning_ratio: float | None
) -> int:
    """How many random pairs a head of BigBird has, at most as many as its window leaves."""
    window_pairs = count_nonzeros(offsets, num_tokens)
    check_not_both("random_keys", random_keys, pruning_ratio)
    if pruning_ratio is not None:
        wanted = max(0, unpruned_pairs(pruning_ratio, num_tokens) - window_pairs)
    else:
        keys = 1 if random_keys is None else random_keys
        wanted = round(check_finite("random_keys", keys, note=", pairs a query on average") * num_tokens)
    return min(wanted, num_tokens**2 - window_pairs)


def draw_pairs(
    num_heads: int,
    num_tokens: int,
    place: tuple[int, int],
    count: int,
    offsets: Sequence[int],
    seed: int,
    per_head: bool,
) -> list[np.ndarray]:
    """For each head (count, 2) pairs of patches, drawn uniformly and without repetition from those on no offset.

    `place`: the number of the layer, and that of the draw; draw 0 has the seed that there was before there were others.
    """
    layer, draw = place
    drawn = []
    for head in range(num_heads if per_head else 1):
        # Independent of everything else that is random. Numpy promises that these bits are the same on every platform
        # and in every version. It does not promise that for what it computes from them.
        drawn.append(_draw(np.random.PCG64([seed, layer, head, *([draw] if draw else [])]), num_tokens, count, offsets))
    return drawn if per_head else drawn * num_heads


def _integers(bits: np.random.PCG64, below: int, count: int) -> np.ndarray:
    """About `count` integers from 0 to `below` - 1, at most 2^32 - 1, each equally likely (Lemire 2019), uint32.

    Those of several calls follow on one another: how many each was asked for changes nothing.
    """
    words = bits.random_raw((count + 1) // 2)
    halves = np.empty((len(words), 2), dtype=np.uint64)
    np.bitwise_and(words, np.uint64(2**32 - 1), out=halves[:, 0])
    np.right_shift(words, np.uint64(32), out=halves[:, 1])
    products = halves.ravel() * np.uint64(below)
    # Numbers are dropped so that a multiple of `below` is left of the 2^32.
    kept = products.astype(np.uint32) >= np.uint32(2**32 % below)  # the lower halves
    return (products >> np.uint64(32)).astype(np.uint32)[kept]


def _draw(bits: np.random.PCG64, num_tokens: int, count: int, offsets: Sequence[int]) -> np.ndarray:
    """The first `count` different pairs of a stream of random ones, those on an offset left out, int64 (n, 2), sorted.

    A pair (j, k) is drawn as the number j N + k.
    """
    free = np.ones(num_tokens, dtype=bool)  # distances that pairs may have
    free[list(offsets)] = False
    if 2 * count > num_tokens**2:  # if pairs were drawn one by one, the last ones would take very long
        everything = np.arange(num_tokens**2)
        numbers = everything[free[np.abs(everything // num_tokens - everything % num_tokens)]]
        numbers = np.sort(numbers[np.argsort(bits.random_raw(len(numbers)), kind="stable")[:count]])
    else:
        numbers = drawn = np.empty(0, dtype=np.uint32)
        while wanted := count - len(numbers):
            if len(drawn) < wanted:  # a few more, in place of those that are dropped
                more = _integers(bits, num_tokens**2, wanted + wanted // 32 + 16)
                queries = more // num_tokens
                keys = more - queries * num_tokens
                more = more[free[np.maximum(queries, keys) - np.minimum(queries, keys)]]
                drawn = np.concatenate([drawn, more])
            # No more than are wanted, so that it is the first ones which are taken. The stable sort merges the two.
            both = np.sort(np.concatenate([numbers, np.sort(drawn[:wanted])]), kind="stable")
            first = np.ones(len(both), dtype=bool)
            first[1:] = both[1:] != both[:-1]
            numbers, drawn = both[first], drawn[wanted:]
    pairs = np.empty((len(numbers), 2), dtype=np.int64)
    pairs[:, 0] = numbers // num_tokens
    pairs[:, 1] = numbers - num_tokens * pairs[:, 0]
    return pairs
