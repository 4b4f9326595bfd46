"""A split of images as a saved model sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_sparseprior.saving.saved_processor import load_image_processor
from tasks.common.config import Config
from tasks.common.hf_run import Split
from tasks.common.images.config import DataConfig
from tasks.common.images.data import ImageDataset, Preparation, as_trained, load_split


def read_split(config: Config, split: str, model: Any, folder: Path) -> Split:
    """A split, prepared by the image processor that was saved with the model.

    Args:
        config: has the section `data`.
        split: train, validation or test.
        model: says how many channels it takes.
        folder: where it was saved.
    """
    processor = load_image_processor(folder)
    data_config = as_trained(DataConfig(**config["data"]), processor)
    data = load_split(data_config, split)
    preparation = Preparation(processor, model.config.num_channels)
    return Split(ImageDataset(data.splits[split], preparation, data_config.cache), data.classes, data.description)
