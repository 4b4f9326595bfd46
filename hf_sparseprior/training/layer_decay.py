"""Parameter groups with one learning rate a layer (BEiT, MAE; Clark et al. 2020) and the weight-decay rule of ViTs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from hf_sparseprior.priors.prior import is_prior_weight

# "layers.3", or within a stage "stages.1.layers.3"; stock Swin has "layers.1.blocks.3".
_WITHIN = r"(?:layers|blocks|convolutions|final_convolutions)\.\d+"
LAYER = re.compile(rf"(?:^|\.)(?:(?:stages|layers)\.\d+\.{_WITHIN}|(?:layers?|blocks)\.\d+)(?=\.)")
STAGE = re.compile(rf"(?:^|\.)(?:stages|layers)\.\d+(?=\.{_WITHIN}\.)")
EMBEDDINGS = re.compile(r"(?:^|\.)(?:embeddings|patch_embed|cls_token|pos_embed|dist_token|reg_token)(?:\.|$)")


def layer_depths(names: Iterable[str]) -> tuple[dict[str, int], int]:
    """The layer of each parameter, and how many layers there are.

    Args:
        names: all parameters of a model, in the order of their registration, which is that of the layers.

    Returns:
        By name 0 for embeddings, l for the l-th of L layers, counted through all stages, and L + 1 for norm and
        classifier; and L. What merges patches between two stages goes with the layer before it.
    """
    names = list(names)
    stages = tuple({f"{name[: match.end()]}." for name in names if (match := STAGE.search(name))})
    layers: dict[str, int] = {}
    depths: dict[str, int | None] = {}
    for name in names:
        match = LAYER.search(name)
        if match and f"{name[: match.end()]}." not in stages:
            depths[name] = layers.setdefault(name[: match.end()], len(layers) + 1)
        elif name.startswith(stages):
            depths[name] = len(layers)
        else:
            depths[name] = 0 if EMBEDDINGS.search(name) else None
    return {name: len(layers) + 1 if depth is None else depth for name, depth in depths.items()}, len(layers)


def decayed_names(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay applies to: those of two dimensions and more, without those that
    `no_weight_decay` of a module names.
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        if callable(no_weight_decay := getattr(module, "no_weight_decay", None))
        for name, parameter in module.named_parameters()
        if name in no_weight_decay()  # in timm it also names parameters that a model has not
    }
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and id(parameter) not in exempt]


def adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over what is trained, where only `decayed_names` decay."""
    names = set(decayed_names(model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in trained if name in names]
    others = [parameter for name, parameter in trained if name not in names]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}], lr=learning_rate
    )


def parameter_groups(
    model: nn.Module,
    decayed: Collection[str],
    learning_rate: float,
    weight_decay: float,
    layer_decay: float,
    backbone: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups for an optimizer: by layer, by whether weight decay applies, and by whether the parameters are a prior's.

    Args:
        model: parameters that need no gradient are left out.
        decayed: names of the parameters that weight decay applies to.
        learning_rate: that of norm and classifier; layer l of L has learning_rate * layer_decay ** (L + 1 - l).
        weight_decay: that of the parameters in `decayed`; the others have 0.
        layer_decay: 1 gives every layer the same rate.
        backbone: factor of the rate of parameters that are not a prior's.

    Returns:
        Dicts with params, lr, weight_decay and layer.
    """
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Frozen layers count too, because the rate of a layer must not depend on what else is trained.
    depths, num_layers = layer_depths(name for name, _ in model.named_parameters())
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        layer = depths[name]
        key = (layer, name in decayed, backbone != 1.0 and is_prior_weight(name))
        group = groups.setdefault(
            key,
            {
                "params": [],
                "lr": learning_rate * layer_decay ** (num_layers + 1 - layer) * (1.0 if key[2] else backbone),
                "weight_decay": weight_decay if key[1] else 0.0,
                "layer": layer,
            },
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]
