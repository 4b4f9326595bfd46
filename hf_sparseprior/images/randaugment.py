"""RandAugment as timm defines it: "rand-m15-n2-mstd1.0-inc1" (Fibottention Table 9), "rand-m9-mstd0.5-inc1" (DeiT).

kornia's RandAugment has neither the noise on the magnitude (mstd) nor magnitudes that grow with the level for every
operation (inc1), so the policy is written here; the operations are Pillow's, as in the published definition.

Source: RandAugment (Cubuk et al. 2020) with the operations, ranges and settings of timm's `rand_augment_transform`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from hf_sparseprior.training.token_labels import affine_view

# Limits of the numbers in the notation. (timm takes a larger mstd for evenly spread magnitudes; no recipe here does.)
LIMITS = {"mstd": (0, 100), "inc": (0, 1), "m": (0, 100), "n": (1, 100), "p": (0, 1)}
MAX_LEVEL = 10.0  # the published scale of magnitudes; a drawn level is clipped to it, so m15 is nearly always 10


@dataclass(frozen=True)
class Policy:
    """magnitude m, operations per image n, standard deviation of the magnitude, whether effects grow with the level."""

    magnitude: float = 10.0
    operations: int = 2
    magnitude_std: float = 0.0
    increasing: bool = False
    probability: float = 0.5


def parse_policy(text: str) -> Policy:
    """Read timm's notation: rand, then -mM (magnitude, 10 without), -nN (operations, 2 without), -mstdS, -inc1, -pP in
    any order.

    Raises:
        ValueError: for anything else.
    """
    kind, *parts = str(text).split("-")
    fields: dict[str, Any] = {}
    # mstd before m: the longer name first.
    names = {"mstd": "magnitude_std", "inc": "increasing", "m": "magnitude", "n": "operations", "p": "probability"}
    for part in parts:
        name = next((name for name in names if part.startswith(name)), None)
        try:
            value = float(part.removeprefix(name or " "))
        except ValueError:
            name = None
        if name is None:
            raise ValueError(f"randaugment={text!r}: {part!r} must be one of mM, nN, mstdS, inc1, pP with a number")
        low, high = LIMITS[name]
        if not low <= value <= high or (name in ("n", "inc") and value != int(value)):
            kind_of = "an integer" if name in ("n", "inc") else "a number"
            raise ValueError(f"randaugment={text!r}: {name} must be {kind_of} in {low:g}..{high:g}")
        fields[names[name]] = bool(value) if name == "inc" else int(value) if name == "n" else value
    if kind != "rand":
        raise ValueError(f"randaugment={text!r} must look like rand-m9-n2-mstd0.5-inc1")
    return Policy(**fields)


def randaugment(
    image: Image.Image,
    policy: Policy,
    random: np.random.Generator,
    fill: tuple[int, int, int] = (128, 128, 128),
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    views: list[np.ndarray] | None = None,
) -> Image.Image:
    """Apply `policy.operations` operations, drawn with replacement, each with `policy.probability`.

    Args:
        image: RGB.
        policy: see `parse_policy`.
        random: generator of every number that is drawn.
        fill: colour of what a geometric operation uncovers.
        resample: interpolation of geometric operations.
        views: gets the view of every geometric operation, in their order (`training.token_labels`).
    """
    names = list(OPERATIONS)
    for choice in random.integers(len(names), size=policy.operations):
        if random.random() >= policy.probability:
            continue
        level = policy.magnitude
        if policy.magnitude_std > 0:
            level = random.normal(level, policy.magnitude_std)
        level = float(np.clip(level, 0.0, MAX_LEVEL))
        sign = -1.0 if random.random() < 0.5 else 1.0
        share, name = level / MAX_LEVEL, names[choice]
        if views is not None and name in GEOMETRY:
            views.append(affine_view(GEOMETRY[name](sign * share, image), image.size))
        image = OPERATIONS[name](image, share, sign, policy.increasing, resample, fill)
    return image


def enhancement_factor(share: float, sign: float, increasing: bool) -> float:
    """Factor of colour, contrast, brightness and sharpness: 1 leaves the image as it is.

    `increasing`: 1 +- 0.9 share, at least 0.1; otherwise 0.1 + 1.8 share, which leaves an image as it is at half the
    scale.
    """
    return max(0.1, 1.0 + sign * 0.9 * share) if increasing else 0.1 + 1.8 * share


def posterize_bits(share: float, increasing: bool) -> int:
    """Bits kept per channel: 4 - 4 share if effects grow with the level, otherwise 4 share (AutoAugment's 0..4)."""
    return 4 - int(4 * share) if increasing else int(4 * share)


def solarize_threshold(share: float, increasing: bool) -> int:
    """Values from here on are inverted: 256 - 256 share if effects grow with the level, otherwise 256 share."""
    threshold = min(256, int(256 * share))
    return 256 - threshold if increasing else threshold


def _rotation(amount: float, image: Image.Image) -> tuple[float, ...]:
    """Coefficients of `Image.rotate` around the middle."""
    angle = math.radians(MAX_ROTATION * amount)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = image.width / 2, image.height / 2
    return (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y)


# Where operations take their pixels from: (signed share of the highest level, image) -> Pillow's coefficients.
MAX_ROTATION = 30.0  # degrees
GEOMETRY: dict[str, Callable[[float, Image.Image], tuple[float, ...]]] = {
    "Rotate": _rotation,
    "ShearX": lambda amount, image: (1, 0.3 * amount, 0, 0, 1, 0),
    "ShearY": lambda amount, image: (1, 0, 0, 0.3 * amount, 1, 0),
    "TranslateX": lambda amount, image: (1, 0, 0.45 * amount * image.width, 0, 1, 0),
    "TranslateY": lambda amount, image: (1, 0, 0, 0, 1, 0.45 * amount * image.height),
}


def _affine(matrix: Callable[[float, Image.Image], tuple[float, ...]]) -> Callable[..., Image.Image]:
    def apply(image: Image.Image, share: float, sign: float, increasing: bool, resample: Any, fill: Any) -> Image.Image:
        coefficients = matrix(sign * share, image)
        return image.transform(image.size, Image.Transform.AFFINE, coefficients, resample=resample, fillcolor=fill)

    return apply


def _enhance(kind: Any) -> Callable[..., Image.Image]:
    def apply(image: Image.Image, share: float, sign: float, increasing: bool, resample: Any, fill: Any) -> Image.Image:
        return kind(image).enhance(enhancement_factor(share, sign, increasing))

    return apply


def _rotate(image: Image.Image, share: float, sign: float, increasing: bool, resample: Any, fill: Any) -> Image.Image:
    return image.rotate(sign * MAX_ROTATION * share, resample=resample, fillcolor=fill)


def _posterize(image: Image.Image, share: float, sign: float, increasing: bool, *_: Any) -> Image.Image:
    # Pillow wants 1..8; no bits at all is a black image.
    bits = posterize_bits(share, increasing)
    return ImageOps.posterize(image, bits) if bits else image.point(lambda value: 0)


def _solarize(image: Image.Image, share: float, sign: float, increasing: bool, *_: Any) -> Image.Image:
    return ImageOps.solarize(image, solarize_threshold(share, increasing))


def _solarize_add(image: Image.Image, share: float, *_: Any) -> Image.Image:
    added = min(128, int(110 * share))
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


# Ranges at the highest level: rotation 30 degrees, shear 0.3, shift 0.45 of the side.
OPERATIONS: dict[str, Callable[..., Image.Image]] = {
    "AutoContrast": lambda image, *_: ImageOps.autocontrast(image),
    "Equalize": lambda image, *_: ImageOps.equalize(image),
    "Invert": lambda image, *_: ImageOps.invert(image),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Color": _enhance(ImageEnhance.Color),
    "Contrast": _enhance(ImageEnhance.Contrast),
    "Brightness": _enhance(ImageEnhance.Brightness),
    "Sharpness": _enhance(ImageEnhance.Sharpness),
    **{name: _affine(matrix) for name, matrix in GEOMETRY.items() if name != "Rotate"},
}
