"""SparsePriorIformer: iFormer (Zheng 2025, arXiv 2501.15369) with a prior in its single-head modulation attention.

Not the Inception Transformer of the same name. The prior has one head: of Fibottention it is row 1 of the Wythoff array
with the window w_max (Fibottention appendix C.1).

Convolutional blocks work on maps, attention and MLP on tokens. Their 1x1 convolutions are linear layers here: attention
takes rows of tokens, and LoRA, DoRA and their merging know linear layers best. Maps that come out of attention lie in
memory as tokens do (channels last), so nothing is copied on the way back.

Shape letters: B batch, C channels, (H, W) places of a map, N = H W tokens, K width of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput

from hf_sparseprior.attention.plain_operations import plain
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, AttentionRequest, CallOptions
from hf_sparseprior.base.extras import make_extras
from hf_sparseprior.base.families import Family, ProjectionNames, register_family
from hf_sparseprior.base.layer_sizes import (
    CONV_WIDTH,
    HEAD_WIDTH,
    HEADS,
    MLP_WIDTH,
    NEXT_STEM_WIDTH,
    PREVIOUS_WIDTH,
    STEM_WIDTH,
    VALUE_WIDTH,
    WIDTH,
    UnitAxes,
)
from hf_sparseprior.models.base_model import (
    BasePreTrainedModel,
    DrawCount,
    call_options,
    check_keywords,
    encoder_keywords,
    mean_loss,
    output_options,
)
from hf_sparseprior.models.blocks import BatchNorm, CheckpointedLayer, DropPath, LayerScale, check_pixels
from hf_sparseprior.models.configuration_sparseprior_iformer import BLOCKS_OF_A_LAYER, SparsePriorIformerConfig
from hf_sparseprior.models.feature_maps import FeatureBackbone, whole_patches
from hf_sparseprior.priors.layer import Biases, SparsePriorAttention


@dataclass
class SparsePriorIformerModelOutput(BaseModelOutputWithPooling):
    """Output of `SparsePriorIformerModel`.

    last_hidden_state: (B, N, C) of the last stage. pooler_output: (B, C), its mean.
    hidden_states: the tokens (B, N, C) of the stem and of each stage. reshaped_hidden_states: the same as (B, C, H, W).
    attentions: (B, 1, N, N) of every attention layer.
    """

    reshaped_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class SparsePriorIformerImageClassifierOutput(ImageClassifierOutput):
    """Output of `SparsePriorIformerForImageClassification`: loss, logits, those of both classifiers (B, num_labels) if
    there are two, and the rest as in the model's.
    """

    class_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    reshaped_hidden_states: tuple[Tensor, ...] | None = None


class SparsePriorIformerConvolution(nn.Module):
    """A convolution without bias and its batch norm.

    Args:
        inputs, outputs: channels.
        kernel_size: side of the kernel, odd; the map is padded with zeros by half of it.
        stride: of the convolution.
        depthwise: each channel by itself.
        eps: of the norm.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, eps: float, stride: int = 1, depthwise: bool = False
    ) -> None:
        super().__init__()
        groups = inputs if depthwise else 1
        self.convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
        self.norm = BatchNorm(outputs, eps=eps)

    def forward(self, maps: Tensor) -> Tensor:
        """Turn (B, inputs, H, W) into (B, outputs, ceil(H / stride), ceil(W / stride))."""
        return self.norm(self.convolution(maps))


