"""Finding the vision encoder in a stock transformers model, and reading its sizes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_sparseprior.adapters.stock_families import STOCK_FAMILIES, StockFamily, family_names
from hf_sparseprior.adapters.timm_encoder import TimmEncoder, timm_encoder, timm_names
from hf_sparseprior.adapters.token_layout import TokenLayout, patch_projection
from hf_sparseprior.priors.layer import PriorAttention

SINGLE_PREFIX_TOKENS = ("cls_token", "class_embedding", "distillation_token")  # parameters of embeddings


@dataclass
class Encoder:
    """A stock vision encoder within a model.

    name: name of the module that holds embeddings and layers, "" for the model itself.
    attention: name -> attention module, in the order of the layers.
    config: the encoder's.
    """

    name: str
    family: StockFamily
    embeddings: nn.Module
    attention: dict[str, nn.Module]
    config: Any

    @property
    def is_joint(self) -> bool:
        """Whether attention sees the frames of a clip together that the embeddings see one by one (TimeSformer)."""
        return getattr(self.config, "attention_type", None) == "joint_space_time"

    @property
    def num_prefix_tokens(self) -> int:
        """Class, distillation and register tokens that the embeddings put in front of the patches."""
        registers = self.embeddings._parameters.get("register_tokens")
        return self._num_singles + (0 if registers is None else registers.shape[1])

    @property
    def has_class_token(self) -> bool:
        """Whether the first prefix token is a class token."""
        return self._num_singles > 0

    @property
    def _num_singles(self) -> int:
        return sum(self.embeddings._parameters.get(name) is not None for name in SINGLE_PREFIX_TOKENS)

    @property
    def grid(self) -> tuple[int, int]:
        """The configured patch grid, of one frame of a clip, or of a window if attention runs within windows."""
        config = self.config
        if self.family.windows:
            return config.window_size, config.window_size
        projection = patch_projection(self.embeddings)
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        *_, high, wide = projection.stride
        return sides[0] // high, sides[1] // wide

    @property
    def attention_grid(self) -> tuple[int, ...]:
        """The grid of what attention sees together: `grid`, or (frames, height, width) of a configured clip.

        Frames are those of patches: one for each tubelet.
        """
        if self.family.windows:
            return self.grid
        if self.is_joint:
            return self.config.num_frames, *self.grid
        *strides, _, _ = patch_projection(self.embeddings).stride
        return *(self.config.num_frames // stride for stride in strides), *self.grid

    def grid_of(self, attention: nn.Module) -> tuple[int, ...]:
        """The grid that an attention module is configured for, the same for all."""
        return self.attention_grid

    def layout(self, model: nn.Module) -> TokenLayout:
        """Where the tokens of the model lie, which its layers share."""
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        return TokenLayout(self.family, self.num_prefix_tokens, layers, self.is_joint)


def num_heads_of(attention: Any) -> int:
    """Heads of a stock attention module."""
    heads = getattr(attention, "num_attention_heads", None)
    return int(attention.num_heads if heads is None else heads)


def head_dim_of(attention: Any) -> int:
    """Width of a head of a stock attention module."""
    for name in ("head_dim", "attention_head_size"):
        if (width := getattr(attention, name, None)) is not None:
            return int(width)
    return int(attention.qkv.out_features // (3 * attention.num_heads))


def find_encoder(model: nn.Module) -> Encoder | TimmEncoder:
    """The one stock vision encoder in a model of transformers or timm.

    Raises:
        ValueError: if there are several, or none that takes a prior; the message says which module prevents it, and
            why.
    """
    names = [name for name, module in model.named_modules() if type(module).__name__ in STOCK_FAMILIES]
    names += (of_timm := timm_names(model))
    if len(names) != 1:
        raise ValueError(_no_encoder(model) if not names else f"{type(model).__name__} has several: {names}")
    if of_timm:
        return timm_encoder(model, of_timm[0])
    embeddings = model.get_submodule(names[0])
    family = STOCK_FAMILIES[type(embeddings).__name__]
    name = names[0].rpartition(".")[0]
    prefix = f"{name}." if name else ""
    attention = {
        prefix + inner: module
        for inner, module in model.get_submodule(name).named_modules()
        if type(module).__name__ == family.attention and (family.untouched or "\n") not in inner
    }
    if not attention:
        raise ValueError(f"{type(model).__name__} has embeddings {names[0]!r} but no {family.attention}")
    config = getattr(next(iter(attention.values())), "config", None) or model.get_submodule(name).config
    return Encoder(name, family, embeddings, attention, config)


def _no_encoder(model: nn.Module) -> str:
    """Why a model without a known encoder cannot take a prior."""
    if any(isinstance(module, PriorAttention) for module in model.modules()):
        return f"{type(model).__name__} has a prior of its own; its config's `prior` says which"
    attention = [(name, module) for name, module in model.named_modules() if "Attention" in type(module).__name__]
    why = "it has no attention module"
    for name, module in attention:
        why = f"the token layout of {name} ({type(module).__name__}) is not known here"
        try:
            source = inspect.getsource(type(module))
        except (OSError, TypeError):  # of a class that was typed in or executed
            continue
        if "get_interface(" not in source and "softmax" in source:
            why = f"{name} ({type(module).__name__}) computes its attention itself, without AttentionInterface"
            break
    return f"{type(model).__name__} cannot take a prior: {why}. Families that can: {family_names()}"
