"""SparsePriorViT: ViT, DeiT, DeiT-III, DINO and LV-ViT backbones whose attention has a prior.

Parameter names are those of transformers' ViT (q_proj, k_proj, v_proj, o_proj, fc1, fc2), so LoRA configs carry over.

Shape letters: B batch, C hidden size, N patch tokens, P prefix tokens, T = P + N, H heads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ModelOutput

from .attention import SparsePriorAttention
from .configuration_sparseprior_vit import SparsePriorViTConfig, as_pair
from .decay import Decay
from .extras import PriorModule, make_extras
from .families import Family, register_family
from .hub import complete_folder
from .loading import check_source, load_pretrained, without_code
from .prior import pruning_of
from .token_pruning import EViT, TokenPruning, Tokens


@dataclass
class SparsePriorViTModelOutput(BaseModelOutputWithPooling):
    """Output of `SparsePriorViTModel`: that of transformers and, if the prior prunes tokens, which tokens are left.

    token_ids: int64 (B, n), which patches of the grid the tokens of `last_hidden_state` after the prefix are, -1 for a
    token without a place in it; None: all patches. kept: (B, N), 1 for patches that are kept, 0 for patches that
    training treats as dropped. auxiliary_losses: losses of training, by name, weighted.
    """

    token_ids: Tensor | None = None
    kept: Tensor | None = None
    auxiliary_losses: dict[str, Tensor] | None = None


@dataclass
class SparsePriorViTImageClassifierOutput(ModelOutput):
    """Output of `SparsePriorViTForImageClassification`.

    loss: scalar, if labels are given, including the auxiliary losses. logits: (B, num_labels), with a distillation
    classifier the mean of both heads.
    class_logits, distillation_logits: (B, num_labels) of the two heads, with a distillation classifier.
    token_logits: (B, N, num_labels) of the patch tokens, with a token classifier.
    hidden_states: L + 1 of (B, T, C). attentions: L of (B, H, T, T).
    token_ids, kept, auxiliary_losses: as in `SparsePriorViTModelOutput`.
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


class SparsePriorViTStem(nn.Module):
    """Three convolutions with batch norm and ReLU before the patch projection (LV-ViT), which halve the sides.

    If they are frozen, the statistics of their batch norms stay too.
    """

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__()
        width = config.stem_channels
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(config.num_channels, width, kernel_size=7, stride=2, padding=3, bias=False),
                nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
                nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in self.convolutions)

    def train(self, mode: bool = True) -> SparsePriorViTStem:
        """As in torch, but the norms of a frozen stem stay in evaluation mode."""
        super().train(mode)
        for norm in self.norms:
            norm.train(mode and all(parameter.requires_grad for parameter in norm.parameters()))
        return self

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn (B, channels, height, width) into (B, stem_channels, height / 2, width / 2)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            pixel_values = F.relu(norm(convolution(pixel_values)))
        return pixel_values


