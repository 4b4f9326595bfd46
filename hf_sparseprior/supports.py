"""Supports: which keys each head of each layer sees, known before the data.

A support is a function that returns the offsets |j - k| of every head over the patch tokens in raster order.
`register_support` makes it a value of `prior` in every config, of `explain`, and of the tests that run over the
registry. `register_pairs` adds pairs that lie on no diagonal. Prefix tokens (class, distillation, registers) attend to
everything and everything attends to them; they are what Longformer and BigBird call global tokens.

A pruning ratio is the percentage of pairs left out; that which a support can be given counts pairs of patches only.

N is the number of patch tokens, P of prefix tokens, T = P + N; heads and rows of the Wythoff array count from 1 in
the papers and in messages, from 0 in arrays.
"""

from __future__ import annotations

import bisect
import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .checks import check_boolean, check_integer, check_keys, check_percentage, plain, split_spec
from .registry import registering
from .sequences import SEQUENCES, SETTING_MINIMUM, head_sequence, sequence_settings

SUPPORTS: dict[str, Callable[..., list[list[int]]]] = {}
PAIRS: dict[str, Callable[..., list[np.ndarray]]] = {}
MASK_FILLS = ("neg_inf", "zero")
COMMON_SETTINGS = {"shuffle_seed": 0, "mask_fill": "neg_inf"}


def register_support(name: str) -> Callable[[Callable], Callable]:
    """Register `function(num_heads, num_tokens, **settings) -> offsets of each head` under `name`.

    Keyword-only arguments are the support's settings with their defaults; the function checks their values. Offsets
    lie in 0..num_tokens-1 (0 is the diagonal) and are sorted. `shuffle_seed` and `mask_fill` belong to every support.
    """
    return registering("support", SUPPORTS, name)


def register_pairs(name: str) -> Callable[[Callable], Callable]:
    """Register `function(num_heads, num_tokens, layer, **settings) -> pairs of each head` beside the support `name`.

    It takes the support's settings. Pairs (query, key) of patches are int64 (n, 2), in order, each once, none of them
    on one of the head's diagonals. `shuffle_seed` does not move them.
    """
    return registering("pairs of support", PAIRS, name)


# ---- settings -------------------------------------------------------------------------------------------------------


