"""Damaged images, found before training by decoding every image once."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from tasks.common.images.config import DataConfig
from tasks.common.images.sources.images import TOO_DEEP, ImageData, Images, TooDeep, short
from tasks.common.scans import NAMES_SHOWN, remembered


class _Problems(Dataset):
    """index -> (index, what is wrong with the image or None)."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, str | None]:
        try:
            self.images.read(index)
        except (OSError, TooDeep) as error:
            return index, str(error)
        return index, None


def find_corrupt(images: Images, workers: int = 0, show_progress: bool = False) -> dict[int, str]:
    """Decode every image to its last pixel.

    Args:
        images: one split.
        workers: processes that decode; 0: this one.
        show_progress: show a bar.

    Returns:
        {index: one line with the image's name and what is wrong with it} for images that cannot be read.
    """
    loader = DataLoader(_Problems(images), batch_size=32, num_workers=workers, collate_fn=list)
    found = {}
    with tqdm(total=len(images), desc="looking for damaged images", unit=" images", disable=not show_progress) as bar:
        for batch in loader:
            found.update({index: problem for index, problem in batch if problem is not None})
            bar.update(len(batch))
    return found


def drop_corrupt(
    data: ImageData, config: DataConfig, workers: int = 0, show_progress: bool = False
) -> dict[str, list[str]]:
    """Look for damaged images in every split and do with them what `data.corrupt` says.

    "fatal" raises, "skip" removes them from `data.splits` and prints a line for every split that had some, "unchecked"
    does not look. What a scan found is remembered by names, sizes and times of change of the files.

    Returns:
        {split: the names of the images that were removed}, of splits that had some.

    Raises:
        ValueError: "fatal": count and first names of each split; "skip": if no image of a split is left. Either: for
            images of more than 8 bits, unless they are scaled.
    """
    if config.corrupt == "unchecked":
        return {}
    found = {split: _scan(images, workers, show_progress) for split, images in data.splits.items()}
    found = {split: problems for split, problems in found.items() if problems}
    if not found:
        return {}
    _refuse_depth(found)
    if config.corrupt == "fatal":
        lines = "; ".join(
            f"{split}: {len(problems)} of {len(data.splits[split])}, {', '.join(list(problems.values())[:NAMES_SHOWN])}"
            for split, problems in found.items()
        )
        raise ValueError(f"damaged images ({lines}); data.corrupt=skip leaves them out")
    names = {}
    for split, problems in found.items():
        images = data.splits[split]
        names[split] = [images.name(index) for index in problems]
        if len(problems) == len(images):
            raise ValueError(f"{split}: none of the {len(images)} images is readable, {next(iter(problems.values()))}")
        data.splits[split] = images.subset(np.setdiff1d(np.arange(len(images)), list(problems)))
        print(
            f"{split}: {len(problems)} of {len(images)} images are damaged and left out, "
            f"{short(names[split], NAMES_SHOWN)}",
            file=sys.stderr,
        )
    return names


def _refuse_depth(found: dict[str, dict[int, str]]) -> None:
    """Raise TooDeep with the first image that has more than 8 bits a channel, and how many there are."""
    deep = [problem for problems in found.values() for problem in problems.values() if problem.endswith(TOO_DEEP)]
    if deep:
        raise TooDeep(f"{deep[0]} ({len(deep)} such images)")


def _scan(images: Images, workers: int, show_progress: bool) -> dict[int, str]:
    """`find_corrupt`, or what it found at an earlier start."""
    if images.checked or not len(images):
        return {}
    if images.stamp is None:
        return find_corrupt(images, workers, show_progress)
    return remembered(_key(images), lambda: find_corrupt(images, workers, show_progress))


def _key(images: Images) -> str:
    """Digest of what decides a scan's outcome: every image's file, and Pillow's version."""
    import PIL

    digest = hashlib.sha256(PIL.__version__.encode())
    for index in range(len(images)):
        digest.update(_stamp(images, index).encode() + b"\n")
    return digest.hexdigest()


def _stamp(images: Images, index: int) -> str:
    assert images.stamp is not None  # no scan of other images is remembered
    try:
        return images.stamp(index)
    except OSError:  # the file is gone; reading it will say so
        return f"missing {images.name(index)}"
