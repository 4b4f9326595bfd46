"""Multi-crop: what student and teacher see of an image. Everything random follows from the image's `Draw` alone.

Pillow cuts, resizes, blurs and changes colours. What each step does, and in which order, is as published for DINO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch.utils.data import get_worker_info

from hf_sparseprior.base.checks import check_finite, check_integer, check_within
from hf_sparseprior.images.augmentation import largest_box
from hf_sparseprior.images.data import ImageDataset, Preparation
from hf_sparseprior.images.sources import Images
from hf_sparseprior.training import Draw

RATIO = (3 / 4, 4 / 3)  # width / height of a box, torchvision's
DRAWS = 10  # of a box, until one fits
SOLARIZE_FROM = 128  # pixels of at least this value are inverted


def check_share(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    return check_within(name, value, 0.0, 1.0, "a number in [0, 1]")


@dataclass
class CropConfig:
    """Crops of an image (Caron et al. 2021, Section 3 and Appendix). Teacher and student see two global crops of the
    model's size, the student alone sees local ones.

    global_scale, local_scale: share of the area.
    local_crops: how many. local_size: pixels of a side, a multiple of the patch.
    flip: probability of a mirror image.
    jitter: probability of other colours: brightness, contrast, saturation and hue, in random order, each by a factor
        within 1 +- its strength, hue within +- its strength of the circle. grey: probability of no colours.
    blur: probabilities of a Gaussian blur with radius 0.1 to 2 for the first and the second global crop and local ones.
    blur_radius: smallest and largest. solarize: probability for the second global crop.
    """

    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    local_crops: int = 8
    local_size: int = 96
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    blur_radius: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.2

    def __post_init__(self) -> None:
        """Check the fields."""
        self.global_scale = self.pair("crops.global_scale", self.global_scale)
        self.local_scale = self.pair("crops.local_scale", self.local_scale)
        self.blur_radius = self.pair("crops.blur_radius", self.blur_radius, highest=None)
        check_integer("crops.local_crops", self.local_crops, 0)
        check_integer("crops.local_size", self.local_size, 1)
        for name in ("flip", "jitter", "grey", "solarize", "brightness", "contrast", "saturation"):
            check_share(f"crops.{name}", getattr(self, name))
        check_within("crops.hue", self.hue, 0.0, 0.5, "a number in [0, 0.5]")
        if not isinstance(self.blur, Sequence) or isinstance(self.blur, str) or len(self.blur) != 3:
            raise ValueError(f"crops.blur={self.blur!r} must be three numbers: two global crops, local ones")
        first, second, local = (check_share("crops.blur", value) for value in self.blur)
        self.blur = (first, second, local)

    @staticmethod
    def pair(name: str, value: Any, highest: float | None = 1.0) -> tuple[float, float]:
        """Two numbers above 0, the smaller one first."""
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError(f"{name}={value!r} must be two numbers, the smaller one first")
        for end in value:
            check_finite(name, end, zero=False)
        if value[0] > value[1] or (highest is not None and value[1] > highest):
            above = "" if highest is None else f", at most {highest:g}"
            raise ValueError(f"{name}={value!r} must be two numbers, the smaller one first{above}")
        return value[0], value[1]


class MultiCrop:
    """Turns a PIL RGB image into crops (views, channels, height, width) float32, normalised.

    Args:
        config: what happens.
        size: (height, width) of global crops, the model's.
        mean, std: for the normalisation, one number a channel.
        num_channels: 3, or 1 for grey.
    """

    def __init__(
        self,
        config: CropConfig,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        num_channels: int = 3,
    ) -> None:
        self.config, self.size, self.num_channels = config, size, num_channels
        self.mean = np.array(mean, np.float32) * 255
        self.std = np.array(std, np.float32) * 255

    def __call__(self, image: Image.Image, random: np.random.Generator) -> dict[str, Tensor]:
        """`global_crops` and, if there are any, `local_crops`, with the numbers that `random` gives."""
        config, local = self.config, (self.config.local_size,) * 2
        first = self._crop(image, config.global_scale, self.size, config.blur[0], 0.0, random)
        second = self._crop(image, config.global_scale, self.size, config.blur[1], config.solarize, random)
        small = [
            self._crop(image, config.local_scale, local, config.blur[2], 0.0, random) for _ in range(config.local_crops)
        ]
        crops = {"global_crops": torch.from_numpy(np.stack([first, second]))}
        return {**crops, "local_crops": torch.from_numpy(np.stack(small))} if small else crops

    def _crop(
        self,
        image: Image.Image,
        scale: Sequence[float],
        size: tuple[int, int],
        blur: float,
        solarize: float,
        random: np.random.Generator,
    ) -> np.ndarray:
        """One crop, (channels, height, width)."""
        config = self.config
        box = random_box(image.size, scale, RATIO, random)
        crop = image.crop(box).resize((size[1], size[0]), Image.Resampling.BICUBIC)
        flips, jitters, greys, blurs, solarizes = random.random(5) < (
            *(config.flip, config.jitter, config.grey, blur, solarize),
        )
        if flips:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if jitters:
            crop = self._other_colours(crop, random)
        if greys:
            crop = crop.convert("L").convert("RGB")
        if blurs:
            crop = crop.filter(ImageFilter.GaussianBlur(random.uniform(*config.blur_radius)))
        if solarizes:
            crop = ImageOps.solarize(crop, SOLARIZE_FROM)
        pixels = np.asarray(crop if self.num_channels == 3 else crop.convert("L"), np.float32)
        pixels = pixels.reshape(*pixels.shape[:2], self.num_channels)
        return np.ascontiguousarray(((pixels - self.mean) / self.std).transpose(2, 0, 1), np.float32)

    def _other_colours(self, image: Image.Image, random: np.random.Generator) -> Image.Image:
        config = self.config
        strengths = (config.brightness, config.contrast, config.saturation)
        factors = [random.uniform(1 - strength, 1 + strength) for strength in strengths]
        turn = round(255 * random.uniform(-config.hue, config.hue))
        enhancers: tuple[Callable[[Image.Image], Any], ...] = (
            *(ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color),
        )
        for step in random.permutation(4):
            if step == 3 and turn:
                image = turned_hue(image, turn)
            elif step < 3 and strengths[step]:
                image = enhancers[step](image).enhance(factors[step])
        return image


def random_box(
    size: tuple[int, int], scale: Sequence[float], ratio: Sequence[float], random: np.random.Generator
) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) in an image of (width, height) pixels.

    Its share of the area is uniform in `scale`, the logarithm of its width / height in that of `ratio`. As in
    torchvision it is the first of ten draws that fits, or else the largest box of an allowed ratio, in the middle.
    `resized_box` draws with torch, to have kornia's boxes; that would be three tenths of the time of a small crop.
    """
    width, height = size
    for _ in range(DRAWS):
        area = random.uniform(scale[0], scale[1]) * width * height
        root = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])) / 2)
        across, down = round(math.sqrt(area) * root), round(math.sqrt(area) / root)
        if 0 < across <= width and 0 < down <= height:
            left, top = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
            return left, top, left + across, top + down
    across, down = largest_box(width, height, *ratio)
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def turned_hue(image: Image.Image, turn: int) -> Image.Image:
    """An RGB image with its hue turned by this many 256ths of the circle."""
    hue, saturation, value = image.convert("HSV").split()
    hue = Image.fromarray((np.asarray(hue, np.int16) + turn).astype(np.uint8))  # wraps around
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


class CropDataset(ImageDataset):
    """A split as a torch dataset of {"global_crops": (2, channels, height, width), "local_crops": (L, channels, side,
    side)} float32, indexed by a `Draw`.

    Args:
        images: the split. crops: makes them. seed: the run's. cache: as in `ImageDataset`.
    """

    def __init__(self, images: Images, crops: MultiCrop, seed: int = 0, cache: bool | None = None) -> None:
        super().__init__(images, Preparation(None, crops.num_channels, seed=seed), cache)
        self.crops = crops

    @property
    def keeps_decoded(self) -> bool:
        """Decoded images are kept; every epoch cuts them differently."""
        return True

    def __getitem__(self, item: int | Draw) -> dict[str, Any]:
        if not isinstance(item, Draw):
            raise TypeError("a dataset of crops is indexed by Draw, as DrawSampler gives them")
        if get_worker_info() is None:  # a worker would fill a cache of its own
            self.fill_cache()
        return dict(self.crops(self.decoded_image(item.index), item.random(self.prepare.seed)))
