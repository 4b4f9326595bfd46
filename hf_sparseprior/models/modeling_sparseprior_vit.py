"""SparsePriorViT: ViT, DeiT, DeiT-III, DINO and LV-ViT backbones whose attention has a prior.

Parameter names are those of transformers' ViT (q_proj, k_proj, v_proj, o_proj, fc1, fc2), so LoRA configs carry over.

Shape letters: B batch, C hidden size, N patch tokens, P prefix tokens, T = P + N, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ModelOutput

from hf_sparseprior.attention.packing import Packing, is_packed, joined, read_images
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import DEFAULT_OPTIONS, CallOptions, from_layout, to_layout, weights_from_layout
from hf_sparseprior.attention.rotary import RotaryPositions, Rotation
from hf_sparseprior.base.extras import make_extras
from hf_sparseprior.base.families import Family, register_family
from hf_sparseprior.base.layer_sizes import WIDTH, UnitAxes
from hf_sparseprior.models.base_config import BaseConfig
from hf_sparseprior.models.base_model import (
    BasePreTrainedModel,
    DrawCount,
    call_options,
    check_keywords,
    encoder_keywords,
    mean_loss,
    output_options,
)
from hf_sparseprior.models.blocks import (
    MLP,
    CheckpointedLayer,
    ConvolutionStem,
    DropPath,
    LayerScale,
    Moves,
    masked_patches,
    patch_grid,
    resized_positions,
)
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig, as_pair
from hf_sparseprior.models.feature_maps import FeatureBackbone, make_resampling, whole_patches
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.layer import Biases, SparsePriorAttention
from hf_sparseprior.priors.prior import pruning_of
from hf_sparseprior.priors.token_pruning import ALL_TOKENS, TokenReduction, Tokens


@dataclass
class SparsePriorViTModelOutput(BaseModelOutputWithPooling):
    """Output of `SparsePriorViTModel`: that of transformers and, if the prior drops or merges tokens, which are left.

    token_ids: int64 (B, n), which patches of the grid the tokens of `last_hidden_state` after the prefix are, -1 for a
    token without a place in it; None: all patches. kept: (B, N), 1 for patches that are kept, 0 for patches that
    training treats as dropped. auxiliary_losses: losses of training, by name, weighted.
    token_mask: bool (B, T), which tokens an image has, if images have several sizes; all else is 0 where it has none.
    """

    token_ids: Tensor | None = None
    kept: Tensor | None = None
    auxiliary_losses: dict[str, Tensor] | None = None
    token_mask: Tensor | None = None


@dataclass
class SparsePriorViTImageClassifierOutput(ModelOutput):
    """Output of `SparsePriorViTForImageClassification`.

    loss: scalar, if labels are given, including the auxiliary losses. logits: (B, num_labels), with a distillation
    classifier the mean of both heads.
    class_logits, distillation_logits: (B, num_labels) of the two heads, with a distillation classifier.
    token_logits: (B, N, num_labels) of the patch tokens, with a token classifier.
    hidden_states: L + 1 of (B, T, C). attentions: L of (B, H, T, T).
    token_ids, kept, auxiliary_losses, token_mask: as in `SparsePriorViTModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    class_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    token_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    token_ids: Tensor | None = None
    kept: Tensor | None = None
    auxiliary_losses: dict[str, Tensor] | None = None
    token_mask: Tensor | None = None


class SparsePriorViTEmbeddings(nn.Module):
    """Stem, patch projection, prefix tokens and position embedding."""

    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("projection.weight", "projection.bias"), ((WIDTH,),)),
        **dict.fromkeys(
            ("class_token", "distillation_token", "register_tokens", "mask_token", "position_embeddings"),
            ((), (), (WIDTH,)),
        ),
    }

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_size = as_pair(config.patch_size)
        self.grid = config.grid
        channels, kernel = config.num_channels, self.patch_size
        self.stem: nn.Module = nn.Identity()
        if config.stem == "convolution":
            self.stem = ConvolutionStem(config.num_channels, config.stem_channels)
            channels, kernel = config.stem_channels, (kernel[0] // 2, kernel[1] // 2)
        self.projection = nn.Conv2d(channels, width, kernel_size=kernel, stride=kernel)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if config.use_class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, 1, width)) if config.use_distillation_token else None
        registers = config.num_register_tokens
        self.register_tokens = nn.Parameter(torch.empty(1, registers, width)) if registers else None
        # Positions of class and distillation token come first, then those of the patches in raster order.
        self.num_prefix_positions = 0
        if config.position_embedding_for_class_token:
            self.num_prefix_positions = int(config.use_class_token) + int(config.use_distillation_token)
        self.position_embeddings = None
        if config.position_embedding == "learned":
            positions = self.num_prefix_positions + self.grid[0] * self.grid[1]
            self.position_embeddings = nn.Parameter(torch.empty(1, positions, width))
        self.mask_token: nn.Parameter | None = None  # `SparsePriorViTModel` makes it
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def patch_positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embedding (1, N, C) of the patches, interpolated if the grid is not the configured one."""
        assert self.position_embeddings is not None
        positions = self.position_embeddings[:, self.num_prefix_positions :]
        return resized_positions(positions, self.grid, grid, self.config.interpolation)

    def resized_positions(self, grid: tuple[int, int]) -> Tensor:
        """The whole position embedding (1, prefix positions + N, C) for another grid."""
        assert self.position_embeddings is not None
        prefix = self.position_embeddings[:, : self.num_prefix_positions]
        return torch.cat([prefix, self.patch_positions(grid)], 1)

    def forward(
        self, pixel_values: Tensor, token_sources: Tensor | None = None, bool_masked_pos: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int]]:
        """Tokens (B, T, C) and the patch grid of images (B, channels, height, width).

        `token_sources` int64 (B, N): the image of the batch from which each patch is taken before it gets its position
        (MixToken; Jiang et al. 2021). `bool_masked_pos` (B, N): patches in whose place the mask token stands.
        """
        grid = patch_grid(pixel_values, self.config.num_channels, self.patch_size)
        pixel_values = pixel_values.to(self.projection.weight.dtype)
        patches = self.projection(self.stem(pixel_values)).flatten(2).transpose(1, 2)
        if token_sources is not None:
            if token_sources.shape != patches.shape[:2]:
                raise ValueError(
                    f"token_sources of shape {tuple(token_sources.shape)} must be (batch, patches), "
                    f"{tuple(patches.shape[:2])}"
                )
            patches = patches[token_sources, torch.arange(patches.shape[1], device=patches.device)]
        if bool_masked_pos is not None:
            patches = masked_patches(patches, bool_masked_pos, self.mask_token)
        prefix: list[Tensor] = [token for token in (self.class_token, self.distillation_token) if token is not None]
        if self.position_embeddings is not None:
            patches = patches + self.patch_positions(grid)
            if self.num_prefix_positions:
                prefix = [torch.cat(prefix, 1) + self.position_embeddings[:, : self.num_prefix_positions]]
        if self.register_tokens is not None:
            prefix.append(self.register_tokens)
        tokens = torch.cat([token.expand(patches.shape[0], -1, -1) for token in prefix] + [patches], 1)
        return self.dropout(tokens), grid


class SparsePriorViTLayer(CheckpointedLayer):
    """A pre-norm transformer block: attention with the prior, then the MLP."""

    def __init__(self, config: SparsePriorViTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        width, sizes, prior = config.hidden_size, config.layers[layer_idx], config.layer_priors[layer_idx]
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = SparsePriorAttention(
            width,
            config.num_attention_heads,
            prior,
            layer_idx=layer_idx,
            biases=Biases(config.qkv_bias, config.qkv_bias and config.key_bias, config.qkv_bias, config.proj_bias),
            attention_dropout=config.attention_probs_dropout_prob,
            sizes=sizes,
        )
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = MLP(width, sizes.mlp_width, config.hidden_act, config.mlp_bias, prior["extras"])
        scale = config.layerscale_value
        self.layerscale_attention = LayerScale(width, scale) if scale is not None else nn.Identity()
        self.layerscale_mlp = LayerScale(width, scale) if scale is not None else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.residual_scale = config.residual_scale
        self.drop_path = DropPath(config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1))

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int] | Packing,
        num_prefix_tokens: int,
        options: CallOptions = DEFAULT_OPTIONS,
        tokens: Tokens = ALL_TOKENS,
        kept: Tensor | None = None,
        reduction: TokenReduction | None = None,
    ) -> tuple[Tensor, Any, Tokens]:
        """A block.

        Args:
            hidden_states: (B, T, C); (1, total, C) of the images of a packing.
            grid: (height, width) of the patches, or the packing of images of several sizes.
            num_prefix_tokens: P.
            options: what is asked of attention.
            tokens: which patches the tokens are.
            kept: as `keep_mask` of `AttentionRequest`. Not in `options`, since checkpoints with use_reentrant=True see
                tensors that are arguments alone, and `kept` has a gradient.
            reduction: the module that drops or merges tokens between attention and MLP.

        Returns:
            The tokens, the attention weights (B, H, T, T) if they are wanted, of a packing for each grid, and which
            patches the tokens are.
        """
        output_attentions = options.output_attentions
        if tokens.token_ids is not None or kept is not None:
            options = tokens.options(options, kept)
        if reduction is not None:
            options = reduction.seen_by(options)
        out, weights, *keys = self.attention(self.layernorm_before(hidden_states), grid, num_prefix_tokens, options)
        branch = self.branch(out, self.layerscale_attention, grid, num_prefix_tokens)
        hidden_states = torch.add(hidden_states, branch, alpha=self.residual_scale)
        if reduction is not None:
            seen, number = keys[0] if keys else weights[:, :, 0], self.attention.layer_idx
            hidden_states, tokens = reduction(number, hidden_states, tokens, seen, grid, num_prefix_tokens)
        out = self.mlp(self.layernorm_after(hidden_states), grid, num_prefix_tokens)
        branch = self.branch(out, self.layerscale_mlp, grid, num_prefix_tokens)
        hidden_states = torch.add(hidden_states, branch, alpha=self.residual_scale)
        return hidden_states, weights if output_attentions else None, tokens

    def branch(self, out: Tensor, scale: nn.Module, grid: Any = None, num_prefix_tokens: int = 0) -> Tensor:
        """What a residual branch adds, after dropout, LayerScale and stochastic depth; arguments as of `DropPath`."""
        out = self.dropout(out)
        if not isinstance(scale, nn.Identity):  # calls that do nothing cost as much as norms of small images
            out = scale(out)
        return self.drop_path(out, grid, num_prefix_tokens) if self.drop_path.rate else out


class SparsePriorViTPreTrainedModel(BasePreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorViT class."""

    config_class = SparsePriorViTConfig
    config: SparsePriorViTConfig
    base_model_prefix = "vit"
    _no_split_modules = ["SparsePriorViTEmbeddings", "SparsePriorViTLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, SparsePriorViTEmbeddings):
            return super()._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name == "mask_token":
                init.zeros_(parameter)
            else:
                init.trunc_normal_(parameter, mean=0.0, std=self.config.initializer_range)

    def resized_weights(self, config: BaseConfig) -> dict[str, Tensor]:
        """The position embedding, interpolated to the grid."""
        embeddings = self.base_model.embeddings
        if embeddings.position_embeddings is None:
            return {}
        return {"embeddings.position_embeddings": embeddings.resized_positions(config.grid)}


class SparsePriorViTModel(SparsePriorViTPreTrainedModel):
    """The bare transformer.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorViTModel(sp.SparsePriorViTConfig(prior="fibottention+violin"))
    ```

    add_pooling_layer, use_mask_token: as stock ViT: whether there is a `pooler_output`, and a token for the patches of
    `bool_masked_pos`.

    embeddings_class, layer_class: classes that other families replace by their own.
    """

    embeddings_class: type[SparsePriorViTEmbeddings] = SparsePriorViTEmbeddings
    layer_class: type[SparsePriorViTLayer] = SparsePriorViTLayer

    def __init__(
        self, config: SparsePriorViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        super().__init__(config)
        self.add_pooling_layer = add_pooling_layer
        self.embeddings = self.embeddings_class(config)
        if use_mask_token:
            self.embeddings.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_positions: RotaryPositions | None = None
        if config.position_embedding == "rotary":
            self.rotary_positions = RotaryPositions.of(config)
        self.draws = DrawCount.of(config)
        extras = config.layer_priors[0]["extras"]  # of which those of the model are the same in all layers
        self.token_pruning = make_extras(extras, "model", config.num_hidden_layers, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The patch projection."""
        return self.embeddings.projection

    def encode(
        self,
        pixel_values: Tensor,
        output_attentions: bool,
        output_hidden_states: bool,
        token_sources: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
    ) -> tuple[Tensor, tuple[int, int], tuple[Tensor, ...] | None, tuple[Tensor, ...] | None, Tokens]:
        """Embeddings and blocks, without the last norm: tokens (B, T, C), grid, hidden states, attentions, and which
        tokens are left.
        """
        masked = () if bool_masked_pos is None else (bool_masked_pos,)  # which embeddings of clips have not
        hidden_states, grid = self.embeddings(pixel_values, token_sources, *masked)
        return self.encode_tokens(hidden_states, grid, output_attentions, output_hidden_states)

    def encode_tokens(
        self,
        hidden_states: Tensor,
        grid: Any,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> tuple[Tensor, Any, tuple[Tensor, ...] | None, tuple[Any, ...] | None, Tokens]:
        """The blocks: as `encode`, from embedded tokens, whose grid may be a `Packing`."""
        prefix, layout, tokens = self.config.num_prefix_tokens, self.config.layout, Tokens()
        states, attentions = [hidden_states], []
        moves = self.moves(hidden_states, grid)
        if moves is not None:
            hidden_states = moves.patches(hidden_states)
        options = call_options(self.config, self.draws, output_attentions, layout)
        if self.rotary_positions is not None:
            options = options._replace(rotations=self.rotations(hidden_states, grid, moves))
        for index, layer in enumerate(self.layers):
            reduction = None
            if (module := self.active_pruning()) is not None:
                hidden_states, tokens = module.before(index, hidden_states, tokens, grid, prefix)
                reduction = module if module.within(index, grid) else None
            if (kept := tokens.kept()) is not None:
                kept = F.pad(kept, (prefix, 0), value=1.0)
            hidden_states, weights, tokens = layer(hidden_states, grid, prefix, options, tokens, kept, reduction)
            if output_hidden_states:
                states.append(hidden_states if moves is None else moves.patches(hidden_states, back=True))
            if weights is not None:
                attentions.append(weights if moves is None else moves.weights_back(weights))
        if moves is not None:
            hidden_states = states[-1] if output_hidden_states else moves.patches(hidden_states, back=True)
        return (
            hidden_states,
            grid,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
            tokens,
        )

    def rotations(self, tokens: Tensor, grid: Any, moves: Moves | None) -> list[Rotation]:
        """The rotary positions of each grid, in the order in which layers have the tokens."""
        assert self.rotary_positions is not None
        grids = grid.grids if isinstance(grid, Packing) else [grid]
        rotations = self.rotary_positions(grids, self.config.num_prefix_tokens, tokens)
        if moves is not None:
            rotations = [
                Rotation(*(self.move_patches(part[None], plan)[0] for part in rotation))
                for rotation, plan in zip(rotations, moves.plans, strict=True)
            ]
        return rotations

    def moves(self, tokens: Tensor, grid: Any) -> Moves | None:
        """How patches get into the layout that the layers have, and back; None: they stay as they are."""
        grids = grid.grids if isinstance(grid, Packing) else [grid]
        plans: list[Any] = [self.moving_plan(tokens, shape) for shape in grids]
        return None if plans[0] is None else Moves(self, plans, grid)

    def moving_plan(self, tokens: Tensor, grid: tuple[int, int]) -> AttentionPlan | None:
        """The plan in whose layout the layers have the embedding's tokens (B, T, C); None: they stay as they are."""
        layout = self.config.layout
        if layout == RASTER:
            return None
        first: SparsePriorViTLayer = self.layers[0]  # type: ignore[assignment]
        return first.attention.plan(grid, self.config.num_prefix_tokens, layout=layout)

    def move_patches(self, tokens: Tensor, plan: AttentionPlan, back: bool = False) -> Tensor:
        """Tokens (B, T, C) with their patches moved from raster order into the layout of the plan, or back."""
        return (from_layout if back else to_layout)(plan, tokens.unsqueeze(1)).squeeze(1)

    def move_weights_back(self, weights: Tensor, plan: AttentionPlan) -> Tensor:
        """Attention weights (B, H, T, T) of patches in the layout of the plan, in the order of the embedding."""
        return weights_from_layout(plan, weights)

    def active_pruning(self) -> TokenReduction | None:
        """The prior's token pruning or merging; None if there is none."""
        modules: list[TokenReduction] = list(self.token_pruning.values())  # type: ignore[arg-type]
        return modules[0] if modules else None

    def forward(
        self,
        pixel_values: Tensor | Sequence[Tensor],
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_sources: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        pixel_mask: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        **keywords: Any,
    ) -> SparsePriorViTModelOutput | tuple:
        """Encode images.

        Args:
            pixel_values: (B, channels, height, width), sides multiples of the patch size. Images of several sizes: a
                list of them, or as `packing.read_images` says.
            output_attentions: also return the weights (B, H, T, T) of every layer.
            output_hidden_states: also return the L + 1 hidden states (B, T, C). With token pruning or merging T differs
                between layers, in weights and hidden states.
            return_dict: False for a tuple.
            keywords: of transformers' forwards, as in `check_keywords`.
            token_sources: int64 (B, N), the image of the batch that each patch is taken from (MixToken); None: its own.
            pixel_attention_mask, spatial_shapes, pixel_mask: of images of several sizes, as in `packing.read_images`.
            bool_masked_pos: (B, N), patches in whose place the mask token stands.

        Returns:
            last_hidden_state (B, T, C) after the last norm; pooler_output (B, C), the class token or the average of
            the patches (those that are kept), or (B, 2C), both of them. Of images of several sizes T is that of the
            largest, the rest is 0, and `token_mask` says which tokens there are.

        Raises:
            ValueError: for images that do not fit, and for several sizes with a prior that drops or merges tokens.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        sizes = {
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
            "pixel_mask": pixel_mask,
        }
        if is_packed(pixel_values, **sizes):
            if token_sources is not None or bool_masked_pos is not None:
                raise ValueError("token_sources and bool_masked_pos are of images of one size, and these have several")
            packed = self.encode_packed(pixel_values, sizes, output_attentions, output_hidden_states)
            return packed if return_dict else packed.to_tuple()
        hidden_states, _, states, attentions, tokens = self.encode(
            cast(Tensor, pixel_values), output_attentions, output_hidden_states, token_sources, bool_masked_pos
        )
        last, pruning, prefix = self.layernorm(hidden_states), self.active_pruning(), self.config.num_prefix_tokens
        output = SparsePriorViTModelOutput(
            last_hidden_state=last,
            pooler_output=self.pool(last, tokens.pooling_weights(prefix)) if self.add_pooling_layer else None,
            hidden_states=states,
            attentions=attentions,
            token_ids=tokens.token_ids,
            kept=tokens.kept(),
            auxiliary_losses=(pruning.auxiliary_losses(tokens) or None) if pruning is not None else None,
        )
        return output if return_dict else output.to_tuple()

    def encode_packed(
        self,
        pixel_values: Any,
        sizes: dict[str, Tensor | None],
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> SparsePriorViTModelOutput:
        """`forward` for images of several sizes, in one sequence."""
        if (pruning := self.active_pruning()) is not None:
            raise ValueError(
                f"prior {self.config.prior_name!r} {pruning.verb} tokens, as images of several sizes cannot; give "
                "images of one size"
            )
        config, prefix = self.config, self.config.num_prefix_tokens
        images, packing = read_images(pixel_values, config.num_channels, as_pair(config.patch_size), **sizes)
        tokens = joined([self.embeddings(group)[0] for group in images])
        hidden_states, _, states, attentions, _ = self.encode_tokens(
            tokens, packing, output_attentions, output_hidden_states
        )
        last = self.layernorm(hidden_states)
        pooled = packing.in_batch_order([self.pool(part) for part in packing.parts(last, prefix)])
        return SparsePriorViTModelOutput(
            last_hidden_state=packing.padded_tokens(last, prefix),
            pooler_output=pooled if self.add_pooling_layer else None,
            hidden_states=states and tuple([packing.padded_tokens(state, prefix) for state in states]),
            attentions=attentions and tuple([packing.padded(weights, 2, 3) for weights in attentions]),
            token_mask=packing.token_mask(prefix, tokens.device),
        )

    def pool(self, last_hidden_state: Tensor, weights: Tensor | None = None) -> Tensor:
        """Pool (B, T, C) to (B, C) or, with "class_token_and_mean", (B, 2C); in means tokens have `weights` (B, n)."""
        class_token, patches = last_hidden_state[:, 0], last_hidden_state[:, self.config.num_prefix_tokens :]
        if self.config.pooling == "class_token":
            return class_token
        if weights is None:
            mean = patches.mean(1)
        else:
            weights = weights.to(patches.dtype).unsqueeze(-1)
            mean = (patches * weights).sum(1) / weights.sum(1).clamp_min(1.0)
        return mean if self.config.pooling == "mean" else torch.cat([class_token, mean], 1)


class SparsePriorViTForImageClassification(SparsePriorViTPreTrainedModel):
    """SparsePriorViT with a linear classifier. It may have a second one on the distillation token (DeiT) or on each
    patch token (LV-ViT).

    model_class: the transformer, which other families replace by their own.
    """

    UNIT_AXES: UnitAxes = {"*classifier.weight": ((), (WIDTH,)), "*classifier.bias": ()}

    model_class: type[SparsePriorViTModel] = SparsePriorViTModel

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = self.model_class(config)

        def head(width: int) -> nn.Module:
            return nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()

        self.classifier = head(config.pooled_size)
        distills = config.use_distillation_token and config.use_distillation_classifier
        self.distillation_classifier = head(config.hidden_size) if distills else None
        labels_tokens = config.token_classifier and config.num_labels
        self.token_classifier = head(config.hidden_size) if labels_tokens else None
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor | Sequence[Tensor],
        labels: Tensor | None = None,
        distillation_targets: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_sources: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        pixel_mask: Tensor | None = None,
        **keywords: Any,
    ) -> SparsePriorViTImageClassifierOutput | tuple:
        """Classify images.

        (The Trainer expects every argument with "label" in its name in each batch.)

        Args:
            pixel_values: (B, channels, height, width), or images of several sizes, as in `SparsePriorViTModel`.
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            distillation_targets: (B,) a teacher's decisions for the distillation head; default: `labels`.
            output_attentions, output_hidden_states, return_dict, token_sources, pixel_attention_mask, spatial_shapes,
            pixel_mask, keywords: as in `SparsePriorViTModel`, and `num_items_in_batch`, over which the loss is a sum.

        Returns:
            logits (B, num_labels), with the loss if labels are given. With a distillation classifier loss and logits
            are the means of both heads' (DeiT's hard distillation). With a token classifier there are also
            `token_logits` (B, N, num_labels). In training the logits are the classifier's; in evaluation the largest of
            the tokens' are added (`token_logits_weight`). The tokens' loss is `training.token_label_loss`.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        sizes = {
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
            "pixel_mask": pixel_mask,
        }
        encoded = self.vit(
            pixel_values,
            *(output_attentions, output_hidden_states, True),
            token_sources=token_sources,
            **{name: value for name, value in sizes.items() if value is not None},  # which a model of clips has not
            **encoder_keywords(keywords),
        )
        logits = self.classifier(encoded.pooler_output)
        class_logits = distillation_logits = token_logits = None
        if self.token_classifier is not None:
            token_logits = self.token_classifier(encoded.last_hidden_state[:, self.config.num_prefix_tokens :])
            if (mask := encoded.token_mask) is not None:
                present = mask[:, self.config.num_prefix_tokens :, None]
                token_logits = token_logits.masked_fill(~present, -math.inf)
            if not self.training and self.config.token_logits_weight:
                logits = logits + self.config.token_logits_weight * token_logits.amax(1)
            if mask is not None:
                token_logits = token_logits.masked_fill(~present, 0.0)
        if self.distillation_classifier is not None:
            class_logits, distillation_logits = logits, self.distillation_classifier(encoded.last_hidden_state[:, 1])
            logits = (class_logits + distillation_logits) / 2
        loss = None
        if labels is not None:
            loss = mean_loss(self, labels, logits if class_logits is None else class_logits, keywords)
            if distillation_logits is not None:
                targets = labels if distillation_targets is None else distillation_targets
                loss = (loss + mean_loss(self, targets, distillation_logits, keywords)) / 2
            for auxiliary in (encoded.auxiliary_losses or {}).values():
                loss = loss + auxiliary
        output = SparsePriorViTImageClassifierOutput(
            loss=loss,
            logits=logits,
            class_logits=class_logits,
            distillation_logits=distillation_logits,
            token_logits=token_logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            token_ids=encoded.token_ids,
            kept=encoded.kept,
            auxiliary_losses=encoded.auxiliary_losses,
            token_mask=encoded.token_mask,
        )
        return output if return_dict else output.to_tuple()


