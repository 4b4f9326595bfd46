"""Parameter groups with one learning rate a layer (BEiT, MAE; Clark et al. 2020) and the weight-decay rule of ViTs."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from hf_sparseprior.prior import is_prior_weight

LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks)\.(\d+)\.")
EMBEDDINGS = re.compile(r"(?:^|\.)(?:embeddings|patch_embed|cls_token|pos_embed|dist_token|reg_token)(?:\.|$)")


def layer_of_parameter(name: str, num_layers: int) -> int:
    """0 for embeddings, l for the l-th of `num_layers` transformer layers, num_layers + 1 for norm and classifier."""
    if match := LAYER.search(name):
        return int(match[1]) + 1
    return 0 if EMBEDDINGS.search(name) else num_layers + 1


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
        Dicts with params, names, lr, weight_decay and layer.
    """
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Frozen layers count too, because the rate of a layer must not depend on what else is trained.
    num_layers = max(
        (int(match[1]) + 1 for name, _ in model.named_parameters() if (match := LAYER.search(name))), default=0
    )
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        layer = layer_of_parameter(name, num_layers)
        key = (layer, name in decayed, backbone != 1.0 and is_prior_weight(name))
        group = groups.setdefault(
            key,
            {
                "params": [],
                "names": [],
                "lr": learning_rate * layer_decay ** (num_layers + 1 - layer) * (1.0 if key[2] else backbone),
                "weight_decay": weight_decay if key[1] else 0.0,
                "layer": layer,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return [groups[key] for key in sorted(groups)]
