"""What the configurations of every family share: the prior of each stage, presets, limits and checks."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin

from hf_sparseprior.base.checks import check_boolean, check_integer, check_within, did_you_mean, is_number
from hf_sparseprior.base.config_keys import CheckedFields
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.layer_sizes import LayerSizes, check_compressed, compressed_layers, whole_layer
from hf_sparseprior.base.limits import check_limit
from hf_sparseprior.base.numbered import with_text_keys
from hf_sparseprior.base.resolved import ResolvedPrior, each_prior
from hf_sparseprior.models.feature_maps import FeatureMap
from hf_sparseprior.patterns.supports import LayerKey, support_notes
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer_priors import PriorRun, StagePrior, prior_runs, resolve_stages
from hf_sparseprior.priors.prior import PriorSpec, Stage, prior_name, prior_pruning_ratio
from hf_sparseprior.saving.code import write_code

logger = logging.getLogger("hf_sparseprior.config")
OWNED = "_owned"  # the attribute of a config from which a model has been made: the config's id
IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


class BaseConfig(CheckedFields, BackboneConfigMixin, PretrainedConfig):
    """Configuration of a vision transformer with a prior.

    A family declares its fields, among them `prior`, `image_size`, `num_channels`, `hidden_act`, `image_mean`,
    `image_std` and those of `pairs`, `shares` and `numbers`, has a `patch_size`, and has the properties that raise
    NotImplementedError here.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # The fields that decide how many tokens and weights a model has.
    token_fields: ClassVar[tuple[str, ...]] = ("image_size", "patch_size")
    weight_fields: ClassVar[tuple[str, ...]] = ("image_size", "patch_size", "num_labels")
    # Fields that change what the same weights compute.
    read_alike: ClassVar[tuple[str, ...]] = ("hidden_act", "layer_norm_eps")
    # Fields that are one number or (height, width), that are from 0 to 1, and that are 0 or more.
    pairs: ClassVar[tuple[str, ...]] = ("image_size", "patch_size")
    shares: ClassVar[tuple[str, ...]] = ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob")
    numbers: ClassVar[tuple[str, ...]] = ("layer_norm_eps", "initializer_range")
    # Fields that are True or False, and those whose value is one of a few words.
    switches: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[dict[str, tuple[str, ...]]] = {}
    # Whether models can be built from which heads and widths were pruned.
    can_be_compressed: ClassVar[bool] = False

    prior: Any = "dense"
    # What pruning left of each layer, in the full form of `layer_sizes.check_compressed`; None: everything. A prior
    # still has a support for each of the heads that there were, and those that are left keep theirs.
    compressed: Any = None

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

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "prior":  # transformers writes what it is given as JSON, before it is checked
            value = with_text_keys(value)
        # A copy has another id, and may have another prior.
        if key == "prior" and self.__dict__.get(OWNED) == id(self) and value != self.prior:
            raise ValueError(
                f"config.prior={value!r:.80} cannot be set: a model with the prior {self.prior_name!r} was made from "
                "this config, and its layers stay as they are; change a copy.deepcopy of the config and make another "
                "model, or load it by from_pretrained(..., prior=...)"
            )
        super().__setattr__(key, value)

    def own(self) -> None:
        """Note that a model has been made from this config: its prior can no longer be changed."""
        self.__dict__[OWNED] = id(self)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have. They may come to lie where the config was that was noted, with its id."""
        return {name: value for name, value in vars(self).items() if name != OWNED}

    def _remove_keys_not_serialized(self, d: dict[str, Any]) -> None:
        super()._remove_keys_not_serialized(d)
        d.pop(OWNED, None)

    @classmethod
    def from_preset(cls, preset: str, prior: Any = None, **overrides: Any) -> Any:
        """Configuration of one of the papers' architectures, e.g. `from_preset("deit_base", "violin")`."""
        if preset not in cls.presets:
            hint = did_you_mean(preset, cls.presets)
            raise ValueError(f"preset={preset!r} must be one of {', '.join(cls.presets)}{hint}")
        return cls(**{**cls.presets[preset], **({} if prior is None else {"prior": prior}), **overrides})

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the code of the family's classes (see `saving.code`)."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self._write_code(save_directory)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        self._write_code(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _write_code(self, folder: str | os.PathLike) -> None:
        """Nothing for the config of a class that is in no family."""
        family = FAMILIES.get(self.model_type)
        if family is not None and isinstance(self, family.config_class):
            write_code(folder, family.modules)

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
        raise NotImplementedError

    @property
    def map_names(self) -> list[str]:
        """Names of the feature maps that a backbone has."""
        raise NotImplementedError

    @property
    def maps(self) -> list[FeatureMap]:
        """What the maps of `map_names` are, before any resampling; here of a family with one grid and one width."""
        stride, prefix = as_pair(self.patch_size), self.num_prefix_tokens
        return [FeatureMap(name, self.hidden_size, stride, prefix) for name in self.map_names]

    @property
    def num_weights(self) -> int:
        """Weights of the matrices and tables of a model with this config, which says whether it is too large.

        Biases, norms and scalars are not counted.
        """
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The architecture in a few words, for model cards."""
        raise NotImplementedError

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class, distillation and register tokens before the patches."""
        return 0

    @property
    def num_tokens(self) -> int:
        """T at the configured image size."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def widths(self) -> list[int]:
        """Width of the tokens in each stage."""
        return [self.hidden_size] * len(self.stages)

    @property
    def mlp_widths(self) -> list[int]:
        """Width between the MLP's layers in each stage, before compression."""
        return [self.intermediate_size] * len(self.stages)

    @property
    def layers(self) -> list[LayerSizes]:
        """Sizes of each layer."""
        whole = self._whole_layers()
        return whole if self.compressed is None else compressed_layers(self.compressed, whole)

    def _whole_layers(self) -> list[LayerSizes]:
        return [
            whole_layer(width, stage.num_heads, hidden)
            for stage, width, hidden in zip(self.stages, self.widths, self.mlp_widths, strict=True)
            for _ in range(stage.num_layers)
        ]

    @property
    def inner_widths(self) -> dict[str, list[int]]:
        """Widths that are neither of the tokens nor in `layers`, by kind (`layer_sizes`), of each place."""
        whole = self._whole_inner_widths()
        return whole if self.compressed is None else {kind: list(self.compressed[kind]) for kind in whole}

    def _whole_inner_widths(self) -> dict[str, list[int]]:
        return {}

    @property
    def stage_widths(self) -> list[int]:
        """Width of the tokens in each stage, of those without attention too."""
        return self.widths

    def with_widths(self, widths: Sequence[int]) -> dict[str, Any]:
        """Fields of a config that has these `stage_widths`."""
        return {"hidden_size": widths[0]}

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`, which the classifier takes."""
        return self.hidden_size

    @property
    def output_grid(self) -> tuple[int, int]:
        """(height, width) of the patches that the last stage puts out, at the configured image size."""
        height, width = self.stages[-1].grid[-2:]
        return height, width

    @property
    def prior_runs(self) -> list[PriorRun]:
        """The runs of neighbouring layers with the same prior in its full form, dense in a stage that takes none.

        `prior` itself is a list only if several stages take one.
        """
        return prior_runs(self.prior, self.stages)

    @property
    def layer_priors(self) -> list[ResolvedPrior]:
        """The full form of the prior of each attention layer, dense in a stage that takes none."""
        return [run.prior for run in self.prior_runs for _ in range(run.stage.num_layers)]

    def prefix_tokens(self, stage: Stage) -> int:
        """Number of prefix tokens in the layers of a stage."""
        return self.num_prefix_tokens if stage.has_prefix else 0

    @property
    def layout(self) -> str:
        """The order in which the patches come from the first layer to the last (`prior.common_order`)."""
        return RASTER

    @property
    def pruning_ratio(self) -> float:
        """Percentage of query-key pairs that the prior leaves out, prefix tokens included (`prior_pruning_ratio`)."""
        kept = total = 0.0
        layers, runs = enumerate(self.layers), self.prior_runs
        for prior, stage, _, _ in runs:
            prefix, run_layers = self.prefix_tokens(stage), list(itertools.islice(layers, stage.num_layers))
            tokens = prefix + math.prod(stage.grid)
            if whole := self.compressed is None:
                run_layers = run_layers[:1]  # as all others
            for number, layer in run_layers:
                heads = None if whole else layer.heads
                key = LayerKey(layer.num_supports, stage.grid, number, prior.get("time", "frame"), heads)
                ratio = prior_pruning_ratio(prior, key, prefix, layer.head_width)
                if whole and len(runs) == 1:
                    return ratio
                pairs = (stage.num_layers if whole else 1) * stage.num_windows * len(layer.heads) * tokens**2
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
        if self.compressed is not None:
            if not self.can_be_compressed:
                raise ValueError(f"compressed={self.compressed!r:.60}: a {self.model_type!r} cannot be compressed")
            self.compressed = check_compressed(self.compressed, self._whole_layers(), self._whole_inner_widths())
        self._check_total("tokens", self.num_tokens, self.token_fields)
        priors = self.resolve_priors(self.prior)
        self.prior = priors[0] if len(priors) == 1 else priors
        self._check_total("weights", self.num_weights, (*self.weight_fields, "prior_name"))
        if self.__dict__.get("stage_names") != self.map_names:  # a new config, or one whose depth was changed
            self.stage_names = self.map_names
            self.set_output_features_output_indices(out_features=None, out_indices=None)

    def resolve_priors(self, prior: Any) -> list[StagePrior]:
        """The full form of a prior for each stage that takes one.

        Raises:
            ValueError: for a bad prior, and for one that has no meaning in this model.
        """
        stages = [stage for stage in self.stages if stage.takes_prior]
        priors = resolve_stages(self.priors_of_stages(prior), stages)
        for resolved in each_prior(priors):
            self.check_prior(resolved)
        return priors

    def priors_of_stages(self, prior: Any) -> PriorSpec | Sequence[Any] | None:
        """What a prior that is given means for each stage, as `resolve_stages` takes it."""
        return prior

    def check_prior(self, prior: ResolvedPrior) -> None:
        """Raise ValueError if the resolved prior of a layer has no meaning in this model."""
        for extra in prior["extras"]:
            EXTRAS[extra["name"]].check_model(extra, self)

    def log_notes(self) -> None:
        """Log clipped windows and heads that have no offset on this grid."""
        for prior, stage, _, _ in self.prior_runs:
            key = LayerKey(stage.num_heads, stage.grid, time=prior.get("time", "frame"))
            for note in support_notes(prior["support"], key, self.prefix_tokens(stage)):
                logger.warning(note)

    def _check_total(self, kind: str, total: int, fields: Sequence[str]) -> None:
        """Raise ValueError if the model would have more tokens or weights in all than the limit."""
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in fields)
        check_limit(kind, total, f"{sizes} give {total} {kind}, which must be")

    def _validate_sizes(self) -> None:
        """Check image and patch. A family checks its own sizes, too."""
        for name in self.pairs:
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

    def _validate_choices(self) -> None:
        """Check the fields that every family has. A family checks its own, too."""
        for name in self.switches:
            setattr(self, name, check_boolean(name, getattr(self, name)))
        for name, allowed in self.modes.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} must be one of {', '.join(ACT2FN)}")
        for name in self.shares:
            check_within(name, getattr(self, name), 0.0, 1.0, "a number in [0, 1]")
        for name in self.numbers:
            check_number(name, getattr(self, name), 0.0, math.inf)
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
    number = is_number(value) and abs(value) <= sys.float_info.max
    if not number or not low <= value < high:
        bounds = "a number" if math.isinf(low) else f"a number in [{low:g}, {high:g})"
        raise ValueError(f"{name}={value!r} must be {bounds}")
