"""Registration of supports, and the pattern that each of them gives.

N is the number of patch tokens. Heads and rows of the Wythoff array count from 1 in the papers and in messages, and
from 0 in arrays.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_integer, did_you_mean
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import Settings, Time
from hf_sparseprior.patterns.masks import Pairs
from hf_sparseprior.patterns.token_order import RASTER

COMMON_SETTINGS: dict[str, Any] = {"shuffle_seed": 0, "mask_fill": "neg_inf"}


@dataclass(frozen=True)
class Pattern:
    """Which keys each head sees, before heads are shuffled.

    offsets: for each head the distances |j - k| at which patches attend to one another, sorted, in 0..N-1; 0 is the
        diagonal. Patches are numbered in the support's order.
    pairs: function of the layer number that gives the further pairs of each head: (query, key) of patches, int64 (n,
        2), in order, each once, and none on one of the head's offsets. Shuffling does not move them. None: there are
        none.
    redrawn: function of the layer number and the number of a draw, from 1, that gives other such pairs, drawn for one
        pass of training. None: pairs are the same in every pass.
    """

    offsets: list[list[int]]
    pairs: Callable[[int], list[np.ndarray]] | None = None
    redrawn: Callable[[int, int], list[np.ndarray]] | None = None

    def layer_pairs(self, layer: int, draw: int = 0) -> Pairs:
        """The further pairs of a layer; of `redrawn` for a draw from 1 on."""
        if draw and self.redrawn is not None:
            return self.redrawn(layer, draw)
        return None if self.pairs is None else self.pairs(layer)


@dataclass(frozen=True)
class Support:
    """A registered support: see `register_support`.

    settings: its own settings with their defaults. sees_grid: whether its function takes the grid, and sees_time: that
    of a clip. ordered: whether it has the setting `order`.
    """

    name: str
    function: Callable[..., list[list[int]] | Pattern]
    settings: Settings
    sees_grid: bool
    ordered: bool
    check: Callable[[Settings], Settings]
    notes: Callable[[Settings, Pattern, Sequence[int]], list[str]]
    sees_time: bool = False

    def pattern(self, num_heads: int, num_tokens: int, grid: Sequence[int] | None, settings: Settings) -> Pattern:
        """The pattern for this number of heads and patch tokens. `settings` are its own; defaults may be left out."""
        size = self._grid(num_tokens, grid) if self.sees_grid else num_tokens
        made = self.function(num_heads, size, **settings)
        pattern = made if isinstance(made, Pattern) else Pattern(made)
        # An offset of N or more connects no two tokens. It is dropped here, so counts and kernels need not handle it.
        return replace(pattern, offsets=[[o for o in offsets if o < num_tokens] for offsets in pattern.offsets])

    def _grid(self, num_tokens: int, grid: Sequence[int] | None) -> tuple[int, ...]:
        if self.sees_time and grid is None:
            return 1, 1, num_tokens
        sides = grid_of(num_tokens, grid, f"support {self.name!r}")
        if self.sees_time:
            return (1, *sides)[-3:]
        if not self.sees_time and len(sides) == 3:
            raise ValueError(
                f"support {self.name!r} is a pattern in two dimensions; grid={sides} must be (height, width)"
            )
        return sides


SUPPORTS: dict[str, Support] = {}


def register_support(
    name: str,
    *,
    ordered: bool | None = None,
    check: Callable[[Settings], Settings] = dict,
    notes: Callable[[Settings, Pattern, Sequence[int]], list[str]] = lambda support, pattern, grid: [],
) -> Callable[[Callable], Callable]:
    """Register a function under `name`, which makes it a support of every model.

    The function takes (num_heads, num_tokens), or (num_heads, grid) with grid = (height, width) for a pattern in two
    dimensions, or (num_heads, clip) with clip = (frames, height, width) for one that sees time; an image is a clip of
    one frame. Its keyword-only arguments are the support's settings with their defaults; it checks their values. It
    returns the offsets of each head or, if there are other pairs too, a `Pattern`. Every support also has the settings
    `shuffle_seed` and `mask_fill`.

    Args:
        name: its name in `prior`.
        ordered: whether it also has the setting `order`, the order of the patches in which offsets count. Default:
            unless it takes the grid. A support in which all orders are alike sets it to False.
        check: takes the support's own settings and returns them in their full form.
        notes: takes the resolved support, its pattern and the grid, and returns what a user should know about them.
    """

    def register(function: Callable) -> Callable:
        _, size, *rest = inspect.signature(function).parameters.values()
        if size.name not in ("num_tokens", "grid", "clip") or any(p.kind is not p.KEYWORD_ONLY for p in rest):
            raise TypeError(
                f"support {name!r} must take (num_heads, num_tokens), (num_heads, grid) or (num_heads, clip), then "
                "keywords"
            )
        settings, sees_grid = {p.name: p.default for p in rest}, size.name != "num_tokens"
        if sees_grid and ordered:
            raise TypeError(f"support {name!r} takes the grid, so ordered=True has no meaning")
        has_order = not sees_grid if ordered is None else ordered
        support = Support(name, function, settings, sees_grid, has_order, check, notes, size.name == "clip")
        registering("support", SUPPORTS, name)(support)
        return function

    return register


def support_settings(name: str) -> dict[str, Any]:
    """Settings of a support with their defaults, including the common ones."""
    if name not in SUPPORTS:
        raise ValueError(f"support={name!r} must be one of {', '.join(SUPPORTS)}{did_you_mean(name, SUPPORTS)}")
    order = {"order": RASTER} if SUPPORTS[name].ordered else {}
    return {**SUPPORTS[name].settings, **COMMON_SETTINGS, **order}


def own_of(settings: Settings) -> dict[str, Any]:
    """The settings that a support does not share with others."""
    return {key: value for key, value in settings.items() if key not in ("name", *COMMON_SETTINGS, "order")}


def grid_of(num_tokens: int, grid: Sequence[int] | None, what: str) -> tuple[int, ...]:
    """(height, width) or (frames, height, width) of `num_tokens` patch tokens; a square if `grid` is None.

    Raises:
        ValueError: for another number of patches, and for None if N is no square.
    """
    if grid is None:
        side = math.isqrt(num_tokens)
        if side**2 != num_tokens:
            raise ValueError(f"grid=None with {what} needs a square number of patch tokens, got {num_tokens}")
        return side, side
    if len(grid) not in (2, 3) or math.prod(grid) != num_tokens:
        raise ValueError(f"grid={tuple(grid)} must be (height, width) with {num_tokens} patch tokens")
    return tuple(check_integer("grid", side, 1) for side in grid)


def own_grid(grid: Sequence[int], time: Time) -> tuple[int, ...]:
    """The grid that support and decay are made for: with time "clip" all of it, otherwise that of one frame."""
    return tuple(grid) if time == "clip" else tuple(grid[-2:])
