"""The C++ kernel along diagonals against `reference` in float64.

test_prebuilt.py runs some of it with the instructions of other processors.
"""

import itertools
import random

import pytest
import torch

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS, SUPPORTS, LayerKey, has_pairs, layer_pattern, resolve_support

GRIDS = [(1, 1), (1, 2), (2, 3), (4, 4), (7, 5), (14, 14)]
PATTERNS = [name for name in SUPPORTS if name != "dense" and not has_pairs(name)]
DTYPES = [torch.float32, torch.bfloat16]
PREFIXES = (0, 1, 3)
FEW = {"heads": 4, "width": 24, "batch": 2}


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_agrees_with_the_reference(cpp, pattern, mask_fill):
    # One decay for each grid and prefix, others in the next case: over all patterns each decay meets each of them.
    decays = [None, *DECAYS]
    first = PATTERNS.index(pattern) + 2 * MASK_FILLS.index(mask_fill)
    for number, (grid, prefix) in enumerate(itertools.product(GRIDS, PREFIXES), start=first):
        decay = decays[number % len(decays)]
        for dtype in DTYPES:
            leaves = cpp.make(grid, prefix, **FEW, decay=decay, dtype=dtype)
            cpp.check(leaves, {"name": pattern, "mask_fill": mask_fill}, decay, grid, prefix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
def test_several_pieces_of_rows(cpp, mask_fill, dtype):
    """One piece, one and a row, two, two and a part of a block; with packed rows and with rows in place."""
    packed, in_place = ((16, 16), (1, 257), (16, 32), (17, 31)), ((8, 8), (5, 13), (8, 16), (9, 15))
    register = 64 // dtype.itemsize  # elements
    every = list(itertools.product((0, 1, 5), (None, "violin")))
    for width, grids in ((20, packed), (register, in_place)):
        for number, grid in enumerate(grids, start=MASK_FILLS.index(mask_fill)):
            for prefix, decay in every[number % 3 :: 3]:  # one without and one with a decay
                leaves = cpp.make(grid, prefix, width=width, decay=decay, dtype=dtype)
                cpp.check(leaves, {"name": "fibottention", "mask_fill": mask_fill}, decay, grid, prefix)


@pytest.mark.parametrize("width", [32, 48, 64, 96, 128, 160])
def test_bfloat16_is_float32_rounded_once(cpp, width):
    """In place or packed: products and sums of bfloat16 are those of float32, and only results are rounded."""
    grid, prefix, decay = (11, 13), 2, "violin"
    leaves = cpp.make(grid, prefix, width=width, decay=decay, dtype=torch.bfloat16)
    for support in ("fibottention", {"name": "window", "w": 9}):
        halves = cpp.attend(leaves, support, decay, grid, prefix)
        wide = {name: leaf.float() for name, leaf in leaves.items()}
        exact = cpp.attend(wide, support, decay, grid, prefix)
        spacing = torch.finfo(torch.bfloat16).eps * 2 ** exact.abs().log2().floor()
        # Half a unit in the last place, and what two orders of summation in float32 differ by.
        assert ((halves.float() - exact).abs() <= 0.5 * spacing + 2e-6).all()
        assert (halves.float() != exact).any()


@pytest.mark.slow
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
def test_offsets_further_apart_than_a_piece(cpp, mask_fill):
    """The rows that a piece needs lie in ranges that do not touch."""
    grid = (18, 50)
    support = {"name": "fibottention", "w_min": 900, "w_max": 900, "mask_fill": mask_fill}
    offsets = layer_pattern(resolve_support(support, 2, 900), LayerKey(2, (30, 30), 1)).offsets
    assert max(b - a for own in offsets for a, b in itertools.pairwise(own)) > 256
    calls = [(0, None), (2, "manhattan"), (2, None), (0, "manhattan")][MASK_FILLS.index(mask_fill) :]
    sizes = ((4, torch.float32), (16, torch.float32), (32, torch.bfloat16))  # packed, in place twice
    for (width, dtype), (prefix, decay) in zip(sizes, calls, strict=False):
        cpp.check(cpp.make(grid, prefix, width=width, decay=decay, dtype=dtype), support, decay, grid, prefix)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dtype"), [(24, torch.float32), (64, torch.float32), (64, torch.bfloat16)], ids=str)
def test_tensors_that_no_cache_keeps(cpp, width, dtype):
    """Above 2 MiB tokens are read ahead, and results stored past the caches where rows are whole vectors of float32."""
    grid = (20, 15)  # two pieces of rows, or more
    leaves = cpp.make(grid, 1, heads=3, batch={24: 20, 64: 10}[width], width=width, dtype=dtype)
    assert leaves["q"][..., 0].numel() * -(-width // 16) * 64 > 2 << 20
    for mask_fill in MASK_FILLS:
        cpp.check(leaves, {"name": "fibottention", "mask_fill": mask_fill}, None, grid, 1)
    packed = torch.cat([leaves[name].transpose(1, 2) for name in "qkv"], -1).transpose(1, 2)
    views = dict(zip("qkv", packed.split(width, -1), strict=True))
    views["k"] = views["k"].transpose(2, 3).contiguous().transpose(2, 3)  # elements of a row apart
    cpp.check(views, "fibottention", None, grid, 1)
    one = leaves["v"][..., -1:].expand_as(leaves["v"])  # the same element all along a row
    cpp.check({**leaves, "v": one}, "fibottention", None, grid, 1)
    v = leaves["v"].clone().requires_grad_()
    cpp.attend({**leaves, "v": v}, "fibottention", None, grid, 1).sum().backward()  # a gradient of one element
    expected = leaves["v"].double().requires_grad_()
    wide = {"q": leaves["q"].double(), "k": leaves["k"].double(), "v": expected}
    cpp.attend(wide, "fibottention", None, grid, 1, backend="reference").sum().backward()
    cpp.check_close("v", v.grad, expected.grad, dtype)


def test_random_sweep(cpp):
    values = random.Random(0)
    for seed in range(40):
        grid = (values.randint(1, 9), values.randint(1, 9))
        prefix, heads, batch = values.randint(0, 5), values.randint(1, 5), values.randint(0, 2)
        support = values.choice(
            [
                {"name": "fibottention", "w_min": 1, "w_max": values.randint(1, 200)},
                {"name": "fibottention", "modified": True},
                {"name": "window", "w": values.randint(1, 90), "diagonal": values.random() < 0.5},
                {"name": "fibottention", "w_min": 1, "w_max": 1},  # most heads have no offset
            ]
        )
        support["mask_fill"] = values.choice(MASK_FILLS)
        decay, width = values.choice([None, *DECAYS]), values.choice([2, 16, 20])
        leaves = cpp.make(grid, prefix, heads=heads, batch=batch, width=width, decay=decay, seed=seed)
        cpp.check(leaves, support, decay, grid, prefix)


@pytest.mark.parametrize("prefix", [0, 1])
def test_scalars_of_any_layout(cpp, prefix):
    """Without prefix tokens a window of 0 offsets leaves each patch itself, with the weight alpha."""
    leaves = cpp.make((4, 5), prefix, heads=4, decay="violin")
    leaves["beta"] = leaves["beta"].t().contiguous().t()
    for alpha in (torch.tensor(1.3).expand(4), torch.arange(1.0, 9.0)[::2]):
        for support in ("fibottention", {"name": "fibottention", "w_min": 1, "w_max": 1}):
            own = {**leaves, "alpha": alpha, "prefix_beta": alpha}
            cpp.check(own, support, "violin", (4, 5), prefix)


def test_dropout_draws_anew_and_by_torchs_seed(cpp):
    leaves = cpp.make((8, 8), 1, width=16)

    def drawn(dropout_p=0.3):
        return cpp.attend(leaves, "fibottention", None, (8, 8), 1, dropout_p=dropout_p)

    torch.manual_seed(0)
    first, second = drawn(), drawn()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, drawn())
    assert drawn(1.0).eq(0).all()


@pytest.mark.parametrize(("prefix", "decay"), [(0, None), (0, "manhattan"), (1, None), (5, "manhattan")])
def test_dropout_against_the_mask_that_was_drawn(cpp, prefix, decay):
    grid = (17, 18)  # two pieces of rows
    leaves = cpp.make(grid, prefix, width=64, batch=2, decay=decay)
    cpp.check_dropout(leaves, "fibottention", decay, grid, prefix, of=[*leaves])


@pytest.mark.parametrize("decay", [None, "violin"])
def test_operators_pass_torchs_own_checks(cpp, decay):
    leaves = cpp.make((3, 4), 1, width=16, decay=decay)
    for name in ("diagonal_forward", "diagonal_backward"):
        arguments = cpp.operator_arguments(name, leaves, "fibottention", decay, (3, 4), 1)
        torch.library.opcheck(getattr(torch.ops.hf_sparseprior, name).default, arguments)
    *arguments, _ = cpp.operator_arguments("diagonal_forward", leaves, "fibottention", decay, (3, 4), 1)
    # For calls without gradients, which `operator_arguments` has detached.
    torch.library.opcheck(torch.ops.hf_sparseprior.diagonal_output.default, tuple(arguments))
    with torch.no_grad():
        expected = torch.ops.hf_sparseprior.diagonal_forward(*arguments, True)[0]
    assert torch.equal(torch.ops.hf_sparseprior.diagonal_output(*arguments), expected)


def test_wrong_inputs_are_named(cpp):
    leaves = cpp.make((3, 3), 1)
    with pytest.raises(ValueError, match="dense attention without a decay"):
        cpp.attend(leaves, "dense", None, (3, 3), 1)
    with pytest.raises(ValueError, match="dropout with mask_fill='zero'"):
        cpp.attend(leaves, {"name": "window", "mask_fill": "zero"}, None, (3, 3), 1, dropout_p=0.1)
    with pytest.raises(ValueError, match="head width 0 must be 1 or more"):
        empty = torch.zeros(1, 2, 5, 0)
        ops.attention(empty, empty, empty, "fibottention", num_prefix_tokens=1, grid=(2, 2), scale=1.0, backend="cpp")


FORWARD = ["q", "k", "v", "offsets", "counts", "prefix", "scale", "zero_fill"]
WEIGHTS = ["pair_weights", "pair_begin", "prefix_weight", "self_weight", "drop"]
BACKWARD = ["grad", "q", "k", "v", "out", *FORWARD[3:], *WEIGHTS, "probs", "logits", "floors", "rows"]


def test_the_operator_names_wrong_inputs(cpp):
    leaves = cpp.make((3, 4), 1, width=16, decay="violin")
    arguments = cpp.operator_arguments("diagonal_forward", leaves, "fibottention", "violin", (3, 4), 1)
    given = dict(zip([*FORWARD, *WEIGHTS, "keep"], arguments, strict=True))
    given["drop"] = torch.ones(given["offsets"].numel() * 16 + 2 * 16 + 2 * 13)
    torch.ops.hf_sparseprior.diagonal_forward(*given.values())
    for name in (*FORWARD[:6], *WEIGHTS):
        value = given[name]
        for bad in [-1, 13] if name == "prefix" else [value[..., :1], value.unsqueeze(0), value.half()]:
            with pytest.raises(RuntimeError, match=name):
                torch.ops.hf_sparseprior.diagonal_forward(*{**given, name: bad}.values())


def test_the_backward_operator_names_wrong_inputs(cpp):
    leaves = cpp.make((3, 4), 1, width=16, decay="violin")
    support = {"name": "fibottention", "mask_fill": "zero"}
    arguments = cpp.operator_arguments("diagonal_backward", leaves, support, "violin", (3, 4), 1)
    given = dict(zip(BACKWARD, arguments, strict=True))
    for name in ("grad", "out", "probs", "logits", "floors", "rows"):
        for bad in (given[name][..., :1], given[name].double()):
            with pytest.raises(RuntimeError, match=name):
                torch.ops.hf_sparseprior.diagonal_backward(*{**given, name: bad}.values())
