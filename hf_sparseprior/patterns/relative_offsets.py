"""Relative places of patches: tables for relative positions, integers and arrays only.

The offset of a query patch j and a key patch k is (row_j - row_k, column_j - column_k), one of (2H - 1)(2W - 1) on an
H x W grid. N patch tokens, P prefix tokens, T = P + N.
"""

from __future__ import annotations

import math

import numpy as np

BUCKET_METHODS = ("product", "euclidean")


def relative_offsets(grid: tuple[int, int], visits: np.ndarray | None = None) -> np.ndarray:
    """Number of the offset of every pair, int64 (N, N), in raster order of the offsets from (1 - H, 1 - W) on.

    `visits` (N,): the patches in the order in which they come, if it is not raster order.
    """
    rows, columns = (index.ravel() if visits is None else index.ravel()[visits] for index in np.indices(grid))
    row_offsets = rows[:, None] - rows[None] + grid[0] - 1
    return row_offsets * (2 * grid[1] - 1) + columns[:, None] - columns[None] + grid[1] - 1


def piecewise_index(offset: np.ndarray, ratio: float) -> np.ndarray:
    """Integers that are different for small offsets and group large ones (iRPE Eq. 18), int64.

    alpha, beta and gamma of the equation are 1, 2 and 8 times `ratio`, as in the published code.
    """
    size = np.abs(offset).astype(np.float64)
    far = ratio + np.log(np.maximum(size, ratio) / ratio) / math.log(8.0) * ratio
    far = np.minimum(np.round(far), 2 * ratio)
    return (np.sign(offset) * np.where(size <= ratio, np.round(size), far)).astype(np.int64)


def count_buckets(method: str, ratio: float) -> int:
    """Buckets of patch offsets; pairs with a prefix token have one more."""
    most = int(2 * ratio)
    return (2 * most + 1) ** 2 if method == "product" else most + 1


def relative_buckets(
    method: str, ratio: float, grid: tuple[int, int], num_prefix_tokens: int, visits: np.ndarray | None = None
) -> np.ndarray:
    """Bucket of every pair of tokens, int64 (T, T).

    Args:
        method: "product": a bucket for each pair of a row's and a column's `piecewise_index`. "euclidean": that of the
            rounded distance. (The published code keeps buckets of negative distances, which are never used.)
        ratio: a larger ratio gives more buckets.
        grid: (H, W).
        num_prefix_tokens: P; pairs with these tokens are in the last bucket.
        visits: as in `relative_offsets`.
    """
    rows, columns = np.meshgrid(*(np.arange(1 - side, side) for side in grid), indexing="ij")
    if method == "product":
        most = int(2 * ratio)
        of_offset = (piecewise_index(rows, ratio) + most) * (2 * most + 1) + piecewise_index(columns, ratio) + most
    else:
        of_offset = piecewise_index(np.round(np.hypot(rows, columns)), ratio)
    total = num_prefix_tokens + grid[0] * grid[1]
    buckets = np.full((total, total), count_buckets(method, ratio), dtype=np.int64)
    buckets[num_prefix_tokens:, num_prefix_tokens:] = of_offset.ravel()[relative_offsets(grid, visits)]
    return buckets


def relative_sinusoids(width: int, grid: tuple[int, int]) -> np.ndarray:
    """Sines and cosines of every offset, float32 ((2H - 1)(2W - 1), width): half of them of its row, half of its
    column.

    Transformer-XL's encoding of a distance (as in Vaswani et al. 2017), once for each axis. `width` is a multiple of 4.
    """
    frequencies = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    parts = []
    for axis in np.meshgrid(*(np.arange(1 - side, side) for side in grid), indexing="ij"):
        angles = axis.reshape(-1, 1) * frequencies
        parts += [np.sin(angles), np.cos(angles)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def relative_steps(grid: tuple[int, int]) -> np.ndarray:
    """Columns and rows from the query to the key of every pair, and their squared distance, float32 (N, N, 3).

    They are what ConViT's positional attention sees (d'Ascoli et al. 2021, section 3).
    """
    rows, columns = (index.ravel() for index in np.indices(grid))
    right, down = columns[None] - columns[:, None], rows[None] - rows[:, None]
    return np.stack([right, down, right**2 + down**2], -1).astype(np.float32)


def relative_table(
    name: str, grid: tuple[int, int], num_prefix_tokens: int, visits: np.ndarray | None = None
) -> np.ndarray:
    """A table by its name: "relative_offsets", "relative_buckets METHOD RATIO", "relative_sinusoids WIDTH",
    "relative_steps", or "relative_steps rows" and "relative_steps columns" of one column and of one row of the grid.
    """
    kind, *arguments = name.split()
    if kind == "relative_offsets":
        return relative_offsets(grid, visits)
    if kind == "relative_steps":
        return relative_steps({"rows": (grid[0], 1), "columns": (1, grid[1])}[arguments[0]] if arguments else grid)
    if kind == "relative_buckets":
        return relative_buckets(arguments[0], float(arguments[1]), grid, num_prefix_tokens, visits)
    assert kind == "relative_sinusoids"
    return relative_sinusoids(int(arguments[0]), grid)
