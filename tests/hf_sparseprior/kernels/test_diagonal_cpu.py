"""The compiled CPU kernel against `reference` in float64, and what surrounds it: building, choosing, tracing."""

import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_sparseprior import ops
from hf_sparseprior.attention import SparsePriorAttention
from hf_sparseprior.decay import DECAYS
from hf_sparseprior.kernels import build, diagonal_cpu
from hf_sparseprior.ops import attention
from hf_sparseprior.prior import resolve_prior
from hf_sparseprior.supports import MASK_FILLS, SUPPORTS

# A machine without a compiler has nothing to test here; CI has one, and asks for the kernel by this variable.
REASON = diagonal_cpu.ready()
if os.environ.get("CI_NEEDS_KERNELS"):
    assert REASON is None, REASON
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GRIDS = [(1, 1), (1, 2), (2, 3), (4, 4), (7, 5), (14, 14), (33, 32)]
PATTERNS = [name for name in SUPPORTS if name != "dense"]


def make(grid, prefix, *, heads=4, width=24, batch=2, decay=None, dtype=torch.float32, seed=0):
    """Leaves of a call, as projections give q, k and v: (B, T, H, D) transposed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + grid[0] * grid[1]
    leaves = {
        name: torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2) for name in "qkv"
    }
    if decay is not None:
        curves = DECAYS[decay].positions(DECAYS[decay].SETTINGS, (1, 1)).shape[0]
        leaves["alpha"] = torch.rand(heads, generator=generator) + 0.5
        leaves["beta"] = torch.randn(curves, heads, generator=generator) + 3
        leaves["prefix_beta"] = torch.randn(heads, generator=generator)
    return leaves


def outputs(leaves, support, decay, grid, prefix, backend, dtype, **options):
    """Output and gradients of every leaf, for a fixed direction."""
    cast = {
        name: value.detach().to(dtype if name in "qkv" else torch.promote_types(dtype, torch.float32)).requires_grad_()
        for name, value in leaves.items()
    }
    spec = None if decay is None else {"name": decay, **{name: cast[name] for name in cast if name not in "qkv"}}
    out = attention(
        cast["q"], cast["k"], cast["v"], support, spec, num_prefix_tokens=prefix, grid=grid, layer=1, backend=backend,
        **options,
    )  # fmt: skip
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    grads = torch.autograd.grad((out * direction).sum(), list(cast.values()), allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in cast.values()]
    return {
        "out": out,
        **{name: zero if grad is None else grad for name, grad, zero in zip(cast, grads, zeros, strict=True)},
    }


def assert_agree(leaves, support, decay, grid, prefix, dtype):
    actual = outputs(leaves, support, decay, grid, prefix, "cpp", dtype)
    expected = outputs(leaves, support, decay, grid, prefix, "reference", torch.float64)
    for name, value in expected.items():
        limit = TOLERANCE[dtype] * max(0.01, value.abs().max().item() if value.numel() else 0)
        if dtype == torch.bfloat16 and name != "out":
            limit *= 1.5  # q, k and v themselves are rounded, and so is the direction
        difference = (actual[name].double() - value).abs()
        assert not actual[name].isnan().any(), name
        assert difference.numel() == 0 or difference.max().item() <= limit, (name, difference.max().item(), limit)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("decay", [None, *DECAYS])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_kernel_agrees_with_the_reference(pattern, mask_fill, decay, dtype):
    for grid, prefix in itertools.product(GRIDS[:-1], (0, 1, 3)):
        leaves = make(grid, prefix, decay=decay, dtype=dtype)
        assert_agree(leaves, {"name": pattern, "mask_fill": mask_fill}, decay, grid, prefix, dtype)


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_several_pieces_of_rows_agree_with_the_reference(mask_fill, prefix):
    grid = GRIDS[-1]  # 1056 rows: a whole piece of 1024 and a rest
    leaves = make(grid, prefix, heads=2, batch=1, decay="violin")
    assert_agree(leaves, {"name": "fibottention", "mask_fill": mask_fill}, "violin", grid, prefix, torch.float32)


@pytest.mark.parametrize("width", [1, 3, 16, 17, 32, 48, 64, 80, 96, 128, 130, 256])
def test_any_head_width(width):
    leaves = make((5, 5), 1, width=width)
    assert_agree(leaves, "fibottention", None, (5, 5), 1, torch.float32)


def test_random_sweep():
    values = random.Random(0)
    for _ in range(60):
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
        decay = values.choice([None, *DECAYS])
        leaves = make(grid, prefix, heads=heads, batch=batch, width=values.choice([2, 16, 20]), decay=decay)
        assert_agree(leaves, support, decay, grid, prefix, torch.float32)


def test_inputs_of_any_layout_and_gradients_of_any_subset():
    leaves = make((4, 5), 1, width=32)
    q, k, v = leaves.values()
    expected = attention(q, k, v, "fibottention", num_prefix_tokens=1, grid=(4, 5), backend="reference")
    packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], -1)  # one projection for all three
    views = [part.transpose(1, 2) for part in packed.split(32, -1)]
    backwards = torch.randn(2, 4, 32, 21).transpose(2, 3)  # elements of a row apart
    for variant in (views, [x.contiguous() for x in (q, k, v)]):
        out = attention(*variant, "fibottention", num_prefix_tokens=1, grid=(4, 5), backend="cpp")
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    one = q[:1, :1].expand(2, 4, 21, 32)  # strides of 0
    for inputs in ((backwards, k, v), (q, backwards, v), (one, k, one)):
        pair = [
            attention(*inputs, "fibottention", num_prefix_tokens=1, grid=(4, 5), backend=name)
            for name in ("cpp", "reference")
        ]
        torch.testing.assert_close(pair[0], pair[1], rtol=0, atol=1e-5)
    for chosen in itertools.product((True, False), repeat=3):
        inputs = [x.detach().clone().requires_grad_(wanted) for x, wanted in zip((q, k, v), chosen, strict=True)]
        out = attention(*inputs, "fibottention", num_prefix_tokens=1, grid=(4, 5), backend="cpp")
        assert out.requires_grad == any(chosen)
        if any(chosen):
            out.sum().backward()
            assert [x.grad is not None for x in inputs] == list(chosen)


def test_every_element_is_written(monkeypatch):
    """Memory that is handed out full of NaN: what the kernel leaves out would show."""
    poisoned = torch.full((1 << 20,), torch.nan)
    del poisoned
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        for mask_fill, prefix in itertools.product(MASK_FILLS, (0, 2)):
            leaves = make((5, 7), prefix, decay="violin")
            support = {"name": "fibottention", "mask_fill": mask_fill}
            found = outputs(leaves, support, "violin", (5, 7), prefix, "cpp", torch.float32)
            assert all(torch.isfinite(value).all() for value in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


def test_same_bits_on_two_runs_and_with_other_numbers_of_threads():
    leaves = make((33, 32), 1, heads=3, batch=1, decay="violin")
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 2):
            torch.set_num_threads(number)
            found.append(outputs(leaves, "fibottention", "violin", (33, 32), 1, "cpp", torch.float32))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in other.items())


def test_extreme_logits():
    for factor in (1e3, 1e-30):
        leaves = make((4, 4), 1)
        leaves["q"] = leaves["q"] * factor
        for mask_fill in MASK_FILLS:
            support = {"name": "fibottention", "mask_fill": mask_fill}
            found = [
                attention(*(leaves[n].to(d) for n in "qkv"), support, num_prefix_tokens=1, grid=(4, 4), backend=b)
                for b, d in (("cpp", torch.float32), ("reference", torch.float64))
            ]
            torch.testing.assert_close(found[0].double(), found[1], rtol=0, atol=2e-3 if factor > 1 else 1e-5)


def test_gradients_by_finite_differences():
    leaves = make((2, 4), 1, heads=2, width=4, batch=1)
    inputs = [leaves[name].clone().requires_grad_() for name in "qkv"]

    def run(q, k, v):
        return attention(q, k, v, "fibottention", num_prefix_tokens=1, grid=(2, 4), backend="cpp")

    assert torch.autograd.gradcheck(run, inputs, eps=1e-2, atol=2e-3, rtol=1e-2)


def test_dropout_keeps_the_mean_and_its_gradients_follow_the_drawn_mask():
    leaves = make((8, 8), 1, heads=2, width=16, batch=1)
    q, k, v = (leaves[name] for name in "qkv")
    plain = attention(q, k, v, "fibottention", num_prefix_tokens=1, backend="cpp")
    torch.manual_seed(0)
    drawn = [attention(q, k, v, "fibottention", num_prefix_tokens=1, backend="cpp", dropout_p=0.3) for _ in range(1500)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(torch.stack(drawn).mean(0), plain, rtol=0, atol=0.12)
    # The output is linear in v: with one mask drawn, its gradient is exact for any step.
    v = v.clone().requires_grad_()
    torch.manual_seed(1)
    out = attention(q, k, v, "fibottention", num_prefix_tokens=1, backend="cpp", dropout_p=0.3)
    direction, step = torch.randn_like(out), torch.randn_like(v)
    (grad,) = torch.autograd.grad((out * direction).sum(), v)
    torch.manual_seed(1)
    moved = attention(q, k, (v + step).detach(), "fibottention", num_prefix_tokens=1, backend="cpp", dropout_p=0.3)
    expected = ((moved - out) * direction).sum()
    torch.testing.assert_close((grad * step).sum(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("decay", [None, "violin"])
def test_operators_pass_torchs_own_checks(decay):
    leaves = make((3, 4), 1, heads=2, width=16, decay=decay)
    seen = []
    original = torch.ops.hf_sparseprior.diagonal_forward
    arguments = capture(lambda: outputs(leaves, "fibottention", decay, (3, 4), 1, "cpp", torch.float32), seen)
    torch.library.opcheck(original.default, arguments)


def capture(run, seen):
    """Arguments of the forward operator in a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "diagonal_forward" in str(func):
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Mode():
        run()
    return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in seen[0])


