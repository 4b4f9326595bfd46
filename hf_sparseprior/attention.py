"""The one attention layer that every model uses."""

from __future__ import annotations

import json
import logging
import operator
from typing import Any

import torch
from torch import Tensor, nn

from .attention_plan import AttentionPlan
from .attention_request import AttentionRequest
from .backend_choice import forced_backend
from .decay import Decay, make_decay
from .extras import make_extras, make_module
from .low_rank import MIXERS, Mixer
from .ops import run_plan
from .predictor import PREDICTORS, Predictor
from .relative_position import RelativePosition
from .resolved import ResolvedPrior
from .supports import support_notes

logger = logging.getLogger("hf_sparseprior.attention")
NO_DECAY = "null"  # as JSON


class PriorAttention(nn.Module):
    """What a prior adds to an attention layer: its decay, its relative positions, and how queries meet keys.

    The modules decay_bias, predictor and mixer are None if the prior has none.

    Args:
        num_heads: H.
        prior: resolved prior (`resolve_prior`).
        layer_idx: layer number from 0; decides which head has which support.
        head_dim: D, which relative positions need to know.
    """

    # How many grids a layer keeps plans for; a model that sees many resolutions must not collect masks without limit.
    MAX_PLANS = 8

    def __init__(self, num_heads: int, prior: ResolvedPrior, layer_idx: int = 0, head_dim: int = 0) -> None:
        super().__init__()
        self._set_prior(num_heads, prior, layer_idx, head_dim)

    def _set_prior(self, num_heads: int, prior: ResolvedPrior, layer_idx: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.layer_idx = layer_idx
        self.prior = prior
        # "bias" in the name keeps alpha and beta out of weight decay in transformers' own Trainer, which decides by
        # names.
        self.decay_bias: Decay | None = None
        if (decay := prior["decay"]) is not None:
            self.decay_bias = make_decay(decay, num_heads)
        self.predictor: Predictor | None = None
        if prior["predictor"] is not None:
            self.predictor = make_module(prior["predictor"], PREDICTORS, num_heads, head_dim)  # type: ignore[assignment]
        self.mixer: Mixer | None = None
        if prior["mixer"] != "softmax":
            self.mixer = make_module(prior["mixer"], MIXERS, num_heads, head_dim)  # type: ignore[assignment]
        self.relative_position = make_extras(prior["extras"], "attention", num_heads, head_dim)
        # Decays that can be switched (`hf_sparseprior.adapters.violin.DecayLayer`), if `decay_bias` is None.
        self.decay_adapter: Any = None
        self.support_key = json.dumps([num_heads, prior["support"], layer_idx], sort_keys=True)
        self._plans: dict[tuple[str, int, int, int, int], AttentionPlan] = {}

    def active_decay(self) -> Decay | None:
        """The decay of the next forward: the prior's own, or that of the active adapter."""
        return self.decay_bias if self.decay_adapter is None else self.decay_adapter.active_decay()

    def plan(self, grid: tuple[int, int], num_prefix_tokens: int = 0, frames: int = 1) -> AttentionPlan:
        """The layer's plan for a grid and the active decay, made at first use; a constant in compiled graphs.

        Arguments as in `AttentionPlan`.
        """
        decay = self.active_decay()
        decay_key = NO_DECAY if decay is None else decay.key
        # A grid decides the tables, so a symbolic size becomes a number here: one compiled graph per grid.
        sizes = (operator.index(grid[0]), operator.index(grid[1]), operator.index(num_prefix_tokens))
        return self._constant_plan(self.support_key, decay_key, *sizes, operator.index(frames))

    # Offsets come from Python integers and a private random generator, which a compiler does not trace.
    # dynamo guards on `support_key`: layers share this code, and nothing else tells their compiled graphs apart.
    @torch._dynamo.assume_constant_result
    def _constant_plan(
        self, support_key: str, decay_key: str, height: int, width: int, num_prefix_tokens: int, frames: int
    ) -> AttentionPlan:
        key, grid = (decay_key, height, width, num_prefix_tokens, frames), (height, width)
        if key not in self._plans:
            if len(self._plans) >= self.MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            support = self.prior["support"]
            if self.layer_idx == 0:
                for note in support_notes(support, self.num_heads, grid, num_prefix_tokens):
                    logger.info(note)
            self._plans[key] = AttentionPlan(
                self.num_heads, grid, num_prefix_tokens, support, json.loads(decay_key), self.layer_idx, frames
            )
        return self._plans[key]

    def attend(self, request: AttentionRequest, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
        """Attention of projected queries, keys and values with the layer's prior.

        Token pruning cannot be combined with mixers or relative positions; `prior.check_together` refuses it.

        Args:
            request: has the layer's `plan`; decay, keys and relative positions are filled in here.
            backend: as in `ops.run_plan`.

        Returns:
            As `ops.run_plan`.
        """
        if self.mixer is not None:
            return self._mix(request, backend)
        key_ids = top_k = None
        if self.predictor is not None:
            top_k = self.predictor.top_k(request.q.shape[2])
            key_ids = self.predictor(request) if top_k is None else None
        relative: list[RelativePosition] = list(self.relative_position.values())  # type: ignore[arg-type]
        bias = request.bias
        for position in relative:
            logits = position(request)
            bias = logits if bias is None else bias + logits
        on_values = [position for position in relative if position.uses_weights]
        decay = self.active_decay()
        filled = request._replace(
            decay=None if decay is None else decay(),
            bias=bias,
            key_ids=key_ids,
            top_k=top_k,
            renormalise=self.predictor is None or self.predictor.renormalise,
            need_weights=request.need_weights or bool(on_values),
        )
        out, weights = run_plan(filled, backend)
        for position in on_values:
            assert weights is not None
            out = out + position.value_term(weights, request.plan)
        return out, weights if request.need_weights else None

    def _mix(self, request: AttentionRequest, backend: str) -> tuple[Tensor, Tensor | None]:
        """The mixer's output and weights. A mixer has one form, which no backend changes."""
        assert self.mixer is not None
        source, forced = forced_backend(backend)
        if forced not in ("auto", "reference"):
            raise ValueError(f"{source}={forced!r} cannot run mixer {self.mixer.name!r}, which has one form")
        if request.bias is not None:
            raise ValueError(f"mixer {self.mixer.name!r} has no logits of pairs to which a bias could be added")
        return self.mixer(request)


class SparsePriorAttention(PriorAttention):
    """Multi-head self-attention with a prior.

    Args:
        hidden_size: width of the tokens, a multiple of `num_heads`.
        num_heads: H.
        prior: resolved prior (`resolve_prior`).
        layer_idx: layer number from 0; decides which head has which support.
        qkv_bias, proj_bias: biases of the projections.
        attention_dropout: dropout probability of the attention weights in training.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        prior: ResolvedPrior,
        layer_idx: int = 0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attention_dropout: float = 0.0,
    ) -> None:
        nn.Module.__init__(self)
        self.head_dim = self.key_dim = hidden_size // num_heads
        if prior["mixer"] != "softmax":
            self.key_dim = MIXERS[prior["mixer"]["name"]].key_width(prior["mixer"], self.head_dim)
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, num_heads * self.key_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.key_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=proj_bias)
        # Last, so that random weights are drawn in the order in which published seeds drew them.
        self._set_prior(num_heads, prior, layer_idx, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int = 0,
        output_attentions: bool = False,
        backend: str = "auto",
        token_ids: Tensor | None = None,
        keep_mask: Tensor | None = None,
        weight_rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention.

        Args:
            hidden_states: (B, T, hidden_size), prefix tokens first, then the patches in raster order.
            grid: (height, width) of the patches.
            num_prefix_tokens: number of tokens before the patches.
            output_attentions: also return the attention weights.
            backend: forces a backend of `hf_sparseprior.ops`.
            token_ids, keep_mask, weight_rows: as in `AttentionRequest`.

        Returns:
            (B, T, hidden_size), and the weights or None: (B, H, T, T), or (B, H, weight_rows, T) with `weight_rows`.
        """
        batch, total = hidden_states.shape[:2]
        key_shape = (batch, total, self.num_heads, self.key_dim)
        q = self.q_proj(hidden_states).view(key_shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(key_shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(batch, total, self.num_heads, self.head_dim).transpose(1, 2)
        request = AttentionRequest(
            q,
            k,
            v,
            self.plan(grid, num_prefix_tokens),
            dropout_p=self.attention_dropout if self.training else 0.0,
            token_ids=token_ids,
            keep_mask=keep_mask,
            need_weights=output_attentions,
            weight_rows=weight_rows,
        )
        out, weights = self.attend(request, backend)
        return self.o_proj(out.transpose(1, 2).reshape(batch, total, self.num_heads * self.head_dim)), weights
