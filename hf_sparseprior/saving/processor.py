"""The image processor of a saved model, which `AutoImageProcessor` and pipelines read."""

from __future__ import annotations

from typing import Any

from hf_sparseprior.base.families import family_of
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor

PROCESSOR = "preprocessor_config.json"


def image_processor_settings(config: Any) -> dict[str, Any]:
    """preprocessor_config.json of a ViT image processor for this model, or of VideoMAE's if it takes clips.

    Both work with and without torchvision, and wherever there is transformers. Of grey images ViT's gives one channel,
    of all others three: `own_processor_settings` serves models of one channel.
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


def own_processor_settings(config: Any) -> dict[str, Any]:
    """preprocessor_config.json of a saved model: as above, but with our own class for images of one channel.

    The class is in the code that the folder carries, for those who load it by `trust_remote_code=True`.
    """
    settings = image_processor_settings(config)
    if takes_clips(config) or config.num_channels != 1:
        return settings
    del settings["do_convert_rgb"]
    name = SparsePriorImageProcessor.__name__
    # A list (one class for each backend), because pipelines ask whether to run the code of a video processor that a
    # lone name lets them expect.
    settings |= {"image_processor_type": name, "auto_map": {"AutoImageProcessor": [f"saving.{name}", None]}}
    return {**settings, "do_grayscale": True}


def takes_clips(config: Any) -> bool:
    """Whether a config belongs to a video model."""
    family = family_of(config)
    return family is not None and family.takes == "clips"
