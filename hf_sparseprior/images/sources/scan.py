"""Damaged images, found before training by decoding every image once."""

from __future__ import annotations

import hashlib

from hf_sparseprior.cli.image_files import TooDeep
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources.images import TOO_DEEP, ImageData, Images
from hf_sparseprior.runs.scans import drop_found, find_problems, refuse_found, remembered


def find_corrupt(images: Images, workers: int = 0, show_progress: bool = False) -> dict[int, str]:
    """Decode every image to its last pixel.

    Args:
        images: one split.
        workers: processes that decode; 0: this one.
        show_progress: show a bar.

    Returns:
        {index: one line with the image's name and what is wrong with it} for images that cannot be read.
    """
    errors = (OSError, TooDeep)
    return find_problems(images.read, len(images), "images", errors, 32, workers, show_progress)


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
    refuse_found(found, TOO_DEEP, TooDeep, "images")
    return drop_found(data.splits, found, config.corrupt, "images")


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
        digest.update(_stamp(images, index).encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def _stamp(images: Images, index: int) -> str:
    assert images.stamp is not None  # no scan of other images is remembered
    try:
        return images.stamp(index)
    except OSError:  # the file is gone; reading it will say so
        return f"missing {images.name(index)}"
