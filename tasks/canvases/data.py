"""Canvases: small garments of Fashion-MNIST in large images among clutter, made on the device where they are used.

Image `i` of a seed is the same whatever the batch, the device and the order in which images are made: every number in
it is a hash of the seed, `i` and its place. Nothing loops over images, and no image is stored.

    noise        bytes of 0 to 39, or a photograph, darkened
    objects      garments that do not touch each other, in cells whose rows and columns are shifted by chance
    clutter      7x7 pieces of garments, which cover neither objects nor each other

Objects and pieces are put on by the maximum of both. Labels (`LABELS`): the class of the only object, how many objects
there are, or the class that occurs three times. Objects and clutter of training are of Fashion-MNIST's first 55,000
training images, those of the selection set of the other 5,000, those of the test set of its test images.

Shape letters: B images, S side of the canvas, o side of an object, K objects, M pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources.arrays import read_fashion_mnist

SPLITS = ("train", "selection", "test")
SELECTION_OBJECTS = 5000  # the last training images
SELECTION_SEED, TEST_SEED = 1_000_001, 1_000_002  # of every run
STORED, PIECE = 28, 7  # pixels: a side of Fashion-MNIST's images, of a piece of clutter
PIXELS_PER_PIECE = 1600
NOISE = 40  # grey levels
MEAN, DEVIATION = 0.2, 0.25  # of pixels from 0 to 1, for the model
BACKGROUNDS = ("noise", "photographs")

# Label: how many classes it has, and how many objects a canvas has at most.
LABELS = {"class": (10, 1), "count": (8, 8), "repeated": (10, 8)}
REPEATED = (0, 0, 0, 1, 1, 2, 2, 3)  # which of four different classes each of the eight objects is of

# What a draw is for: draws for one purpose do not depend on how many another purpose needs.
CELLS, ROWS, COLUMNS, OBJECTS, COUNT, CLASSES, PIXELS, PIECES, PHOTOGRAPH = range(9)


# ---- numbers by chance ----------------------------------------------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def split_mix(states: Tensor) -> Tensor:
    """The first number that SplitMix64 (Steele, Lea and Flood 2014) gives from each state, int64 of any shape."""
    z = states + GOLDEN
    z = (z ^ _shifted(z, 30)) * MULTIPLIERS[0]
    z = (z ^ _shifted(z, 27)) * MULTIPLIERS[1]
    return z ^ _shifted(z, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left; torch's own shift keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def draws(seed: int, images: Tensor, purpose: int, count: int) -> Tensor:
    """`count` numbers for each image, int64 (B, count), all 64 bits by chance.

    Args:
        seed: of the set of images.
        images: their numbers, int64 (B,).
        purpose: what the numbers are for.
        count: how many; the first are the same for every count.
    """
    keys = split_mix(split_mix(torch.full_like(images, seed)) ^ images)
    keys = split_mix(keys ^ purpose)
    places = torch.arange(count, device=images.device)
    return split_mix(keys[:, None] + places * GOLDEN)


def below(numbers: Tensor, limit: int | Tensor) -> Tensor:
    """Integers from 0 to `limit` - 1 from `draws`."""
    return _shifted(numbers, 11) % limit


# ---- objects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Objects to make canvases of, sorted by class.

    pixels: uint8 (N, o, o). labels: int64 (N,). starts, sizes: int64 (10,), where each class begins, how many it has.
    photographs: uint8 (2, height, width), or None.
    """

    pixels: Tensor
    labels: Tensor
    starts: Tensor
    sizes: Tensor
    photographs: Tensor | None = None


def make_pool(
    pixels: np.ndarray, labels: np.ndarray, object_px: int, device: str = "cpu", photographs: np.ndarray | None = None
) -> Pool:
    """A pool of objects of `object_px` pixels a side.

    Args:
        pixels: uint8 (N, 28, 28), made smaller with antialiasing.
        labels: (N,), every class from 0 to 9 at least once.
        object_px: from 7, the side of a piece, to 28.
        device: of the tensors.
        photographs: uint8 (count, height, width).

    Raises:
        ValueError: for another size, or a class without an object.
    """
    check_integer("object_px", object_px, PIECE)
    if object_px > STORED:
        raise ValueError(f"object_px={object_px} must be at most {STORED}, the side of the stored objects")
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=10)
    if len(sizes) > 10 or not sizes.all():
        raise ValueError(f"labels: objects of the classes 0 to 9 are {sizes.tolist()}; each needs one")
    images = torch.from_numpy(pixels[order])
    if object_px < STORED:
        smaller = F.interpolate(images[:, None].float(), size=(object_px, object_px), mode="bilinear", antialias=True)
        images = smaller[:, 0].round().clamp(0, 255).to(torch.uint8)
    starts = torch.from_numpy(np.cumsum(sizes) - sizes)
    return Pool(
        images.to(device),
        torch.from_numpy(labels[order].astype(np.int64)).to(device),
        starts.to(device),
        torch.from_numpy(sizes).to(device),
        None if photographs is None else torch.from_numpy(photographs).to(device),
    )


