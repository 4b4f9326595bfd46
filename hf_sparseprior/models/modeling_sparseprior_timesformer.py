"""SparsePriorTimesformer: TimeSformer (Bertasius et al. 2021) with a prior, in the three forms of transformers' class.

Divided space-time attention attends first over time, where every patch attends to itself in all frames, always densely.
Then it attends over space, in every frame alone and with the prior, as Fibottention does (Section 5.1). Joint
space-time attention sees all patches of a clip at once, with the prior. Space-only attention sees every frame alone and
has no parts for time. All parts of an image model keep their names, so its weights are those of a video model, except
for the parts for time.

Shape letters: B batch, F frames, C hidden size, N patches of a frame, P prefix tokens, T = P + N, H heads. The tokens
of a clip are (B, P + N * F, C): prefix tokens, then the patches, each one's frames in a row. Between joint layers the
frames follow one another, or a curve in three dimensions. With space-only attention frames are images, (B * F, T, C).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, CallOptions, reorder
from hf_sparseprior.base.families import VIT_NAMES, Family, ProjectionNames, register_family
from hf_sparseprior.models.base_model import check_keywords, output_options, refuse_symbols
from hf_sparseprior.models.blocks import check_pixels
from hf_sparseprior.models.configuration_sparseprior_timesformer import SparsePriorTimesformerConfig
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.models.modeling_sparseprior_vit import (
    SparsePriorViTEmbeddings,
    SparsePriorViTForImageClassification,
    SparsePriorViTImageClassifierOutput,
    SparsePriorViTLayer,
    SparsePriorViTModel,
    SparsePriorViTModelOutput,
    SparsePriorViTPreTrainedModel,
)
from hf_sparseprior.models.pretrained import check_saved_folder, copy_weights, load_whole_model, may_start_anew
from hf_sparseprior.priors.token_pruning import ALL_TOKENS, Tokens


class SparsePriorTimesformerEmbeddings(SparsePriorViTEmbeddings):
    """The image model's embeddings of every frame, and a time embedding on its patches if frames see each other."""

    def __init__(self, config: SparsePriorTimesformerConfig) -> None:
        super().__init__(config)
        self.time_embeddings: nn.Parameter | None = None
        if config.attention_type != "space_only":
            self.time_embeddings = nn.Parameter(torch.empty(1, config.num_frames, config.hidden_size))

    def frame_positions(self, num_frames: int) -> Tensor:
        """Time embedding (1, F, C), that of the nearest frame if a clip does not have the configured number."""
        assert self.time_embeddings is not None
        if num_frames == self.time_embeddings.shape[1]:
            return self.time_embeddings
        return F.interpolate(self.time_embeddings.transpose(1, 2), size=num_frames, mode="nearest").transpose(1, 2)

    def forward(  # type: ignore[override]  # clips have no masks
        self, pixel_values: Tensor, token_sources: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int]]:
        """Tokens of clips (B, F, channels, height, width), and the patch grid of a frame.

        The tokens are (B, P + N * F, C), with space-only attention (B * F, P + N, C).
        """
        check_pixels(pixel_values, self.config.num_channels, clips=True)
        if token_sources is not None:
            raise ValueError("token_sources (MixToken) are for images, not for clips")
        num_frames = pixel_values.shape[1]
        tokens, grid = super().forward(pixel_values.flatten(0, 1))
        if self.time_embeddings is None:
            return tokens, grid
        tokens = tokens.unflatten(0, (pixel_values.shape[0], num_frames))
        # The same in every frame, except for dropout.
        prefix = tokens[:, 0, : self.config.num_prefix_tokens]
        patches = tokens[:, :, self.config.num_prefix_tokens :].transpose(1, 2) + self.frame_positions(num_frames)
        return torch.cat([prefix, self.dropout(patches).flatten(1, 2)], 1), grid