class SparsePriorIformerEmbeddings(nn.Module):
    """The stem: two convolutions of stride 2, and a projection."""

    OWN_UNITS: ClassVar[tuple[str, ...]] = (STEM_WIDTH,)
    UNIT_AXES: UnitAxes = {
        "reduction.*": ((STEM_WIDTH,),),
        "expansion.convolution.weight": ((NEXT_STEM_WIDTH,), (STEM_WIDTH,)),
        "expansion.norm.*": ((NEXT_STEM_WIDTH,),),
        "projection.weight": ((WIDTH,), (NEXT_STEM_WIDTH,)),
        "norm.*": ((WIDTH,),),
    }

    def __init__(self, config: SparsePriorIformerConfig) -> None:
        super().__init__()
        width, kernel, eps = config.hidden_sizes[0], config.stem_kernel_size, config.batch_norm_eps
        reduced, expanded = config.inner_widths[STEM_WIDTH]
        self.num_channels = config.num_channels
        self.activation = ACT2FN[config.hidden_act]
        self.reduction = SparsePriorIformerConvolution(config.num_channels, reduced, kernel, eps, stride=2)
        self.expansion = SparsePriorIformerConvolution(reduced, expanded, kernel, eps, stride=2)
        self.projection = nn.Conv2d(expanded, width, 1, bias=False)
        self.norm = BatchNorm(width, eps=eps)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn (B, channels, height, width) into (B, C, ceil(height / 4), ceil(width / 4))."""
        check_pixels(pixel_values, self.num_channels)
        maps = self.activation(self.reduction(pixel_values.to(self.projection.weight.dtype)))
        return self.norm(self.projection(self.activation(self.expansion(maps))))


class SparsePriorIformerMapScale(LayerScale):
    """A learned factor for each channel of a map."""

    def forward(self, maps: Tensor) -> Tensor:
        """Turn (B, C, H, W) into (B, C, H, W)."""
        return maps * self.scale.view(-1, 1, 1)


class SparsePriorIformerConvBlock(CheckpointedLayer):
    """ConvNeXt's block with batch norms: a depthwise convolution, and two pointwise ones with an activation between.

    Args:
        config: of the model.
        width, hidden: C, and the channels between the pointwise convolutions.
        drop_path_rate: stochastic depth of the block.
    """

    OWN_UNITS: ClassVar[tuple[str, ...]] = (CONV_WIDTH,)
    UNIT_AXES: UnitAxes = {
        "depthwise.*": ((WIDTH,),),
        "expansion.convolution.weight": ((CONV_WIDTH,), (WIDTH,)),
        "expansion.norm.*": ((CONV_WIDTH,),),
        "reduction.convolution.weight": ((WIDTH,), (CONV_WIDTH,)),
        "reduction.norm.*": ((WIDTH,),),
    }

    def __init__(self, config: SparsePriorIformerConfig, width: int, hidden: int, drop_path_rate: float) -> None:
        super().__init__()
        eps = config.batch_norm_eps
        self.depthwise = SparsePriorIformerConvolution(width, width, config.kernel_size, eps, depthwise=True)
        self.expansion = SparsePriorIformerConvolution(width, hidden, 1, eps)
        self.activation = ACT2FN[config.hidden_act]
        self.reduction = SparsePriorIformerConvolution(hidden, width, 1, eps)
        self.layer_scale = layer_scale(SparsePriorIformerMapScale, width, config)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, maps: Tensor) -> Tensor:
        """Turn (B, C, H, W) into (B, C, H, W)."""
        branch = self.reduction(self.activation(self.expansion(self.depthwise(maps))))
        return maps + self.drop_path(self.layer_scale(branch))


class SparsePriorIformerAttention(SparsePriorAttention):
    """Single-head modulation attention with a prior: the attention's output times a gate (Zheng 2025, section 3.3).

    Each projection has a batch norm; values and gate go through a sigmoid.

    Args:
        config: of the model.
        stage: number of the stage among those that have attention.
        layer_idx: number of the layer among all attention layers.
    """

    OWN_UNITS = (HEADS, HEAD_WIDTH, VALUE_WIDTH)
    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight"), ((HEADS, HEAD_WIDTH), (WIDTH,))),
        **dict.fromkeys(("q_norm.*", "k_norm.*"), ((HEADS, HEAD_WIDTH),)),
        **dict.fromkeys(("v_proj.weight", "gate_proj.weight"), ((HEADS, VALUE_WIDTH), (WIDTH,))),
        **dict.fromkeys(("v_norm.*", "gate_norm.*"), ((HEADS, VALUE_WIDTH),)),
        "o_proj.weight": ((WIDTH,), (HEADS, VALUE_WIDTH)),
        "o_norm.*": ((WIDTH,),),
    }

    def __init__(self, config: SparsePriorIformerConfig, stage: int, layer_idx: int) -> None:
        width, sizes, eps = config.widths[stage], config.layers[layer_idx], config.batch_norm_eps
        keys, values = sizes.head_width, config.inner_widths[VALUE_WIDTH][layer_idx]
        super().__init__(
            width,
            1,
            config.layer_priors[layer_idx],
            layer_idx,
            biases=Biases(False, False, False, False),
            attention_dropout=config.attention_probs_dropout_prob,
            sizes=sizes._replace(value_width=values),
        )
        self.gate_proj = nn.Linear(width, values, bias=False)
        self.q_norm, self.k_norm = BatchNorm(keys, eps=eps), BatchNorm(keys, eps=eps)
        self.v_norm, self.gate_norm = BatchNorm(values, eps=eps), BatchNorm(values, eps=eps)
        self.o_norm = BatchNorm(width, eps=eps)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, grid: tuple[int, int], options: CallOptions = DEFAULT_OPTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention.

        Args:
            hidden_states: (B, N, C), the places of the map in raster order.
            grid: (height, width) of the map.
            options: what is asked for.

        Returns:
            (B, N, C), and the weights (B, 1, N, N) or None.
        """
        q = normed(self.q_norm, self.q_proj(hidden_states))
        k = normed(self.k_norm, self.k_proj(hidden_states))
        v = normed(self.v_norm, self.v_proj(hidden_states)).sigmoid()
        gate = normed(self.gate_norm, self.gate_proj(hidden_states)).sigmoid()
        request = AttentionRequest(
            q.unsqueeze(1),
            k.unsqueeze(1),
            v.unsqueeze(1),
            self.plan(grid, draw=self.draw_of(options)),
            scale=self.logit_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            need_weights=options.output_attentions,
        )
        out, weights = self.attend(request, options.backend)
        return normed(self.o_norm, self.o_proj(out.squeeze(1) * gate)), weights


