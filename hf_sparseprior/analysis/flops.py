"""FLOPs of attention and of whole models, in closed form, for one image.

Counted are stem and patch projection, linear layers, Q K^T and (softmax) V over the attended pairs, and softmax if the
convention says so. Never counted are biases, norms, activations, residuals and the interpolation of positions. A
support costs 2 nnz d_h multiply-adds a layer, where nnz is the number of attended pairs of all heads.
`mask_fill="zero"` adds sums of V, which are no multiply-adds. What a predictor or mixer computes in addition to the
pairs is "chooser". If tokens are dropped or merged, "pruning" has the linear layers that decide which, the class
token's logits, which are computed once more, or the similarities of tokens.

`analysis.flops_swin` counts models with windows, `analysis.flops_convit` those with gated positional attention,
`analysis.flops_iformer` those with convolutional stages, `analysis.flops_timesformer` those of clips.

Symbols: N patch tokens, P prefix tokens, T = P + N, L layers, h heads, d width, d_h width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.costs import AttentionCosts
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.layer_sizes import LayerSizes
from hf_sparseprior.base.resolved import ResolvedDecay, ResolvedPrior
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import LayerKey, LayerPattern, layer_pattern
from hf_sparseprior.priors.layer_priors import PriorRun, prior_runs, resolve_stages
from hf_sparseprior.priors.prior import PriorSpec, Stage, predictor_or_mixer, prior_name, pruning_of


@dataclass(frozen=True)
class Convention:
    """How many FLOPs a multiply-add counts, and softmax for each attended pair."""

    multiply_add: int
    softmax: int
    text: str


CONVENTIONS = {
    "multiply_adds": Convention(1, 0, "a multiply-add is 1 FLOP, softmax is not counted (as in the papers)"),
    "torch": Convention(2, 0, "a multiply-add is 2 FLOPs, softmax is not counted (as in torch.utils.flop_counter)"),
    "torch_and_softmax": Convention(
        2, 5, "a multiply-add is 2 FLOPs, softmax 5 a pair (maximum, subtraction, exponential, sum, division)"
    ),
}


def convention_of(name: str) -> Convention:
    """A convention by its name; ValueError for another name."""
    if name not in CONVENTIONS:
        raise ValueError(f"convention={name!r} must be one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_parts(
    pairs: int, head_dim: int, convention: str = "multiply_adds", value_dim: int | None = None
) -> dict[str, int]:
    """FLOPs of Q K^T, softmax and (softmax) V over attended pairs, without the projections.

    Args:
        pairs: those of all heads.
        head_dim: d_h.
        convention: one of CONVENTIONS.
        value_dim: width of a head's values; None: d_h.
    """
    rule = convention_of(convention)
    products = rule.multiply_add * pairs
    value_dim = head_dim if value_dim is None else value_dim
    return {"qk": products * head_dim, "softmax": rule.softmax * pairs, "av": products * value_dim}


def attention_flops(
    pattern: LayerPattern,
    num_prefix_tokens: int,
    head_dim: int,
    num_layers: int = 1,
    convention: str = "multiply_adds",
) -> int:
    """FLOPs of Q K^T, softmax and (softmax) V in `num_layers` layers that have this pattern.

    Args:
        pattern: which pairs there are.
        num_prefix_tokens: P.
        head_dim: d_h.
        num_layers: L.
        convention: one of CONVENTIONS.
    """
    kept = pattern.attended_pairs(num_prefix_tokens)
    return num_layers * sum(attention_parts(kept, head_dim, convention).values())


def dense_attention_flops(
    num_heads: int, total: int, head_dim: int, num_layers: int = 1, convention: str = "multiply_adds"
) -> int:
    """The same of dense attention over `total` tokens, prefix included."""
    return num_layers * sum(attention_parts(num_heads * total**2, head_dim, convention).values())


# ---- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model for one image, or for one clip.

    image_size, grid: (height, width) in pixels and in patches.
    tokens: in words, which tokens the layers count. num_prefix_tokens: P of the last layer.
    attended_pairs: those of all heads, for each layer. patch_embedding (stem and projection), classifier (of class and
    patch tokens): FLOPs.
    layers: for each layer the FLOPs of "projections" (Q, K, V, output), "qk", "softmax", "av", "mlp" (with extras in
    it) and, if they exist, "chooser", "pruning", "positions" (relative, and of gated positional attention), "temporal"
    (all of a divided layer over time) and "merging" (of patches, after the layer).
    decay: operations of VIOLIN's mask M in all layers: "build" once a step for the whole batch, "apply" for each image.
    None of them is a multiply-add of a matrix product, so `total` does not include them.
    convolutions: FLOPs of what comes between embedding and classifier besides the layers, in networks that have both.
    frames: of the clip.
    """

    image_size: tuple[int, int]
    grid: tuple[int, int]
    tokens: str
    num_prefix_tokens: int
    convention: str
    attended_pairs: list[int]
    patch_embedding: int
    layers: list[dict[str, int]]
    classifier: int
    decay: dict[str, int] | None = None
    convolutions: int = 0
    frames: int = 1

    def part(self, *names: str) -> int:
        """FLOPs of these parts in all layers."""
        return sum(layer.get(name, 0) for layer in self.layers for name in names)

    @property
    def num_tokens(self) -> int:
        """Patch tokens N, of all frames."""
        return self.frames * self.grid[0] * self.grid[1]

    @property
    def attention(self) -> int:
        """Q K^T, positions, softmax, (softmax) V and "chooser" of all layers, without the projections."""
        return self.part("qk", "positions", "softmax", "av", "chooser")

    @property
    def total(self) -> int:
        """Everything but `decay`."""
        layers = sum(sum(layer.values()) for layer in self.layers)
        return self.patch_embedding + self.convolutions + layers + self.classifier

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the sums included."""
        return {**asdict(self), "num_tokens": self.num_tokens, "attention": self.attention, "total": self.total}


def model_flops(
    config: Any,
    image_size: int | Sequence[int] | None = None,
    prior: PriorSpec | None = None,
    convention: str = "multiply_adds",
    num_prefix_tokens: int | None = None,
) -> ModelFlops:
    """FLOPs of a model of any family for one image.

    Args:
        config: the model's config; without labels it is the base model.
        image_size: pixels, one number or (height, width); None: the config's.
        prior: a prior; None: the config's; "dense": the same model without one.
        convention: one of CONVENTIONS.
        num_prefix_tokens: None: the config's; 0 counts the patch tokens only.

    Raises:
        ValueError: for a family whose FLOPs are not counted, an image that the model would not take, an unknown
            convention, a bad prior, or a prior whose FLOPs differ between images: a support or a decay together with
            token pruning.
    """
    if (family := family_of(config)) is None:
        raise ValueError(f"the FLOPs of a {type(config).__name__} are not counted")
    return family.flop_counter()(config, image_size, prior, convention, num_prefix_tokens)


def vit_flops(
    config: SparsePriorViTConfig,
    image_size: int | Sequence[int] | None,
    prior: PriorSpec | None,
    convention: str,
    num_prefix_tokens: int | None,
) -> ModelFlops:
    """`model_flops` of a SparsePriorViT."""
    size, grid = image_grid(config, config.image_size if image_size is None else image_size)
    prefix = config.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
    prefix = check_integer("num_prefix_tokens", prefix, 0)
    width, num_tokens = config.hidden_size, grid[0] * grid[1]
    stages = [Stage(config.num_attention_heads, grid, config.num_hidden_layers)]
    runs = prior_runs(resolve_stages(config.prior if prior is None else prior, stages), stages)
    sizes = layer_tokens(runs, config.num_hidden_layers, num_tokens)
    counted = count_layers(runs, config.layers, sizes, grid, prefix, convention)
    layer = (width, config.num_attention_heads)
    _add_pruning(counted.layers, runs[0].prior, num_tokens, prefix, layer, convention)
    multiply_add = convention_of(convention).multiply_add
    inputs = config.pooled_size
    if config.use_distillation_token and config.use_distillation_classifier:
        inputs += width
    if config.token_classifier:
        inputs += sizes[-1][1] * width
    return ModelFlops(
        image_size=size,
        grid=grid,
        tokens=_tokens_in_words(prefix, num_tokens, sizes),
        num_prefix_tokens=prefix,
        convention=convention,
        attended_pairs=counted.pairs,
        patch_embedding=multiply_add * embedding_products(config, num_tokens),
        layers=counted.layers,
        classifier=multiply_add * inputs * config.num_labels,
        decay=counted.decay,
    )


class CountedLayers(NamedTuple):
    """Attended pairs and FLOPs by part of some layers, and their `decay_operations`, None without a decay."""

    pairs: list[int]
    layers: list[dict[str, int]]
    decay: dict[str, int] | None


def count_layers(
    runs: Sequence[PriorRun],
    layers: Sequence[LayerSizes],
    sizes: Sequence[tuple[int, int]],
    grid: tuple[int, ...],
    prefix: int,
    convention: str,
    first: int = 0,
) -> CountedLayers:
    """Layers that see all patches, with extras, without what token pruning adds.

    Args:
        runs: these layers, by their priors.
        layers: their sizes.
        sizes: tokens without the prefix in the attention and in the MLP of each layer.
        grid: (height, width) of the patches, or (frames, height, width) of those that attention sees. prefix: P.
        convention: one of CONVENTIONS.
        first: number of the first of these layers in the model.
    """
    pairs: list[int] = []
    parts: list[dict[str, int]] = []
    decays: dict[str, int] | None = None
    for run in runs:
        of_run = slice(len(pairs), len(pairs) + run.stage.num_layers)
        counted = _count_run(run.prior, layers[of_run], sizes[of_run], grid, prefix, convention, first + of_run.start)
        pairs, parts = pairs + counted.pairs, parts + counted.layers
        if counted.decay is not None:
            decays = {key: value + (decays or {}).get(key, 0) for key, value in counted.decay.items()}
    return CountedLayers(pairs, parts, decays)


def _count_run(
    prior: ResolvedPrior,
    layers: Sequence[LayerSizes],
    sizes: Sequence[tuple[int, int]],
    grid: tuple[int, ...],
    prefix: int,
    convention: str,
    first: int,
) -> CountedLayers:
    """`count_layers` of layers with one prior.

    Args:
        prior: theirs, resolved.
        layers: their sizes.
        sizes: tokens without the prefix in the attention and in the MLP of each layer.
        grid: (height, width) of the patches, or (frames, height, width) of those that attention sees. prefix: P.
        convention: one of CONVENTIONS.
        first: number of the first of these layers in the model.
    """
    rule, patterns = convention_of(convention).multiply_add, layer_patterns(prior, layers, grid, first)
    if (chooser := predictor_or_mixer(prior)) is not None:
        chooser = chooser[1].settings_for(chooser[0], math.prod(grid) + prefix), chooser[1]
    pairs, counted = [], []
    for layer, pattern, (attended, left) in zip(layers, patterns, sizes, strict=True):
        heads = len(layer.heads)
        pairs.append(attended_in_layer(pattern, chooser, attended, prefix, layer.head_width))
        flops = block_flops(
            attended + prefix,
            left + prefix,
            layer.width,
            layer.mlp_width,
            pairs[-1],
            heads,
            convention,
            layer.head_width,
        )
        if chooser is not None:
            settings, kind = chooser
            flops["chooser"] = rule * kind.other_multiply_adds(settings, heads, layer.head_width, attended, prefix)
            flops["projections"] += rule * kind.projection_multiply_adds(
                settings, heads, layer.width, attended + prefix
            )
        add_extras([flops], prior, (heads, layer.attention_width, layer.mlp_width), grid, prefix, convention)
        counted.append(flops)
    decay = prior["decay"]
    return CountedLayers(pairs, counted, None if decay is None else _decay_sums(decay, patterns, prefix))


def layer_patterns(
    prior: ResolvedPrior, layers: Sequence[LayerSizes], grid: tuple[int, ...], first: int = 0
) -> list[LayerPattern]:
    """The pattern of each of some layers, with the heads that the layer has. `first`: number of the first of them."""
    time = prior.get("time", "frame")
    if len(grid) == 3:  # neither the layer nor shuffling changes a count
        pattern = layer_pattern(prior["support"], LayerKey(layers[0].num_supports, grid, time=time))
        return [pattern] * len(layers)
    keys = [
        LayerKey(layer.num_supports, grid, number, time, layer.heads)
        for number, layer in enumerate(layers, start=first)
    ]
    return [layer_pattern(prior["support"], key) for key in keys]


def layer_tokens(runs: Sequence[PriorRun], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
    """Tokens without the prefix in the attention and in the MLP of each layer, for N patches.

    Raises:
        ValueError: for what is not counted: supports and decays on pruned tokens.
    """
    if (pruning := pruning_of(runs[0].prior)) is None:  # the same in all layers
        return [(num_tokens, num_tokens)] * num_layers
    settings, kind = pruning
    sizes = kind.layer_tokens(settings, num_layers, num_tokens)
    whole = all(prior["support"]["name"] == "dense" and prior["decay"] is None for prior, *_ in runs)
    if sizes[-1][0] < num_tokens and not whole:
        raise ValueError(
            f"prior {prior_name([run.prior for run in runs])!r}: which pairs are left among the kept patches differs "
            "between images and is not counted"
        )
    return sizes


def _add_pruning(
    layers: list[dict[str, int]],
    prior: ResolvedPrior,
    num_tokens: int,
    prefix: int,
    sizes: tuple[int, int],
    convention: str,
) -> None:
    """Add to the layers that drop or merge tokens what their choice costs; `sizes` are width and heads."""
    if (pruning := pruning_of(prior)) is None:
        return
    settings, kind = pruning
    rule = convention_of(convention).multiply_add
    for layer, products in kind.choice_multiply_adds(settings, len(layers), *sizes, num_tokens, prefix).items():
        layers[layer]["pruning"] = rule * products


def add_extras(
    layers: list[dict[str, int]],
    prior: ResolvedPrior,
    sizes: tuple[int, int, int],
    grid: tuple[int, ...],
    prefix: int,
    convention: str,
    windows: int = 1,
    image_grid: tuple[int, int] | None = None,
) -> None:
    """Add what extras compute in each layer; token pruning is counted apart.

    Args:
        layers: FLOPs of layers by part; here are added "positions" and "mlp".
        prior: theirs, resolved.
        sizes: heads, width of all heads together, and between the MLP's layers.
        grid: (height, width) of the patches that see each other.
        prefix: P.
        convention: one of CONVENTIONS.
        windows: how many such grids there are in an image.
        image_grid: (height, width) of the patches in the MLP, if the image is divided into windows.

    Raises:
        ValueError: for an extra that does not say what it computes.
    """
    rule, parts = convention_of(convention).multiply_add, {"attention": "positions", "MLP": "mlp"}
    for extra in prior["extras"]:
        kind = EXTRAS[extra["name"]]
        if kind.place == "model":
            continue
        own_grid = image_grid if image_grid is not None and kind.place == "MLP" else grid
        products = kind.multiply_adds(extra, *sizes, own_grid, prefix)
        if products is None:
            raise ValueError(f"prior {prior_name(prior)!r}: the FLOPs of {extra['name']!r} are not counted")
        if kind.place == "attention":
            once = kind.shared_multiply_adds(extra, *sizes, own_grid)
            products = once + windows * (products - once)
        for layer in layers:
            layer[parts[kind.place]] = layer.get(parts[kind.place], 0) + rule * products


def _tokens_in_words(prefix: int, num_tokens: int, sizes: Sequence[tuple[int, int]]) -> str:
    words = f"{prefix} prefix token{'' if prefix == 1 else 's'} and the patches" if prefix else "the patches only"
    counts = [num_tokens, *(attended for attended, _ in sizes)]
    if changes := [(layer, now) for layer, (was, now) in enumerate(pairwise(counts), 1) if was != now]:
        words += "; of these " + ", ".join(f"{now} from layer {layer} on" for layer, now in changes)
    return words


def embedding_products(config: SparsePriorViTConfig, num_tokens: int) -> int:
    """Multiply-adds of stem and patch projection."""
    height, width = as_pair(config.patch_size)
    if config.stem == "patch":
        return num_tokens * config.num_channels * height * width * config.hidden_size
    channels, pixels = config.stem_channels, num_tokens * height * width // 4
    convolutions = pixels * channels * (config.num_channels * 7**2 + 2 * channels * 3**2)
    return convolutions + pixels * channels * config.hidden_size


def attended_in_layer(
    pattern: LayerPattern,
    chooser: tuple[Mapping[str, Any], type[AttentionCosts]] | None,
    num_tokens: int,
    num_prefix_tokens: int,
    head_dim: int,
) -> int:
    """Pairs of all heads of a layer. For a predictor or mixer: the number of pairs that costs as much.

    Args:
        pattern: of the layer's support.
        chooser: what `predictor_or_mixer` found in its prior.
        num_tokens, num_prefix_tokens: N and P.
        head_dim: d_h.
    """
    heads = len(pattern.offsets)
    if chooser is not None:
        settings, kind = chooser
        return heads * kind.cost_in_pairs(settings, head_dim, num_tokens, num_prefix_tokens)
    if pattern.support == "dense":
        return heads * (num_tokens + num_prefix_tokens) ** 2
    return pattern.attended_pairs(num_prefix_tokens)


def _decay_sums(decay: ResolvedDecay, patterns: Sequence[LayerPattern], prefix: int) -> dict[str, int]:
    """`decay_operations` of layers with these patterns."""
    sums = {"build": 0, "apply": 0}
    for pattern in patterns:
        for key, value in decay_operations(decay, pattern, prefix).items():
            sums[key] += value
    return sums


def decay_operations(decay: ResolvedDecay, pattern: LayerPattern, num_prefix_tokens: int) -> dict[str, int]:
    """Elementary operations of a decay in a layer, each counted as one.

    "build" is M at the attended pairs of patches, once a step. It takes for each head, pair and curve a multiplication
    of distance and log gamma, an exponential, and an addition or the division of the mean. "apply" is for each image:
    the logits of those pairs are multiplied by M (those of the prefix too if its gamma is learned), and every logit by
    alpha (VIOLIN Eq. 12).
    """
    num_tokens, places, frames = pattern.key.num_tokens, pattern.num_tokens, pattern.frames
    prefix_pairs = len(pattern.offsets) * ((num_tokens + num_prefix_tokens) ** 2 - num_tokens**2)
    # Not `attended_pairs`: if a patch has no partner but itself, M is 1 and is not computed.
    weighed = sum(places if offset == 0 else 2 * (places - offset) for offsets in pattern.offsets for offset in offsets)
    weighed = frames**2 * (weighed + sum(map(len, pattern.pairs or ())))
    curves = DECAYS[decay["name"]].positions(decay, (1, 1)).shape[0]
    apply = weighed + prefix_pairs * decay["learn_prefix"]
    if decay["learn_alpha"]:
        apply += pattern.attended_pairs(num_prefix_tokens)
    return {"build": 3 * curves * weighed, "apply": apply}


def block_flops(
    total: int,
    mlp_total: int,
    width: int,
    hidden: int,
    pairs: int,
    heads: int,
    convention: str,
    head_dim: int | None = None,
) -> dict[str, int]:
    """FLOPs of a transformer block with `total` tokens in attention and `mlp_total` in the MLP.

    `head_dim`: None for width // heads.
    """
    multiply_add = convention_of(convention).multiply_add
    head_dim = width // heads if head_dim is None else head_dim
    return {
        "projections": multiply_add * 4 * total * width * heads * head_dim,
        **attention_parts(pairs, head_dim, convention),
        "mlp": multiply_add * 2 * mlp_total * width * hidden,
    }


def image_sides(image_size: Any) -> tuple[int, int]:
    """(height, width) of one number or a pair; ValueError for anything else."""
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2:
        raise ValueError(f"image_size={image_size!r} must be one number or (height, width)")
    return check_integer("image_size", sides[0], 1), check_integer("image_size", sides[1], 1)


def image_grid(config: Any, image_size: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of an image in pixels and in patches.

    Raises:
        ValueError: unless the sides are multiples of the patch.
    """
    height, width = image_sides(image_size)
    patch = as_pair(config.patch_size)
    if height % patch[0] or width % patch[1]:
        raise ValueError(f"image_size={height}x{width} must be a multiple of the {patch[0]}x{patch[1]} patch")
    return (height, width), (height // patch[0], width // patch[1])
