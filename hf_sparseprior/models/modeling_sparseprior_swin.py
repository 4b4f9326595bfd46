"""SparsePriorSwin: Swin Transformers (Liu et al. 2021) with a prior within their windows.

Parameter names within a block are those of transformers' ViT and Swin (q_proj, k_proj, v_proj, o_proj, fc1, fc2), so
LoRA configs carry over.

Shape letters: B batch, C width of the tokens, (H, W) patches of a stage, G heads, N patches of a window, n windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput

from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import (
    DEFAULT_OPTIONS,
    AttentionRequest,
    CallOptions,
    reorder,
    weights_from_layout,
)
from hf_sparseprior.base.families import Family, register_family
from hf_sparseprior.base.layer_sizes import NEXT_WIDTH, WIDTH, UnitAxes
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.base_config import BaseConfig, as_pair
from hf_sparseprior.models.base_model import (
    BasePreTrainedModel,
    DrawCount,
    call_options,
    check_keywords,
    encoder_keywords,
    mean_loss,
    output_options,
)
from hf_sparseprior.models.blocks import MLP, CheckpointedLayer, DropPath, check_pixels, masked_patches
from hf_sparseprior.models.configuration_sparseprior_swin import SparsePriorSwinConfig
from hf_sparseprior.models.feature_maps import FeatureBackbone
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer import Biases, SparsePriorAttention
from hf_sparseprior.priors.prior import common_order
from hf_sparseprior.priors.relative_position import SwinRelativePositionBias


@dataclass
class SparsePriorSwinModelOutput(BaseModelOutputWithPooling):
    """Output of `SparsePriorSwinModel`, as of transformers' SwinModel.

    last_hidden_state: (B, H * W, C) of the last stage. pooler_output: (B, C), its mean.
    hidden_states: the tokens (B, H * W, C) of the embedding and after each stage and its patch merging.
    reshaped_hidden_states: the same as (B, C, H, W). attentions: (B * n, G, N, N) of every layer.
    """

    reshaped_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SparsePriorSwinImageClassifierOutput(ImageClassifierOutput):
    """Output of `SparsePriorSwinForImageClassification`: loss, logits, and the rest as in the model's."""

    reshaped_hidden_states: tuple[Tensor, ...] | None = None


class SparsePriorSwinEmbeddings(nn.Module):
    """Patch projection and norm. There is no position embedding; the windows have relative positions."""

    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("projection.weight", "projection.bias"), ((WIDTH,),)),
        "mask_token": ((), (), (WIDTH,)),
    }

    def __init__(self, config: SparsePriorSwinConfig) -> None:
        super().__init__()
        self.num_channels = config.num_channels
        self.patch_size = as_pair(config.patch_size)
        self.projection = nn.Conv2d(config.num_channels, config.widths[0], self.patch_size, self.patch_size)
        self.norm = nn.LayerNorm(config.widths[0], eps=config.layer_norm_eps)
        self.mask_token: nn.Parameter | None = None  # `SparsePriorSwinModel` makes it
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """Turn (B, channels, height, width), padded with zeros to a multiple of the patch, into (B, H, W, C).

        `bool_masked_pos` (B, H * W): patches in whose place the mask token stands.
        """
        check_pixels(pixel_values, self.num_channels)
        height, width = pixel_values.shape[2:]
        below, right = -height % self.patch_size[0], -width % self.patch_size[1]
        if below or right:
            pixel_values = F.pad(pixel_values, (0, right, 0, below))
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        patches = self.norm(patches.permute(0, 2, 3, 1))
        if bool_masked_pos is not None:
            tokens = masked_patches(patches.flatten(1, 2), bool_masked_pos, self.mask_token)
            patches = tokens.unflatten(1, patches.shape[1:3])
        return self.dropout(patches)


class SparsePriorSwinPositionBias(SwinRelativePositionBias):
    """The relative position bias of a window (Swin Eq. 4); random at the start, as in Swin."""


