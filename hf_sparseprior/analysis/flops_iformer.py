"""FLOPs of a SparsePriorIformer, by the rules of `analysis.flops`.

The convolutional blocks, the convolutions between stages and the position encodings of attention layers are
"convolutions" of the model, not parts of a layer. Batch norms are not counted, nor are gate and sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_sparseprior.analysis.flops import (
    ModelFlops,
    add_extras,
    attended_in_layer,
    attention_parts,
    convention_of,
    decay_operations,
    image_sides,
)
from hf_sparseprior.base.layer_sizes import STEM_WIDTH, VALUE_WIDTH
from hf_sparseprior.models.configuration_sparseprior_iformer import SparsePriorIformerConfig, map_sizes
from hf_sparseprior.patterns.supports import LayerKey, layer_pattern
from hf_sparseprior.priors.layer_priors import PriorRun, prior_runs
from hf_sparseprior.priors.prior import PriorSpec, predictor_or_mixer


def iformer_flops(
    config: SparsePriorIformerConfig,
    image_size: int | Sequence[int] | None,
    prior: PriorSpec | None,
    convention: str,
    num_prefix_tokens: int | None,
) -> ModelFlops:
    """`model_flops` of a SparsePriorIformer.

    Raises:
        ValueError: also for prefix tokens, which an iFormer has none of, and for what the config refuses.
    """
    if num_prefix_tokens:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens!r} must be 0: a SparsePriorIformer has places only")
    size = image_sides(config.image_size if image_size is None else image_size)
    grids = map_sizes(size, len(config.hidden_sizes))
    runs = config.prior_runs if prior is None else prior_runs(config.resolve_priors(prior), config.stages)
    counter = _Counter(config, convention)
    for run in runs:
        counter.add_layers(run, grids[config.attention_stages[run.stage_number]])
    rule = convention_of(convention).multiply_add
    places = [grids[stage][0] * grids[stage][1] for stage in config.attention_stages]
    classifiers = 1 + config.use_distillation_classifier
    return ModelFlops(
        image_size=size,
        grid=grids[0],
        tokens=f"the places only, {', '.join(map(str, places))} in the stages with attention",
        num_prefix_tokens=0,
        convention=convention,
        attended_pairs=counter.pairs,
        patch_embedding=rule * _stem_products(config, size),
        layers=counter.layers,
        classifier=rule * classifiers * config.hidden_size * config.num_labels,
        decay=counter.decay or None,
        convolutions=rule * _convolution_products(config, grids),
    )


def _stem_products(config: SparsePriorIformerConfig, size: tuple[int, int]) -> int:
    """Multiply-adds of the stem."""
    area, (reduced, expanded) = config.stem_kernel_size**2, config.inner_widths[STEM_WIDTH]
    half, quarter = ((-(-size[0] // step)) * (-(-size[1] // step)) for step in (2, 4))
    first = half * area * config.num_channels * reduced
    return first + quarter * expanded * (area * reduced + config.hidden_sizes[0])


def _convolution_products(config: SparsePriorIformerConfig, grids: Sequence[tuple[int, int]]) -> int:
    """Multiply-adds of convolutional blocks, of the convolutions between stages, and of position encodings."""
    total = 0
    for stage, (width, grid) in enumerate(zip(config.hidden_sizes, grids, strict=True)):
        products = sum(width * (config.kernel_size**2 + 2 * hidden) for hidden in config.conv_widths(stage))
        products += config.attention_depths[stage] * config.position_kernel_size**2 * width
        if stage:
            products += 3**2 * config.hidden_sizes[stage - 1] * width
        total += grid[0] * grid[1] * products
    return total


class _Counter:
    """What was counted so far: attended pairs and FLOPs of each layer, and the decays' operations."""

    def __init__(self, config: SparsePriorIformerConfig, convention: str) -> None:
        self.config, self.convention = config, convention
        self.pairs: list[int] = []
        self.layers: list[dict[str, int]] = []
        self.decay: dict[str, int] = {}

    def add_layers(self, run: PriorRun, grid: tuple[int, int]) -> None:
        """Count attention layers of a stage of an image.

        Args:
            run: their prior and numbers.
            grid: (height, width) of the stage's map.
        """
        prior = run.prior
        places, rule = grid[0] * grid[1], convention_of(self.convention).multiply_add
        if (chooser := predictor_or_mixer(prior)) is not None:
            chooser = chooser[1].settings_for(chooser[0], places), chooser[1]
        sizes, values = self.config.layers, self.config.inner_widths[VALUE_WIDTH]
        for layer in range(run.first, run.first + run.stage.num_layers):
            width, keys, hidden = sizes[layer].width, sizes[layer].head_width, sizes[layer].mlp_width
            pattern = layer_pattern(prior["support"], LayerKey(1, grid, layer))
            pairs = attended_in_layer(pattern, chooser, places, 0, keys)
            self.pairs.append(pairs)
            parts = attention_parts(pairs, keys, self.convention, values[layer])
            parts["projections"] = rule * places * width * (2 * keys + 3 * values[layer])
            parts["mlp"] = rule * 2 * places * width * hidden
            if chooser is not None:
                parts["chooser"] = rule * chooser[1].other_multiply_adds(chooser[0], 1, keys, places, 0)
            add_extras([parts], prior, (1, keys, hidden), grid, 0, self.convention)
            self.layers.append(parts)
            if prior["decay"] is not None:
                operations = decay_operations(prior["decay"], pattern, 0)
                for key, value in operations.items():
                    self.decay[key] = self.decay.get(key, 0) + value
