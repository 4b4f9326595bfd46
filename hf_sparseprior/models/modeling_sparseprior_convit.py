"""SparsePriorConvit: ConViT (d'Ascoli et al. 2021) with a prior in its plain attention layers.

The first layers have gated positional self-attention over the patches. The class token joins after them, and the rest
is a ViT. Parameter names are those of transformers' ViT (q_proj, k_proj, v_proj, o_proj, fc1, fc2), so LoRA configs
carry over.

Shape letters: B batch, C hidden size, N patch tokens, P prefix tokens (0 or 1), T = P + N, H heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput

from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, CallOptions, from_layout, to_layout, weights_from_layout
from hf_sparseprior.base.families import Family, register_family
from hf_sparseprior.base.layer_sizes import HEADS, WIDTH, UnitAxes
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
from hf_sparseprior.models.blocks import MLP, CheckpointedLayer, DropPath, patch_grid, resized_positions
from hf_sparseprior.models.configuration_sparseprior_convit import SparsePriorConvitConfig
from hf_sparseprior.models.feature_maps import FeatureBackbone, make_resampling, whole_patches
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer import Biases, SparsePriorAttention


class SparsePriorConvitEmbeddings(nn.Module):
    """Patch projection, class token and position embedding."""

    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("projection.weight", "projection.bias"), ((WIDTH,),)),
        **dict.fromkeys(("class_token", "position_embeddings"), ((), (), (WIDTH,))),
    }

    def __init__(self, config: SparsePriorConvitConfig) -> None:
        super().__init__()
        self.num_channels, self.interpolation = config.num_channels, config.interpolation
        self.patch_size = as_pair(config.patch_size)
        self.grid = config.grid
        width = config.hidden_size
        self.projection = nn.Conv2d(config.num_channels, width, kernel_size=self.patch_size, stride=self.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.position_embeddings = None
        if config.position_embedding == "learned":
            self.position_embeddings = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1], width))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def resized_positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embedding (1, N, C), interpolated if the grid is not the configured one."""
        assert self.position_embeddings is not None
        return resized_positions(self.position_embeddings, self.grid, grid, self.interpolation)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens (B, 1 + N, C) and the patch grid of images (B, channels, height, width)."""
        grid = patch_grid(pixel_values, self.num_channels, self.patch_size)
        patches = self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)
        if self.position_embeddings is not None:
            patches = patches + self.resized_positions(grid)
        # The class token has neither position nor dropout, as in the original.
        return torch.cat([self.class_token.expand(patches.shape[0], -1, -1), self.dropout(patches)], 1), grid


class SparsePriorConvitGatedAttention(SparsePriorAttention):
    """Gated positional self-attention (d'Ascoli et al. 2021, section 3), which no prior changes.

    With g = sigmoid(gate) a head's weights are (1 - g) softmax(Q K^T / sqrt(D)) + g softmax(u . r). r are columns, rows
    and squared distance from query to key, and u are a head's three learned numbers, the weight of `pos_proj`.
    """

    takes_prior = False
    UNIT_AXES: UnitAxes = {
        **SparsePriorAttention.UNIT_AXES,
        **dict.fromkeys(("pos_proj.weight", "pos_proj.bias", "gate"), ((HEADS,),)),
    }

    def __init__(self, config: SparsePriorConvitConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.layer_priors[layer_idx],
            layer_idx=layer_idx,
            biases=Biases(*[config.qkv_bias] * 3),
            attention_dropout=config.attention_probs_dropout_prob,
            sizes=config.layers[layer_idx],
        )
        self.locality_strength = config.locality_strength
        self.pos_proj = nn.Linear(3, self.num_heads)
        self.gate = nn.Parameter(torch.empty(self.num_heads))

    def local_weights(self) -> Tensor:
        """What the weight of `pos_proj` (H, 3) starts at: each head looks at one place of a square around the query.

        Of H heads floor(sqrt(H))^2 have such a place, and the others keep the random numbers that they have.
        """
        side = math.isqrt(self.num_heads)
        weights = self.pos_proj.weight.detach().clone()
        steps = torch.arange(side, dtype=weights.dtype, device=weights.device) - (side - 1) / 2
        places = torch.stack([steps.repeat_interleave(side), steps.repeat(side)], 1)
        weights[: side**2] = torch.cat([2 * places, -torch.ones_like(places[:, :1])], 1)
        return self.locality_strength * weights

    def position_weights(self, plan: AttentionPlan, along: str = "") -> Tensor:
        """softmax(u . r) over the keys, (H, N, N); `along` "rows" or "columns": of one column or one row of the grid.

        u . r is a sum of two terms, one of the rows and one of the columns. So the softmax over a grid is the product
        of the softmax over its rows and that over its columns.
        """
        weight = self.pos_proj.weight
        steps = plan_table(plan, f"relative_steps {along}".strip(), weight.device)
        logits = self.pos_proj(steps.to(weight.dtype)).permute(2, 0, 1)
        return torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)

    def written_out(self, q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
        """The weights (B, H, N, N), in float32 at least."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        scale = self.head_dim**-0.5 if self.logit_scale is None else self.logit_scale
        content = torch.softmax((q.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2), -1)
        gate = torch.sigmoid(self.gate.to(dtype)).view(-1, 1, 1)
        weights = (1 - gate) * content + gate * self.position_weights(plan).to(dtype)
        return weights / weights.sum(-1, keepdim=True)

    def moved_values(self, v: Tensor, plan: AttentionPlan) -> Tensor:
        """softmax(u . r) V, (B, H, N, D), along the columns and then along the rows of the grid."""
        rows, columns = (self.position_weights(plan, along).to(v.dtype) for along in ("rows", "columns"))
        maps = v.unflatten(2, plan.grid)
        moved = (rows @ maps.flatten(3)).unflatten(3, maps.shape[3:])
        return (columns.unsqueeze(1) @ moved).flatten(2, 3)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int = 0,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of the patches.

        Args:
            hidden_states: (B, N, C).
            grid: (height, width) of the patches.
            num_prefix_tokens: 0.
            options: backend "reference" writes the weights out, as is also done where they are returned or have
                dropout.

        Returns:
            (B, N, C), and the weights (B, H, N, N) or None.
        """
        plan = self.plan(grid)
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.attention_dropout if self.training else 0.0
        weights = None
        if options.backend == "reference" or options.output_attentions or dropout:
            weights = F.dropout(self.written_out(q, k, plan), dropout)
            out = (weights @ v.to(weights.dtype)).to(v.dtype)
        else:
            gate = torch.sigmoid(self.gate).to(v.dtype).view(-1, 1, 1)
            out = (1 - gate) * F.scaled_dot_product_attention(
                q, k, v, scale=self.logit_scale
            ) + gate * self.moved_values(v, plan)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return out, weights.to(q.dtype) if weights is not None and options.output_attentions else None


class SparsePriorConvitLayer(CheckpointedLayer):
    """A pre-norm block: gated positional attention, or attention with the prior; then the MLP."""

    def __init__(self, config: SparsePriorConvitConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        is_gated = layer_idx < config.num_local_layers
        prior = config.layer_priors[layer_idx]
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        if is_gated:
            self.attention: SparsePriorAttention = SparsePriorConvitGatedAttention(config, layer_idx)
        else:
            self.attention = SparsePriorAttention(
                width,
                config.num_attention_heads,
                prior,
                layer_idx=layer_idx,
                biases=Biases(*[config.qkv_bias] * 3),
                attention_dropout=config.attention_probs_dropout_prob,
                sizes=config.layers[layer_idx],
            )
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = MLP(width, config.layers[layer_idx].mlp_width, config.hidden_act, True, prior["extras"])
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = DropPath(config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1))

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens (B, T, C) after the block, and the attention weights (B, H, T, T) if they are wanted.

        To a gated layer the patches come in raster order.
        """
        tokens = self.layernorm_before(hidden_states)
        out, weights = self.attention(tokens, grid, num_prefix_tokens, options)
        hidden_states = hidden_states + self.drop_path(self.dropout(out))
        out = self.mlp(self.layernorm_after(hidden_states), grid, num_prefix_tokens)
        return hidden_states + self.drop_path(self.dropout(out)), weights


class SparsePriorConvitPreTrainedModel(BasePreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorConvit class."""

    config_class = SparsePriorConvitConfig
    config: SparsePriorConvitConfig
    base_model_prefix = "convit"
    _no_split_modules = ["SparsePriorConvitEmbeddings", "SparsePriorConvitLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SparsePriorConvitEmbeddings):
            for parameter in module._parameters.values():
                if parameter is not None:
                    init.trunc_normal_(parameter, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, SparsePriorConvitGatedAttention):
            # A convolution at the start: each head moves the patches by its place (d'Ascoli et al. 2021, section 3).
            init.ones_(module.gate)
            init.eye_(module.v_proj.weight)
            init.copy_(module.pos_proj.weight, module.local_weights())
        else:
            super()._init_weights(module)

    def resized_weights(self, config: BaseConfig) -> dict[str, Tensor]:
        """The position embedding, interpolated to the grid."""
        embeddings = self.base_model.embeddings
        if embeddings.position_embeddings is None:
            return {}
        return {"embeddings.position_embeddings": embeddings.resized_positions(config.grid)}


def _in_raster(tokens: Tensor, plan: AttentionPlan | None) -> Tensor:
    """Tokens (B, T, C) in raster order, from the layout of a plan if there is one."""
    return tokens if plan is None else from_layout(plan, tokens.unsqueeze(1)).squeeze(1)


class SparsePriorConvitModel(SparsePriorConvitPreTrainedModel):
    """The bare transformer.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig.from_preset("convit_tiny", prior="fibottention"))
    ```
    """

    def __init__(self, config: SparsePriorConvitConfig) -> None:
        super().__init__(config)
        self.embeddings = SparsePriorConvitEmbeddings(config)
        self.layers = nn.ModuleList(SparsePriorConvitLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.draws = DrawCount.of(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The patch projection."""
        return self.embeddings.projection

    def encode(
        self, pixel_values: Tensor, output_attentions: bool, output_hidden_states: bool
    ) -> tuple[Tensor, tuple[int, int], list[Tensor], list[Tensor]]:
        """Embedding and blocks, without the last norm: tokens (B, T, C), grid, hidden states of the embedding and after
        each layer if they are wanted, and attentions. The class token is in those from the first plain layer on.
        """
        tokens, grid = self.embeddings(pixel_values)
        class_tokens, hidden_states = tokens[:, :1], tokens[:, 1:]
        states: list[Tensor] = [hidden_states]
        attentions: list[Tensor] = []
        options, plan = call_options(self.config, self.draws, output_attentions), None
        for index, layer in enumerate(self.layers):
            if index == self.config.num_local_layers:
                hidden_states = torch.cat([class_tokens, hidden_states], 1)
                if (layout := self.config.layout) != RASTER:
                    options = options._replace(layout=layout)
                    plan = layer.attention.plan(grid, 1, layout=layout)  # type: ignore[union-attr, operator]
                    hidden_states = to_layout(plan, hidden_states.unsqueeze(1)).squeeze(1)
            prefix = int(index >= self.config.num_local_layers)
            hidden_states, weights = layer(hidden_states, grid, prefix, options)
            if output_hidden_states:
                states.append(_in_raster(hidden_states, plan))
            if weights is not None:
                attentions.append(weights if plan is None else weights_from_layout(plan, weights))
        last = states[-1] if output_hidden_states else _in_raster(hidden_states, plan)
        return last, grid, states, attentions

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> BaseModelOutputWithPooling | tuple:
        """Encode images.

        Args:
            pixel_values: (B, channels, height, width), sides multiples of the patch size.
            output_attentions: also return the weights of every layer, (B, H, N, N) of the gated ones and
                (B, H, 1 + N, 1 + N) of the plain ones.
            output_hidden_states: also return the L + 1 hidden states, (B, N, C) of the embedding and the gated layers
                and (B, 1 + N, C) of the plain ones.
            return_dict: False for a tuple.
            keywords: of transformers' forwards, as in `check_keywords`.

        Returns:
            last_hidden_state (B, 1 + N, C) after the last norm; pooler_output (B, C), the class token or the average of
            the patch tokens.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        hidden_states, _, states, attentions = self.encode(pixel_values, output_attentions, output_hidden_states)
        last = self.layernorm(hidden_states)
        output = BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=last[:, 0] if self.config.pooling == "class_token" else last[:, 1:].mean(1),
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorConvitForImageClassification(SparsePriorConvitPreTrainedModel):
    """SparsePriorConvit with a linear classifier."""

    UNIT_AXES: UnitAxes = {"classifier.weight": ((), (WIDTH,)), "classifier.bias": ()}

    def __init__(self, config: SparsePriorConvitConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.convit = SparsePriorConvitModel(config)
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
    ) -> ImageClassifierOutput | tuple:
        """Classify images.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            output_attentions, output_hidden_states, return_dict, keywords: as in `SparsePriorConvitModel`.

        Returns:
            logits (B, num_labels), with the loss if labels are given.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        encoded = self.convit(pixel_values, output_attentions, output_hidden_states, True, **encoder_keywords(keywords))
        logits = self.classifier(encoded.pooler_output)
        output = ImageClassifierOutput(
            loss=None if labels is None else mean_loss(self, labels, logits, keywords),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorConvitBackbone(FeatureBackbone, SparsePriorConvitModel):
    """SparsePriorConvit as a feature extractor for dense prediction."""

    def __init__(self, config: SparsePriorConvitConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.map_resampling = make_resampling(config, config.hidden_size)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **keywords: Any,
    ) -> BackboneOutput | tuple:
        """Feature maps (B, C, height, width) at `config.out_features`, of the patches or, with `map_scales`, of other
        strides; without `reshape_hidden_states` tokens (B, T, C), among which there is a class token from the first
        plain layer on. "stem" is the embedding, "stage3" the output of the third layer. For maps, images of any size
        are padded to whole patches with zeros at bottom and right.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        pixel_values = whole_patches(self, pixel_values)
        _, grid, states, attentions = self.encode(pixel_values, output_attentions, True)
        maps = []
        for number, (stage, state) in enumerate(zip(self.stage_names, states, strict=True)):
            if stage not in self.out_features:
                continue
            if self.config.apply_layernorm:
                state = self.layernorm(state)
            if self.config.reshape_hidden_states:
                patches = state[:, int(number > self.config.num_local_layers) :]
                state = patches.transpose(1, 2).unflatten(2, grid)
            if self.map_resampling:
                state = self.map_resampling[stage](state)
            maps.append(state)
        output = BackboneOutput(
            feature_maps=tuple(maps),
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


register_family(
    Family(
        config_class=SparsePriorConvitConfig,
        models={
            "AutoModel": SparsePriorConvitModel,
            "AutoModelForImageClassification": SparsePriorConvitForImageClassification,
            "AutoBackbone": SparsePriorConvitBackbone,
        },
        title="SparsePriorConvit",
        architecture="ConViT",
        flops="hf_sparseprior.analysis.flops_convit:convit_flops",
        backbone_parts=("map_resampling",),
    )
)
