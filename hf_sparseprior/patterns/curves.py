"""Space-filling curves as ranks: the position of each patch along the curve.

Definitions are Eqs. 16 to 23 of the VIOLIN paper (appendix B.3) with (row, column) coordinates on any grid. The
paper's listings mix (x, y) and (row, column) and fail on grids that are not square; the equations do not.

Over the frames, rows and columns of a clip the paper proposes curves in three dimensions, Hilbert's and Morton's for
example, without equations (appendix D.2). Ours are those of two dimensions if the clip has a single frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hf_sparseprior.base.checks import did_you_mean

CURVES: dict[str, Callable[[int, int], np.ndarray]] = {}
CLIP_CURVES: dict[str, Callable[[int, int, int], np.ndarray]] = {}  # those of CURVES that exist in three dimensions
TRANSPOSED_SUFFIX = "_t"
Side = tuple[int, int]  # how many patches, and from one to the next how many on in raster order
Vector = tuple[int, int, int]


def register_curve(name: str) -> Callable[[Callable], Callable]:
    """Register `function(height, width) -> int64 ranks (height, width)` under `name`."""

    def register(function: Callable) -> Callable:
        if name in CURVES or name.endswith(TRANSPOSED_SUFFIX):
            raise ValueError(f"curve {name!r} is registered already or ends in {TRANSPOSED_SUFFIX!r}")
        CURVES[name] = function
        return function

    return register


def register_clip_curve(name: str) -> Callable[[Callable], Callable]:
    """Register `function(frames, height, width) -> int64 ranks (frames, height, width)` for a curve of `CURVES`.

    With one frame it has to be the curve in two dimensions.
    """

    def register(function: Callable) -> Callable:
        if name in CLIP_CURVES or name not in CURVES:
            raise ValueError(f"curve {name!r} has three dimensions already, or does not exist in two")
        CLIP_CURVES[name] = function
        return function

    return register


def curve_names() -> list[str]:
    """Every curve and its transposed form, as `curve_rank` accepts them."""
    return [name + suffix for name in CURVES for suffix in ("", TRANSPOSED_SUFFIX)]


def curve_rank(name: str, grid: Sequence[int], transposed: bool = False) -> np.ndarray:
    """Position of every patch along a curve.

    Args:
        name: a registered curve; a trailing `_t` transposes it too ("hilbert_t").
        grid: (height, width) in patches, or (frames, height, width) of a clip, each 1 or more.
        transposed: rank on the grid with rows and columns swapped, at (column, row) (VIOLIN Eq. 23); in a clip at
            (frame, column, row).

    Returns:
        int64 array of the grid's shape, a permutation of 0 to its number of patches - 1.

    Raises:
        ValueError: for an unknown curve, a grid that is not two or three positive integers, or three of them with a
            curve in two dimensions.
    """
    if name.endswith(TRANSPOSED_SUFFIX):
        name, transposed = name.removesuffix(TRANSPOSED_SUFFIX), not transposed
    if name not in CURVES:
        raise ValueError(f"curve={name!r} must be one of {', '.join(curve_names())}{did_you_mean(name, curve_names())}")
    if len(grid) not in (2, 3) or any(int(side) != side or side < 1 for side in grid):
        raise ValueError(
            f"grid={tuple(grid)} must be (height, width) with both sides 1 or more, or (frames, height, width)"
        )
    *frames, height, width = (int(side) for side in grid)
    if frames and name not in CLIP_CURVES:
        raise ValueError(f"curve={name!r} with grid={tuple(grid)} must be one of {', '.join(CLIP_CURVES)}")
    function: Callable[..., np.ndarray] = CLIP_CURVES[name] if frames else CURVES[name]
    if transposed:
        return np.ascontiguousarray(function(*frames, width, height).swapaxes(-1, -2))
    return function(*frames, height, width)


def _rank_from_order(order: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """Ranks from the visiting order, given as numbers of patches in raster order: the inverse permutation."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank.reshape(grid)


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
    rows, columns = np.arange(height)[:, None], np.arange(width)
    diagonal = rows + columns
    sizes = np.bincount(diagonal.ravel())
    before = np.cumsum(sizes) - sizes
    first, last = np.maximum(diagonal - height + 1, 0), np.minimum(diagonal, width - 1)  # columns of the diagonal
    return before[diagonal] + np.where(diagonal % 2 == 0, columns - first, last - columns)