def read_pools(
    object_px: int, background: str = "noise", device: str = "cpu", path: str | None = None
) -> dict[str, Pool]:
    """The pools of `SPLITS`.

    Args:
        object_px: pixels of a side of an object.
        background: one of `BACKGROUNDS`; photographs are scikit-learn's two, their left half for training, their right
            half for selection and test.
        device: of the tensors.
        path: folder of Fashion-MNIST's four files; None: that of Debian's package dataset-fashion-mnist.

    Raises:
        OSError: if the files are missing.
        ValueError: for bad settings.
    """
    if background not in BACKGROUNDS:
        raise ValueError(f"background={background!r} must be one of {', '.join(BACKGROUNDS)}")
    splits = read_fashion_mnist(DataConfig(source="fashion_mnist", path=path)).splits
    arrays = {
        name: (np.stack([np.asarray(images.read(index))[..., 0] for index in range(len(images))]), images.labels)
        for name, images in splits.items()
    }
    pixels, labels = arrays["train"]
    parts = {
        "train": (pixels[:-SELECTION_OBJECTS], labels[:-SELECTION_OBJECTS]),
        "selection": (pixels[-SELECTION_OBJECTS:], labels[-SELECTION_OBJECTS:]),
        "test": arrays["test"],
    }
    photographs = read_photographs() if background == "photographs" else None
    pools = {}
    for name, part in parts.items():
        half = None
        if photographs is not None:
            middle = photographs.shape[2] // 2
            half = photographs[..., :middle] if name == "train" else photographs[..., middle:]
        pools[name] = make_pool(*part, object_px, device, half)
    return pools


def read_photographs() -> np.ndarray:
    """scikit-learn's two photographs in grey at a third of their brightness, uint8 (2, 427, 640)."""
    from sklearn.datasets import load_sample_images

    weights = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
    grey = np.stack([image @ weights for image in load_sample_images().images])
    return (grey / 3).round().astype(np.uint8)


# ---- canvases -------------------------------------------------------------------------------------------------------


