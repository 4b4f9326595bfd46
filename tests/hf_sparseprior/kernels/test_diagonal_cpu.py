"""The C++ kernel along diagonals against `reference` in float64, and its building, choice and tracing."""

import itertools
import os
import platform
import random
import subprocess
import sys

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [None, *DECAYS])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_agrees_with_the_reference(cpp, pattern, mask_fill, decay, dtype):
    cases = list(itertools.product(GRIDS[:4], PREFIXES))
    # One prefix for each larger grid, others in each case: with every pattern and mask each grid meets every prefix.
    first = [None, *DECAYS].index(decay) + 2 * DTYPES.index(dtype)
    cases += [(grid, PREFIXES[(first + number) % 3]) for number, grid in enumerate(GRIDS[4:])]
    for grid, prefix in cases:
        leaves = cpp.make(grid, prefix, **FEW, decay=decay, dtype=dtype)
        cpp.check(leaves, {"name": pattern, "mask_fill": mask_fill}, decay, grid, prefix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [None, "violin"])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_several_pieces_of_rows(cpp, prefix, mask_fill, decay, dtype):
    """One piece, one and a row, two, two and a part of a block; with packed rows and with rows in place."""
    packed, in_place = ((16, 16), (1, 257), (16, 32), (17, 31)), ((8, 8), (5, 13), (8, 16), (9, 15))
    register = 64 // dtype.itemsize  # elements
    for width, grids in ((20, packed), (register, in_place)):
        for grid in grids:
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
@pytest.mark.parametrize("flags", ["-mno-avx512bf16", "-mno-avx512f"])
def test_other_instructions_give_the_same(flags):
    """As a processor without them has it. Kernels are built for the one they are on, so in a process of its own."""
    if platform.machine() != "x86_64":
        pytest.skip(f"{flags} is for x86_64")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "several_pieces or rounded",
    ]
    process = subprocess.run(
        command, env={**os.environ, "SPARSEPRIOR_CXXFLAGS": flags}, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0 and " passed" in process.stdout and "skipped" not in process.stdout, process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, "manhattan"])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("prefix", [0, 2])
def test_offsets_further_apart_than_a_piece(cpp, prefix, mask_fill, decay):
    """The rows that a piece needs lie in ranges that do not touch."""
    grid = (18, 50)
    support = {"name": "fibottention", "w_min": 900, "w_max": 900, "mask_fill": mask_fill}
    offsets = layer_pattern(resolve_support(support, 2, 900), LayerKey(2, (30, 30), 1)).offsets
    assert max(b - a for own in offsets for a, b in itertools.pairwise(own)) > 256
    for width, dtype in ((4, torch.float32), (16, torch.float32), (32, torch.bfloat16)):  # packed, in place twice
        cpp.check(cpp.make(grid, prefix, width=width, decay=decay, dtype=dtype), support, decay, grid, prefix)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 64])
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
    for seed in range(60):
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


def test_dropout_keeps_the_mean(cpp):
    leaves = cpp.make((8, 8), 1, width=16)
    plain = cpp.attend(leaves, "fibottention", None, (8, 8), 1)
    torch.manual_seed(0)
    drawn = [cpp.attend(leaves, "fibottention", None, (8, 8), 1, dropout_p=0.3) for _ in range(1500)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(torch.stack(drawn).mean(0), plain, rtol=0, atol=0.12)
    torch.manual_seed(0)
    assert torch.equal(drawn[0], cpp.attend(leaves, "fibottention", None, (8, 8), 1, dropout_p=0.3))
    assert cpp.attend(leaves, "fibottention", None, (8, 8), 1, dropout_p=1.0).eq(0).all()


@pytest.mark.parametrize("decay", [None, "manhattan"])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_dropout_against_the_mask_that_was_drawn(cpp, prefix, decay):
    """With unit vectors as v the output is the weights, which show what was dropped. The rest is in float64."""
    grid, width, dropout_p = (17, 18), 64, 0.3  # two pieces of rows
    tokens = prefix + 306
    leaves = cpp.make(grid, prefix, width=width, batch=2, decay=decay)

    def run(values):
        torch.manual_seed(5)
        own = {name: leaf.requires_grad_() for name, leaf in {**leaves, "v": values}.items()}
        return cpp.attend(own, "fibottention", decay, grid, prefix, dropout_p=dropout_p)

    unit = torch.nn.functional.pad(torch.eye(tokens), (0, -tokens % width))
    drawn = torch.cat([run(part.expand(2, 2, tokens, width).clone()).detach() for part in unit.split(width, 1)], -1)
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    _, weights = cpp.attend(wide, "fibottention", decay, grid, prefix, backend="reference", need_weights=True)
    seen = weights > 1e-12
    kept = drawn[..., :tokens] > 0
    share = kept[seen].double().mean().item()
    assert abs(share - (1 - dropout_p)) < 4 * (0.21 / seen.sum().item()) ** 0.5
    factor = torch.where(kept, 1 / (1 - dropout_p), 0.0)
    torch.testing.assert_close(drawn[..., :tokens].double(), (weights * factor).detach(), rtol=0, atol=1e-5)
    out, expected = run(leaves["v"]), (weights * factor) @ wide["v"]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad((out * direction).sum(), list(leaves.values()), allow_unused=True)
    others = torch.autograd.grad((expected * direction).sum(), list(wide.values()), allow_unused=True)
    for name, grad, other in zip(leaves, grads, others, strict=True):
        if other is not None:
            rounding = 0.0 if name in "qkv" else 3e-5
            cpp.check_close(name, grad, other, torch.float32, rounding)


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


@pytest.mark.parametrize("name", [*FORWARD[:6], *WEIGHTS])
def test_the_operator_names_wrong_inputs(cpp, name):
    leaves = cpp.make((3, 4), 1, width=16, decay="violin")
    arguments = cpp.operator_arguments("diagonal_forward", leaves, "fibottention", "violin", (3, 4), 1)
    given = dict(zip([*FORWARD, *WEIGHTS, "keep"], arguments, strict=True))
    given["drop"] = torch.ones(given["offsets"].numel() * 16 + 2 * 16 + 2 * 13)
    torch.ops.hf_sparseprior.diagonal_forward(*given.values())
    for bad in [-1, 13] if name == "prefix" else [given[name][..., :1], given[name].unsqueeze(0), given[name].half()]:
        with pytest.raises(RuntimeError, match=name):
            torch.ops.hf_sparseprior.diagonal_forward(*{**given, name: bad}.values())


@pytest.mark.parametrize("name", ["grad", "out", "probs", "logits", "floors", "rows"])
def test_the_backward_operator_names_wrong_inputs(cpp, name):
    leaves = cpp.make((3, 4), 1, width=16, decay="violin")
    support = {"name": "fibottention", "mask_fill": "zero"}
    arguments = cpp.operator_arguments("diagonal_backward", leaves, support, "violin", (3, 4), 1)
    given = dict(zip(BACKWARD, arguments, strict=True))
    for bad in (given[name][..., :1], given[name].double()):
        with pytest.raises(RuntimeError, match=name):
            torch.ops.hf_sparseprior.diagonal_backward(*{**given, name: bad}.values())
