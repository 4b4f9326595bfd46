"""The denoising network of Diffusion Policy (Chi et al. 2023): a U-Net of 1-D convolutions over time whose residual
blocks take their condition by FiLM (Perez et al. 2018), a scale and a bias per channel.

Shape letters: B batch, T time, A action size, C channels, D condition size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn


class StepEmbedding(nn.Module):
    """Sine and cosine of the diffusion step at geometric frequencies, then two linear layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 4 or size % 2:
            raise ValueError(f"step_embedding_size={size} must be even and 4 or more")
        self.size = size
        self.layers = nn.Sequential(nn.Linear(size, 4 * size), nn.Mish(), nn.Linear(4 * size, size))

    def forward(self, steps: Tensor) -> Tensor:
        """Turn int64 (B,) into (B, size)."""
        half = self.size // 2
        dtype = next(self.layers.parameters()).dtype
        exponents = torch.arange(half, device=steps.device, dtype=torch.float32) / (half - 1)
        phases = steps.float().unsqueeze(1) * torch.exp(-math.log(10000.0) * exponents)
        return self.layers(torch.cat([phases.sin(), phases.cos()], 1).to(dtype))


class ConvolutionBlock(nn.Sequential):
    """Convolution over time that keeps the length, GroupNorm, Mish."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int) -> None:
        super().__init__(
            nn.Conv1d(inputs, outputs, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, outputs), nn.Mish()
        )


class ResidualBlock(nn.Module):
    """Two convolution blocks; between them x <- scale * x + bias, both linear in the condition."""

    def __init__(self, inputs: int, outputs: int, condition_size: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.first = ConvolutionBlock(inputs, outputs, kernel_size, groups)
        self.second = ConvolutionBlock(outputs, outputs, kernel_size, groups)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition_size, 2 * outputs))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Turn (B, C, T) and (B, D) into (B, outputs, T)."""
        scale, bias = self.film(condition).unsqueeze(-1).chunk(2, 1)
        return self.second(scale * self.first(x) + bias) + self.shortcut(x)


class ConditionalUNet1D(nn.Module):
    """Predicts the noise in a sequence of actions.

    Every width but the last has two blocks and then halves the time. The middle has two blocks. On the way back, every
    width but the first takes the skipped features, undoes the halving and ends at the width before it.

    Args:
        action_size: A.
        condition_size: D, size of the condition on which the noise depends in addition to the diffusion step.
        widths: channels from outside to the middle.
        kernel_size: width of the convolutions, odd.
        groups: groups of GroupNorm; divides every width.
        step_embedding_size: size of the diffusion step's embedding.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    def __init__(
        self,
        action_size: int,
        condition_size: int,
        widths: Sequence[int] = (512, 1024, 2048),
        kernel_size: int = 5,
        groups: int = 8,
        step_embedding_size: int = 128,
    ) -> None:
        super().__init__()
        if not widths or any(width % groups for width in widths):
            raise ValueError(f"widths={list(widths)} must be multiples of groups={groups}")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd")
        self.time_factor = 2 ** (len(widths) - 1)
        self.step_embedding = StepEmbedding(step_embedding_size)
        condition_size += step_embedding_size

        def blocks(inputs: int, outputs: int) -> nn.ModuleList:
            return nn.ModuleList(
                ResidualBlock(size, outputs, condition_size, kernel_size, groups) for size in (inputs, outputs)
            )

        steps_in = list(zip((action_size, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(blocks(inputs, outputs) for inputs, outputs in steps_in)
        self.downsample = nn.ModuleList(nn.Conv1d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.middle = blocks(widths[-1], widths[-1])
        self.up = nn.ModuleList(blocks(2 * outputs, inputs) for inputs, outputs in reversed(steps_in[1:]))
        self.upsample = nn.ModuleList(
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1) for width in reversed(widths[:-1])
        )
        self.head = nn.Sequential(
            ConvolutionBlock(widths[0], widths[0], kernel_size, groups), nn.Conv1d(widths[0], action_size, 1)
        )

    def forward(self, actions: Tensor, steps: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Noise and middle features.

        Args:
            actions: (B, T, A) with noise; T a multiple of `time_factor`.
            steps: int64 (B,) diffusion steps.
            condition: (B, D).

        Returns:
            The noise (B, T, A) and the middle's output (B, widths[-1], T / time_factor), which Crossway decodes.
        """
        if actions.shape[1] % self.time_factor:
            raise ValueError(f"horizon={actions.shape[1]} must be a multiple of {self.time_factor}, 2^(widths - 1)")
        condition = torch.cat([self.step_embedding(steps), condition], 1)
        x, skipped = actions.transpose(1, 2), []
        down, up = (cast(Iterable[tuple[ResidualBlock, ResidualBlock]], pairs) for pairs in (self.down, self.up))
        for index, (first, second) in enumerate(down):
            x = second(first(x, condition), condition)
            skipped.append(x)  # the first is never used, as published
            if index < len(self.downsample):
                x = self.downsample[index](x)
        for block in self.middle:
            x = block(x, condition)
        middle = x
        for (first, second), upsample in zip(up, self.upsample, strict=True):
            x = torch.cat([x, skipped.pop()], 1)
            x = upsample(second(first(x, condition), condition))
        return self.head(x).transpose(1, 2), middle
