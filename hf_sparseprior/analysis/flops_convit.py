"""FLOPs of a SparsePriorConvit, by the rules of `analysis.flops`.

Gated layers are counted with their weights written out, as published: the logits of positions are a product of three
numbers with the weights of each head for every pair, the positions have a softmax of their own, and both maps are
joined before they are multiplied with V. Where nobody asks for weights, the model moves V along columns and rows of the
grid instead, N (height + width) d multiply-adds in place of the 3 h N^2 of the logits, and forms no N x N map.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_sparseprior.analysis.flops import (
    ModelFlops,
    block_flops,
    convention_of,
    count_layers,
    image_grid,
)
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.resolved import each_prior
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.configuration_sparseprior_convit import SparsePriorConvitConfig
from hf_sparseprior.priors.layer_priors import prior_runs, resolve_stages
from hf_sparseprior.priors.prior import PriorSpec, Stage


def convit_flops(
    config: SparsePriorConvitConfig,
    image_size: int | Sequence[int] | None,
    prior: PriorSpec | None,
    convention: str,
    num_prefix_tokens: int | None,
) -> ModelFlops:
    """`model_flops` of a SparsePriorConvit. The prior changes only the plain layers.

    The logits of positions, "positions" of a gated layer, are needed once for all images of a batch.
    """
    size, grid = image_grid(config, config.image_size if image_size is None else image_size)
    prefix = config.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
    prefix = check_integer("num_prefix_tokens", prefix, 0)
    heads, width, layers = config.num_attention_heads, config.hidden_size, config.layers
    local, tokens, rule = config.num_local_layers, grid[0] * grid[1], convention_of(convention)
    plain = [Stage(heads, grid, config.num_hidden_layers - local)]
    priors = resolve_stages(config.prior if prior is None else prior, plain)
    for resolved in each_prior(priors):
        config.check_prior(resolved)
    pairs = [len(layer.heads) * tokens**2 for layer in layers[:local]]
    gated = []
    for layer, attended in zip(layers, pairs, strict=False):
        of_heads = len(layer.heads), convention, layer.head_width
        counts = block_flops(tokens, tokens, width, layer.mlp_width, attended, *of_heads)
        gated.append({**counts, "softmax": 2 * counts["softmax"], "positions": rule.multiply_add * 3 * attended})
    sizes = [(tokens, tokens)] * (config.num_hidden_layers - local)
    counted = count_layers(prior_runs(priors, plain), layers[local:], sizes, grid, prefix, convention, first=local)
    joins = f", the class token too from layer {local + 1} on" if prefix else ""
    patch = as_pair(config.patch_size)
    return ModelFlops(
        image_size=size,
        grid=grid,
        tokens=f"the patches{joins or ' only'}",
        num_prefix_tokens=prefix,
        convention=convention,
        attended_pairs=pairs + counted.pairs,
        patch_embedding=rule.multiply_add * tokens * config.num_channels * patch[0] * patch[1] * width,
        layers=gated + counted.layers,
        classifier=rule.multiply_add * width * config.num_labels,
        decay=counted.decay,
    )
