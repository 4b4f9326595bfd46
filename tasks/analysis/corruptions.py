"""The 19 corruptions of CIFAR-10-C and ImageNet-C (Hendrycks & Dietterich 2019), computed by `imagecorruptions` 1.1.2.

That package dates from 2020: its imports and calls do not fit today's setuptools, SciPy, NumPy and scikit-image. So its
file is read into a namespace of our own where they do. Nothing is changed in a module that others use, and random
numbers come from a generator of that namespace, seeded for each image.

The package has the severities of ImageNet-C. Those of CIFAR-10-C are weaker, as 32 pixels need. They are from
ImageNet-C/create_c/make_cifar_c.py of https://github.com/hendrycks/robustness, with the three functions in which that
file does something else.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from tasks.analysis.commands import BENCHMARKS, CORRUPTIONS, FAMILIES

BENCHMARK_CORRUPTIONS = tuple(name for name in CORRUPTIONS if name not in FAMILIES["extra"])
CIFAR_SIDE = 32
MIN_SIDE = 32  # of the package
INSTALL = "pip install 'hf_sparseprior[analysis]' && pip install --no-deps imagecorruptions"

# Text of the package's file, and what takes its place today.
ADAPTATIONS = {
    "from pkg_resources import resource_filename": "",
    "from scipy.ndimage.interpolation import map_coordinates": "from scipy.ndimage import map_coordinates",
    "np.float_": "np.float64",
    "multichannel=True": "channel_axis=-1",
}

# What make_cifar_c.py has instead of the package's constants, for severities 1 to 5.
CIFAR_CONSTANTS: dict[str, Sequence[Any]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": [np.arange(1, end, 0.01).tolist() for end in (1.06, 1.11, 1.16, 1.21, 1.26)],
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}
CIFAR_FROST = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))  # weights of the image and of the frost
# Height of the displacement, its smoothness, and how far the corners of the affine map move; shares of the side.
CIFAR_ELASTIC = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))


def corrupt(image: np.ndarray, name: str, severity: int, benchmark: str = BENCHMARKS[0]) -> np.ndarray:
    """A corrupted image; what is random in it follows from the arguments alone.

    Args:
        image: (height, width, 3) uint8; 32x32 for "cifar-c", at least 32x32 for "imagenet-c".
        name: one of CORRUPTIONS.
        severity: 1 to 5.
        benchmark: one of BENCHMARKS, whose constants are used.

    Returns:
        (height, width, 3) uint8.

    Raises:
        ImportError: if the package or something that it needs is missing; it says what to install.
    """
    functions = adapted_package(benchmark)
    functions.random.seed(_seed(image, name, severity))
    with np.errstate(invalid="ignore"):
        corrupted = np.asarray(functions.corruptions[name](Image.fromarray(image), severity))
    # Spatter divides by the largest drop. A small image may have none at all: then nothing is spattered.
    return image if np.isnan(corrupted).any() else corrupted.astype(np.uint8)


def _seed(image: np.ndarray, name: str, severity: int) -> int:
    """A seed that follows from the image, so that a subset of the images looks the same."""
    text = f"{name} {severity} {image.shape}".encode()
    return int.from_bytes(hashlib.sha256(text + np.ascontiguousarray(image).tobytes()).digest()[:4])


def check_size(height: int, width: int, benchmark: str) -> None:
    """Raise ValueError for images that a benchmark's corruptions are not made for."""
    if benchmark == "cifar-c" and (height, width) != (CIFAR_SIDE, CIFAR_SIDE):
        raise ValueError(
            f"a test image has {height}x{width} pixels; --benchmark cifar-c is for {CIFAR_SIDE}x{CIFAR_SIDE}, "
            f"imagenet-c for {MIN_SIDE}x{MIN_SIDE} and more"
        )
    if min(height, width) < MIN_SIDE:
        raise ValueError(
            f"a test image has {height}x{width} pixels; the corruptions need {MIN_SIDE}x{MIN_SIDE} or more"
        )


def versions() -> dict[str, str]:
    """Versions of what decides how corrupted images look."""
    adapted_package(BENCHMARKS[0])
    import cv2

    packages = ("imagecorruptions", "scikit-image", "scipy", "numpy", "pillow")
    return {name: version(name) for name in packages} | {"opencv": cv2.__version__}


# ---- the package, adapted -------------------------------------------------------------------------------------------


class _SeededNumpy:
    """numpy with a generator of its own for `np.random`."""

    def __init__(self, random: np.random.RandomState) -> None:
        self.random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@functools.cache
