"""The C++ kernel for dense attention with a decay against `reference` in float64."""

import itertools
import random

import pytest
import torch

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import DECAYS, INIT_PRESETS, init_values

# Token counts around whole vectors of 16 keys and blocks of 32 rows, grids that are not square, one patch.
GRIDS = [(1, 1), (1, 2), (2, 1), (3, 5), (4, 4), (1, 17), (1, 31), (4, 8), (3, 11), (7, 9), (8, 8), (5, 13), (14, 14)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_agrees_with_the_reference(cpp, decay, dtype):
    # Every grid with one prefix or two, others with the next decay and dtype.
    first = 2 * [*DECAYS].index(decay) + (dtype == torch.bfloat16)
    for grid, prefix in list(itertools.product(GRIDS, range(6)))[first % 5 :: 5]:
        cpp.check(cpp.make(grid, prefix, decay=decay, dtype=dtype, batch=2, width=24), "dense", decay, grid, prefix)


@pytest.mark.parametrize("decay", DECAYS)
def test_any_gamma(cpp, decay):
    """From gamma = 0.0001, whose powers leave float32, to gamma = 1."""
    grid = (14, 14)
    betas = [-3.0, -1.0, 0.0, 1.0, 3.0, 8.0, 20.0, *(sum(init_values(name)[2:4]) / 2 for name in INIT_PRESETS)]
    if decay == "violin":
        # Just below and above where positions are cut in two, gamma^195 = exp(-80), and where 16 parts are not enough.
        betas += [0.676, 0.683, -6.55, -6.57, -9.0]
    leaves = cpp.make(grid, 1, decay=decay, width=16)
    for beta in betas:
        cpp.check({**leaves, "beta": torch.full_like(leaves["beta"], beta)}, "dense", decay, grid, 1)
    mixed = torch.linspace(-5, 20, leaves["beta"].numel()).view_as(leaves["beta"])
    cpp.check({**leaves, "beta": mixed}, "dense", decay, grid, 1)
    for alpha in (0.0, -1.5):
        cpp.check({**leaves, "alpha": torch.full_like(leaves["alpha"], alpha)}, "dense", decay, grid, 1)


def test_many_positions(cpp):
    """Blocks of fewer rows, and positions in several segments, of which rows of one block have different ones."""
    grid = (26, 25)
    leaves = cpp.make(grid, 2, decay="violin", width=16, heads=1)
    for beta in (-2.0, 0.0, 1.0, 2.0, 3.0):
        cpp.check({**leaves, "beta": leaves["beta"] + beta - 3}, "dense", "violin", grid, 2)


def test_bfloat16_is_near_float32(cpp):
    """Where products are of bfloat16, probabilities are rounded too, as torch's dense attention does: two roundings."""
    grid = (14, 14)
    leaves = cpp.make(grid, 1, decay="violin", width=64, dtype=torch.bfloat16)
    halves = cpp.attend(leaves, "dense", "violin", grid, 1).float()
    exact = cpp.attend({name: leaf.float() for name, leaf in leaves.items()}, "dense", "violin", grid, 1)
    rounding = (exact.bfloat16().float() - exact).square().mean()
    assert 0 < (halves - exact).square().mean() <= 2.5 * rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_images(cpp, dtype):
    """Up to 8 images share the weights of a block; of large images fewer do."""
    for batch, grid in itertools.product((0, 1, 3, 8, 9), ((3, 3), (16, 16))):
        cpp.check(cpp.make(grid, 1, batch=batch, decay="violin", dtype=dtype, width=48), "dense", "violin", grid, 1)


def test_random_sweep(cpp):
    values = random.Random(0)
    for seed in range(40):
        grid, prefix = (values.randint(1, 9), values.randint(1, 9)), values.randint(0, 5)
        decay = values.choice([*DECAYS])
        sizes = {"heads": values.randint(1, 5), "batch": values.randint(0, 10), "width": values.randint(1, 130)}
        leaves = cpp.make(grid, prefix, decay=decay, prefix_beta=values.random() < 0.5, seed=seed, **sizes)
        leaves["beta"] = 5 * torch.randn(leaves["beta"].shape, generator=torch.Generator().manual_seed(seed))
        cpp.check(leaves, "dense", decay, grid, prefix)


def test_equation_12_written_out(cpp):
    """M with loops over patches and curves, far from what the kernel does."""
    grid, names = (3, 4), ["hilbert", "snake_t"]
    leaves = cpp.make(grid, 1, width=8)
    beta, alpha = torch.tensor([[1.0, 2.0], [0.5, 3.0]]), torch.tensor([0.7, 1.3])
    M = torch.ones(2, 13, 13, dtype=torch.float64)
    for head, j, k in itertools.product(range(2), range(12), range(12)):
        ranks = [curve_rank(name, grid).reshape(-1) for name in names]
        terms = [torch.sigmoid(beta[c, head].double()) ** abs(int(r[j]) - int(r[k])) for c, r in enumerate(ranks)]
        M[head, 1 + j, 1 + k] = sum(terms) / 2
    q, k, v = (leaves[name].double() for name in "qkv")
    logits = alpha.double().view(-1, 1, 1) * (q @ k.transpose(-1, -2)) / 8**0.5 * M
    spec = {"name": "violin", "curves": names, "alpha": alpha, "beta": beta}
    out = ops.attention(*(leaves[n] for n in "qkv"), "dense", spec, num_prefix_tokens=1, grid=grid, backend="cpp")
    torch.testing.assert_close(out.double(), torch.softmax(logits, -1) @ v, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 2])
