"""The image processor of evaluation, which is saved with a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import BitImageProcessorPil, ViTImageProcessorPil

from hf_sparseprior.images.config import Decoding
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor
from hf_sparseprior.saving.processor import own_processor_settings


def make_processor(
    model_config: Any,
    eval_crop_ratio: float | None = None,
    decoding: Decoding | None = None,
    section: str = "augmentation",
) -> Any:
    """The image processor of evaluation: resize, or resize and cut out the centre.

    `decoding` is kept in it for those who use the model; no processor decodes images itself. `section`: that of
    `eval_crop_ratio`, for errors.
    """
    if model_config.num_channels not in (1, 3):
        raise ValueError(f"model.num_channels={model_config.num_channels} must be 3 (colour) or 1 (grey) for images")
    settings = {**own_processor_settings(model_config), **(asdict(decoding) if decoding else {})}
    whole, cropped = ViTImageProcessorPil, BitImageProcessorPil
    if model_config.num_channels == 1:
        whole = cropped = SparsePriorImageProcessor
    if eval_crop_ratio is None:
        return whole(**settings)
    height, width = settings["size"]["height"], settings["size"]["width"]
    if height != width:
        raise ValueError(
            f"{section}.eval_crop_ratio={eval_crop_ratio} needs a square model.image_size, not {height}x{width}"
        )
    settings.update(crop_size=settings["size"], do_center_crop=True)
    settings["size"] = {"shortest_edge": round(height / eval_crop_ratio)}
    return cropped(**settings)