class SparsePriorSwinAttention(SparsePriorAttention):
    """Attention with a prior within the windows of an image, which may be shifted.

    Args:
        window: patches in a window's side.
        others: arguments of `SparsePriorAttention`.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, prior: ResolvedPrior, window: int, layer_idx: int, **others: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, prior, layer_idx, **others)
        self.window = (window, window)
        self.layout = common_order(prior)  # of the patches of a window
        self.relative_position_bias = SparsePriorSwinPositionBias(
            self.num_heads, self.head_dim, grid=self.window, learn_prefix=False
        )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, shift: int, options: CallOptions = DEFAULT_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention within windows.

        Args:
            hidden_states: (B, H, W, C), H and W multiples of the window.
            shift: by how many patches the windows are shifted to the lower right.
            options: what is asked for.

        Returns:
            (B, H, W, C), and the weights (B * n, G, N, N) or None.
        """
        height, width = hidden_states.shape[1:3]
        plan = self.plan(self.window, layout=self.layout, draw=self.draw_of(options))
        request = AttentionRequest(
            *self._project(hidden_states, plan, shift),
            plan,
            scale=self.logit_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            need_weights=options.output_attentions,
        )
        bias = self.relative_position_bias(request)
        if shift:
            # This mask has the support's pairs, too, so that a patch that would see none can see itself.
            seen = plan_table(plan, f"windows {height} {width} {shift} {shift}", hidden_states.device)
            bias = bias.masked_fill(~seen, -math.inf)
            if plan.offsets is not None and plan.mask_fill == "neg_inf":
                request = request._replace(plan=self.plan(self.window, dense=True, layout=self.layout))
        out, weights = self.attend(request._replace(bias=bias), options.backend)
        if plan.layout != RASTER:
            if weights is not None:
                weights = weights_from_layout(plan, weights)
            return self.o_proj(self._from_places(out, plan, height, width, shift)), weights
        out = self.o_proj(self._image(out, height, width))
        return out.roll((shift, shift), (1, 2)) if shift else out, weights

    def _project(self, hidden_states: Tensor, plan: AttentionPlan, shift: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (B * n, G, N, C / G) of the windows of an image (B, H, W, C), in the layout of the plan."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if plan.layout == RASTER:
            if shift:
                hidden_states = hidden_states.roll((-shift, -shift), (1, 2))
            q, k, v = (self._windows(projection(hidden_states)) for projection in projections)
            return q, k, v
        # Shift, windows and order are one permutation.
        height, width = hidden_states.shape[1:3]
        tables = _tables(height, width, shift)
        tokens = reorder(plan, hidden_states.flatten(1, 2).unsqueeze(1), *tables).squeeze(1)
        tokens = tokens.unflatten(1, (-1, plan.num_tokens)).flatten(0, 1)
        q, k, v = (projection(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for projection in projections)
        return q, k, v

    def _from_places(self, out: Tensor, plan: AttentionPlan, height: int, width: int, shift: int) -> Tensor:
        """Turn (B * n, G, N, C / G) in the layout of the plan into (B, H, W, C)."""
        tokens = out.transpose(1, 2).flatten(2).unflatten(0, (-1, height * width // plan.num_tokens)).flatten(1, 2)
        in_windows, in_image = _tables(height, width, shift)
        return reorder(plan, tokens.unsqueeze(1), in_image, in_windows).squeeze(1).unflatten(1, (height, width))

    def _windows(self, tokens: Tensor) -> Tensor:
        """Turn (B, H, W, C) into (B * n, G, N, C / G)."""
        side = self.window[0]
        windows = tokens.unflatten(3, (self.num_heads, -1)).unflatten(2, (-1, side)).unflatten(1, (-1, side))
        return windows.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(0, 2)

    def _image(self, windows: Tensor, height: int, width: int) -> Tensor:
        """Turn (B * n, G, N, C / G) into (B, H, W, C)."""
        side = self.window[0]
        tokens = windows.unflatten(2, (side, side)).unflatten(0, (-1, height // side, width // side))
        return tokens.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(3, 4).flatten(1, 2)


def _tables(height: int, width: int, shift: int) -> tuple[str, str]:
    """Names of a plan's tables: from the image to its windows, and back."""
    return f"in_windows {height} {width} {shift} {shift}", f"in_image {height} {width} {shift} {shift}"


class SparsePriorSwinLayer(CheckpointedLayer):
    """A pre-norm block: attention within windows, then the MLP.

    Args:
        config: of the model.
        stage: number of the stage from 0.
        index: number of the layer within its stage; the windows of odd ones are shifted.
        layer_idx: number of the layer within the model.
    """

    def __init__(self, config: SparsePriorSwinConfig, stage: int, index: int, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        width, prior, sizes = config.widths[stage], config.layer_priors[layer_idx], config.layers[layer_idx]
        self.window = config.windows[stage]
        self.shift = self.window // 2 if index % 2 else 0
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = SparsePriorSwinAttention(
            width,
            config.num_heads[stage],
            prior,
            self.window,
            layer_idx,
            biases=Biases(*[config.qkv_bias] * 3),
            attention_dropout=config.attention_probs_dropout_prob,
            sizes=sizes,
        )
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = MLP(width, sizes.mlp_width, config.hidden_act, True, prior["extras"])
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = DropPath(config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1))

    def forward(
        self, hidden_states: Tensor, always_shift: bool = False, options: CallOptions = DEFAULT_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """A block.

        Args:
            hidden_states: (B, H, W, C).
            always_shift: shift the windows even if the image is no larger than one.
            options: what is asked of attention.

        Returns:
            The tokens (B, H, W, C), and the weights (B * n, G, N, N) if they are wanted.
        """
        height, width = hidden_states.shape[1:3]
        shift = self.shift if always_shift or min(height, width) > self.window else 0
        tokens = self.layernorm_before(hidden_states)
        below, right = -height % self.window, -width % self.window
        if below or right:
            tokens = F.pad(tokens, (0, 0, 0, right, 0, below))
        tokens, weights = self.attention(tokens, shift, options)
        if below or right:
            tokens = tokens[:, :height, :width]
        hidden_states = hidden_states + self.drop_path(self.dropout(tokens))
        tokens = self.layernorm_after(hidden_states)
        tokens = self.mlp(tokens.flatten(1, 2), (height, width), 0).unflatten(1, (height, width))
        return hidden_states + self.drop_path(self.dropout(tokens)), weights


class SparsePriorSwinPatchMerging(nn.Module):
    """Four neighbours become one token of the next stage's width, twice as wide in Swin. An odd side is padded."""

    UNIT_AXES: UnitAxes = {"reduction.weight": ((NEXT_WIDTH,), (WIDTH,))}

    def __init__(self, width: int, next_width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=eps)
        self.reduction = nn.Linear(4 * width, next_width, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Turn (B, H, W, C) into (B, H / 2, W / 2, the next stage's C)."""
        height, width = hidden_states.shape[1:3]
        if height % 2 or width % 2:
            hidden_states = F.pad(hidden_states, (0, 0, 0, width % 2, 0, height % 2))
        squares = hidden_states.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, H / 2, row, W / 2, column, C)
        return self.reduction(self.norm(squares.permute(0, 1, 3, 4, 2, 5).flatten(3)))


class SparsePriorSwinStage(nn.Module):
    """The layers of one resolution, and the patch merging after them, except for the last stage."""

    def __init__(self, config: SparsePriorSwinConfig, stage: int) -> None:
        super().__init__()
        before = sum(config.depths[:stage])
        self.layers = nn.ModuleList(
            SparsePriorSwinLayer(config, stage, index, before + index) for index in range(config.depths[stage])
        )
        self.downsample = None
        if stage + 1 < len(config.depths):
            width, next_width = config.widths[stage : stage + 2]
            self.downsample = SparsePriorSwinPatchMerging(width, next_width, config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, always_shift: bool = False, options: CallOptions = DEFAULT_OPTIONS
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The tokens (B, H, W, C) before and after patch merging, and the weights of the layers if they are wanted."""
        attentions = []
        for layer in self.layers:
            hidden_states, weights = layer(hidden_states, always_shift, options)
            if weights is not None:
                attentions.append(weights)
        merged = hidden_states if self.downsample is None else self.downsample(hidden_states)
        return hidden_states, merged, attentions


class SparsePriorSwinPreTrainedModel(BasePreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorSwin class."""

    config_class = SparsePriorSwinConfig
    config: SparsePriorSwinConfig
    base_model_prefix = "swin"
    _no_split_modules = ["SparsePriorSwinEmbeddings", "SparsePriorSwinLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SparsePriorSwinPositionBias):
            init.trunc_normal_(module.bias_table, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, SparsePriorSwinEmbeddings):
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        else:
            super()._init_weights(module)

    def resized_weights(self, config: BaseConfig) -> dict[str, Tensor]:
        """The bias tables, interpolated to the windows as in Swin (bicubic); they are smaller in a small stage."""
        assert isinstance(config, SparsePriorSwinConfig)
        tables = {}
        for number, (stage, window) in enumerate(zip(self.base_model.stages, config.windows, strict=False)):
            for index, layer in enumerate(stage.layers):
                table = layer.attention.relative_position_bias.bias_table
                name = f"stages.{number}.layers.{index}.attention.relative_position_bias.bias_table"
                tables[name] = resized_table(table, (window, window))
        return tables


class SparsePriorSwinModel(SparsePriorSwinPreTrainedModel):
    """The bare transformer.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorSwinModel(sp.SparsePriorSwinConfig.from_preset("swin_tiny", prior="fibottention+violin"))
    ```

    add_pooling_layer, use_mask_token: as stock Swin: whether there is a `pooler_output`, and a token for the patches of
    `bool_masked_pos`.
    """

    def __init__(
        self, config: SparsePriorSwinConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        super().__init__(config)
        self.add_pooling_layer = add_pooling_layer
        self.embeddings = SparsePriorSwinEmbeddings(config)
        if use_mask_token:
            self.embeddings.mask_token = nn.Parameter(torch.zeros(1, 1, config.widths[0]))
        self.stages = nn.ModuleList(SparsePriorSwinStage(config, stage) for stage in range(len(config.depths)))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.draws = DrawCount.of(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The patch projection."""
        return self.embeddings.projection

    def stage_of(self, name: str) -> int:
        """As `BasePreTrainedModel`."""
        part, *rest = name.split(".")
        if part == "stages":
            return int(rest[0])
        return 0 if part == "embeddings" else len(self.stages) - 1

    @property
    def map_sources(self) -> list[nn.Module]:
        """The embedding and the stages."""
        return [self.embeddings, *self.stages]

    def encode(
        self,
        pixel_values: Tensor,
        output_attentions: bool,
        always_shift: bool = False,
        tokens: list[Tensor] | None = None,
        bool_masked_pos: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Embedding and stages, without the last norm: tokens, maps of the embedding and after each stage before and
        after its patch merging, all (B, H, W, C), and attentions.

        A list of `tokens` gets those of the last maps, (B, H * W, C). What follows is made from them, so that a
        gradient reaches them.
        """
        hidden_states = self.embeddings(pixel_values, bool_masked_pos)
        before, after = [hidden_states], [hidden_states]
        attentions: list[Tensor] = []
        options = call_options(self.config, self.draws, output_attentions)
        for stage in (None, *self.stages):
            if stage is not None:
                last, hidden_states, weights = stage(hidden_states, always_shift, options)
                before.append(last)
                after.append(hidden_states)
                attentions.extend(weights)
            if tokens is not None:
                tokens.append(hidden_states.flatten(1, 2))
                hidden_states = tokens[-1].unflatten(1, hidden_states.shape[1:3])
        return hidden_states, before, after, attentions

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        bool_masked_pos: Tensor | None = None,
        **keywords: Any,
    ) -> SparsePriorSwinModelOutput | tuple:
        """Encode images.

        Args:
            pixel_values: (B, channels, height, width).
            output_attentions: also return the weights of every layer.
            output_hidden_states: also return the tokens of the embedding and after each stage, in both forms.
            return_dict: False for a tuple.
            bool_masked_pos: (B, N), patches in whose place the mask token stands.
            keywords: of transformers' forwards, as in `check_keywords`.

        Returns:
            last_hidden_state (B, H * W, C) after the last norm; pooler_output (B, C), its mean.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        tokens: list[Tensor] | None = [] if output_hidden_states else None
        hidden_states, _, states, attentions = self.encode(
            pixel_values, output_attentions, tokens=tokens, bool_masked_pos=bool_masked_pos
        )
        last = self.layernorm(hidden_states).flatten(1, 2)
        output = SparsePriorSwinModelOutput(
            last_hidden_state=last,
            pooler_output=last.mean(1) if self.add_pooling_layer else None,
            hidden_states=tuple(tokens) if tokens is not None else None,
            attentions=tuple(attentions) if output_attentions else None,
            reshaped_hidden_states=tuple(map(as_map, states)) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorSwinForImageClassification(SparsePriorSwinPreTrainedModel):
    """SparsePriorSwin with a linear classifier."""

    UNIT_AXES: UnitAxes = {"classifier.weight": ((), (WIDTH,)), "classifier.bias": ()}

    def __init__(self, config: SparsePriorSwinConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.swin = SparsePriorSwinModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> SparsePriorSwinImageClassifierOutput | tuple:
        """Classify images.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            output_attentions, output_hidden_states, return_dict, keywords: as in `SparsePriorSwinModel`.

        Returns:
            logits (B, num_labels), with the loss if labels are given.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        encoded = self.swin(pixel_values, output_attentions, output_hidden_states, True, **encoder_keywords(keywords))
        logits = self.classifier(encoded.pooler_output)
        output = SparsePriorSwinImageClassifierOutput(
            loss=None if labels is None else mean_loss(self, labels, logits, keywords),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            reshaped_hidden_states=encoded.reshaped_hidden_states,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorSwinBackbone(FeatureBackbone, SparsePriorSwinModel):
    """SparsePriorSwin as a feature extractor for dense prediction.

    As in transformers and mmdetection, each map that is given out has a norm of its own, and windows are shifted even
    in a stage that is no larger than one.
    """

    def __init__(self, config: SparsePriorSwinConfig) -> None:
        super().__init__(config)
        self.num_features = [config.widths[0], *config.widths]
        widths = dict(zip(self.stage_names, self.num_features, strict=True))
        self.map_norms = nn.ModuleDict(
            {stage: nn.LayerNorm(widths[stage], eps=config.layer_norm_eps) for stage in self.out_features}
        )
        self.layernorm.requires_grad_(False)  # only the bare model has it in its output
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> BackboneOutput | tuple:
        """Feature maps (B, C, H, W) at `config.out_features`, before the patch merging. "stem" is the embedding."""
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        _, states, _, attentions = self.encode(pixel_values, output_attentions, always_shift=True)
        by_name = dict(zip(self.stage_names, states, strict=True))
        output = BackboneOutput(
            feature_maps=tuple(as_map(self.map_norms[stage](by_name[stage])) for stage in self.out_features),
            hidden_states=tuple(map(as_map, states)) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


def resized_table(table: Tensor, window: tuple[int, int]) -> Tensor:
    """A bias table (G, rows, columns) for another window (height, width)."""
    size = (2 * window[0] - 1, 2 * window[1] - 1)
    if table.shape[1:] == size:
        return table
    return F.interpolate(table.unsqueeze(0).float(), size=size, mode="bicubic", align_corners=False)[0].to(table.dtype)


def as_map(tokens: Tensor) -> Tensor:
    """Turn (B, H, W, C) into (B, C, H, W)."""
    return tokens.permute(0, 3, 1, 2).contiguous()


register_family(
    Family(
        config_class=SparsePriorSwinConfig,
        models={
            "AutoModel": SparsePriorSwinModel,
            "AutoModelForImageClassification": SparsePriorSwinForImageClassification,
            "AutoBackbone": SparsePriorSwinBackbone,
        },
        title="SparsePriorSwin",
        architecture="Swin",
        flops="hf_sparseprior.analysis.flops_swin:swin_flops",
        backbone_parts=("map_norms",),
    )
)
