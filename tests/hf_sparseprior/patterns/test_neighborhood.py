"""The support in two dimensions against NATTEN's rule, stated by loops, and against the windows that are cut off."""

import itertools

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from tests.each import each

GRIDS = [(5, 7), (9, 11), (13, 6), (7, 7), (2, 9), (1, 5)]
WINDOWS = [(3, 1), (3, 2), (5, 1), (5, 3), (7, 1), ((3, 5), (2, 1)), ((1, 7), 1)]


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def shifted(place, length, window, dilation):
    """Places that one sees along an axis: of the places a multiple of `dilation` apart, the window whose middle is
    nearest, or all of them if there are fewer.
    """
    own = [other for other in range(length) if (other - place) % dilation == 0]
    windows = [own[first : first + window] for first in range(len(own) - window + 1)] or [own]
    return set(min(windows, key=lambda keys: abs(keys[len(keys) // 2] - place) if len(keys) == window else 0))


def cut(place, length, window, dilation):
    half = window // 2
    return {place + dilation * step for step in range(-half, half + 1)} & {*range(length)}


def natten_start(index, length, window, dilation):
    """Where a window begins by NATTEN's own formula, for windows that fit: window * dilation of at most the length."""
    half = window // 2
    if dilation == 1:
        return max(index - half, 0) + (index + half >= length) * (length - index - half - 1)
    if index - half * dilation < 0:
        return index % dilation
    if index + half * dilation >= length:
        rest, whole = index % dilation, length // dilation * dilation
        if rest < length - whole:
            return length - (length - whole) + rest - 2 * half * dilation
        return whole + rest - window * dilation
    return index - half * dilation


def expected(grid, window, dilation, axis_keys):
    mask = np.zeros((*grid, *grid), dtype=bool)
    for y, x in itertools.product(*map(range, grid)):
        rows, columns = (
            axis_keys(place, *own) for place, *own in zip((y, x), grid, pair(window), pair(dilation), strict=True)
        )
        for key in itertools.product(rows, columns):
            mask[(y, x, *key)] = True
    return mask.reshape(grid[0] * grid[1], -1)


def mask_of(grid, **settings):
    support = {"name": "neighborhood", **settings}
    masks = sp.supports.build_mask(support, num_heads=2, num_tokens=grid[0] * grid[1], grid=grid)
    assert (masks[0] == masks[1]).all()
    return masks[0]


@each("grid, window, dilation", [(grid, *WINDOWS[(i + j) % 7]) for i, grid in enumerate(GRIDS) for j in (0, 2, 5)])
@pytest.mark.parametrize(("edges", "axis_keys"), [("shift", shifted), ("cut", cut)])
def test_every_patch_sees_its_window(grid, window, dilation, edges, axis_keys):
    mask = mask_of(grid, window=window, dilation=dilation, edges=edges)
    assert (mask == expected(grid, window, dilation, axis_keys)).all()
    assert mask.diagonal().all()
    if edges == "cut":
        assert (mask == mask.T).all()


@each("window, dilation", itertools.product([1, 3, 5, 7], [1, 2, 3, 4]))
def test_windows_begin_where_those_of_natten_do(window, dilation):
    for length in range(window * dilation, window * dilation + 9):
        mask = mask_of((1, length), window=(1, window), dilation=(1, dilation))
        for index in range(length):
            start = natten_start(index, length, window, dilation)
            assert np.flatnonzero(mask[index]).tolist() == [start + dilation * step for step in range(window)]


@pytest.mark.parametrize(
    ("edges", "backend"), [("shift", "cpp"), ("shift", "gather"), ("cut", "gather"), ("cut", "sdpa")]
)
def test_backends_and_gradients_agree_with_attention_written_out(edges, backend):
    generator, grid = torch.Generator().manual_seed(0), (5, 9)
    support = {"name": "neighborhood", "window": [3, 5], "dilation": [1, 2], "edges": edges}
    leaves = [torch.randn(2, 3, 46, 8, generator=generator, requires_grad=True) for _ in range(3)]
    direction = torch.randn(2, 3, 46, 8, generator=generator)
    try:
        out = sp.ops.attention(*leaves, support, num_prefix_tokens=1, grid=grid, backend=backend)
    except ValueError as error:
        pytest.skip(f"{backend}: {error}")
    found = torch.autograd.grad(out, leaves, direction)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    mask = torch.ones(46, 46, dtype=torch.bool)
    mask[1:, 1:] = torch.from_numpy(expected(grid, (3, 5), (1, 2), shifted if edges == "shift" else cut))
    logits = (doubles[0] @ doubles[1].transpose(-1, -2)) / 8**0.5
    written = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ doubles[2]
    torch.testing.assert_close(out.double(), written, rtol=0, atol=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(written, doubles, direction.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 4}, "window=4 must be odd"),
        ({"window": 0}, "window=0 must be an integer of 1 or more"),
        ({"window": [3, 3, 3]}, "must be a number, or two"),
        ({"window": 2.5}, "window=2.5 must be an integer"),
        ({"dilation": -1}, "dilation=-1 must be an integer of 1 or more"),
        ({"edges": "wrap"}, "edges='wrap' must be one of shift, cut"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mask_of((4, 4), **settings)


def test_a_window_wider_than_the_grid_is_noted(caplog):
    config = sp.SparsePriorViTConfig(image_size=(32, 96), patch_size=16, prior="neighborhood")
    notes = sp.supports.support_notes(config.prior["support"], sp.supports.LayerKey(12, (2, 6)), 1)
    assert notes == ["neighborhood: some windows are wider than the grid's rows (2) and columns (6)"]
    assert config.prior["support"] == {
        **{"name": "neighborhood", "window": [7, 7], "dilation": [1, 1], "edges": "shift"},
        **{"shuffle_seed": 0, "mask_fill": "neg_inf"},
    }
