"""A split of images as a saved model sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, as_trained, load_split
from hf_sparseprior.images.sources import ImageData
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.hf_run import Split
from hf_sparseprior.runs.measured import is_other_data
from hf_sparseprior.saving.saved_processor import load_image_processor


def read_split(config: Config, split: str, model: Any, folder: Path) -> Split:
    """A split, prepared by the image processor that was saved with the model; prints which images it has.

    Of other data than the run's that come without splits it is all images, because the model was trained on none.

    Args:
        config: has the section `data`.
        split: train, validation or test.
        model: says how many channels it takes.
        folder: where it was saved.
    """
    processor = load_image_processor(folder)
    data_config = as_trained(DataConfig(**config["data"]), processor)
    data = load_split(data_config, split, is_other_data(config, folder))
    print(f"measures {part(data, data_config, split)}", flush=True)
    preparation = Preparation(processor, model.config.num_channels)
    images = ImageDataset(data.splits[split], preparation, data_config.cache)
    return Split(images, data.classes, data.description, labels=data_config.labels)


def part(data: ImageData, config: DataConfig, split: str) -> str:
    """Which images of its data a split has, in words."""
    number, limit = len(data.splits[split]), getattr(config, f"limit_{split}")
    limited = "" if limit is None else f", data.limit_{split}={limit}"
    if split in data.cut:
        cut = f"data.{split}_fraction={getattr(config, f'{split}_fraction')}, data.split_seed={config.split_seed}"
        return f"{number} of {data.cut[split]} images, cut as {split} ({cut}{limited}): {data.description}"
    return f"{number} images ({split}{limited}): {data.description}"