@register_curve("peano")
def peano_curve(height: int, width: int) -> np.ndarray:
    """Morton order: sort by interleaved bits, the column's bit above the row's (VIOLIN Eq. 22).

    The paper calls this curve Peano. A grid is a part of the square whose side is the next power of two.
    """
    side = np.arange(max(height, width))
    spread = np.zeros_like(side)
    for bit in range(len(side).bit_length()):
        spread |= ((side >> bit) & 1) << (2 * bit)
    key = spread[:height, None] | spread[:width] << 1
    return _rank_from_order(np.argsort(key, axis=None, kind="stable"), (height, width))


@register_curve("hilbert")
def hilbert_curve(height: int, width: int) -> np.ndarray:
    """Hilbert's curve (VIOLIN Eq. 19), generalised to rectangles by halving the sides.

    It always starts along the first row, as on a square. The usual generalisation starts along the longer side;
    then the curve and its transpose would be the same on every grid that is not square.
    """
    return _rank_from_order(_hilbert_visits((width, 1), (height, width), {}), (height, width))


def _hilbert_visits(a: Side, b: Side, known: dict[tuple[Side, Side], np.ndarray]) -> np.ndarray:
    """The patches of a rectangle in the order of the curve, (n,), as numbers in raster order minus that of its first.

    a (the main direction) and b are its sides. `known` has the rectangles that were visited before: a curve is made of
    few different ones.
    """
    if (a, b) in known:
        return known[a, b]
    (length, along), (breadth, across) = a, b
    if breadth == 1 or length == 1:
        visits = np.arange(length * breadth) * (along if breadth == 1 else across)
    else:
        if 2 * length > 3 * breadth:  # long: two rectangles, one after the other
            half = _even(_half(a), length)
            parts = [(0, (half, along), b), (half * along, (length - half, along), b)]
        else:  # one step up along b, a long one along a, one step down
            half, half_a = _even(_half(b), breadth), _half(a)
            parts = [
                (0, (half, across), (half_a, along)),
                (half * across, a, (breadth - half, across)),
                ((length - 1) * along + (half - 1) * across, (half, -across), (length - half_a, -along)),
            ]
        visits = np.concatenate([first + _hilbert_visits(main, other, known) for first, main, other in parts])
    known[a, b] = visits
    return visits


def _half(side: Side) -> int:
    """Half the length of a side, of an odd one the smaller half, or the larger if it is walked backwards."""
    length, step = side
    return length // 2 if step > 0 else (length + 1) // 2


def _even(half: int, length: int) -> int:
    """A half that is even, if there is one: an even first part joins without a diagonal step."""
    return half + (half % 2 and length > 2)


# ---- three dimensions -----------------------------------------------------------------------------------------------


@register_clip_curve("z")
def z_clip_curve(frames: int, height: int, width: int) -> np.ndarray:
    """Raster order, one frame after another."""
    return np.arange(frames * height * width, dtype=np.int64).reshape(frames, height, width)


@register_clip_curve("snake")
def snake_clip_curve(frames: int, height: int, width: int) -> np.ndarray:
    """The snake of each frame, backwards in every second one, so that it goes on where the last frame ended."""
    of_frame = snake_curve(height, width)
    rank = np.stack([of_frame if frame % 2 == 0 else height * width - 1 - of_frame for frame in range(frames)])
    return rank + height * width * np.arange(frames)[:, None, None]


@register_clip_curve("zigzag")
def zigzag_clip_curve(frames: int, height: int, width: int) -> np.ndarray:
    """Planes t + r + c = g, one after the other: frames fall on even ones and rise on odd ones.

    Within a plane, each frame has one diagonal r + c, on which columns rise and fall as in two dimensions.
    """
    times, rows, columns = (index.ravel() for index in np.indices((frames, height, width)))
    plane, diagonal = times + rows + columns, rows + columns
    along_time, along_diagonal = np.where(plane % 2, times, -times), np.where(diagonal % 2, -columns, columns)
    order = np.lexsort((along_diagonal, along_time, plane))
    return _rank_from_order(order, (frames, height, width))


@register_clip_curve("peano")
def peano_clip_curve(frames: int, height: int, width: int) -> np.ndarray:
    """Morton order: sort by interleaved bits, the column's above the row's, and the frame's above both.

    A clip is a part of the cube whose side is the next power of two.
    """
    times, rows, columns = (index.ravel() for index in np.indices((frames, height, width)))
    key = np.zeros(frames * height * width, dtype=np.int64)
    for bit in range(max(frames, height, width).bit_length()):
        for place, index in enumerate((rows, columns, times)):
            key |= ((index >> bit) & 1) << (3 * bit + place)
    return _rank_from_order(np.argsort(key, kind="stable"), (frames, height, width))


