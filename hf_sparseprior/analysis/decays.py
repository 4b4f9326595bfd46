"""What a trained model's decays look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.analysis.layers import attention_layers, find_attention
from hf_sparseprior.attention.plan import AttentionPlan, decay_positions
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.decay import Decay, decay_mask, decay_weights

BLOCK = 1 << 22  # distances at a time


@torch.no_grad()
def learned_decay_masks(model: Any) -> list[Tensor]:
    """M (H, N, N) in float32 of every layer with a decay of a model of ours, on the configured grid of its stage."""
    masks = []
    grids = [stage.grid for stage in model.config.stages for _ in range(stage.num_layers)]
    for layer, grid in zip(attention_layers(model), grids, strict=True):
        if layer.decay_bias is not None:
            plan, decay = layer.plan(grid, model.config.num_prefix_tokens), layer.decay_bias()
            masks.append(decay_mask(decay, decay_positions(plan, decay, decay["beta"].device), torch.float32))
    return masks


@dataclass(frozen=True)
class LearnedDecay:
    """The decay of one layer; tensors in float64 on the CPU.

    layer: number from 0. curves: names of what distances are measured along. beta: (C, H). alpha: (H,), None if it is
    not learned. prefix_beta: (H,), that of prefix tokens, None if their gamma is 1. positions: (C, A, N). grid:
    (height, width) of the N patches, of a clip with its frames one below the other.
    """

    layer: int
    curves: list[str]
    beta: Tensor
    alpha: Tensor | None
    prefix_beta: Tensor | None
    positions: Tensor
    grid: tuple[int, int]

    @property
    def gamma(self) -> Tensor:
        """sigmoid(beta), (C, H) (VIOLIN Eq. 12)."""
        return torch.sigmoid(self.beta)

    def mask_row(self, patch: int) -> Tensor:
        """M (H, N) of one patch with all patches (VIOLIN Eq. 13)."""
        return decay_weights(self.beta, _distances(self.positions, slice(patch, patch + 1)), torch.float64)[:, 0]

    def curve_row(self, curve: int, beta: float, patch: int) -> Tensor:
        """gamma^distance (N,) of one patch along one curve alone, for any beta (VIOLIN Figures 4 and 11)."""
        distances = _distances(self.positions[curve : curve + 1], slice(patch, patch + 1))
        return decay_weights(torch.full((1, 1), beta, dtype=torch.float64), distances, torch.float64)[0, 0]

    def mask_mean_and_min(self, device: torch.device | str = "cpu") -> tuple[float, float]:
        """Mean and smallest value of M over all heads and pairs, computed on a device by some rows at a time: M itself
        is never formed.
        """
        beta, positions = self.beta.to(device), self.positions.to(device)
        count = positions.shape[-1]
        step = max(1, BLOCK // positions.numel())
        sums, lows = [], []
        for first in range(0, count, step):
            rows = decay_weights(beta, _distances(positions, slice(first, first + step)), torch.float64)
            sums.append(rows.sum())
            lows.append(rows.min())
        return torch.stack(sums).sum().item() / (beta.shape[1] * count**2), torch.stack(lows).min().item()


def _distances(positions: Tensor, rows: slice) -> Tensor:
    """Distances (C, R, N) of R patches to all patches, from positions (C, A, N)."""
    positions = positions.to(torch.float64)
    return (positions[..., rows, None] - positions.unsqueeze(-2)).abs().sum(1)


def learned_decays(model: nn.Module) -> list[LearnedDecay]:
    """The decays of a model's layers. They come from its own prior, from `apply_prior` or from an active adapter of
    peft.

    Raises:
        ValueError: if no layer has one.
    """
    attention = find_attention(model)
    learned = []
    for layer in attention.layers:
        decay = None if layer.prior is None else layer.prior.active_decay()
        if layer.prior is not None and decay is not None:
            learned.append(_learned(layer.number, decay, layer.prior.plan(layer.grid, attention.num_prefix_tokens)))
    if not learned:
        raise ValueError(f"{type(model).__name__} has no decay, its prior is {attention.prior_name!r}")
    return learned


def _learned(layer: int, decay: Decay, plan: AttentionPlan) -> LearnedDecay:
    values = decay()
    alpha, beta, prefix_beta = (
        None if (value := values[name]) is None else value.detach().to("cpu", torch.float64)
        for name in ("alpha", "beta", "prefix_beta")
    )
    assert beta is not None
    positions = decay_positions(plan, values, decay.beta.device).detach().cpu()
    names = position_names(decay.settings, len(beta))
    return LearnedDecay(layer, names, beta, alpha, prefix_beta, positions, plan.grid)


def position_names(settings: Settings, count: int) -> list[str]:
    """Names of the positions of a resolved decay: its curves, or its own name and that name with `_t`."""
    names: Sequence[str] = settings.get("curves", [settings["name"], f"{settings['name']}_t"])
    return list(names)[:count]
