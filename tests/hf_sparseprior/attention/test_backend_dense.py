"""`reference`, the specification, against loops over Python floats and against the equations of the papers."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from hf_sparseprior.attention.functional import attention
from hf_sparseprior.patterns.curves import curve_names, curve_rank
from hf_sparseprior.patterns.supports import MASK_FILLS
from tests.hf_sparseprior.attention.attention_cases import (
    CASES,
    DECAY_VARIANTS,
    assert_near,
    brute_attention,
    brute_mask,
    brute_weights,
    call,
    make_leaves,
)


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize(
    ("number", "support"), [pytest.param(number, *case.values, id=case.id) for number, case in enumerate(CASES)]
)
def test_reference_matches_loops(number, support, mask_fill):
    torch.set_default_dtype(torch.float64)
    try:
        support = {**support, "mask_fill": mask_fill}
        cases = list(product([(1, 1), (1, 3), (3, 2), (3, 3)], (0, 1, 3), DECAY_VARIANTS))
        # A sixth for each support and fill; all for three supports that follow one another.
        for grid, prefix, variant in cases[(2 * number + MASK_FILLS.index(mask_fill)) % 6 :: 6]:
            leaves = make_leaves(grid, prefix, variant, batch=1, heads=2, width=2)
            mask = brute_mask(support, 2, grid, prefix)
            weights = brute_weights(variant, leaves, 2, grid, prefix)
            out, probs = brute_attention(leaves, mask, weights, mask_fill, scale=0.7)
            options = {"backend": "reference", "scale": 0.7, "need_weights": True}
            own_out, own_probs = call(leaves, support, variant, grid, prefix, **options)
            assert_near(own_out, out, 1e-13)
            assert_near(own_probs, probs, 1e-13)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_scale_is_one_over_the_root_of_the_head_width():
    leaves = make_leaves((2, 3), 1, width=9)
    default = call(leaves, "dense", None, (2, 3), 1)
    assert torch.equal(default, call(leaves, "dense", None, (2, 3), 1, scale=1 / 3))


# ---- VIOLIN Eqs. 8 to 11 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", curve_names())
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_permuting_the_tokens_equals_permuting_the_mask(curve, grid):
    leaves = make_leaves(grid, 0)
    gamma = 0.9
    decay = {"name": "violin", "curves": [curve], "beta": torch.full((1, 3), math.log(gamma / (1 - gamma))).double()}
    # Eqs. 8 and 9: tokens in the curve's order, the plain mask gamma^|i - j|, and back.
    order = torch.tensor(np.argsort(curve_rank(curve, grid), axis=None))
    q, k, v = (leaves[name][:, :, order] for name in "qkv")
    place = torch.arange(len(order))
    mask = gamma ** (place[:, None] - place[None]).abs().double()
    expected = torch.empty_like(q)
    expected[:, :, order] = torch.softmax(q @ k.transpose(-1, -2) / 2 * mask, -1) @ v
    # Eq. 11: raster order, the mask permuted. A window of everything lets the diagonal path show the same.
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    for backend, support in (("reference", "dense"), ("diagonal", {"name": "window", "w": len(order)})):
        out = attention(*inputs, support, decay, grid=grid, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