@register_clip_curve("hilbert")
def hilbert_clip_curve(frames: int, height: int, width: int) -> np.ndarray:
    """Hilbert's curve in three dimensions, generalised to cuboids by halving the sides (Cerveny, gilbert3d).

    It starts along the first row of the first frame, whichever side is the longest, as in two dimensions.
    """
    if frames == 1:  # where the two generalisations halve odd sides in different places
        return hilbert_curve(height, width)[None]
    if width == 1:  # there is no first row to start along
        return hilbert_curve(frames, height)[:, :, None]
    visits = _hilbert_clip_visits((0, 0, 0), (0, 0, width), (0, height, 0), (frames, 0, 0))
    order = np.fromiter(visits, dtype=(np.int64, 3), count=frames * height * width)
    return _rank_from_order(np.ravel_multi_index(tuple(order.T), (frames, height, width)), (frames, height, width))


def _plus(*vectors: Vector) -> Vector:
    first, second, third = map(sum, zip(*vectors, strict=True))
    return first, second, third


def _minus(vector: Vector) -> Vector:
    return -vector[0], -vector[1], -vector[2]


def _sign(vector: Vector) -> Vector:
    first, second, third = ((side > 0) - (side < 0) for side in vector)
    return first, second, third


def _half_vector(vector: Vector) -> Vector:
    """Half of a vector along one axis, one more if it would be odd: an even part joins without a diagonal step."""
    first, second, third = (int(side / 2) for side in vector)
    half: Vector = (first, second, third)
    return _plus(half, _sign(vector)) if abs(sum(half)) % 2 and abs(sum(vector)) > 2 else half


def _hilbert_clip_visits(at: Vector, a: Vector, b: Vector, c: Vector) -> Iterator[Vector]:
    """Visit the cuboid at `at` that a (the main direction), b and c span; each lies along one axis."""
    length, breadth, depth = (abs(sum(side)) for side in (a, b, c))
    da, db, dc = map(_sign, (a, b, c))
    if not length * breadth * depth:  # half of a side of one patch
        return
    if (length == 1) + (breadth == 1) + (depth == 1) >= 2:
        step = da if length > 1 else db if breadth > 1 else dc
        for _ in range(length * breadth * depth):
            yield at
            at = _plus(at, step)
        return
    a2, b2, c2 = map(_half_vector, (a, b, c))
    a_rest, b_rest, c_rest = _plus(a, _minus(a2)), _plus(b, _minus(b2)), _plus(c, _minus(c2))
    a_end = _plus(a, _minus(da))
    if 2 * length > 3 * breadth and 2 * length > 3 * depth:  # long: two cuboids, one after the other
        yield from _hilbert_clip_visits(at, a2, b, c)
        yield from _hilbert_clip_visits(_plus(at, a2), a_rest, b, c)
    elif 3 * breadth > 4 * depth:  # flat: as in two dimensions, across a and b
        yield from _hilbert_clip_visits(at, b2, c, a2)
        yield from _hilbert_clip_visits(_plus(at, b2), a, b_rest, c)
        yield from _hilbert_clip_visits(_plus(at, a_end, b2, _minus(db)), _minus(b2), c, _minus(a_rest))
    elif 3 * depth > 4 * breadth:  # across a and c
        yield from _hilbert_clip_visits(at, c2, a2, b)
        yield from _hilbert_clip_visits(_plus(at, c2), a, b, c_rest)
        yield from _hilbert_clip_visits(_plus(at, a_end, c2, _minus(dc)), _minus(c2), _minus(a_rest), b)
    else:  # all three sides are halved, in five parts
        b_end, c_end = _plus(b2, _minus(db)), _plus(c, _minus(dc))
        yield from _hilbert_clip_visits(at, b2, c2, a2)
        yield from _hilbert_clip_visits(_plus(at, b2), c, a2, b_rest)
        yield from _hilbert_clip_visits(_plus(at, b_end, c_end), a, _minus(b2), _minus(c_rest))
        yield from _hilbert_clip_visits(_plus(at, a_end, b2, c_end), _minus(c), _minus(a_rest), b_rest)
        yield from _hilbert_clip_visits(_plus(at, a_end, b_end), _minus(b2), c2, _minus(a_rest))
