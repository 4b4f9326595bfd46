"""Finding the vision encoder in a timm model, saying why it cannot take a prior, and where its tokens lie."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE
from hf_sparseprior.adapters.stock_families import TIMM_FAMILIES, StockFamily
from hf_sparseprior.adapters.stock_timm import FORWARDS, class_path
from hf_sparseprior.adapters.token_layout import TokenLayout

SEEN_GRID = "_sparse_prior_grid"  # an attribute of the tokens that enter a block
GRIDS = ("grid_size", "pos_embed_grid_size")  # what embeddings call the configured patch grid
BLOCK = re.compile(r"(?:layers\.\d+\.)?blocks\.\d+")


@dataclass
class TimmEncoder:
    """A vision encoder of timm within a model, with what `stock_encoder.Encoder` has.

    name: name of the encoder, "" for the model itself.
    encoder: timm's model.
    attention: name -> attention module, in the order of the layers.
    config: the config of the model of transformers that it is in, None without one.
    """

    name: str
    family: StockFamily
    encoder: Any
    attention: dict[str, nn.Module]
    config: Any

    @property
    def embeddings(self) -> Any:
        """The module that turns images into patches."""
        return getattr(self.encoder, self.family.embeddings)

    @property
    def num_prefix_tokens(self) -> int:
        """Class, distillation and register tokens; in Swin there are none."""
        return getattr(self.encoder, "num_prefix_tokens", 0)

    @property
    def has_class_token(self) -> bool:
        """Whether the first prefix token is a class token."""
        tokens = (self.encoder, self.embeddings)  # NaFlexVit's embeddings have it
        return any(getattr(module, "cls_token", None) is not None for module in tokens)

    @property
    def attention_grid(self) -> tuple[int, ...]:
        """The grid that the first layer is configured for."""
        return self.grid_of(next(iter(self.attention.values())))

    def grid_of(self, attention: Any) -> tuple[int, ...]:
        """The grid that an attention module is configured for: that of the patches, or of its window."""
        if self.family.windows:
            return tuple(attention.window_size)
        sizes = (getattr(self.embeddings, name, None) for name in GRIDS)
        return tuple(next(size for size in sizes if size is not None))

    def layout(self, model: nn.Module) -> TokenLayout:
        """Where the tokens lie, which the layers share."""
        return TimmLayout(self.family, self.num_prefix_tokens, self.encoder)


class TimmLayout(TokenLayout):
    """The grid of the current forward of a timm model.

    Args:
        family, num_prefix_tokens: as in `TokenLayout`.
        encoder: timm's model.
    """

    def __init__(self, family: StockFamily, num_prefix_tokens: int, encoder: Any) -> None:
        super().__init__(family, num_prefix_tokens, [])
        self.encoder = encoder

    def watch(self, embeddings: nn.Module) -> list[Any]:
        """As in `TokenLayout`; also keep timm's weight decay from the scalars of decays."""
        handles: list[Any] = [NoWeightDecay(self.encoder)]
        if not self.family.windows:
            handles.append(embeddings.register_forward_pre_hook(self.see_image, with_kwargs=True))
            blocks = _blocks(self.encoder).values()
            handles += [block.register_forward_pre_hook(self.see_tokens) for block in blocks]
        return handles

    def see_image(self, embeddings: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the embeddings: the image says the grid."""
        image = args[0]
        if image.dim() != 4 or kwargs.get("patch_coord") is not None:
            raise ValueError(
                f"{type(self.encoder).__name__} with a prior takes images (B, C, H, W): patches with coordinates have "
                "a grid for each image, and a prior needs one for the batch"
            )
        self.grid = tuple(embeddings.dynamic_feat_size(tuple(image.shape[2:])))

    def see_tokens(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of a block: one that activation checkpointing runs again finds the grid of its first run.

        Another forward may have run in between, and timm gives a block nothing but its tokens. They carry the grid:
        torch keeps them for the second run.
        """
        if not self.encoder.grad_checkpointing or torch.compiler.is_compiling():
            return
        if (seen := getattr(args[0], SEEN_GRID, None)) is not None:
            self.grid = seen
        elif torch._C._current_graph_task_id() != -1:  # in a backward pass
            raise RuntimeError(
                f"{type(self.encoder).__name__} with a prior: activation checkpointing runs a block again with a copy "
                "of its tokens, whose grid is not known; timm.layers.set_reentrant_ckpt(False) keeps the tokens"
            )
        else:
            setattr(args[0], SEEN_GRID, self.grid)


@dataclass
class NoWeightDecay:
    """The `no_weight_decay` of one timm model: what its class says, and the scalars of decays.

    timm's optimizers spare vectors, but VIOLIN's beta has two axes.
    """

    encoder: Any

    def __post_init__(self) -> None:
        self.encoder.no_weight_decay = self

    def __call__(self) -> set[str]:
        """Names of parameters."""
        scalars = re.compile(rf".*\.{PRIOR_MODULE}\..*decay_bias.*")  # of adapters too, which have decay_biases
        names = {name for name, _ in self.encoder.named_parameters() if scalars.fullmatch(name)}
        return {*type(self.encoder).no_weight_decay(self.encoder), *names}

    def remove(self) -> None:
        """Give the model its class's back."""
        del self.encoder.no_weight_decay


def has_timm(model: nn.Module) -> bool:
    """Whether a model is one of timm, or contains one."""
    return any(type(module).__module__.startswith("timm.models.") for module in model.modules())


def timm_names(model: nn.Module) -> list[str]:
    """Names of the vision encoders of timm in a model that may take a prior."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in TIMM_FAMILIES and type(module).__module__.startswith("timm.models.")
    ]


def timm_encoder(model: nn.Module, path: str) -> TimmEncoder:
    """The encoder of this name, `path`, in a model.

    Raises:
        ValueError: if it cannot take a prior; the message says which module prevents it, and why.
    """
    encoder: Any = model.get_submodule(path)
    family = TIMM_FAMILIES[type(encoder).__name__]
    prefix = f"{path}." if path else ""
    if (problem := _problem(encoder, family)) is not None:
        raise ValueError(f"{type(encoder).__name__} cannot take a prior: {prefix}{problem}")
    attention = {
        f"{prefix}{name}.{inner}": module
        for name, block in _blocks(encoder).items()
        for inner, module in block.named_modules()
        if class_path(module) in FORWARDS
    }
    return TimmEncoder(path, family, encoder, attention, getattr(model, "config", None))


def _problem(encoder: Any, family: StockFamily) -> str | None:
    """The module that prevents a prior, and why."""
    embeddings, dropout = getattr(encoder, family.embeddings), getattr(encoder, "patch_drop", None)
    kind = f"{family.embeddings} ({type(embeddings).__name__})"
    if not hasattr(embeddings, "dynamic_feat_size"):
        return f"{kind} does not say the patch grid of an image"
    if all(getattr(embeddings, size, None) is None for size in GRIDS):
        return f"{kind} has no patch grid; give img_size"
    if getattr(dropout, "prob", 0) > 0:
        return f"patch_drop ({type(dropout).__name__}) hides from the layers which patches are left; patch_drop_rate=0"
    for name, block in _blocks(encoder).items():
        modules = {f"{name}.{inner}": module for inner, module in block.named_modules() if _is_attention(module)}
        for inner, module in (modules or {name: block}).items():
            if class_path(module) not in FORWARDS:
                return f"{inner} ({type(module).__name__}) computes attention in a way that is not known here"
            if "forward" in vars(module):
                return f"{inner} ({type(module).__name__}) has another forward than its class already"
    return None


def _blocks(encoder: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in encoder.named_modules() if BLOCK.fullmatch(name)}


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or class_path(module) in FORWARDS
