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
from hf_sparseprior.base.resolved import ResolvedPrior, each_prior
from hf_sparseprior.models.configuration_sparseprior_timesformer import SparsePriorTimesformerConfig
from hf_sparseprior.priors.layer_priors import prior_runs, resolve_stages
from hf_sparseprior.priors.prior import PriorSpec, Stage


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
    frames, rule = config.num_frames, convention_of(convention).multiply_add
    of_frame = grid[0] * grid[1]
    seen: tuple[int, ...] = (frames, *grid) if config.is_joint else grid
    repeats = 1 if config.is_joint else frames
    stages = [Stage(config.num_attention_heads, seen, config.num_hidden_layers)]
    priors = resolve_stages(config.prior if prior is None else prior, stages)
    for resolved in each_prior(priors):
        config.check_prior(resolved)
    runs = prior_runs(priors, stages)
    tokens = of_frame * frames if config.is_joint else of_frame
    others = [run._replace(prior=_with_extras(run.prior, in_mlp=False)) for run in runs]
    counted = count_layers(
        others, config.layers, [(tokens, tokens)] * config.num_hidden_layers, seen, prefix, convention
    )
    mlps = [_mlp(config, run.prior, grid, prefix, convention) for run in runs for _ in range(run.stage.num_layers)]
    layers = []
    for layer, mlp in zip(counted.layers, mlps, strict=True):
        layers.append({part: repeats * flops for part, flops in layer.items()} | {"mlp": mlp})
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


def _with_extras(prior: ResolvedPrior, in_mlp: bool) -> ResolvedPrior:
    """A prior with those of its extras alone that are in the MLP, or with the others."""
    return {
        **prior,
        "extras": [extra for extra in prior["extras"] if (EXTRAS[extra["name"]].place == "MLP") == in_mlp],
    }


def _mlp(
    config: SparsePriorTimesformerConfig, prior: ResolvedPrior, grid: tuple[int, int], prefix: int, convention: str
) -> int:
    """FLOPs of the MLP of a layer with a prior, for all frames with this grid."""
    frames, width, hidden = config.num_frames, config.hidden_size, config.intermediate_size
    in_mlp = _with_extras(prior, in_mlp=True)
    # What is in the MLP sees frames one by one, each with the prefix tokens, as space-only attention does.
    copies = frames if in_mlp["extras"] or config.attention_type == "space_only" else 1
    of_extras: dict[str, int] = {"mlp": 0}
    add_extras([of_extras], in_mlp, (config.num_attention_heads, width, hidden), grid, prefix, convention)
    linear = 2 * (copies * prefix + frames * grid[0] * grid[1]) * width * hidden
    return convention_of(convention).multiply_add * linear + frames * of_extras["mlp"]


def _temporal(config: SparsePriorTimesformerConfig, num_tokens: int, convention: str) -> int:
    """FLOPs over time of a layer with divided attention: every patch sees itself in all frames."""
    heads, width, frames = config.num_attention_heads, config.hidden_size, config.num_frames
    rule = convention_of(convention).multiply_add
    pairs = heads * num_tokens * frames**2
    linear = rule * 5 * num_tokens * frames * width**2
    return linear + sum(attention_parts(pairs, width // heads, convention).values())
