"""A folder of images with a folder for each class, and the share of them that a classifier names rightly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.cli.image_files import HIDDEN, PassedOver, as_text, decode_image, images_below, is_hidden

BATCH = 16  # images that are classified together


def read_class_folders(folder: str | os.PathLike, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Files and their classes, in the order of their names. What is no image is left out, and a line says so.

    Args:
        folder: has a folder for each class, or for some of them.
        classes: names of the model's classes in the order of its logits.

    Raises:
        OSError: if there is no such folder, or no file in it. ValueError: for a folder that is not named as a class.
    """
    folder, labelled, passed_over = Path(folder), [], PassedOver()
    if not folder.is_dir():
        raise OSError(f"--images {folder} is no folder")
    for class_folder in sorted(folder.iterdir()):
        if is_hidden(class_folder.name) or not class_folder.is_dir():
            reason = HIDDEN if is_hidden(class_folder.name) else "of no class"
            passed_over.add(reason, str(class_folder))
            continue
        name = as_text(class_folder.name)
        if name not in classes:
            known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise ValueError(f"--images: {class_folder} must be named as a class of the model: {known}")
        files = sorted(map(Path, images_below(class_folder, passed_over)))
        labelled += [(path, classes.index(name)) for path in files]
    if (line := passed_over.line()) is not None:
        print(line, flush=True)
    if not labelled:
        raise OSError(f"--images {folder} must have a folder of images for each class")
    return labelled


def read_image(file: Path, processor: Any, num_channels: int) -> Any:
    """An image as the processor takes it: 8 bits, one channel or three, decoded as the settings of the processor say.

    Raises:
        OSError: if it cannot be read. ValueError: if it has more than 8 bits a channel and the settings do not scale
            them, or the model another number of channels.
    """
    if num_channels not in (1, 3):
        raise ValueError(f"--images: image files have 1 or 3 channels, and the model takes {num_channels}")
    return decode_image(file, str(file), **decoding(processor)).convert("RGB" if num_channels == 3 else "L")


def decoding(processor: Any) -> dict[str, str]:
    """How image files are decoded for a model: its processor has the settings.

    Models that were trained with depth16=refuse, and those of others, have not seen scaled images.
    """
    return {"exif": getattr(processor, "exif", "apply"), "depth16": getattr(processor, "depth16", "refuse")}


def pixel_values(images: Iterable[Any], processor: Any, num_channels: int) -> Tensor:
    """Pillow's images as a model takes them, float32 (B, C, height, width); of lists of frames (B, F, C, ...)."""
    mode = "RGB" if num_channels == 3 else "L"
    given = [[frame.convert(mode) for frame in own] if isinstance(own, list) else own.convert(mode) for own in images]
    return torch.as_tensor(np.asarray(processor(given, return_tensors="np")["pixel_values"], dtype=np.float32))


def accuracies(
    classifiers: dict[str, Callable[[Tensor], np.ndarray]],
    images: Sequence[tuple[Path, int]],
    processor: Any,
    num_channels: int,
) -> dict[str, float]:
    """Shares of the images whose class has the largest of a classifier's logits, each from pixels to (B, classes)."""
    right = dict.fromkeys(classifiers, 0)
    for first in range(0, len(images), BATCH):
        batch = images[first : first + BATCH]
        read = (read_image(file, processor, num_channels) for file, _ in batch)
        pixels = pixel_values(read, processor, num_channels)
        labels = np.array([label for _, label in batch])
        for name, classify in classifiers.items():
            right[name] += int((classify(pixels).argmax(-1) == labels).sum())
    return {name: number / len(images) for name, number in right.items()}
