"""The one attention layer that every model uses."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from hf_sparseprior.attention.choice import forced_backend
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.packing import Packing, joined
from hf_sparseprior.attention.plain_operations import whole_number
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, AttentionRequest, CallOptions, add_bias
from hf_sparseprior.attention.rotary import rotate
from hf_sparseprior.base.extras import make_extras, make_module
from hf_sparseprior.base.layer_sizes import HEAD_WIDTH, HEADS, WIDTH, LayerSizes, UnitAxes, whole_layer
from hf_sparseprior.base.resolved import ResolvedDecay, ResolvedPrior, Time, with_decay
from hf_sparseprior.patterns.decay import Decay, make_decay
from hf_sparseprior.patterns.supports import DENSE, LayerKey, redraws, support_notes
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.low_rank import MIXERS, Mixer
from hf_sparseprior.priors.predictor import PREDICTORS, Predictor
from hf_sparseprior.priors.relative_position import RelativePosition

logger = logging.getLogger("hf_sparseprior.attention")
NO_DECAY = "null"  # as JSON


class PriorAttention(nn.Module):
    """What a prior adds to an attention layer: its decay, its relative positions, and how scores are computed.

    The modules decay_bias, predictor and mixer are None if the prior has none.

    Args:
        num_heads: H.
        prior: resolved prior (`resolve_prior`).
        layer_idx: layer number from 0; decides which head has which support.
        head_dim: D, width of the queries and keys, which relative positions need to know.
        heads: numbers of the H heads that the layer has, from 0, if some were pruned.
    """

    # How many grids a layer keeps plans for; a model that sees many resolutions must not collect masks without limit.
    # As many as MOST_PLANS while their tables take no more than PLANS_BYTES: those of a batch of small images. Beyond
    # MOST_BYTES even fewer than MAX_PLANS stay: those used last.
    MAX_PLANS, MOST_PLANS, PLANS_BYTES, MOST_BYTES = 8, 256, 1 << 24, 1 << 29
    # False for an attention of its own kind, to which neither a prior nor an adapter adds anything.
    takes_prior: ClassVar[bool] = True
    OWN_UNITS: ClassVar[tuple[str, ...]] = (HEADS, HEAD_WIDTH)

    def __init__(
        self,
        num_heads: int,
        prior: ResolvedPrior,
        layer_idx: int = 0,
        head_dim: int = 0,
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._set_prior(num_heads, prior, layer_idx, head_dim, heads)

    def _set_prior(
        self, num_heads: int, prior: ResolvedPrior, layer_idx: int, head_dim: int, heads: Sequence[int] | None = None
    ) -> None:
        # A support is made for all heads; decay and relative positions have only those that are left.
        self.num_supports = num_heads
        self.heads = None if heads is None or len(heads) == num_heads else tuple(heads)
        self.num_heads = num_heads = num_heads if self.heads is None else len(self.heads)
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
        self._set_time(prior.get("time", "frame"))
        self._plans: dict[tuple[str, tuple[int, ...], int, bool, str, Time, int], AttentionPlan] = {}
        self._captured_plans: set[AttentionPlan] = set()

    def _set_time(self, time: Time) -> None:
        self.time = time
        support = self.prior["support"]
        # Layers that see everything share what is compiled for one of them: torch compiles a layer only eight times.
        layer = None if support["name"] == "dense" else self.layer_idx
        self.support_key = json.dumps([self.num_supports, support, layer, self.heads, time], sort_keys=True)

    def take_decay(self, module: Decay, decay: ResolvedDecay, time: Time) -> None:
        """Make the decay of an adapter the layer's own, and forget the adapters; `decay` are its settings."""
        self.prior = with_decay(self.prior, decay, time)
        self._set_time(time)
        self.decay_bias, self.decay_adapter = module, None

    def with_pairs(self, prior: ResolvedPrior) -> Self:
        """A layer with these weights and the support and predictor of another prior, to be tried in its place.

        Args:
            prior: resolved; its decay, mixer and extras are the layer's.
        """
        other = copy.copy(self)
        for name in ("_modules", "_parameters", "_buffers"):  # which a copy would share
            other.__dict__[name] = dict(self.__dict__[name])
        other.prior, other._plans, other._captured_plans = prior, {}, set()
        if prior["predictor"] is not None:
            other.predictor = make_module(prior["predictor"], PREDICTORS, self.num_heads, 0)  # type: ignore[assignment]
        else:
            other.predictor = None
        other._set_time(self.time)
        return other

    def active_decay(self) -> Decay | None:
        """The decay of the next forward: the prior's own, or that of the active adapter."""
        return self.decay_bias if self.decay_adapter is None else self.decay_adapter.active_decay()

    def active_time(self) -> Time:
        """How the next forward sees the frames of a clip: as the prior does, or the active adapter."""
        adapter_time = None if self.decay_adapter is None else self.decay_adapter.active_time()
        return self.time if adapter_time is None else adapter_time

    def plan(
        self,
        grid: tuple[int, ...],
        num_prefix_tokens: int = 0,
        dense: bool = False,
        layout: str = RASTER,
        draw: int = 0,
    ) -> AttentionPlan:
        """The layer's plan for a grid and the active decay, made at first use; a constant in compiled graphs.

        Args:
            grid, num_prefix_tokens, layout: as in `AttentionPlan`.
            dense: without the support, for a caller that leaves its pairs out by a bias.
            draw: as of `draw_of`. The plan of a draw is kept until there is one of another.
        """
        return self._plan(self.active_decay(), grid, num_prefix_tokens, dense, layout, draw)

    def draw_of(self, options: CallOptions) -> int:
        """Number of the draw of the support in this forward; 0 for that of evaluation, or if it has only one.

        Raises:
            ValueError: for a support that draws its pairs anew in a training pass that nobody counts.
        """
        if not (self.training and redraws(self.prior["support"])):
            return 0
        if options.draw is None:
            raise ValueError(
                f"support {self.prior['support']['name']!r} with redraw=True in training: CallOptions.draw=None must "
                "be the number of the pass, from 1, which the models of this package count"
            )
        return options.draw

    def _plan(
        self,
        decay: Decay | None,
        grid: tuple[int, ...],
        num_prefix_tokens: int,
        dense: bool,
        layout: str,
        draw: int = 0,
    ) -> AttentionPlan:
        """`plan` for a decay."""
        decay_key = NO_DECAY if decay is None else decay.key
        # A grid decides the tables, so a symbolic size becomes a number here: one compiled graph per grid.
        sides = tuple(map(whole_number, grid))
        prefix = whole_number(num_prefix_tokens)
        time = self.active_time()
        return self._constant_plan(self.support_key, decay_key, sides, prefix, dense, layout, time, draw)

    # Offsets come from Python integers and a private random generator, which a compiler does not trace.
    # dynamo guards on `support_key`: layers share this code, and nothing else tells their compiled graphs apart.
    @torch._dynamo.assume_constant_result
    def _constant_plan(
        self,
        support_key: str,
        decay_key: str,
        grid: tuple[int, ...],
        num_prefix_tokens: int,
        dense: bool,
        layout: str,
        time: Time,
        draw: int,
    ) -> AttentionPlan:
        key = (decay_key, grid, num_prefix_tokens, dense, layout, time, draw)
        if (plan := self._plans.get(key)) is None:
            if draw:  # those of other draws are not seen again
                self._plans = {kept: plan for kept, plan in list(self._plans.items()) if kept[-1] in (0, draw)}
            while self._plans_are_many():
                self._plans.pop(next(iter(self._plans), None), None)  # type: ignore[arg-type]
            layer_key = LayerKey(self.num_supports, grid, self.layer_idx, time, self.heads, draw)
            support = DENSE if dense else self.prior["support"]
            if self.layer_idx == 0 and draw < 2:
                for note in support_notes(support, layer_key, num_prefix_tokens):
                    logger.info(note)
            plan = AttentionPlan(layer_key, num_prefix_tokens, support, json.loads(decay_key), layout)
        elif len(self._plans) > 1:  # the one that was used last goes last
            self._plans.pop(key, None)  # another thread may have done so
        self._plans[key] = plan
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured_plans.add(plan)  # each replay of the CUDA graph reads its tables
        return plan

    def _plans_are_many(self) -> bool:
        """Whether the plan that was not used for longest has to go for a new one."""
        size = sum(table.nbytes for plan in list(self._plans.values()) for table in list(plan.tables.values()))
        if len(self._plans) < self.MAX_PLANS:
            return size > self.MOST_BYTES
        return len(self._plans) >= self.MOST_PLANS or size > self.PLANS_BYTES

    def attend(self, request: AttentionRequest, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
        """Attention of projected queries, keys and values with the layer's prior.

        Token pruning cannot be combined with mixers or relative positions; `prior.check_together` refuses it.

        Args:
            request: has the layer's `plan`; the decay, if it has none, keys and relative positions are filled in here.
            backend: as in `ops.run_plan`.

        Returns:
            As `ops.run_plan`.
        """
        if request.decay is None and (decay := self.active_decay()) is not None:
            request = request._replace(decay=decay(), training=self.training)
        elif self.training and not request.training:
            request = request._replace(training=True)
        if self.mixer is not None:
            return self._mix(request, backend)
        if self.predictor is None and not len(self.relative_position):
            return run_plan(request, backend)
        return self._attend_with_modules(request, backend)

    def _attend_with_modules(self, request: AttentionRequest, backend: str) -> tuple[Tensor, Tensor | None]:
        """`attend` with what a predictor chooses, and what relative positions add."""
        bias = request.bias
        relative: list[RelativePosition] = list(self.relative_position.values())  # type: ignore[arg-type]
        for position in relative:
            logits = position(request)
            bias = logits if bias is None else add_bias(logits, bias)
        on_values = [position for position in relative if position.uses_weights]
        filled = request._replace(bias=bias, need_weights=request.need_weights or bool(on_values))
        if self.predictor is not None:
            top_k = self.predictor.top_k(whole_number(request.q.shape[2]))
            key_ids = self.predictor(request) if top_k is None else None
            filled = filled._replace(key_ids=key_ids, top_k=top_k, renormalise=self.predictor.renormalise)
        out, weights = run_plan(filled, backend)
        for position in on_values:
            assert weights is not None
            out = out + position.value_term(weights, request.plan)
        return out, weights if request.need_weights else None

    def _mix(self, request: AttentionRequest, backend: str) -> tuple[Tensor, Tensor | None]:
        """The mixer's output and weights. A mixer has a single implementation."""
        assert self.mixer is not None
        source, forced = forced_backend(backend)
        if forced not in ("auto", "reference"):
            raise ValueError(
                f"{source}={forced!r} cannot run mixer {self.mixer.name!r}, which has a single implementation"
            )
        if request.bias is not None:
            raise ValueError(f"mixer {self.mixer.name!r} has no logits of pairs to which a bias could be added")
        return self.mixer(request)


class Biases(NamedTuple):
    """Which projections of an attention layer have a bias: of queries, keys and values, and of the output."""

    q: bool = True
    k: bool = True
    v: bool = True
    o: bool = True


ALL_BIASES = Biases()


class SparsePriorAttention(PriorAttention):
    """Multi-head self-attention with a prior.

    Args:
        hidden_size: width of the tokens, a multiple of `num_heads`.
        num_heads: H.
        prior: resolved prior (`resolve_prior`).
        layer_idx: layer number from 0; decides which head has which support.
        biases: which projections have one.
        attention_dropout: dropout probability of the attention weights in training.
        sizes: of the layer, if heads or widths were pruned; else they follow from width and heads.
    """

    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), ((HEADS, HEAD_WIDTH), (WIDTH,))),
        **dict.fromkeys(("q_proj.bias", "k_proj.bias", "v_proj.bias"), ((HEADS, HEAD_WIDTH),)),
        "o_proj.weight": ((WIDTH,), (HEADS, HEAD_WIDTH)),
        "o_proj.bias": ((WIDTH,),),
    }

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        prior: ResolvedPrior,
        layer_idx: int = 0,
        biases: Biases = ALL_BIASES,
        attention_dropout: float = 0.0,
        sizes: LayerSizes | None = None,
    ) -> None:
        nn.Module.__init__(self)
        sizes = whole_layer(hidden_size, num_heads, 0) if sizes is None else sizes
        self.key_dim = sizes.head_width
        self.head_dim = self.key_dim if sizes.value_width is None else sizes.value_width
        # None is the backends' own, the root of the width of a head.
        self.logit_scale = None if sizes.scale_width == sizes.head_width else sizes.scale_width**-0.5
        if prior["mixer"] != "softmax":  # which chooses it
            self.key_dim = MIXERS[prior["mixer"]["name"]].key_width(prior["mixer"], self.head_dim)
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, len(sizes.heads) * self.key_dim, bias=biases.q)
        self.k_proj = nn.Linear(hidden_size, len(sizes.heads) * self.key_dim, bias=biases.k)
        self.v_proj = nn.Linear(hidden_size, len(sizes.heads) * self.head_dim, bias=biases.v)
        self.o_proj = nn.Linear(len(sizes.heads) * self.head_dim, hidden_size, bias=biases.o)
        # Last, so that random weights are drawn in the order in which published seeds drew them.
        width = self.key_dim if prior["mixer"] == "softmax" else self.head_dim
        self._set_prior(num_heads, prior, layer_idx, width, sizes.heads)

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, ...] | Packing,
        num_prefix_tokens: int = 0,
        options: CallOptions = DEFAULT_OPTIONS,
        **others: Any,
    ) -> tuple[Any, ...]:
        """Self-attention.

        Args:
            hidden_states: (B, T, hidden_size), prefix tokens first, then the patches; (1, total, hidden_size) of the
                images of a `Packing`.
            grid: (height, width) of the patches, or (frames, height, width) of those of a clip, frame after frame; or
                the packing of images of several sizes.
            num_prefix_tokens: number of tokens before the patches.
            options: what is asked for. others: fields of `CallOptions` in place of it.

        Returns:
            As `hidden_states`, and the weights or None: (B, H, T, T), or (B, H, weight_rows, T) with `weight_rows`. Of
            a packing they are a list, one for each grid. With `mean_keys`, of images of one size, also (B, T, D), the
            mean of the keys over the heads.
        """
        if others:
            options = CallOptions(**others)
        rows, keys = hidden_states.shape[:-1], (self.num_heads, self.key_dim)
        q = self.q_proj(hidden_states).reshape(*rows, *keys)
        k = self.k_proj(hidden_states).reshape(*rows, *keys)
        v = self.v_proj(hidden_states).reshape(*rows, self.num_heads, self.head_dim)
        rotations = options.rotations
        if not isinstance(grid, Packing):
            if rotations is not None:
                q, k = rotate(q, rotations[0]), rotate(k, rotations[0])
            out, weights = self._attend_heads(q, k, v, grid, num_prefix_tokens, options)
            return (self.o_proj(out), weights, k.mean(2)) if options.mean_keys else (self.o_proj(out), weights)
        outs, of_grids = [], []
        parts = zip(*(grid.parts(tokens, num_prefix_tokens) for tokens in (q, k, v)), grid.grids, strict=True)
        for number, (q, k, v, sides) in enumerate(parts):
            if rotations is not None:
                q, k = rotate(q, rotations[number]), rotate(k, rotations[number])
            out, weights = self._attend_heads(q, k, v, sides, num_prefix_tokens, options)
            outs.append(out)
            of_grids.append(weights)
        return self.o_proj(joined(outs)), of_grids

    def _attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, ...], num_prefix_tokens: int, options: CallOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs of the heads side by side, (B, T, H * D), and weights, of q, k, v (B, T, H, D) of one grid."""
        decay, training = self.active_decay(), self.training
        request = AttentionRequest(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            self._plan(decay, grid, num_prefix_tokens, False, options.layout, self.draw_of(options)),
            None if decay is None else decay(),  # not by `attend`, which copies: Python takes half of small calls
            scale=self.logit_scale,
            dropout_p=self.attention_dropout if training else 0.0,
            bias=options.bias,
            token_ids=options.token_ids,
            keep_mask=options.keep_mask,
            need_weights=options.output_attentions,
            weight_rows=options.weight_rows,
            training=training,
        )
        out, weights = self.attend(request, options.backend)
        return out.transpose(1, 2).flatten(2), weights