@pytest.mark.parametrize("decay", [None, "violin"])
def test_compiled_whole_and_equal(decay):
    torch.manual_seed(0)
    prior = resolve_prior({"support": "fibottention", "decay": decay}, 2, (4, 4))
    layer = SparsePriorAttention(32, 2, prior)
    hidden = torch.randn(2, 17, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        out = run(hidden, (4, 4), 1, backend="cpp")[0]
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in layer.parameters())])
    for value, other in zip(*results, strict=True):
        torch.testing.assert_close(value, other)


def test_no_array_of_all_pairs(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, largest = 4096, [0]

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor):
                    largest[0] = max(largest[0], value.numel())
            return out

    leaves = make((64, 64), 1, heads=2, width=16, batch=1)
    with Largest():
        outputs(leaves, "fibottention", None, (64, 64), 1, "cpp", torch.float32)
    assert largest[0] < tokens * tokens / 16


def test_wrong_inputs_are_named():
    leaves = make((3, 3), 1)
    with pytest.raises(ValueError, match="float32 and bfloat16, not for float16"):
        attention(*(leaves[n].half() for n in "qkv"), "fibottention", num_prefix_tokens=1, backend="cpp")
    with pytest.raises(ValueError, match="dense attention without a decay"):
        attention(*(leaves[n] for n in "qkv"), "dense", num_prefix_tokens=1, backend="cpp")
    wide = make((2, 2), 1, width=257)
    with pytest.raises(ValueError, match=r"head width 257 must be in 1\.\.256"):
        attention(*(wide[n] for n in "qkv"), "fibottention", num_prefix_tokens=1, backend="cpp")


