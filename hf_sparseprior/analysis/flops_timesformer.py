"""FLOPs of a SparsePriorTimesformer for one clip, by the rules of `analysis.flops`.

With divided attention, "temporal" of a layer is everything over time: projections, Q K^T, softmax, (softmax) V and the
linear layer after it. Attention with the prior runs in each frame with the prefix tokens, which are then averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_sparseprior.analysis.flops import (
    ModelFlops,
    add_extras,
    attention_parts,
    convention_of,
    count_layers,
    embedding_products,
    image_grid,
)
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.configuration_sparseprior_timesformer import SparsePriorTimesformerConfig
from hf_sparseprior.priors.prior import PriorSpec, resolve_prior


def timesformer_flops(
    config: SparsePriorTimesformerConfig,
    image_size: int | Sequence[int] | None,
    prior: PriorSpec | None,
    convention: str,
    num_prefix_tokens: int | None,
) -> ModelFlops:
    """`model_flops` of a SparsePriorTimesformer, for a clip of the configured number of frames.

    `attended_pairs` and `decay` are those of all frames, but the mask of a decay is built once for a frame where frames
    are seen alone.
    """
    size, grid = image_grid(config, config.image_size if image_size is None else image_size)
    prefix = config.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
    prefix = check_integer("num_prefix_tokens", prefix, 0)
    frames, width, rule = config.num_frames, config.hidden_size, convention_of(convention).multiply_add
    of_frame = grid[0] * grid[1]
    seen: tuple[int, ...] = (frames, *grid) if config.is_joint else grid
    repeats = 1 if config.is_joint else frames
    given = config.prior if prior is None else prior
    resolved = resolve_prior(given, config.num_attention_heads, seen)
    config.check_prior(resolved)
    tokens = of_frame * frames if config.is_joint else of_frame
    in_mlp = [extra for extra in resolved["extras"] if EXTRAS[extra["name"]].place == "MLP"]
    others: ResolvedPrior = {**resolved, "extras": [extra for extra in resolved["extras"] if extra not in in_mlp]}
    counted = count_layers(
        others, config.layers, [(tokens, tokens)] * config.num_hidden_layers, seen, prefix, convention
    )
    # What is in the MLP sees frames one by one, each with the prefix tokens, as space-only attention does.
    copies = frames if in_mlp or config.attention_type == "space_only" else 1
    mlp = rule * 2 * (copies * prefix + frames * of_frame) * width * config.intermediate_size
    of_extras: dict[str, int] = {"mlp": 0}
    sizes = (config.num_attention_heads, width, config.intermediate_size)
    add_extras([of_extras], {**resolved, "extras": in_mlp}, sizes, grid, prefix, convention)
    layers = []
    for layer in counted.layers:
        layers.append(
            {part: repeats * flops for part, flops in layer.items()} | {"mlp": mlp + frames * of_extras["mlp"]}
        )
        if config.is_divided:
            layers[-1]["temporal"] = _temporal(config, of_frame, convention)
    decay = counted.decay
    if decay is not None:
        decay = {**decay, "apply": repeats * decay["apply"]}
    token_kinds = f"{prefix} prefix token{'' if prefix == 1 else 's'} and the patches" if prefix else "the patches only"
    return ModelFlops(
        image_size=size,
        grid=grid,
        tokens=f"{token_kinds} of {frames} frames, {config.attention_type}",
        num_prefix_tokens=prefix,
        convention=convention,
        attended_pairs=[repeats * pairs for pairs in counted.pairs],
        patch_embedding=rule * frames * embedding_products(config, of_frame),
        layers=layers,
        classifier=rule * config.pooled_size * config.num_labels,
        decay=decay,
        frames=frames,
    )


def _temporal(config: SparsePriorTimesformerConfig, num_tokens: int, convention: str) -> int:
    """FLOPs over time of a layer with divided attention: every patch sees itself in all frames."""
    heads, width, frames = config.num_attention_heads, config.hidden_size, config.num_frames
    rule = convention_of(convention).multiply_add
    pairs = heads * num_tokens * frames**2
    linear = rule * 5 * num_tokens * frames * width**2
    return linear + sum(attention_parts(pairs, width // heads, convention).values())
