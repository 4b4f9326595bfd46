"""Masks, lists of keys and counts of a pattern: what follows from offsets and pairs alone.

N is the number of patch tokens, P of prefix tokens, T = P + N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .checks import check_percentage

Pairs = Sequence[np.ndarray] | None


def self_rows(offsets: Sequence[int], num_tokens: int, num_prefix_tokens: int) -> range:
    """Patch rows whose diagonals are empty. Without other pairs they attend to themselves only, so that every softmax
    has a key.

    Row j has no partner at distance o when o > max(j, N - 1 - j), so the empty rows are the middle ones. With a prefix
    token to attend to there are none.
    """
    if num_prefix_tokens:
        return range(0)
    smallest = min(offsets, default=num_tokens)
    return range(max(0, num_tokens - smallest), min(num_tokens, smallest))


def lonely_rows(offsets: Sequence[int], pairs: np.ndarray, num_tokens: int, num_prefix_tokens: int) -> np.ndarray:
    """As `self_rows`, for a head that also has pairs off its diagonals: int64, in order."""
    return np.setdiff1d(np.array(self_rows(offsets, num_tokens, num_prefix_tokens), dtype=np.int64), pairs[:, 0])


def pairs_in_frames(
    offsets: Sequence[Sequence[int]],
    num_tokens: int,
    frames: int,
    pairs: Pairs = None,
    ranks: np.ndarray | None = None,
    same_frame: bool = False,
) -> Pairs:
    """The pairs of every head over the frames of a clip, frame after frame: (query, key), int64 (n, 2) each.

    Two patches are a pair if their places in their frames are; when the frames are does not count.

    Args:
        offsets, pairs: those of one frame. num_tokens: patches of one frame. ranks: (R, N) of its patches, if they are
            in the order of these ranks; the pairs that are returned are in raster order.
        same_frame: only pairs within a frame.
    """
    found: dict[tuple, np.ndarray] = {}  # heads often have the same pairs, which are then kept once
    each = []
    for head, own in enumerate(offsets):
        others = None if pairs is None else pairs[head]
        rank = None if ranks is None else ranks[head % len(ranks)]
        key = (tuple(own), id(others), None if rank is None or ranks is None else head % len(ranks))
        if key not in found:
            of_frame = _pairs_of_frame(own, num_tokens, others, rank)
            found[key] = _repeated(of_frame, num_tokens, frames, same_frame)
        each.append(found[key])
    return each


def _pairs_of_frame(
    offsets: Sequence[int], num_tokens: int, pairs: np.ndarray | None, ranks: np.ndarray | None
) -> np.ndarray:
    """All pairs of a head, those on its diagonals too, int64 (n, 2), in raster order if `ranks` (N,) are given."""
    parts = [] if pairs is None else [pairs]
    for offset in offsets:
        first = np.arange(num_tokens - offset)
        parts += [np.stack([first, first + offset], 1)] + [np.stack([first + offset, first], 1)] * (offset > 0)
    found = np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])
    return found if ranks is None else np.argsort(ranks)[found]


def _repeated(pairs: np.ndarray, num_tokens: int, frames: int, same_frame: bool) -> np.ndarray:
    """Pairs of one frame in all frames of a clip, or in each alone, sorted."""
    first = num_tokens * np.arange(frames)
    query, key = np.broadcast_arrays(first[:, None], first if not same_frame else first[:, None])
    shifts = np.stack([query.ravel(), key.ravel()], 1)
    whole = (shifts[:, None] + pairs).reshape(-1, 2)
    return whole[np.lexsort((whole[:, 1], whole[:, 0]))]


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
    """The keys of every patch: int32 (heads, N, K) token numbers in order, including the prefix, and -1 after the last.

    K is the largest number that any patch of any head has. Nothing here grows with N x N.
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
        offsets: those of each head, as `head_offsets` returns them.
        num_tokens: patch tokens N.
        num_prefix_tokens: P; 0 counts the patch tokens only.
        pairs: those off the diagonals, as `layer_pairs` returns them.
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


def unpruned_pairs(pruning_ratio: float, num_tokens: int) -> int:
    """How many of the N^2 pairs of patches a pruning ratio in percent leaves."""
    return round((1.0 - check_percentage("pruning_ratio", pruning_ratio) / 100.0) * num_tokens**2)


def unpruned_count(name: str, pruning_ratio: float, count: int) -> int:
    """How many of `count` things a pruning ratio in percent leaves, at least one. `name`: to what the ratio belongs."""
    return max(1, round((1.0 - check_percentage(f"{name}: pruning_ratio", pruning_ratio) / 100.0) * count))
