"""Augmentation of training images: what happens to an image follows from its `Draw` alone.

kornia erases and jitters colours, and boxes are those that it draws; Pillow cuts and resizes, because it averages where
an image shrinks, which kornia's crop does not.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_sparseprior.base.checks import check_boolean, check_finite, check_integer, is_number
from hf_sparseprior.images.randaugment import parse_policy, randaugment
from hf_sparseprior.training import Mixing
from hf_sparseprior.training.token_labels import FLIPPED, WHOLE, box_view

logger = logging.getLogger("hf_sparseprior.augmentation")

CROPS = ("none", "resized", "random")
EVAL_CROP_RATIOS = (0.1, 1.0)  # at 0.1 a hundredth of an image is looked at, in an image of ten times the model's sides
INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
ERASING_MODES = ("pixel", "constant")
BALANCES = LOSS, SAMPLING = "loss", "sampling"


@dataclass
class AugmentationConfig:
    """What happens to training images. Everything is off by default.

    crop: "resized" (a box of random area and ratio, resized), "random" (a box of the model's size, after `padding`) or
        "none" (the whole image, as in evaluation).
    scale, ratio: for "resized": share of the area, width / height.
    padding: pixels of black around the image before a "random" crop.
    interpolation: interpolation of the resizing.
    flip: probability of a horizontal flip.
    randaugment: timm's notation, for example rand-m15-n2-mstd1.0-inc1 (Fibottention Table 9); null for none.
    color_jitter: strength of brightness, contrast and saturation. With randaugment it has no effect unless
        force_color_jitter is true. That is how timm does it, with which DeiT and Fibottention trained.
    erasing, erasing_mode: probability of random erasing; with noise ("pixel") or the mean colour ("constant").
    mixup, cutmix: alpha of each, 0 for off. mix_probability: probability that a batch is mixed; switch_probability:
        that it is mixed by CutMix.
    mixtoken: alpha of MixToken, CutMix of the tokens after the patch projection (LV-ViT: 1), 0 for off; with neither
        mixup nor cutmix.
    label_smoothing: share of the label that goes to all classes alike.
    repeats: repeated augmentation (DeiT: 3).
    balance: for data with rare classes. "loss": an image's loss is multiplied by the number of images over the
        number of classes times the number of images of its class, so that each class has the same weight in all.
        "sampling": an epoch has as many images of each class, so those of rare classes come several times, and of
        frequent ones not all. null: neither. Not for streams; "sampling" goes without repeats.
    eval_crop_ratio: images are resized to 1 / ratio of the model's size by their shorter side and cut in the centre;
        null: resized to the model's size whatever their shape.
    """

    crop: str = "none"
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    padding: int = 0
    interpolation: str = "bicubic"
    flip: float = 0.0
    randaugment: str | None = None
    color_jitter: float = 0.0
    force_color_jitter: bool = False
    erasing: float = 0.0
    erasing_mode: str = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5
    mixtoken: float = 0.0
    label_smoothing: float = 0.0
    repeats: int = 1
    balance: str | None = None
    eval_crop_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        choices: dict[str, tuple] = {
            "crop": CROPS,
            "interpolation": tuple(INTERPOLATIONS),
            "erasing_mode": ERASING_MODES,
            "balance": (*BALANCES, None),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(filter(None, allowed))
                raise ValueError(f"augmentation.{name}={getattr(self, name)!r} must be one of {known}")
        for name in ("flip", "erasing", "mix_probability", "switch_probability"):
            check_range(name, getattr(self, name), 0.0, 1.0)
        for name in ("color_jitter", "mixup", "cutmix", "mixtoken"):
            check_finite(f"augmentation.{name}", getattr(self, name))
        if self.mixtoken and (self.mixup or self.cutmix):
            raise ValueError(
                f"augmentation.mixtoken={self.mixtoken!r} goes with neither mixup nor cutmix; set both to 0"
            )
        check_range("label_smoothing", self.label_smoothing, 0.0, 0.999)
        for name, high in (("scale", 1.0), ("ratio", float("inf"))):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
                raise ValueError(f"augmentation.{name}={value!r} must be two numbers, the smaller one first")
            for end in value:
                check_range(name, end, 1e-6, high)
            if value[0] > value[1]:
                raise ValueError(f"augmentation.{name}={value!r} must be two numbers, the smaller one first")
        for name, low in (("padding", 0), ("repeats", 1)):
            check_integer(f"augmentation.{name}", getattr(self, name), low)
        if self.balance == SAMPLING and self.repeats > 1:
            raise ValueError(f"augmentation.repeats={self.repeats} cannot be used with augmentation.balance=sampling")
        if self.eval_crop_ratio is not None:
            check_range("eval_crop_ratio", self.eval_crop_ratio, *EVAL_CROP_RATIOS)
        check_boolean("augmentation.force_color_jitter", self.force_color_jitter)
        if self.randaugment is not None:
            try:
                parse_policy(self.randaugment)
            except ValueError as error:
                raise ValueError(f"augmentation.{error}") from None

    @property
    def mixing(self) -> Mixing:
        """Settings of mixup, CutMix and MixToken."""
        return Mixing(self.mixup, self.cutmix, self.mix_probability, self.switch_probability, self.mixtoken)

    @property
    def changes_images(self) -> bool:
        """Whether training images differ from evaluation's."""
        return self.crop != "none" or bool(self.flip or self.randaugment or self.color_jitter or self.erasing)


def check_range(name: str, value: Any, low: float, high: float, section: str = "augmentation") -> None:
    """Raise ValueError unless the value of a section's field is a number from `low` to `high`."""
    number = is_number(value) and math.isfinite(value)
    if not number or not low <= value <= high:
        allowed = f"of {low:g} or more" if math.isinf(high) else f"in {low:g}..{high:g}"
        raise ValueError(f"{section}.{name}={value!r} must be a number {allowed}")


class Augmentation:
    """Turns a PIL RGB image and a generator into pixel values (channels, height, width) float32, normalised.

    The order is timm's: crop, flip, RandAugment or colour jitter, normalisation, erasing.

    Args:
        config: what happens.
        size: (height, width) of the model's images.
        mean, std: for the normalisation, one number a channel.
        num_channels: 3, or 1 for grey.
    """

    def __init__(
        self,
        config: AugmentationConfig,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        num_channels: int = 3,
    ) -> None:
        self.config = config
        self.size = (size[0], size[1])
        self.num_channels = num_channels
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        fill = [round(255 * value) for value in mean]
        self.fill = (fill[0], fill[0], fill[0]) if len(fill) == 1 else (fill[0], fill[1], fill[2])
        self.resample = INTERPOLATIONS[config.interpolation]
        self.policy = parse_policy(config.randaugment) if config.randaugment else None
        jitter = config.color_jitter if self.policy is None or config.force_color_jitter else 0.0
        if config.color_jitter and not jitter:
            logger.info("color_jitter=%s has no effect with randaugment; see force_color_jitter", config.color_jitter)
        self.jitter: Any = None
        self.erasing: Any = None
        if jitter or config.erasing:
            from kornia import augmentation  # a second, for these two alone

            if jitter:
                self.jitter = augmentation.ColorJitter(jitter, jitter, jitter, p=1.0)
            if config.erasing:  # area 2 % to a third, ratio 0.3 to 3.3: Zhong et al. 2020, with timm's upper bounds
                self.erasing = augmentation.RandomErasing((0.02, 1 / 3), (0.3, 1 / 0.3), p=1.0)

    def __call__(self, image: Image.Image, random: np.random.Generator) -> Tensor:
        """Augment one image with the numbers that `random` gives."""
        return self.with_view(image, random)[0]

    def with_view(self, image: Image.Image, random: np.random.Generator) -> tuple[Tensor, np.ndarray]:
        """The augmented image, and which part of the whole image it shows (a view of `training.token_labels`)."""
        with torch.random.fork_rng(devices=[]):  # kornia, and our crops, draw from torch's global generator
            # Not torch.manual_seed, which seeds accelerators too, and with them dropout in training.
            torch.default_generator.manual_seed(int(random.integers(2**63)))
            image, view = self._crop(image)
            views = [view]
            if random.random() < self.config.flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                views.append(FLIPPED)
            if self.policy is not None:
                image = randaugment(image, self.policy, random, self.fill, self.resample, views)
            pixels = to_tensor(image)
            if self.jitter is not None:
                pixels = self.jitter(pixels[None])[0]
            if self.num_channels == 1:
                pixels = (pixels * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)
            pixels = (pixels - self.mean) / self.std
            if self.erasing is not None and random.random() < self.config.erasing:
                pixels = self._erase(pixels)
        return pixels, functools.reduce(np.matmul, views)

    def _crop(self, image: Image.Image) -> tuple[Image.Image, np.ndarray]:
        """The part of an image that is seen, in the model's size, and its view."""
        height, width = self.size
        whole = image.size
        if self.config.crop == "random":
            image = _pad(image, self.config.padding, self.size)
        if self.config.crop == "none":
            return image.resize((width, height), self.resample), WHOLE
        if self.config.crop == "resized":
            box = resized_box(image.size, self.config.scale, self.config.ratio)
        else:
            box = placed_box(image.size, (width, height))
        # Padding is the same on both sides.
        margins = [(padded - side) // 2 for padded, side in zip(image.size, whole, strict=True)] * 2
        shares = [(end - margin) / side for end, margin, side in zip(box, margins, whole * 2, strict=True)]
        # Cut first: resize(box=...) would look at pixels outside the box.
        return image.crop(box).resize((width, height), self.resample), box_view(*shares)

    def _erase(self, pixels: Tensor) -> Tensor:
        drawn = self.erasing.forward_parameters(torch.Size((1, *pixels.shape)))
        left, top = int(drawn["xs"]), int(drawn["ys"])
        bottom, right = top + int(drawn["heights"]), left + int(drawn["widths"])
        region = pixels[:, top:bottom, left:right]
        # Pixels are normalised here, so the mean colour is 0 and the noise has the images' spread.
        noise = torch.randn(region.shape) if self.config.erasing_mode == "pixel" else torch.zeros(region.shape)
        pixels[:, top:bottom, left:right] = noise
        return pixels


def resized_box(size: tuple[int, int], scale: Sequence[float], ratio: Sequence[float]) -> tuple[int, int, int, int]:
    """A random box (left, top, right, bottom) in an image of (width, height) pixels.

    Its share of the area is in `scale`, its width / height in `ratio`. As in torchvision it is the first of ten draws
    that fits, or else the largest box of an allowed ratio. The boxes are those of kornia's RandomResizedCrop, which
    takes milliseconds to draw one.
    """
    width, height = size
    (least, most), (low, high) = torch.tensor(scale), torch.tensor(ratio).log()
    area = (torch.rand(10) * (most - least) + least) * height * width
    aspect = torch.exp(torch.rand(10) * (high - low) + low)
    drawn = torch.stack([torch.sqrt(area * aspect), torch.sqrt(area / aspect)], 1).round().tolist()
    fitting = (box for box in drawn if 0 < box[0] <= width and 0 < box[1] <= height)
    box = next(fitting, largest_box(width, height, *ratio))
    return placed_box(size, (int(box[0]), int(box[1])))


def largest_box(width: int, height: int, low: float, high: float) -> tuple[int, int]:
    """(width, height) of the largest box whose ratio is in low..high."""
    if width / height < low:
        return width, min(height, max(1, round(width / low)))
    if width / height > high:
        return min(width, max(1, round(height * high))), height
    return width, height


def placed_box(size: tuple[int, int], box: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box of (width, height) in an image of at least that size. Its place is drawn as kornia's RandomCrop does."""
    free = torch.tensor([outer - inner + 1.0 for outer, inner in zip(size, box, strict=True)])
    left, top = (int(start) for start in (torch.rand(2) * free).floor().tolist())
    return left, top, left + box[0], top + box[1]


def to_tensor(image: Image.Image) -> Tensor:
    """Pixels (3, height, width) in 0..1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def _pad(image: Image.Image, padding: int, size: tuple[int, int]) -> Image.Image:
    """Add black around the image, and more if the image is smaller than the crop."""
    columns = max(padding, -(-(size[1] - image.width) // 2))
    rows = max(padding, -(-(size[0] - image.height) // 2))
    if not columns and not rows:
        return image
    padded = Image.new(image.mode, (image.width + 2 * columns, image.height + 2 * rows))
    padded.paste(image, (columns, rows))
    return padded