# ---- building -------------------------------------------------------------------------------------------------------

CHECK = "from hf_sparseprior.kernels import diagonal_cpu; print(diagonal_cpu.ready())"


def in_a_process(code, **environment):
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_without_a_compiler_everything_still_runs_and_says_why(tmp_path):
    assert "no C++ compiler" in in_a_process(CHECK, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))
    code = (
        "import torch, hf_sparseprior as sp; x = torch.randn(1, 2, 401, 8);"
        "print(sp.ops.attention(x, x, x, 'fibottention', num_prefix_tokens=1).shape)"
    )
    assert "401" in in_a_process(code, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))


def test_a_compiler_that_fails_leaves_nothing_and_is_named(tmp_path):
    fake = tmp_path / "g++"
    fake.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo fake 1;; *) echo "x.cpp:1: error: no" >&2; exit 1;; esac\n'
    )
    fake.chmod(0o755)
    said = in_a_process(CHECK, CXX=str(fake), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "g++ failed: x.cpp:1: error: no" in said
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_built_kernel_is_not_built_again(monkeypatch, caplog):
    compiler = build.find_compiler()
    assert compiler is not None
    library = build.library_path(compiler)
    assert library.is_file()
    stamp = library.stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        build.build(compiler, library)
    assert library.stat().st_mtime_ns == stamp and not caplog.records


def test_the_core_reaches_the_kernel():
    """A guarded import that failed would leave everything slow without a word."""
    assert ops.diagonal_cpu is diagonal_cpu
    assert shutil.which("g++") is None or REASON is None
