"""Priors on stock transformers models, in place: `apply_prior(model, prior)`, undone by `remove_prior(model)`.

Stock attention modules ask `AttentionInterface` for the function that their config names. Each one gets a copy of its
config that names ours, and beside its projections a `StockPrior`, which holds the decay's scalars and knows support,
layer and grid. The model's own config is not touched: a second model that shares it stays as it is, and
`set_attn_implementation` cannot turn the prior off.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file
from transformers.utils.output_capturing import _active_collector

from hf_sparseprior.attention import PriorAttention
from hf_sparseprior.attention_request import AttentionRequest
from hf_sparseprior.extras import EXTRAS, resolve_extras
from hf_sparseprior.files import write_bytes
from hf_sparseprior.low_rank import MIXERS
from hf_sparseprior.prior import parse_prior, resolve_prior
from hf_sparseprior.resolved import ResolvedPrior

IMPLEMENTATIONS = ("fibottention", "violin")  # names in `AttentionInterface`, one function
SIDECAR = "sparse_prior"  # the submodule of an attention module that holds its prior
OWN = (
    "decay_bias.",
    "predictor.",
    "mixer.",
    "relative_position.",
)  # what of that is the prior's; the rest is adapters'
STATE = "_sparse_prior"  # the attribute of a model that says what was done to it
SCALARS_FILE = "sparse_prior.safetensors"
CONFIG_FIELD = "sparse_prior"


@dataclass(frozen=True)
class Family:
    """What differs between stock families; the key of FAMILIES is the class of the embeddings.

    attention: class of the attention modules.
    windows: attention runs within square windows, whose size is the number of its tokens.
    support_stages: the first so many stages take a support, the others stay dense (Fibottention section 4.1).
    shuffled: the embeddings return (tokens, mask, ids_restore) of a random part of the patches (ViTMAE).
    masked: the embeddings take `bool_masked_pos` and leave these patches out (VideoMAE).
    """

    attention: str
    windows: bool = False
    support_stages: int | None = None
    shuffled: bool = False
    masked: bool = False


FAMILIES = {
    "ViTEmbeddings": Family("ViTAttention"),
    "DeiTEmbeddings": Family("DeiTAttention"),
    "ViTMSNEmbeddings": Family("ViTMSNAttention"),
    "Dinov2Embeddings": Family("Dinov2Attention"),
    "Dinov2WithRegistersEmbeddings": Family("Dinov2WithRegistersAttention"),
    "DINOv3ViTEmbeddings": Family("DINOv3ViTAttention"),
    "BeitEmbeddings": Family("BeitAttention"),
    "CLIPVisionEmbeddings": Family("CLIPAttention"),
    "SiglipVisionEmbeddings": Family("SiglipAttention"),
    "ViTMAEEmbeddings": Family("ViTMAEAttention", shuffled=True),
    "IJepaEmbeddings": Family("IJepaAttention"),
    "VideoMAEEmbeddings": Family("VideoMAESelfAttention", masked=True),
    "SwinEmbeddings": Family("SwinAttention", windows=True, support_stages=2),
}
NAMES = "ViT, DeiT, ViT-MSN, DINOv2, DINOv3, BEiT, CLIP, SigLIP, ViTMAE, I-JEPA, VideoMAE, Swin"


class TokenLayout:
    """Where the tokens of the current forward lie, as hooks on the embeddings see it.

    Frames of a video are stacked: a grid of T x (H, W) is (T * H, W).

    Args:
        family: of the model.
        num_prefix_tokens: class, distillation and register tokens.
        layers: of the encoder, that may run again in the backward pass.
    """

    def __init__(self, family: Family, num_prefix_tokens: int, layers: Sequence[GradientCheckpointingLayer]) -> None:
        self.family = family
        self.num_prefix_tokens = num_prefix_tokens
        self.layers: list[Any] = list(layers)
        self.grid: tuple[int, int] | None = None
        self.token_ids: Tensor | None = None

    def see_patches(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Forward hook of the patch projection: its output is the grid."""
        *frames, height, width = output.shape[2:]
        self.grid = (math.prod(frames) * height, width)
        # Now and not before: activation checkpointing may be switched on at any time.
        for layer in self.layers:
            checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
            if checkpoint is not None and not isinstance(checkpoint, LayoutKeeper):
                layer._gradient_checkpointing_func = LayoutKeeper(self, checkpoint)

    def see_shuffled(self, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        """Forward hook of embeddings that return how they shuffled the patches."""
        tokens, _, ids_restore = output[:3]
        self.token_ids = torch.argsort(ids_restore, dim=1)[:, : tokens.shape[1] - self.num_prefix_tokens]

    def see_masked(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward hook, before embeddings that leave out what `bool_masked_pos` says."""
        masked = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("bool_masked_pos")
        self.token_ids = None if masked is None else (~masked.bool()).nonzero()[:, 1].view(masked.shape[0], -1)

    def watch(self, embeddings: nn.Module) -> list[Any]:
        """Register the hooks on a model's embeddings; the handles that remove them."""
        if self.family.windows:
            return []
        handles = [patch_projection(embeddings).register_forward_hook(self.see_patches)]
        if self.family.shuffled:
            handles.append(embeddings.register_forward_hook(self.see_shuffled))
        if self.family.masked:
            handles.append(embeddings.register_forward_pre_hook(self.see_masked, with_kwargs=True))
        return handles

    def of(self, num_tokens: int) -> tuple[tuple[int, int], int, Tensor | None]:
        """Grid, prefix tokens and token ids for attention over so many tokens."""
        if self.family.windows:
            side = math.isqrt(num_tokens)
            return (side, side), 0, None
        if self.grid is None:
            raise RuntimeError("attention ran before the embeddings, so the patch grid is not known")
        visible = self.grid[0] * self.grid[1] if self.token_ids is None else self.token_ids.shape[1]
        if num_tokens != self.num_prefix_tokens + visible:
            raise ValueError(
                f"attention over {num_tokens} tokens does not fit {self.num_prefix_tokens} prefix tokens and "
                f"{visible} patches of a {self.grid[0]}x{self.grid[1]} grid"
            )
        return self.grid, self.num_prefix_tokens, self.token_ids


@dataclass
class LayoutKeeper:
    """Activation checkpointing of a layer which, when the layer runs again, is told of the layout that it had.

    By then another forward may have been seen: two views of an image, a student and a teacher, several crops.
    """

    layout: TokenLayout
    checkpoint: Callable

    def __call__(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a layer by `checkpoint`."""
        layout, seen = self.layout, (self.layout.grid, self.layout.token_ids)

        def run_as_seen(*inner: Any, **options: Any) -> Any:
            now = layout.grid, layout.token_ids
            layout.grid, layout.token_ids = seen
            try:
                return run(*inner, **options)
            finally:
                layout.grid, layout.token_ids = now

        return self.checkpoint(run_as_seen, *args, **kwargs)


class StockPrior(PriorAttention):
    """The prior of one stock attention module.

    Args:
        num_heads, prior, layer_idx, head_dim: as in `PriorAttention`.
        layout: of the model's tokens, shared by its layers.
        config: the config that the attention module came with.
        for_adapters: it is there for adapters alone; without an active one the module's own attention runs.
    """

    def __init__(
        self,
        num_heads: int,
        prior: ResolvedPrior,
        layer_idx: int,
        layout: TokenLayout,
        config: Any,
        head_dim: int,
        for_adapters: bool = False,
    ) -> None:
        super().__init__(num_heads, prior, layer_idx, head_dim)
        self.layout = layout
        self.config = config
        self.for_adapters = for_adapters


def prior_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a stock module with its prior, as `AttentionInterface` calls it.

    Args:
        module: the attention module; `apply_prior` put a `StockPrior` into it.
        query, key, value: (B, H, T, D).
        attention_mask: added to the logits (relative positions, windows), or boolean, True = attended; (B, H, T, T) or
            broadcastable.

    Returns:
        (B, T, H, D), and the weights (B, H, T, T) where they are asked for.
    """
    prior: StockPrior | None = getattr(module, SIDECAR, None)
    if prior is None:
        raise RuntimeError(
            f"{type(module).__name__} has no prior: attn_implementation alone does not know layer and grid, "
            "call hf_sparseprior.apply_prior(model, prior)"
        )
    if prior.for_adapters and prior.active_decay() is None:
        attend = _own_attention(module, prior.config)
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    grid, num_prefix_tokens, token_ids = prior.layout.of(query.shape[2])
    # Rotary positions come out in float32 under autocast, values do not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device).masked_fill(~bias, -math.inf)
    request = AttentionRequest(
        query,
        key,
        value,
        prior.plan(grid, num_prefix_tokens),
        scale=scaling,
        dropout_p=dropout,
        bias=bias,
        token_ids=token_ids,
        need_weights=_wants_weights(prior.config, kwargs),
    )
    # "eager" is transformers' word for the written-out form.
    out, weights = prior.attend(request, "reference" if prior.config._attn_implementation == "eager" else "auto")
    return out.transpose(1, 2), weights


def _own_attention(module: nn.Module, config: Any) -> Callable:
    """What a stock module runs with this config, looked up as its forward does."""
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, written_out)


def _wants_weights(config: Any, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions") or config.output_attentions:
        return True
    if torch.compiler.is_compiling():
        return False
    # Where transformers' hooks collect outputs; modules that take no keywords are not told otherwise.
    return "attentions" in (_active_collector.get() or {})


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(_name, prior_attention)
    AttentionMaskInterface.register(_name, sdpa_mask)


# ---- finding one's way in a stock model -----------------------------------------------------------------------------


@dataclass
class Encoder:
    """A stock vision encoder within a model.

    name: of the module that holds embeddings and layers, "" for the model itself.
    attention: name -> attention module, in the order of the layers.
    """

    name: str
    family: Family
    embeddings: nn.Module
    attention: dict[str, nn.Module]

    @property
    def config(self) -> Any:
        """The encoder's config."""
        return next(iter(self.attention.values())).config

    @property
    def num_prefix_tokens(self) -> int:
        """Class, distillation and register tokens that the embeddings put in front of the patches."""
        tokens = self.embeddings._parameters
        names = ("cls_token", "class_embedding", "distillation_token")
        registers = tokens.get("register_tokens")
        return sum(tokens.get(name) is not None for name in names) + (0 if registers is None else registers.shape[1])

    @property
    def grid(self) -> tuple[int, int]:
        """The configured patch grid; that of a window where attention runs within windows."""
        config = self.config
        if self.family.windows:
            return config.window_size, config.window_size
        projection = patch_projection(self.embeddings)
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        *frame_strides, high, wide = projection.stride
        frames = math.prod(config.num_frames // stride for stride in frame_strides)
        return frames * (sides[0] // high), sides[1] // wide


def patch_projection(embeddings: nn.Module) -> Any:
    """The convolution that turns an image or a clip into patches."""
    return next(module for module in embeddings.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))


def num_heads_of(attention: Any) -> int:
    """Heads of a stock attention module."""
    heads = getattr(attention, "num_attention_heads", None)
    return int(attention.num_heads if heads is None else heads)


def head_dim_of(attention: Any) -> int:
    """Width of a head of a stock attention module."""
    width = getattr(attention, "head_dim", None)
    return int(attention.attention_head_size if width is None else width)


def find_encoder(model: nn.Module) -> Encoder:
    """The one stock vision encoder in a model.

    Raises:
        ValueError: if there is none that takes a prior, saying which module stands in the way and why, or several.
    """
    found = [name for name, module in model.named_modules() if type(module).__name__ in FAMILIES]
    if len(found) != 1:
        raise ValueError(_no_encoder(model) if not found else f"{type(model).__name__} has several: {found}")
    embeddings = model.get_submodule(found[0])
    family = FAMILIES[type(embeddings).__name__]
    name = found[0].rpartition(".")[0]
    prefix = f"{name}." if name else ""
    attention = {
        prefix + inner: module
        for inner, module in model.get_submodule(name).named_modules()
        if type(module).__name__ == family.attention
    }
    if not attention:
        raise ValueError(f"{type(model).__name__} has embeddings {found[0]!r} but no {family.attention}")
    return Encoder(name, family, embeddings, attention)


def _no_encoder(model: nn.Module) -> str:
    if any(isinstance(module, PriorAttention) for module in model.modules()):
        return f"{type(model).__name__} has a prior of its own; its config's `prior` says which"
    attention = [(name, module) for name, module in model.named_modules() if "Attention" in type(module).__name__]
    why = "it has no attention module"
    for name, module in attention:
        why = f"the token layout of {name} ({type(module).__name__}) is not known here"
        source = inspect.getsource(type(module))
        if "get_interface(" not in source and "softmax" in source:
            why = f"{name} ({type(module).__name__}) computes its attention itself, without AttentionInterface"
            break
    return f"{type(model).__name__} cannot take a prior: {why}. Families that can: {NAMES}"


# ---- applying and removing ------------------------------------------------------------------------------------------


@dataclass
class Applied:
    """What `apply_prior` did to a model: all that `remove_prior` and `save_pretrained` need.

    prior: resolved, of the first layer.
    attention: names of the attention modules, in the order of the layers.
    handles: of the hooks.
    """

    prior: ResolvedPrior
    attention: list[str]
    handles: list[Any]


def apply_prior(model: PreTrainedModel, prior: str | dict[str, Any]) -> PreTrainedModel:
    """Give a stock transformers vision model a prior, in place; its weights stay as they are.

    Decays start where they change nothing (alpha = 1, beta = 20: the model's output to 1e-5), unless their `init` says
    otherwise. Call it on the model that is saved, not on a part of it, and before an optimizer is made.

    Args:
        model: ViT, DeiT, ViT-MSN, DINOv2, DINOv3, BEiT, CLIP, SigLIP, ViTMAE, I-JEPA, VideoMAE or Swin, any head; of a
            peft model its base model gets the prior.
        prior: as in `SparsePriorViTConfig`; extras within attention only, and not on ViTMAE and VideoMAE.

    Returns:
        The model.

    Raises:
        ValueError: for a bad prior, a model that has one, or one that cannot take one: which module, and why.
    """
    target: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if sidecars := sidecars_of(target):
        had = "a prior already; hf_sparseprior.remove_prior(model)"
        if sidecars[0].for_adapters:
            had = "an adapter with a decay, which goes on top of a prior; unload() of the peft model"
        raise ValueError(f"{type(model).__name__} has {had} comes first")
    if not isinstance(target, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} must be a model of transformers, the one that is saved")
    setattr(target, STATE, attach(target, _with_identity(parse_prior(prior))))
    return model


def sidecars_of(model: nn.Module) -> list[StockPrior]:
    """Every `StockPrior` in a model."""
    return [module for module in model.modules() if isinstance(module, StockPrior)]


def attach(model: nn.Module, slots: dict[str, Any], for_adapters: bool = False) -> Applied:
    """Put a `StockPrior` into every attention module of a stock model, and hooks on its embeddings.

    Args:
        slots: a prior, as `parse_prior` returns it.
        for_adapters: as in `StockPrior`.

    Raises:
        ValueError: for a bad prior, or a model that cannot take one; it is left as it was.
    """
    encoder = find_encoder(model)
    _check_extras(slots, encoder.family)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layout = TokenLayout(encoder.family, encoder.num_prefix_tokens, layers)
    # All of them before the first is put in place: a refused setting must leave the model alone.
    sidecars = [
        StockPrior(
            num_heads_of(module),
            resolve_prior(_slots_of_stage(slots, encoder.family, name), num_heads_of(module), encoder.grid),
            index,
            layout,
            module.config,
            head_dim_of(module),
            for_adapters,
        )
        for index, (name, module) in enumerate(encoder.attention.items())
    ]
    module: Any
    for module, sidecar in zip(encoder.attention.values(), sidecars, strict=True):
        _check_mixer(sidecar.prior, head_dim_of(module), encoder.family)
    for module, sidecar in zip(encoder.attention.values(), sidecars, strict=True):
        weight = next(module.parameters())
        sidecar.to(weight.device, torch.float64 if weight.dtype == torch.float64 else None)
        module.add_module(SIDECAR, sidecar.train(module.training))
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = IMPLEMENTATIONS[0]
    return Applied(sidecars[0].prior, list(encoder.attention), layout.watch(encoder.embeddings))


def remove_prior(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `apply_prior`: the model is what it was before, to the bit.

    Raises:
        ValueError: if the model has no prior of `apply_prior`, or an adapter that adds a decay to it.
    """
    applied = applied_prior(model)
    if any(has_adapter(sidecar) for sidecar in sidecars_of(model)):
        raise ValueError(f"{type(model).__name__} has an adapter with a decay; unload() of the peft model comes first")
    detach(model, applied)
    delattr(model, STATE)
    return model


def has_adapter(sidecar: StockPrior) -> bool:
    """Whether peft holds scalars in it: a decay of its own, or a copy of the prior's in `modules_to_save`."""
    copied = any(name.endswith("modules_to_save") for name, _ in sidecar.named_modules())
    return sidecar.decay_adapter is not None or copied


def detach(model: nn.Module, applied: Applied) -> None:
    """Undo `attach`."""
    module: Any
    for name in applied.attention:
        module = model.get_submodule(name)
        module.config = getattr(module, SIDECAR).config
        delattr(module, SIDECAR)
    for handle in applied.handles:
        handle.remove()
    for module in model.modules():
        if isinstance(checkpoint := getattr(module, "_gradient_checkpointing_func", None), LayoutKeeper):
            module._gradient_checkpointing_func = checkpoint.checkpoint


def applied_prior(model: PreTrainedModel) -> Applied:
    """What `apply_prior` did to a model.

    Raises:
        ValueError: if it did nothing.
    """
    applied = getattr(model, STATE, None)
    if applied is None:
        raise ValueError(f"{type(model).__name__} has no prior from hf_sparseprior.apply_prior")
    return applied


def _check_extras(slots: dict[str, Any], family: Family) -> None:
    """Raise for extras that a stock model has no place for."""
    for extra in resolve_extras(slots["extras"], (1, 1)):
        if (place := EXTRAS[extra["name"]].place) != "attention":
            raise ValueError(f"{extra['name']!r} changes the {place}; apply_prior reaches attention alone")
        if family.shuffled or family.masked:
            raise ValueError(f"{extra['name']!r} cannot follow a shuffled part of the patches ({family.attention})")


def _check_mixer(prior: ResolvedPrior, head_dim: int, family: Family) -> None:
    """Raise for a mixer that wants other queries and keys than those that a stock model has, or has no logits."""
    if prior["mixer"] == "softmax":
        return
    if family.windows:
        name = prior["mixer"]["name"]
        raise ValueError(
            f"mixer {name!r} has no logits of pairs, to which {family.attention} adds its relative positions"
        )
    width = MIXERS[prior["mixer"]["name"]].key_width(prior["mixer"], head_dim)
    if width != head_dim:
        raise ValueError(f"key_width={width} is not the {head_dim} that the model's queries and keys have")


def _with_identity(slots: dict[str, Any]) -> dict[str, Any]:
    decay = slots["decay"]
    if not isinstance(decay, (str, Mapping)) or decay == "none":
        return slots
    decay = {"name": decay} if isinstance(decay, str) else decay
    return {**slots, "decay": {"init": "identity", **decay}}


def _slots_of_stage(slots: dict[str, Any], family: Family, name: str) -> dict[str, Any]:
    """The prior of an attention module; later stages of some families take no support."""
    stage = re.search(r"layers\.(\d+)\.blocks", name)
    if family.support_stages is None or stage is None or int(stage[1]) < family.support_stages:
        return slots
    return {**slots, "support": None}


# ---- saving and loading ---------------------------------------------------------------------------------------------


def scalars_of(model: PreTrainedModel, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The prior's learned scalars under names that do not depend on the head: "layers.0.decay_bias.beta".

    Args:
        model: with a prior of `apply_prior`.
        state_dict: to take them from, instead of the model.
    """
    tensors = model.state_dict() if state_dict is None else state_dict
    return {name: tensors[key] for key, name in _scalar_names(model, tensors).items()}


def _scalar_names(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Of those keys of a state dict that are the prior's, their names in the file."""
    prefixes = [f"{name}.{SIDECAR}." for name in applied_prior(model).attention]
    return {
        key: f"layers.{layer}.{key.removeprefix(prefix)}"
        for layer, prefix in enumerate(prefixes)
        for key in keys
        if key.startswith(tuple(prefix + own for own in OWN))
    }


@contextlib.contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[None]:
    """For the time of saving: the prior in the config, and its scalars kept out of the stock weights.

    transformers refuses to load a config with an attention that it does not know, so where this package is not there,
    the saved model does not come back without its prior unnoticed.
    """
    # Also in that of a vision tower, which a class for the tower alone reads.
    configs = {id(config): config for config in (model.config, sidecars_of(model)[0].config)}
    ignored, prior = model._keys_to_ignore_on_save, applied_prior(model).prior
    for config in configs.values():
        setattr(config, CONFIG_FIELD, {"prior": prior})
        config.attn_implementation = IMPLEMENTATIONS[1 if prior["decay"] else 0]
    model._keys_to_ignore_on_save = {*(ignored or ()), *_scalar_names(model, model.state_dict())}
    try:
        yield
    finally:
        for config in configs.values():
            delattr(config, CONFIG_FIELD)
            del config.attn_implementation
        model._keys_to_ignore_on_save = ignored


def restore_prior(model: PreTrainedModel, folder: str | os.PathLike, **source: Any) -> None:
    """Apply the prior that a loaded model's config speaks of, and read its scalars from beside the weights.

    Args:
        model: as `from_pretrained` of a stock class returned it.
        folder: folder or hub name that it came from.
        source: `subfolder`, `revision` and the like, of `from_pretrained`.

    Raises:
        OSError: if the scalars are missing, damaged or of another shape.
    """
    record = name = None
    for module in model.modules():  # decoders and towers have configs of their own
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if hasattr(config, CONFIG_FIELD):
            record = getattr(config, CONFIG_FIELD)
            delattr(config, CONFIG_FIELD)
        if config._attn_implementation in IMPLEMENTATIONS:
            name = config._attn_implementation
            config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    if (record or name) and getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{folder} is an adapter for a model with a prior: load that model, then "
            "peft.PeftModel.from_pretrained(model, folder)"
        )
    if record is None:
        if name is not None:
            apply_prior(model, name)
        return
    apply_prior(model, record["prior"])
    load_scalars(model, folder, **source)


def load_scalars(model: PreTrainedModel, folder: str | os.PathLike, **source: Any) -> None:
    """Read the scalars that `save_pretrained` wrote into a model with the same prior.

    Raises:
        OSError: if the file is missing, damaged, or of a model of another shape.
    """
    path = cached_file(folder, SCALARS_FILE, **source)
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise OSError(f"{path} is damaged: {error}") from None
    expected = scalars_of(model)
    got = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for name in sorted({*expected, *got}):
        shape = tuple(expected[name].shape) if name in expected else None
        if got.get(name) != shape:
            raise OSError(f"{path}: {name} has shape {got.get(name)}, the model's prior {shape}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(found[name])


# There is no other seam: `from_pretrained` of a stock class asks nobody about the modules of a model, and would return
# a model without its prior. Models that never had one pass through.
_stock_save = PreTrainedModel.save_pretrained
_stock_load = PreTrainedModel.from_pretrained.__func__
_SOURCE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


@functools.wraps(_stock_save)
def _save_pretrained(self: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    sidecars, file = sidecars_of(self), Path(save_directory) / SCALARS_FILE
    by_adapter = getattr(self, "_hf_peft_config_loaded", False)  # then transformers saves adapters and nothing else
    if not sidecars or (by_adapter and all(sidecar.for_adapters for sidecar in sidecars)):
        result = _stock_save(self, save_directory, *args, **kwargs)
        file.unlink(missing_ok=True)  # of a model that was saved there before
        return result
    if by_adapter or any(has_adapter(sidecar) for sidecar in sidecars):
        raise ValueError(
            f"{type(self).__name__} has a prior and an adapter: save the peft model, or unload() or merge first"
        )
    if getattr(self, STATE, None) is None:
        raise ValueError(
            f"{type(self).__name__} has a prior that was applied to a part of it or to what it is a part of; "
            "hf_sparseprior.apply_prior goes to the model that is saved"
        )
    if kwargs.get("is_main_process", True):
        # First, because saving may go on to upload the folder.
        os.makedirs(save_directory, exist_ok=True)
        scalars = {name: tensor.contiguous() for name, tensor in scalars_of(self, kwargs.get("state_dict")).items()}
        write_bytes(file, save(scalars, {"format": "pt"}))
    with _recorded(self):
        return _stock_save(self, save_directory, *args, **kwargs)


def _mentions_prior(config: Any) -> bool:
    parts = [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]
    return hasattr(config, CONFIG_FIELD) or any(_mentions_prior(part) for part in parts)


@functools.wraps(_stock_load)
def _from_pretrained(cls: type[PreTrainedModel], source: Any, *args: Any, **kwargs: Any) -> Any:
    own = kwargs.get("config")
    if isinstance(own, PreTrainedConfig) and not _mentions_prior(own):
        file = Path(str(source)) / kwargs.get("subfolder", "") / SCALARS_FILE
        if file.is_file():
            raise ValueError(f"config={type(own).__name__} says nothing of the prior of {file}; leave it out")
    loaded = _stock_load(cls, source, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    restore_prior(model, source, **{name: kwargs[name] for name in _SOURCE_ARGUMENTS if name in kwargs})
    return loaded


PreTrainedModel.save_pretrained = _save_pretrained
PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
