"""Masks, lists of keys and counts of a pattern: what follows from offsets and pairs alone.

N is the number of patch tokens, P of prefix tokens, T = P + N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_percentage
from hf_sparseprior.base.limits import check_limit

Pairs = Sequence[np.ndarray] | None


def self_rows(offsets: Sequence[int], num_tokens: int, num_prefix_tokens: int) -> range:
    """Patch rows whose diagonals are empty. Without other pairs they attend to themselves only, so that every softmax
    has a key.

    Row j has no partner at distance o when o > max(j, N - 1 - j), so the empty rows are the middle ones. With a prefix
    token to attend to there are none.
    """
    if num_prefix_tokens:
        return range(0)
    smallest = min(offsets) if offsets else num_tokens  # a graph for any number of tokens takes no `default=`
    return range(max(0, num_tokens - smallest), min(num_tokens, smallest))


def lonely_rows(offsets: Sequence[int], pairs: np.ndarray, num_tokens: int, num_prefix_tokens: int) -> np.ndarray:
    """As `self_rows`, for a head that also has pairs off its diagonals: int64, in order."""
    rows = self_rows(offsets, num_tokens, num_prefix_tokens)
    if not rows:  # as in most layers, with a prefix token or the diagonal
        return np.empty(0, dtype=np.int64)
    alone = np.ones(num_tokens, dtype=bool)
    alone[pairs[:, 0]] = False
    return rows.start + np.flatnonzero(alone[rows.start : rows.stop])


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
    listed: dict[tuple, np.ndarray] = {}  # heads often have the same pairs, which are then kept once
    each = []
    for head, offsets_of_head in enumerate(offsets):
        others = None if pairs is None else pairs[head]
        rank = None if ranks is None else ranks[head % len(ranks)]
        key = (tuple(offsets_of_head), id(others), None if rank is None or ranks is None else head % len(ranks))
        if key not in listed:
            of_frame = _pairs_of_frame(offsets_of_head, num_tokens, others, rank)
            listed[key] = _repeated(of_frame, num_tokens, frames, same_frame)
        each.append(listed[key])
    return each


def _pairs_of_frame(
    offsets: Sequence[int], num_tokens: int, pairs: np.ndarray | None, ranks: np.ndarray | None
) -> np.ndarray:
    """All pairs of a head, those on its diagonals too, int64 (n, 2), in raster order if `ranks` (N,) are given."""
    parts = [] if pairs is None else [pairs]
    for offset in offsets:
        first = np.arange(num_tokens - offset)
        parts += [np.stack([first, first + offset], 1)] + [np.stack([first + offset, first], 1)] * (offset > 0)
    all_pairs = np.concatenate([np.empty((0, 2), dtype=np.int64), *parts])
    return all_pairs if ranks is None else np.argsort(ranks)[all_pairs]


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
    for head, offsets_of_head in enumerate(offsets):
        attended = np.zeros(num_tokens, dtype=bool)
        attended[list(offsets_of_head)] = True
        patches = attended[distance]
        rows: Any = self_rows(offsets_of_head, num_tokens, num_prefix_tokens)
        if pairs is not None:
            rows = lonely_rows(offsets_of_head, pairs[head], num_tokens, num_prefix_tokens)
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
    alike: dict[tuple, list[int]] = {}  # heads often have the same pairs
    for head, offsets_of_head in enumerate(offsets):
        alike.setdefault((tuple(offsets_of_head), None if pairs is None else id(pairs[head])), []).append(head)
    counts_and_keys = [
        _counts_and_keys(offsets[head], num_tokens, num_prefix_tokens, None if pairs is None else pairs[head])
        for head, *_ in alike.values()
    ]
    width = num_prefix_tokens + max((counts.max(initial=0) for counts, _ in counts_and_keys), default=0)
    lists = np.empty((len(offsets), num_tokens, width), dtype=np.int32)
    for (first, *others), (counts, keys) in zip(alike.values(), counts_and_keys, strict=True):
        lists[first] = -1
        lists[first, :, :num_prefix_tokens] = np.arange(num_prefix_tokens)
        # Where each row's patches begin, written flat, less how many come before it.
        shifts = width * np.arange(num_tokens) + num_prefix_tokens - (np.cumsum(counts) - counts)
        lists[first].reshape(-1)[np.arange(len(keys)) + np.repeat(shifts, counts)] = num_prefix_tokens + keys
        for head in others:
            lists[head] = lists[first]
    return lists


def _counts_and_keys(
    offsets: Sequence[int], num_tokens: int, num_prefix_tokens: int, pairs: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """How many patches each patch of a head attends to, int64 (N,), and these, (n,), row after row, in order.

    These are int32, or int64 if the number of a pair, j N + k, does not fit into int32.
    """
    dtype = np.int32 if num_tokens * (num_tokens + 2) < 2**31 else np.int64
    signed = np.array(sorted({sign * o for o in offsets for sign in (1, -1)}), dtype=dtype)
    rows: np.ndarray = np.arange(num_tokens, dtype=dtype)
    keys = rows + signed[:, None]  # rows last, because numpy is slow along a short last axis
    inside = (keys >= 0) & (keys < num_tokens)
    keys += num_tokens * rows
    numbers = [keys.T[inside.T]]
    alone = np.asarray(_lonely(offsets, pairs, num_tokens, num_prefix_tokens), dtype=dtype)
    numbers.append(alone * (num_tokens + 1))
    if pairs is not None:
        numbers.append((pairs[:, 0] * num_tokens + pairs[:, 1]).astype(dtype))
    # Each part is in order. A stable sort merges them, which takes a tenth of the time of sorting them anew.
    merged = np.sort(np.concatenate(numbers), kind="stable")
    row = merged // num_tokens
    return np.bincount(row, minlength=num_tokens), merged - row * num_tokens


def repeated_lists(lists: np.ndarray, frames: int, num_prefix_tokens: int) -> np.ndarray:
    """`key_lists` over a clip, of lists of the places (H, S, K) that each place of a frame sees in all of its frames.

    -1 stands for none. A place that sees none sees itself, in its own frame, unless there are prefix tokens.
    """
    heads, places, _ = lists.shape
    none = frames * places
    shifts = places * np.arange(frames)[:, None]
    keys = np.where(lists[:, :, None] < 0, none, lists[:, :, None] + shifts).reshape(heads, places, -1)
    keys = np.sort(keys, axis=-1)[:, :, : frames * int((lists >= 0).sum(-1).max(initial=0))]
    alone = (lists < 0).all(-1)
    if alone.any() and not num_prefix_tokens and not keys.shape[-1]:
        keys = np.full((heads, places, 1), none)
    tokens = np.where(keys == none, -1, keys + num_prefix_tokens).astype(np.int32)
    prefix = np.broadcast_to(np.arange(num_prefix_tokens, dtype=np.int32), (heads, places, num_prefix_tokens))
    whole = np.concatenate([prefix, tokens], -1)[:, None].repeat(frames, 1)
    if not num_prefix_tokens:
        head, place = np.nonzero(alone)
        whole[head, :, place, 0] = place[:, None] + shifts.T
    return whole.reshape(heads, none, -1)


def _lonely(
    offsets: Sequence[int], pairs: np.ndarray | None, num_tokens: int, num_prefix_tokens: int
) -> Sequence[int] | np.ndarray:
    if pairs is None:
        return self_rows(offsets, num_tokens, num_prefix_tokens)
    return lonely_rows(offsets, pairs, num_tokens, num_prefix_tokens)


def check_listed(pairs: Sequence[int], heads: int, what: str) -> None:
    """Raise ValueError if lists of pairs would take more memory than the limit.

    Args:
        pairs: how many pairs each list has. heads: of the layer, some of which may share a list.
        what: names the support and the grid.
    """
    most = max(pairs, default=0)
    # Two int64 for each pair, and of them the keys of each patch, int32, for each head.
    check_bytes(16 * sum(pairs) + 4 * heads * most, f"{what}: lists of up to {most} pairs a head")


def check_bytes(size: int, what: str) -> None:
    """Raise ValueError if a layer's table of pairs over a clip would take more memory than the limit."""
    figure = (
        f"{what} take {size / 2**30:.2f} GiB in each layer (offsets with time='clip' need none): {size} bytes must be"
    )
    check_limit("table_bytes", size, figure)


