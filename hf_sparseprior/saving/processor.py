"""The image processor of a saved model, which `AutoImageProcessor` and pipelines read."""

from __future__ import annotations

from typing import Any

from hf_sparseprior.base.families import family_of

PROCESSOR = "preprocessor_config.json"


def image_processor_settings(config: Any) -> dict[str, Any]:
    """preprocessor_config.json of a ViT image processor for this model, or of VideoMAE's if it takes clips.

    Both work with and without torchvision.
    """
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    if takes_clips(config):
        kind = {"image_processor_type": "VideoMAEImageProcessor", "do_center_crop": False}
    else:
        kind = {"image_processor_type": "ViTImageProcessor", "do_convert_rgb": config.num_channels == 3}
    return {
        **kind,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }


def takes_clips(config: Any) -> bool:
    """Whether a config belongs to a video model."""
    family = family_of(config)
    return family is not None and family.takes == "clips"
