"""Configuration of SparsePriorConvit: ConViTs with a prior in their plain attention layers."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.layer_sizes import counts
from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.base_config import IMAGENET, BaseConfig, as_pair, check_number
from hf_sparseprior.models.configuration_sparseprior_vit import Interpolation
from hf_sparseprior.models.feature_maps import FeatureMap, check_map_count, check_map_scales, resampling_weights
from hf_sparseprior.priors.layer_priors import prior_weights
from hf_sparseprior.priors.prior import Stage, common_order, pruning_of

Pooling = Literal["class_token", "mean"]
PositionEmbedding = Literal["learned", "none"]

# d'Ascoli et al. 2021: 4, 9 and 16 heads, squares, so that each head starts at one place of a square around its query.
PRESETS: dict[str, dict[str, Any]] = {
    "convit_tiny": {"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768},
    "convit_small": {"hidden_size": 432, "num_attention_heads": 9, "intermediate_size": 1728},
    "convit_base": {"hidden_size": 768, "num_attention_heads": 16, "intermediate_size": 3072},
}


class SparsePriorConvitConfig(BaseConfig):
    r"""
    Configuration of a SparsePriorConvit.

    Args:
        prior: name, names joined by +, or the full form, for the plain layers; kept in its full form. The gated layers
            have positions of their own and take none, as in Fibottention's appendix C.1.
        image_size, patch_size: pixels, one number or (height, width); the image is a multiple of the patch.
        num_channels: channels of the input image.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in ViT.
        num_local_layers: how many of the first layers have gated positional attention, 0 or more and fewer than all;
            "local_up_to_layer" of the original. The class token joins before the layer after them.
        locality_strength: how narrowly a head of a gated layer looks at its place before training; 0 or more.
        hidden_act: activation of the MLP.
        qkv_bias: biases of the projections to queries, keys and values.
        pooling: "class_token" or "mean" (average of the patch tokens after the last norm).
        position_embedding: "learned" (interpolated for other grids) or "none".
        interpolation: "bicubic" or "bilinear", for grids other than the configured one.
        drop_path_rate: stochastic depth of the last layer, rising linearly from 0 at the first.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout.
        layer_norm_eps, initializer_range: as in ViT.
        image_mean, image_std: normalisation the model was trained with, one number per channel or for all.
        apply_layernorm, reshape_hidden_states, out_features, out_indices: for the backbone, as in Dinov2Backbone.
        map_scales: for the backbone, the sides of each map of out_features as a multiple of the grid's, powers of two:
            [4, 2, 1, 0.5] are strides 4, 8, 16, 32 after patches of 16 pixels. Learned layers bring them there
            (`feature_maps.resampling`). None: all maps are of the grid.
        compressed: what pruning left of each layer, as in SparsePriorViTConfig.
    """

    model_type = "sparseprior_convit"
    presets = PRESETS
    can_be_compressed = True
    modes = {
        "pooling": get_args(Pooling),
        "position_embedding": get_args(PositionEmbedding),
        "interpolation": get_args(Interpolation),
    }
    switches = ("qkv_bias", "apply_layernorm", "reshape_hidden_states")
    weight_fields: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_channels", "image_size", "patch_size"),
        "num_labels",
    )
    read_alike = (*BaseConfig.read_alike, "num_attention_heads", "num_local_layers")
    keys_to_ignore_at_inference = ["hidden_states", "attentions"]

    prior: Any = "dense"
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    intermediate_size: int = 3072
    num_local_layers: int = 10
    locality_strength: float | int = 1.0
    hidden_act: str = "gelu"
    qkv_bias: bool = False
    pooling: Pooling = "class_token"
    position_embedding: PositionEmbedding = "learned"
    interpolation: Interpolation = "bicubic"
    drop_path_rate: float | int = 0.0
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    image_mean: Any = IMAGENET["image_mean"]
    image_std: Any = IMAGENET["image_std"]
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    map_scales: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_map_count(self)

    # ---- derived ----------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[Stage]:
        """The gated layers, which have no class token and take no prior, then the plain ones."""
        heads, local = self.num_attention_heads, self.num_local_layers
        gated = [Stage(heads, self.grid, local, has_prefix=False, takes_prior=False)] if local else []
        return [*gated, Stage(heads, self.grid, self.num_hidden_layers - local)]

    @property
    def layout(self) -> str:
        """As in `BaseConfig`, of the plain layers; the gated ones, which take no prior, have raster order."""
        return common_order(self.prior)

    @property
    def map_names(self) -> list[str]:
        """The embedding and the output of each layer."""
        return ["stem"] + [f"stage{n}" for n in range(1, self.num_hidden_layers + 1)]

    @property
    def maps(self) -> list[FeatureMap]:
        """As in `BaseConfig`; the class token is in the plain layers alone."""
        local = self.num_local_layers
        return [map_._replace(prefix=int(number > local)) for number, map_ in enumerate(super().maps)]

    @property
    def num_prefix_tokens(self) -> int:
        """The class token, which only the plain layers have."""
        return 1

    @property
    def summary(self) -> str:
        """Layers, heads, width and pooling."""
        heads = (
            self.num_attention_heads if self.compressed is None else counts(len(layer.heads) for layer in self.layers)
        )
        return (
            f"{self.num_hidden_layers} layers, {self.num_local_layers} of them gated, {heads} heads,"
            f" width {self.hidden_size}, {self.pooling} pooling, prefix: class token in the plain layers"
        )

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and tables, as `BaseConfig` says."""
        width, patch = self.hidden_size, as_pair(self.patch_size)
        total = self.num_channels * patch[0] * patch[1] * width + self.num_tokens * width + self.num_labels * width
        total += sum(width * (4 * layer.attention_width + 2 * layer.mlp_width) for layer in self.layers)
        total += sum(3 * len(layer.heads) for layer in self.layers[: self.num_local_layers])
        return total + resampling_weights(self) + prior_weights(self.prior_runs, self.widths, self.mlp_widths)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check_prior(self, prior: ResolvedPrior) -> None:
        """As `BaseConfig`; token pruning is refused, because the gated layers are for all patches of a grid."""
        if (pruning := pruning_of(prior)) is not None:
            settings, kind = pruning
            raise ValueError(
                f"prior: {settings['name']!r} {kind.verb} tokens, and the gated layers of a ConViT need all patches"
            )
        super().check_prior(prior)

    def _validate_sizes(self) -> None:
        kinds = {
            **{"num_channels": "width", "hidden_size": "width", "intermediate_size": "width"},
            **{"num_hidden_layers": "layers", "num_attention_heads": "heads"},
        }
        for name, kind in kinds.items():
            setattr(self, name, check_size(name, getattr(self, name), 1, kind))
        if self.hidden_size % self.num_attention_heads and self.compressed is None:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        self.num_local_layers = check_integer("num_local_layers", self.num_local_layers, 0)
        if self.num_local_layers >= self.num_hidden_layers:
            raise ValueError(
                f"num_local_layers={self.num_local_layers} must be below num_hidden_layers={self.num_hidden_layers}: "
                "the class token joins before the first plain layer"
            )
        super()._validate_sizes()

    def _validate_choices(self) -> None:
        super()._validate_choices()
        check_map_scales(self)
        check_number("locality_strength", self.locality_strength, 0.0, math.inf)


SparsePriorConvitConfig.register_for_auto_class()
