"""What follows from one layer's settings and the grid: offsets, density and tables, made once.

Shape letters as in `ops`: H heads, N patch tokens, P prefix tokens, T = P + N, C curves, A axes, K offsets of a head
counted with both signs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .decay import DECAYS
from .masks import Pairs, key_lists, mask_from_offsets, pairs_in_frames, pruning_ratio
from .registry import registering
from .relative_offsets import relative_table
from .resolved import DecayTensors, ResolvedDecay, ResolvedSupport
from .supports import layer_offsets, layer_pairs


class AttentionPlan:
    """Everything about one layer's attention that follows from its settings and the grid, not from the data.

    It is built once per (layer, grid) and kept by the layer. The tables that it makes for a device are kept in it.

    Args:
        num_heads: H.
        grid: (height, width) of the patch tokens; with several frames, of one of them.
        num_prefix_tokens: P, tokens before the patches.
        support: resolved support.
        decay: resolved settings of the decay, no tensors, or None.
        layer: layer number from 0.
        frames: frames of a clip, whose patches come one frame after another. Support and decay see where in their
            frames two patches lie, not when (VIOLIN appendix D.2, curves per frame).
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        support: ResolvedSupport,
        decay: ResolvedDecay | None,
        layer: int,
        frames: int = 1,
    ) -> None:
        self.num_heads = num_heads
        self.frames = frames
        self.frame_grid = grid
        self.grid = (frames * grid[0], grid[1])  # the frames one below the other
        self.num_tokens = frames * grid[0] * grid[1]
        self.num_prefix_tokens = num_prefix_tokens
        self.total = num_prefix_tokens + self.num_tokens
        self.support = support
        self.mask_fill = support["mask_fill"]
        self.decay = decay
        self.layer = layer
        # None stands for the dense support: no mask, no offsets.
        self.offsets: list[list[int]] | None = None
        self.pairs: Pairs = None  # pairs off the diagonals
        self.density = 1.0
        if support["name"] != "dense":
            of_frame = grid[0] * grid[1]
            sizes: Any = {"num_heads": num_heads, "num_tokens": of_frame, "layer": layer, "grid": grid}
            self.offsets, self.pairs = layer_offsets(support, **sizes), layer_pairs(support, **sizes)
            if frames > 1:  # offsets in raster order would cross from one frame into the next
                self.pairs = pairs_in_frames(self.offsets, of_frame, frames, self.pairs)
                self.offsets = [[] for _ in self.offsets]
            self.density = 1.0 - pruning_ratio(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs) / 100.0
        self.tables: dict[tuple[str, torch.device], Tensor] = {}
        # The arguments as text: `from_key` makes the same plan again.
        self.key = json.dumps([num_heads, grid, num_prefix_tokens, support, decay, layer, frames], sort_keys=True)

    @classmethod
    def from_key(cls, key: str) -> AttentionPlan:
        """The plan whose `key` this is."""
        num_heads, grid, *rest = json.loads(key)
        return cls(num_heads, tuple(grid), *rest)

    def build_table(self, name: str) -> np.ndarray:
        """A table as an array: one of `TABLES`, or "relative_..." as of `relative_table`."""
        if name.startswith("relative_"):
            return relative_table(name, self.grid, self.num_prefix_tokens)
        return TABLES[name](self)


def plan_table(plan: AttentionPlan, name: str, device: torch.device) -> Tensor:
    """A table of a plan on a device, made once for each.

    A function, not a method: dynamo cannot guard methods of an object that a constant function returned.
    """
    if torch.compiler.is_compiling():
        return _table_in_graph(plan.key, name, str(device))
    if (table := plan.tables.get((name, device))) is not None:
        return table
    # A table made under inference_mode could not be used in a later training step.
    with torch.inference_mode(False):
        table = torch.tensor(plan.build_table(name)).to(device)
    if type(table) is Tensor:  # a table made while tracing with fake tensors must not outlive the trace
        plan.tables[(name, device)] = table
    return table


# Tables come from numpy and Python integers. A compiled graph or an exported program does not trace how they are made
# but calls this function while it is built and keeps the result as a constant.
@torch.compiler.allow_in_graph
def _table_in_graph(key: str, name: str, device: str) -> Tensor:
    return torch.tensor(AttentionPlan.from_key(key).build_table(name)).to(device)


