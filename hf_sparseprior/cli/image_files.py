"""Which files of a folder are images: one list for every reader, with what it passed over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# What Pillow reads; AVIF where it was built with it, which an image's own error says.
ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"),
    ".avif",
)
# What systems and programs leave in folders. Hidden names begin with a dot, as .ipynb_checkpoints and ._image.jpg.
LEFT_BY_SYSTEMS = ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "@eadir")
HIDDEN, NO_IMAGE = "hidden", "no image"


@dataclass
class PassedOver:
    """What a reader did not take: by reason how many files and folders, and the first of them."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        """Count a file or folder."""
        count, first = self.found.get(reason, (0, path))
        self.found[reason] = count + 1, first

    def line(self) -> str | None:
        """One line for all of it; None if nothing was passed over."""
        parts = [f"{count} {reason} ({_printable(first)})" for reason, (count, first) in self.found.items()]
        return f"left out: {', '.join(parts)}" if parts else None


def _printable(path: str) -> str:
    """A path as one line of text, also where its bytes are no UTF-8."""
    text = path.encode(errors="backslashreplace").decode()
    return text if text.isprintable() else ascii(text)[1:-1]


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is no data: hidden, or left there by a system."""
    return name.startswith(".") or name.lower() in LEFT_BY_SYSTEMS


def is_image(name: str) -> bool:
    """Whether a file of this name is an image, by its ending."""
    return name.lower().endswith(ENDINGS)


def images_below(folder: str | Path, passed_over: PassedOver) -> Iterator[str]:
    """The images in a folder and in its folders, in any order; other files are counted.

    Links to images are followed. A link to a folder could lead into itself.

    Raises:
        ValueError: for one; the message names it.
    """
    for place, folders, names in os.walk(str(folder)):
        for name in [name for name in folders if is_hidden(name)]:
            passed_over.add(HIDDEN, os.path.join(place, name))
            folders.remove(name)
        for path in (os.path.join(place, name) for name in folders):
            if os.path.islink(path):
                raise ValueError(
                    f"{path} is a link to a folder, {os.readlink(path)}; within a class only links to images are read"
                )
        for name in names:
            path = os.path.join(place, name)
            if not is_hidden(name) and is_image(name):
                yield path
            else:
                passed_over.add(HIDDEN if is_hidden(name) else NO_IMAGE, path)