class SparsePriorViTEmbeddings(nn.Module):
    """Stem, patch projection, prefix tokens and position embedding."""

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_size = as_pair(config.patch_size)
        self.grid = config.grid
        channels, kernel = config.num_channels, self.patch_size
        self.stem: nn.Module = nn.Identity()
        if config.stem == "convolution":
            self.stem = SparsePriorViTStem(config)
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
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def patch_positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embedding (1, N, C) of the patches, interpolated if the grid is not the configured one."""
        assert self.position_embeddings is not None
        positions = self.position_embeddings[:, self.num_prefix_positions :]
        if grid == self.grid:
            return positions
        map_ = positions.reshape(1, *self.grid, -1).permute(0, 3, 1, 2)
        # Not in half precision, which would change the embedding visibly.
        precise = map_.to(torch.promote_types(map_.dtype, torch.float32))
        resized = F.interpolate(precise, size=grid, mode=self.config.interpolation, align_corners=False)
        return resized.to(positions.dtype).flatten(2).transpose(1, 2)

    def resized_positions(self, grid: tuple[int, int]) -> Tensor:
        """The whole position embedding (1, prefix positions + N, C) for another grid."""
        assert self.position_embeddings is not None
        prefix = self.position_embeddings[:, : self.num_prefix_positions]
        return torch.cat([prefix, self.patch_positions(grid)], 1)

    def forward(self, pixel_values: Tensor, token_sources: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Tokens (B, T, C) and the patch grid of images (B, channels, height, width).

        `token_sources` int64 (B, N): the image of the batch from which each patch is taken before it gets its position
        (MixToken; Jiang et al. 2021).
        """
        channels, patch = self.config.num_channels, self.patch_size
        if pixel_values.dim() != 4 or pixel_values.shape[1] != channels:
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)} must be (batch, {channels}, height, width)"
            )
        height, width = pixel_values.shape[2:]
        if height % patch[0] or width % patch[1] or not height or not width:
            raise ValueError(
                f"image of {height}x{width} pixels must be a multiple of the {patch[0]}x{patch[1]} patch in both sides"
            )
        grid = (height // patch[0], width // patch[1])
        pixel_values = pixel_values.to(self.projection.weight.dtype)
        patches = self.projection(self.stem(pixel_values)).flatten(2).transpose(1, 2)
        if token_sources is not None:
            if token_sources.shape != patches.shape[:2]:
                raise ValueError(
                    f"token_sources of shape {tuple(token_sources.shape)} must be (batch, patches), "
                    f"{tuple(patches.shape[:2])}"
                )
            patches = patches[token_sources, torch.arange(patches.shape[1], device=patches.device)]
        prefix: list[Tensor] = [token for token in (self.class_token, self.distillation_token) if token is not None]
        if self.position_embeddings is not None:
            patches = patches + self.patch_positions(grid)
            if self.num_prefix_positions:
                prefix = [torch.cat(prefix, 1) + self.position_embeddings[:, : self.num_prefix_positions]]
        if self.register_tokens is not None:
            prefix.append(self.register_tokens)
        tokens = torch.cat([token.expand(patches.shape[0], -1, -1) for token in prefix] + [patches], 1)
        return self.dropout(tokens), grid


class SparsePriorViTMLP(nn.Module):
    """Two linear layers with an activation and the prior's extras for the MLP between them."""

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.locality = make_extras(config.prior["extras"], "MLP", config.intermediate_size)

    def forward(self, hidden_states: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
        """Turn (B, T, C) into (B, T, C)."""
        hidden_states = self.activation(self.fc1(hidden_states))
        for branch in self.locality.values():
            hidden_states = branch(hidden_states, grid, num_prefix_tokens)
        return self.fc2(hidden_states)


class SparsePriorViTLayerScale(nn.Module):
    """A learned factor per channel (DeiT-III)."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.value = value
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Turn (..., C) into (..., C)."""
        return hidden_states * self.scale


class SparsePriorViTDropPath(nn.Module):
    """Drops a residual branch for whole samples in training and scales the others up (stochastic depth)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Turn (B, ...) into (B, ...)."""
        if not self.training or self.rate == 0.0:
            return branch
        keep = 1.0 - self.rate
        shape = (branch.shape[0], *(1,) * (branch.dim() - 1))
        dtype = torch.promote_types(branch.dtype, torch.float32)
        kept = torch.empty(shape, dtype=dtype, device=branch.device).bernoulli_(keep)
        return branch * (kept / (keep or 1.0)).to(branch.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows of the layer."""
        return f"rate={self.rate:.3f}"


class SparsePriorViTLayer(GradientCheckpointingLayer):
    """A pre-norm transformer block: attention with the prior, then the MLP."""

    def __init__(self, config: SparsePriorViTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layernorm_before = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = SparsePriorAttention(
            width,
            config.num_attention_heads,
            config.prior,
            layer_idx=layer_idx,
            qkv_bias=config.qkv_bias,
            proj_bias=config.proj_bias,
            attention_dropout=config.attention_probs_dropout_prob,
        )
        self.layernorm_after = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = SparsePriorViTMLP(config)
        scale = config.layerscale_value
        self.layerscale_attention = SparsePriorViTLayerScale(width, scale) if scale is not None else nn.Identity()
        self.layerscale_mlp = SparsePriorViTLayerScale(width, scale) if scale is not None else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.residual_scale = config.residual_scale
        self.drop_path = SparsePriorViTDropPath(
            config.drop_path_rate * layer_idx / max(1, config.num_hidden_layers - 1)
        )

    def forward(
        self,
        hidden_states: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
        output_attentions: bool = False,
        token_ids: Tensor | None = None,
        kept: Tensor | None = None,
        pruning: EViT | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A block.

        Args:
            hidden_states: (B, T, C).
            grid: (height, width) of the patches.
            num_prefix_tokens: P.
            output_attentions: also return the attention weights.
            token_ids, kept: as `token_ids` and `keep_mask` of `AttentionRequest`.
            pruning: the module that drops tokens between attention and MLP.

        Returns:
            The tokens, the attention weights (B, H, T, T) if they are wanted, and the token_ids of the tokens that are
            left.
        """
        # attn_implementation="eager" is transformers' word for the written-out form.
        backend = "reference" if self.config._attn_implementation == "eager" else "auto"
        out, weights = self.attention(
            self.layernorm_before(hidden_states),
            grid,
            num_prefix_tokens,
            output_attentions or pruning is not None,
            backend,
            token_ids,
            kept,
            1 if pruning is not None and not output_attentions else None,
        )
        branch = self.drop_path(self.layerscale_attention(self.dropout(out)))
        hidden_states = torch.add(hidden_states, branch, alpha=self.residual_scale)
        if pruning is not None:
            hidden_states, token_ids = pruning(hidden_states, weights[:, :, 0], token_ids, num_prefix_tokens)
        out = self.mlp(self.layernorm_after(hidden_states), grid, num_prefix_tokens)
        branch = self.drop_path(self.layerscale_mlp(self.dropout(out)))
        hidden_states = torch.add(hidden_states, branch, alpha=self.residual_scale)
        return hidden_states, weights if output_attentions else None, token_ids


class SparsePriorViTPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving of every SparsePriorViT class."""

    config_class = SparsePriorViTConfig
    config: SparsePriorViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["SparsePriorViTEmbeddings", "SparsePriorViTLayer"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # The classes that a saved folder offers to the Auto classes; `register_family` sets it.
    auto_map: ClassVar[dict[str, str]] = {}

    def __init__(self, config: SparsePriorViTConfig, *args: Any, **kwargs: Any) -> None:
        # from_pretrained(..., prior=...) sets fields after the config's own check.
        given = config.prior
        config.validate()
        if config.prior != given:
            config.log_notes()
        super().__init__(config, *args, **kwargs)
        if any(prior["decay"] is not None for prior in config.stage_priors):
            # In half precision the gradients of alpha and beta lose their scale, and beta even loses its value.
            self._keep_in_fp32_modules_strict = ["decay_bias"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            super()._init_weights(module)
        elif isinstance(module, SparsePriorViTLayerScale):
            init.constant_(module.scale, module.value)
        elif isinstance(module, SparsePriorViTEmbeddings):
            for parameter in module._parameters.values():
                if parameter is not None:
                    init.trunc_normal_(parameter, mean=0.0, std=std)
        elif isinstance(module, (Decay, PriorModule)):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, in addition to all with one dimension (timm's convention)."""
        embeddings = ("class_token", "distillation_token", "register_tokens", "position_embeddings")
        # Swin leaves its table of relative positions out, and u and v of Transformer-XL are biases.
        biases = ("bias_table", "prefix_bias", "content_bias", "position_bias")
        return {
            name
            for name, _ in self.named_parameters()
            if "decay_bias" in name.split(".") or name.split(".")[-1] in (*embeddings, *biases)
        }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with safetensors only: a pickled checkpoint is refused, never opened.

        `prior=` and other config fields may be given and are checked like those of a config.

        Raises:
            OSError: for a missing, truncated or pickled checkpoint; the message names the file.
            ValueError: for a bad config field.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False is refused: pickled checkpoints can run code, use safetensors")
        kwargs["use_safetensors"] = True
        check_source(pretrained_model_name_or_path, kwargs)
        return load_pretrained(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # use_safetensors chooses the index, but an index may lead to pickled shards.
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                raise OSError(f"{file} is not a safetensors file; pickled checkpoints are not read, they can run code")
        return super()._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, plus the full auto map, an image processor and a model card (see `complete_folder`)."""
        if getattr(self, "_hf_peft_config_loaded", False):  # then adapters are saved, and nothing else
            with without_code(self):
                return super().save_pretrained(save_directory, *args, **kwargs)
        self.config.auto_map = dict(self.auto_map)
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            complete_folder(save_directory, self.config)


class SparsePriorViTModel(SparsePriorViTPreTrainedModel):
    """The bare transformer.

    Example:

    ```python
    import hf_sparseprior as sp
    model = sp.SparsePriorViTModel(sp.SparsePriorViTConfig(prior="fibottention+violin"))
    ```

    embeddings_class, layer_class: classes that other families replace by their own.
    """

    embeddings_class: type[SparsePriorViTEmbeddings] = SparsePriorViTEmbeddings
    layer_class: type[SparsePriorViTLayer] = SparsePriorViTLayer

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config)
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.token_pruning = make_extras(config.prior["extras"], "model", config.num_hidden_layers, config.hidden_size)
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
    ) -> tuple[Tensor, tuple[int, int], tuple[Tensor, ...] | None, tuple[Tensor, ...] | None, Tokens]:
        """Embeddings and blocks, without the last norm: tokens (B, T, C), grid, hidden states, attentions, and which
        tokens are left.
        """
        hidden_states, grid = self.embeddings(pixel_values, token_sources)
        prefix, tokens = self.config.num_prefix_tokens, Tokens()
        states, attentions = [hidden_states], []
        for index, layer in enumerate(self.layers):
            pruning = None
            if (module := self.active_pruning()) is not None:
                hidden_states, tokens = module.before(index, hidden_states, tokens, grid, prefix)
                pruning = module if module.within(index) else None
            kept = None if tokens.kept is None else F.pad(tokens.kept, (prefix, 0), value=1.0)
            hidden_states, weights, token_ids = layer(
                hidden_states, grid, prefix, output_attentions, tokens.token_ids, kept, pruning
            )
            tokens = tokens._replace(token_ids=token_ids)
            if output_hidden_states:
                states.append(hidden_states)
            if weights is not None:
                attentions.append(weights)
        return (
            hidden_states,
            grid,
            tuple(states) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
            tokens,
        )

    def active_pruning(self) -> TokenPruning | None:
        """The prior's token pruning; None if there is none."""
        modules: list[TokenPruning] = list(self.token_pruning.values())  # type: ignore[arg-type]
        return modules[0] if modules else None

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_sources: Tensor | None = None,
    ) -> SparsePriorViTModelOutput | tuple:
        """Encode images.

        Args:
            pixel_values: (B, channels, height, width), sides multiples of the patch size.
            output_attentions: also return the weights (B, H, T, T) of every layer.
            output_hidden_states: also return the L + 1 hidden states (B, T, C). With token pruning T differs between
                layers, in weights and hidden states.
            return_dict: False for a tuple.
            token_sources: int64 (B, N), the image of the batch that each patch is taken from (MixToken); None: its own.

        Returns:
            last_hidden_state (B, T, C) after the last norm; pooler_output (B, C), the class token or the average of
            the patch tokens (those that are kept), or (B, 2C), both of them.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        hidden_states, _, states, attentions, tokens = self.encode(
            pixel_values, output_attentions, output_hidden_states, token_sources
        )
        last, pruning = self.layernorm(hidden_states), self.active_pruning()
        output = SparsePriorViTModelOutput(
            last_hidden_state=last,
            pooler_output=self.pool(last, tokens.kept),
            hidden_states=states,
            attentions=attentions,
            token_ids=tokens.token_ids,
            kept=tokens.kept,
            auxiliary_losses=(pruning.auxiliary_losses(tokens) or None) if pruning is not None else None,
        )
        return output if return_dict else output.to_tuple()

    def pool(self, last_hidden_state: Tensor, kept: Tensor | None = None) -> Tensor:
        """Pool (B, T, C) to (B, C) or, with "class_token_and_mean", (B, 2C); means are over the patches in `kept`."""
        class_token, patches = last_hidden_state[:, 0], last_hidden_state[:, self.config.num_prefix_tokens :]
        if self.config.pooling == "class_token":
            return class_token
        if kept is None:
            mean = patches.mean(1)
        else:
            weights = kept.to(patches.dtype).unsqueeze(-1)
            mean = (patches * weights).sum(1) / weights.sum(1).clamp_min(1.0)
        return mean if self.config.pooling == "mean" else torch.cat([class_token, mean], 1)


class SparsePriorViTForImageClassification(SparsePriorViTPreTrainedModel):
    """SparsePriorViT with a linear classifier. It may have a second one on the distillation token (DeiT) or on each
    patch token (LV-ViT).

    model_class: the transformer, which other families replace by their own.
    """

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
        pixel_values: Tensor,
        labels: Tensor | None = None,
        distillation_targets: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        token_sources: Tensor | None = None,
    ) -> SparsePriorViTImageClassifierOutput | tuple:
        """Classify images.

        (The Trainer expects every argument with "label" in its name in each batch.)

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) class indices (cross entropy), or what `config.problem_type` asks for.
            distillation_targets: (B,) a teacher's decisions for the distillation head; default: `labels`.
            output_attentions, output_hidden_states, return_dict, token_sources: as in `SparsePriorViTModel`.

        Returns:
            logits (B, num_labels), with the loss if labels are given. With a distillation classifier loss and logits
            are the means of both heads' (DeiT's hard distillation). With a token classifier there are also
            `token_logits` (B, N, num_labels). In training the logits are the classifier's; in evaluation the largest of
            the tokens' are added (`token_logits_weight`). The tokens' loss is `training.token_label_loss`.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
        encoded = self.vit(
            pixel_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            token_sources=token_sources,
        )
        logits = self.classifier(encoded.pooler_output)
        class_logits = distillation_logits = token_logits = None
        if self.token_classifier is not None:
            token_logits = self.token_classifier(encoded.last_hidden_state[:, self.config.num_prefix_tokens :])
            if not self.training and self.config.token_logits_weight:
                logits = logits + self.config.token_logits_weight * token_logits.amax(1)
        if self.distillation_classifier is not None:
            class_logits, distillation_logits = logits, self.distillation_classifier(encoded.last_hidden_state[:, 1])
            logits = (class_logits + distillation_logits) / 2
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits if class_logits is None else class_logits, self.config)
            if distillation_logits is not None:
                targets = labels if distillation_targets is None else distillation_targets
                loss = (loss + self.loss_function(targets, distillation_logits, self.config)) / 2
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
        )
        return output if return_dict else output.to_tuple()


