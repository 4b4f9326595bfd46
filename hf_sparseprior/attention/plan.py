"""What follows from one layer's settings and the grid: offsets, density and tables, made once.

Shape letters as in `ops`: H heads, N patch tokens, P prefix tokens, T = P + N, C curves, A axes, K offsets of a head
counted with both signs.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.attention.plain_operations import outside_trace
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import DecayTensors, ResolvedDecay, ResolvedSupport
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.layer_pattern import LayerKey, LayerPattern
from hf_sparseprior.patterns.masks import Pairs, check_bytes, repeated_lists, self_rows
from hf_sparseprior.patterns.mixed_heads import is_mixed, support_orders
from hf_sparseprior.patterns.relative_offsets import relative_table
from hf_sparseprior.patterns.supports import layer_pattern
from hf_sparseprior.patterns.token_order import RASTER, order_ranks, with_prefix
from hf_sparseprior.patterns.windows import window_places, window_regions, windowed_mask


class AttentionPlan:
    """Everything about one layer's attention that follows from its settings and the grid, not from the data.

    It is built once per (layer, grid) and kept by the layer. The tables that it makes for a device are kept in it.

    Args:
        layer_key: which layer it is, and its grid.
        num_prefix_tokens: P, tokens before the patches.
        support: resolved support.
        decay: resolved settings of the decay, no tensors, or None.
        layout: the order in which the patches come, all tables too: raster, or that of the support (`token_order`).

    How support and decay see the frames of a clip, `layer_key.time`: "frame": where in their frames two patches lie,
    not when (VIOLIN appendix D.2, curves per frame). "clip": as one grid in three dimensions (D.2, the other way).
    "axes": the support in each frame, and along time at one place of the frames; the decay by the distance in the frame
    plus that in time.
    """

    def __init__(
        self,
        layer_key: LayerKey,
        num_prefix_tokens: int,
        support: ResolvedSupport,
        decay: ResolvedDecay | None = None,
        layout: str = RASTER,
    ) -> None:
        self.layer_key = layer_key
        # The grid that support and decay are built for; that of a frame is repeated over the frames.
        self.own_grid = layer_key.own_grid
        covers = math.prod(self.own_grid) == layer_key.num_tokens
        order = layout if support["name"] == "dense" else support_orders(support, layer_key.num_heads)
        if layout != RASTER and (not covers or order != layout):
            raise ValueError(f"layout={layout!r} must be the order of the support, in an image or with time='clip'")
        *_, height, width = layer_key.grid
        self.num_heads = len(layer_key.head_numbers)
        self.frames, self.time, self.layer = layer_key.frames, layer_key.time, layer_key.layer
        self.grid = (self.frames * height, width)  # the frames one below the other
        self.num_tokens = layer_key.num_tokens
        self.num_prefix_tokens = num_prefix_tokens
        self.total = num_prefix_tokens + self.num_tokens
        self.support = support
        self.mask_fill = support["mask_fill"]
        self.decay = decay
        self.layout = layout
        self.layout_ranks = None if layout == RASTER else order_ranks(layout, self.own_grid)  # (1, N)
        # None stands for the dense support: no mask, no offsets.
        self.pattern = None if support["name"] == "dense" else layer_pattern(support, layer_key)
        if self.pattern is not None and layout != RASTER:  # in which the patches come already
            self.pattern = replace(self.pattern, ranks=None)
        self._set_pairs(self.pattern)
        self.tables: dict[tuple[str, torch.device], Tensor] = {}
        # What was made of the scalars of a decay, see `kernels._of_decay`.
        self.of_decay: dict[Callable, tuple[list[Tensor | None], Any]] = {}
        # M over all pairs, see `decayed_triton.DecayTable`; None: none is kept.
        self.decay_tables: dict[tuple, Any] | None = {}
        # Block masks of FlexAttention by device, see `flex.plan_mask`.
        self.block_masks: dict[torch.device, Any] = {}
        # Which backend runs requests of each kind, see `choice.bound_backend`.
        self.choices: dict[tuple, Any] = {}
        # What the decay's positions follow from, where they are the same for all heads.
        self.decay_key = None
        if decay is not None and self.ranks is None:
            self.decay_key = (
                DECAYS[decay["name"]],
                json.dumps([decay, layer_key.grid, layout, self.time], sort_keys=True),
            )
        # The arguments as text: `from_key` makes the same plan again.
        self.key = json.dumps([layer_key, num_prefix_tokens, support, decay, layout], sort_keys=True)

    def _set_pairs(self, pattern: LayerPattern | None) -> None:
        """What backends read of the pattern. Attributes, not properties: a compiler that has the plan as a constant
        reads nothing else.
        """
        self.offsets: list[list[int]] | None = None
        # Rank of each patch in the order in which offsets and pairs number them, (H or 1, N); None: that in which the
        # patches come.
        self.ranks: np.ndarray | None = None
        self.density, self.has_pairs, self.repeats_frame, self.list_bytes, self.offset_pairs = 1.0, False, False, 0, 0
        self.head_pairs: list[int] = []
        # Share of the pairs by which the time of a sparse backend goes.
        self.cost_density = 1.0
        if pattern is None:
            return
        self.density = self.cost_density = 1.0 - pattern.pruning_ratio(self.num_prefix_tokens) / 100.0
        self.repeats_frame = pattern.repeats
        self.has_pairs = pattern.pairs is not None or pattern.repeats
        if self.has_pairs and is_mixed(self.support):
            # The lists of all heads are as long as the longest. Heads of one support alone hardly differ.
            most = max(pattern.nonzeros(head, self.num_prefix_tokens) for head in range(self.num_heads))
            self.cost_density = most / self.total**2
        if pattern.repeats:  # all pairs are listed as such
            self.offsets = [[] for _ in pattern.offsets]
            self.frame_keys = frame_key_lists(pattern)
            keys = self.num_prefix_tokens + self.frames * self.frame_keys.shape[-1]
            # Memory of the lists of keys over all frames.
            self.list_bytes = 4 * self.num_heads * self.num_tokens * keys
            return
        self.offsets = pattern.offsets
        self.ranks = pattern.ranks
        # Of pairs (j, j + o), in each head and over all.
        self.head_pairs = [sum(self.num_tokens - offset for offset in head) for head in self.offsets]
        self.offset_pairs = sum(self.head_pairs)

    @classmethod
    def from_key(cls, key: str) -> AttentionPlan:
        """The plan whose `key` this is."""
        (num_heads, grid, layer, time, heads, draw), *rest = json.loads(key)
        heads = None if heads is None else tuple(heads)
        return cls(LayerKey(num_heads, tuple(grid), layer, time, heads, draw), *rest)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        """Copies and other processes make it anew, with tables of their own."""
        return AttentionPlan.from_key, (self.key,)

    @property
    def pairs(self) -> Pairs:
        """Pairs off the diagonals; those of all frames are listed anew each time.

        Raises:
            ValueError: if the lists would take too much memory.
        """
        return None if self.pattern is None else self.pattern.listed().pairs

    @property
    def visits(self) -> np.ndarray | None:
        """The patch of the grid at each place of the layout, int64 (N,); None for raster order."""
        return None if self.layout_ranks is None else np.argsort(self.layout_ranks[0])

    def build_table(self, name: str) -> np.ndarray:
        """A table as an array: one of `TABLES`, "relative_..." as of `relative_table`, or one of the windows of an
        image of HEIGHT x WIDTH patches that is rolled by ROWS and COLUMNS.

        "windows HEIGHT WIDTH ROWS COLUMNS": the pairs that are seen, as of `windowed_mask`. Pairs that the support
        leaves out with mask_fill "zero" are among them. "in_windows ...": as of `window_places`, in the layout;
        "in_image ...": its inverse.
        """
        if name.startswith("relative_"):
            return relative_table(name, self.grid, self.num_prefix_tokens, self.visits)
        kind, *sizes = name.split()
        if not sizes:
            return TABLES[name](self)
        height, width, *shift = map(int, sizes)
        if kind == "windows":
            drops = self.offsets is not None and self.mask_fill == "neg_inf"
            regions = window_regions((height, width), self.grid, shift, self.visits)
            return windowed_mask(regions, _narrow_mask(self) if drops else None)
        places = window_places((height, width), self.grid, shift, self.visits)[None]
        return places if kind == "in_windows" else np.argsort(places, axis=1)


# Tables that layers of a model have in common, for as long as a plan has them: of the decay's positions, which are not
# even made twice, and large ones with the same content, such as masks of the same windows in every layer.
OF_DECAY = ("positions", "positions_int32", "positions_float32", "positions_in_order")
LARGE = 1 << 20  # bytes
_shared_tables: weakref.WeakValueDictionary[tuple, Tensor] = weakref.WeakValueDictionary()


def plan_table(plan: AttentionPlan, name: str, device: torch.device) -> Tensor:
    """A table of a plan on a device, made once for each.

    A function, not a method: dynamo cannot guard methods of an object that a constant function returned.
    """
    if torch.compiler.is_compiling():
        return _table_in_graph(plan.key, name, str(device))
    if (table := plan.tables.get((name, device))) is not None:
        return table
    shared: tuple[Any, ...] | None = None
    if name in OF_DECAY and plan.decay_key is not None:
        shared = (name, device, *plan.decay_key)
    table = None if shared is None else _shared_tables.get(shared)
    if table is None:
        # A table made under inference_mode could not be used in a later training step.
        with torch.inference_mode(False), outside_trace():
            content = plan.build_table(name)
            if shared is None and content.nbytes >= LARGE:
                digest = hashlib.blake2b(np.ascontiguousarray(content).data, digest_size=16).digest()
                shared = (str(content.dtype), content.shape, digest, device)
                table = _shared_tables.get(shared)
            if table is None:
                table = torch.tensor(content).to(device)
        if type(table) is not Tensor:  # one made while tracing with fake tensors must not outlive the trace
            return table
        if shared is not None:
            _shared_tables[shared] = table
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
        positions = kind.learned_positions(decay, plan.own_grid)
        if repeats := plan.num_tokens // positions.shape[-1] - 1:
            positions = positions.repeat(1, 1, repeats + 1)
        if plan.time == "axes" and plan.frames > 1:
            times = plan_table(plan, "times", device).to(positions.dtype)
            positions = torch.cat([positions, times.expand(positions.shape[0], 1, -1)], 1)
        return positions if plan.visits is None else positions[..., plan_table(plan, "patches_in_order", device)[0]]
    return plan_table(plan, "positions", device)


# ---- tables ---------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[AttentionPlan], np.ndarray]] = {}


@registering("table", TABLES, "positions")
def _positions(plan: AttentionPlan) -> np.ndarray:
    """Positions of the decay, int64 (C, A, N)."""
    assert plan.decay is not None
    positions = DECAYS[plan.decay["name"]].positions(plan.decay, plan.own_grid)
    positions = np.tile(positions, plan.num_tokens // positions.shape[-1])
    if plan.time == "axes" and plan.frames > 1:
        positions = np.concatenate([positions, np.broadcast_to(_times(plan), (len(positions), 1, plan.num_tokens))], 1)
    return positions if plan.visits is None else positions[..., plan.visits]


@registering("table", TABLES, "times")
def _times(plan: AttentionPlan) -> np.ndarray:
    """The frame of each patch of a clip, int64 (1, 1, N)."""
    return np.arange(plan.frames).repeat(plan.num_tokens // plan.frames)[None, None]


@registering("table", TABLES, "positions_int32")
def _positions_int32(plan: AttentionPlan) -> np.ndarray:
    return _positions(plan).astype(np.int32)


@registering("table", TABLES, "positions_float32")
def _positions_float32(plan: AttentionPlan) -> np.ndarray:
    return _positions(plan).astype(np.float32)


@registering("table", TABLES, "mask")
def _mask(plan: AttentionPlan, pattern: LayerPattern | None = None) -> np.ndarray:
    """Bool (H, T, T), True = attended; of the pattern's heads, if one is given."""
    pattern = _pattern(plan) if pattern is None else pattern
    if plan.frames > 1:
        size = "x".join(map(str, (plan.frames, plan.grid[0] // plan.frames, plan.grid[1])))
        check_bytes(len(pattern.offsets) * plan.total**2, f"a mask of all pairs over {size} patches would")
    return pattern.mask(plan.num_prefix_tokens)


@registering("table", TABLES, "narrow_mask")
def _narrow_mask(plan: AttentionPlan) -> np.ndarray:
    """As "mask", but (1, T, T) where all heads see the same pairs."""
    pattern = _pattern(plan)
    offsets, pairs, ranks = pattern.offsets, pattern.pairs, pattern.ranks
    alike = (ranks is None or len(ranks) == 1) and all(own == offsets[0] for own in offsets)
    if not alike or (pairs is not None and not all(np.array_equal(own, pairs[0]) for own in pairs)):
        return _mask(plan)
    return _mask(plan, replace(pattern, offsets=offsets[:1], pairs=None if pairs is None else pairs[:1]))


@registering("table", TABLES, "keys")
def _keys(plan: AttentionPlan) -> np.ndarray:
    """The tokens that each patch sees, int32 (H, N, K), see `key_lists`."""
    if plan.repeats_frame:
        check_bytes(plan.list_bytes, f"lists of the keys of {plan.num_tokens} patches would")
        return repeated_lists(plan.frame_keys, plan.frames, plan.num_prefix_tokens)
    return _pattern(plan).key_lists(plan.num_prefix_tokens)


@registering("table", TABLES, "frame_keys")
def _frame_keys(plan: AttentionPlan) -> np.ndarray:
    """The places that each place of a frame sees in all frames, see `frame_key_lists`."""
    return plan.frame_keys


def frame_key_lists(pattern: LayerPattern) -> np.ndarray:
    """The places of a frame that each place sees in all frames, int64 (H, S, K), -1 after the last."""
    # With a prefix token, which every place sees, none sees itself for want of another.
    return np.maximum(pattern.key_lists(1)[:, :, 1:].astype(np.int64) - 1, -1)


@registering("table", TABLES, "attended")
def _attended(plan: AttentionPlan) -> np.ndarray:
    """At which distances a head attends, bool (H, N), for a support without pairs off its diagonals."""
    return np.array([np.isin(np.arange(plan.num_tokens), offsets) for offsets in _offsets(plan)])


@registering("table", TABLES, "ranks")
def _ranks(plan: AttentionPlan) -> np.ndarray:
    """Rank of each patch of the grid in the order of its head, or in the layout, int64 (H or 1, N)."""
    ranks = plan.ranks if plan.layout_ranks is None else plan.layout_ranks
    assert ranks is not None
    return ranks


@registering("table", TABLES, "patches_in_order")
def _patches_in_order(plan: AttentionPlan) -> np.ndarray:
    """The patches of each head in their order, int64 (H or 1, N); the inverse of "ranks"."""
    return np.argsort(_ranks(plan), axis=1)


@registering("table", TABLES, "tokens_in_order")
def _tokens_in_order(plan: AttentionPlan) -> np.ndarray:
    """As "patches_in_order", with the prefix tokens in front, int64 (H or 1, T)."""
    return with_prefix(_patches_in_order(plan), plan.num_prefix_tokens)


@registering("table", TABLES, "token_ranks")
def _token_ranks(plan: AttentionPlan) -> np.ndarray:
    """As "ranks", with the prefix tokens in front, int64 (H or 1, T)."""
    return with_prefix(_ranks(plan), plan.num_prefix_tokens)


@registering("table", TABLES, "unseen")
def _unseen(plan: AttentionPlan) -> np.ndarray:
    """How many tokens each patch does not see, int64 (H, N), for a support without pairs off its diagonals."""
    rows = np.arange(plan.num_tokens)
    counts = []
    for offsets, signed in zip(_offsets(plan), _signed(plan), strict=True):
        seen = sum(((rows + offset >= 0) & (rows + offset < plan.num_tokens) for offset in signed), np.zeros_like(rows))
        seen[self_rows(offsets, plan.num_tokens, plan.num_prefix_tokens)] += 1
        counts.append(plan.num_tokens - seen)
    return np.stack(counts)


# The rest is for the compiled kernels along diagonals. A signed offset is o or -o; offset 0 has one sign.


@registering("table", TABLES, "signed_offsets")
def _signed_offsets(plan: AttentionPlan) -> np.ndarray:
    """Signed offsets, int32, head after head."""
    return np.array([offset for head in _signed(plan) for offset in head], dtype=np.int32)


@registering("table", TABLES, "offset_counts")
def _offset_counts(plan: AttentionPlan) -> np.ndarray:
    """How many signed offsets each head has, int32 (H,)."""
    return np.array([len(head) for head in _signed(plan)], dtype=np.int32)


@registering("table", TABLES, "offset_begin")
def _offset_begin(plan: AttentionPlan) -> np.ndarray:
    """Where the signed offsets of each head begin, and the end of the last, int32 (H + 1,)."""
    return np.cumsum([0, *map(len, _signed(plan))]).astype(np.int32)


@registering("table", TABLES, "positions_in_order")
def _positions_in_order(plan: AttentionPlan) -> np.ndarray:
    """Positions of the decay in the order in which the offsets count, float32 (1 or H, C, A, N)."""
    positions = _positions(plan).astype(np.float32)
    if plan.ranks is None:
        return positions[None]
    return np.stack([positions[..., patches] for patches in _patches_in_order(plan)])


@registering("table", TABLES, "pair_distances")
def _pair_distances(plan: AttentionPlan) -> np.ndarray:
    """Distances of the N - o pairs (j, j + o) of each offset, head after head, float32 (C, pairs)."""
    positions = _positions(plan)
    of_heads = [positions] * plan.num_heads
    if plan.ranks is not None:
        in_order = np.broadcast_to(_patches_in_order(plan), (plan.num_heads, plan.num_tokens))
        of_heads = [positions[..., patches] for patches in in_order]
    blocks = [
        np.abs(of_head[..., offset:] - of_head[..., : plan.num_tokens - offset]).sum(1)
        for of_head, offsets in zip(of_heads, _offsets(plan), strict=True)
        for offset in offsets
    ]
    empty = np.zeros((positions.shape[0], 0))
    return np.concatenate([empty, *blocks], axis=1).astype(np.float32)


@registering("table", TABLES, "pair_begin")
def _pair_begin(plan: AttentionPlan) -> np.ndarray:
    """Where the pairs of each signed offset begin, int64; o and -o share theirs."""
    begins, end = [], 0
    for head in _offsets(plan):
        for offset in head:
            begins += [end, end] if offset else [end]
            end += plan.num_tokens - offset
    return np.array(begins, dtype=np.int64)


def _pattern(plan: AttentionPlan) -> LayerPattern:
    assert plan.pattern is not None
    return plan.pattern


def _offsets(plan: AttentionPlan) -> list[list[int]]:
    assert plan.offsets is not None
    return plan.offsets


def _signed(plan: AttentionPlan) -> list[list[int]]:
    """The signed offsets of each head, o and -o one after the other."""
    return [
        [signed for offset in offsets for signed in ((offset, -offset) if offset else (0,))]
        for offsets in _offsets(plan)
    ]