def count_nonzeros(
    offsets: Sequence[int],
    num_tokens: int,
    num_prefix_tokens: int = 0,
    pairs: np.ndarray | None = None,
    frames: int = 1,
) -> int:
    """Attended pairs of one head in closed form: sum of 2 (N - o), N for the diagonal, other pairs, and the prefix.

    With `frames`, offsets, pairs and N are those of a frame, the same in and between all frames of a clip.
    """
    patches = sum(num_tokens if o == 0 else 2 * (num_tokens - o) for o in offsets) + (
        0 if pairs is None else len(pairs)
    )
    alone = len(_lonely(offsets, pairs, num_tokens, num_prefix_tokens))
    prefix = (num_prefix_tokens + frames * num_tokens) ** 2 - (frames * num_tokens) ** 2
    return frames**2 * patches + frames * alone + prefix


def attended_pairs(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int, pairs: Pairs = None, frames: int = 1
) -> int:
    """Query-key pairs that all heads of a layer attend to, at a cost of O(number of offsets and other pairs).

    Args:
        offsets: those of each head, as `head_offsets` returns them.
        num_tokens: patch tokens N.
        num_prefix_tokens: P; 0 counts the patch tokens only.
        pairs: those off the diagonals, as `layer_pairs` returns them.
        frames: of a clip, if all of the above but P is of one frame; see `count_nonzeros`.
    """
    return sum(
        count_nonzeros(offsets_of_head, num_tokens, num_prefix_tokens, None if pairs is None else pairs[head], frames)
        for head, offsets_of_head in enumerate(offsets)
    )


def pruning_ratio(
    offsets: Sequence[Sequence[int]],
    num_tokens: int,
    num_prefix_tokens: int = 0,
    pairs: Pairs = None,
    frames: int = 1,
) -> float:
    """Percentage of the heads * T^2 pairs that are not computed (Fibottention appendix E.1).

    Arguments are as in `attended_pairs`.
    """
    total = len(offsets) * (num_prefix_tokens + frames * num_tokens) ** 2
    return 100.0 * (total - attended_pairs(offsets, num_tokens, num_prefix_tokens, pairs, frames)) / total


def unpruned_pairs(pruning_ratio: float, num_tokens: int) -> int:
    """How many of the N^2 pairs of patches a pruning ratio in percent leaves."""
    return round((1.0 - check_percentage("pruning_ratio", pruning_ratio) / 100.0) * num_tokens**2)


def unpruned_count(name: str, pruning_ratio: float, count: int) -> int:
    """How many of `count` things a pruning ratio in percent leaves, at least one. `name`: to what the ratio belongs."""
    return max(1, round((1.0 - check_percentage(f"{name}: pruning_ratio", pruning_ratio) / 100.0) * count))