class Canvases:
    """Images of one kind and seed, as many as are asked for.

    Args:
        pool: of objects and photographs.
        side: S, in pixels.
        label: one of `LABELS`.
        seed: two sets of different seeds have nothing in common.

    Raises:
        ValueError: for a side that has no room for the objects, and an unknown label.
    """

    def __init__(self, pool: Pool, side: int, label: str, seed: int) -> None:
        if label not in LABELS:
            raise ValueError(f"label={label!r} must be one of {', '.join(LABELS)}")
        self.pool, self.side, self.label, self.seed = pool, check_integer("side", side, PIECE), label, seed
        self.classes, self.objects = LABELS[label]
        self.object_px = pool.pixels.shape[1]
        # Fewer rows and columns leave more room to shift them: at least an eighth of each, of one object all of it.
        room = side // -(-self.object_px * 8 // 7) or side // self.object_px
        if room**2 < self.objects:
            raise ValueError(
                f"side={side} has room for {room**2} objects of {self.object_px} pixels, and label {label!r} "
                f"needs {self.objects}"
            )
        self.cells = min(room, self.objects)
        self.size: int | None = None  # there is no end

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Images `first` to `first + count - 1`: uint8 (B, 1, S, S) and labels, int64 (B,)."""
        images = torch.arange(first, first + count, device=self.pool.pixels.device)
        numbers, present, labels = self._contents(images)
        corners = self._object_corners(images)
        # What is not shown goes to one place after the last pixel, so that no pixel is written twice.
        flat = F.pad(self._background(images), (0, 1))
        flat = self._put(flat, corners, self.pool.pixels[numbers], present)
        corners, pieces, shown = self._pieces(images, corners, present)
        flat = self._put(flat, corners, pieces, shown)
        return flat[:, :-1].view(count, 1, self.side, self.side), labels

    def _draw(self, images: Tensor, purpose: int, count: int) -> Tensor:
        return draws(self.seed, images, purpose, count)

    def _contents(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers of the objects in the pool (B, K), which of them are shown (B, K), and labels (B,)."""
        chosen, pool = self._draw(images, OBJECTS, self.objects), self.pool
        present = torch.ones_like(chosen, dtype=torch.bool)
        if self.label == "repeated":
            order = self._draw(images, CLASSES, 10).argsort(1)
            classes = order[:, list(REPEATED)]
            return pool.starts[classes] + below(chosen, pool.sizes[classes]), present, order[:, 0]
        numbers = below(chosen, len(pool.labels))
        if self.label == "class":
            return numbers, present, pool.labels[numbers[:, 0]]
        labels = below(self._draw(images, COUNT, 1)[:, 0], self.classes)
        return numbers, torch.arange(self.objects, device=images.device) <= labels[:, None], labels

    def _object_corners(self, images: Tensor) -> Tensor:
        """Row and column of the first pixel of each object, int64 (B, K, 2)."""
        cells = self._draw(images, CELLS, self.cells**2).argsort(1)[:, : self.objects]
        slack = self.side - self.cells * self.object_px

        def starts(purpose: int) -> Tensor:
            shifts = below(self._draw(images, purpose, self.cells), slack + 1).sort(1).values
            return shifts + self.object_px * torch.arange(self.cells, device=images.device)

        rows, columns = cells // self.cells, cells % self.cells
        return torch.stack([starts(ROWS).gather(1, rows), starts(COLUMNS).gather(1, columns)], -1)

    def _pieces(self, images: Tensor, corners: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Corners (B, M, 2) of the clutter, its pixels (B, M, 7, 7), and which are shown (B, M).

        Of pieces that overlap the first is shown, if none before it overlaps it (Matérn's second process), and none on
        an object is.
        """
        count, free = self.side**2 // PIXELS_PER_PIECE, self.object_px - PIECE + 1
        drawn = self._draw(images, PIECES, 5 * count).view(len(images), count, 5)
        starts = below(drawn[..., :2], self.side - PIECE + 1)
        inside = below(drawn[..., 2:4], free)
        numbers = below(drawn[..., 4], len(self.pool.labels))
        steps = torch.arange(PIECE, device=images.device)
        lines, places = inside[..., 0, None, None] + steps[:, None], inside[..., 1, None, None] + steps
        pixels = self.pool.pixels[numbers[..., None, None], lines, places]
        rows, columns = starts.to(torch.int32).unbind(-1)  # large canvases have millions of pairs
        near = (rows[:, :, None] - rows[:, None]).abs() < PIECE
        near &= (columns[:, :, None] - columns[:, None]).abs() < PIECE
        shown = ~near.tril(-1).any(2)
        gap = starts[:, :, None] - corners[:, None]
        touches = ((gap > -PIECE) & (gap < self.object_px)).all(-1) & present[:, None]
        return starts, pixels, shown & ~touches.any(2)

    def _put(self, flat: Tensor, corners: Tensor, pixels: Tensor, shown: Tensor) -> Tensor:
        """Pictures (B, n, p, p) put on the canvases (B, S * S + 1) at their corners, by the maximum."""
        steps = torch.arange(pixels.shape[-1], device=flat.device)
        rows, columns = corners[..., 0, None, None] + steps[:, None], corners[..., 1, None, None] + steps
        places = torch.where(shown[..., None, None], rows * self.side + columns, self.side**2).flatten(1)
        return flat.scatter(1, places, torch.maximum(flat.gather(1, places), pixels.flatten(1)))

    def _background(self, images: Tensor) -> Tensor:
        """Uint8 (B, S * S)."""
        pixels = self.side**2
        if self.pool.photographs is None:
            words = self._draw(images, PIXELS, -(-pixels // 8))
            return ((words.view(torch.uint8)[:, :pixels].to(torch.int16) * NOISE) >> 8).to(torch.uint8)
        number, row, column = self._draw(images, PHOTOGRAPH, 3).unbind(1)
        count, height, width = self.pool.photographs.shape
        rows, columns = self._mirrored(row, height), self._mirrored(column, width)
        photographs = self.pool.photographs[below(number, count)[:, None, None], rows[:, :, None], columns[:, None]]
        return photographs.flatten(1)

    def _mirrored(self, start: Tensor, length: int) -> Tensor:
        """S places (B, S) from one by chance on, in a row of `length` that is mirrored at its ends."""
        places = (below(start, 2 * length)[:, None] + torch.arange(self.side, device=start.device)) % (2 * length)
        return torch.minimum(places, 2 * length - 1 - places)


def as_input(canvases: Tensor, shrink: int = 1) -> Tensor:
    """Canvases, uint8 (B, 1, S, S), as the model's float32 input, each side made `shrink` times smaller by means."""
    pixels = canvases.float()
    if shrink > 1:
        pixels = F.avg_pool2d(pixels, shrink)
    return (pixels / 255 - MEAN) / DEVIATION
