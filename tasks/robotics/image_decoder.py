"""Decodes the U-Net's features to images: Crossway Diffusion's auxiliary task in training.

Shape letters: B batch, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tasks.robotics.policy_config import PolicyConfig


class ImageDecoder(nn.Module):
    """An image of 2x2 features: tiled to half the size, positions concatenated, two residual blocks, doubled."""

    def __init__(self, channels: int, config: PolicyConfig, size: tuple[int, int]) -> None:
        super().__init__()
        self.coarse, self.positions = (size[0] // 2, size[1] // 2), config.decoder_positions
        width, kernel, groups = config.decoder_width, config.kernel_size, config.groups
        self.blocks = nn.Sequential(
            ImageBlock(channels + self.positions, width, kernel, groups), ImageBlock(width, width, kernel, groups)
        )
        self.upsample = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.head = nn.Sequential(_image_convolution(width, width, kernel, groups), nn.Conv2d(width, 3, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Turn (B, channels, 2, 2) into (B, 3, height, width)."""
        height, width = self.coarse
        tiled = features.repeat(1, 1, math.ceil(height / 2), math.ceil(width / 2))[:, :, :height, :width]
        positions = image_positions(height, width, self.positions).to(tiled)
        x = torch.cat([tiled, positions.expand(len(tiled), -1, -1, -1)], 1)
        return self.head(self.upsample(self.blocks(x)))


class ImageBlock(nn.Module):
    """Two convolutions with GroupNorm and Mish, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _image_convolution(inputs, outputs, kernel_size, groups),
            _image_convolution(outputs, outputs, kernel_size, groups),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, inputs, height, width) into (B, outputs, height, width)."""
        return self.layers(x) + self.shortcut(x)


def _image_convolution(inputs: int, outputs: int, kernel_size: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, outputs), nn.Mish()
    )


def image_positions(height: int, width: int, channels: int) -> Tensor:
    """(channels, height, width): sine and cosine of 2^i pi y and 2^i pi x, y and x in [-1, 1]."""
    grid = torch.stack(
        torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    )  # (2, height, width)
    frequencies = math.pi * 2.0 ** torch.arange(channels // 4)
    phases = (frequencies[:, None, None, None] * grid).flatten(0, 1)
    return torch.cat([phases.sin(), phases.cos()])
