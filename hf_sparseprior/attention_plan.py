"""What follows from one layer's settings and the grid: offsets, density and tables, made once.

Shape letters as in `ops`: H heads, N patch tokens, P prefix tokens, T = P + N, C curves, A axes, K offsets of a head
counted with both signs.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .decay import DECAYS
from .masks import Pairs, key_lists, mask_from_offsets, pruning_ratio
from .relative_offsets import relative_table
from .resolved import ResolvedSupport
from .supports import layer_offsets, layer_pairs


class AttentionPlan:
    """Everything about one layer's attention that follows from its settings and the grid, not from the data.

    Built once per (layer, grid) and kept by the layer; the tables it makes for a device are kept in it.

    Args:
        num_heads: H.
        grid: (height, width) of the patch tokens.
        num_prefix_tokens: P, tokens in front of the patches.
        support: resolved support.
        decay: resolved settings of the decay, no tensors, or None.
        layer: layer number from 0.
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        support: ResolvedSupport,
        decay: dict[str, Any] | None,
        layer: int,
    ) -> None:
        self.num_heads = num_heads
        self.grid = grid
        self.num_tokens = grid[0] * grid[1]
        self.num_prefix_tokens = num_prefix_tokens
        self.total = num_prefix_tokens + self.num_tokens
        self.support = support
        self.mask_fill = support["mask_fill"]
        self.decay = decay
        self.layer = layer
        # None stands for the dense support: no mask, no offsets.
        self.offsets: list[list[int]] | None = None
        self.pairs: Pairs = None  # off the diagonals
        self.density = 1.0
        if support["name"] != "dense":
            sizes: Any = {"num_heads": num_heads, "num_tokens": self.num_tokens, "layer": layer, "grid": grid}
            self.offsets, self.pairs = layer_offsets(support, **sizes), layer_pairs(support, **sizes)
            self.density = 1.0 - pruning_ratio(self.offsets, self.num_tokens, num_prefix_tokens, self.pairs) / 100.0
        self.tables: dict[tuple[str, torch.device], Tensor] = {}
        # The arguments as text: `from_key` makes the same plan again.
        self.key = json.dumps([num_heads, grid, num_prefix_tokens, support, decay, layer], sort_keys=True)

    @classmethod
    def from_key(cls, key: str) -> AttentionPlan:
        """The plan whose `key` this is."""
        num_heads, grid, *rest = json.loads(key)
        return cls(num_heads, tuple(grid), *rest)

    def build_table(self, name: str) -> np.ndarray:
        """A table as an array.

        "mask": bool (H, T, T), True = attended. "keys": int32 (H, N, K), see `key_lists`. "attended": bool (H, N), at
        which distances, of a support without other pairs. "positions" of the decay:
        int64 (C, A, N); "positions_int32" and "positions_float32". "relative_...": see `relative_table`. For the
        compiled kernels: "signed_offsets", int32, head after head, "offset_counts", int32 (H,), and "offset_begin",
        int32 (H + 1,), where those of each head begin; with a decay "pair_distances", float32 (C, pairs), the N - o
        pairs (j, j + o) of each offset, "pair_counts", int64 (H,), how many each head has, and "pair_begin", int64,
        where those of each signed offset begin.
        """
        if name.startswith("relative_"):
            return relative_table(name, self.grid, self.num_prefix_tokens)
        if name == "positions":
            assert self.decay is not None
            return DECAYS[self.decay["name"]].positions(self.decay, self.grid)
        if name in ("positions_int32", "positions_float32"):
            return self.build_table("positions").astype(name.removeprefix("positions_"))
        assert self.offsets is not None
        if name == "mask":
            return mask_from_offsets(self.offsets, self.num_tokens, self.num_prefix_tokens, self.pairs)
        if name == "keys":
            return key_lists(self.offsets, self.num_tokens, self.num_prefix_tokens, self.pairs)
        if name == "attended":
            return np.array([np.isin(np.arange(self.num_tokens), own) for own in self.offsets])
        if name == "pair_distances":
            positions = self.build_table("positions")
            blocks = [
                np.abs(positions[..., offset:] - positions[..., : self.num_tokens - offset]).sum(1)
                for own in self.offsets
                for offset in own
            ]
            empty = np.zeros((positions.shape[0], 0))
            return np.concatenate([empty, *blocks], axis=1).astype(np.float32)
        signed = [[(offset, -offset) if offset else (0,) for offset in own] for own in self.offsets]
        if name == "signed_offsets":
            return np.array([value for own in signed for pair in own for value in pair], dtype=np.int32)
        if name == "offset_counts":
            return np.array([sum(map(len, own)) for own in signed], dtype=np.int32)
        if name == "offset_begin":
            return np.cumsum([0, *(sum(map(len, own)) for own in signed)]).astype(np.int32)
        lengths = [[self.num_tokens - offset for offset in own] for own in self.offsets]
        if name == "pair_counts":
            return np.array([sum(own) for own in lengths], dtype=np.int64)
        assert name == "pair_begin"
        begins = np.cumsum([0, *(length for own in lengths for length in own)])[:-1]
        return np.repeat(begins, [len(pair) for own in signed for pair in own]).astype(np.int64)


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


def decay_positions(plan: AttentionPlan, decay: dict[str, Any], device: torch.device) -> Tensor:
    """Positions (C, A, N) that a decay measures distances along: those of its settings, or learned ones."""
    assert plan.decay is not None
    kind = DECAYS[plan.decay["name"]]
    if kind.learns_positions(decay):
        return kind.learned_positions(decay, plan.grid)
    return plan_table(plan, "positions", device)
