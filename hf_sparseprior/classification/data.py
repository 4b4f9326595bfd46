"""What the Trainer takes its batches from: datasets, order, collators and image processor of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import default_data_collator

from hf_sparseprior.classification.streaming import StreamCollator, StreamedImages, noted_damage
from hf_sparseprior.images.augmentation import LOSS, SAMPLING, Augmentation, AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, load_data
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.images.sources import ImageData, StreamData, drop_corrupt, stream_data
from hf_sparseprior.runs.hf_run import draw_sampler, make_collator
from hf_sparseprior.runs.labels import NUMBERS
from hf_sparseprior.saving.processor import image_processor_settings
from hf_sparseprior.training import DrawSampler, LabelMaps, Mixing, SoftTargetCollator

DAMAGED = "damaged_images.txt"


@dataclass
class Inputs:
    """What a run needs of its data.

    datasets: by split. processor: image processor of evaluation, saved with the model. train_sampler: None for streams.
    train_collator, eval_collator: make batches. description: of the data, with the size of each split. corrupt: {split:
    names of the images left out}. damaged: file to which a stream adds damaged images as it meets them.
    """

    datasets: Mapping[str, Any]
    processor: Any
    train_sampler: DrawSampler | None
    train_collator: Any
    eval_collator: Any
    description: str
    corrupt: dict[str, list[str]] = field(default_factory=dict)
    damaged: Path | None = None

    def corrupt_images(self) -> dict[str, list[str]]:
        """{split, or "stream": names of the images that were left out}."""
        met = noted_damage(self.damaged) if self.damaged else []
        return {**self.corrupt, "stream": met} if met else self.corrupt


def read_data(config: DataConfig, arguments: Any) -> tuple[ImageData | StreamData, dict[str, list[str]]]:
    """The data of a run, and the names of damaged images left out of it."""
    # One process prepares what libraries and scans keep on disk. The others read it.
    with arguments.main_process_first(desc="reading the data"):
        if config.streaming:
            return stream_data(config), {}
        data = load_data(config)
        return data, drop_corrupt(data, config, arguments.dataloader_num_workers, not arguments.disable_tqdm)


def make_inputs(
    data: ImageData | StreamData,
    corrupt: dict[str, list[str]],
    config: DataConfig,
    augmentation: AugmentationConfig,
    model_config: Any,
    arguments: Any,
    label_maps: LabelMaps | None = None,
) -> Inputs:
    """Datasets, order and collators for the Trainer; `label_maps` are the training images'."""
    if isinstance(data, StreamData):
        collate = make_collator(augmentation, len(data.classes), arguments, getattr(model_config, "grid", None))
        return _stream_inputs(data, config, augmentation, model_config, arguments, collate)
    datasets, processor = make_datasets(data, config, model_config, augmentation, arguments.seed, label_maps)
    labels = data.splits["train"].labels
    if config.labels == NUMBERS:
        tell_scale(labels, data.classes)
    weights = class_weights(labels, len(data.classes)) if augmentation.balance == LOSS else None
    grid = getattr(model_config, "grid", None)  # a stock model's is not asked for: its tokens are not mixed
    collate = make_collator(augmentation, len(data.classes), arguments, grid, weights)
    by_class = labels if augmentation.balance == SAMPLING else None
    sampler = draw_sampler(len(labels), arguments, augmentation.repeats, by_class)
    sizes = ", ".join(f"{len(dataset)} {split}" for split, dataset in datasets.items())
    # Sizes after the cut and the limits, if these have changed what the source says.
    description = data.description if f"({sizes})" in data.description else f"{data.description} ({sizes})"
    return Inputs(datasets, processor, sampler, collate, default_data_collator, description, corrupt)