def test_operators_pass_torchs_own_checks(cpp, prefix):
    leaves = cpp.make((3, 4), prefix, width=16, decay="violin")
    for name in ("decayed_forward", "decayed_backward"):
        arguments = cpp.operator_arguments(name, leaves, "dense", "violin", (3, 4), prefix)
        torch.library.opcheck(getattr(torch.ops.hf_sparseprior, name).default, arguments)
        if name == "decayed_forward":
            trained = [x.clone().requires_grad_() if i in (0, 1, 2, 4, 5, 6) else x for i, x in enumerate(arguments)]
            torch.library.opcheck(torch.ops.hf_sparseprior.decayed_forward.default, tuple(trained))


MEMORY = """
import torch
from hf_sparseprior.attention.functional import attention

def grown(backend, side):
    leaves = [torch.randn(1, 1, side * side, 16).requires_grad_() for _ in range(3)]
    decay = {"name": "manhattan", "beta": torch.ones(1, 1, requires_grad=True)}
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = status("VmRSS")
    attention(*leaves, "dense", decay, backend=backend).sum().backward()
    return status("VmHWM") - before

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024

grown("cpp", 4), grown("reference", 4)
print(grown("cpp", 64), grown("reference", 64))
"""


@pytest.mark.slow
def test_no_memory_for_all_pairs(cpp, in_a_process):
    """Resident memory in MB, of which the scratch memory inside the kernel is a part."""
    kernel, reference = map(float, in_a_process(MEMORY, OMP_NUM_THREADS="1").split())
    array = 4096 * 4096 * 4 / 2**20
    assert reference > array  # a grown peak does show
    assert kernel < array / 4


def test_wrong_inputs_are_named(cpp):
    leaves = cpp.make((3, 3), 1, decay="manhattan")
    with pytest.raises(ValueError, match="no dropout of dense attention"):
        cpp.attend(leaves, "dense", "manhattan", (3, 3), 1, dropout_p=0.1)
    with pytest.raises(ValueError, match="do not return attention weights"):
        cpp.attend(leaves, "dense", "manhattan", (3, 3), 1, need_weights=True)


def test_the_operators_name_wrong_inputs(cpp):
    names = ["q", "k", "v", "positions", "log_gamma", "alpha", "prefix_gamma", "prefix", "scale"]
    leaves = cpp.make((3, 3), 1, decay="manhattan")
    arguments = cpp.operator_arguments("decayed_forward", leaves, "dense", "manhattan", (3, 3), 1)
    given = dict(zip(names, arguments, strict=True))
    for name in names[:-1]:
        value = given[name]
        wrong = [-1, 10, 11] if name == "prefix" else [value[..., :1], value.unsqueeze(0), value.double(), value.long()]
        for bad in wrong:
            with pytest.raises(RuntimeError, match=name):
                torch.ops.hf_sparseprior.decayed_forward(*{**given, name: bad}.values())

    names = ["grad", "q", "k", "v", "positions", "log_gamma", "alpha", "prefix_gamma"]
    *arguments, prefix, scale = cpp.operator_arguments("decayed_backward", leaves, "dense", "manhattan", (3, 3), 1)
    given = dict(zip(names, arguments, strict=True))
    for name in ("grad", "log_gamma", "alpha"):
        for bad in (given[name][..., :1], given[name].double()):
            with pytest.raises(RuntimeError, match=name):
                torch.ops.hf_sparseprior.decayed_backward(*{**given, name: bad}.values(), prefix, scale)