def support_settings(name: str) -> dict[str, Any]:
    """Settings of a support with their defaults, the common ones included."""
    if name not in SUPPORTS:
        raise ValueError(f"support={name!r} must be one of {', '.join(SUPPORTS)}")
    parameters = inspect.signature(SUPPORTS[name]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {**own, **COMMON_SETTINGS}


def resolve_support(support: str | dict[str, Any] | None, num_heads: int, num_tokens: int) -> dict[str, Any]:
    """The full form of a support: its name with every setting, checked for this number of heads and patch tokens.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """
    name, spec = split_spec("dense" if support is None else support, "support", SUPPORTS)
    settings = support_settings(name)
    check_keys(spec, list(settings), f"support {name!r}")
    settings.update((key, plain(value)) for key, value in spec.items())
    if settings["shuffle_seed"] is not None:
        settings["shuffle_seed"] = check_integer("shuffle_seed", settings["shuffle_seed"], 0, ", or None")
    if settings["mask_fill"] not in MASK_FILLS:
        raise ValueError(f"mask_fill={settings['mask_fill']!r} must be one of {', '.join(MASK_FILLS)}")
    if "sequence" in settings:
        settings["sequence"] = resolve_sequence(settings["sequence"])
    resolved = {"name": name, **settings}
    head_offsets(resolved, num_heads=num_heads, num_tokens=num_tokens)
    return resolved


def resolve_sequence(sequence: str | dict[str, Any]) -> dict[str, Any]:
    """The full form of a dilation sequence: {"name": ..., every setting}. Wythoff's `modified` is the support's."""
    name, spec = split_spec(sequence, "sequence", SEQUENCES)
    if "modified" in spec:
        raise ValueError("sequence 'wythoff': `modified` is a setting of the support, beside `sequence`")
    settings = {} if name == "wythoff" else sequence_settings(name)
    check_keys(spec, list(settings), f"sequence {name!r}")
    for key, value in spec.items():
        if isinstance(settings[key], bool):
            settings[key] = check_boolean(f"sequence {name!r}: {key}", value)
        else:
            settings[key] = check_integer(f"sequence {name!r}: {key}", value, SETTING_MINIMUM.get(key, 0))
    if name == "fibonacci" and settings["a"] == settings["b"] == 0:
        raise ValueError("sequence 'fibonacci': a=0 and b=0 give no offset; at least one must be 1 or more")
    return {"name": name, **settings}


# ---- offsets --------------------------------------------------------------------------------------------------------


def window_sizes(num_heads: int, num_tokens: int, w_min: int | None, w_max: int | None) -> list[int]:
    """Largest offset of each head: w_i = w_min + floor((w_max - w_min)(i - 1) / (h - 1)), h = 1: w_max.

    Fibottention section 3.2, in integers (floats give w_12 = 64 instead of 65). `w_max=None` means N // 3 and
    follows the grid; `w_min=None` means w_max, one window for all heads. Values above N are clipped to N.

    Raises:
        ValueError: for values below 1 or w_min above w_max.
    """
    note = f" (values above the {num_tokens} patch tokens are clipped to them)"
    low = None if w_min is None else check_integer("w_min", w_min, 1, note)
    high = None if w_max is None else check_integer("w_max", w_max, 1, note)
    if low is not None and high is not None and low > high:
        raise ValueError(f"w_min={low} must not be above w_max={high}")
    if high is None:
        high = max(num_tokens // 3, low or 1)
    if low is None:
        low = high
    low, high = min(low, num_tokens), min(high, num_tokens)
    if num_heads == 1:
        return [high]
    return [low + (high - low) * head // (num_heads - 1) for head in range(num_heads)]


def head_offsets(support: str | dict[str, Any], *, num_heads: int, num_tokens: int, **settings: Any) -> list[list[int]]:
    """Offsets of each head before shuffling: `num_heads` sorted lists of integers in 0..num_tokens-1.

    Args:
        support: a registered name or {"name": ..., settings}.
        num_heads: 1 or more.
        num_tokens: patch tokens N, 1 or more; prefix tokens are not counted.
        settings: the support's settings; they add to those in the dict.
    """
    num_heads = check_integer("num_heads", num_heads, 1)
    num_tokens = check_integer("num_tokens", num_tokens, 1)
    name, spec = split_spec(support, "support", SUPPORTS)
    spec.update(settings)
    allowed = support_settings(name)
    check_keys(spec, list(allowed), f"support {name!r}")
    own = {key: value for key, value in spec.items() if key not in COMMON_SETTINGS}
    # An offset of N or more relates no two tokens; dropping it here keeps counts and kernels free of the case.
    return [[o for o in offsets if o < num_tokens] for offsets in SUPPORTS[name](num_heads, num_tokens, **own)]


def layer_order(num_heads: int, layer: int, shuffle_seed: int | None) -> list[int]:
    """Which support number (from 0) each head of a layer uses.

    A private generator per layer gives every process, platform and reload the same order and leaves the global
    generators alone. `shuffle_seed=None`: no shuffling.
    """
    order = list(range(num_heads))
    if shuffle_seed is not None:
        random.Random(shuffle_seed + layer).shuffle(order)
    return order


def layer_offsets(support: dict[str, Any], *, num_heads: int, num_tokens: int, layer: int) -> list[list[int]]:
    """Offsets of each head of one layer, shuffled as the support's `shuffle_seed` says."""
    offsets = head_offsets(support, num_heads=num_heads, num_tokens=num_tokens)
    seed = support.get("shuffle_seed", COMMON_SETTINGS["shuffle_seed"])
    return [offsets[number] for number in layer_order(num_heads, layer, seed)]


def layer_pairs(support: dict[str, Any], *, num_heads: int, num_tokens: int, layer: int) -> list[np.ndarray] | None:
    """Pairs (query, key) of patches off the diagonals of each head of one layer, int64 (n, 2); None: there are none.

    Args:
        support: resolved (`resolve_support`).
    """
    name = support["name"]
    if name not in PAIRS:
        return None
    own = {key: value for key, value in support.items() if key != "name" and key not in COMMON_SETTINGS}
    return PAIRS[name](num_heads, num_tokens, layer, **own)


@register_support("dense")
def dense(num_heads: int, num_tokens: int) -> list[list[int]]:
    """Every pair of tokens."""
    return [list(range(num_tokens)) for _ in range(num_heads)]


@register_support("fibottention")
def fibottention(
    num_heads: int,
    num_tokens: int,
    *,
    w_min: int | None = 5,
    w_max: int | None = None,
    modified: bool = False,
    sequence: str | dict[str, Any] = "wythoff",
) -> list[list[int]]:
    """Head i attends at distances that are terms of row i of the Wythoff array, 0 < |j - k| <= w_i (Eq. 3).

    `modified` puts two predecessors in front of each row (section 3.2). `sequence` replaces the Wythoff rows by
    another dilation sequence (Table 8, Figure 5). `w_max=None` is N // 3, the papers' 65 at N = 196.
    """
    windows = window_sizes(num_heads, num_tokens, w_min, w_max)
    spec = resolve_sequence(sequence)
    modified = check_boolean("modified", modified)
    if spec["name"] == "wythoff":
        spec["modified"] = modified
    elif modified:
        raise ValueError(f"modified=True goes with sequence 'wythoff' only, not {spec['name']!r}")
    return [head_sequence(spec, head, window) for head, window in enumerate(windows, start=1)]


@register_support("window")
def window(
    num_heads: int,
    num_tokens: int,
    *,
    w: int | None = None,
    diagonal: bool = True,
    pruning_ratio: float | None = None,
) -> list[list[int]]:
    """|j - k| <= w, with or without the diagonal, the same for all heads (Fibottention Tables 12 and 13); w = 15."""
    diagonal = check_boolean("diagonal", diagonal)
    first = 0 if diagonal else 1

    def offsets(w: int) -> list[int]:
        return list(range(first, min(w, num_tokens - 1) + 1))

    w = setting_for("w", w, pruning_ratio, 15, [range(first, max(first + 1, num_tokens))], offsets, num_tokens)
    return [offsets(w) for _ in range(num_heads)]


# ---- baselines ------------------------------------------------------------------------------------------------------
# The same pattern in every head, as in Fibottention's comparisons (section 6.1).


def setting_for(
    name: str,
    value: int | None,
    pruning_ratio: float | None,
    default: int,
    choices: Sequence[range],
    offsets: Callable[[int], list[int]],
    num_tokens: int,
) -> int:
    """A support's one number: as given, or that of `choices` whose pruning ratio is nearest to the one given.

    Args:
        name, value, default: of the number; the first of `choices` is the least allowed.
        choices: none of them empty.
        offsets: of a head, by the number; within each of `choices`, how many pairs they keep rises with it or falls.
    """
    check_not_both(name, value, pruning_ratio)
    if pruning_ratio is None:
        return default if value is None else check_integer(name, value, choices[0].start)
    kept = kept_pairs(pruning_ratio, num_tokens)

    def pairs(choice: int) -> int:
        return count_nonzeros(offsets(choice), num_tokens)

    def nearest(part: range) -> range:
        sign = 1 if pairs(part[0]) <= pairs(part[-1]) else -1
        place = bisect.bisect_left(part, sign * kept, key=lambda choice: sign * pairs(choice))
        return part[max(0, place - 1) : place + 1]

    near = [choice for part in choices for choice in nearest(part)]
    return min(near, key=lambda choice: abs(pairs(choice) - kept))


def check_not_both(name: str, value: Any, pruning_ratio: float | None) -> None:
    """Raise if a number is given and a pruning ratio, which decides it, as well."""
    if value is not None and pruning_ratio is not None:
        raise ValueError(f"{name}={value!r} and pruning_ratio={pruning_ratio!r} cannot both be given")


def kept_pairs(pruning_ratio: float, num_tokens: int) -> int:
    """How many of the N^2 pairs of patches a pruning ratio in percent leaves."""
    return round((1.0 - check_percentage("pruning_ratio", pruning_ratio) / 100.0) * num_tokens**2)


def kept_share(name: str, pruning_ratio: float, count: int) -> int:
    """How many of `count` things a pruning ratio in percent leaves, one at least; `name` is whose ratio it is."""
    return max(1, round((1.0 - check_percentage(f"{name}: pruning_ratio", pruning_ratio) / 100.0) * count))


@register_support("longformer")
def longformer(
    num_heads: int, num_tokens: int, *, w: int | None = None, pruning_ratio: float | None = None
) -> list[list[int]]:
    """A sliding window of w tokens, both sides together, and the diagonal; prefix tokens are global.

    Beltagy et al. 2020. w = 2 is Fibottention's Table 2 (98.47 % at N = 196). More global tokens are more registers
    (`num_register_tokens`).
    """
    return sliding_window(num_heads, num_tokens, w, pruning_ratio)


def sliding_window(num_heads: int, num_tokens: int, w: int | None, pruning_ratio: float | None) -> list[list[int]]:
    """The diagonal and w / 2 diagonals on either side of it."""
    check_not_both("w", w, pruning_ratio)
    if w is not None and check_integer("w", w, 0) % 2:
        raise ValueError(f"w={w} must be even, it counts both sides of the diagonal together")

    def offsets(half: int) -> list[int]:
        return list(range(min(half, num_tokens - 1) + 1))

    half = None if w is None else w // 2
    half = setting_for("w", half, pruning_ratio, 1, [range(num_tokens)], offsets, num_tokens)
    return [offsets(half) for _ in range(num_heads)]


@register_support("strided")
def strided(
    num_heads: int,
    num_tokens: int,
    *,
    stride: int | None = None,
    local: int = 0,
    pruning_ratio: float | None = None,
) -> list[list[int]]:
    """The nearest `local` tokens on either side, and every stride-th token of the whole sequence.

    Sparse Transformer (Child et al. 2019, section 4.2), its two patterns merged into one head and without causality.
    Stride 65 keeps 590 of 196^2 pairs, 98.46 %; Fibottention's Table 2 prints 98.47, which no stride gives.
    """
    local = check_integer("local", local, 0)

    def offsets(stride: int) -> list[int]:
        return sorted({*range(min(local, num_tokens - 1) + 1), *range(0, num_tokens, stride)})

    # A larger stride keeps fewer pairs only where all its tokens lie outside the window.
    last = max(1, num_tokens - 1)
    inside = min(local, last)
    choices = [range(own, own + 1) for own in range(1, inside + 1)]
    choices += [range(inside + 1, last + 1)] if inside < last else []
    stride = setting_for("stride", stride, pruning_ratio, 65, choices, offsets, num_tokens)
    return [offsets(stride) for _ in range(num_heads)]


@register_support("random")
def random_support(
    num_heads: int, num_tokens: int, *, pruning_ratio: float = 98.52, seed: int = 0, per_head: bool = False
) -> list[list[int]]:
    """Pairs drawn uniformly at random, the same for every image, others in each layer; none is on a diagonal as such.

    Fibottention Tables 2 and 10. `per_head` draws them for every head anew.
    """
    check_integer("seed", seed, 0)
    check_boolean("per_head", per_head)
    kept_pairs(pruning_ratio, num_tokens)
    return [[] for _ in range(num_heads)]


@register_pairs("random")
def random_pairs(
    num_heads: int, num_tokens: int, layer: int, *, pruning_ratio: float, seed: int, per_head: bool
) -> list[np.ndarray]:
    """round((1 - pruning_ratio / 100) N^2) pairs of a head."""
    kept = kept_pairs(pruning_ratio, num_tokens)
    return draw_pairs(num_heads, num_tokens, layer, kept, [], seed, per_head)


@register_support("bigbird")
def bigbird(
    num_heads: int,
    num_tokens: int,
    *,
    w: int = 2,
    random_keys: float | None = None,
    seed: int = 0,
    per_head: bool = False,
    pruning_ratio: float | None = None,
) -> list[list[int]]:
    """A sliding window as in `longformer`, global prefix tokens, and random pairs, others in each layer.

    Zaheer et al. 2020. `random_keys` random pairs a query on average, r = random_keys N in all (Fibottention Table 11;
    1 in its Table 2: 97.96 % at N = 196). A pruning ratio decides it, with the window as it is.
    """
    check_integer("seed", seed, 0)
    check_boolean("per_head", per_head)
    offsets = sliding_window(num_heads, num_tokens, w, None)
    bigbird_count(num_tokens, offsets[0], random_keys, pruning_ratio)
    return offsets


def bigbird_count(
    num_tokens: int, offsets: Sequence[int], random_keys: float | None, pruning_ratio: float | None
) -> int:
    """How many random pairs a head of BigBird has; not more than its window leaves."""
    window_pairs = count_nonzeros(offsets, num_tokens)
    check_not_both("random_keys", random_keys, pruning_ratio)
    if pruning_ratio is not None:
        wanted = max(0, kept_pairs(pruning_ratio, num_tokens) - window_pairs)
    else:
        keys = 1 if random_keys is None else random_keys
        if isinstance(keys, bool) or not isinstance(keys, (int, float)) or not 0 <= keys < np.inf:
            raise ValueError(f"random_keys={random_keys!r} must be a number of 0 or more, pairs a query on average")
        wanted = round(keys * num_tokens)
    return min(wanted, num_tokens**2 - window_pairs)


@register_pairs("bigbird")
def bigbird_pairs(
    num_heads: int,
    num_tokens: int,
    layer: int,
    *,
    w: int,
    random_keys: float | None,
    seed: int,
    per_head: bool,
    pruning_ratio: float | None,
) -> list[np.ndarray]:
    """The random pairs of each head."""
    offsets = sliding_window(1, num_tokens, w, None)[0]
    count = bigbird_count(num_tokens, offsets, random_keys, pruning_ratio)
    return draw_pairs(num_heads, num_tokens, layer, count, offsets, seed, per_head)


def draw_pairs(
    num_heads: int, num_tokens: int, layer: int, count: int, offsets: Sequence[int], seed: int, per_head: bool
) -> list[np.ndarray]:
    """`count` pairs of patches, uniformly without repetition from those on none of the offsets, (count, 2) a head."""
    drawn = []
    for head in range(num_heads if per_head else 1):
        # Independent of everything else that is random. Numpy promises that the bits stay the same on every platform
        # and in every version, and promises it of nothing that it makes from them.
        drawn.append(_draw(np.random.PCG64([seed, layer, head]), num_tokens, count, offsets))
    return drawn if per_head else drawn * num_heads


def _integers(bits: np.random.PCG64, below: int, count: int) -> np.ndarray:
    """About `count` integers from 0 to `below` - 1, at most 2^32 - 1, each equally likely (Lemire 2019)."""
    words = bits.random_raw((count + 1) // 2)
    halves = np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], 1).ravel()
    products = halves * np.uint64(below)
    # Of the 2^32 numbers as many are dropped as leave a multiple of `below`.
    kept = products & np.uint64(2**32 - 1) >= np.uint64(2**32 % below)
    return (products[kept] >> np.uint64(32)).astype(np.int64)


def _draw(bits: np.random.PCG64, num_tokens: int, count: int, offsets: Sequence[int]) -> np.ndarray:
    pairs = np.empty(0, dtype=np.int64)
    diagonals = np.array(offsets, dtype=np.int64)
    if 2 * count > num_tokens**2:  # drawn one by one, the last ones would hardly be hit
        everything = np.arange(num_tokens**2)
        free = everything[~np.isin(np.abs(everything // num_tokens - everything % num_tokens), diagonals)]
        pairs = free[np.argsort(bits.random_raw(len(free)), kind="stable")[:count]]
    while len(pairs) < count:
        more = _integers(bits, num_tokens**2, 2 * (count - len(pairs)) + 16)
        more = more[~np.isin(np.abs(more // num_tokens - more % num_tokens), diagonals)]
        everything = np.concatenate([pairs, more])
        first = np.sort(np.unique(everything, return_index=True)[1])  # in the order in which they were drawn
        pairs = everything[first][:count]
    pairs = np.sort(pairs)
    return np.stack([pairs // num_tokens, pairs % num_tokens], 1)


# ---- masks and counts -----------------------------------------------------------------------------------------------

Pairs = Sequence[np.ndarray] | None


def self_rows(offsets: Sequence[int], num_tokens: int, num_prefix_tokens: int) -> range:
    """Patch rows whose diagonals are empty; without other pairs they attend to themselves only, so that no softmax is
    over nothing.

    Row j has no partner at distance o when o > max(j, N - 1 - j), so the empty rows are the middle ones. There are
    none once a prefix token is there to attend to.
    """
    if num_prefix_tokens:
        return range(0)
    smallest = min(offsets, default=num_tokens)
    return range(max(0, num_tokens - smallest), min(num_tokens, smallest))


def lonely_rows(offsets: Sequence[int], pairs: np.ndarray, num_tokens: int, num_prefix_tokens: int) -> np.ndarray:
    """As `self_rows`, of a head that has pairs off its diagonals, too: int64, in order."""
    return np.setdiff1d(np.array(self_rows(offsets, num_tokens, num_prefix_tokens), dtype=np.int64), pairs[:, 0])


def build_mask(
    support: str | dict[str, Any],
    *,
    num_heads: int,
    num_tokens: int,
    num_prefix_tokens: int = 0,
    layer: int = 0,
    **settings: Any,
) -> np.ndarray:
    """Boolean mask (num_heads, T, T), True where a query (row) attends to a key (column).

    Args:
        support: a registered name or {"name": ..., settings}.
        num_heads: heads of the layer.
        num_tokens: patch tokens N; T = num_prefix_tokens + N.
        num_prefix_tokens: rows and columns in front that are all True.
        layer: layer number from 0; with `shuffle_seed` it decides which head has which support.
        settings: the support's settings, `shuffle_seed` among them (default 0; None: no shuffling).
    """
    name, spec = split_spec(support, "support", SUPPORTS)
    resolved = resolve_support({"name": name, **spec, **settings}, num_heads, num_tokens)
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0)
    layer = check_integer("layer", layer, 0)
    offsets = layer_offsets(resolved, num_heads=num_heads, num_tokens=num_tokens, layer=layer)
    pairs = layer_pairs(resolved, num_heads=num_heads, num_tokens=num_tokens, layer=layer)
    return mask_from_offsets(offsets, num_tokens, num_prefix_tokens, pairs)


def mask_from_offsets(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int, pairs: Pairs = None
) -> np.ndarray:
    """Boolean mask (heads, T, T) of given offsets and pairs per head."""
    position = np.arange(num_tokens)
    distance = np.abs(position[:, None] - position[None, :])
    total = num_prefix_tokens + num_tokens
    mask = np.ones((len(offsets), total, total), dtype=bool)
    for head, own in enumerate(offsets):
        attended = np.zeros(num_tokens, dtype=bool)
        attended[list(own)] = True
        patches = attended[distance]
        rows: Any = self_rows(own, num_tokens, num_prefix_tokens)
        if pairs is not None:
            rows = lonely_rows(own, pairs[head], num_tokens, num_prefix_tokens)
            patches[pairs[head][:, 0], pairs[head][:, 1]] = True
        patches[rows, rows] = True
        mask[head, num_prefix_tokens:, num_prefix_tokens:] = patches
    return mask


def key_lists(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int, pairs: Pairs = None
) -> np.ndarray:
    """The keys of every patch: int32 (heads, N, K) token numbers in order, prefix included, -1 behind the last one.

    K is the most that any patch of any head has; nothing here grows with N x N.
    """
    position = np.arange(num_tokens)
    lines, columns = [], []
    for head, own in enumerate(offsets):
        signed = np.array(sorted({sign * o for o in own for sign in (1, -1)}), dtype=np.int64)
        keys = position[:, None] + signed[None]
        row, place = np.nonzero((keys >= 0) & (keys < num_tokens))
        column = keys[row, place]
        alone = np.array(self_rows(own, num_tokens, num_prefix_tokens), dtype=np.int64)
        if pairs is not None:
            alone = lonely_rows(own, pairs[head], num_tokens, num_prefix_tokens)
            row, column = np.concatenate([row, pairs[head][:, 0]]), np.concatenate([column, pairs[head][:, 1]])
        lines += [head * num_tokens + row, head * num_tokens + alone]
        columns += [column, alone]
    line, column = np.concatenate(lines), np.concatenate(columns)
    order = np.lexsort((column, line))
    line, column = line[order], column[order]
    counts = np.bincount(line, minlength=len(offsets) * num_tokens)
    place = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
    lists = np.full((len(offsets) * num_tokens, num_prefix_tokens + counts.max(initial=0)), -1, dtype=np.int32)
    lists[:, :num_prefix_tokens] = np.arange(num_prefix_tokens)
    lists[line, num_prefix_tokens + place] = num_prefix_tokens + column
    return lists.reshape(len(offsets), num_tokens, -1)


def count_nonzeros(
    offsets: Sequence[int], num_tokens: int, num_prefix_tokens: int = 0, pairs: np.ndarray | None = None
) -> int:
    """Attended pairs of one head in closed form: sum of 2 (N - o), N for the diagonal, other pairs, and the prefix."""
    patches = sum(num_tokens if o == 0 else 2 * (num_tokens - o) for o in offsets)
    total = num_prefix_tokens + num_tokens
    alone = len(self_rows(offsets, num_tokens, num_prefix_tokens))
    if pairs is not None:
        alone = len(lonely_rows(offsets, pairs, num_tokens, num_prefix_tokens))
        patches += len(pairs)
    return patches + alone + total**2 - num_tokens**2


def attended_pairs(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int, pairs: Pairs = None
) -> int:
    """Query-key pairs that all heads of a layer attend to, at a cost of O(number of offsets and other pairs).

    Args:
        offsets: of each head, as `head_offsets` returns them.
        num_tokens: patch tokens N.
        num_prefix_tokens: P; 0 counts the patch tokens only.
        pairs: off the diagonals, as `layer_pairs` returns them.
    """
    return sum(
        count_nonzeros(own, num_tokens, num_prefix_tokens, None if pairs is None else pairs[head])
        for head, own in enumerate(offsets)
    )


def pruning_ratio(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int = 0, pairs: Pairs = None
) -> float:
    """Percentage of the heads * T^2 pairs that are not computed (Fibottention appendix E.1)."""
    total = len(offsets) * (num_prefix_tokens + num_tokens) ** 2
    return 100.0 * (total - attended_pairs(offsets, num_tokens, num_prefix_tokens, pairs)) / total


def support_notes(support: dict[str, Any], num_heads: int, grid: Sequence[int], num_prefix_tokens: int) -> list[str]:
    """What a user should know of this support on this grid: clipped windows and heads without any offset."""
    num_tokens = int(np.prod(grid))
    size = "x".join(map(str, grid))
    notes = [
        f"{support['name']}: {key}={support[key]} is clipped to the {num_tokens} patch tokens of the {size} grid"
        for key in ("w_min", "w_max")
        if isinstance(support.get(key), int) and support[key] > num_tokens
    ]
    offsets = head_offsets(support, num_heads=num_heads, num_tokens=num_tokens)
    if support["name"] in PAIRS:
        wanted, highest = support["pruning_ratio"], pruning_ratio(offsets, num_tokens)
        if wanted is not None and wanted > highest and offsets[0]:
            notes.append(
                f"{support['name']}: pruning_ratio={wanted} is out of reach on the {size} grid; the window alone "
                f"leaves {highest:.2f} %"
            )
        return notes
    empty = [str(number) for number, own in enumerate(offsets, start=1) if not own]
    if empty and num_tokens > 1:
        partner = "prefix tokens" if num_prefix_tokens else "themselves"
        notes.append(
            f"{support['name']}: supports {', '.join(empty)} of {num_heads} have no offset within their window on "
            f"the {size} grid; patches of those heads attend to {partner} only"
        )
    return notes
