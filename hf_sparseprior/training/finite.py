"""Ends a training that has diverged, before anything of it is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

STOP, CONTINUE = "stop", "continue"
SETTING = "nonfinite_loss"  # its name in every configuration
MOST_LOSSES = 1000  # losses are read at the latest when so many were noted


def check_setting(name: str, value: object) -> None:
    """Raise ValueError unless a value says what is done at a loss that is not finite."""
    if value not in (STOP, CONTINUE):
        raise ValueError(f"{name}={value!r} must be {STOP!r} or {CONTINUE!r}")


class Diverged(ValueError):
    """The loss or a weight is not finite."""


class LossWatch:
    """Notes the loss of every step on its device, and reads the notes at once: one wait for the device, not one a step.

    last: (step, loss) of the last step with a finite loss; None before the first.
    """

    def __init__(self) -> None:
        self.last: tuple[int, float] | None = None
        self._steps: list[int] = []
        self._losses: list[Tensor] = []

    def note(self, step: int, loss: Tensor) -> None:
        """Note the loss of a micro-batch; a step's losses are summed."""
        self._steps.append(step)
        self._losses.append(loss.detach())

    def full(self) -> bool:
        """Whether it is time to read the notes, whatever else happens."""
        return len(self._losses) >= MOST_LOSSES

    def take(self) -> tuple[list[int], Tensor]:
        """Steps and losses noted since the last call, (n), and forget them."""
        steps, losses = self._steps, self._losses
        self._steps, self._losses = [], []
        return steps, torch.stack([loss.float().reshape(()) for loss in losses]) if losses else torch.zeros(0)

    def check(self, steps: Iterable[int], losses: Iterable[float], setting: str) -> None:
        """Raise Diverged at the first step whose loss is not finite.

        Args:
            steps, losses: as `take` returned them, the mean over processes.
            setting: the setting that would go on, for the error.
        """
        sums: dict[int, float] = {}
        for step, loss in zip(steps, losses, strict=True):
            sums[step] = sums.get(step, 0.0) + loss
        for step, loss in sums.items():
            if not math.isfinite(loss):
                raise Diverged(f"the loss of step {step} is {loss}; {self.before(setting)}")
            self.last = step, loss

    def before(self, setting: str) -> str:
        """What was finite last and what can be done, for errors."""
        if self.last is None:
            known = "no loss before it was read"
        else:
            step, loss = self.last
            known = f"the last finite one is {loss:.4g}, of step {step}"
        return f"{known}; lower the learning rate, or set {setting}={CONTINUE} to go on"


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number of floating tensors is finite; of sharded ones, this process' part. One wait per device."""
    whole: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.is_floating_point() and local.numel():
            finite = local.isfinite().all()
            whole[local.device] = finite & whole[local.device] if local.device in whole else finite
    return all(bool(finite) for finite in whole.values())
