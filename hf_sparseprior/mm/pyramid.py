"""The simple feature pyramid of ViTDet (Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object
Detection", section 3) as a neck of mmdetection.

Shape letters: B batch, C channels, H and W of the backbone's last map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.models.feature_maps import ChannelNorm


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """Maps of several strides, each made from the backbone's last map alone.

    Scale 1/2 is a max pooling, 1 the map itself, 2 one transposed convolution of stride 2, 4 two of them with a norm
    and GELU in between (these halve the channels each time). Each is followed by a 1x1 and a 3x3 convolution without
    bias and with layer norm. A map beyond the last scale has every second pixel of the map before (ViTDet's fifth).

    Args:
        in_channels: C of the backbone.
        out_channels: channels of every output.
        scales: side of each output as a multiple of the backbone's map, powers of two in falling order. (4, 2, 1, 0.5)
            are strides 4, 8, 16, 32 after patches of 16 pixels.
        num_outs: number of maps in all.
        init_cfg: as every module of mmengine.

    Raises:
        ValueError: for scales that are no powers of two, more scales than maps, or too few channels to halve.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        scales: Sequence[float] = (4, 2, 1, 0.5),
        num_outs: int = 5,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        if not 1 <= len(scales) <= num_outs:
            raise ValueError(f"scales={tuple(scales)} must be between one and num_outs={num_outs}")
        self.num_outs = num_outs
        self.stages = nn.ModuleList(_stage(in_channels, out_channels, scale) for scale in scales)

    def forward(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turn the backbone's last map (B, C, H, W) into `num_outs` maps (B, out_channels, scale * H, scale * W)."""
        outputs = [stage(maps[-1]) for stage in self.stages]
        while len(outputs) < self.num_outs:
            outputs.append(F.max_pool2d(outputs[-1], kernel_size=1, stride=2))
        return tuple(outputs)


def _stage(in_channels: int, out_channels: int, scale: float) -> nn.Sequential:
    """The layers that make one output."""
    doublings = math.log2(scale) if scale > 0 else math.nan
    if not doublings.is_integer():
        raise ValueError(f"scale {scale} must be a power of two")
    channels, layers = in_channels, []
    for index in range(int(doublings)):
        if channels % 2:
            raise ValueError(f"in_channels={in_channels} cannot be halved {int(doublings)} times for scale {scale}")
        if index:
            layers += [ChannelNorm(channels, eps=1e-6), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels //= 2
    for _ in range(-int(doublings)):
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    layers += [
        nn.Conv2d(channels, out_channels, kernel_size=1, bias=False),
        ChannelNorm(out_channels, eps=1e-6),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        ChannelNorm(out_channels, eps=1e-6),
    ]
    return nn.Sequential(*layers)
