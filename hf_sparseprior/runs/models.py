"""Models of a run: which family a section describes, what results.json says about a model, how an adapter is saved."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME

from hf_sparseprior.adapters.stock_attention import applied_prior, stock_priors
from hf_sparseprior.analysis.decays import learned_decays
from hf_sparseprior.base.families import FAMILIES, Family, family_of, preset_family
from hf_sparseprior.models.pretrained import saved_family
from hf_sparseprior.priors.prior import prior_name
from hf_sparseprior.saving.card import add_adapter_requirement

CHANGES = ("max_decay_change", "mean_decay_change", "max_alpha_change")
# Keys of a section that describes a model, besides the fields of its family's config.
FAMILY_KEYS = ("family", "preset", "pretrained")
DEFAULT_FAMILY = "sparseprior_vit"


def section_family(section: Mapping[str, Any], name: str = "model") -> Family:
    """The family that a section of a configuration describes.

    That is `family`, or that of the model in `pretrained`, or that of `preset`; SparsePriorViT where none says it. A
    folder in `pretrained` need not be there yet.

    Args:
        section: with the keys of FAMILY_KEYS that are given.
        name: of the section, for errors.

    Raises:
        ValueError: for a name that is none, a folder of another family, or one that is none of ours.
        OSError: for a folder whose config cannot be read.
    """
    given, preset, folder = (section.get(key) for key in FAMILY_KEYS)
    images = [family.name for family in FAMILIES.values() if family.takes == "images"]
    if given is not None and given not in images:
        raise ValueError(f"{name}.family={given!r} must be one of {', '.join(images)}")
    if isinstance(folder, (str, os.PathLike)) and (Path(folder) / CONFIG_NAME).is_file():
        saved = saved_family(folder)
        if given not in (None, saved.name):
            raise ValueError(f"{name}.family={given!r}, and {name}.pretrained={folder} is a {saved.name!r}")
        return saved
    if given is None and preset:
        return preset_family(preset)
    return FAMILIES[given or DEFAULT_FAMILY]


def alike_across_priors(make: Callable[[dict[str, Any]], Any], is_dense: Callable[[Any], bool]) -> Any:
    """A new model, in which the weights that a dense one has, too, are those of the dense one of the same seed.

    So rows of a comparison start alike. Otherwise the numbers that a decay draws would shift all that is drawn after
    them. What is drawn after the model is the same, too.

    Args:
        make: a new model, with these options over its own. is_dense: whether a model has no prior.
    """
    state = torch.get_rng_state()
    built = make({})
    if not is_dense(built):
        torch.set_rng_state(state)
        take_weights(built, make({"prior": "dense"}))
    return built


@torch.no_grad()
def take_weights(model: nn.Module, other: nn.Module) -> None:
    """Copy parameters and buffers of another model where names and shapes are the same."""
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
        if name in theirs and theirs[name].shape == value.shape:
            value.copy_(theirs[name])


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@torch.no_grad()
def decay_change(model: Any) -> dict[str, float | None]:
    """How far the learned decay is from none, over layers, heads and pairs; None without a decay.

    Returns:
        max_decay_change: max |M - 1|; mean_decay_change: mean 1 - M; max_alpha_change: max |alpha - 1|, 0 if alpha
        is not learned.
    """
    try:
        decays = learned_decays(model)
    except ValueError:  # it has none
        return dict.fromkeys(CHANGES)
    cuda = next(model.parameters()).is_cuda  # others lack float64
    means, lows = zip(*(decay.mask_mean_and_min("cuda" if cuda else "cpu") for decay in decays), strict=True)
    alphas = [decay.alpha for decay in decays if decay.alpha is not None]
    alpha = max(((own - 1).abs().max().item() for own in alphas), default=0.0)
    return dict(zip(CHANGES, (1 - min(lows), 1 - sum(means) / len(means), alpha), strict=True))


def about_model(model: Any) -> dict[str, Any]:
    """Prior, decay, share of pairs left out and size of a model of ours, or of one of transformers with or without a
    prior in place; of the latter the share is None.
    """
    config = model.config
    if family_of(config) is not None:
        name, settings, ratio = config.prior_name, config.prior, config.pruning_ratio
    else:
        settings = applied_prior(model).prior if stock_priors(model) else None
        name, ratio = "dense" if settings is None else prior_name(settings), None
    return {
        "prior": name,
        "prior_settings": settings,
        **decay_change(model),
        "pruning_ratio": ratio,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def merged(model: Any) -> Any:
    """The model itself or, if it has a LoRA or DoRA adapter, a copy with the adapter merged into the weights."""
    return copy.deepcopy(model).merge_and_unload() if is_peft_model(model) else model


def save_adapter(folder: Path, model: Any) -> int | None:
    """Write an adapter alone. Returns the bytes of its weights, None for a model without one."""
    if not is_peft_model(model):
        return None
    model.save_pretrained(folder)
    add_adapter_requirement(folder)
    return (folder / ADAPTER_SAFE_WEIGHTS_NAME).stat().st_size