def tell_scale(numbers: np.ndarray, names: Sequence[str]) -> None:
    """Print a line for numbers that a model learns slowly, because they are far from 0 or from each other, or nearly
    the same; `numbers` is (images, numbers).
    """
    for name, own in zip(names, numbers.T.astype(np.float64), strict=True):
        spread, mean = own.std(), own.mean()
        if PartialState().is_main_process and not (0.1 <= spread <= 10 and abs(mean) <= 10):
            print(f"{name} has mean {mean:.4g} and spread {spread:.4g}; around 0 with spread 1 it is learned fastest")


def class_weights(labels: np.ndarray, num_classes: int) -> torch.Tensor:
    """(num_classes,) float32: images over classes times images of the class, 1 for a class that has none."""
    counts = np.bincount(labels, minlength=num_classes)
    weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts > 0, weights, 1.0)).float()


def _stream_inputs(
    data: StreamData,
    config: DataConfig,
    augmentation: AugmentationConfig,
    model_config: Any,
    arguments: Any,
    collate: SoftTargetCollator,
) -> Inputs:
    for name, wanted in (("repeats", augmentation.repeats > 1), ("balance", augmentation.balance is not None)):
        if wanted:
            value = getattr(augmentation, name)
            raise ValueError(f"augmentation.{name}={value} needs images in any order, not a stream")
    if arguments.max_steps <= 0 and data.sizes["train"] is None:
        raise ValueError("trainer.max_steps is missing; the stream does not say how many images it has")
    # Every process reads the stream and decodes its share of it.
    arguments.accelerator_config.dispatch_batches = False
    arguments.dataloader_drop_last = False
    processor = make_processor(model_config, augmentation.eval_crop_ratio, config.decoding)
    damaged = Path(arguments.output_dir) / DAMAGED if config.corrupt == "skip" else None
    plain = Preparation(processor, model_config.num_channels)
    augment = _make_augmentation(augmentation, model_config)
    train = Preparation(processor, model_config.num_channels, augment, arguments.seed)
    whole = {"processes": arguments.world_size, "batch_size": arguments.eval_batch_size}
    datasets = {
        split: StreamedImages(
            rows,
            f"{config.path}, {split}",
            data.sizes[split],
            **({"seed": arguments.seed} if split == "train" else whole),
        )
        for split, rows in data.splits.items()
    }
    return Inputs(
        datasets,
        processor,
        None,
        StreamCollator(train, collate, damaged, decoding=config.decoding),
        StreamCollator(plain, SoftTargetCollator(len(data.classes), Mixing()), damaged, True, config.decoding),
        data.description,
        damaged=damaged,
    )


def make_datasets(
    data: ImageData,
    config: DataConfig,
    model_config: Any,
    augmentation: AugmentationConfig | None = None,
    seed: int = 0,
    label_maps: LabelMaps | None = None,
) -> tuple[dict[str, ImageDataset], Any]:
    """The splits as torch datasets, training images augmented by `seed`, and the image processor they use."""
    augmentation = augmentation or AugmentationConfig()
    processor = make_processor(model_config, augmentation.eval_crop_ratio, config.decoding)
    if label_maps is not None and augmentation.eval_crop_ratio is not None and not augmentation.changes_images:
        raise ValueError(
            f"token_labels.path with augmentation.eval_crop_ratio={augmentation.eval_crop_ratio} needs training images "
            "that are cut at random, for example augmentation.crop=resized"
        )
    plain = Preparation(processor, model_config.num_channels)
    train = Preparation(processor, model_config.num_channels, _make_augmentation(augmentation, model_config), seed)
    datasets = {
        split: ImageDataset(images, train, config.cache, label_maps)
        if split == "train"
        else ImageDataset(images, plain, config.cache)
        for split, images in data.splits.items()
    }
    return datasets, processor


def _make_augmentation(config: AugmentationConfig, model_config: Any) -> Augmentation | None:
    if not config.changes_images:
        return None
    size = image_processor_settings(model_config)["size"]
    return Augmentation(
        config,
        (size["height"], size["width"]),
        model_config.image_mean,
        model_config.image_std,
        model_config.num_channels,
    )
