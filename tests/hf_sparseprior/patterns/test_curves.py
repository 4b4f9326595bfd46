import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sparseprior.patterns.curves import (
    CLIP_CURVES,
    CURVES,
    TRANSPOSED_SUFFIX,
    curve_names,
    curve_rank,
    register_clip_curve,
    register_curve,
)
from hf_sparseprior.patterns.decay import DECAYS
from tests.each import each

checked = settings(max_examples=30, deadline=None, derandomize=True)
side = st.integers(1, 30)

VIOLIN_CURVES = [curve + suffix for curve in ("snake", "zigzag", "peano", "hilbert") for suffix in ("", "_t")]
GRIDS = [(1, 1), (1, 7), (7, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 5), (14, 14), (14, 15), (8, 3), (3, 16)]


def visits(name, height, width):
    # (row, column) of the patches in the order in which the curve meets them.
    rank = curve_rank(name, (height, width))
    return [(index // width, index % width) for index in np.argsort(rank, axis=None).tolist()]


# ---- the curves from their equations, written for one patch at a time -----------------------------------------------


def z_rank(row, column, height, width):  # VIOLIN Eq. 16
    return row * width + column


def snake_rank(row, column, height, width):  # VIOLIN Eq. 17
    return row * width + (column if row % 2 == 0 else width - 1 - column)


def zigzag_rank(row, column, height, width):  # VIOLIN Eq. 18
    def cells(g):
        return [(r, c) for r in range(height) for c in range(width) if r + c == g]

    g = row + column
    before = [c for _, c in cells(g) if (c < column if g % 2 == 0 else c > column)]
    return sum(len(cells(k)) for k in range(g)) + len(before)


def interleave(row, column):  # VIOLIN Eq. 22
    return sum(((column >> k) & 1) * 2 ** (2 * k + 1) + ((row >> k) & 1) * 2 ** (2 * k) for k in range(16))


def peano_rank(row, column, height, width):
    own = interleave(row, column)
    return sum(interleave(r, c) < own for r in range(height) for c in range(width))


FORMULAS = {"z": z_rank, "snake": snake_rank, "zigzag": zigzag_rank, "peano": peano_rank}


@pytest.mark.parametrize("name", FORMULAS)
def test_ranks_follow_the_equations(name):
    for height, width in GRIDS:
        expected = [[FORMULAS[name](r, c, height, width) for c in range(width)] for r in range(height)]
        assert curve_rank(name, (height, width)).tolist() == expected, (height, width)


def test_peano_is_the_interleaved_index_on_powers_of_two():
    for size in (2, 4, 8, 16):
        assert curve_rank("peano", (size, size)).tolist() == [
            [interleave(r, c) for c in range(size)] for r in range(size)
        ]


def test_hilbert_4x4():
    assert curve_rank("hilbert", (4, 4)).tolist() == [
        [0, 1, 14, 15],
        [3, 2, 13, 12],
        [4, 7, 8, 11],
        [5, 6, 9, 10],
    ]


def test_hilbert_on_powers_of_two_is_the_quadrant_recursion():
    # VIOLIN Eq. 19: four copies of the smaller curve, down the left half and up the right one, the first mirrored at
    # the diagonal and the last at the other diagonal.
    rank = np.zeros((1, 1), dtype=np.int64)
    for power in range(1, 6):
        quarter = rank.size
        rank = np.block([[rank.T, 3 * quarter + rank[::-1, ::-1].T], [quarter + rank, 2 * quarter + rank]])
        assert np.array_equal(curve_rank("hilbert", (2**power, 2**power)), rank)


def gilbert(at, along, across):
    # The published generalisation to rectangles (Cerveny 2025, cited by VIOLIN), with x + iy for positions and vectors.
    def half(vector):
        return complex(vector.real // 2, vector.imag // 2)

    def size(vector):
        return int(abs(vector.real + vector.imag))

    step, side_step = along / abs(along), across / abs(across)
    if size(across) == 1:
        return [at + n * step for n in range(size(along))]
    if size(along) == 1:
        return [at + n * side_step for n in range(size(across))]
    along2, across2 = half(along), half(across)
    if 2 * size(along) > 3 * size(across):
        if size(along2) % 2 and size(along) > 2:
            along2 += step
        return gilbert(at, along2, across) + gilbert(at + along2, along - along2, across)
    if size(across2) % 2 and size(across) > 2:
        across2 += side_step
    return (
        gilbert(at, across2, along2)
        + gilbert(at + across2, along, across - across2)
        + gilbert(at + (along - step) + (across2 - side_step), -across2, -(along - along2))
    )


@each("height, width", [*GRIDS, (24, 24), (27, 48), (48, 27), (2, 9), (9, 2)])
def test_hilbert_on_any_grid_is_gilbert_along_the_rows(height, width):
    order = [(int(at.imag), int(at.real)) for at in gilbert(0j, complex(width, 0), complex(0, height))]
    assert visits("hilbert", height, width) == order


# ---- every registered curve -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", curve_names())
@checked
@given(height=side, width=side)
def test_ranks_are_a_permutation(name, height, width):
    rank = curve_rank(name, (height, width))
    assert rank.shape == (height, width) and rank.dtype == np.int64 and rank.flags.c_contiguous
    assert np.array_equal(np.sort(rank, axis=None), np.arange(height * width))
    kept = rank.copy()
    rank += 1  # what is returned can be changed without harm
    assert np.array_equal(curve_rank(name, (height, width)), kept)


@pytest.mark.parametrize("name", CURVES)
@checked
@given(height=side, width=side)
def test_a_transposed_curve_is_the_curve_with_rows_and_columns_swapped(name, height, width):
    # VIOLIN Eq. 23: rank_T(r, c) on (H, W) = rank(c, r) on (W, H).
    swapped = curve_rank(name, (width, height))
    expected = [[swapped[c, r] for c in range(width)] for r in range(height)]
    assert curve_rank(name + TRANSPOSED_SUFFIX, (height, width)).tolist() == expected
    assert curve_rank(name, (height, width), transposed=True).tolist() == expected
    # The suffix and the argument undo each other.
    twice = curve_rank(name + TRANSPOSED_SUFFIX, (height, width), transposed=True)
    assert np.array_equal(twice, curve_rank(name, (height, width)))


@pytest.mark.parametrize("name", ["hilbert", "snake", "zigzag_t"])
@checked
@given(height=side, width=side)
def test_curves_move_to_one_of_eight_neighbours(name, height, width):
    """The snake to one of four."""
    order = np.array(visits(name, height, width))
    assert order[0].tolist() == [0, 0]
    steps = np.abs(np.diff(order, axis=0))
    assert (steps.max(1, initial=0) == 1).all()
    assert name != "snake" or (steps.sum(1) == 1).all()


def test_hilbert_has_no_diagonal_step_on_even_squares():
    for size in range(2, 33, 2):
        steps = np.abs(np.diff(np.array(visits("hilbert", size, size)), axis=0))
        assert (steps.sum(1) == 1).all(), size


def test_violin_uses_four_curves_and_their_transposes():
    assert sorted(DECAYS["violin"].SETTINGS["curves"]) == sorted(VIOLIN_CURVES)  # VIOLIN Eq. 13


def apart(name, grid):
    """Distances of all pairs of patches. Two curves give one mask exactly if all agree, whatever gamma is."""
    rank = curve_rank(name, grid).ravel()
    return np.abs(rank[:, None] - rank[None, :])


@each("grid", [*((n, n) for n in (4, 5, 7, 14)), (14, 15), (7, 5), (4, 4, 4), (3, 5, 7), (2, 6, 9)])
def test_the_eight_violin_masks_are_distinct_and_those_of_a_clip_see_time(grid):
    distances = [apart(name, grid) for name in VIOLIN_CURVES]
    assert not any(np.array_equal(*two) for two in itertools.combinations(distances, 2))
    if len(grid) == 3:
        for name, own in zip(VIOLIN_CURVES, distances, strict=True):
            of_frame = np.tile(curve_rank(name, grid[1:]).ravel(), grid[0])
            assert not np.array_equal(own, np.abs(of_frame[:, None] - of_frame[None, :]))


# ---- three dimensions -----------------------------------------------------------------------------------------------

CLIPS = [(1, 1, 1), (1, 5, 7), (2, 2, 2), (4, 4, 4), (3, 5, 7), (7, 2, 3), (8, 1, 4), (5, 4, 1), (2, 9, 9), (6, 3, 10)]


def clip_visits(name, grid):
    # (frame, row, column) of the patches in the order in which the curve meets them.
    return np.stack(np.unravel_index(np.argsort(curve_rank(name, grid), axis=None), grid), 1)


def z_clip_key(t, r, c, height, width):
    return (t, r, c)


def snake_clip_key(t, r, c, height, width):
    # A frame is run through backwards if it is odd; in the snake of a frame, odd rows run backwards.
    row, column = (r, c) if t % 2 == 0 else (height - 1 - r, c)
    return (t, row, column if (r % 2 == 0) == (t % 2 == 0) else width - 1 - column)


def zigzag_clip_key(t, r, c, height, width):
    return (t + r + c, -t if (t + r + c) % 2 == 0 else t, c if (r + c) % 2 == 0 else -c)


def peano_clip_key(t, r, c, height, width):
    bits = [((t >> k) & 1, (c >> k) & 1, (r >> k) & 1) for k in reversed(range(8))]
    return [bit for three in bits for bit in three]


CLIP_KEYS = {"z": z_clip_key, "snake": snake_clip_key, "zigzag": zigzag_clip_key, "peano": peano_clip_key}


@pytest.mark.parametrize("name", CLIP_KEYS)
def test_patches_of_a_clip_are_sorted_by_their_keys(name):
    for grid in CLIPS:
        expected = sorted(np.ndindex(*grid), key=lambda patch: CLIP_KEYS[name](*patch, *grid[1:]))
        assert [tuple(patch) for patch in clip_visits(name, grid).tolist()] == expected, grid


def test_every_curve_has_three_dimensions():
    assert list(CLIP_CURVES) == list(CURVES)


@pytest.mark.parametrize("name", CLIP_CURVES)
@checked
@given(frames=st.integers(1, 12), height=st.integers(1, 12), width=st.integers(1, 12))
def test_ranks_of_a_clip_are_a_permutation(name, frames, height, width):
    rank = curve_rank(name, (frames, height, width))
    assert rank.shape == (frames, height, width) and rank.dtype == np.int64
    assert np.array_equal(np.sort(rank, axis=None), np.arange(rank.size))
    transposed = curve_rank(name, (frames, width, height), transposed=True)
    assert transposed.flags.c_contiguous and np.array_equal(transposed, rank.swapaxes(1, 2))
    assert np.array_equal(curve_rank(name + TRANSPOSED_SUFFIX, (frames, width, height)), transposed)


@pytest.mark.parametrize("name", curve_names())
@checked
@given(height=st.integers(1, 12), width=st.integers(1, 12))
def test_a_clip_of_one_frame_is_an_image(name, height, width):
    assert np.array_equal(curve_rank(name, (1, height, width))[0], curve_rank(name, (height, width)))


@pytest.mark.parametrize("name", ["hilbert", "hilbert_t", "snake"])
def test_on_powers_of_two_every_step_leads_to_a_neighbour(name):
    for grid in ((1, 1, 1), *((n,) * 3 for n in (2, 4, 8, 16)), (2, 8, 4), (16, 2, 8), (4, 16, 16)):
        assert (np.abs(np.diff(clip_visits(name, grid), axis=0)).sum(1) == 1).all(), grid


@each("size", [2, 4, 8, 16])
def test_hilbert_leaves_a_cube_when_it_has_seen_all_of_it(size):
    # What makes it Hilbert's: cubes of every size, each an octant of the next, are stretches of the curve.
    rank, side = curve_rank("hilbert", (size,) * 3), 2
    while side <= size:
        cubes = rank.reshape([size // side, side] * 3).transpose(0, 2, 4, 1, 3, 5).reshape(-1, side**3)
        assert (cubes.max(1) - cubes.min(1) == side**3 - 1).all()
        side *= 2


@checked
@given(frames=st.integers(1, 12), height=st.integers(1, 12), width=st.integers(1, 12))
def test_hilbert_moves_to_one_of_26_neighbours_on_any_clip(frames, height, width):
    order = clip_visits("hilbert", (frames, height, width))
    assert not order[0].any()
    steps = np.abs(np.diff(order, axis=0))
    assert (steps.max(1, initial=0) == 1).all()
    if all(side % 2 == 0 for side in (frames, height, width)):
        assert (steps.sum(1) == 1).all()


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_unknown_curves_and_bad_grids_are_refused():
    known = ", ".join(curve_names())
    for name in ("hilbrt", "", "_t", "hilbert_t_t"):
        shown = name.removesuffix(TRANSPOSED_SUFFIX)
        with pytest.raises(ValueError, match=rf"curve='({name}|{shown})' must be one of {known}"):
            curve_rank(name, (4, 4))
    for grid in ((0, 4), (4, -1), (4,), (4, 4, 4, 4), (0, 4, 4), (2, 4, 2.5), (2.5, 4)):
        with pytest.raises(ValueError, match=r"grid=\(.*must be \(height, width\) with both sides 1 or more"):
            curve_rank("hilbert", grid)


def test_curve_names_are_registered_once_and_keep_the_suffix_free():
    before = dict(CURVES)
    for name in ("hilbert", "mirror_t"):
        with pytest.raises(ValueError, match=rf"curve '{name}' is registered already or ends in '_t'"):
            register_curve(name)(lambda height, width: np.zeros((height, width)))
    assert before == CURVES


def test_a_new_curve_is_known_everywhere():
    try:
        register_curve("columns_backwards")(lambda h, w: np.arange(h * w)[::-1].reshape(w, h).T.copy())
        assert {"columns_backwards", "columns_backwards_t"} <= set(curve_names())
        positions = DECAYS["violin"].positions({"curves": ["columns_backwards_t"]}, (2, 3))
        assert positions.tolist() == [[[5, 4, 3, 2, 1, 0]]]
        with pytest.raises(
            ValueError, match=r"curve='columns_backwards' with grid=\(2, 2, 3\) must be one of z, snake,"
        ):
            curve_rank("columns_backwards", (2, 2, 3))
        register_clip_curve("columns_backwards")(lambda f, h, w: np.arange(f * h * w).reshape(f, w, h).swapaxes(1, 2))
        assert curve_rank("columns_backwards_t", (2, 2, 3)).ravel().tolist() == list(range(12))
        for taken in ("columns_backwards", "columns_forwards"):
            with pytest.raises(ValueError, match=f"curve '{taken}' has three dimensions already, or does not exist"):
                register_clip_curve(taken)(np.zeros)
    finally:
        CURVES.pop("columns_backwards", None)
        CLIP_CURVES.pop("columns_backwards", None)
