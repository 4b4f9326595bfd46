"""Space-filling curves as ranks: the position of each patch along the curve.

Definitions are Eqs. 16 to 23 of the VIOLIN paper (appendix B.3) with (row, column) coordinates on any grid. The
paper's listings mix (x, y) and (row, column) and fail on grids that are not square; the equations do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

CURVES: dict[str, Callable[[int, int], np.ndarray]] = {}
TRANSPOSED_SUFFIX = "_t"


def register_curve(name: str) -> Callable[[Callable], Callable]:
    """Register `function(height, width) -> int64 ranks (height, width)` under `name`."""

    def register(function: Callable) -> Callable:
        if name in CURVES or name.endswith(TRANSPOSED_SUFFIX):
            raise ValueError(f"curve {name!r} is registered already or ends in {TRANSPOSED_SUFFIX!r}")
        CURVES[name] = function
        return function

    return register


def curve_names() -> list[str]:
    """Every curve and its transposed form, as `curve_rank` accepts them."""
    return [name + suffix for name in CURVES for suffix in ("", TRANSPOSED_SUFFIX)]


def curve_rank(name: str, grid: tuple[int, int], transposed: bool = False) -> np.ndarray:
    """Position of every patch along a curve.

    Args:
        name: a registered curve; a trailing `_t` transposes it too ("hilbert_t").
        grid: (height, width) in patches, each 1 or more.
        transposed: rank on the transposed grid at (column, row) (VIOLIN Eq. 23).

    Returns:
        int64 array (height, width), a permutation of 0..height*width-1.

    Raises:
        ValueError: for an unknown curve or a grid that is not two positive integers.
    """
    if name.endswith(TRANSPOSED_SUFFIX):
        name, transposed = name.removesuffix(TRANSPOSED_SUFFIX), not transposed
    if name not in CURVES:
        raise ValueError(f"curve={name!r} must be one of {', '.join(curve_names())}")
    if len(grid) != 2 or any(int(side) != side or side < 1 for side in grid):
        raise ValueError(f"grid={tuple(grid)} must be (height, width) with both sides 1 or more")
    height, width = (int(side) for side in grid)
    if transposed:
        return np.ascontiguousarray(CURVES[name](width, height).T)
    return CURVES[name](height, width)


def _rank_from_order(rows: np.ndarray, columns: np.ndarray, height: int, width: int) -> np.ndarray:
    """Ranks from the visiting order: the inverse permutation."""
    rank = np.empty((height, width), dtype=np.int64)
    rank[rows, columns] = np.arange(height * width)
    return rank


@register_curve("z")
def z_curve(height: int, width: int) -> np.ndarray:
    """Raster order (VIOLIN Eq. 16), the order in which a ViT flattens its patches."""
    return np.arange(height * width, dtype=np.int64).reshape(height, width)


@register_curve("snake")
def snake_curve(height: int, width: int) -> np.ndarray:
    """Raster order with every second row reversed (VIOLIN Eq. 17)."""
    rank = z_curve(height, width)
    rank[1::2] = rank[1::2, ::-1].copy()
    return rank


@register_curve("zigzag")
def zigzag_curve(height: int, width: int) -> np.ndarray:
    """Diagonals r + c = g, one after the other: columns rise on even ones and fall on odd ones (VIOLIN Eq. 18)."""
    rows, columns = (index.ravel() for index in np.indices((height, width)))
    diagonal = rows + columns
    order = np.lexsort((np.where(diagonal % 2 == 0, columns, -columns), diagonal))
    return _rank_from_order(rows[order], columns[order], height, width)


@register_curve("peano")
def peano_curve(height: int, width: int) -> np.ndarray:
    """Morton order: sort by interleaved bits, the column's bit above the row's (VIOLIN Eq. 22).

    The paper calls this curve Peano. A grid is a part of the square whose side is the next power of two.
    """
    rows, columns = (index.ravel() for index in np.indices((height, width)))
    key = np.zeros(height * width, dtype=np.int64)
    for bit in range(max(height, width).bit_length()):
        key |= ((rows >> bit) & 1) << (2 * bit) | ((columns >> bit) & 1) << (2 * bit + 1)
    order = np.argsort(key, kind="stable")
    return _rank_from_order(rows[order], columns[order], height, width)


@register_curve("hilbert")
def hilbert_curve(height: int, width: int) -> np.ndarray:
    """Hilbert's curve (VIOLIN Eq. 19), generalised to rectangles by halving the sides.

    It always starts along the first row, as on a square. The usual generalisation starts along the longer side;
    then the curve and its transpose would be the same on every grid that is not square.
    """
    visits = np.fromiter(_hilbert_visits(0, 0, 0, width, height, 0), dtype=(np.int64, 2), count=height * width)
    return _rank_from_order(visits[:, 0], visits[:, 1], height, width)


def _hilbert_visits(row: int, col: int, a_row: int, a_col: int, b_row: int, b_col: int) -> Iterator[tuple[int, int]]:
    """Visit the rectangle at (row, col) that a (the main direction) and b span; each lies along one axis."""
    length, breadth = abs(a_row + a_col), abs(b_row + b_col)
    da = ((a_row > 0) - (a_row < 0), (a_col > 0) - (a_col < 0))
    db = ((b_row > 0) - (b_row < 0), (b_col > 0) - (b_col < 0))
    if breadth == 1 or length == 1:
        step = da if breadth == 1 else db
        for n in range(length * breadth):
            yield row + n * step[0], col + n * step[1]
        return
    a2_row, a2_col, b2_row, b2_col = a_row // 2, a_col // 2, b_row // 2, b_col // 2
    if 2 * length > 3 * breadth:  # long: two rectangles, one after the other
        if abs(a2_row + a2_col) % 2 and length > 2:  # an even first part joins without a diagonal step
            a2_row, a2_col = a2_row + da[0], a2_col + da[1]
        yield from _hilbert_visits(row, col, a2_row, a2_col, b_row, b_col)
        yield from _hilbert_visits(row + a2_row, col + a2_col, a_row - a2_row, a_col - a2_col, b_row, b_col)
        return
    if abs(b2_row + b2_col) % 2 and breadth > 2:
        b2_row, b2_col = b2_row + db[0], b2_col + db[1]
    # One step up along b, a long one along a, one step down.
    yield from _hilbert_visits(row, col, b2_row, b2_col, a2_row, a2_col)
    yield from _hilbert_visits(row + b2_row, col + b2_col, a_row, a_col, b_row - b2_row, b_col - b2_col)
    last_row = row + (a_row - da[0]) + (b2_row - db[0])
    last_col = col + (a_col - da[1]) + (b2_col - db[1])
    yield from _hilbert_visits(last_row, last_col, -b2_row, -b2_col, a2_row - a_row, a2_col - a_col)
