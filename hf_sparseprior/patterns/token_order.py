"""The order of the patches in which a support counts its offsets: raster order, or the rank along a curve.

A support is made for patches in its order. What is made from it for patches in raster order, as models have them, is
renumbered here.

N is the number of patch tokens, P of prefix tokens, T = P + N; R is H, or 1 if all heads have one order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import did_you_mean
from hf_sparseprior.patterns.curves import curve_names, curve_rank

RASTER = "raster"


def check_order(order: Any, num_heads: int) -> str | list[str]:
    """The full form of `order`: one name if all heads have the same, otherwise a list with one for each.

    Args:
        order: "raster", the name of a curve, or a list with one of them for each head.
        num_heads: H.

    Raises:
        ValueError: for an unknown name, or a list of another length.
    """
    each = isinstance(order, Sequence) and not isinstance(order, str)
    names = list(order) if each else [order]
    for name in names:
        if not isinstance(name, str) or name not in (RASTER, *curve_names()):
            given = f"order={order!r}" if not each else f"order: {name!r}"
            hint = did_you_mean(name, (RASTER, *curve_names()))
            raise ValueError(f"{given} must be one of {RASTER}, {', '.join(curve_names())}, or a list of them{hint}")
    if each and len(names) != num_heads:
        raise ValueError(f"order={names!r} must be one name, or a list with one for each of {num_heads} heads")
    names = [RASTER if name == "z" else name for name in names]  # the curve that is raster order
    return names[0] if len(set(names)) == 1 else names


@functools.lru_cache(maxsize=64)
def _rank(name: str, *sides: int) -> np.ndarray:
    rank = np.arange(math.prod(sides)) if name == RASTER else curve_rank(name, sides).ravel()
    rank.setflags(write=False)
    return rank


def order_ranks(order: str | Sequence[str], grid: Sequence[int]) -> np.ndarray:
    """Rank of every patch in an order, int64 (R, N), patches in raster order.

    Args:
        order: in its full form.
        grid: (height, width) of the patches, or (frames, height, width).
    """
    names = [order] if isinstance(order, str) else order
    return np.stack([_rank(name, *grid) for name in names])


def mask_in_raster(mask: np.ndarray, ranks: np.ndarray, num_prefix_tokens: int) -> np.ndarray:
    """A mask (H, T, T) of patches in the order of their ranks (R, N), for patches in raster order."""
    tokens = with_prefix(ranks, num_prefix_tokens)
    return np.stack(
        [head_mask[np.ix_(rank, rank)] for head_mask, rank in zip(mask, _each(tokens, len(mask)), strict=True)]
    )


def lists_in_raster(lists: np.ndarray, ranks: np.ndarray, num_prefix_tokens: int) -> np.ndarray:
    """The keys (H, N, K) of patches in the order of their ranks (R, N), see `masks.key_lists`, in raster order."""
    tokens = with_prefix(np.argsort(ranks, axis=1), num_prefix_tokens)
    last = tokens.shape[1]
    renumbered = []
    for head_lists, rank, token in zip(lists, _each(ranks, len(lists)), _each(tokens, len(lists)), strict=True):
        # -1, the end of a list, takes the number after the last token and becomes -1 again.
        keys = np.sort(np.append(token, last)[head_lists[rank]], axis=1)
        renumbered.append(np.where(keys == last, -1, keys).astype(lists.dtype))
    return np.stack(renumbered)


def with_prefix(patches: np.ndarray, num_prefix_tokens: int) -> np.ndarray:
    """Numbers of patches (R, N) as numbers of tokens (R, T), the prefix tokens in front."""
    prefix = np.broadcast_to(np.arange(num_prefix_tokens), (len(patches), num_prefix_tokens))
    return np.concatenate([prefix, patches + num_prefix_tokens], axis=1)


def _each(rows: np.ndarray, num_heads: int) -> np.ndarray:
    return np.broadcast_to(rows, (num_heads, rows.shape[1]))
