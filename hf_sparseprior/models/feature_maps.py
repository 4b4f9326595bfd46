"""Feature maps of backbones: images of any size, and the strides that heads of dense prediction want.

Shape letters: B batch, C channels, H and W of a map.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.backbone_utils import BackboneMixin

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.base.layer_sizes import WIDTH, UnitAxes

LARGEST_SCALE = 8


class FeatureMap(NamedTuple):
    """A map that a backbone can give out.

    name: as in `out_features`. width: C. stride: pixels from one of its places to the next, downwards and to the right.
    prefix: how many of its tokens come before the patches, while it is tokens.
    """

    name: str
    width: int
    stride: tuple[int, int]
    prefix: int


def pyramid(names: Sequence[str], widths: Sequence[int], stride: tuple[int, int]) -> list[FeatureMap]:
    """The maps of a family with stages: the embedding's, then one of each stage, the first with the embedding's stride.

    Args:
        names: of the embedding and the stages. widths: of the stages. stride: of the embedding.
    """
    sizes = [(widths[0], 1), *((width, 2**number) for number, width in enumerate(widths))]
    return [
        FeatureMap(name, width, (factor * stride[0], factor * stride[1]), 0)
        for name, (width, factor) in zip(names, sizes, strict=True)
    ]


class FeatureBackbone(BackboneMixin):
    """What the backbones of all families share; it goes before the family's model in the order of inheritance."""

    def forward_with_filtered_kwargs(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Some heads hand on an argument of their own backbone, None where nobody gave it.

        Raises:
            TypeError: for such an argument that is not None.
        """
        known = inspect.signature(self.forward).parameters
        for name, value in kwargs.items():
            if name not in known and value is not None:
                raise TypeError(f"{name}={value!r:.60} is no argument of {type(self).__name__}; leave it out")
        return super().forward_with_filtered_kwargs(*args, **{name: kwargs[name] for name in kwargs if name in known})


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of every pixel of a map (B, C, H, W)."""

    UNIT_AXES: UnitAxes = dict.fromkeys(("weight", "bias"), ((WIDTH,),))

    def forward(self, map_: Tensor) -> Tensor:
        """Normalise a map, same shape, and contiguous: mmcv's roi_align reads memory as if every map were."""
        return super().forward(map_.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


class DoubleSides(nn.ConvTranspose2d):
    """A transposed convolution that doubles the sides of a map."""

    UNIT_AXES: UnitAxes = {"weight": ((WIDTH,), (WIDTH,)), "bias": ((WIDTH,),)}

    def __init__(self, width: int) -> None:
        super().__init__(width, width, kernel_size=2, stride=2)


def resampling(width: int, scale: float, eps: float) -> nn.Module:
    """The layers that multiply the sides of a map of `width` channels by `scale`, a power of two.

    Up, they are transposed convolutions of stride 2 with a norm and GELU between two of them, as in BEiT (Bao et al.
    2022; `fpn1` to `fpn4` of its code), but with ViTDet's norm of channels, which does not depend on the batch. Down,
    they are max poolings of stride 2, whose last window may be cut off: a side of 5 becomes 3, as in Swin.
    """
    doublings = int(math.log2(scale))
    layers: list[nn.Module] = []
    for number in range(doublings):
        layers += [ChannelNorm(width, eps=eps), nn.GELU()] if number else []
        layers.append(DoubleSides(width))
    layers += [nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True) for _ in range(-doublings)]
    return nn.Sequential(*layers)


def make_resampling(config: Any, width: int) -> nn.ModuleDict:
    """For each of a config's `out_features` its `resampling`; empty without `map_scales`."""
    check_map_count(config)
    scaled = zip(config.out_features, config.map_scales, strict=True) if config.map_scales else ()
    return nn.ModuleDict({name: resampling(width, scale, config.layer_norm_eps) for name, scale in scaled})


def resampling_weights(config: Any) -> int:
    """Weights of the transposed convolutions."""
    doublings = sum(max(0, int(math.log2(scale))) for scale in config.map_scales or ())
    return doublings * 4 * config.hidden_size**2


def check_map_scales(config: Any) -> None:
    """Bring `map_scales` of a config into its plain form, a list of numbers.

    Raises:
        ValueError: for anything but None or powers of two from 1/8 to 8, and for scales of maps that stay tokens.
    """
    scales = config.map_scales
    if scales is None:
        return
    numbers = list(scales) if isinstance(scales, Sequence) and not isinstance(scales, str) else []
    if not numbers or not all(_is_scale(number) for number in numbers):
        raise ValueError(f"map_scales={scales!r:.60} must be None or powers of two from 1/8 to {LARGEST_SCALE}")
    if not config.reshape_hidden_states:
        raise ValueError(f"map_scales={scales!r} needs reshape_hidden_states=True; tokens are not resampled")
    config.map_scales = numbers


def check_map_count(config: Any) -> None:
    """Raise ValueError unless there is one of `map_scales` for each of `out_features`."""
    scales, names = config.map_scales, config.out_features
    if scales is not None and len(scales) != len(names):
        raise ValueError(f"map_scales={scales!r} must have one number for each of out_features={names}")


def _is_scale(value: Any) -> bool:
    return is_number(value) and 1 / LARGEST_SCALE <= value <= LARGEST_SCALE and math.log2(value).is_integer()


def pad_to_patches(pixel_values: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, channels, height, width) with zeros at bottom and right up to whole patches; other shapes as they are."""
    if pixel_values.dim() != 4:
        return pixel_values
    height, width = (-side % patch for side, patch in zip(pixel_values.shape[-2:], patch_size, strict=True))
    return F.pad(pixel_values, (0, width, 0, height)) if height or width else pixel_values


def whole_patches(model: Any, pixel_values: Tensor) -> Tensor:
    """Images as a backbone takes them: padded if it gives out maps.

    Who takes tokens counts the patches of the image that it has, so there the sides have to be right.
    """
    patch, makes_maps = model.config.maps[0].stride, getattr(model.config, "reshape_hidden_states", True)
    return pad_to_patches(pixel_values, patch) if makes_maps else pixel_values
