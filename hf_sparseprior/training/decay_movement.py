"""Says in words that a learned decay did not move, and which setting lets it move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_sparseprior.patterns.decay import GROWING
from hf_sparseprior.priors.layer import PriorAttention

# Below these a decay is none in four digits: max |M - 1|, and -log gamma, its change from a patch to the next.
LEAST_CHANGE, LEAST_RATE = 5e-5, 1e-6


def unmoved_text(decay: Mapping[str, Any]) -> str:
    """What to say of a decay with these settings whose M is still 1 after training."""
    text = "the decay did not move: M is 1 for every pair of patches, as without a decay"
    name, init = decay["name"], decay["init"]
    if not decay.get("learn_beta", True):
        return f"{text}. learn_beta=false leaves M where it starts; set 'decay: {{name: {name}, init: {GROWING}}}'"
    if init == GROWING:
        return f"{text}. It starts there (init: {GROWING}); train for more steps, or at a higher learning rate"
    return (
        f"{text}. With init: {init} the gradients of its beta are almost 0. 'decay: {{name: {name}, init: {GROWING}}}' "
        "in the prior starts as the model without a decay, too, and moves"
    )


@torch.no_grad()
def unmoved_decay(model: nn.Module) -> str | None:
    """`unmoved_text` for a model whose decays are trained and are all still 1; None for every other model."""
    layers = [module for module in model.modules() if isinstance(module, PriorAttention)]
    decays = [decay for layer in layers if (decay := layer.active_decay()) is not None]
    if not any(parameter.requires_grad for decay in decays for parameter in decay.parameters()):
        return None
    rates = [F.softplus(-decay()["beta"].float()).max().item() for decay in decays]  # -log gamma
    return unmoved_text(decays[0].settings) if max(rates) < LEAST_RATE else None