class SparsePriorTimesformerTemporalAttention(nn.Module):
    """Dense attention of each patch over the frames. The prior, which is for space, does not apply to it."""

    def __init__(self, config: SparsePriorTimesformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.q_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, width, bias=config.proj_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Turn (B * N, F, C) into (B * N, F, C)."""
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout if self.training else 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SparsePriorTimesformerTemporalDense(nn.Linear):
    """The linear layer after temporal attention, which starts with `time_initializer_range`."""


class SparsePriorTimesformerLayer(SparsePriorViTLayer):
    """A block of the image model over the patches of a clip or of a frame.

    With divided attention it comes after temporal attention, and prefix tokens are averaged over the frames.
    """

    config: SparsePriorTimesformerConfig

    def __init__(self, config: SparsePriorTimesformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.hidden_size
        self.temporal_attention: SparsePriorTimesformerTemporalAttention | None = None
        if not config.is_divided:
            return
        self.temporal_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.temporal_attention = SparsePriorTimesformerTemporalAttention(config)
        self.temporal_dense = SparsePriorTimesformerTemporalDense(width, width)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        options: CallOptions = DEFAULT_OPTIONS,
        *no_reduction: Any,
    ) -> tuple[Tensor, Tensor | None, Tokens]:
        """A block.

        Args:
            hidden_states: (B, P + N * F, C), with joint attention frame after frame; (B * F, T, C) with space-only
                attention.
            grid: (height, width) of a frame's patches.
            num_prefix_tokens: P.
            options: what is asked of attention.
            no_reduction: the arguments of the image model's layers about dropped and merged tokens.

        Returns:
            The tokens, the weights of attention with the prior if they are wanted, (B * F, H, T, T) or of joint
            attention (B, H, P + N * F, P + N * F), and that all tokens are there.
        """
        if self.temporal_attention is None:
            return self.forward_whole(hidden_states, grid, num_prefix_tokens, options)
        prefix, patches = hidden_states[:, :num_prefix_tokens], hidden_states[:, num_prefix_tokens:]
        num_frames = patches.shape[1] // (grid[0] * grid[1])
        series = self.temporal_layernorm(patches).unflatten(1, (-1, num_frames)).flatten(0, 1)
        # transformers and the paper's authors drop paths before the linear layer.
        out = self.drop_path(self.dropout(self.temporal_attention(series)))
        patches = patches + self.temporal_dense(out.view_as(patches))

        frames = to_frames(torch.cat([prefix, patches], 1), num_prefix_tokens, num_frames)
        out, weights = self.attention(self.layernorm_before(frames), grid, num_prefix_tokens, options)
        branch = self.branch(out, self.layerscale_attention)
        branch = from_frames(branch, num_prefix_tokens, num_frames)
        hidden_states = torch.add(torch.cat([prefix, patches], 1), branch, alpha=self.residual_scale)

        normed = self.layernorm_after(hidden_states)
        if self.mlp.locality:  # it sees the neighbours of a patch in its frame
            frames = to_frames(normed, num_prefix_tokens, num_frames)
            out = from_frames(self.mlp(frames, grid, num_prefix_tokens), num_prefix_tokens, num_frames)
        else:
            out = self.mlp(normed, grid, num_prefix_tokens)
        branch = self.branch(out, self.layerscale_mlp)
        return torch.add(hidden_states, branch, alpha=self.residual_scale), weights, ALL_TOKENS

    def forward_whole(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        options: CallOptions,
    ) -> tuple[Tensor, Tensor | None, Tokens]:
        """A block without temporal attention; arguments and results are those of `forward`."""
        seen: tuple[int, ...] = grid
        if self.config.is_joint:
            seen = (frames_of(hidden_states, grid, num_prefix_tokens), *grid)
        out, weights = self.attention(self.layernorm_before(hidden_states), seen, num_prefix_tokens, options)
        branch = self.branch(out, self.layerscale_attention)
        hidden_states = torch.add(hidden_states, branch, alpha=self.residual_scale)
        normed = self.layernorm_after(hidden_states)
        if self.mlp.locality and self.config.is_joint:  # it sees the neighbours of a patch in its frame
            prefix, patches = normed[:, :num_prefix_tokens], normed[:, num_prefix_tokens:].unflatten(1, (seen[0], -1))
            repeated = prefix.unsqueeze(1).expand(-1, seen[0], -1, -1)
            out = self.mlp(torch.cat([repeated, patches], 2).flatten(0, 1), grid, num_prefix_tokens)
            out = out.unflatten(0, (-1, seen[0]))
            patches = out[:, :, num_prefix_tokens:].flatten(1, 2)
            out = torch.cat([out[:, :, :num_prefix_tokens].mean(1), patches], 1)
        else:
            out = self.mlp(normed, grid, num_prefix_tokens)
        branch = self.branch(out, self.layerscale_mlp)
        return torch.add(hidden_states, branch, alpha=self.residual_scale), weights, ALL_TOKENS


def frames_of(tokens: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> int:
    """Frames of clips with tokens (B, P + N * F, C) and patches of this grid in a frame."""
    return (tokens.shape[1] - num_prefix_tokens) // (grid[0] * grid[1])


def to_frames(tokens: Tensor, num_prefix_tokens: int, num_frames: int) -> Tensor:
    """Tokens (B, P + N * F, C) of clips as those of their frames (B * F, P + N, C), each with the prefix tokens."""
    prefix = tokens[:, None, :num_prefix_tokens].expand(-1, num_frames, -1, -1)
    patches = tokens[:, num_prefix_tokens:].unflatten(1, (-1, num_frames)).transpose(1, 2)
    return torch.cat([prefix, patches], 2).flatten(0, 1)


def from_frames(frames: Tensor, num_prefix_tokens: int, num_frames: int) -> Tensor:
    """Tokens (B * F, P + N, C) of frames as those of their clips (B, P + N * F, C), with prefix tokens averaged."""
    frames = frames.unflatten(0, (frames.shape[0] // num_frames, num_frames))
    patches = frames[:, :, num_prefix_tokens:].transpose(1, 2).flatten(1, 2)
    return torch.cat([frames[:, :, :num_prefix_tokens].mean(1), patches], 1)


class SparsePriorTimesformerPreTrainedModel(SparsePriorViTPreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorTimesformer class."""

    config_class = SparsePriorTimesformerConfig
    config: SparsePriorTimesformerConfig
    input_modalities = ("video",)
    _no_split_modules = ["SparsePriorTimesformerEmbeddings", "SparsePriorTimesformerLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        of_time = {SparsePriorTimesformerEmbeddings: "time_embeddings", SparsePriorTimesformerTemporalDense: "weight"}
        if type(module) in of_time and getattr(module, of_time[type(module)]) is not None:
            parameter, std = getattr(module, of_time[type(module)]), self.config.time_initializer_range
            if std:
                init.trunc_normal_(parameter, std=std)
            else:
                init.zeros_(parameter)

    def no_weight_decay(self) -> set[str]:
        """As in the image model, and the time embeddings."""
        return super().no_weight_decay() | {
            name for name, _ in self.named_parameters() if name.endswith("time_embeddings")
        }

    @classmethod
    @torch.no_grad()
    def from_image_model(cls, image_model: Any, **options: Any) -> Any:
        """A video model with the weights of an image model.

        For a still clip it gives the image model's output. With joint attention it does not: there a patch has the
        weight of all its frames, and the class token that of one.

        Temporal attention starts with the weights of spatial attention, as in the authors' code; time embeddings and
        the linear layer after temporal attention start at zero.

        Args:
            image_model: a SparsePriorViT or the folder of a saved one.
            options: fields of the config that differ, such as `num_frames`. With another number of labels the
                classifier starts anew, and with another prior the prior's weights do. Positions are interpolated.

        Raises:
            OSError: for a folder that holds no SparsePriorViT.
            ValueError: for bad options, and for weights that would start at random.
        """
        if isinstance(image_model, (str, os.PathLike)):
            image_model = _load_image_model(image_model)
        fields = {key: value for key, value in image_model.config.to_dict().items() if key not in _NOT_TAKEN}
        if "num_labels" in options:  # the names are those of the image model's classes
            fields = {key: value for key, value in fields.items() if key not in ("id2label", "label2id")}
        model = cls(cls.config_class(**{**fields, **options})).to(image_model.dtype)
        for name, value in model.state_dict().items():
            if _starts_at_zero(name):
                value.zero_()
        copy_weights(
            image_model,
            model,
            source_name=_spatial_name,
            may_start_anew=lambda name: "temporal" in name or _starts_at_zero(name) or may_start_anew(name),
            copy_prior=model.config.prior == image_model.config.prior,
        )
        return model.eval()


# Fields in which a config describes its own model or folder.
_NOT_TAKEN = ("model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "num_labels")


def _starts_at_zero(name: str) -> bool:
    return "time_embeddings" in name or "temporal_dense" in name


def _spatial_name(name: str) -> str:
    """The image model's name for a weight: temporal attention starts as a copy of spatial attention."""
    return name.replace("temporal_attention", "attention").replace("temporal_layernorm", "layernorm_before")


def _load_image_model(folder: str | os.PathLike) -> Any:
    check_saved_folder(folder)
    config, _ = SparsePriorViTConfig.get_config_dict(folder)
    if config.get("model_type") != SparsePriorViTConfig.model_type:
        raise OSError(
            f"{folder} holds a model of type {config.get('model_type')!r}, not {SparsePriorViTConfig.model_type!r}"
        )
    classifies = any("Classification" in name for name in config.get("architectures") or [])
    return load_whole_model(folder, SparsePriorViTForImageClassification if classifies else SparsePriorViTModel)


class SparsePriorTimesformerModel(SparsePriorTimesformerPreTrainedModel, SparsePriorViTModel):
    """The bare transformer.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorTimesformerModel(sp.SparsePriorTimesformerConfig(prior="fibottention", num_frames=8))
    ```
    """

    embeddings_class = SparsePriorTimesformerEmbeddings
    layer_class = SparsePriorTimesformerLayer

    def __init__(self, config: SparsePriorTimesformerConfig) -> None:
        super().__init__(config)

    def moving_plan(self, tokens: Tensor, grid: tuple[int, int]) -> AttentionPlan | None:
        """As in the image model; joint layers always have their patches in another order than the embedding."""
        if not self.config.is_joint:
            return super().moving_plan(tokens, grid)
        prefix, first = self.config.num_prefix_tokens, self.layers[0]
        frames = frames_of(tokens, grid, prefix)
        return first.attention.plan((frames, *grid), prefix, layout=self.config.layout)  # type: ignore[union-attr, operator]

    def move_patches(self, tokens: Tensor, plan: AttentionPlan, back: bool = False) -> Tensor:
        """As in the image model, each patch of (B, P + N * F, C) with all of its frames; of a joint clip each alone."""
        if self.config.is_joint:
            if back:
                return self._frames_last(super().move_patches(tokens, plan, back=True), plan, 1)
            return super().move_patches(self._frames_first(tokens, plan), plan)
        if self.config.attention_type == "space_only":
            return super().move_patches(tokens, plan, back)
        prefix, patches = tokens[:, : plan.num_prefix_tokens], tokens[:, plan.num_prefix_tokens :]
        series = patches.unflatten(1, (plan.num_tokens, -1)).transpose(1, 2)  # (B, F, N, C)
        tables = ("ranks", "patches_in_order") if back else ("patches_in_order", "ranks")
        return torch.cat([prefix, reorder(plan, series, *tables).transpose(1, 2).flatten(1, 2)], 1)

    def move_weights_back(self, weights: Tensor, plan: AttentionPlan) -> Tensor:
        """As in the image model."""
        weights = super().move_weights_back(weights, plan)
        if not self.config.is_joint:
            return weights
        return self._frames_last(self._frames_last(weights, plan, 2), plan, 3)

    @staticmethod
    def _frames_first(tokens: Tensor, plan: AttentionPlan) -> Tensor:
        """Tokens (B, P + N * F, C), each patch's frames in a row, frame after frame."""
        prefix, patches = tokens[:, : plan.num_prefix_tokens], tokens[:, plan.num_prefix_tokens :]
        return torch.cat([prefix, patches.unflatten(1, (-1, plan.frames)).transpose(1, 2).flatten(1, 2)], 1)

    @staticmethod
    def _frames_last(tokens: Tensor, plan: AttentionPlan, axis: int) -> Tensor:
        """The inverse of `_frames_first` along an axis."""
        prefix, patches = tokens.split([plan.num_prefix_tokens, plan.num_tokens], axis)
        series = patches.unflatten(axis, (plan.frames, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return torch.cat([prefix, series], axis)

    def forward(  # type: ignore[override]  # clips of one batch have one size
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_sources: Tensor | None = None,
        **keywords: Any,
    ) -> SparsePriorViTModelOutput | tuple:
        """Encode clips.

        Args:
            pixel_values: (B, F, channels, height, width), sides multiples of the patch size.
            output_attentions: also return the weights of every layer's attention with the prior: (B * F, H, T, T), and
                with joint attention (B, H, P + N * F, P + N * F).
            output_hidden_states: also return the L + 1 hidden states (B, P + N * F, C), with space-only attention
                (B * F, T, C).
            return_dict: False for a tuple.
            token_sources: for images only.
            keywords: of transformers' forwards, as in `check_keywords`.

        Returns:
            last_hidden_state after the last norm, of the hidden states' shape; pooler_output (B, C), the class token or
            the average of all patches of all frames, or (B, 2C), both of them. With space-only attention it is the mean
            over the frames, or of the mean over the frames (`frame_average`).
        """
        check_keywords(self, pixel_values, keywords)
        if self.config.attention_type != "space_only":
            return super().forward(pixel_values, output_attentions, output_hidden_states, return_dict, token_sources)
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        tokens, _, states, attentions, _ = self.encode(
            pixel_values, output_attentions, output_hidden_states, token_sources
        )
        last, clips = self.layernorm(tokens), pixel_values.shape[:2]
        if self.config.frame_average == "before_norm":
            pooled = self.pool(self.layernorm(tokens.unflatten(0, clips).mean(1)))
        else:
            pooled = self.pool(last).unflatten(0, clips).mean(1)
        output = SparsePriorViTModelOutput(
            last_hidden_state=last, pooler_output=pooled, hidden_states=states, attentions=attentions
        )
        return output if return_dict else output.to_tuple()


class SparsePriorTimesformerForVideoClassification(
    SparsePriorTimesformerPreTrainedModel, SparsePriorViTForImageClassification
):
    """SparsePriorTimesformer with a linear classifier."""

    model_class = SparsePriorTimesformerModel

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> SparsePriorViTImageClassifierOutput | tuple:
        """Classify clips.

        Args:
            pixel_values: (B, F, channels, height, width).
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            output_attentions, output_hidden_states, return_dict, keywords: as in `SparsePriorTimesformerModel`.

        Returns:
            logits (B, num_labels), with the loss if labels are given.
        """
        refuse_symbols(self.config, pixel_values)
        return super().forward(
            pixel_values,
            labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            **keywords,
        )


register_family(
    Family(
        config_class=SparsePriorTimesformerConfig,
        models={
            "AutoModel": SparsePriorTimesformerModel,
            "AutoModelForVideoClassification": SparsePriorTimesformerForVideoClassification,
        },
        title="SparsePriorTimesformer",
        architecture="TimeSformer",
        takes="clips",
        flops="hf_sparseprior.analysis.flops_timesformer:timesformer_flops",
        projections=ProjectionNames(
            query_value=(*VIT_NAMES.query_value, *(f"temporal_{name}" for name in VIT_NAMES.query_value)),
            attention=(*VIT_NAMES.attention, *(f"temporal_{name}" for name in VIT_NAMES.attention)),
        ),
    )
)
