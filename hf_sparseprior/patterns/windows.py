"""Attention windows that are shifted over a cyclic image: which patches of a window may see each other (Swin, 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def window_places(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], visits: np.ndarray | None = None
) -> np.ndarray:
    """The patches of an image, window after window, int64 (windows * T,).

    Args:
        grid, window, shift: as in `window_regions`.
        visits: (T,), the patches of a window in the order in which they come; None: raster order.
    """
    patches = np.arange(grid[0] * grid[1]).reshape(tuple(grid))
    patches = np.roll(patches, [-by for by in shift], (0, 1))
    return _in_windows(patches, window, visits).ravel()


def window_regions(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], visits: np.ndarray | None = None
) -> np.ndarray:
    """Bool (windows, T, T), True where two patches of a window are neighbours in the image, too.

    The image is rolled by `shift` to the top left, so that windows at its end hold patches from the beginning.

    Args:
        grid: (height, width) of the image in patches, multiples of the window.
        window: (height, width) of a window.
        shift: by how many patches the image is rolled, at least 0 and below the window in both directions.
        visits: as in `window_places`.
    """
    # A patch that was rolled around the end comes from somewhere else than the others of its window.
    rolled = [np.arange(side) >= side - by for side, by in zip(grid, shift, strict=True)]
    region = 2 * rolled[0][:, None].astype(np.int64) + rolled[1][None]
    region = _in_windows(region, window, visits)
    return region[:, :, None] == region[:, None, :]


def _in_windows(image: np.ndarray, window: Sequence[int], visits: np.ndarray | None) -> np.ndarray:
    """An image (height, width) as its windows (windows, T)."""
    strips = image.reshape(image.shape[0] // window[0], window[0], image.shape[1] // window[1], window[1])
    windows = strips.swapaxes(1, 2).reshape(-1, window[0] * window[1])
    return windows if visits is None else windows[:, visits]


def windowed_mask(regions: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Bool (windows, H or 1, T, T): the pairs that both the regions and a support allow.

    A patch that would see none sees itself.

    Args:
        regions: of `window_regions`.
        mask: of the support, bool (H or 1, T, T), or None for all pairs.
    """
    if mask is None:
        return regions[:, None]
    allowed = regions[:, None] & mask[None]
    return allowed | (~allowed.any(-1, keepdims=True) & np.eye(mask.shape[-1], dtype=bool))
