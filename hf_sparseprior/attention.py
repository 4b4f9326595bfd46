"""The one attention layer that every model uses."""

from __future__ import annotations

import json
import logging
import operator
from typing import Any

import torch
from torch import Tensor, nn

from .decay import DECAYS, Decay
from .ops import AttentionPlan, run_plan
from .supports import support_notes

logger = logging.getLogger("hf_sparseprior.attention")


class SparsePriorAttention(nn.Module):
    """Multi-head self-attention with a prior.

    Args:
        hidden_size: width of the tokens, a multiple of `num_heads`.
        num_heads: H.
        prior: resolved prior (`resolve_prior`).
        layer_idx: layer number from 0; decides which head has which support.
        qkv_bias, proj_bias: biases of the projections.
        attention_dropout: dropout probability of the attention weights in training.
    """

    # Grids whose plan a layer keeps; a model that sees many resolutions must not collect masks without end.
    MAX_PLANS = 8

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        prior: dict[str, Any],
        layer_idx: int = 0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.layer_idx = layer_idx
        self.prior = prior
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=proj_bias)
        # "bias" in the name keeps alpha and beta out of weight decay in transformers' own Trainer, which goes by names.
        self.decay_bias: Decay | None = None
        if (decay := prior["decay"]) is not None:
            settings = {key: value for key, value in decay.items() if key != "name"}
            self.decay_bias = DECAYS[decay["name"]](num_heads, **settings)
        self.key = json.dumps([num_heads, prior, layer_idx], sort_keys=True)
        self._plans: dict[tuple[int, int, int], AttentionPlan] = {}

    def plan(self, grid: tuple[int, int], num_prefix_tokens: int) -> AttentionPlan:
        """The layer's plan for a grid, built at its first use."""
        key = (grid[0], grid[1], num_prefix_tokens)
        if key not in self._plans:
            if len(self._plans) >= self.MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            if self.layer_idx == 0:
                for note in support_notes(self.prior["support"], self.num_heads, grid, num_prefix_tokens):
                    logger.info(note)
            self._plans[key] = AttentionPlan(
                self.num_heads, grid, num_prefix_tokens, self.prior["support"], self.prior["decay"], self.layer_idx
            )
        return self._plans[key]

    # Offsets come from Python integers and a private random generator, which a compiler does not trace.
    # `key` is there to be guarded: layers share this code, and nothing else tells their compiled graphs apart.
    @torch._dynamo.assume_constant_result
    def _constant_plan(self, key: str, height: int, width: int, num_prefix_tokens: int) -> AttentionPlan:
        return self.plan((height, width), num_prefix_tokens)

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int = 0,
        output_attentions: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention.

        Args:
            hidden_states: (B, T, hidden_size), prefix tokens first, then the patches in raster order.
            grid: (height, width) of the patches.
            num_prefix_tokens: T - height * width.
            output_attentions: also return the attention weights.
            backend: forces a backend of `hf_sparseprior.ops`.

        Returns:
            (B, T, hidden_size) and the weights (B, H, T, T) or None.
        """
        batch, total = hidden_states.shape[:2]
        shape = (batch, total, self.num_heads, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        # A grid decides the tables, so a symbolic size becomes a number here: one compiled graph per grid.
        grid_and_prefix = (operator.index(grid[0]), operator.index(grid[1]), operator.index(num_prefix_tokens))
        out, weights = run_plan(
            self._constant_plan(self.key, *grid_and_prefix),
            q,
            k,
            v,
            self.decay_bias() if self.decay_bias is not None else None,
            dropout_p=self.attention_dropout if self.training else 0.0,
            need_weights=output_attentions,
            backend=backend,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, total, self.num_heads * self.head_dim)), weights