def decay_positions(plan: AttentionPlan, decay: DecayTensors, device: torch.device) -> Tensor:
    """Positions (C, A, N) that a decay measures distances along: those of its settings, or learned ones."""
    assert plan.decay is not None
    kind = DECAYS[plan.decay["name"]]
    if kind.learns_positions(decay):
        return kind.learned_positions(decay, plan.frame_grid).repeat(1, 1, plan.frames)
    return plan_table(plan, "positions", device)


# ---- tables ---------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[AttentionPlan], np.ndarray]] = {}


@registering("table", TABLES, "positions")
def _positions(plan: AttentionPlan) -> np.ndarray:
    """Positions of the decay, int64 (C, A, N)."""
    assert plan.decay is not None
    return np.tile(DECAYS[plan.decay["name"]].positions(plan.decay, plan.frame_grid), plan.frames)


@registering("table", TABLES, "positions_int32")
def _positions_int32(plan: AttentionPlan) -> np.ndarray:
    return _positions(plan).astype(np.int32)


@registering("table", TABLES, "positions_float32")
def _positions_float32(plan: AttentionPlan) -> np.ndarray:
    return _positions(plan).astype(np.float32)


@registering("table", TABLES, "mask")
def _mask(plan: AttentionPlan) -> np.ndarray:
    """Bool (H, T, T), True = attended."""
    return mask_from_offsets(_offsets(plan), plan.num_tokens, plan.num_prefix_tokens, plan.pairs)


@registering("table", TABLES, "keys")
def _keys(plan: AttentionPlan) -> np.ndarray:
    """The tokens that each patch sees, int32 (H, N, K), see `key_lists`."""
    return key_lists(_offsets(plan), plan.num_tokens, plan.num_prefix_tokens, plan.pairs)


@registering("table", TABLES, "attended")
def _attended(plan: AttentionPlan) -> np.ndarray:
    """At which distances a head attends, bool (H, N), for a support without pairs off its diagonals."""
    return np.array([np.isin(np.arange(plan.num_tokens), offsets) for offsets in _offsets(plan)])


# The rest is for the compiled kernels along diagonals. A signed offset is o or -o; offset 0 has one sign.


@registering("table", TABLES, "signed_offsets")
def _signed_offsets(plan: AttentionPlan) -> np.ndarray:
    """Signed offsets, int32, head after head."""
    return np.array([offset for head in _signed(plan) for signs in head for offset in signs], dtype=np.int32)


@registering("table", TABLES, "offset_counts")
def _offset_counts(plan: AttentionPlan) -> np.ndarray:
    """How many signed offsets each head has, int32 (H,)."""
    return np.array([sum(map(len, head)) for head in _signed(plan)], dtype=np.int32)


@registering("table", TABLES, "offset_begin")
def _offset_begin(plan: AttentionPlan) -> np.ndarray:
    """Where the signed offsets of each head begin, and the end of the last, int32 (H + 1,)."""
    return np.cumsum([0, *(sum(map(len, head)) for head in _signed(plan))]).astype(np.int32)


@registering("table", TABLES, "pair_distances")
def _pair_distances(plan: AttentionPlan) -> np.ndarray:
    """Distances of the N - o pairs (j, j + o) of each offset, head after head, float32 (C, pairs)."""
    positions = _positions(plan)
    blocks = [
        np.abs(positions[..., offset:] - positions[..., : plan.num_tokens - offset]).sum(1)
        for offsets in _offsets(plan)
        for offset in offsets
    ]
    empty = np.zeros((positions.shape[0], 0))
    return np.concatenate([empty, *blocks], axis=1).astype(np.float32)


@registering("table", TABLES, "pair_counts")
def _pair_counts(plan: AttentionPlan) -> np.ndarray:
    """How many pairs (j, j + o) each head has, int64 (H,)."""
    return np.array([sum(plan.num_tokens - offset for offset in head) for head in _offsets(plan)], dtype=np.int64)


@registering("table", TABLES, "pair_begin")
def _pair_begin(plan: AttentionPlan) -> np.ndarray:
    """Where the pairs of each signed offset begin, int64; o and -o share theirs."""
    lengths = [plan.num_tokens - offset for head in _offsets(plan) for offset in head]
    begins = np.cumsum([0, *lengths])[:-1]
    return np.repeat(begins, [len(signs) for head in _signed(plan) for signs in head]).astype(np.int64)


def _offsets(plan: AttentionPlan) -> list[list[int]]:
    assert plan.offsets is not None
    return plan.offsets


def _signed(plan: AttentionPlan) -> list[list[tuple[int, ...]]]:
    """The offsets of each head, each with its signs."""
    return [[(offset, -offset) if offset else (0,) for offset in offsets] for offsets in _offsets(plan)]
