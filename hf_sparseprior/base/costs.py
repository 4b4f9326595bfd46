"""What is counted as FLOPs of a predictor or a mixer, which do other work than the pairs of a support.

Each class says it next to its forward, and `analysis.flops` adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AttentionCosts:
    """Base of predictors and mixers. `settings` are resolved ones."""

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """The number of pairs of a head whose Q K^T and (softmax) V cost as much; dense attention has T^2."""
        raise NotImplementedError

    @classmethod
    def settings_for(cls, settings: Mapping[str, Any], total: int) -> Mapping[str, Any]:
        """The settings of layers that have lost some of a grid's T tokens."""
        return settings

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """Multiply-adds of a layer in addition to those of the pairs."""
        return 0

    @classmethod
    def projection_multiply_adds(cls, settings: Mapping[str, Any], num_heads: int, width: int, total: int) -> int:
        """How many multiply-adds more than in dense attention the projections of a layer have; below 0: fewer."""
        return 0
