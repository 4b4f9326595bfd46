"""The Triton kernels for dense attention with a decay against `reference` in float64."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_sparseprior.attention.functional import attention, run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.kernels import decay_memory
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import LayerKey, resolve_support

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("decay", DECAYS)
def test_agrees_with_the_reference(kernels, decay):
    cases = [((1, 1), 0), ((1, 2), 3), ((5, 7), 1), ((5, 7), 0)]  # blocks of 32 rows forward, of 16 keys backward
    if kernels.native:
        cases += itertools.product([(2, 2), (14, 14), (33, 32)], (0, 1, 5))
    own = [*DECAYS].index(decay)
    for number, (grid, prefix) in enumerate(cases):
        if not kernels.native and (number + own) % 2:
            continue  # the interpreter runs half of them for each decay
        leaves = kernels.make(grid, prefix, decay=decay, prefix_beta=bool((number + own // 2) % 2))
        kernels.check(leaves, "dense", decay, grid, prefix)


@pytest.fixture
def small_blocks(monkeypatch):
    """Tables are filled up to blocks of 32, which float32 has."""
    monkeypatch.setattr("hf_sparseprior.kernels.decayed_triton.LARGEST_BLOCK", 32)


def kept_decay(kernels, heads=2, grid=(3, 4)):
    """Attention of one plan with a decay that needs no gradients; the plan, the scalars, and q, k and v."""
    leaves = kernels.make(grid, 1, heads=heads, decay="manhattan")
    resolved = {"name": "manhattan", **DECAYS["manhattan"].SETTINGS}
    plan = AttentionPlan(LayerKey(heads, grid), 1, resolve_support("dense", heads, 12), resolved)
    scalars = {name: leaf for name, leaf in leaves.items() if name not in "qkv"}
    tokens = [leaves[name].requires_grad_() for name in "qkv"]

    def run(backend="triton"):
        wide = [x.double() for x in tokens] if backend == "reference" else tokens
        decay = resolved | {n: x.double() if backend == "reference" else x for n, x in scalars.items()}
        out = run_plan(AttentionRequest(*wide, plan, decay), backend=backend)[0]
        return [out.detach(), *torch.autograd.grad(out, wide, torch.ones_like(out))]

    return plan, scalars, run


def test_a_table_of_a_frozen_decay_stays_until_its_scalars_change(kernels, small_blocks):
    plan, scalars, run = kept_decay(kernels)
    first = run()
    (kept,) = plan.decay_tables.values()
    assert kept.table.shape == (2, 32, 32)
    assert all(map(torch.equal, first, run()))
    # Read and not made again: what is written into it is seen.
    kept.table[:, 1:13, 1:13] = 0
    assert not torch.allclose(run()[0], first[0])
    for name in ("beta", "prefix_beta"):  # as an optimizer would not, and a count of versions would not see
        scalars[name].data.add_(0.5)
        for found, expected in zip(run(), run("reference"), strict=True):
            kernels.check_close(name, found, expected, torch.float32)
    assert list(plan.decay_tables.values()) == [kept]


def test_programs_that_compare_make_all_blocks_of_a_table(kernels, small_blocks, monkeypatch):
    monkeypatch.setattr("hf_sparseprior.kernels.decayed_triton.COMPARING", 3)  # for the four of 41 tokens
    plan, scalars, run = kept_decay(kernels, grid=(5, 8))
    for _ in range(2):
        for found, expected in zip(run(), run("reference"), strict=True):
            kernels.check_close("", found, expected, torch.float32)
        scalars["beta"].data.add_(0.5)
    assert len(plan.decay_tables) == 1


@pytest.mark.parametrize("support", ["dense", {"name": "window", "w": 3, "diagonal": False}], ids=str)
def test_scalars_need_not_lie_side_by_side(kernels, support):
    leaves = kernels.make((3, 4), 1, decay="violin")
    expected = kernels.run(leaves, support, "violin", (3, 4), 1, torch.float64, backend="reference")
    apart = dict(leaves)
    for name in ("alpha", "prefix_beta", "beta"):
        if name in leaves:
            apart[name] = leaves[name].repeat_interleave(2, -1)[..., ::2]
    assert not apart["alpha"].is_contiguous()
    found = kernels.run(apart, support, "violin", (3, 4), 1)
    kernels.check_close("out", found["out"], expected["out"], torch.float32)


def test_a_decay_changed_between_forward_and_backward_is_that_of_forward(kernels, small_blocks):
    plan, scalars, run = kept_decay(kernels)
    leaves = kernels.make((3, 4), 1, seed=3)
    q, k, v = (leaf.requires_grad_() for leaf in leaves.values())
    decay = {"name": "manhattan", **DECAYS["manhattan"].SETTINGS, **scalars}
    before = run()
    out = run_plan(AttentionRequest(q, k, v, plan, decay), backend="triton")[0]
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    kept = scalars["beta"].clone()
    scalars["beta"].data.add_(1)
    assert not torch.equal(run()[0], before[0])
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), expected))
    scalars["beta"].data.copy_(kept)
    assert all(map(torch.equal, run(), before))


def test_memory_of_tables_has_a_limit(kernels, small_blocks, monkeypatch):
    decayed_triton = pytest.importorskip("hf_sparseprior.kernels.decayed_triton")
    device = torch.empty(0, device=kernels.device).device  # with its number
    used = decayed_triton._in_use.get(device, 0)
    plan, _, run = kept_decay(kernels)
    whole = run()
    assert decayed_triton._in_use[device] - used == 2 * 32 * 32 * 4
    plan.decay_tables.clear()
    assert decayed_triton._in_use[device] == used
    monkeypatch.setattr(decay_memory, "_decay_memory", used + 2 * 32 * 32 * 4 - 1)
    assert all(map(torch.equal, run(), whole)) and not plan.decay_tables
    with pytest.raises(ValueError, match="decay memory of -1 bytes must be 0 or more"):
        decay_memory.set_decay_memory(-1)


def test_parts_of_a_table_give_what_the_whole_gives(kernels, small_blocks, monkeypatch):
    """32 rows of one head at a time, one head at a time, two of three heads at a time."""
    leaves = kernels.make((5, 7), 1, heads=3, width=2, decay="manhattan")
    whole = kernels.run(leaves, "dense", "manhattan", (5, 7), 1)
    tables, parts = [], pytest.importorskip("hf_sparseprior.kernels.decayed_triton")._Part
    monkeypatch.setattr(
        "hf_sparseprior.kernels.decayed_triton._Part", lambda *part: tables.append(part[0].nbytes) or parts(*part)
    )
    for size in (32 * 64 * 4, 64 * 64 * 4, 2 * 64 * 64 * 4):
        tables.clear()
        monkeypatch.setattr(decay_memory, "_decay_memory", size)
        found = kernels.run(leaves, "dense", "manhattan", (5, 7), 1)
        assert max(tables) == size and len(tables) == 3 * -(-3 * 64 * 64 * 4 // size)
        for name, value in whole.items():  # sums of dq are taken in another order
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kernels, dtype):
    grid, batch = ((14, 14), 2) if kernels.native else ((5, 7), 1)
    leaves = kernels.make(grid, 1, heads=1, batch=batch, width=16, decay="violin", dtype=dtype)
    kernels.check(leaves, "dense", "violin", grid, 1)


@pytest.mark.parametrize("width", [1, 130])
def test_any_head_width(kernels, width):
    for value in (width, *((16, 33, 64, 128, 256) if kernels.native else ())):
        for dtype in (torch.float32, torch.bfloat16) if kernels.native else (torch.float32,):
            leaves = kernels.make((3, 3), 1, heads=1, width=value, decay="manhattan", dtype=dtype)
            kernels.check(leaves, "dense", "manhattan", (3, 3), 1)


def test_views_empty_batches_and_gradients_of_any_subset(kernels):
    leaves = kernels.make((3, 4), 1, width=8, decay="manhattan")
    for name in "qkv":  # a view into memory full of NaN
        memory = torch.full((3, 17, 4, 10), torch.nan, device=kernels.device)
        view = memory[1:2, 2:15, 1:3, 1:9].transpose(1, 2)
        leaves[name] = view.copy_(leaves[name])
    kernels.check(leaves, "dense", "manhattan", (3, 4), 1)
    leaves["k"] = leaves["k"][:, :1, :1].expand(1, 2, 13, 8)
    kernels.check(leaves, "dense", "manhattan", (3, 4), 1)
    kernels.check(kernels.make((2, 2), 1, batch=0, decay="violin"), "dense", "violin", (2, 2), 1)
    for chosen in [{"q"}, {"k", "alpha"}, {"beta"}, {"prefix_beta", "v"}]:
        tensors = {name: leaf.detach().clone().requires_grad_(name in chosen) for name, leaf in leaves.items()}
        spec = {"name": "manhattan", **{name: tensors[name] for name in tensors if name not in "qkv"}}
        inputs = (tensors["q"], tensors["k"], tensors["v"])
        attention(*inputs, "dense", spec, num_prefix_tokens=1, grid=(3, 4), backend="triton").sum().backward()
        assert {name for name, tensor in tensors.items() if tensor.grad is not None} == chosen


def test_every_element_is_written_and_two_runs_give_the_same_bits(kernels, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        grid, batch = ((14, 14), 8) if kernels.native else ((5, 7), 2)
        leaves = kernels.make(grid, 1, batch=batch, decay="manhattan")
        first, second = (kernels.run(leaves, "dense", "manhattan", grid, 1) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(value).all() for value in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dropout_against_the_mask_that_was_drawn(kernels):
    leaves = kernels.make((4, 4), 1, width=32, batch=2, decay="manhattan")
    kernels.check_dropout(leaves, "dense", "manhattan", (4, 4), 1)


def test_operators_agree_with_their_fake_kernels(kernels):
    q, k, v = (leaf.requires_grad_() for leaf in kernels.make((2, 2), 1, heads=1).values())
    positions = torch.arange(4, dtype=torch.int32, device=kernels.device).view(1, 1, 4)
    log_gamma = F.logsigmoid(torch.ones(1, 1, device=kernels.device)).requires_grad_()
    alpha = torch.ones(1, device=kernels.device, requires_grad=True)
    arguments = (q, k, v, positions, log_gamma, alpha, None, None, 1, 0.4, 0.0)
    torch.library.opcheck(
        torch.ops.hf_sparseprior.decayed_triton.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_backward_programs_share_the_keys_so_that_few_multiprocessors_wait():
    """Blocks that a multiprocessor goes through one after the other, counted by dealing programs out."""
    decayed_triton = pytest.importorskip("hf_sparseprior.kernels.decayed_triton")

    def longest(blocks: int, programs: int, splits: int) -> int:
        sizes = [len(part) for part in np.array_split(range(blocks), splits)]
        return -(-programs * splits // decayed_triton.MULTIPROCESSORS) * max(sizes)

    for blocks, programs, at_most in itertools.product((1, 2, 9, 33, 129), (1, 24, 96, 132, 384, 1536), (0, 1, 4, 100)):
        splits = decayed_triton._splits_of_keys(blocks, programs, at_most)
        assert 1 <= splits <= max(1, min(blocks, at_most))
        few = range(1, max(1, min(blocks, at_most, -(-396 // programs))) + 1)
        assert longest(blocks, programs, splits) == min(longest(blocks, programs, count) for count in few)
    assert decayed_triton._splits_of_keys(33, 96, 5) == 4  # 4096 patches, 8 images, 12 heads
