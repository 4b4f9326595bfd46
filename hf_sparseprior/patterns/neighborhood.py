"""A neighbourhood in two dimensions, as of Neighborhood Attention (Hassani et al. 2023) and its dilated form (2022)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_integer, python_value
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.masks import check_listed
from hf_sparseprior.patterns.pattern import Pattern, register_support

NEIGHBORHOOD_EDGES = ("shift", "cut")


def _rows_and_columns(name: str, value: Any, odd: bool = False) -> list[int]:
    """A setting for rows and for columns; one number is for both.

    Raises:
        ValueError: the message has the setting, the value and what is allowed.
    """
    given = python_value(value)
    sides = list(given) if isinstance(given, (list, tuple)) else [given, given]
    if len(sides) != 2:
        raise ValueError(f"{name}={value!r} must be a number, or two: for rows and for columns")
    checked = [check_integer(name, side, 1) for side in sides]
    if odd and not all(side % 2 for side in checked):
        raise ValueError(f"{name}={value!r} must be odd, a patch lies in the middle of its window")
    return checked


def _check_neighborhood(settings: Settings) -> Settings:
    if settings["edges"] not in NEIGHBORHOOD_EDGES:
        raise ValueError(f"edges={settings['edges']!r} must be one of {', '.join(NEIGHBORHOOD_EDGES)}")
    window, dilation = (
        _rows_and_columns("window", settings["window"], odd=True),
        _rows_and_columns("dilation", settings["dilation"]),
    )
    return {"window": window, "dilation": dilation, "edges": settings["edges"]}


def _neighborhood_notes(support: Settings, pattern: Pattern, grid: Sequence[int]) -> list[str]:
    names = ("rows", "columns")
    axes = list(zip(names, grid, support["window"], support["dilation"], strict=True))
    # The window of a patch holds every `dilation`-th patch, of which there are this many at least.
    short = [f"{name} ({side})" for name, side, window, dilation in axes if side // dilation < window]
    return [f"neighborhood: some windows are wider than the grid's {' and '.join(short)}"] if short else []


@register_support("neighborhood", check=_check_neighborhood, notes=_neighborhood_notes)
def neighborhood(
    num_heads: int,
    grid: Sequence[int],
    *,
    window: int | Sequence[int] = 7,
    dilation: int | Sequence[int] = 1,
    edges: str = "shift",
) -> Pattern:
    """The `window` of patches around each patch, in rows and columns (Neighborhood Attention, arXiv 2204.07143).

    `window` is an odd number of patches, or two for rows and columns. With `dilation` (arXiv 2209.15001) a window holds
    every dilation-th patch; it may be two numbers, too. `edges`: "shift" moves windows that reach over an edge into the
    grid, so that every patch sees equally many, which is NATTEN's rule; "cut" leaves out what lies outside. A window
    that is wider than the grid holds all patches along that axis. All heads have the same pairs.
    """
    settings = _check_neighborhood({"window": window, "dilation": dilation, "edges": edges})
    axes = [
        _seen_along_an_axis(*axis, edges) for axis in zip(grid, settings["window"], settings["dilation"], strict=True)
    ]
    listed = math.prod(int((keys >= 0).sum()) for keys in axes)
    check_listed([listed], num_heads, f"support 'neighborhood' over {'x'.join(map(str, grid))} patches")

    @functools.cache
    def pairs() -> np.ndarray:
        rows, columns = axes
        keys = rows[:, None, :, None] * grid[1] + columns[None, :, None, :]
        inside = (rows[:, None, :, None] >= 0) & (columns[None, :, None, :] >= 0)
        query = np.arange(grid[0] * grid[1]).reshape(grid[0], grid[1], 1, 1)
        kept = inside & (keys != query)
        return np.stack([np.broadcast_to(query, keys.shape)[kept], keys[kept]], 1)

    return Pattern(offsets=[[0] for _ in range(num_heads)], pairs=lambda layer: [pairs()] * num_heads)


def _seen_along_an_axis(length: int, window: int, dilation: int, edges: str) -> np.ndarray:
    """The places that each place along an axis sees, in order, int64 (length, window), -1 for none."""
    place = np.arange(length)[:, None]
    steps = np.arange(window)
    if edges == "cut":
        keys = place + dilation * (steps - window // 2)
        return np.sort(np.where((keys >= 0) & (keys < length), keys, -1), axis=1)
    # Places a multiple of `dilation` apart are a row of their own, in which windows are contiguous.
    first, number = place % dilation, place // dilation
    count = (length - first + dilation - 1) // dilation
    start = np.clip(number - window // 2, 0, np.maximum(count - window, 0))
    return np.sort(np.where(start + steps < count, first + dilation * (start + steps), -1), axis=1)