def adapted_package(benchmark: str) -> SimpleNamespace:
    """The package's functions for a benchmark.

    Returns:
        corruptions: {name: function of a PIL image and the severity}; random: the generator that they draw from.

    Raises:
        ImportError: with what to install.
    """
    spec = importlib.util.find_spec("imagecorruptions")
    if spec is None or spec.origin is None:
        raise ImportError(f"the corruptions need imagecorruptions: {INSTALL}")
    folder = Path(spec.origin).parent
    tree = _adapted_source((folder / "corruptions.py").read_text(encoding="utf-8"))
    if benchmark == "cifar-c":
        _replace_constants(tree, CIFAR_CONSTANTS)
    random = np.random.RandomState()
    names: dict[str, Any] = {}
    try:
        exec(compile(tree, str(folder / "corruptions.py"), "exec"), names)
    except ImportError as error:
        raise ImportError(f"the corruptions cannot be loaded ({error}): {INSTALL}") from error
    sk = names["sk"]
    names.update(
        np=_SeededNumpy(random),
        sk=SimpleNamespace(color=sk.color, util=SimpleNamespace(random_noise=_seeded(sk.util.random_noise, random))),
        resource_filename=lambda _, path: str(folder / path),
    )
    if benchmark == "cifar-c":
        names.update(
            clipped_zoom=_centred_zoom,
            frost=functools.partial(_cifar_frost, folder, random),
            elastic_transform=functools.partial(_cifar_elastic, random),
        )
    return SimpleNamespace(corruptions={name: names[name] for name in CORRUPTIONS}, random=random)


def _adapted_source(source: str) -> ast.Module:
    for old, new in ADAPTATIONS.items():
        source = source.replace(old, new)
    return ast.parse(source)


def _replace_constants(tree: ast.Module, constants: Mapping[str, Sequence[Any]]) -> None:
    """In each of these functions, put another list in `c = [...][severity - 1]`."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, values in constants.items():
        (chosen,) = (
            node.value
            for node in functions[name].body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Subscript)
            and isinstance(node.value.value, ast.List)
        )
        chosen.value = ast.parse(repr(values), mode="eval").body


def _seeded(random_noise: Callable[..., np.ndarray], random: np.random.RandomState) -> Callable[..., np.ndarray]:
    """scikit-image's noise, drawn from this generator; today's version does not draw from numpy's global one."""

    def seeded_noise(image: np.ndarray, **options: Any) -> np.ndarray:
        return random_noise(image, rng=random.randint(2**31), **options)

    return seeded_noise


# ---- what make_cifar_c.py does differently --------------------------------------------------------------------------


def _centred_zoom(image: np.ndarray, factor: float) -> np.ndarray:
    """The middle of an image (side, side, channels), enlarged to its size; the package keeps a corner of it."""
    from scipy.ndimage import zoom

    side = len(image)
    cut = math.ceil(side / factor)
    start = (side - cut) // 2
    enlarged = zoom(image[start : start + cut, start : start + cut], (factor, factor, 1), order=1)
    trim = (len(enlarged) - side) // 2
    return enlarged[trim : trim + side, trim : trim + side]


@functools.cache
def _frost_picture(path: Path) -> np.ndarray:
    """A fifth of the frost's size, so that 32 pixels hold some of its structure; RGB."""
    import cv2

    picture = cv2.imread(str(path))
    if picture is None:
        raise OSError(f"{path} cannot be read")
    return cv2.resize(picture, (0, 0), fx=0.2, fy=0.2)[..., ::-1]


def _cifar_frost(folder: Path, random: np.random.RandomState, image: Image.Image, severity: int) -> np.ndarray:
    # make_cifar_c.py and the package never draw the sixth picture.
    file = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")[random.randint(5)]
    frost = _frost_picture(folder / "frost" / file)
    row, column = (random.randint(0, length - CIFAR_SIDE) for length in frost.shape[:2])
    of_image, of_frost = CIFAR_FROST[severity - 1]
    cut = frost[row : row + CIFAR_SIDE, column : column + CIFAR_SIDE]
    return np.clip(of_image * np.asarray(image) + of_frost * cut, 0, 255)


def _cifar_elastic(random: np.random.RandomState, image: Image.Image, severity: int) -> np.ndarray:
    """A random affine map, then a displacement that varies smoothly over the image."""
    import cv2
    from scipy.ndimage import map_coordinates
    from skimage.filters import gaussian

    alpha, sigma, move = (CIFAR_SIDE * share for share in CIFAR_ELASTIC[severity - 1])
    size = (CIFAR_SIDE, CIFAR_SIDE)
    low, high = CIFAR_SIDE // 2 - CIFAR_SIDE // 3, CIFAR_SIDE // 2 + CIFAR_SIDE // 3
    corners = np.array([[high, high], [high, low], [low, low]], dtype=np.float32)
    moved = corners + random.uniform(-move, move, size=corners.shape).astype(np.float32)
    pixels: np.ndarray = np.asarray(image, dtype=np.float32) / 255.0
    pixels = cv2.warpAffine(pixels, cv2.getAffineTransform(corners, moved), size, borderMode=cv2.BORDER_REFLECT_101)
    right, down = (
        (gaussian(random.uniform(-1, 1, size=size), sigma, mode="reflect", truncate=3) * alpha).astype(np.float32)
        for _ in range(2)
    )
    rows, columns = np.indices(size)
    channels = [
        map_coordinates(pixels[..., channel], (rows + down, columns + right), order=1, mode="reflect")
        for channel in range(3)
    ]
    return np.clip(np.stack(channels, -1), 0, 1) * 255
