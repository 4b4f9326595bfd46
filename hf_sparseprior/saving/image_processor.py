"""The image processor of models that take grey images: as ViT's of transformers, which gives three channels or four."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.processing_utils import ImagesKwargs

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue; ITU-R 601, as Pillow's mode L


class SparsePriorImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Settings of `SparsePriorImageProcessor`: those of transformers, and `do_grayscale`."""

    do_grayscale: bool | None


class SparsePriorImageProcessor(PilBackend):
    """Makes (B, 1, height, width) float32 of images of any mode: Pillow's, arrays or tensors, whole or in a list.

    A saved model of one channel names it in preprocessor_config.json, where `AutoImageProcessor` and pipelines find it.

    Args:
        do_grayscale: whether colours become one channel, by the weights of Pillow's mode L; transparency is dropped.
        options: as for ViTImageProcessor.
    """

    valid_kwargs = SparsePriorImageProcessorKwargs
    resample = 3  # bicubic
    image_mean = (0.5,)
    image_std = (0.5,)
    size = {"height": 224, "width": 224}
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_grayscale = True

    def process_image(self, image: Any, do_grayscale: bool | None = None, **options: Any) -> np.ndarray:
        """One image as an array (channels, height, width), as transformers asks for it before all other steps."""
        if do_grayscale and hasattr(image, "convert"):  # of Pillow; its palettes become colours first
            image = image.convert("RGB").convert("L")
        pixels = super().process_image(image, **options)
        return _grey(pixels) if do_grayscale and len(pixels) > 1 else pixels


def _grey(pixels: np.ndarray) -> np.ndarray:
    """(3 or 4, height, width) to (1, height, width) of the same dtype; integers are rounded."""
    grey = np.tensordot(np.asarray(LUMA), pixels[:3].astype(np.float64), 1)[None]
    return (grey if np.issubdtype(pixels.dtype, np.floating) else grey.round()).astype(pixels.dtype)
