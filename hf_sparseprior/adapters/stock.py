"""Priors on stock models of transformers and timm, in place: `apply_prior(model, prior)`, undone by `remove_prior`.

Stock attention modules ask `AttentionInterface` for the function that their config names. Each one gets a copy of its
config that names our function. TimeSformer's and timm's do not ask; each gets a `forward` of its own. Next to its
projections it gets a `StockPrior`, which holds the decay's scalars and knows support, layer and grid. The model's own
config is not changed: a second model that shares it stays as it is, and `set_attn_implementation` cannot turn the prior
off. No class of transformers or timm is changed either: `save_pretrained` is replaced in this one model, and timm's
`no_weight_decay`.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_sparseprior.adapters.stock_attention import (
    APPLIED,
    PRIOR_MODULE,
    REGISTERED,
    Applied,
    StockPrior,
    applied_prior,
    stock_priors,
)
from hf_sparseprior.adapters.stock_encoder import find_encoder, head_dim_of, num_heads_of
from hf_sparseprior.adapters.stock_families import StockFamily
from hf_sparseprior.adapters.stock_saving import bind_saving, refuse_files_weights, unbind_saving
from hf_sparseprior.adapters.stock_timesformer import timesformer_attention
from hf_sparseprior.adapters.stock_timm import FORWARDS, class_path
from hf_sparseprior.adapters.timm_encoder import has_timm
from hf_sparseprior.adapters.token_layout import LayoutCheckpoint
from hf_sparseprior.base.extras import EXTRAS, resolve_extras
from hf_sparseprior.base.numbered import counted, keyed, numbered
from hf_sparseprior.base.resolved import PER_LAYER, FullPrior, ResolvedPrior
from hf_sparseprior.priors.layer_priors import has_layers
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.prior import PriorSpec, parse_prior, resolve_prior

Model = TypeVar("Model", bound=nn.Module)


def apply_prior(model: Model, prior: str | Mapping[str, Any]) -> Model:
    """Give a stock vision model of transformers or timm a prior, in place. Its weights stay as they are.

    Decays start where they change nothing (alpha = 1, beta = 20: the model's output to 1e-5), unless their `init` says
    otherwise. Call it on the model that is saved, not on a part of it, and before an optimizer is made.

    Example:

    ```python
    model = sp.apply_prior(AutoModelForImageClassification.from_pretrained("facebook/deit-small-patch16-224"), "violin")
    model.push_to_hub("USER/NAME")
    # Where this package is missing:
    model = AutoModelForImageClassification.from_pretrained("USER/NAME", trust_remote_code=True)
    ```

    Args:
        model: ViT, DeiT, ViT-MSN, DINOv2, DINOv3, BEiT, CLIP, SigLIP, ViTMAE, I-JEPA, Swin, or of clips VideoMAE, ViViT
            or TimeSformer, any head; timm's VisionTransformer, Eva, NaFlexVit or SwinTransformer, alone or within
            another module, as in TimmWrapper models. In a peft model the base model gets the prior, whose weights are
            frozen, as the base model's are: peft would not save them.
        prior: as in `SparsePriorViTConfig`, also {"layers": ...}, over all attention layers. Extras must be within
            attention, and not on ViTMAE and where attention sees several frames together: there `time` of the prior
            says how it sees them ("violin+clip"). In a TimeSformer attention over time alone does not change.

    Returns:
        The model.

    Raises:
        ValueError: for a bad prior, a model that has a prior, or a model that cannot take one; the message says which
            module, and why.
    """
    if prior is None:
        raise ValueError("prior=None must name a prior; hf_sparseprior.remove_prior(model) takes a model's prior away")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r:.80} must be a model of transformers or timm")
    target: Any = model
    if hasattr(target, "get_base_model"):  # peft's
        target = target.get_base_model()
    if priors := stock_priors(target):
        had = "a prior already; hf_sparseprior.remove_prior(model)"
        if priors[0].for_adapters:
            had = "an adapter with a decay, which goes on top of a prior; unload() of the peft model"
        raise ValueError(f"{type(model).__name__} has {had} comes first")
    if not isinstance(target, PreTrainedModel) and not has_timm(target):
        raise ValueError(
            f"{type(model).__name__} must be a model of transformers, the one that is saved, or one of timm"
        )
    applied = attach(target, prior)
    if target is not model and (weights := [weight for one in stock_priors(target) for weight in one.parameters()]):
        for weight in weights:
            weight.requires_grad_(False)
        warnings.warn(
            f"the prior's weights in {type(model).__name__} are frozen, because peft would not save them; to train "
            "them, apply the prior first and take sp.adapters.lora_config(model), or add sp.ViolinAdapterConfig",
            stacklevel=2,
        )
    own_prior(target, applied)
    return model


def own_prior(model: nn.Module, applied: Applied) -> None:
    """Note what `attach` did as the prior of a model."""
    if isinstance(model, PreTrainedModel):
        applied.handles.append(model.register_load_state_dict_pre_hook(refuse_files_weights))
    setattr(model, APPLIED, applied)


def remove_prior(model: Model) -> Model:
    """Undo `apply_prior`: the model is what it was before, to the bit.

    Raises:
        ValueError: if the model has no prior of `apply_prior`, or an adapter that adds a decay to it.
    """
    applied = applied_prior(model)
    if any(prior.has_adapter for prior in stock_priors(model)):
        raise ValueError(f"{type(model).__name__} has an adapter with a decay; unload() of the peft model comes first")
    detach(model, applied)
    delattr(model, APPLIED)
    return model


def attach(model: nn.Module, prior: PriorSpec | None, for_adapters: bool = False) -> Applied:
    """Put a `StockPrior` into every attention module of a stock model, and hooks on its embeddings.

    Args:
        prior: as of `apply_prior`; None: dense.
        for_adapters: as in `StockPrior`.

    Raises:
        ValueError: for a bad prior, or a model that cannot take one. The model is left as it was.
    """
    encoder = find_encoder(model)
    layout = encoder.layout(model)
    # All are made before the first is put in place, because a refused setting must leave the model alone.
    resolved = _resolved_layers(prior, encoder)
    module: Any
    priors = []
    for index, (module, one) in enumerate(zip(encoder.attention.values(), resolved, strict=True)):
        _check_mixer(one, head_dim_of(module), encoder.family)
        heads, width = num_heads_of(module), head_dim_of(module)
        priors.append(StockPrior(heads, one, index, layout, encoder.config, width, for_adapters))
    for module, part in zip(encoder.attention.values(), priors, strict=True):
        weight = next(module.parameters())
        part.to(_device_of(module), torch.float64 if weight.dtype == torch.float64 else None)
        module.add_module(PRIOR_MODULE, part.train(module.training))
        if encoder.family.own_forward:
            _give_forward(module)
            continue
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = REGISTERED
    bind_saving(model)
    layers = keyed(resolved)
    # One prior for all is recorded as that of the first layer: where it has no support in later stages, it says so.
    differ = has_layers(prior) and (len(layers) > 1 or encoder.family.support_stages is not None)
    recorded: FullPrior = {"layers": layers} if differ else resolved[0]
    return Applied(recorded, list(encoder.attention), layout.watch(encoder.embeddings))


def _device_of(module: nn.Module) -> torch.device:
    """Where a module runs: where its weights are, or where accelerate will bring them from memory or disk."""
    device = next(module.parameters()).device
    hooks: Iterator[Any] = (getattr(part, "_hf_hook", None) for part in module.modules())
    runs_on = next((hook.execution_device for hook in hooks if hasattr(hook, "execution_device")), None)
    return device if device.type != "meta" or runs_on is None else torch.device(runs_on)


def _give_forward(module: Any) -> None:
    """Replace the forward of one module, and of the copies that `nn.DataParallel` makes of it."""
    module.forward = functools.partial(FORWARDS.get(class_path(module), timesformer_attention), module)
    module._replicate_for_data_parallel = functools.partial(_replicate, module)


def _replicate(module: Any) -> Any:
    """What `nn.DataParallel` asks of a module. A plain copy's forward would go on with the weights of the original."""
    replica = type(module)._replicate_for_data_parallel(module)
    _give_forward(replica)
    return replica


def detach(model: nn.Module, applied: Applied) -> None:
    """Undo `attach`."""
    unbind_saving(model)
    module: Any
    for name in applied.attention:
        module = model.get_submodule(name)
        prior = getattr(module, PRIOR_MODULE)
        if prior.layout.family.own_forward:
            del module.forward, module._replicate_for_data_parallel
        else:
            module.config = prior.config
        delattr(module, PRIOR_MODULE)
    for handle in applied.handles:
        handle.remove()
    for module in model.modules():
        if isinstance(checkpoint := getattr(module, "_gradient_checkpointing_func", None), LayoutCheckpoint):
            module._gradient_checkpointing_func = checkpoint.checkpoint


def _check_extras(slots: dict[str, Any], family: StockFamily) -> None:
    """Raise for extras that a stock model has no place for."""
    for extra in resolve_extras(slots["extras"], (1, 1)):
        if (place := EXTRAS[extra["name"]].place) != "attention":
            raise ValueError(f"{extra['name']!r} changes the {place}; apply_prior reaches attention alone")
        if family.shuffled or family.masked:
            raise ValueError(f"{extra['name']!r} cannot follow a shuffled part of the patches ({family.attention})")


def _check_mixer(prior: ResolvedPrior, head_dim: int, family: StockFamily) -> None:
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
    """The slots, in which a decay without `init` starts where it changes nothing."""
    decay = slots["decay"]
    if not isinstance(decay, (str, Mapping)) or decay == "none":
        return slots
    decay = {"name": decay} if isinstance(decay, str) else decay
    return {**slots, "decay": {"init": "identity", **decay}}


def _resolved_layers(prior: PriorSpec | None, encoder: Any) -> list[ResolvedPrior]:
    """The prior of each attention module.

    Raises:
        ValueError: for a bad prior; of several the message has the layers.
    """
    count = len(encoder.attention)
    if has_layers(prior):
        parts = numbered(cast("Mapping[str, Any]", prior)[PER_LAYER], count, f"prior: {PER_LAYER}")
        slots = [(numbers, _with_identity(parse_prior(spec))) for numbers, spec in parts]
    else:
        slots = [(range(count), _with_identity(parse_prior(prior)))]
    modules, resolved = list(encoder.attention.items()), []
    for numbers, given in slots:
        try:
            _check_extras(given, encoder.family)
            for name, module in modules[numbers.start : numbers.stop]:
                of_stage = given if has_layers(prior) else _slots_of_stage(given, encoder.family, name)
                resolved.append(resolve_prior(of_stage, num_heads_of(module), encoder.grid_of(module)))
        except ValueError as error:
            if len(slots) == 1:
                raise
            raise ValueError(f"{error} ({counted('layer', numbers)} of {count})") from None
    return resolved


def _slots_of_stage(slots: dict[str, Any], family: StockFamily, name: str) -> dict[str, Any]:
    """The prior of an attention module; later stages of some families take no support."""
    stage = re.search(r"layers\.(\d+)\.blocks", name)
    if family.support_stages is None or stage is None or int(stage[1]) < family.support_stages:
        return slots
    return {**slots, "support": None}
