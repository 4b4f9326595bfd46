"""Clips and labels: the splits of a source, ready for a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from hf_sparseprior.cli.video_files import count_frames, read_frames, sample_indices, segment_indices
from hf_sparseprior.images.randaugment import Policy, randaugment
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.runs.command import tell_passed_over
from hf_sparseprior.runs.config import FINAL
from hf_sparseprior.training import Draw
from tasks.video.config import SPLITS, AugmentationConfig, DataConfig
from tasks.video.sources import READERS


@dataclass
class Videos:
    """Files of a split and their classes' numbers."""

    paths: list[Path]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path of a video."""
        return str(self.paths[index])

    def subset(self, indices: np.ndarray) -> Videos:
        """The videos with these numbers."""
        return Videos([self.paths[index] for index in indices], self.labels[indices])


@dataclass
class VideoData:
    """classes: names in the order of the labels; splits: train, validation, test; name: source and folder.

    origins: where splits come from, as a run says it, where that is something else than their names.
    """

    classes: list[str]
    splits: dict[str, Videos]
    name: str
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Name and size of each split, for results.json."""
        sizes = ", ".join(f"{len(videos.paths)} {split}" for split, videos in self.splits.items())
        return f"{self.name} ({sizes})"


def load_data(config: DataConfig) -> VideoData:
    """Find the videos of a source; motion clips that are missing are cut. With `stage` final, the videos of validation
    are training videos too.

    Raises:
        ValueError, OSError: the message names the folder, list or line that is missing, empty or mislabelled.
    """
    listing, folder = READERS[config.source](config), Path(config.path or "")
    if PartialState().is_main_process:
        tell_passed_over(listing.passed_over)
    classes = listing.classes or sorted({name for _, name in listing.splits["train"]})
    numbers = {name: number for number, name in enumerate(classes)}
    splits = {}
    for split, pairs in listing.splits.items():
        if unknown := sorted({name for _, name in pairs} - set(numbers)):
            raise ValueError(f"{folder}: class {unknown[0]!r} of {split} is not in train")
        labels = np.array([numbers[name] for _, name in pairs])
        splits[split] = Videos([path for path, _ in pairs], labels)
    if config.stage == FINAL:
        splits["train"] = joined(splits["train"], splits["validation"])
        origins = {split: listing.origins.get(split, split) for split in SPLITS}
        listing.origins = {**origins, "train": f"{origins['train']} and {origins['validation']}"}
    return VideoData(classes, splits, f"{config.source} {folder.name}", listing.origins)


def joined(first: Videos, second: Videos) -> Videos:
    """The videos of one split and then those of another."""
    return Videos(first.paths + second.paths, np.concatenate([first.labels, second.labels]))


SHORT_SIDE = "set data.short_side"


class TooSmall(ValueError):
    """Frames are smaller than what is cut out of them. They are not damaged, so `data.corrupt=skip` keeps them."""


def check_frames(frames: np.ndarray, size: tuple[int, int], whose: str) -> None:
    """Raise TooSmall unless (height, width) can be cut out of frames (F, height, width, 3)."""
    (height, width), (rows, columns) = size, frames.shape[1:3]
    if rows < height or columns < width:
        raise TooSmall(f"frames of {rows}x{columns} pixels must be at least {height}x{width}, {whose}; {SHORT_SIDE}")


