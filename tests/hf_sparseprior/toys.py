"""A support in two dimensions, a decay and a family of two stages, each registered in one place."""

from contextlib import contextmanager

import numpy as np
from torch import nn
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput

from hf_sparseprior.analysis.flops import ModelFlops, attention_parts
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.families import Family, ProjectionNames, register_family, unregister_family
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.models.modeling_sparseprior_vit import SparsePriorViTEmbeddings, SparsePriorViTPreTrainedModel
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import DECAYS, Decay, register_decay
from hf_sparseprior.patterns.supports import SUPPORTS, LayerKey, Pattern, layer_pattern, register_support
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.layer_priors import prior_runs, resolve_stages
from hf_sparseprior.priors.prior import Stage

HEADS, WIDTH, GRID = 2, 8, (3, 4)


def near(a, b, grid, radius):
    """Whether two patches lie within a square of each other."""
    return abs(a // grid[1] - b // grid[1]) <= radius and abs(a % grid[1] - b % grid[1]) <= radius


def neighbours(num_heads, grid, *, radius: int = 1):
    """Each patch sees the square of 2 radius + 1 patches around it."""
    check_integer("radius", radius, 0)
    patches = range(grid[0] * grid[1])
    pairs = np.array([(a, b) for a in patches for b in patches if near(a, b, grid, radius)], dtype=np.int64)
    return Pattern([[] for _ in range(num_heads)], lambda layer: [pairs] * num_heads)


def neighbours_check(settings):
    return {"radius": check_integer("radius", settings["radius"], 0)}


def neighbours_notes(support, pattern, grid):
    return [f"radius={support['radius']} reaches beyond the grid"] if support["radius"] >= max(grid) else []


class Ranks(Decay):
    """Distance of two patches = difference of their ranks along the Hilbert curve, a multiple of `step`."""

    SETTINGS = {"step": 1, **Decay.SETTINGS}
    TENSORS = (*Decay.TENSORS, "origin")

    @classmethod
    def check_settings(cls, settings, grid):
        return {**super().check_settings(settings, grid), "step": check_integer("step", settings["step"], 1)}

    @classmethod
    def positions(cls, settings, grid):
        return settings["step"] * curve_rank("hilbert", grid).reshape(1, 1, -1)

    @classmethod
    def tensor_shapes(cls, settings, num_heads):
        return {**super().tensor_shapes(settings, num_heads), "origin": (2, "any")}


class TwoStageConfig(SparsePriorViTConfig):
    """The grid's sides halve after the first stage."""

    model_type = "toy_two_stage"
    presets = {
        "toy_tiny": {
            **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 12},
            **{"image_size": (16, 16), "patch_size": 4, "use_class_token": False, "pooling": "mean"},
        }
    }

    @property
    def stages(self):
        return [Stage(self.num_attention_heads, self.grid), Stage(self.num_attention_heads, self.second_grid)]

    @property
    def second_grid(self):
        return self.grid[0] // 2, self.grid[1] // 2


class TwoStageModel(SparsePriorViTPreTrainedModel):
    """Two attention layers with the mean of 2x2 patches between them."""

    config_class = TwoStageConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = SparsePriorViTEmbeddings(config)
        self.layers = nn.ModuleList(
            SparsePriorAttention(config.hidden_size, config.num_attention_heads, prior, layer_idx=index)
            for index, prior in enumerate(config.layer_priors)
        )
        self.post_init()

    def forward(self, pixel_values):
        _, _, tokens = self.encode(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=tokens.mean(1))

    def encode(self, pixel_values):
        """Tokens after the embedding and after each stage."""
        embedded, grid = self.embeddings(pixel_values)
        first = embedded + self.layers[0](embedded, grid)[0]
        merged = merge(first, grid)
        return embedded, first, merged + self.layers[1](merged, (grid[0] // 2, grid[1] // 2))[0]


class TwoStageForImageClassification(SparsePriorViTPreTrainedModel):
    config_class = TwoStageConfig

    def __init__(self, config):
        super().__init__(config)
        self.vit = TwoStageModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values, labels=None):
        logits = self.classifier(self.vit(pixel_values).pooler_output)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class TwoStageBackbone(BackboneMixin, TwoStageModel):
    """Maps of the embedding ("stem") and of both stages."""

    def __init__(self, config):
        super().__init__(config)
        self.num_features = [config.hidden_size] * 3

    def forward(self, pixel_values, return_dict=True):
        height, width = (side // patch for side, patch in zip(pixel_values.shape[2:], (4, 4), strict=True))
        states = zip(self.stage_names, self.encode(pixel_values), (1, 1, 2), strict=True)
        maps = {name: state.transpose(1, 2).unflatten(2, (height // d, width // d)) for name, state, d in states}
        return BackboneOutput(feature_maps=tuple(maps[name] for name in self.out_features))


def merge(tokens, grid):
    """(B, N, C) to (B, N / 4, C)."""
    maps = tokens.transpose(1, 2).unflatten(2, grid)
    return nn.functional.avg_pool2d(maps, 2).flatten(2).transpose(1, 2)


def count_two_stages(config, image_size, prior, convention, num_prefix_tokens):
    """Q K^T, softmax and (softmax) V of both layers, per part."""
    assert num_prefix_tokens is None
    width, counts = config.hidden_size // config.num_attention_heads, []
    priors = config.prior if prior is None else resolve_stages(prior, config.stages)
    for own, stage, *_ in prior_runs(priors, config.stages):
        pattern = layer_pattern(own["support"], LayerKey(stage.num_heads, stage.grid))
        counts.append(pattern.attended_pairs())
    layers = [attention_parts(pairs, width, convention) for pairs in counts]
    sizes = {"image_size": (16, 16), "grid": config.grid, "tokens": "patches", "num_prefix_tokens": 0}
    return ModelFlops(
        **sizes, convention=convention, attended_pairs=counts, patch_embedding=0, layers=layers, classifier=0
    )


@contextmanager
def registered_support():
    register_support("toy_neighbours", check=neighbours_check, notes=neighbours_notes)(neighbours)
    yield "toy_neighbours"
    del SUPPORTS["toy_neighbours"]


@contextmanager
def registered_decay():
    register_decay("toy_ranks")(Ranks)
    yield "toy_ranks"
    del DECAYS["toy_ranks"]


@contextmanager
def registered_family():
    models = {
        "AutoModel": TwoStageModel,
        "AutoModelForImageClassification": TwoStageForImageClassification,
        "AutoBackbone": TwoStageBackbone,
    }
    names = ProjectionNames(("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), ())
    family = Family(TwoStageConfig, models, "TwoStage", "two stages", flops=count_two_stages, projections=names)
    yield register_family(family)
    unregister_family("toy_two_stage")