class SparsePriorViTBackbone(FeatureBackbone, SparsePriorViTModel):
    """SparsePriorViT as a feature extractor for dense prediction (UperNet, DETR, Mask2Former, ...).

    Load weights with the class's own `from_pretrained`; `AutoBackbone.from_config` builds it from a config.

    Raises:
        ValueError: for a prior that drops or merges tokens.
    """

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__(config)
        if (pruning := pruning_of(config.layer_priors[0])) is not None:
            raise ValueError(
                f"prior {config.prior_name!r} {pruning[1].verb} tokens, and the feature maps of a backbone need all of "
                "them"
            )
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
        strides; tokens (B, T, C) without `reshape_hidden_states`. "stem" is the embedding, "stage3" the output of the
        third layer. For maps, images of any size are padded to whole patches with zeros at bottom and right.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        check_keywords(self, pixel_values, keywords)
        pixel_values = whole_patches(self, pixel_values)
        _, grid, states, attentions, _ = self.encode(pixel_values, output_attentions, True)
        assert states is not None
        maps = []
        for stage, state in zip(self.stage_names, states, strict=True):
            if stage not in self.out_features:
                continue
            if self.config.apply_layernorm:
                state = self.layernorm(state)
            if self.config.reshape_hidden_states:
                state = state[:, self.config.num_prefix_tokens :]
                state = state.transpose(1, 2).reshape(state.shape[0], -1, *grid)
            if self.map_resampling:
                state = self.map_resampling[stage](state)
            maps.append(state)
        output = BackboneOutput(
            feature_maps=tuple(maps), hidden_states=states if output_hidden_states else None, attentions=attentions
        )
        return output if return_dict else output.to_tuple()


register_family(
    Family(
        config_class=SparsePriorViTConfig,
        models={
            "AutoModel": SparsePriorViTModel,
            "AutoModelForImageClassification": SparsePriorViTForImageClassification,
            "AutoBackbone": SparsePriorViTBackbone,
        },
        title="SparsePriorViT",
        architecture="ViT",
        flops="hf_sparseprior.analysis.flops:vit_flops",
        backbone_parts=("map_resampling",),
    )
)