class Preparation:
    """Turns decoded frames into pixel values, cut to the model's size and normalised.

    Args:
        model_config: the model's config.
        augmentation: that of training clips; None for none.
        size: (height, width) of what is cut out; None: the model's.
    """

    def __init__(
        self,
        model_config: Any,
        augmentation: AugmentationConfig | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        own = as_pair(model_config.image_size)
        self.size, self.whose = size or own, "the model's" if size in (None, own) else "data.test_size"
        self.mean = torch.tensor(model_config.image_mean).view(-1, 1, 1)
        self.std = torch.tensor(model_config.image_std).view(-1, 1, 1)
        self.augmentation = augmentation
        fill = [round(255 * value) for value in model_config.image_mean]
        self.fill = (fill[0], fill[0], fill[0]) if len(fill) == 1 else (fill[0], fill[1], fill[2])

    @property
    def cut(self) -> tuple[tuple[int, int], str]:
        """(height, width) of what is cut out, and whose it is."""
        return self.size, self.whose

    def __call__(self, frames: np.ndarray, random: np.random.Generator | None = None, along: float = 0.5) -> Tensor:
        """Turn uint8 (F, height, width, 3) into float32 (F, 3, H, W).

        Args:
            frames: a clip.
            random: an augmentation draws from it.
            along: where along the longer side of the frames the window is cut, from 0 (left or top) to 1.
        """
        check_frames(frames, *self.cut)
        (height, width), (rows, columns) = self.size, frames.shape[1:3]
        across_rows, across_columns = (along, 0.5) if rows > columns else (0.5, along)
        top, left = int((rows - height) * across_rows), int((columns - width) * across_columns)
        augmentation, brightness, contrast = self.augmentation, 0.0, 1.0
        if augmentation is not None:
            if random is None:
                raise TypeError("a dataset with augmentation is indexed by Draw, as DrawSampler gives them")
            # All numbers are drawn, used or not, so that one setting does not change the numbers of the others.
            places = random.integers(0, [rows - height + 1, columns - width + 1])
            flips = random.random(2)
            shifts = random.uniform(-1, 1, 2)
            if augmentation.random_crop:
                top, left = (int(place) for place in places)
            if flips[0] < augmentation.vertical_flip:
                frames = frames[:, ::-1]
            if flips[1] < augmentation.horizontal_flip:
                frames = frames[:, :, ::-1]
            brightness = float(shifts[0]) * augmentation.brightness
            contrast += float(shifts[1]) * augmentation.contrast
        frames = frames[:, top : top + height, left : left + width]
        if augmentation is not None and augmentation.policy is not None and random is not None:
            frames = self._randaugment(frames, augmentation.policy, int(random.integers(2**63)))
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255
        if augmentation is not None:
            pixels = (pixels - 0.5) * contrast + 0.5 + brightness
        return ((pixels - self.mean) / self.std).contiguous()

    def _randaugment(self, frames: np.ndarray, policy: Policy, seed: int) -> np.ndarray:
        """The same operations, drawn by a seed, on all frames."""
        images = (Image.fromarray(np.ascontiguousarray(frame)) for frame in frames)
        changed = [randaugment(image, policy, np.random.default_rng(seed), self.fill) for image in images]
        return np.stack([np.asarray(image) for image in changed])


class ClipDataset(Dataset):
    """A split as a torch dataset of {"pixel_values": (F, 3, H, W) float32, "labels": int}, and "draw" if a sample was
    asked for by its `Draw`.

    Args:
        videos: the split.
        config: how they are read.
        num_frames: F. A clip of one frame has the frame in the middle of longer clips.
        prepare: turns frames into pixel values.
        seed: seed of the augmentation.
        clips, crops: views of each video, crops of a clip next to each other. The first view of video v is item number
            v * clips * crops.
    """

    def __init__(
        self,
        videos: Videos,
        config: DataConfig,
        num_frames: int,
        prepare: Preparation,
        seed: int = 0,
        clips: int = 1,
        crops: int = 1,
    ) -> None:
        self.videos = videos
        self.config = config
        self.num_frames = num_frames
        self.prepare = prepare
        self.seed = seed
        self.clips = clips
        self.crops = crops
        self.decoded: list[np.ndarray] | None = None
        # The crops of a clip are asked for one after the other, and it is decoded once.
        self._last: tuple[tuple[int, float], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.videos.paths) * self.clips * self.crops

    def fill_cache(self, show_progress: bool = False) -> None:
        """Decode every video now, if they are to be kept in memory."""
        if self.decoded is None and self.config.cache:
            paths = tqdm(self.videos.paths, desc="decoding videos", disable=not show_progress)
            self.decoded = [read_frames(path, short_side=self.config.short_side) for path in paths]

    def frames(self, index: int, place: float | np.ndarray = 0.5, short_side: int | None = None) -> np.ndarray:
        """The frames uint8 (F, height, width, 3) of the clip at this place in a video (`sample_indices`), or at these
        places in its segments (`segment_indices`); the shorter side as given, by default that of the config.
        """
        if self.decoded is not None:
            video = self.decoded[index]
            return video[self._numbers(len(video), place)]
        path = self.videos.paths[index]
        return read_frames(path, self._numbers(count_frames(path), place), short_side or self.config.short_side)

    def _numbers(self, total: int, place: Any) -> list[int]:
        """Numbers of the frames of a clip in a video of `total` frames."""
        if self.config.sampling == "segments":
            return segment_indices(total, self.num_frames, place)
        return sample_indices(total, self.num_frames, self.config.stride, place)

    def _clip(self, index: int, place: float, short_side: int | None = None) -> np.ndarray:
        """`frames`, kept for the other crops."""
        if self.crops == 1:
            return self.frames(index, place, short_side)
        if self._last is None or self._last[0] != (index, place):
            self._last = (index, place), self.frames(index, place)
        return self._last[1]

    def __getitem__(self, item: int | Draw) -> dict[str, Any]:
        draw, item = (item, item.index) if isinstance(item, Draw) else (None, int(item))
        index, view = divmod(item, self.clips * self.crops)
        clip, crop = divmod(view, self.crops)
        place: Any = (clip + 0.5) / self.clips
        along = crop / (self.crops - 1) if self.crops > 1 else 0.5
        random = draw.random(self.seed) if draw is not None else None
        augmentation = self.prepare.augmentation
        if random is not None and augmentation is not None and augmentation.random_place:
            segments = self.config.sampling == "segments"
            place = random.random(self.num_frames) if segments else float(random.random())
        side = None
        if random is not None and augmentation is not None and augmentation.short_side is not None:
            low, high = augmentation.short_side
            side = int(random.integers(low, high + 1))
        try:
            pixels = self.prepare(self._clip(index, place, side), random, along)
        except ValueError as error:
            raise ValueError(f"{self.videos.paths[index]}: {error}") from None
        sample = {"pixel_values": pixels, "labels": int(self.videos.labels[index])}
        return sample if draw is None else {**sample, "draw": draw}


def make_dataset(
    videos: Videos,
    config: DataConfig,
    model_config: Any,
    augmentation: AugmentationConfig | None = None,
    seed: int = 0,
) -> ClipDataset:
    """A split for a model, one clip of each video; with an augmentation it is for training."""
    return ClipDataset(videos, config, model_config.num_frames, Preparation(model_config, augmentation), seed)


def shape_of_test(config: DataConfig, model_config: Any) -> tuple[int, tuple[int, int]]:
    """Number of frames and (height, width) of the clips of a test."""
    size = as_pair(model_config.image_size if config.test_size is None else config.test_size)
    return config.test_frames or model_config.num_frames, size


def cuts_of(config: DataConfig, model_config: Any) -> dict[str, tuple[tuple[int, int], str]]:
    """What is cut out of the frames of each split (`Preparation.cut`)."""
    own = Preparation(model_config).cut
    test = Preparation(model_config, size=shape_of_test(config, model_config)[1]).cut
    return {"train": own, "validation": own, "test": test}


def make_test_dataset(videos: Videos, config: DataConfig, model_config: Any) -> ClipDataset:
    """A split as a test looks at it: `test_clips` times `test_crops` views of each video."""
    num_frames, size = shape_of_test(config, model_config)
    prepare = Preparation(model_config, size=size)
    return ClipDataset(videos, config, num_frames, prepare, clips=config.test_clips, crops=config.test_crops)


def check_test_shape(model: Any, config: DataConfig) -> None:
    """Give a model a black clip of a test's frames and size, if these are not its own.

    Raises:
        ValueError: if the model cannot take it; the message names `data.test_frames` and `data.test_size`.
    """
    num_frames, size = shape_of_test(config, model.config)
    if (num_frames, size) == (model.config.num_frames, as_pair(model.config.image_size)):
        return
    clip = torch.zeros(1, num_frames, model.config.num_channels, *size, dtype=model.dtype, device=model.device)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(pixel_values=clip)
    except ValueError as error:
        asked = f"data.test_frames={config.test_frames}, data.test_size={config.test_size}"
        raise ValueError(f"{asked}: the model cannot take clips of this shape, {error}") from None
    finally:
        model.train(training)
