"""What folders of images with classes of pixels or with objects have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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


def check_are_there(files: Iterable[str | Path]) -> None:
    """Raise OSError for the first file that is missing, before a run meets it after hours."""
    for file in files:
        if not Path(file).is_file():
            raise OSError(f"{file} is missing")