class SparsePriorIformerMLP(nn.Module):
    """Two linear layers, each with a batch norm, and an activation and the prior's extras for the MLP between them.

    Args:
        config: of the model.
        stage: number of the stage among those that have attention.
        layer_idx: number of the layer among all attention layers.
    """

    OWN_UNITS: ClassVar[tuple[str, ...]] = (MLP_WIDTH,)
    UNIT_AXES: UnitAxes = {
        "fc1.weight": ((MLP_WIDTH,), (WIDTH,)),
        "norm1.*": ((MLP_WIDTH,),),
        "fc2.weight": ((WIDTH,), (MLP_WIDTH,)),
        "norm2.*": ((WIDTH,),),
    }

    def __init__(self, config: SparsePriorIformerConfig, stage: int, layer_idx: int) -> None:
        super().__init__()
        width, eps, hidden = config.widths[stage], config.batch_norm_eps, config.layers[layer_idx].mlp_width
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.norm1 = BatchNorm(hidden, eps=eps)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(hidden, width, bias=False)
        self.norm2 = BatchNorm(width, eps=eps)
        self.locality = make_extras(config.layer_priors[layer_idx]["extras"], "MLP", hidden)

    def forward(self, hidden_states: Tensor, grid: tuple[int, int]) -> Tensor:
        """Turn (B, N, C) into (B, N, C)."""
        hidden_states = self.activation(normed(self.norm1, self.fc1(hidden_states)))
        for branch in self.locality.values():
            hidden_states = branch(hidden_states, grid, 0)
        return normed(self.norm2, self.fc2(hidden_states))


