"""Predictors: which keys each query sees, chosen for each image.

`register_predictor` makes a class a value of the `predictor` of a prior.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_integer, check_not_both
from hf_sparseprior.base.costs import AttentionCosts
from hf_sparseprior.base.extras import PriorModule
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.masks import unpruned_count

PREDICTORS: dict[str, type[Predictor]] = {}


def register_predictor(name: str) -> Callable[[type[Predictor]], type[Predictor]]:
    """Register a subclass of `Predictor` under `name`."""
    return registering("predictor", PREDICTORS, name)


class Predictor(PriorModule, AttentionCosts):
    """Base of all predictors: `top_k` says how many keys a query keeps, or `forward` says which ones.

    by_place: whether `forward` depends on the places of the tokens in the grid.
    GIVES_SCORES: whether `forward` passes connectivity scores (B, H, n, n) to `recorder`.
    renormalise: True: the softmax runs over the kept keys. False: it runs over all keys, and the weights of the others
        are dropped.
    recorder: function that gets the scores, with their gradients; set while they are wanted.
    dense_in_training: in training every key is kept, and scores are only recorded.

    Args:
        num_heads: H.
        head_dim: D.
    """

    by_place = True
    GIVES_SCORES = False
    renormalise = True
    recorder: Callable[[Tensor], None] | None = None
    dense_in_training = False

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()

    def top_k(self, total: int) -> int | None:
        """How many of `total` keys a query keeps, those of the largest logits; None: `forward` chooses."""
        return None

    def forward(self, request: AttentionRequest) -> Tensor | None:
        """Keys of each patch, integers (B, H, n, K): token numbers, and -1 after the last; None: all keys.

        Keys that `request.keep_mask` drops are ignored.
        """
        raise NotImplementedError

    def prune(self) -> None:
        """Drop weights that are too small to count after training."""


@register_predictor("topk")
class TopK(Predictor):
    """The keys with the largest logits of each query (Gupta et al. 2021). Prefix tokens are treated like all others.

    All logits are computed first, so it costs as much as dense attention. `keys` of them are kept, or as many as a
    pruning ratio leaves, at least two; the default is 3 of 197, 98.48 % (Fibottention Table 2). The first of equal
    logits are kept.
    """

    SETTINGS = {"keys": None, "pruning_ratio": None}
    DEFAULT_RATIO = 98.48
    by_place = False

    def __init__(self, num_heads: int, head_dim: int, keys: int | None, pruning_ratio: float | None) -> None:
        super().__init__(num_heads, head_dim)
        self.keys, self.pruning_ratio = keys, pruning_ratio

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `PriorModule`."""
        keys, ratio = settings["keys"], settings["pruning_ratio"]
        check_not_both("topk: keys", keys, ratio)
        if keys is not None:
            return {"keys": check_integer("topk: keys", keys, 1), "pruning_ratio": None}
        ratio = cls.DEFAULT_RATIO if ratio is None else ratio
        unpruned_count("topk", ratio, 1)
        return {"keys": None, "pruning_ratio": ratio}

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """As `AttentionCosts`, for the logits that are kept, not for those that are computed."""
        total = num_tokens + num_prefix_tokens
        return total * cls(1, head_dim, **{key: settings[key] for key in cls.SETTINGS}).top_k(total)

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """As `AttentionCosts`: all logits, without those that are kept."""
        kept = cls.cost_in_pairs(settings, head_dim, num_tokens, num_prefix_tokens)
        return num_heads * head_dim * ((num_tokens + num_prefix_tokens) ** 2 - kept)

    def top_k(self, total: int) -> int:
        """As `Predictor`."""
        if self.keys is not None:
            return min(total, self.keys)
        assert self.pruning_ratio is not None
        # A single key has the weight 1 whatever its logit is, and queries and keys would have no gradient.
        return min(total, max(2, unpruned_count("topk", self.pruning_ratio, total)))
