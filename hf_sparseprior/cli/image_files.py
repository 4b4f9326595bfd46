"""Which files of a folder are images, with what was passed over, and how a file becomes 8-bit RGB, for every reader."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_sparseprior.base.checks import first_line

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

    def join(self, others: PassedOver) -> None:
        """Count what another reader did not take."""
        for reason, (count, first) in others.found.items():
            before, own = self.found.get(reason, (0, first))
            self.found[reason] = before + count, own

    def line(self) -> str | None:
        """One line for all of it; None if nothing was passed over."""
        parts = [f"{count} {reason} ({printable(first)})" for reason, (count, first) in self.found.items()]
        return f"left out: {', '.join(parts)}" if parts else None


def printable(name: str) -> str:
    """A name as one line of text, also where the bytes of the file system are no UTF-8."""
    text = as_text(name)
    return text if text.isprintable() else ascii(text)[1:-1]


def as_text(name: str) -> str:
    """A name of the file system as text that JSON, tables and pictures can hold: bytes that are no UTF-8 are escaped.

    Classes are called so.
    """
    return name.encode(errors="backslashreplace").decode()


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is no data: hidden, or left there by a system."""
    return name.startswith(".") or name.lower() in LEFT_BY_SYSTEMS


def is_image(name: str) -> bool:
    """Whether a file of this name is an image, by its ending."""
    return name.lower().endswith(ENDINGS)


def images_below(
    folder: str | Path, passed_over: PassedOver, is_wanted: Callable[[str], bool] = is_image, other: str = NO_IMAGE
) -> Iterator[str]:
    """The images in a folder and in its folders, in any order; other files are counted.

    Links to images are followed. A link to a folder could lead into itself.

    Args:
        is_wanted: whether a file of this name is. other: what those are called that are not.

    Raises:
        ValueError: for a link to a folder; the message names it.
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
            if not is_hidden(name) and is_wanted(name):
                yield path
            else:
                passed_over.add(HIDDEN if is_hidden(name) else other, path)


def count_unlisted(folder: str | Path, listed: Iterable[str], table: str, passed_over: PassedOver) -> None:
    """Count the images in a folder and in its folders that a table, by its name, does not list among its paths."""
    known = set(map(os.path.normpath, listed))
    for place, folders, names in os.walk(str(folder)):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for path in (os.path.join(place, name) for name in names if is_image(name) and not is_hidden(name)):
            if os.path.normpath(path) not in known:
                passed_over.add(f"not in {table}", path)


# ---- reading one image ----------------------------------------------------------------------------------------------


class TooDeep(ValueError):
    """An image has more than 8 bits a channel. It is not damaged, so `data.corrupt=skip` does not leave it out."""


def decode_image(source: bytes | str | Path, name: str, exif: str = "apply", depth16: str = "scale") -> Any:
    """An encoded image, or the file of one, as 8-bit RGB (PIL), read to its last pixel. Not for masks and labels.

    Palettes and greys become their colours, and transparency is dropped, as `load_image` of transformers does; of
    several frames it is the first.

    Args:
        exif: "apply" turns the image as its EXIF orientation says, "ignore" does not.
        depth16: "scale" divides 16-bit greys by 256, "refuse" raises. Pillow itself does so with 16-bit colours.

    Raises:
        OSError: one line with `name` and why it is not readable. Floats, whose range no file says, and greys of more
            than 16 bits are not.
        TooDeep: one line with `name`.
    """
    from PIL import Image

    try:
        if not isinstance(source, bytes) and not stat.S_ISREG(os.stat(source).st_mode):
            raise OSError("it is no regular file")  # a named pipe would be waited for without end
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return upright_rgb(image, name, exif, depth16)
    except (MemoryError, TooDeep):
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for damaged files, struct.error among them
        raise OSError(f"{name} is not a readable image ({why_unreadable(error)})") from None


def upright_rgb(image: Any, name: str, exif: str, depth16: str) -> Any:
    """What `decode_image` makes of an opened image, which may be turned in place."""
    from PIL import ImageOps

    if image.mode.startswith("I"):
        if depth16 == "refuse":
            raise TooDeep(f"{name} has more than 8 bits a channel")
        _say_scaled(name)
    if exif == "apply":
        ImageOps.exif_transpose(image, in_place=True)
    return _to_rgb(image)


_scaled: set[str] = set()


def _say_scaled(name: str) -> None:
    """Say once in a process that 16-bit images are scaled."""
    if not _scaled:
        _scaled.add(name)
        print(f"{printable(name)} has 16 bits a channel; such images are divided by 256", file=sys.stderr)


def why_unreadable(error: Exception) -> str:
    """What Pillow says of a file that it cannot read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its own text holds a memory address
        return "no image format that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def _to_rgb(image: Any) -> Any:
    """Pillow's own conversion clips 16-bit grey and floats to 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.size and not 0 <= values.min() <= values.max() <= 65535:
            raise ValueError(f"pixels from {values.min()} to {values.max()} are not of 16 bits, 0 to 65535")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save 8-bit or 16-bit images")
    elif image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns of the way past it, which gives the same
    return image.convert("RGB")
