"""From pictures of several sizes to batches that keep their shapes: an image processor and a collator."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor

from hf_sparseprior.attention.packing import as_patches, checked_image
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.files import write_text
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings


def mixed_size_processor(config: Any, max_num_patches: int | None = None) -> Any:
    """An image processor that keeps the shape of images: Siglip2's of transformers, with the numbers of a config.

    Each image is resized to as many whole patches as fit into `max_num_patches`. SparsePriorViT takes what it gives as
    one batch (`hf_sparseprior.attention.packing`). `save_pretrained(FOLDER)` makes it the processor of a saved model,
    which `AutoImageProcessor` and pipelines read.

    Args:
        config: of a SparsePriorViT model.
        max_num_patches: of an image; default: as many as in an image of `config.image_size`.

    Raises:
        ValueError: for patches that are not square, and a number below 1.
    """
    height, width = as_pair(config.patch_size)
    if height != width:
        raise ValueError(f"patch_size={[height, width]} must be square for images of several sizes")
    most = math.prod(config.grid) if max_num_patches is None else check_integer("max_num_patches", max_num_patches, 1)
    settings = {
        **image_processor_settings(config),
        "image_processor_type": "Siglip2ImageProcessor",
        "patch_size": height,
        "max_num_patches": most,
    }
    del settings["size"]
    with tempfile.TemporaryDirectory() as folder:  # AutoImageProcessor chooses the class that runs here
        write_text(Path(folder) / PROCESSOR, json.dumps(settings) + "\n")
        return AutoImageProcessor.from_pretrained(folder)


class MixedSizesCollator:
    """Makes a batch of examples whose images have several sizes, for the Trainer or a DataLoader.

    An example's `pixel_values` are an image (channels, height, width), sides multiples of the patch, or the output of
    Siglip2ImageProcessor for one image. Other entries are stacked; `label` becomes `labels`. A batch has the patches of
    its largest image, (B, M, p * p * channels), with `pixel_attention_mask` and `spatial_shapes`; the models drop the
    padding before they compute anything.

    Args:
        patch_size: of the model, a number or (height, width).
        num_channels: of the images.
    """

    def __init__(self, patch_size: int | Sequence[int], num_channels: int = 3) -> None:
        sides = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
        self.patch: tuple[int, int] = (sides[0], sides[1])
        self.num_channels = num_channels

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch.

        Raises:
            ValueError: for an image that does not fit.
        """
        rows, shapes = zip(*(self._patches(example, number) for number, example in enumerate(examples)), strict=True)
        most = max(len(row) for row in rows)
        batch = {
            "pixel_values": torch.stack([F.pad(row, (0, 0, 0, most - len(row))) for row in rows]),
            "pixel_attention_mask": torch.stack([(torch.arange(most) < len(row)).long() for row in rows]),
            "spatial_shapes": torch.tensor(shapes),
        }
        for name in examples[0].keys() - {"pixel_values", "pixel_attention_mask", "spatial_shapes"}:
            stacked = torch.stack([torch.as_tensor(example[name]) for example in examples])
            batch["labels" if name == "label" else name] = stacked
        return batch

    def _patches(self, example: dict[str, Any], number: int) -> tuple[Tensor, tuple[int, int]]:
        values = torch.as_tensor(example["pixel_values"])
        if "spatial_shapes" not in example:
            image = checked_image(values, number, self.num_channels, self.patch)
            sides = image.shape[1] // self.patch[0], image.shape[2] // self.patch[1]
            return as_patches(image, self.patch), sides
        height, width = torch.as_tensor(example["spatial_shapes"]).flatten().tolist()
        numbers = self.num_channels * math.prod(self.patch)
        rows = values.reshape(-1, values.shape[-1])
        if rows.shape[1] != numbers or height * width > len(rows):
            raise ValueError(
                f"pixel_values of shape {tuple(values.shape)} of example {number} must have {height}x{width} patches "
                f"of {numbers} numbers"
            )
        return rows[: height * width], (height, width)