class SparsePriorViTBackbone(BackboneMixin, SparsePriorViTModel):
    """SparsePriorViT as a feature extractor for dense prediction (UperNet, DETR, Mask2Former, ...).

    Load weights with the class's own `from_pretrained`; `AutoBackbone.from_config` builds it from a config.

    Raises:
        ValueError: for a prior that prunes tokens.
    """

    def __init__(self, config: SparsePriorViTConfig) -> None:
        super().__init__(config)
        if pruning_of(config.prior) is not None:
            raise ValueError(
                f"prior {config.prior_name!r} drops tokens, and the feature maps of a backbone need all of them"
            )
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    def forward(  # type: ignore[override]
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple:
        """Feature maps (B, C, height, width) of the patches at `config.out_features`; tokens (B, T, C) without
        `reshape_hidden_states`. "stem" is the embedding, "stage3" the output of the third layer.
        """
        output_attentions, output_hidden_states, return_dict = output_options(
            self.config, output_attentions, output_hidden_states, return_dict
        )
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
            maps.append(state)
        output = BackboneOutput(
            feature_maps=tuple(maps), hidden_states=states if output_hidden_states else None, attentions=attentions
        )
        return output if return_dict else output.to_tuple()


def output_options(
    config: SparsePriorViTConfig,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    return_dict: bool | None,
) -> tuple[bool, bool, bool]:
    """Arguments of a call; those that are not given are the config's."""
    return (
        bool(config.output_attentions if output_attentions is None else output_attentions),
        bool(config.output_hidden_states if output_hidden_states is None else output_hidden_states),
        bool(config.return_dict if return_dict is None else return_dict),
    )


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
    )
)
