"""Configuration of SparsePriorIformer: iFormer (Zheng 2025) with a prior in its single-head attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.layer_sizes import CONV_WIDTH, STEM_WIDTH, VALUE_WIDTH, LayerSizes
from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.base_config import IMAGENET, BaseConfig, as_pair
from hf_sparseprior.models.feature_maps import FeatureMap, pyramid
from hf_sparseprior.priors.layer_priors import prior_weights
from hf_sparseprior.priors.prior import Stage
from hf_sparseprior.priors.relative_position import RelativePosition
from hf_sparseprior.priors.token_pruning import TokenReduction

# Zheng 2025 (arXiv 2501.15369), from the published code and, for stochastic depth, its training recipes.
PRESETS: dict[str, dict[str, Any]] = {
    "iformer_tiny": {
        "hidden_sizes": (32, 64, 128, 256),
        "conv_depths": (2, 2, 6, 0),
        "attention_depths": (0, 0, 3, 2),
        "conv_ratio": 3,
        "mlp_ratio": 2,
    },
    "iformer_small": {"hidden_sizes": (32, 64, 176, 320), "attention_depths": (0, 0, 3, 2)},
    "iformer_medium": {},
    "iformer_large": {
        "hidden_sizes": (48, 96, 256, 384),
        "conv_depths": (2, 2, 8, 0),
        "attention_depths": (0, 0, 8, 2),
        "drop_path_rate": 0.1,
    },
}
BLOCKS_OF_A_LAYER = 3  # position encoding, attention and MLP count one each in stochastic depth


class SparsePriorIformerConfig(BaseConfig):
    r"""
    Configuration of a SparsePriorIformer. The defaults are iFormer-M's.

    A stage is a convolution of stride 2 (the first stage has the stem), convolutional blocks, attention layers, and
    convolutional blocks again.

    Args:
        prior: name, names joined by +, or the full form; or a list with one for each stage that has attention. Kept in
            its full form, as a list if there are several such stages.
        image_size: pixels, one number or (height, width). Other sizes can be encoded, too.
        num_channels: channels of the input image.
        hidden_sizes: channels of each stage; the first is even.
        conv_depths, attention_depths, final_conv_depths: of each stage, convolutional blocks, attention layers, and
            convolutional blocks after them. At least one stage has attention.
        key_reduction: of each stage, how many times narrower queries and keys are than values, which are as wide as the
            tokens; 1 without attention.
        conv_ratio, mlp_ratio: width between the two last layers of a convolutional block, and between those of the MLP
            in an attention layer, as a multiple of the tokens'.
        stem_kernel_size, kernel_size, position_kernel_size: sides of the kernels in the stem, the convolutional blocks
            and the position encoding before attention; odd.
        hidden_act: activation of stem, convolutional blocks and MLP.
        layer_scale_init_value: initial factor of each channel of a residual branch; 0: no factors.
        use_distillation_classifier: a second classifier for a teacher's decisions.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0 at the first. Convolutional blocks
            count one, attention layers three.
        attention_probs_dropout_prob: dropout of the attention weights.
        batch_norm_eps, initializer_range: as in iFormer.
        image_mean, image_std: normalisation the model was trained with, one number per channel or for all.
        out_features, out_indices: for the backbone, some of stem, stage1, ...
        compressed: what pruning left, as in SparsePriorViTConfig; head_width is of queries and keys. Also value_width,
            of values and gate in each layer; conv_width, between the two last layers of each convolutional block;
            stem_width, after the stem's two convolutions. Widths of the tokens are in `hidden_sizes`, which need not
            suit stem and `key_reduction` then.
    """

    model_type = "sparseprior_iformer"
    presets = PRESETS
    can_be_compressed = True
    token_fields = ("image_size",)
    weight_fields = (
        *("hidden_sizes", "conv_depths", "attention_depths", "final_conv_depths", "conv_ratio", "mlp_ratio"),
        *("stem_kernel_size", "kernel_size", "num_channels", "num_labels"),
    )
    read_alike = ("hidden_act", "batch_norm_eps")
    pairs = ("image_size",)
    shares = ("drop_path_rate", "attention_probs_dropout_prob")
    numbers = ("layer_scale_init_value", "batch_norm_eps", "initializer_range")
    switches = ("use_distillation_classifier",)
    keys_to_ignore_at_inference = [
        *("hidden_states", "attentions", "reshaped_hidden_states", "class_logits", "distillation_logits"),
    ]

    prior: Any = "dense"
    image_size: int | list[int] | tuple[int, int] = 224
    num_channels: int = 3
    hidden_sizes: list[int] | tuple[int, ...] = (48, 96, 192, 384)
    conv_depths: list[int] | tuple[int, ...] = (2, 2, 9, 0)
    attention_depths: list[int] | tuple[int, ...] = (0, 0, 4, 2)
    final_conv_depths: list[int] | tuple[int, ...] = (0, 0, 1, 0)
    key_reduction: list[int] | tuple[int, ...] = (1, 1, 2, 4)
    conv_ratio: int = 4
    mlp_ratio: int = 3
    stem_kernel_size: int = 5
    kernel_size: int = 7
    position_kernel_size: int = 3
    hidden_act: str = "gelu"
    layer_scale_init_value: float | int = 0.0
    use_distillation_classifier: bool = False
    drop_path_rate: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    batch_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    image_mean: Any = IMAGENET["image_mean"]
    image_std: Any = IMAGENET["image_std"]

    # ---- derived ----------------------------------------------------------------------------------------------------

    @property
    def patch_size(self) -> int:
        """Pixels of the side of a place in the first stage: the stem has two convolutions of stride 2."""
        return 4

    @property
    def num_hidden_layers(self) -> int:
        """Attention layers of all stages."""
        return sum(self.attention_depths)

    @property
    def depths(self) -> list[int]:
        """Blocks of each stage, of convolution and of attention."""
        parts = zip(self.conv_depths, self.attention_depths, self.final_conv_depths, strict=True)
        return [sum(stage) for stage in parts]

    @property
    def hidden_size(self) -> int:
        """Channels of the last stage, which the classifier takes."""
        return self.hidden_sizes[-1]

    @property
    def grids(self) -> list[tuple[int, int]]:
        """(height, width) of each stage's map, at the configured image size."""
        return map_sizes(as_pair(self.image_size), len(self.hidden_sizes))

    @property
    def output_grid(self) -> tuple[int, int]:
        """(height, width) of the last stage's map, at the configured image size."""
        return self.grids[-1]

    @property
    def attention_stages(self) -> list[int]:
        """Numbers from 0 of the stages that have attention."""
        return [stage for stage, depth in enumerate(self.attention_depths) if depth]

    @property
    def stages(self) -> list[Stage]:
        """Heads, grid and layers of each stage that has attention."""
        return [Stage(1, self.grids[stage], self.attention_depths[stage]) for stage in self.attention_stages]

    @property
    def stage_widths(self) -> list[int]:
        """Channels of each stage."""
        return list(self.hidden_sizes)

    def with_widths(self, widths: Sequence[int]) -> dict[str, Any]:
        """As `BaseConfig`."""
        return {"hidden_sizes": list(widths)}

    @property
    def widths(self) -> list[int]:
        """Width of the tokens in each stage that has attention."""
        return [self.hidden_sizes[stage] for stage in self.attention_stages]

    @property
    def mlp_widths(self) -> list[int]:
        """Width between the MLP's layers in each stage that has attention, before compression."""
        return [self.mlp_ratio * width for width in self.widths]

    @property
    def key_widths(self) -> list[int]:
        """Width of queries and keys in each stage that has attention, before compression."""
        return [self.hidden_sizes[stage] // self.key_reduction[stage] for stage in self.attention_stages]

    def _whole_layers(self) -> list[LayerSizes]:
        of_stages = zip(self.stages, self.widths, self.key_widths, self.mlp_widths, strict=True)
        return [
            LayerSizes(width, 1, (0,), keys, keys, hidden)
            for stage, width, keys, hidden in of_stages
            for _ in range(stage.num_layers)
        ]

    def _whole_inner_widths(self) -> dict[str, list[int]]:
        of_stages = zip(self.hidden_sizes, self.conv_depths, self.final_conv_depths, strict=True)
        return {
            VALUE_WIDTH: [layer.width for layer in self._whole_layers()],
            CONV_WIDTH: [self.conv_ratio * width for width, first, last in of_stages for _ in range(first + last)],
            STEM_WIDTH: [max(1, self.hidden_sizes[0] // 2), 2 * self.hidden_sizes[0]],
        }

    def conv_widths(self, stage: int) -> list[int]:
        """Width between the two last layers of each convolutional block of a stage."""
        counts = [a + b for a, b in zip(self.conv_depths, self.final_conv_depths, strict=True)]
        begin = sum(counts[:stage])
        return self.inner_widths[CONV_WIDTH][begin : begin + counts[stage]]

    @property
    def drop_path_rates(self) -> list[list[float]]:
        """Stochastic depth of each stage's blocks in order; of an attention layer those of all its parts."""
        counts = [
            first + BLOCKS_OF_A_LAYER * layers + last
            for first, layers, last in zip(self.conv_depths, self.attention_depths, self.final_conv_depths, strict=True)
        ]
        ends = max(1, sum(counts) - 1)
        begins = [sum(counts[:stage]) for stage in range(len(counts))]
        return [
            [self.drop_path_rate * (begin + block) / ends for block in range(count)]
            for begin, count in zip(begins, counts, strict=True)
        ]

    @property
    def map_names(self) -> list[str]:
        """The stem and the output of each stage."""
        return ["stem", *(f"stage{n}" for n in range(1, len(self.hidden_sizes) + 1))]

    @property
    def maps(self) -> list[FeatureMap]:
        """What the maps of `map_names` are: each stage after the first has half the sides of the one before."""
        return pyramid(self.map_names, self.hidden_sizes, as_pair(self.patch_size))

    @property
    def summary(self) -> str:
        """Blocks, layers and widths of the stages."""
        blocks = [a + b for a, b in zip(self.conv_depths, self.final_conv_depths, strict=True)]
        convolutions, layers, widths = (
            " + ".join(map(str, each)) for each in (blocks, self.attention_depths, self.hidden_sizes)
        )
        return f"{convolutions} convolutional blocks, {layers} layers of single-head attention, widths {widths}"

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and convolutions, as `BaseConfig` says."""
        inner, area = self.inner_widths, self.stem_kernel_size**2
        reduced, expanded = inner[STEM_WIDTH]
        total = area * reduced * (self.num_channels + expanded) + expanded * self.hidden_sizes[0]
        total += self.num_labels * self.hidden_size * (1 + self.use_distillation_classifier)
        total += sum(
            9 * before * after for before, after in zip(self.hidden_sizes, self.hidden_sizes[1:], strict=False)
        )
        for number, width in enumerate(self.hidden_sizes):
            total += sum(width * (self.kernel_size**2 + 2 * hidden) for hidden in self.conv_widths(number))
        for layer, values in zip(self.layers, inner[VALUE_WIDTH], strict=True):
            products = 2 * layer.head_width + 3 * values + 2 * layer.mlp_width
            total += layer.width * (products + self.position_kernel_size**2)
        return total + prior_weights(self.prior_runs, self.key_widths, self.mlp_widths)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check_prior(self, prior: ResolvedPrior) -> None:
        """As `BaseConfig`; also refused is what would need a whole image's tokens in a row, or values as wide as keys:
        token pruning, mixers, and relative positions on values.
        """
        for extra in prior["extras"]:
            kind = EXTRAS[extra["name"]]
            if issubclass(kind, TokenReduction):
                raise ValueError(
                    f"prior: {extra['name']!r} {kind.verb} tokens, and iFormer's convolutions need all of them"
                )
            if issubclass(kind, RelativePosition) and kind.uses_weights:
                raise ValueError(f"prior: {extra['name']!r} is for values as wide as queries; iFormer's are wider")
        if prior["mixer"] != "softmax":
            raise ValueError(f"prior: {prior['mixer']['name']!r} is for values as wide as queries; iFormer's are wider")
        super().check_prior(prior)

    def _validate_sizes(self) -> None:
        self.num_channels = check_size("num_channels", self.num_channels, 1, "width")
        lists = {"conv_depths": 0, "attention_depths": 0, "final_conv_depths": 0, "key_reduction": 1}
        self.hidden_sizes = self._numbers("hidden_sizes", 1, "width")
        for name, minimum in lists.items():
            values = self._numbers(name, minimum, "layers" if minimum == 0 else "width")
            setattr(self, name, values)
            if len(values) != len(self.hidden_sizes):
                raise ValueError(
                    f"hidden_sizes={self.hidden_sizes} and {name}={values} must have a number for each stage"
                )
        self._validate_depths()
        if self.hidden_sizes[0] % 2 and self.compressed is None:
            raise ValueError(f"hidden_sizes={self.hidden_sizes} must begin with an even number, which the stem halves")
        for name in ("conv_ratio", "mlp_ratio"):
            setattr(self, name, check_size(name, getattr(self, name), 1, "width"))
            check_size(f"{name}={getattr(self, name)}: width", getattr(self, name) * max(self.hidden_sizes), 1, "width")
        for name in ("stem_kernel_size", "kernel_size", "position_kernel_size"):
            setattr(self, name, check_size(name, getattr(self, name), 1, "width"))
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name}={getattr(self, name)} must be odd")
        super()._validate_sizes()

    def _numbers(self, name: str, minimum: int, kind: str) -> list[int]:
        """The list of this name, with its numbers checked."""
        values = getattr(self, name)
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"{name}={values!r} must be a list with a number for each stage")
        return [check_size(name, value, minimum, kind) for value in values]

    def _validate_depths(self) -> None:
        """Check that there is attention, and that keys have a width there and nowhere else."""
        depths = (self.conv_depths, self.attention_depths, self.final_conv_depths)
        check_size("conv_depths, attention_depths, final_conv_depths: all layers", sum(map(sum, depths)), 1, "layers")
        if not any(self.attention_depths):
            raise ValueError(f"attention_depths={self.attention_depths} must have at least one layer")
        for width, layers, reduction in zip(self.hidden_sizes, self.attention_depths, self.key_reduction, strict=True):
            if not layers and reduction != 1:
                raise ValueError(f"key_reduction={self.key_reduction} must be 1 in a stage without attention")
            if width % reduction and self.compressed is None:
                raise ValueError(f"key_reduction={self.key_reduction} must divide hidden_sizes={self.hidden_sizes}")


def map_sizes(image: tuple[int, int], num_stages: int) -> list[tuple[int, int]]:
    """(height, width) of each stage's map of an image (height, width) in pixels; every convolution rounds up."""
    return [
        (math.ceil(image[0] / 2 ** (stage + 2)), math.ceil(image[1] / 2 ** (stage + 2))) for stage in range(num_stages)
    ]


SparsePriorIformerConfig.register_for_auto_class()
