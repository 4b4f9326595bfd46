"""What FLOPs counts of a predictor or a mixer, which replace the pairs of a support by their own work.

Each class says it next to its forward; `analysis.flops` adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AttentionCosts:
    """Base of predictors and mixers. `settings` are resolved ones."""

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """Pairs of a head whose Q K^T and (softmax) V cost as much, of T^2 in dense attention."""
        raise NotImplementedError

    @classmethod
    def settings_for(cls, settings: Mapping[str, Any], total: int) -> Mapping[str, Any]:
        """The settings of layers that have lost some of a grid's T tokens."""
        return settings

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """Multiply-adds of a layer besides those of the pairs."""
        return 0

    @classmethod
    def projection_multiply_adds(cls, settings: Mapping[str, Any], num_heads: int, width: int, total: int) -> int:
        """Multiply-adds that the projections of a layer have more than dense attention's; below 0: fewer."""
        return 0
