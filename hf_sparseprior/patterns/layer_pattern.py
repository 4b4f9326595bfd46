"""The pairs of one layer: what they depend on besides the support's settings, and what follows from them.

H is the number of heads, N of patch tokens, P of prefix tokens, T = P + N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hf_sparseprior.base.resolved import Time
from hf_sparseprior.patterns.masks import (
    Pairs,
    attended_pairs,
    check_listed,
    count_nonzeros,
    key_lists,
    mask_from_offsets,
    pairs_in_frames,
    pruning_ratio,
)
from hf_sparseprior.patterns.pattern import Pattern, own_grid
from hf_sparseprior.patterns.token_order import lists_in_raster, mask_in_raster


class LayerKey(NamedTuple):
    """Which layer it is, for a support and a decay.

    num_heads: for how many heads the support is made. grid: (height, width) of the patches, or (frames, height, width)
    of those of a clip, which come frame after frame. layer: its number, from 0. time: how support and decay see the
    frames of a clip, as in `AttentionPlan`. heads: numbers of the heads that the layer has, from 0; None: all. draw:
    which draw of a support that draws its pairs anew, from 1; 0: that of evaluation.
    """

    num_heads: int
    grid: tuple[int, ...]
    layer: int = 0
    time: Time = "frame"
    heads: tuple[int, ...] | None = None
    draw: int = 0

    @property
    def frames(self) -> int:
        """Frames of the grid; of an image 1."""
        return self.grid[0] if len(self.grid) == 3 else 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def own_grid(self) -> tuple[int, ...]:
        """The grid that support and decay are made for: all of it with time "clip", otherwise that of one frame."""
        return own_grid(self.grid, self.time)

    @property
    def head_numbers(self) -> Sequence[int]:
        """Numbers of the heads that the layer has, from 0."""
        return range(self.num_heads) if self.heads is None else self.heads


@dataclass(frozen=True)
class LayerPattern:
    """Which keys each head of a layer sees.

    support: its name. key: of the layer.
    offsets: for each head the distances |j - k| at which patches attend to one another, sorted; 0 is the diagonal.
    pairs: for each head the further pairs (query, key) of patches, int64 (n, 2); None: there are none.
    ranks: of the patches in whose order offsets and pairs number them, int64 (H or 1, N); None: raster order.
    repeats: offsets, pairs and ranks are of one frame, and the same in and between all frames of a clip.
    whole: the pattern of all layers that this one is of.
    """

    support: str
    key: LayerKey
    offsets: list[list[int]]
    pairs: Pairs
    ranks: np.ndarray | None
    repeats: bool = False
    whole: Pattern | None = field(default=None, repr=False, compare=False)

    @property
    def frames(self) -> int:
        """In how many frames the pattern is repeated."""
        return self.key.frames if self.repeats else 1

    @property
    def num_tokens(self) -> int:
        """Patches that offsets and pairs number, N or those of a frame."""
        return self.key.num_tokens // self.frames

    def pairs_of(self, head: int) -> np.ndarray | None:
        """The further pairs of a head."""
        return None if self.pairs is None else self.pairs[head]

    def nonzeros(self, head: int, num_prefix_tokens: int = 0) -> int:
        """Pairs that a head attends to."""
        return count_nonzeros(self.offsets[head], self.num_tokens, num_prefix_tokens, self.pairs_of(head), self.frames)

    def attended_pairs(self, num_prefix_tokens: int = 0) -> int:
        """Pairs that all heads attend to."""
        return attended_pairs(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs, self.frames)

    def pruning_ratio(self, num_prefix_tokens: int = 0) -> float:
        """Percentage of the H T^2 pairs that are left out."""
        return pruning_ratio(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs, self.frames)

    def mask(self, num_prefix_tokens: int = 0) -> np.ndarray:
        """Bool (H, T, T) with patches in raster order, True where a query attends to a key.

        Raises:
            ValueError: if the lists of pairs over a clip would take too much memory.
        """
        if self.repeats:
            return self.listed().mask(num_prefix_tokens)
        mask = mask_from_offsets(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs)
        return mask if self.ranks is None else mask_in_raster(mask, self.ranks, num_prefix_tokens)

    def key_lists(self, num_prefix_tokens: int = 0) -> np.ndarray:
        """The keys of each patch in raster order, int32 (H, N, K), see `masks.key_lists`; of a frame if it repeats."""
        lists = key_lists(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs)
        return lists if self.ranks is None else lists_in_raster(lists, self.ranks, num_prefix_tokens)

    def listed(self, same_frame: bool = False) -> LayerPattern:
        """A pattern that repeats, with its pairs in all frames listed one by one, in raster order.

        `same_frame`: within each frame only, and by its offsets along time at one place of the frames.

        Raises:
            ValueError: if the lists would take too much memory.
        """
        if not self.repeats:
            return self
        frames, places = self.frames, self.num_tokens
        counts = {
            (tuple(offsets_of_head), id(self.pairs_of(head))): count_nonzeros(
                offsets_of_head, places, 0, self.pairs_of(head)
            )
            for head, offsets_of_head in enumerate(self.offsets)
        }
        repeats = frames if same_frame else frames**2
        size = "x".join(map(str, self.key.grid))
        what = f"support {self.support!r} with time={self.key.time!r} over {size} patches"
        check_listed([repeats * count for count in counts.values()], len(self.offsets), what)
        pairs = pairs_in_frames(self.offsets, places, frames, self.pairs, self.ranks, same_frame=same_frame)
        # Offsets of one frame would cross from a frame into the next. Those along time stay in their patch.
        offsets: list[list[int]] = [[] for _ in self.offsets]
        if same_frame:
            offsets = [[o * places for o in offsets_of_head if 0 < o < frames] for offsets_of_head in self.offsets]
        return replace(self, offsets=offsets, pairs=pairs, ranks=None, repeats=False)