class SparsePriorIformerLayer(CheckpointedLayer):
    """Conditional position encoding, a depthwise convolution (CPE), then attention, then the MLP.

    Args:
        config: of the model.
        stage: number of the stage among those that have attention.
        layer_idx: number of the layer among all attention layers.
        drop_path_rates: stochastic depth of the three parts. The encoding is never dropped.
    """

    UNIT_AXES: UnitAxes = {"cpe.*": ((WIDTH,),)}

    def __init__(
        self, config: SparsePriorIformerConfig, stage: int, layer_idx: int, drop_path_rates: list[float]
    ) -> None:
        super().__init__()
        self.config = config
        width, kernel, eps = config.widths[stage], config.position_kernel_size, config.batch_norm_eps
        self.cpe = SparsePriorIformerConvolution(width, width, kernel, eps, depthwise=True)
        self.attention = SparsePriorIformerAttention(config, stage, layer_idx)
        self.layer_scale1 = layer_scale(LayerScale, width, config)
        self.drop_path1 = DropPath(drop_path_rates[1])
        self.mlp = SparsePriorIformerMLP(config, stage, layer_idx)
        self.layer_scale2 = layer_scale(LayerScale, width, config)
        self.drop_path2 = DropPath(drop_path_rates[2])

    def forward(self, maps: Tensor, options: CallOptions = DEFAULT_OPTIONS) -> tuple[Tensor, Tensor | None]:
        """The map (B, C, H, W), and the weights (B, 1, N, N) if they are wanted."""
        grid = (maps.shape[2], maps.shape[3])
        tokens = as_tokens(maps + self.cpe(maps)).contiguous()  # read by four projections
        branch, weights = self.attention(tokens, grid, options)
        tokens = tokens + self.drop_path1(self.layer_scale1(branch))
        tokens = tokens + self.drop_path2(self.layer_scale2(self.mlp(tokens, grid)))
        return tokens.transpose(1, 2).unflatten(2, grid), weights


class SparsePriorIformerStage(nn.Module):
    """A convolution of stride 2, except in the first stage, and the blocks and layers of one resolution.

    Args:
        config: of the model.
        stage: number of the stage.
    """

    UNIT_AXES: UnitAxes = {
        "downsample.convolution.weight": ((WIDTH,), (PREVIOUS_WIDTH,)),
        "downsample.norm.*": ((WIDTH,),),
    }

    def __init__(self, config: SparsePriorIformerConfig, stage: int) -> None:
        super().__init__()
        width, rates = config.hidden_sizes[stage], config.drop_path_rates[stage]
        self.downsample = None
        if stage:
            before = config.hidden_sizes[stage - 1]
            self.downsample = SparsePriorIformerConvolution(before, width, 3, config.batch_norm_eps, stride=2)
        first, layers = config.conv_depths[stage], config.attention_depths[stage]
        last = first + BLOCKS_OF_A_LAYER * layers
        number, before = sum(map(bool, config.attention_depths[:stage])), sum(config.attention_depths[:stage])
        hidden = config.conv_widths(stage)
        self.convolutions = nn.ModuleList(
            SparsePriorIformerConvBlock(config, width, *pair)
            for pair in zip(hidden[:first], rates[:first], strict=True)
        )
        self.layers = nn.ModuleList(
            SparsePriorIformerLayer(config, number, before + index, rates[begin : begin + BLOCKS_OF_A_LAYER])
            for index, begin in enumerate(range(first, last, BLOCKS_OF_A_LAYER))
        )
        self.final_convolutions = nn.ModuleList(
            SparsePriorIformerConvBlock(config, width, *pair) for pair in zip(hidden[first:], rates[last:], strict=True)
        )

    def forward(self, maps: Tensor, options: CallOptions = DEFAULT_OPTIONS) -> tuple[Tensor, list[Tensor]]:
        """The map (B, C, H, W), and the weights of the attention layers if they are wanted."""
        attentions = []
        if self.downsample is not None:
            maps = self.downsample(maps)
        for block in self.convolutions:
            maps = block(maps)
        for layer in self.layers:
            maps, weights = layer(maps, options)
            if weights is not None:
                attentions.append(weights)
        for block in self.final_convolutions:
            maps = block(maps)
        return maps, attentions


