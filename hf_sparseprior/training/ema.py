"""Exponential moving average of a model's weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

EMA_FILE = "ema.safetensors"


class WeightAverage:
    """ema <- decay * ema + (1 - decay) * weight after every step, for the weights that are trained (DeiT, FIB Table 9)
    and the running statistics of batch norms.

    It is at least float32. The decay is constant from the first step on, as in timm and DeiT, or given with each
    update.

    Args:
        model: its weights are averaged; the average starts as a copy of them.
        decay: in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters |= {
            f"{norm}.{name}": statistic
            for norm, module in model.named_modules()
            if isinstance(module, nn.BatchNorm2d)
            for name, statistic in module.named_buffers()
            if statistic.is_floating_point()
        }
        self.averages = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in self.parameters.items()
        }
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Take one step towards the current weights, with this decay instead of the constant one."""
        average = self._average if decay is None else get_ema_multi_avg_fn(decay)
        averages = list(self.averages.values())
        current = [parameter.detach() for parameter in self.parameters.values()]
        average(averages, [c.to(a.dtype) for c, a in zip(current, averages, strict=True)], 1)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights. After it the model has its own again, bit for bit."""
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._write(self.averages)
        try:
            yield
        finally:
            self._write(kept)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the averages into a checkpoint folder."""
        save_file({name: tensor.contiguous() for name, tensor in self.averages.items()}, Path(folder) / EMA_FILE)

    def load(self, folder: str | os.PathLike) -> None:
        """Read what `save` wrote.

        Raises:
            ValueError: if the folder has no averages of this model.
        """
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {EMA_FILE}; its run kept no moving average")
        stored = load_file(path)
        if {name: tensor.shape for name, tensor in stored.items()} != {
            name: tensor.shape for name, tensor in self.averages.items()
        }:
            raise ValueError(f"{path} is of another model")
        for name, tensor in stored.items():
            self.averages[name].copy_(tensor)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
