"""Configuration of SparsePriorTimesformer: attention over space and time with a prior."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, get_args

from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.resolved import each_prior
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, check_number
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer_priors import StagePrior, given_priors
from hf_sparseprior.priors.prior import Stage, common_order, parse_prior, pruning_of

AttentionType = Literal["divided_space_time", "joint_space_time", "space_only"]
FrameAverage = Literal["after_norm", "before_norm"]


class SparsePriorTimesformerConfig(SparsePriorViTConfig):
    r"""
    Configuration of a SparsePriorTimesformer: that of a SparsePriorViT, and the number of frames.

    Args:
        attention_type: as in transformers' TimeSformer. "divided_space_time": over time, densely, then within each
            frame with the prior. "joint_space_time": over all patches of a clip together with the prior, whose `time`
            says how it sees the frames (`hf_sparseprior.priors.prior`). "space_only": within each frame with the prior;
            a clip's output is the mean over its frames, whose order makes no difference.
        frame_average: of "space_only", whether the mean over the frames is of tokens after the last norm, or before
            it, as in the authors' code.
        num_frames: number of frames of a clip. Clips of other lengths take each time embedding from the nearest frame.
        time_initializer_range: standard deviation that the time embeddings and the linear layers after temporal
            attention start with. 0, as published, is for weights of an image model, which then computes the same at
            first. From scratch, the order of frames is learned only with more than 0, for example `initializer_range`.
    """

    model_type = "sparseprior_timesformer"
    modes: ClassVar = {
        **SparsePriorViTConfig.modes,
        **{"attention_type": get_args(AttentionType), "frame_average": get_args(FrameAverage)},
    }
    can_be_compressed = False
    token_fields = (*SparsePriorViTConfig.token_fields, "num_frames")
    weight_fields = (*SparsePriorViTConfig.weight_fields, "num_frames")

    attention_type: AttentionType = "divided_space_time"
    frame_average: FrameAverage = "after_norm"
    num_frames: int = 8
    time_initializer_range: float | int = 0.0

    @property
    def is_joint(self) -> bool:
        """Whether attention sees the patches of all frames together."""
        return self.attention_type == "joint_space_time"

    @property
    def is_divided(self) -> bool:
        """Whether layers have a temporal attention of their own."""
        return self.attention_type == "divided_space_time"

    @property
    def stages(self) -> list[Stage]:
        """Heads of the layers and the grid that attention with the prior sees: of a frame, or of the joint clip."""
        grid = (self.num_frames, *self.grid) if self.is_joint else self.grid
        return [Stage(self.num_attention_heads, grid, self.num_hidden_layers)]

    @property
    def layout(self) -> str:
        """As in SparsePriorViT; the patches of a joint clip have one order if the prior sees it as one grid."""
        per_frame = self.is_joint and any(prior.get("time") != "clip" for prior in each_prior(self.prior))
        return RASTER if per_frame else common_order(self.prior)

    @property
    def num_tokens(self) -> int:
        """Tokens of a clip, P + N * F, at the configured image size."""
        return self.num_prefix_tokens + self.num_frames * self.grid[0] * self.grid[1]

    @property
    def num_weights(self) -> int:
        """As in SparsePriorViT, with temporal attention and time embeddings if there are any."""
        width = self.hidden_size
        temporal = 5 * self.num_hidden_layers * width**2 if self.is_divided else 0
        return super().num_weights + temporal + (self.attention_type != "space_only") * self.num_frames * width

    @property
    def summary(self) -> str:
        """As in SparsePriorViT, after the kind of attention."""
        return f"{self.attention_type}, {super().summary}"

    def resolve_priors(self, prior: Any) -> list[StagePrior]:
        """As in SparsePriorViT.

        Raises:
            ValueError: also for a prior that sees time where attention sees each frame alone.
        """
        times = [parse_prior(one)["time"] for one in given_priors(prior)]
        time = next((time for time in times if time not in (None, "frame")), None)
        if time is not None and not self.is_joint:
            raise ValueError(
                f"prior: time={time!r} needs attention_type='joint_space_time'; with {self.attention_type!r} the prior "
                "sees each frame alone"
            )
        return super().resolve_priors(prior)

    def validate(self) -> None:
        """As in SparsePriorViT.

        Raises:
            ValueError: also for a prior that drops or merges tokens and for classifiers that video models do not have.
        """
        self.num_frames = check_size("num_frames", self.num_frames, 1, "tokens")
        super().validate()
        check_number("time_initializer_range", self.time_initializer_range, 0.0, math.inf)
        if self.attention_type == "space_only" and self.time_initializer_range:
            raise ValueError(
                f"time_initializer_range={self.time_initializer_range} is of time embeddings, which "
                "attention_type='space_only' does not have; it must be 0"
            )
        if self.frame_average != "after_norm" and self.attention_type != "space_only":
            raise ValueError(
                f"frame_average={self.frame_average!r} is of attention_type='space_only'; with "
                f"{self.attention_type!r} it must be 'after_norm'"
            )
        if self.position_embedding == "rotary":
            raise ValueError(f"position_embedding='rotary' must be learned or none in a {type(self).__name__}")
        if not self.key_bias:
            raise ValueError(f"key_bias=False must be True in a {type(self).__name__}")
        for name in ("use_distillation_token", "token_classifier"):
            if getattr(self, name):
                raise ValueError(f"{name}=True must be False in a {type(self).__name__}")
        if self.map_scales is not None:
            raise ValueError(f"map_scales={self.map_scales} must be None: a {type(self).__name__} has no backbone")
        if (pruning := pruning_of(self.layer_priors[0])) is not None:
            raise ValueError(
                f"prior {self.prior_name!r} {pruning[1].verb} tokens, and a {type(self).__name__} needs each patch in "
                "every frame"
            )


SparsePriorTimesformerConfig.register_for_auto_class()
