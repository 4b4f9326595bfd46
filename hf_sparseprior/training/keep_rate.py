"""A keep rate that falls while a model with EViT's token pruning is trained (Liang et al. 2022)."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import TrainerCallback

from hf_sparseprior.priors.token_pruning import EViT


def scheduled_keep_rate(epoch: float, start: float, epochs: float, keep_rate: float) -> float:
    """1 until the epoch `start`, then along half a cosine to `keep_rate`, which is reached `epochs` later."""
    if epoch < start:
        return 1.0
    if epoch >= start + epochs:
        return keep_rate
    return keep_rate + (1.0 - keep_rate) * (math.cos((epoch - start) / epochs * math.pi) + 1.0) / 2


def evit_modules(model: nn.Module) -> list[EViT]:
    """The modules of a model that prune as EViT does."""
    return [module for module in model.modules() if isinstance(module, EViT)]


class KeepRateSchedule(TrainerCallback):
    """Gives each training step its keep rate. Between steps, when models are evaluated, it is the prior's.

    Args:
        start, epochs: as in `scheduled_keep_rate`.
    """

    def __init__(self, start: float, epochs: float) -> None:
        self.start, self.epochs = start, epochs
        self._final: list[tuple[EViT, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the rate of the step."""
        self._final = [(module, module.keep_rate) for module in evit_modules(model)]
        for module, final in self._final:
            module.set_keep_rate(scheduled_keep_rate(state.epoch or 0.0, self.start, self.epochs, final))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the prior's rate again."""
        for module, final in self._final:
            module.set_keep_rate(final)
