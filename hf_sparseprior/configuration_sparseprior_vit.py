"""Configuration of SparsePriorViT: ViT, DeiT, DeiT-III, DINO and LV-ViT backbones with a prior in their attention."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin

from .checks import check_boolean, check_integer, check_within
from .config_keys import ExactKeys
from .extras import EXTRAS
from .limits import check_limit, check_size
from .prior import Stage, prior_name, prior_pruning_ratio, prior_weights, resolve_stages
from .resolved import ResolvedPrior
from .supports import support_notes

logger = logging.getLogger("hf_sparseprior.config")

Pooling = Literal["class_token", "mean", "class_token_and_mean"]
PositionEmbedding = Literal["learned", "none"]
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
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
_DEIT3 = {"position_embedding_for_class_token": False, "layerscale_value": 1e-4, **_IMAGENET}
# Jiang et al. 2021, "All tokens matter": an MLP three times as wide, skip_lam 2.
_LVVIT = {
    **{"qkv_bias": False, "layer_norm_eps": 1e-5, "stem": "convolution", "residual_scale": 0.5},
    **{"token_classifier": True, **_IMAGENET},
}

# Architectures of the papers; every value can be overridden.
PRESETS: dict[str, dict[str, Any]] = {
    "vit_tiny": _TINY,
    "vit_small": _SMALL,
    "vit_base": _BASE,
    "vit_large": _LARGE,
    "deit_tiny": {**_TINY, **_IMAGENET},
    "deit_small": {**_SMALL, **_IMAGENET},
    "deit_base": {**_BASE, **_IMAGENET},
    "deit_base_distilled": {**_BASE, **_IMAGENET, "use_distillation_token": True},
    "deit3_small": {**_SMALL, **_DEIT3},
    "deit3_base": {**_BASE, **_DEIT3},
    "deit3_large": {**_LARGE, **_DEIT3},
    "deit3_huge": {**_HUGE, **_DEIT3, "patch_size": 14},
    "dino_small": {**_SMALL, **_IMAGENET},
    "dino_base": {**_BASE, **_IMAGENET},
    "lvvit_small": {**_SMALL, "intermediate_size": 1152, "num_hidden_layers": 16, **_LVVIT},
}


class SparsePriorViTConfig(ExactKeys, BackboneConfigMixin, PretrainedConfig):
    r"""
    Configuration of a SparsePriorViT.

    Args:
        prior: name, names joined by +, or the full form with the slots support, decay, predictor, mixer and extras;
            kept in its full form. See `hf_sparseprior.prior`.
        image_size, patch_size: pixels, one number or (height, width); the image is a multiple of the patch.
        num_channels: channels of the input image.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: as in ViT.
        hidden_act: activation of the MLP.
        qkv_bias, proj_bias, mlp_bias: biases of the attention's and the MLP's linear layers.
        use_class_token, use_distillation_token (DeiT), num_register_tokens: prefix tokens, in this order.
        use_distillation_classifier: False if the distillation token has no classifier of its own, as in
            transformers' DeiTForImageClassification.
        pooling: "class_token", "mean" (average of the patch tokens after the last norm) or "class_token_and_mean"
            (both concatenated, twice as wide; transformers' Dinov2ForImageClassification).
        position_embedding: "learned" (interpolated for other grids) or "none".
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
        apply_layernorm, reshape_hidden_states, out_features, out_indices: for the backbone, as in Dinov2Backbone.
    """

    model_type = "sparseprior_vit"
    presets = PRESETS
    # The fields that decide how many tokens and weights a model has.
    token_fields: ClassVar[tuple[str, ...]] = ("image_size", "patch_size", "num_register_tokens")
    weight_fields: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_channels", "image_size", "patch_size"),
        *("stem", "stem_channels", "num_labels"),
    )
    keys_to_ignore_at_inference = [
        *("hidden_states", "attentions", "class_logits", "distillation_logits", "token_logits"),
        *("token_ids", "kept", "auxiliary_losses"),
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
    proj_bias: bool = True
    mlp_bias: bool = True
    use_class_token: bool = True
    use_distillation_token: bool = False
    use_distillation_classifier: bool = True
    num_register_tokens: int = 0
    pooling: Pooling = "class_token"
    position_embedding: PositionEmbedding = "learned"
    position_embedding_for_class_token: bool = True
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

    def __post_init__(
        self, out_features: list[str] | None = None, out_indices: list[int] | None = None, **kwargs: Any
    ) -> None:
        super().__post_init__(**kwargs)
        self.validate()
        self.log_notes()
        for name, given, kind in (("out_features", out_features, str), ("out_indices", out_indices, int)):
            values = given if isinstance(given, (list, tuple)) else [] if given is None else [None]
            if not all(isinstance(value, kind) for value in values):
                raise ValueError(
                    f"{name}={given!r} must be a list of some of {', '.join(self.stage_names)}, or of numbers"
                )
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)

    @classmethod
    def from_preset(cls, preset: str, **overrides: Any) -> SparsePriorViTConfig:
        """Configuration of one of the papers' architectures, e.g. `from_preset("deit_base", prior="violin")`."""
        if preset not in cls.presets:
            raise ValueError(f"preset={preset!r} must be one of {', '.join(cls.presets)}")
        return cls(**{**cls.presets[preset], **overrides})

    @property
    def output_attentions(self) -> bool:
        """Whether models return attention weights. Every backend can, so no attn_implementation excludes it."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    # ---- derived ----------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the patch grid at the configured image size."""
        image, patch = as_pair(self.image_size), as_pair(self.patch_size)
        return image[0] // patch[0], image[1] // patch[1]

    @property
    def stages(self) -> list[Stage]:
        """Heads and grid of the layers, with one entry for each stage of a family whose grid shrinks between stages."""
        return [Stage(self.num_attention_heads, self.grid, self.num_hidden_layers)]

    @property
    def stage_priors(self) -> list[ResolvedPrior]:
        """The full form of the prior of each stage; `prior` itself is a list only if there are several stages."""
        return self.prior if isinstance(self.prior, list) else [self.prior]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class, distillation and register tokens before the patches."""
        return int(self.use_class_token) + int(self.use_distillation_token) + self.num_register_tokens

    @property
    def num_tokens(self) -> int:
        """T at the configured image size."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and tables of a model with this config, which says whether it is too large.

        Biases, norms and scalars are not counted. A family whose layers have others overrides this.
        """
        width, hidden, patch = self.hidden_size, self.intermediate_size, as_pair(self.patch_size)
        if self.stem == "convolution":
            stem = self.stem_channels * (49 * self.num_channels + 18 * self.stem_channels)
            projection = self.stem_channels * patch[0] * patch[1] // 4 * width
        else:
            stem, projection = 0, self.num_channels * patch[0] * patch[1] * width
        positions = (self.num_prefix_tokens + self.grid[0] * self.grid[1]) * width
        layers = self.num_hidden_layers * (4 * width**2 + 2 * width * hidden)
        priors = sum(
            prior_weights(prior, stage, width, hidden)
            for prior, stage in zip(self.stage_priors, self.stages, strict=True)
        )
        classifiers = 1 + (self.use_distillation_token and self.use_distillation_classifier) + self.token_classifier
        return stem + projection + positions + layers + priors + classifiers * self.num_labels * self.pooled_size

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`, which the classifier takes."""
        return self.hidden_size * (2 if self.pooling == "class_token_and_mean" else 1)

    @property
    def pruning_ratio(self) -> float:
        """Percentage of query-key pairs that the prior leaves out, prefix tokens included (`prior_pruning_ratio`)."""
        kept = total = 0.0
        for prior, (heads, grid, num_layers) in zip(self.stage_priors, self.stages, strict=True):
            ratio = prior_pruning_ratio(prior, heads, grid, self.num_prefix_tokens, self.hidden_size // heads)
            if len(self.stages) == 1:
                return ratio
            pairs = num_layers * heads * (grid[0] * grid[1] + self.num_prefix_tokens) ** 2
            kept, total = kept + pairs * (1 - ratio / 100), total + pairs
        return 100 * (1 - kept / total)

    @property
    def prior_name(self) -> str:
        """Short name of the prior, e.g. "fibottention+violin"."""
        return prior_name(self.prior)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every field and bring `prior` into its full form.

        Raises:
            ValueError: the message has the field, the value and what is allowed.
        """
        self._validate_sizes()
        self._validate_choices()
        self._check_total("tokens", self.num_tokens, self.token_fields)
        priors = resolve_stages(self.prior, self.stages)
        self.prior = priors[0] if len(priors) == 1 else priors
        for prior in priors:
            for extra in prior["extras"]:
                EXTRAS[extra["name"]].check_model(extra, self)
        self._check_total("weights", self.num_weights, (*self.weight_fields, "prior_name"))
        stage_names = ["stem"] + [f"stage{n}" for n in range(1, self.num_hidden_layers + 1)]
        if self.__dict__.get("stage_names") != stage_names:  # a new config, or one whose depth was changed
            self.stage_names = stage_names
            self.set_output_features_output_indices(out_features=None, out_indices=None)

    def log_notes(self) -> None:
        """Log clipped windows and heads that have no offset on this grid."""
        for prior, stage in zip(self.stage_priors, self.stages, strict=True):
            for note in support_notes(prior["support"], stage.num_heads, stage.grid, self.num_prefix_tokens):
                logger.warning(note)

    def _check_total(self, kind: str, total: int, fields: Sequence[str]) -> None:
        """Raise ValueError if the model would have more tokens or weights in all than the limit."""
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in fields)
        check_limit(kind, total, f"{sizes} give {total} {kind}, which must be")

    def _validate_sizes(self) -> None:
        kinds = {
            **{"num_channels": "width", "hidden_size": "width", "intermediate_size": "width", "stem_channels": "width"},
            **{"num_hidden_layers": "layers", "num_attention_heads": "heads"},
        }
        for name, kind in kinds.items():
            setattr(self, name, check_size(name, getattr(self, name), 1, kind))
        self.num_register_tokens = check_size("num_register_tokens", self.num_register_tokens, 0, "tokens")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                if len(value) != 2:
                    raise ValueError(f"{name}={value!r} must be one number or (height, width)")
                setattr(self, name, [check_integer(name, side, 1) for side in value])
            else:
                setattr(self, name, check_integer(name, value, 1, ", or (height, width)"))
        for image, patch in zip(as_pair(self.image_size), as_pair(self.patch_size), strict=True):
            if image % patch:
                raise ValueError(f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}")
            if self.stem == "convolution" and patch % 2:
                raise ValueError(
                    f"patch_size={self.patch_size} must be even with stem='convolution', which has stride 2"
                )

    def _validate_choices(self) -> None:
        tokens = ("use_class_token", "use_distillation_token", "position_embedding_for_class_token", "token_classifier")
        biases = ("qkv_bias", "proj_bias", "mlp_bias")
        for name in (*biases, *tokens, "use_distillation_classifier", "apply_layernorm", "reshape_hidden_states"):
            setattr(self, name, check_boolean(name, getattr(self, name)))
        for name, allowed in MODES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} must be one of {', '.join(ACT2FN)}")
        if self.pooling != "mean" and not self.use_class_token:
            raise ValueError(f"pooling={self.pooling!r} needs use_class_token=True; without a class token use 'mean'")
        if self.use_distillation_token and not self.use_class_token:
            raise ValueError("use_distillation_token=True needs use_class_token=True (DeiT has both)")
        if self.use_distillation_token and self.token_classifier:
            raise ValueError("token_classifier=True and use_distillation_token=True exclude each other")
        for name in ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"):
            check_within(name, getattr(self, name), 0.0, 1.0, "a number in [0, 1]")
        check_number("layer_norm_eps", self.layer_norm_eps, 0.0, math.inf)
        check_number("initializer_range", self.initializer_range, 0.0, math.inf)
        check_number("residual_scale", self.residual_scale, 0.0, math.inf)
        if not self.residual_scale:
            raise ValueError(f"residual_scale={self.residual_scale!r} must be above 0; the layers would do nothing")
        check_number("token_logits_weight", self.token_logits_weight, 0.0, math.inf)
        if self.layerscale_value is not None:
            check_number("layerscale_value", self.layerscale_value, -math.inf, math.inf)
        for name in ("image_mean", "image_std"):
            value = getattr(self, name)
            value = value.tolist() if isinstance(value, np.ndarray) else value
            channels = list(value) if isinstance(value, Sequence) else [value] * self.num_channels
            if len(channels) != self.num_channels:
                raise ValueError(f"{name}={value!r} must be one number or one for each of {self.num_channels} channels")
            for channel in channels:
                check_number(name, channel, -math.inf, math.inf)
                if name == "image_std" and channel <= 0:
                    raise ValueError(f"image_std={value!r} must be above 0")
            setattr(self, name, [float(channel) for channel in channels])


def as_pair(value: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of one number or a pair."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless `value` is a finite number of at least `low` and below `high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not low <= value < high:
        bounds = "a number" if math.isinf(low) else f"a number in [{low:g}, {high:g})"
        raise ValueError(f"{name}={value!r} must be {bounds}")


SparsePriorViTConfig.register_for_auto_class()
