"""Configuration of SparsePriorViT: ViT, DeiT, DeiT-III, DINO and LV-ViT backbones with a prior in their attention."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

from hf_sparseprior.base.layer_sizes import counts
from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.base_config import IMAGENET, BaseConfig, as_pair, check_number
from hf_sparseprior.models.feature_maps import check_map_count, check_map_scales, resampling_weights
from hf_sparseprior.priors.layer_priors import prior_weights
from hf_sparseprior.priors.prior import Stage, common_order, prior_name, pruning_of

Pooling = Literal["class_token", "mean", "class_token_and_mean"]
PositionEmbedding = Literal["learned", "rotary", "none"]
Interpolation = Literal["bicubic", "bilinear"]
Stem = Literal["patch", "convolution"]
# Fields whose value is one of a few words.
MODES: dict[str, tuple[str, ...]] = {
    "pooling": get_args(Pooling),
    "position_embedding": get_args(PositionEmbedding),
    "interpolation": get_args(Interpolation),
    "stem": get_args(Stem),
}

_TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
_HUGE = {"hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120, "num_hidden_layers": 32}
_DEIT3 = {"position_embedding_for_class_token": False, "layerscale_value": 1e-4, **IMAGENET}
# Jiang et al. 2021, "All tokens matter": an MLP three times as wide, skip_lam 2.
_LVVIT = {
    **{"qkv_bias": False, "layer_norm_eps": 1e-5, "stem": "convolution", "residual_scale": 0.5},
    **{"token_classifier": True, **IMAGENET},
}

# Architectures of the papers; every value can be overridden.
PRESETS: dict[str, dict[str, Any]] = {
    "vit_tiny": _TINY,
    "vit_small": _SMALL,
    "vit_base": _BASE,
    "vit_large": _LARGE,
    "deit_tiny": {**_TINY, **IMAGENET},
    "deit_small": {**_SMALL, **IMAGENET},
    "deit_base": {**_BASE, **IMAGENET},
    "deit_base_distilled": {**_BASE, **IMAGENET, "use_distillation_token": True},
    "deit3_small": {**_SMALL, **_DEIT3},
    "deit3_base": {**_BASE, **_DEIT3},
    "deit3_large": {**_LARGE, **_DEIT3},
    "deit3_huge": {**_HUGE, **_DEIT3, "patch_size": 14},
    "dino_small": {**_SMALL, **IMAGENET},
    "dino_base": {**_BASE, **IMAGENET},
    "lvvit_small": {**_SMALL, "intermediate_size": 1152, "num_hidden_layers": 16, **_LVVIT},
}


class SparsePriorViTConfig(BaseConfig):
    r"""
    Configuration of a SparsePriorViT.

    Args:
        prior: name, names joined by +, or the full form with the slots support, decay, predictor, mixer and extras;
            kept in its full form. See `hf_sparseprior.priors.prior`. Priors that differ between layers are
            {"layers": {"0-3": one, "4-11": another}} or {"layers": [one, for, each]}, see `layer_priors`.
        image_size, patch_size: pixels, one number or (height, width); the image is a multiple of the patch.
        num_channels: channels of the input image.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in ViT.
        hidden_act: activation of the MLP.
        qkv_bias, proj_bias, mlp_bias: biases of the attention's and the MLP's linear layers.
        key_bias: False for keys without a bias where qkv_bias is True (DINOv3).
        use_class_token, use_distillation_token (DeiT), num_register_tokens: prefix tokens, in this order.
        use_distillation_classifier: False if the distillation token has no classifier of its own, as in
            transformers' DeiTForImageClassification.
        pooling: "class_token", "mean" (average of the patch tokens after the last norm) or "class_token_and_mean"
            (both concatenated, twice as wide; transformers' Dinov2ForImageClassification).
        position_embedding: "learned" (interpolated for other grids), "rotary" (queries and keys of the patches are
            turned by angles of their place; DINOv3) or "none".
        rotary_base: period of the slowest angles of "rotary".
        rotary_shift, rotary_jitter, rotary_rescale: what changes the places of "rotary" in training, as in
            `hf_sparseprior.attention.rotary`; None for nothing.
        position_embedding_for_class_token: False for DeiT-III, whose class token has no position. Registers never do.
        interpolation: "bicubic" or "bilinear", for grids other than the configured one.
        stem: "patch" (one projection a patch) or "convolution" (LV-ViT: 7x7 at stride 2 and twice 3x3, each with batch
            norm and ReLU, then the projection; the patch size is even).
        stem_channels: channels of the convolutions; "patch" has none.
        residual_scale: factor of both residual branches, LV-ViT's 1 / skip_lam.
        token_classifier: a second classifier, for each patch token (LV-ViT), which `training.token_labels` trains.
        token_logits_weight: in evaluation the logits are the classifier's plus this weight times the largest of the
            patch tokens' logits for each class, as published for LV-ViT; 0 for the classifier's alone.
        layerscale_value: initial value of LayerScale (DeiT-III), None for none.
        drop_path_rate: stochastic depth of the last layer, rising linearly from 0 at the first.
        hidden_dropout_prob, attention_probs_dropout_prob: dropout.
        layer_norm_eps, initializer_range: as in ViT.
        image_mean, image_std: normalisation the model was trained with, one number per channel or for all.
        compressed: what pruning left of each layer (`hf_sparseprior.compression`): lists `heads`, `head_width`,
            `mlp_width` and `scale_width` with an entry for each layer; None: everything. num_attention_heads and
            intermediate_size are then those from before.
        apply_layernorm, reshape_hidden_states, out_features, out_indices: for the backbone, as in Dinov2Backbone.
        map_scales: for the backbone, the sides of each map of out_features as a multiple of the grid's, powers of two:
            [4, 2, 1, 0.5] are strides 4, 8, 16, 32 after patches of 16 pixels. Learned layers bring them there
            (`feature_maps.resampling`). None: all maps are of the grid.
    """

    model_type = "sparseprior_vit"
    can_be_compressed = True
    presets = PRESETS
    modes = MODES
    switches = (
        *("qkv_bias", "key_bias", "proj_bias", "mlp_bias", "use_class_token", "use_distillation_token"),
        *("position_embedding_for_class_token", "token_classifier", "use_distillation_classifier"),
        *("apply_layernorm", "reshape_hidden_states"),
    )
    token_fields: ClassVar[tuple[str, ...]] = ("image_size", "patch_size", "num_register_tokens")
    weight_fields: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_channels", "image_size", "patch_size"),
        *("stem", "stem_channels", "num_labels"),
    )
    read_alike = (*BaseConfig.read_alike, "num_attention_heads", "residual_scale", "position_embedding", "rotary_base")
    keys_to_ignore_at_inference = [
        *("hidden_states", "attentions", "class_logits", "distillation_logits", "token_logits"),
        *("token_ids", "token_mask", "kept", "auxiliary_losses"),
    ]

    prior: Any = "dense"
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    qkv_bias: bool = True
    key_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    use_class_token: bool = True
    use_distillation_token: bool = False
    use_distillation_classifier: bool = True
    num_register_tokens: int = 0
    pooling: Pooling = "class_token"
    position_embedding: PositionEmbedding = "learned"
    position_embedding_for_class_token: bool = True
    rotary_base: float | int = 100.0
    rotary_shift: float | int | None = None
    rotary_jitter: float | int | None = None
    rotary_rescale: float | int | None = None
    interpolation: Interpolation = "bicubic"
    stem: Stem = "patch"
    stem_channels: int = 64
    residual_scale: float | int = 1.0
    token_classifier: bool = False
    token_logits_weight: float | int = 0.5
    layerscale_value: float | int | None = None
    drop_path_rate: float | int = 0.0
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    layer_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    image_mean: Any = 0.5
    image_std: Any = 0.5
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    map_scales: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_map_count(self)

    # ---- derived ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """As in `BaseConfig`; the model moves the patches after the embedding and back at the end.

        A subclass with several stages merges patches between them, which needs raster order.
        """
        return common_order(self.prior) if len(self.stages) == 1 else super().layout

    @property
    def stages(self) -> list[Stage]:
        """Heads and grid of the layers."""
        return [Stage(self.num_attention_heads, self.grid, self.num_hidden_layers)]

    @property
    def map_names(self) -> list[str]:
        """The embedding and the output of each layer."""
        return ["stem"] + [f"stage{n}" for n in range(1, self.num_hidden_layers + 1)]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class, distillation and register tokens before the patches."""
        return int(self.use_class_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def summary(self) -> str:
        """Layers, heads, width, stem, pooling and prefix tokens."""
        tokens = {
            "class token": self.use_class_token,
            "distillation token": self.use_distillation_token,
            f"{self.num_register_tokens} register tokens": self.num_register_tokens,
        }
        prefix = ", ".join(name for name, used in tokens.items() if used) or "none"
        stem = ", convolutional stem" if self.stem == "convolution" else ""
        heads = (
            self.num_attention_heads if self.compressed is None else counts(len(layer.heads) for layer in self.layers)
        )
        return (
            f"{self.num_hidden_layers} layers, {heads} heads, width {self.hidden_size}{stem}, "
            f"{self.pooling} pooling, prefix: {prefix}"
        )

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and tables of a model with this config, which says whether it is too large.

        Biases, norms and scalars are not counted. A family whose layers have others overrides this.
        """
        width, patch = self.hidden_size, as_pair(self.patch_size)
        if self.stem == "convolution":
            stem = self.stem_channels * (49 * self.num_channels + 18 * self.stem_channels)
            projection = self.stem_channels * patch[0] * patch[1] // 4 * width
        else:
            stem, projection = 0, self.num_channels * patch[0] * patch[1] * width
        positions = (self.num_prefix_tokens + self.grid[0] * self.grid[1]) * width
        layers = sum(width * (4 * layer.attention_width + 2 * layer.mlp_width) for layer in self.layers)
        priors = prior_weights(self.prior_runs, self.widths, self.mlp_widths)
        classifiers = 1 + (self.use_distillation_token and self.use_distillation_classifier) + self.token_classifier
        heads = classifiers * self.num_labels * self.pooled_size + resampling_weights(self)
        return stem + projection + positions + layers + priors + heads

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`, which the classifier takes."""
        return self.hidden_size * (2 if self.pooling == "class_token_and_mean" else 1)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _validate_sizes(self) -> None:
        kinds = {
            **{"num_channels": "width", "hidden_size": "width", "intermediate_size": "width", "stem_channels": "width"},
            **{"num_hidden_layers": "layers", "num_attention_heads": "heads"},
        }
        for name, kind in kinds.items():
            setattr(self, name, check_size(name, getattr(self, name), 1, kind))
        self.num_register_tokens = check_size("num_register_tokens", self.num_register_tokens, 0, "tokens")
        if self.hidden_size % self.num_attention_heads and self.compressed is None:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        super()._validate_sizes()
        if self.stem == "convolution" and any(side % 2 for side in as_pair(self.patch_size)):
            raise ValueError(f"patch_size={self.patch_size} must be even with stem='convolution', which has stride 2")

    def _validate_choices(self) -> None:
        super()._validate_choices()
        check_map_scales(self)
        if self.pooling != "mean" and not self.use_class_token:
            raise ValueError(f"pooling={self.pooling!r} needs use_class_token=True; without a class token use 'mean'")
        if self.use_distillation_token and not self.use_class_token:
            raise ValueError("use_distillation_token=True needs use_class_token=True (DeiT has both)")
        if self.use_distillation_token and self.token_classifier:
            raise ValueError("token_classifier=True and use_distillation_token=True exclude each other")
        check_number("residual_scale", self.residual_scale, 0.0, math.inf)
        if not self.residual_scale:
            raise ValueError(f"residual_scale={self.residual_scale!r} must be above 0; the layers would do nothing")
        check_number("token_logits_weight", self.token_logits_weight, 0.0, math.inf)
        self._validate_rotary()
        if self.layerscale_value is not None:
            check_number("layerscale_value", self.layerscale_value, -math.inf, math.inf)

    def _validate_rotary(self) -> None:
        check_number("rotary_base", self.rotary_base, 0.0, math.inf)
        if not self.rotary_base:
            raise ValueError(f"rotary_base={self.rotary_base!r} must be above 0")
        for name, low in (("rotary_shift", 0.0), ("rotary_jitter", 1.0), ("rotary_rescale", 1.0)):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, low, math.inf)
                if self.position_embedding != "rotary":
                    raise ValueError(f"{name}={value!r} needs position_embedding='rotary'")
        if self.position_embedding == "rotary":
            width = self.hidden_size // self.num_attention_heads
            if width % 4:
                raise ValueError(
                    f"hidden_size={self.hidden_size} / num_attention_heads={self.num_attention_heads} is {width}; "
                    "position_embedding='rotary' needs a multiple of 4, two pairs of channels for each axis"
                )
            if self.compressed is not None:
                raise ValueError("compressed must be None with position_embedding='rotary', which pairs channels")

    def check_prior(self, prior: ResolvedPrior) -> None:
        """As in `BaseConfig`; rotary positions need softmax over pairs, and all patches in their places."""
        super().check_prior(prior)
        if self.position_embedding != "rotary":
            return
        if prior["mixer"] != "softmax":
            raise ValueError(
                f"prior: mixer {prior['mixer']['name']!r} has no pairs that position_embedding='rotary' turns"
            )
        if (pruning := pruning_of(prior)) is not None:
            raise ValueError(
                f"prior {prior_name(prior)!r} {pruning[1].verb} tokens, and position_embedding='rotary' needs all of "
                "them in place"
            )


SparsePriorViTConfig.register_for_auto_class()
