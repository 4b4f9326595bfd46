"""Locality in the MLP: LocalViT (Li et al. 2021; VIOLIN Table 7, appendix F.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.extras import Extra, register_extra
from hf_sparseprior.base.layer_sizes import MLP_WIDTH
from hf_sparseprior.base.limits import check_limit, check_size
from hf_sparseprior.base.resolved import Settings


@register_extra("localvit")
class LocalityBranch(Extra):
    """A depthwise convolution over the patches between the MLP's two linear layers, after its activation.

    It is hidden + gate * hardswish(conv(hidden)) for patches; prefix tokens stay as they are. The gate starts at 0 and
    the kernel as the identity (VIOLIN F.6), so a pretrained model stays what it is. LocalViT's batch norms are left
    out, because they would change it. DeiT-B has 331,788 parameters, or 1,548,300 with 16 channels of squeeze and
    excitation; VIOLIN's Table 7 does not say what it counts as ~6.2M. Everything but the gate has a gradient once the
    gate is no longer 0.

    Args:
        intermediate_size: channels.
    """

    # squeeze_excitation: its hidden channels, 0 for none. LocalViT has intermediate_size // (hidden_size // 4).
    SETTINGS = {"kernel_size": 3, "squeeze_excitation": 0}
    UNIT_AXES = {
        **dict.fromkeys(("kernel", "excite", "excite_bias"), ((MLP_WIDTH,),)),
        "squeeze": ((), (MLP_WIDTH,)),
        "gate": (),
    }
    place = "MLP"

    def __init__(self, intermediate_size: int, **settings: Any) -> None:
        super().__init__()
        side, squeezed = settings["kernel_size"], settings["squeeze_excitation"]
        self.gate = nn.Parameter(torch.empty(1))
        self.kernel = nn.Parameter(torch.empty(intermediate_size, 1, side, side))
        self.squeeze = self.excite = self.excite_bias = None
        if squeezed:
            self.squeeze = nn.Parameter(torch.empty(squeezed, intermediate_size))
            self.excite = nn.Parameter(torch.empty(intermediate_size, squeezed))
            self.excite_bias = nn.Parameter(torch.empty(intermediate_size))
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        side = check_integer("localvit: kernel_size", settings["kernel_size"], 1)
        if side % 2 == 0:
            raise ValueError(f"localvit: kernel_size={side} must be odd")
        check_limit("tokens", side**2, f"localvit: kernel_size={side} covers {side**2} patches, which must be")
        channels = check_size("localvit: squeeze_excitation", settings["squeeze_excitation"], 0, "width")
        return {"kernel_size": side, "squeeze_excitation": channels}

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        return hidden * (settings["kernel_size"] ** 2 + 2 * settings["squeeze_excitation"])

    def initial_values(self) -> dict[str, Tensor]:
        """Gate 0, a kernel with 1 in its middle, and a squeeze that is not 0, because its gradient would stay 0."""
        values = super().initial_values()
        middle = self.kernel.shape[-1] // 2
        values["kernel"][:, :, middle, middle] = 1.0
        if self.squeeze is not None:
            values["squeeze"].normal_(std=0.02)
        return values

    @classmethod
    def multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int], prefix: int
    ) -> int:
        """The depthwise convolution at every patch, and the two linear layers of squeeze and excitation."""
        return hidden * (settings["kernel_size"] ** 2 * grid[0] * grid[1] + 2 * settings["squeeze_excitation"])

    def forward(self, hidden: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
        """Turn (B, T, channels) into (B, T, channels)."""
        patches = hidden[:, num_prefix_tokens:]
        image = patches.transpose(1, 2).unflatten(2, grid)
        channels, padding = self.kernel.shape[0], self.kernel.shape[-1] // 2
        local = F.hardswish(F.conv2d(image, self.kernel, padding=padding, groups=channels))
        if self.squeeze is not None and self.excite is not None:
            squeezed = F.relu(F.linear(local.mean((2, 3)), self.squeeze))
            local = local * F.hardsigmoid(F.linear(squeezed, self.excite, self.excite_bias))[..., None, None]
        patches = patches + self.gate * local.flatten(2).transpose(1, 2)
        return torch.cat([hidden[:, :num_prefix_tokens], patches], 1)
