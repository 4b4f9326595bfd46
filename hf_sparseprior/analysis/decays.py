"""What a trained model's decays look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.decay import decay_mask
from hf_sparseprior.ops import decay_positions


@torch.no_grad()
def learned_decay_masks(layers: Any, config: Any) -> list[Tensor]:
    """M (H, N, N) in float32 of every layer that has a decay, on the configured grid.

    Args:
        layers: the blocks of a SparsePriorViT (`model.vit.layers`).
        config: of the model.
    """
    masks = []
    for layer in layers:
        if layer.attention.decay_bias is not None:
            plan = layer.attention.plan(config.grid, config.num_prefix_tokens)
            decay = layer.attention.decay_bias()
            masks.append(decay_mask(decay, decay_positions(plan, decay, decay["beta"].device), torch.float32))
    return masks
