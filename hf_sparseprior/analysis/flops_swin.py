"""FLOPs of a SparsePriorSwin, by the rules of `analysis.flops`.

Attention runs within windows. Where an image is no multiple of a window it is padded, and the padding is computed like
patches: in the projections and in the pairs, not in the MLP. Shifted windows count like those that are not shifted.
What they leave out beyond the support is masked, not saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hf_sparseprior.analysis.flops import (
    ModelFlops,
    add_extras,
    attended_in_layer,
    block_flops,
    convention_of,
    decay_operations,
    image_sides,
    layer_patterns,
)
from hf_sparseprior.base.layer_sizes import LayerSizes
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.configuration_sparseprior_swin import SparsePriorSwinConfig
from hf_sparseprior.priors.layer_priors import PriorRun, prior_runs
from hf_sparseprior.priors.prior import PriorSpec, predictor_or_mixer


def swin_flops(
    config: SparsePriorSwinConfig,
    image_size: int | Sequence[int] | None,
    prior: PriorSpec | None,
    convention: str,
    num_prefix_tokens: int | None,
) -> ModelFlops:
    """`model_flops` of a SparsePriorSwin.

    The windows are those of the config's image size, whatever the size that is counted, as in the model. The pairs of a
    layer are those of all its windows. Patch merging is "merging" of the last layer of a stage.

    Raises:
        ValueError: also for prefix tokens, which a Swin has none of, and for what the config refuses.
    """
    if num_prefix_tokens:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens!r} must be 0: a SparsePriorSwin has patches only")
    size = image_sides(config.image_size if image_size is None else image_size)
    rule = convention_of(convention).multiply_add
    runs = config.prior_runs if prior is None else prior_runs(config.resolve_priors(prior), config.stages)
    patch = as_pair(config.patch_size)
    first = grid = (math.ceil(size[0] / patch[0]), math.ceil(size[1] / patch[1]))
    counter = _Counter(convention)
    patches = []
    layers = iter(config.layers)
    for number in range(len(config.stages)):
        for run in runs:
            if run.stage_number == number:
                counter.add_layers(run, grid, list(itertools.islice(layers, run.stage.num_layers)))
        patches.append(grid[0] * grid[1])
        if number + 1 < len(config.stages):
            grid = (math.ceil(grid[0] / 2), math.ceil(grid[1] / 2))
            counter.layers[-1]["merging"] = rule * 4 * grid[0] * grid[1] * math.prod(config.widths[number : number + 2])
    return ModelFlops(
        image_size=size,
        grid=first,
        tokens=f"the patches only, {', '.join(map(str, patches))} in the stages{counter.padding}",
        num_prefix_tokens=0,
        convention=convention,
        attended_pairs=counter.pairs,
        patch_embedding=rule * patches[0] * config.num_channels * patch[0] * patch[1] * config.widths[0],
        layers=counter.layers,
        classifier=rule * config.hidden_size * config.num_labels,
        decay=counter.decay or None,
    )


class _Counter:
    """What was counted so far: attended pairs and FLOPs of each layer, and the decays' operations."""

    def __init__(self, convention: str) -> None:
        self.convention = convention
        self.pairs: list[int] = []
        self.layers: list[dict[str, int]] = []
        self.decay: dict[str, int] = {}
        self.padding = ""

    def add_layers(self, run: PriorRun, grid: tuple[int, int], layers: Sequence[LayerSizes]) -> None:
        """Count layers of a stage of an image with this grid, without the patch merging.

        Args:
            run: their prior, heads and window.
            grid: (height, width) of the stage in patches.
            layers: their sizes.
        """
        prior, stage, _, first = run
        window = stage.grid[0] * stage.grid[1]
        windows = math.ceil(grid[0] / stage.grid[0]) * math.ceil(grid[1] / stage.grid[1])
        padded, patches = windows * window, grid[0] * grid[1]
        if padded > patches:
            self.padding = "; projections and pairs of padded windows"
        chooser, rule = predictor_or_mixer(prior), convention_of(self.convention).multiply_add
        patterns = layer_patterns(prior, layers, stage.grid, first)
        for sizes, pattern in zip(layers, patterns, strict=True):
            heads, head_width, hidden = len(sizes.heads), sizes.head_width, sizes.mlp_width
            pairs = windows * attended_in_layer(pattern, chooser, window, 0, head_width)
            self.pairs.append(pairs)
            flops = block_flops(padded, patches, sizes.width, hidden, pairs, heads, self.convention, head_width)
            if chooser is not None:
                settings, kind = chooser
                others = kind.other_multiply_adds(settings, heads, head_width, window, 0)
                flops["chooser"] = rule * windows * others
            if prior["decay"] is not None:
                operations = decay_operations(prior["decay"], pattern, 0)
                # One M serves all windows.
                for key, value in {"build": operations["build"], "apply": windows * operations["apply"]}.items():
                    self.decay[key] = self.decay.get(key, 0) + value
            widths = (heads, sizes.attention_width, hidden)
            add_extras([flops], prior, widths, stage.grid, 0, self.convention, windows, grid)
            self.layers.append(flops)
