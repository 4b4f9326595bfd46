"""The attention layers of a model, ours or a stock transformers one, and what they compute for a batch of images.

Shape letters: B batch, H heads, D head width, N patch tokens, P prefix tokens, T = P + N.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE
from hf_sparseprior.adapters.stock_encoder import find_encoder, num_heads_of
from hf_sparseprior.attention.plan import plan_table
from hf_sparseprior.attention.request import from_layout
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer import PriorAttention, SparsePriorAttention
from hf_sparseprior.priors.prior import prior_name

# Names of the linear layer after the heads, in our models and in transformers'.
PROJECTIONS = ("o_proj", "out_proj")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    number: from 0. prior: what a prior adds to it, None in a layer that takes none and in a stock model without one.
    projection: the linear layer that takes the outputs of all heads, concatenated. grid: (height, width) of the patches
    that see each other.
    """

    number: int
    num_heads: int
    prior: PriorAttention | None
    projection: nn.Module
    grid: tuple[int, ...]


@dataclass(frozen=True)
class AttentionLayers:
    """Every attention layer of a model in order, and where its tokens lie: P prefix tokens, then a grid of patches.

    model: name of the model's class. windows: whether its layers see parts of the image only. layout: the order in
    which the patches come to its layers. has_class_token: whether the first prefix token is one; else, all are
    registers.
    """

    layers: list[AttentionLayer]
    num_prefix_tokens: int
    model: str
    windows: bool = False
    layout: str = RASTER
    has_class_token: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the patches of an image, which every layer sees.

        Raises:
            ValueError: for a model with windows, with grids of several sizes, or whose layers see several frames.
        """
        grids = {layer.grid for layer in self.layers}
        if clip := next((grid for grid in grids if len(grid) == 3), None):
            raise ValueError(
                f"{self.model} cannot be analysed in this way: its layers see {clip[0]} frames of {clip[1]}x{clip[2]} "
                "patches together"
            )
        if self.windows or len(grids) != 1:
            parts = "windows" if self.windows else "grids of their own"
            raise ValueError(f"{self.model} cannot be analysed in this way: its layers have {parts}")
        height, width = grids.pop()
        return height, width

    @property
    def prior_name(self) -> str:
        """Short name of support, decay (an active adapter's too) and extras: "fibottention+violin"; of several priors
        each once. A decay that some layers have counts for all with the same support and extras.
        """
        resolved: dict[str, dict[str, Any]] = {}
        for layer in self.layers:
            if layer.prior is None:
                continue
            others = {**layer.prior.prior, "decay": None}
            merged = resolved.setdefault(json.dumps(others, sort_keys=True), others)
            if merged["decay"] is None and (decay := layer.prior.active_decay()) is not None:
                merged["decay"] = decay.settings
        return prior_name(cast("list[ResolvedPrior]", list(resolved.values()))) or "dense"


def attention_layers(model: nn.Module) -> list[SparsePriorAttention]:
    """The attention layers of a model of our families, in order; [] for a stock model."""
    return [module for module in model.modules() if isinstance(module, SparsePriorAttention)]


def find_attention(model: nn.Module) -> AttentionLayers:
    """The attention layers of a model, which may be inside a peft model.

    Raises:
        ValueError: for a stock model whose tokens are not its patches in raster order (windows, random parts of the
            patches), or whose attention layers are not known.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()
    if modules := attention_layers(base):
        stages = base.config.stages
        grids = [stage.grid for stage in stages for _ in range(stage.num_layers)]
        layers = [
            AttentionLayer(number, module.num_heads, module if module.takes_prior else None, module.o_proj, grid)
            for number, (module, grid) in enumerate(zip(modules, grids, strict=True))
        ]
        windows = any(stage.num_windows > 1 for stage in stages)
        config = base.config
        has_class_token = config.num_prefix_tokens > 0 and getattr(config, "use_class_token", True)
        return AttentionLayers(
            *(layers, config.num_prefix_tokens, type(base).__name__, windows, config.layout, has_class_token)
        )
    encoder = find_encoder(base)
    if encoder.family.windows or encoder.family.shuffled or encoder.family.masked:
        raise ValueError(
            f"{type(base).__name__} cannot be analysed: its attention layers do not see all patches of the grid"
        )
    grid = encoder.attention_grid
    layers = [
        AttentionLayer(number, num_heads_of(module), getattr(module, PRIOR_MODULE, None), _projection(module), grid)
        for number, module in enumerate(encoder.attention.values())
    ]
    return AttentionLayers(
        layers, encoder.num_prefix_tokens, type(base).__name__, has_class_token=encoder.has_class_token
    )


def _projection(attention: nn.Module) -> nn.Module:
    for name in PROJECTIONS:
        if (module := getattr(attention, name, None)) is not None:
            return module
    raise ValueError(f"{type(attention).__name__} has no output projection named {' or '.join(PROJECTIONS)}")


@contextmanager
def watch_heads(layers: AttentionLayers, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block, pass on the heads' outputs of every forward as each layer computes them.

    Args:
        layers: the model's layers.
        see: called with the layer's number and Y (B, H, T, D), the output softmax(...) V of each head before the output
            projection. No attention map is needed for it, so sparse backends run as always. Of a model with windows T
            are the tokens of the whole image, padding included.
    """

    def hook(layer: AttentionLayer, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens = args[0].flatten(1, -2)  # windows come as an image (B, height, width, width of all heads)
        heads = tokens.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        if layers.layout != RASTER and layer.prior is not None:
            heads = from_layout(layer.prior.plan(layer.grid, layers.num_prefix_tokens, layout=layers.layout), heads)
        see(layer.number, heads)

    with ExitStack() as stack:
        for layer in layers.layers:
            stack.callback(layer.projection.register_forward_pre_hook(partial(hook, layer)).remove)
        yield


@torch.no_grad()
def attention_weights(model: nn.Module, pixel_values: Tensor) -> tuple[Tensor, ...]:
    """The weights (B, H, T, T) of every layer.

    Raises:
        ValueError: if the model returns none, as stock models do whose attention forms no weights, or if tokens are
            dropped or join between its layers.
    """
    weights = model(pixel_values=pixel_values, output_attentions=True).attentions
    if not weights or any(each is None for each in weights):
        raise ValueError(
            f"{type(model).__name__} returns no attention weights; load it with attn_implementation='eager'"
        )
    tokens = [each.shape[-1] for each in weights]
    if tokens[-1] > tokens[0]:
        raise ValueError(
            f"{type(model).__name__} cannot be analysed in this way: its class token joins between layers, which have "
            f"{', '.join(map(str, dict.fromkeys(tokens)))} tokens"
        )
    if len(set(tokens)) > 1:
        raise ValueError(
            f"{type(model).__name__} drops or merges tokens, its layers have {', '.join(map(str, tokens))}: the "
            "attention of those that are left is no map over all patches"
        )
    return tuple(weights)


def connectivity(layer: AttentionLayer, weights: Tensor, layers: AttentionLayers) -> Tensor:
    """Which keys each query sees, bool (B, H, T, T).

    With a support, this is the support's mask. Without one, it is the pairs whose weight is not exactly 0. These are
    the pairs of any mask before the softmax, also of a mask that differs between images.

    Args:
        layer: the layer that the weights belong to.
        weights: (B, H, T, T).
        layers: all layers of the model.
    """
    if layer.prior is not None:
        plan = layer.prior.plan(layers.grid, layers.num_prefix_tokens)
        if plan.offsets is not None:
            return plan_table(plan, "mask", weights.device).expand_as(weights)
    return weights != 0
