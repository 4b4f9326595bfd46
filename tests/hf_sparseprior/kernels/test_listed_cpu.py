"""The C++ kernel over lists of keys against `reference` in float64."""

import itertools
import random

import pytest
import torch

from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.kernels import listed_cpu
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import LayerKey, resolve_support

GRIDS = [(1, 1), (1, 2), (3, 5), (4, 4), (1, 17), (3, 11), (7, 9)]
SUPPORTS = {
    "random": {"name": "random", "pruning_ratio": 80.0},
    "none": {"name": "random", "pruning_ratio": 100},  # without a prefix each patch sees itself alone
    "heads": {"name": "random", "pruning_ratio": 60.0, "per_head": True},
    "bigbird": {"name": "bigbird", "random_keys": 3},
}


@pytest.mark.parametrize("support", SUPPORTS)
def test_agrees_with_the_reference(cpp, support):
    # One decay for each grid and prefix, others with the next support, in both dtypes.
    decays, first = [None, *DECAYS], [*SUPPORTS].index(support)
    for number, (grid, prefix) in enumerate(itertools.product(GRIDS, range(3)), start=first):
        decay = decays[number % len(decays)]
        for dtype in (torch.float32, torch.bfloat16):
            leaves = cpp.make(grid, prefix, decay=decay, dtype=dtype, batch=2, width=24)
            cpp.check(leaves, SUPPORTS[support], decay, grid, prefix)


def test_random_sweep(cpp):
    values = random.Random(0)
    for seed in range(30):
        grid, prefix = (values.randint(1, 9), values.randint(1, 9)), values.randint(0, 5)
        decay = values.choice([None, *DECAYS])
        sizes = {"heads": values.randint(1, 5), "batch": values.randint(0, 4), "width": values.randint(1, 130)}
        support = {"name": "random", "pruning_ratio": values.uniform(0, 100), "per_head": values.random() < 0.5}
        cpp.check(cpp.make(grid, prefix, decay=decay, seed=seed, **sizes), support, decay, grid, prefix)


def lists_of(batch, heads, patches, prefix, seed=0):
    # For every patch other keys, in any number, with prefix tokens first and -1 after the last.
    generator = torch.Generator().manual_seed(seed)
    keys = torch.full((batch, heads, patches, prefix + patches), -1)
    for row in keys.view(-1, prefix + patches):
        count = int(torch.randint(0 if prefix else 1, patches + 1, (), generator=generator))
        row[:prefix] = torch.arange(prefix)
        row[prefix : prefix + count] = prefix + torch.randperm(patches, generator=generator)[:count].sort().values
    return keys


@pytest.mark.parametrize(
    ("decay", "prefix"), [(None, 0), (None, 2), ("violin", 1), ("learned_order", 0), ("learned_order", 2)]
)
def test_lists_of_each_image(cpp, decay, prefix):
    leaves = cpp.make((4, 5), prefix, decay=decay, batch=3, heads=2, width=16)
    keys = lists_of(3, 2, 20, prefix)
    settings = None if decay is None else {"name": decay, **DECAYS[decay].SETTINGS}
    plan = AttentionPlan(LayerKey(2, (4, 5)), prefix, resolve_support(None, 2, 20), settings)

    def results(backend, dtype):
        own = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
        scalars = None if decay is None else {**settings, **{k: x for k, x in own.items() if k not in "qkv"}}
        out, _ = run_plan(AttentionRequest(own["q"], own["k"], own["v"], plan, scalars, key_ids=keys), backend=backend)
        direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
        return [out, *torch.autograd.grad(out, list(own.values()), direction, allow_unused=True)]

    for actual, expected in zip(results("cpp", torch.float32), results("reference", torch.float64), strict=True):
        if expected is not None:
            limit = 1e-5 * max(0.01, expected.abs().max().item())
            assert (actual.double() - expected).abs().max().item() <= limit


def operands(dtype=torch.float32, own=False, patches=8):
    generator = torch.Generator().manual_seed(0)
    width = 8 if dtype == torch.float32 else 32  # whole registers of bfloat16
    q, k, v = (torch.randn(2, 3, patches + 1, width, generator=generator).to(dtype) for _ in range(3))
    keys = lists_of(2 if own else 1, 3, patches, 1).int()
    factor = torch.rand(keys.shape, generator=generator)
    return q, k, v, keys, factor, torch.rand(3, generator=generator)


@pytest.mark.parametrize("own", [False, True])
def test_operators(cpp, own):
    q, k, v, keys, factor, prefix_factor = operands(own=own)
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    factors = [factor.clone().requires_grad_(), prefix_factor.clone().requires_grad_()]
    torch.library.opcheck(torch.ops.hf_sparseprior.listed_forward.default, (*trained, keys, *factors, 1, 0.3))
    out = listed_cpu.listed_attention(*trained, keys, 1, 0.3, *factors)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "patches"), [(torch.float32, 8), (torch.float32, 150), (torch.bfloat16, 150)], ids=str
)
def test_the_number_of_threads_changes_no_bit(cpp, dtype, patches, poison):
    q, k, v, keys, factor, prefix_factor = operands(dtype, patches=patches)
    inputs = [x.requires_grad_() for x in (q, k, v, factor, prefix_factor)]

    def results():
        out = listed_cpu.listed_attention(q, k, v, keys, 1, 0.3, factor, prefix_factor)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = results()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for own, other in zip(results(), expected, strict=True):
                assert own.equal(other) and own.isfinite().all(), threads
    finally:
        torch.set_num_threads(before)


def test_wrong_inputs_are_named(cpp):
    q, k, v, keys, factor, prefix_factor = operands()
    given = {"keys": keys, "factor": factor, "prefix_factor": prefix_factor}
    first = torch.tensor([0])
    for name, changed, message in (
        ("keys", keys.long(), "must be int32"),
        ("keys", keys[:, :2], "must be int32"),
        ("keys", keys.index_fill(3, first, 9), "must be tokens, 0 to 8, or -1"),
        ("keys", keys.index_fill(3, first, -2), "must be tokens, 0 to 8, or -1"),
        ("keys", keys.index_fill(3, first, -1), "a list of keys is empty"),
        ("factor", factor.double(), "must be float32"),
        ("factor", factor[..., :2], "must be float32"),
        ("prefix_factor", prefix_factor[:2], "prefix_factor of shape"),
    ):
        own = {**given, name: changed}
        with pytest.raises(RuntimeError, match=message):
            listed_cpu.listed_attention(q, k, v, own["keys"], 1, 0.3, own["factor"], own["prefix_factor"])