class SparsePriorIformerPreTrainedModel(BasePreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorIformer class."""

    config_class = SparsePriorIformerConfig
    config: SparsePriorIformerConfig
    base_model_prefix = "iformer"
    _no_split_modules = [
        *("SparsePriorIformerEmbeddings", "SparsePriorIformerConvBlock", "SparsePriorIformerLayer"),
    ]


class SparsePriorIformerModel(SparsePriorIformerPreTrainedModel):
    """The bare network.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorIformerModel(sp.SparsePriorIformerConfig.from_preset("iformer_medium", prior="fibottention"))
    ```
    """

    def __init__(self, config: SparsePriorIformerConfig) -> None:
        super().__init__(config)
        self.embeddings = SparsePriorIformerEmbeddings(config)
        self.stages = nn.ModuleList(SparsePriorIformerStage(config, stage) for stage in range(len(config.hidden_sizes)))
        self.draws = DrawCount.of(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The first convolution."""
        return self.embeddings.reduction.convolution

    def stage_of(self, name: str) -> int:
        """As `BasePreTrainedModel`."""
        part, *rest = name.split(".")
        if part == "stages":
            return int(rest[0])
        return 0 if part == "embeddings" else len(self.stages) - 1

    @property
    def map_sources(self) -> list[nn.Module]:
        """The stem and the stages."""
        return [self.embeddings, *self.stages]

    def encode(
        self, pixel_values: Tensor, output_attentions: bool, tokens: list[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The maps (B, C, H, W) of the stem and of each stage, and attentions.

        A list of `tokens` gets those of the maps, (B, H * W, C). What follows is made from them, so that a gradient
        reaches them.
        """
        maps: list[Tensor] = []
        attentions: list[Tensor] = []
        options = call_options(self.config, self.draws, output_attentions)
        for stage in (None, *self.stages):
            if stage is None:
                last = self.embeddings(pixel_values)
            else:
                last, weights = stage(maps[-1], options)
                attentions.extend(weights)
            if tokens is not None:
                tokens.append(as_tokens(last))
                last = tokens[-1].transpose(1, 2).unflatten(2, last.shape[2:])
            maps.append(last)
        return maps, attentions

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> SparsePriorIformerModelOutput | tuple:
        """Encode images.

        Args:
            pixel_values: (B, channels, height, width), of any size.
            output_attentions: also return the weights of every attention layer.
            output_hidden_states: also return the tokens of the stem and of each stage, in both forms.
            return_dict: False for a tuple.
            keywords: of transformers' forwards, as in `check_keywords`.

        Returns:
            last_hidden_state (B, N, C), which has no further norm; pooler_output (B, C), its mean.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        tokens: list[Tensor] | None = [] if output_hidden_states else None
        maps, attentions = self.encode(pixel_values, output_attentions, tokens)
        last = as_tokens(maps[-1])
        output = SparsePriorIformerModelOutput(
            last_hidden_state=last,
            pooler_output=last.mean(1),
            hidden_states=tuple(tokens) if tokens is not None else None,
            attentions=tuple(attentions) if output_attentions else None,
            reshaped_hidden_states=tuple(maps) if output_hidden_states else None,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorIformerClassifier(nn.Module):
    """A batch norm and a linear layer.

    Args:
        config: of the model; with its `num_labels`.
    """

    UNIT_AXES: UnitAxes = {"norm.*": ((WIDTH,),), "linear.weight": ((), (WIDTH,)), "linear.bias": ()}

    def __init__(self, config: SparsePriorIformerConfig) -> None:
        super().__init__()
        self.norm = BatchNorm(config.hidden_size, eps=config.batch_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Turn (B, C) into (B, num_labels)."""
        if plain() is None:
            return self.linear(self.norm(pooled))
        # OpenVINO 2026.4 takes factors of channels after a mean over transposed places for those of images.
        return self.linear(self.norm(pooled.unsqueeze(-1)).squeeze(-1))


class SparsePriorIformerForImageClassification(SparsePriorIformerPreTrainedModel):
    """SparsePriorIformer with a classifier, or with a second one for a teacher's decisions."""

    def __init__(self, config: SparsePriorIformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.iformer = SparsePriorIformerModel(config)
        self.classifier = SparsePriorIformerClassifier(config) if config.num_labels else nn.Identity()
        distills = config.use_distillation_classifier and config.num_labels
        self.distillation_classifier = SparsePriorIformerClassifier(config) if distills else None
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        distillation_targets: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> SparsePriorIformerImageClassifierOutput | tuple:
        """Classify images.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            distillation_targets: (B,) a teacher's decisions for the distillation classifier; default: `labels`.
            output_attentions, output_hidden_states, return_dict, keywords: as in `SparsePriorIformerModel`.

        Returns:
            logits (B, num_labels), with the loss if labels are given. With a distillation classifier loss and logits
            are the means of both.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        encoded = self.iformer(
            pixel_values, output_attentions, output_hidden_states, True, **encoder_keywords(keywords)
        )
        logits = self.classifier(encoded.pooler_output)
        loss = None if labels is None else mean_loss(self, labels, logits, keywords)
        class_logits = distillation_logits = None
        if self.distillation_classifier is not None:
            class_logits, distillation_logits = logits, self.distillation_classifier(encoded.pooler_output)
            logits = (class_logits + distillation_logits) / 2
            if loss is not None and labels is not None:
                targets = labels if distillation_targets is None else distillation_targets
                loss = (loss + mean_loss(self, targets, distillation_logits, keywords)) / 2
        output = SparsePriorIformerImageClassifierOutput(
            loss=loss,
            logits=logits,
            class_logits=class_logits,
            distillation_logits=distillation_logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            reshaped_hidden_states=encoded.reshaped_hidden_states,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorIformerBackbone(FeatureBackbone, SparsePriorIformerModel):
    """SparsePriorIformer as a feature extractor for dense prediction. Its maps have no further norm."""

    def __init__(self, config: SparsePriorIformerConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_sizes[0], *config.hidden_sizes]

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> BackboneOutput | tuple:
        """Feature maps (B, C, H, W) at `config.out_features`. "stem" is the embedding. Images of any size are padded to
        multiples of 4 with zeros at bottom and right.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        maps, attentions = self.encode(whole_patches(self, pixel_values), output_attentions)
        by_name = dict(zip(self.stage_names, maps, strict=True))
        output = BackboneOutput(
            feature_maps=tuple(by_name[stage] for stage in self.out_features),
            hidden_states=tuple(maps) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


def layer_scale(kind: type[LayerScale], width: int, config: SparsePriorIformerConfig) -> nn.Module:
    """The factors of a residual branch's channels, or nothing if the config starts them at 0."""
    return kind(width, config.layer_scale_init_value) if config.layer_scale_init_value else nn.Identity()


def normed(norm: nn.Module, tokens: Tensor) -> Tensor:
    """A batch norm of tokens (B, N, C)."""
    if isinstance(norm, BatchNorm):
        return norm(tokens.flatten(0, 1)).view_as(tokens)
    # DETRs of transformers replace batch norms by frozen ones, which take maps alone.
    return norm(tokens.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


def as_tokens(maps: Tensor) -> Tensor:
    """Turn (B, C, H, W) into (B, N, C)."""
    return maps.flatten(2).transpose(1, 2)


register_family(
    Family(
        config_class=SparsePriorIformerConfig,
        models={
            "AutoModel": SparsePriorIformerModel,
            "AutoModelForImageClassification": SparsePriorIformerForImageClassification,
            "AutoBackbone": SparsePriorIformerBackbone,
        },
        title="SparsePriorIformer",
        architecture="iFormer",
        flops="hf_sparseprior.analysis.flops_iformer:iformer_flops",
        projections=ProjectionNames(
            attention=(*ProjectionNames().attention[:3], "attention.gate_proj", "attention.o_proj")
        ),
    )
)
