"""Configuration of SparsePriorTimesformer: divided space-time attention with a prior within each frame."""

from __future__ import annotations

import math

from .configuration_sparseprior_vit import SparsePriorViTConfig, check_number
from .limits import check_size
from .prior import pruning_of


class SparsePriorTimesformerConfig(SparsePriorViTConfig):
    r"""
    Configuration of a SparsePriorTimesformer: that of a SparsePriorViT, and the number of frames.

    Args:
        num_frames: number of frames of a clip. Clips of other lengths take each time embedding from the nearest frame.
        time_initializer_range: standard deviation that the time embeddings and the linear layers after temporal
            attention start with. 0, as published, is for weights of an image model, which then computes the same at
            first. From scratch, the order of frames is learned only with more than 0, for example `initializer_range`.
    """

    model_type = "sparseprior_timesformer"
    can_be_compressed = False
    token_fields = (*SparsePriorViTConfig.token_fields, "num_frames")
    weight_fields = (*SparsePriorViTConfig.weight_fields, "num_frames")

    num_frames: int = 8
    time_initializer_range: float | int = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of a clip, P + N * F, at the configured image size."""
        return self.num_prefix_tokens + self.num_frames * self.grid[0] * self.grid[1]

    @property
    def num_weights(self) -> int:
        """As in SparsePriorViT, with temporal attention and time embeddings."""
        width = self.hidden_size
        return super().num_weights + 5 * self.num_hidden_layers * width**2 + self.num_frames * width

    def validate(self) -> None:
        """As in SparsePriorViT.

        Raises:
            ValueError: also for a prior that drops tokens and for classifiers that video models do not have.
        """
        self.num_frames = check_size("num_frames", self.num_frames, 1, "tokens")
        super().validate()
        check_number("time_initializer_range", self.time_initializer_range, 0.0, math.inf)
        for name in ("use_distillation_token", "token_classifier"):
            if getattr(self, name):
                raise ValueError(f"{name}=True must be False in a {type(self).__name__}")
        if self.map_scales is not None:
            raise ValueError(f"map_scales={self.map_scales} must be None: a {type(self).__name__} has no backbone")
        if pruning_of(self.prior) is not None:
            raise ValueError(
                f"prior {self.prior_name!r} drops tokens, and temporal attention needs each patch in every frame"
            )


SparsePriorTimesformerConfig.register_for_auto_class()
