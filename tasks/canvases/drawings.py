"""Drawings of Open Clip Art in place of canvases: real images, larger than those of the start, labelled by folder.

Debian's package openclipart-png has them. Of each drawing the part that is not paper is put in grey on a square of
`DRAWN` pixels, paper black and ink white, and left out where it is smaller than that, a link, or the same file as one
before. An image is a drawing on `FRAME` pixels, made smaller by means for smaller images: in training any drawing,
mirrored or not, anywhere in the frame; of the selection set and the test set each drawing once, in the middle.

Shape letters: N drawings, B images, S side of an image.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.base.checks import check_integer
from tasks.canvases.data import SPLITS, below, draws

# Where the package puts them, and its largest folders; that of shapes is left out, which are stars for the most part.
DRAWINGS = "/usr/share/openclipart/png"
FOLDERS = ("animals", "computer", "food", "people", "recreation", "signs_and_symbols", "transportation")
MOST = 400  # of a folder, so that none has most of the images
FRAME, DRAWN = 256, 224  # pixels of a side
LARGEST = 16_000_000  # pixels of a drawing
TEST, SELECTION = 4, 8  # one of four drawings is for the test, one of eight for selection
PAPER = 250  # grey levels from there on are paper

NUMBER, MIRRORED, ROW, COLUMN = range(4)  # what a draw is for


@dataclass(frozen=True)
class Album:
    """Drawings of a split. pixels: uint8 (N, DRAWN, DRAWN). labels: int64 (N,). moves: whether images are drawn by
    chance, mirrored and moved, or each comes once.
    """

    pixels: Tensor
    labels: Tensor
    moves: bool


def read_albums(path: str, device: str = "cpu") -> dict[str, Album]:
    """The albums of all splits.

    Args:
        path: folder of the package's folders.
        device: of the tensors.

    Raises:
        OSError: for a folder that is missing or has too few drawings; the message has it.
    """
    pixels: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    labels: dict[str, list[int]] = {split: [] for split in SPLITS}
    seen = set[bytes]()
    for label, name in enumerate(FOLDERS):
        drawings = list(islice(_drawings(Path(path), name, seen), MOST))
        if len(drawings) < SELECTION:
            raise OSError(
                f"{Path(path, name)} has {len(drawings)} drawings of {DRAWN} pixels or more, and needs {SELECTION}: "
                "apt-get install openclipart-png"
            )
        ends = len(drawings) // TEST, len(drawings) // TEST + len(drawings) // SELECTION
        parts = {"test": drawings[: ends[0]], "selection": drawings[ends[0] : ends[1]], "train": drawings[ends[1] :]}
        for split, part in parts.items():
            pixels[split] += part
            labels[split] += [label] * len(part)
    return {
        split: Album(
            torch.from_numpy(np.stack(pixels[split])).to(device),
            torch.tensor(labels[split], device=device),
            moves=split == "train",
        )
        for split in SPLITS
    }


def _drawings(root: Path, name: str, seen: set[bytes]) -> Iterator[np.ndarray]:
    """Drawings of a folder, uint8 (DRAWN, DRAWN), in an order by chance that is always the same; none `seen` before."""
    files = [
        os.path.join(folder, file)
        for folder, _, names in os.walk(root / name)
        for file in names
        if file.endswith(".png") and not os.path.islink(os.path.join(folder, file))
    ]
    for file in sorted(files, key=lambda file: hashlib.sha256(os.path.relpath(file, root).encode()).digest()):
        content = Path(file).read_bytes()
        key = hashlib.sha256(content).digest()
        if key not in seen and (drawing := _read(content)) is not None:
            seen.add(key)
            yield drawing


def _read(content: bytes) -> np.ndarray | None:
    """Ink of a drawing, uint8 (DRAWN, DRAWN); None for a small, a huge, an empty or a damaged one."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
        if max(image.size) < DRAWN or image.width * image.height > LARGEST:
            return None
        drawn = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    paper = Image.new("RGBA", drawn.size, "white")
    paper.alpha_composite(drawn)
    grey = paper.convert("L")
    box = grey.point(lambda level: 255 * (level < PAPER)).getbbox()
    if box is None or max(box[2] - box[0], box[3] - box[1]) < DRAWN:
        return None
    ink = grey.crop(box)
    ink.thumbnail((DRAWN, DRAWN), Image.Resampling.LANCZOS)
    square = Image.new("L", (DRAWN, DRAWN), "white")
    square.paste(ink, ((DRAWN - ink.width) // 2, (DRAWN - ink.height) // 2))
    return 255 - np.asarray(square)


class Drawings:
    """Images of one album and seed, as `data.Canvases` has them.

    Args:
        album: of drawings.
        side: S, in pixels; `FRAME` or a part of it by a whole number that `DRAWN` is a multiple of, too.
        seed: two sets of different seeds differ in what comes when and where.

    Raises:
        ValueError: for another side.
    """

    def __init__(self, album: Album, side: int, seed: int) -> None:
        check_integer("side", side, 1)
        self.shrink = FRAME // side
        if FRAME % side or DRAWN % self.shrink:
            raise ValueError(f"side={side} of drawings must be {FRAME} pixels or these by a whole number, as 128 or 64")
        self.album, self.side, self.seed = album, side, seed
        self.size = None if album.moves else len(album.labels)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Images `first` to `first + count - 1`: uint8 (B, 1, S, S) and labels, int64 (B,)."""
        images = torch.arange(first, first + count, device=self.album.labels.device)
        room = (FRAME - DRAWN) // self.shrink
        if self.album.moves:
            numbers, mirrored = self._draw(images, NUMBER, len(self.album.labels)), self._draw(images, MIRRORED, 2)
            top, left = self._draw(images, ROW, room + 1), self._draw(images, COLUMN, room + 1)
        else:
            numbers, mirrored = images, torch.zeros_like(images)
            top = left = torch.full_like(images, room // 2)
        ink = self.album.pixels[numbers][:, None].float()
        ink = F.avg_pool2d(ink, self.shrink).round().to(torch.uint8)[:, 0]
        ink = torch.where(mirrored[:, None, None] == 1, ink.flip(-1), ink)
        # The row and the column after the last are paper.
        last, places = ink.shape[-1], torch.arange(self.side, device=images.device)
        rows, columns = places - top[:, None], places - left[:, None]
        rows, columns = (torch.where((at >= 0) & (at < last), at, last) for at in (rows, columns))
        moved = F.pad(ink, (0, 1, 0, 1))[
            torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None]
        ]
        return moved[:, None], self.album.labels[numbers]

    def _draw(self, images: Tensor, purpose: int, limit: int) -> Tensor:
        return below(draws(self.seed, images, purpose, 1)[:, 0], limit)
