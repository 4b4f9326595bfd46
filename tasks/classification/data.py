"""Images and labels for classification: the three splits of a source, ready for a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from tqdm.auto import tqdm

from tasks.classification.config import DataConfig
from tasks.classification.sources import READERS, SPLIT_NAMES, SPLITS, ImageData, Images, balanced_subset

CACHE_LIMIT = 1 << 30


def load_data(config: DataConfig) -> ImageData:
    """Read a source, cut the splits it does not have, keep as many images of each as `limit_*` says.

    Raises:
        ValueError, OSError: naming the folder, file or column that is missing, empty or mislabelled.
    """
    data = READERS[config.source](config)
    if "train" not in data.splits:
        raise ValueError(f"{config.path} has no training split, a folder or file named {SPLIT_NAMES['train'][0]}")
    left = 1.0  # share of the images that came without splits and are still in "train"
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        if split not in data.splits:
            train = data.splits["train"]
            kept, cut = stratified_cut(train.labels, fraction / left, config.split_seed)
            data.splits["train"], data.splits[split] = train.subset(kept), train.subset(cut)
            left -= fraction
    for split in SPLITS:
        images, limit = data.splits[split], getattr(config, f"limit_{split}")
        if not len(images):
            raise ValueError(f"{data.description}: the {split} split is empty")
        if limit is not None:
            if limit > len(images):
                raise ValueError(f"data.limit_{split}={limit} must be at most the {len(images)} images of the split")
            data.splits[split] = images.subset(balanced_subset(images.labels, limit, config.split_seed))
    return data


def stratified_cut(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, cut) such that every class gives the same share to `cut`, at least one image of two or more."""
    generator = np.random.default_rng(seed)
    kept, cut = [], []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(members))
        count = min(max(count, 1), len(members) - 1) if len(members) > 1 else 0
        cut.append(members[:count])
        kept.append(members[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(cut))


class ImageDataset(Dataset):
    """A split as a torch dataset of {"pixel_values": (channels, height, width) float32, "labels": int}.

    Args:
        images: the split.
        processor: image processor of the model.
        num_channels: 3, or 1 for grey images.
        cache: keep processed images in memory; None: if they stay below 1 GiB. Processing is deterministic, so doing
            it once is enough.
    """

    def __init__(self, images: Images, processor: Any, num_channels: int = 3, cache: bool | None = None) -> None:
        self.images = images
        self.processor = processor
        self.num_channels = num_channels
        size = processor.size
        count = len(images) * num_channels * size["height"] * size["width"] * 4
        self.cache = cache if cache is not None else count < CACHE_LIMIT
        self.pixels: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def fill_cache(self, show_progress: bool = False) -> None:
        """Process every image now; worker processes that start later share the memory."""
        if self.cache and self.pixels is None:
            indices = tqdm(range(len(self)), desc="reading images", disable=not show_progress or len(self) < 2000)
            self.pixels = torch.stack([self._process(index) for index in indices])

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A worker would fill a cache of its own, and again in every epoch.
        if get_worker_info() is None:
            self.fill_cache()
        pixels = self._process(index) if self.pixels is None else self.pixels[index]
        return {"pixel_values": pixels, "labels": int(self.images.labels[index])}

    def _process(self, index: int) -> torch.Tensor:
        image = self.images.read(index)
        if self.num_channels == 1:
            image = np.asarray(image.convert("L"))[..., None]
        return self.processor(image, return_tensors="pt")["pixel_values"][0]
