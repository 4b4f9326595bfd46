"""Models of a run: what results.json says about them, and how one with an adapter of peft is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from hf_sparseprior.analysis.decays import learned_decay_masks


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
    masks = learned_decay_masks(model.vit.layers, model.config)
    if not masks:
        return dict.fromkeys(("max_decay_change", "mean_decay_change", "max_alpha_change"))
    alphas = [alpha for layer in model.vit.layers if (alpha := layer.attention.decay_bias.alpha) is not None]
    return {
        "max_decay_change": max((mask - 1).abs().max().item() for mask in masks),
        "mean_decay_change": sum((1 - mask).mean().item() for mask in masks) / len(masks),
        "max_alpha_change": max(((alpha - 1).abs().max().item() for alpha in alphas), default=0.0),
    }


def about_model(model: Any) -> dict[str, Any]:
    """Prior, decay, share of pairs left out and size of a SparsePrior model."""
    return {
        "prior": model.config.prior_name,
        "prior_settings": model.config.prior,
        **decay_change(model),
        "pruning_ratio": model.config.pruning_ratio,
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
    return (folder / ADAPTER_SAFE_WEIGHTS_NAME).stat().st_size
