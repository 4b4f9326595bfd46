"""What folders of images with classes of pixels or with objects have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from hf_sparseprior.cli.image_files import ENDINGS, NO_IMAGE, PassedOver, images_below, is_image
from hf_sparseprior.runs.command import short

IGNORED = 255  # the class of a pixel without one
LOOKED_AT = 100  # masks of a split that are looked at before training
MOST_CLASSES = 254  # labels of a PNG are bytes: 0 is unlabelled, and 255 is ignored


def read_classes(folder: str | Path) -> tuple[str, ...]:
    """The classes of pixels of a folder, one a line of its classes.txt; the first is label 1.

    Raises:
        OSError: for a missing file.
        ValueError: for fewer than 2 or more than 254 classes, and for a class that stands twice.
    """
    path = Path(folder) / "classes.txt"
    if not path.is_file():
        raise OSError(f"{path} is missing; it holds one class a line")
    classes = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise ValueError(
            f"{path} names {len(classes)} classes and must name 2 to {MOST_CLASSES}; pixels without a label are "
            "ignored, so what surrounds objects is a class of its own"
        )
    if len(set(classes)) < len(classes):
        raise ValueError(f"{path} names {next(name for name in classes if classes.count(name) > 1)!r} twice")
    return classes


def annotated_images(
    folder: str | Path, split: str, passed_over: PassedOver, ending: str | None = None, label_ending: str = ".png"
) -> list[tuple[str, str]]:
    """Paths of the images below images/SPLIT, sorted, and of what should be their labels below annotations/SPLIT.

    Args:
        passed_over: what is no image is counted in it.
        ending: how names of images end, in any case; None: as images do. label_ending: how names of labels end.

    Raises:
        OSError: if there are no images.
    """
    images, labels = (os.path.join(folder, part, split) for part in ("images", "annotations"))
    wanted = is_image if ending is None else lambda name: name.lower().endswith(str(ending).lower())
    files = sorted(images_below(images, passed_over, wanted, f"not {ending}" if ending else NO_IMAGE))
    if not files:
        raise OSError(
            f"{images} holds no {ending} images" if ending else f"{images} holds no images ({', '.join(ENDINGS)})"
        )
    cut = -len(ending) if ending else None
    stems = [os.path.relpath(file[:cut] if cut else os.path.splitext(file)[0], images) for file in files]
    return [(file, os.path.join(labels, stem + label_ending)) for file, stem in zip(files, stems, strict=True)]


def check_are_there(files: Iterable[str | Path]) -> None:
    """Raise OSError for the first file that is missing, before a run meets it after hours."""
    for file in files:
        if not Path(file).is_file():
            raise OSError(f"{file} is missing")


def look_at_masks(
    read: Callable[[int], np.ndarray], count: int, classes: Sequence[str], where: str, first: int, training: bool
) -> list[str]:
    """What looks wrong with a split's masks, one line each, by at most `LOOKED_AT` of them at equal distances.

    Args:
        read: index -> classes of pixels, uint8 (height, width), 255 where there is none.
        count: number of masks. classes: names. first: the first class's label in the files, 0 or 1.
        where: the split. training: whether it is learned from, so that every class should occur.

    Raises:
        ValueError: if no pixel of any mask has a class. OSError: for a mask that cannot be read.
    """
    pixels, empty = np.zeros(len(classes), dtype=np.int64), 0
    chosen = range(0, count, -(-count // LOOKED_AT))
    for index in chosen:
        labels = read(index)
        found = np.bincount(labels[labels != IGNORED], minlength=len(classes))[: len(classes)]
        pixels, empty = pixels + found, empty + (not found.any())
    if not pixels.any() and all((read(index) == IGNORED).all() for index in range(count)):
        without = "0 and 255 are" if first else "255 is"
        raise ValueError(
            f"{where}: no pixel of the {count} masks has a class; label {first} is {classes[0]!r}, and {without} none"
        )
    looked = f"the {count} masks" if len(chosen) == count else f"the {len(chosen)} masks looked at (of {count})"
    lines = [f"{where}: {empty} of {looked} have no pixel of any class, nothing is learned from them"] if empty else []
    if training and (missing := [name for name, number in zip(classes, pixels, strict=True) if not number]):
        labels_of = f"label {first} is {classes[0]!r}{', 0 is none' if first else ''}"
        lines.append(f"{where}: no pixel of {looked} is of the class {short(missing)}; {labels_of}")
    return lines
