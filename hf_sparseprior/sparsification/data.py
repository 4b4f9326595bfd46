"""Images for the search, for recovery and for the test: three parts that share none."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_sparseprior.base.files import missing_path
from hf_sparseprior.cli.image_files import PassedOver, as_text, images_below, is_hidden, upright_rgb
from hf_sparseprior.cli.labelled_images import decoding, read_image
from hf_sparseprior.saving.processor import PROCESSOR

TRAIN, TEST = "train", "test"  # folders that a split may come in
TESTS = (TEST, "val", "validation", "valid")  # names of the second; the first that there is


@dataclass
class Images:
    """Images as a model takes them.

    read: the pixels of one, float32 (channels, height, width), by its number. labels: class numbers; None: not known.
    test: numbers of those that are the test's, where the data says so. unreadable: why some were left out.
    """

    count: int
    read: Callable[[int], Tensor]
    labels: list[int] | None = None
    test: list[int] | None = None
    unreadable: dict[int, str] = field(default_factory=dict)

    def readable(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Those of these images that can be read, by number; why others cannot is kept in `unreadable`."""
        found = {}
        for number in numbers:
            try:
                found[number] = self.read(number)
            except (OSError, ValueError) as error:
                self.unreadable[number] = str(error)
        return found

    def batches(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        """Numbers, so many at once."""
        return [list(numbers[first : first + size]) for first in range(0, len(numbers), size)]


@dataclass(frozen=True)
class Parts:
    """Numbers of the images of each part, which have none in common."""

    calibration: list[int]
    recovery: list[int]
    test: list[int]


def split(images: Images, calibration: int, test: int, seed: int) -> Parts:
    """Draw the parts: for the test half of the images or those that the data names, for calibration at most half of
    the others, the rest for recovery.

    Args:
        calibration, test: how many at most.

    Raises:
        ValueError: for fewer than 4 images.
    """
    if images.count < 4:
        raise ValueError(f"{images.count} images cannot be divided; give 4 or more, some hundred for a useful test")
    numbers = list(range(images.count))
    random.Random(seed).shuffle(numbers)
    if images.test is None:
        others, tested = numbers[: images.count // 2], numbers[images.count // 2 :]
    else:
        named = set(images.test)
        others, tested = [n for n in numbers if n not in named], [n for n in numbers if n in named]
    if not others or not tested:
        raise ValueError(f"{TRAIN} and {TEST} must both have images; they have {len(others)} and {len(tested)}")
    seen = min(calibration, max(1, len(others) // 2))
    return Parts(others[:seen], others[seen:], tested[:test])


def read_images(
    given: Any,
    labels: Any,
    classes: Sequence[str] | None,
    prepare: Callable[[Any], Tensor] | None,
    processor: Any,
    shape: tuple[int, int, int],
) -> Images:
    """What a user gave as images.

    Args:
        given: a tensor (N, channels, height, width) as the model takes it, a list of Pillow's images, or a folder: of
            images, of a folder of images for each class, or of `train` and `test` with these (without `test` of
            `train` and one of the other `TESTS`); or a mapping of `train` and `test` to these.
        labels: class numbers of a tensor's or a list's images; of a mapping a mapping.
        classes: names of the model's classes; None: it has none.
        prepare: Pillow's image -> (channels, height, width); None: not known.
        processor: says how files are decoded. shape: (channels, height, width) of the model's images.

    Raises:
        OSError: for a folder that is missing or empty. ValueError: for what is none of these.
    """
    if isinstance(given, Mapping):
        if set(given) != {TRAIN, TEST} or not (labels is None or isinstance(labels, Mapping)):
            raise ValueError(
                f"images of {', '.join(map(repr, given))} must be of {TRAIN!r} and {TEST!r}, and labels too"
            )
        parts = [
            read_images(given[name], None if labels is None else labels.get(name), classes, prepare, processor, shape)
            for name in (TRAIN, TEST)
        ]
        return _joined(*parts)
    if isinstance(given, (str, os.PathLike)):
        if labels is not None:
            raise ValueError("labels= is for a tensor or a list of images; a folder has a folder for each class")
        made = _known(prepare)
        return _of_folder(Path(given), classes, lambda file: made(read_image(file, processor, shape[0])))
    if isinstance(given, Tensor):
        if given.ndim != 4 or tuple(given.shape[1:]) != shape:
            raise ValueError(f"images of shape {tuple(given.shape)} must be (N, {', '.join(map(str, shape))})")
        tensor = given.detach().float().cpu()
        images = Images(len(tensor), tensor.__getitem__)
    elif isinstance(given, Sequence) and all(hasattr(image, "convert") for image in given):
        made, options = _known(prepare), decoding(processor)

        def decoded(number: int) -> Tensor:
            return made(upright_rgb(given[number].copy(), f"image {number}", **options))

        images = Images(len(given), decoded)
    else:
        raise ValueError(f"images={given!r:.60} must be a tensor, a list of Pillow's images, or a folder")
    if labels is not None:
        images.labels = [int(label) for label in labels]
        if classes is None:
            raise ValueError("labels= are of a classifier whose images have one class each; this model is none")
        most = len(classes)
        if len(images.labels) != images.count or not all(0 <= label < most for label in images.labels):
            raise ValueError(f"labels= must be {images.count} class numbers below {most}")
    return images


def _known(prepare: Callable[[Any], Tensor] | None) -> Callable[[Any], Tensor]:
    if prepare is None:
        raise ValueError(f"the model has no {PROCESSOR}, so how its images are prepared is not known (processor=)")
    return prepare


def _joined(train: Images, test: Images) -> Images:
    """Both, those of `test` last."""
    if (train.labels is None) != (test.labels is None):
        raise ValueError(f"{TRAIN} and {TEST} must both have labels, or neither")
    count = train.count + test.count

    def read(number: int) -> Tensor:
        return train.read(number) if number < train.count else test.read(number - train.count)

    labels = None if train.labels is None or test.labels is None else train.labels + test.labels
    return Images(count, read, labels, list(range(train.count, count)))


def _of_folder(folder: Path, classes: Sequence[str] | None, read: Callable[[Path], Tensor]) -> Images:
    if folder.is_file():
        raise OSError(f"{folder} is a file; give a folder of images")
    if not folder.is_dir():
        raise OSError(missing_path(folder, "give a folder of images"))
    tested = next((name for name in TESTS if (folder / name).is_dir()), None)
    divided = tested is not None and (folder / TRAIN).is_dir()
    homes = [folder / TRAIN, folder / str(tested)] if divided else [folder]
    passed_over = PassedOver()
    parts = [[Path(path) for path in sorted(images_below(home, passed_over))] for home in homes]
    files = [file for part in parts for file in part]
    if (line := passed_over.line()) is not None:
        print(line, flush=True)
    if not files:
        raise OSError(f"{folder} holds no image")
    labels = [_label(file, home, classes) for home, part in zip(homes, parts, strict=True) for file in part]
    images = Images(len(files), lambda number: read(files[number]))
    known = [label for label in labels if label is not None]
    if len(known) == len(labels):
        images.labels = known
    elif known:
        odd = files[labels.index(None)]
        raise ValueError(f"{odd} lies in no folder of a class of the model, and other images do")
    elif classes is not None and any(file.parent not in homes for file in files):
        some = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        print(f"{folder}: no folder is named as a class of the model ({some}), so images are unlabelled", flush=True)
    if divided:
        images.test = list(range(len(parts[0]), len(files)))
    return images


def _label(file: Path, home: Path, classes: Sequence[str] | None) -> int | None:
    """The class whose name the folder has in which a file lies; None: it has no class's name."""
    first = as_text(file.relative_to(home).parts[0])
    return classes.index(first) if classes is not None and not is_hidden(first) and first in classes else None


def digest(batches: Iterable[Tensor]) -> str:
    """SHA-256 of images, by which a search knows them again."""
    found = hashlib.sha256()
    for pixels in batches:
        found.update(pixels.contiguous().numpy().data)
    return found.hexdigest()


def resized_processor(saved: Mapping[str, Any] | None, sides: tuple[int, int] | None) -> Mapping[str, Any] | None:
    """The settings of an image processor that crops, for crops of (height, width): the same part of a larger image.

    Others follow the size of the images by themselves (`fitted_processor`).
    """
    if saved is None or sides is None or not saved.get("do_center_crop"):
        return saved
    crop = _sides(saved["crop_size"])
    factor = max(new / old for new, old in zip(sides, crop, strict=True))

    def larger(size: Any) -> Any:
        if isinstance(size, Mapping):
            return {key: larger(value) for key, value in size.items()}
        return round(factor * size) if isinstance(size, (int, float)) else size

    height, width = sides
    return {**saved, "crop_size": {"height": height, "width": width}, "size": larger(saved.get("size"))}


def _sides(crop: Any) -> tuple[int, int]:
    return (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)
