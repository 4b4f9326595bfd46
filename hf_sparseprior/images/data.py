"""Images and labels for classification: the three splits of a source, ready for a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from torch.utils.data import Dataset, get_worker_info
from tqdm.auto import tqdm

from hf_sparseprior.images.augmentation import Augmentation
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources import READERS, SPLITS, ImageData, Images, balanced_subset, drop_corrupt, strata
from hf_sparseprior.runs.command import tell_passed_over
from hf_sparseprior.runs.config import FINAL
from hf_sparseprior.training import Draw, LabelMaps
from hf_sparseprior.training.token_labels import WHOLE

CACHE_LIMIT = 1 << 30


def load_data(config: DataConfig, whole: str | None = None) -> ImageData:
    """Read a source, cut the splits it does not have, and keep as many images of each split as `limit_*` says.

    With `stage` final, the images of validation are training images too. Prints in one line what was passed over.
    Of a source without splits, all images are of the split `whole`, if it is given, and there is no other.

    Raises:
        ValueError, OSError: the message names the folder, file or column that is missing, empty or mislabelled.
    """
    data = READERS[config.source](config)  # every reader gives at least a training split
    if PartialState().is_main_process:
        tell_passed_over(data.passed_over)
    if whole is not None and list(data.splits) == ["train"]:
        data.splits, data.origins = {whole: data.splits["train"]}, {whole: data.origins.get("train", "train")}
    else:
        _cut_splits(data, config)
    for split in (name for name in SPLITS if name in data.splits):
        images, limit = data.splits[split], getattr(config, f"limit_{split}")
        if not len(images):
            raise ValueError(f"{data.description}: the {split} split is empty")
        if limit is not None:
            if limit > len(images):
                raise ValueError(f"data.limit_{split}={limit} must be at most the {len(images)} images of the split")
            data.splits[split] = images.subset(balanced_subset(strata(images.labels), limit, config.split_seed))
    return data


def _cut_splits(data: ImageData, config: DataConfig) -> None:
    """Cut validation and test from the training images where the source has none, and say so in `data.origins`."""
    read = data.origins
    data.origins = {**config.split_names, **read}
    total = len(data.splits["train"])
    left = 1.0  # share of the images that came without splits and are still in "train"
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        if split not in data.splits:
            train = data.splits["train"]
            kept, cut = stratified_cut(strata(train.labels), fraction / left, config.split_seed)
            data.splits["train"], data.splits[split] = train.subset(kept), train.subset(cut)
            data.cut[split] = total
            data.origins[split] = f"{100 * fraction:g} % cut from train"
            left -= fraction
    if config.stage == FINAL and config.source != "vtab":  # which has a list of its own for it
        if {"train", "validation"} <= set(read):
            data.origins["train"] = " and ".join(read[split] for split in ("train", "validation"))
        data.splits["train"] = data.splits["train"].joined(data.splits["validation"])


def load_split(config: DataConfig, split: str, whole: bool = False) -> ImageData:
    """The data with this split alone, without damaged images if the configuration says so; of a source without splits,
    if it is asked for as a whole, with all images.
    """
    data = load_data(config, split if whole else None)
    data.splits = {split: data.splits[split]}
    drop_corrupt(data, config, show_progress=True)
    return data


def as_trained(config: DataConfig, processor: Any) -> DataConfig:
    """The same data, its images decoded as those that a model was trained on, unless `config` itself says how.

    Args:
        config: of the data.
        processor: image processor that was saved with the model; those of earlier runs and of others do not say it.
    """
    exif = getattr(processor, "exif", None)
    scaled = getattr(processor, "depth16", None) == "scale"
    return replace(config, exif=config.exif or exif, depth16="scale" if scaled else config.depth16)


def stratified_cut(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, cut). Every class gives the same share to `cut`, and at least one image if it has two or more."""
    generator = np.random.default_rng(seed)
    kept, cut = [], []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(members))
        count = min(max(count, 1), len(members) - 1) if len(members) > 1 else 0
        cut.append(members[:count])
        kept.append(members[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(cut))


class Preparation:
    """Turns a decoded image into pixel values (channels, height, width) float32, by the model's processor or augmented.

    Args:
        processor: image processor of the model.
        num_channels: 3, or 1 for grey images.
        augmentation: that of training images. It needs the image's `Draw`.
        seed: seed of the augmentation.
    """

    def __init__(
        self, processor: Any, num_channels: int = 3, augmentation: Augmentation | None = None, seed: int = 0
    ) -> None:
        self.processor = processor
        self.num_channels = num_channels
        self.augmentation = augmentation
        self.seed = seed

    def __call__(self, image: Image.Image, draw: Draw | None = None) -> torch.Tensor:
        """Prepare one RGB image."""
        return self.with_view(image, draw)[0]

    def with_view(self, image: Image.Image, draw: Draw | None = None) -> tuple[torch.Tensor, np.ndarray]:
        """The same, and which part of the whole image is seen, unless a processor cuts it."""
        if self.augmentation is not None:
            if draw is None:
                raise TypeError("a dataset with augmentation is indexed by Draw, as DrawSampler gives them")
            return self.augmentation.with_view(image, draw.random(self.seed))
        pixels: Any = image if self.num_channels == 3 else np.asarray(image.convert("L"))[..., None]
        return self.processor(pixels, return_tensors="pt")["pixel_values"][0], WHOLE


class ImageDataset(Dataset):
    """A split as a torch dataset of {"pixel_values": (channels, height, width) float32, "labels": int, or of several
    labels or numbers (classes,) float32}.

    Images that are not augmented are prepared once, if the results fit in memory. Of augmented images the decoded ones
    are kept, if they fit. The dataset is then indexed by a `Draw`, and a sample carries its draw.

    Args:
        images: the split.
        prepare: turns an image into pixel values.
        cache: whether to keep images in memory; None: if they stay below 1 GiB.
        label_maps: label maps of these images; a sample then also has "label_map", its classes, scores and view (2, 3).
    """

    def __init__(
        self, images: Images, prepare: Preparation, cache: bool | None = None, label_maps: LabelMaps | None = None
    ) -> None:
        self.images = images
        self.prepare = prepare
        self.cache = cache
        self.label_maps = label_maps
        self.full: bool | None = None  # whether everything is in memory; None: not tried
        self.pixels: torch.Tensor | None = None
        self.decoded: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def keeps_decoded(self) -> bool:
        """Whether decoded images are kept, and not what the model takes."""
        return self.prepare.augmentation is not None

    def decoded_image(self, index: int) -> Image.Image:
        """An image, from memory if it is there."""
        return self.images.read(index) if self.decoded is None else Image.fromarray(self.decoded[index])

    def fill_cache(self, show_progress: bool = False) -> None:
        """Read every image now, if they fit; worker processes that start later share the memory."""
        if self.full is not None or not len(self):
            return
        self.full = False
        if self.cache is False:
            return
        kept: list[Any] = []
        size = 0
        for index in tqdm(range(len(self)), desc="reading images", disable=not show_progress or len(self) < 2000):
            image = self.images.read(index)
            kept.append(np.asarray(image) if self.keeps_decoded else self.prepare(image))
            size += kept[-1].nbytes
            # An estimate from a few images saves reading a large set for nothing. The sum over all images decides.
            expected = size / (index + 1) * len(self) if index < 8 else size
            if self.cache is None and expected >= CACHE_LIMIT:
                return
        if self.keeps_decoded:
            self.decoded = kept
        else:
            self.pixels = torch.stack(kept)
        self.full = True

    def __getitem__(self, item: int | Draw) -> dict[str, Any]:
        # A worker would fill a cache of its own, and do so again in every epoch.
        if get_worker_info() is None:
            self.fill_cache()
        draw, index = (item, item.index) if isinstance(item, Draw) else (None, int(item))
        pixels, view = self._pixel_values(index, draw)
        label = self.images.labels[index]
        target = int(label) if np.ndim(label) == 0 else torch.from_numpy(label.astype(np.float32))
        sample: dict[str, Any] = {"pixel_values": pixels, "labels": target}
        if self.label_maps is not None:
            sample["label_map"] = (*self.label_maps.read(index), torch.from_numpy(view[:2]).float())
        return sample if draw is None else {**sample, "draw": draw}

    def _pixel_values(self, index: int, draw: Draw | None) -> tuple[torch.Tensor, np.ndarray]:
        if self.pixels is not None:
            return self.pixels[index], WHOLE
        return self.prepare.with_view(self.decoded_image(index), draw)
