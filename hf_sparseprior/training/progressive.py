"""Progressive resizing: training begins with small images, which cost less, and ends with those of the model's size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SETTING = "progressive_sizes"
Size = tuple[int, int]


def check_sizes(given: Any) -> list[Size]:
    """The sizes of `progressive_sizes` as (height, width).

    Raises:
        ValueError: unless each is a number or (height, width), none larger than the next.
    """
    sizes = [_pair(size) for size in given] if isinstance(given, (list, tuple)) else []
    falls = any(side > after for size, later in pairwise(sizes) for side, after in zip(size, later, strict=True))
    if not sizes or falls or any(side < 1 for size in sizes for side in size):
        raise ValueError(
            f"{SETTING}={given!r} must be a list of rising image sizes, each a number of pixels or (height, width); a "
            "size may be repeated, for more steps of it"
        )
    return sizes


def _pair(size: Any) -> Size:
    sides = size if isinstance(size, (list, tuple)) else (size, size)
    whole = len(sides) == 2 and all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    return (sides[0], sides[1]) if whole else (0, 0)


class ProgressiveSizes:
    """The size of training images by step: each size has the same number of steps, the last one the rest.

    A batch is resized as a whole, where the model is, as in MosaicML's ProgressiveResizing: so it does not matter what
    made it, and augmentation, labels and the order of the samples are those of any other run. fastai and FFCV prepare
    smaller images instead, which also saves time in preparation. Evaluation sees the model's size.

    Args:
        given: as `check_sizes` takes them; the last one is the model's `image_size`.
        model: what is trained. An image of each size is run through it.

    Raises:
        ValueError: for sizes that the model does not take.
    """

    def __init__(self, given: Sequence[Any], model: nn.Module) -> None:
        self.sizes = check_sizes(given)
        config: Any = getattr(model, "config", None)
        final = getattr(config, "image_size", None)
        if final is None or self.sizes[-1] != _pair(final):
            raise ValueError(f"{SETTING}={list(given)} must end with the model's image_size={final}")
        # Classes of transformers interpolate their positions if they are asked to.
        inner: Any = model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        asks = "interpolate_pos_encoding" in inspect.signature(inner.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if asks else {}
        self._try(given, model, config)

    @torch.no_grad()
    def _try(self, given: Sequence[Any], model: nn.Module, config: Any) -> None:
        """Run the model on an image of each size but its own."""
        device = next(model.parameters()).device
        if device.type == "meta":
            return
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        training = model.training
        model.eval()
        try:
            for height, width in dict.fromkeys(self.sizes[:-1]):
                pixels = torch.zeros(1, *frames, config.num_channels, height, width, device=device)
                try:
                    model(pixel_values=pixels, **self.options)
                except (ValueError, RuntimeError) as error:
                    raise ValueError(
                        f"{SETTING}={list(given)}: the model does not take images of {height}x{width} pixels: {error}"
                    ) from None
        finally:
            model.train(training)

    def size_at(self, step: int, steps: int) -> Size:
        """(height, width) of step `step`, counted from 0, of `steps`."""
        return self.sizes[min(step, steps - 1) * len(self.sizes) // steps]

    def resized(self, inputs: Mapping[str, Any], step: int, steps: int) -> dict[str, Any]:
        """A batch with `pixel_values` (..., channels, height, width) as they are in this step.

        Bilinear and antialiased, so a pixel is a mean of those that it stands for.

        Raises:
            ValueError: for batches without such pixels, and for targets of patches.
        """
        pixels, size = inputs.get("pixel_values"), self.size_at(step, steps)
        if not torch.is_tensor(pixels) or pixels.dim() < 4:
            raise ValueError(f"{SETTING} needs batches with pixel_values of one size, got {sorted(inputs)}")
        if pixels.shape[-2:] == size:
            return dict(inputs)
        if of_patches := [name for name in ("token_targets", "token_sources") if inputs.get(name) is not None]:
            raise ValueError(f"{SETTING}: {of_patches[0]} are of the patches of the whole image; leave one of them out")
        images = pixels.flatten(0, -4)
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
        return {**inputs, "pixel_values": images.unflatten(0, pixels.shape[:-3]), **self.options}
