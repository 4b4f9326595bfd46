"""Counters of torch and mmengine count the pairs that a mask has, by products of matrices."""

import os
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hf_sparseprior as sp
from hf_sparseprior.analysis.flop_counters import flop_handles
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.kernels import diagonal_cpu
from hf_sparseprior.patterns.supports import LayerKey, resolve_support
from tests.processes import run_script

HEADS, WIDTH = 3, 8
SUPPORTS = {
    "fibottention": {"name": "fibottention", "w_min": 2, "w_max": 9},
    "zero fill": {"name": "fibottention", "w_min": 2, "w_max": 9, "mask_fill": "zero"},
    "wide": {"name": "fibottention", "w_min": 20, "w_max": 33},  # some patches see themselves alone
}


@pytest.fixture(params=["cpp", "triton"])
def backend(request, monkeypatch):
    if request.param == "cpp":
        if (reason := diagonal_cpu.ready()) is not None:
            assert not os.environ.get("CI_NEEDS_KERNELS"), reason
            pytest.skip(reason)
    else:
        pytest.importorskip("triton")
        if not torch.cuda.is_available():
            monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


def counted(backend, support, prefix, grid, decay=None):
    """FLOPs of forward, and of forward and backward."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    tokens = prefix + grid[0] * grid[1]
    q, k, v = (torch.randn(2, HEADS, tokens, WIDTH, device=device, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as forward:
        out = attention(q, k, v, support, decay, num_prefix_tokens=prefix, grid=grid, backend=backend)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("backend", "name", "prefix"),
    [
        *(("cpp", "fibottention", 2), ("cpp", "zero fill", 0), ("cpp", "wide", 0), ("cpp", "wide", 2)),
        *(("triton", "fibottention", 2), ("triton", "zero fill", 2), ("triton", "wide", 0)),
    ],
    indirect=["backend"],
)
def test_pairs_along_diagonals_are_counted(backend, name, prefix):
    grid = (5, 6)
    support = resolve_support(SUPPORTS[name], HEADS, 30)
    plan = AttentionPlan(LayerKey(HEADS, grid), prefix, support)
    mask = plan_table(plan, "mask", torch.device("cpu"))
    pairs = int(mask.expand(HEADS, -1, -1).sum())
    forward, backward = counted(backend, SUPPORTS[name], prefix, grid)
    product = 2 * 2 * pairs * WIDTH  # of two images; a multiply-add is two
    assert forward == 2 * product
    assert backward == (4 if backend == "cpp" else 5) * product


def test_pairs_of_a_decay_over_all_pairs_are_counted(backend):
    forward, backward = counted(backend, "dense", 1, (3, 4), {"name": "manhattan", "beta": torch.ones(1, HEADS)})
    product = 2 * 2 * HEADS * 13 * 13 * WIDTH
    assert (forward, backward) == (2 * product, 5 * product)


def model_of(prior):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=64, patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=HEADS, num_labels=3,
        intermediate_size=48, prior=prior,
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config).eval()


def attention_of_model(prior):
    """Multiply-adds of two layers' attention for two images, as a mask says."""
    if prior in ("dense", "violin"):
        return 2 * 2 * HEADS * 65 * 65 * WIDTH * 2
    support = resolve_support(prior, HEADS, 64)
    pairs = [
        plan_table(AttentionPlan(LayerKey(HEADS, (8, 8), n), 1, support), "mask", torch.device("cpu")) for n in (0, 1)
    ]
    return 2 * sum(int(mask.expand(HEADS, -1, -1).sum()) for mask in pairs) * WIDTH * 2


@pytest.mark.parametrize("prior", ["dense", "fibottention", "violin"])
def test_counters_agree_with_one_another_on_a_model(prior, monkeypatch):
    if (reason := diagonal_cpu.ready()) is not None:
        pytest.skip(reason)
    analysis = pytest.importorskip("mmengine.analysis.complexity_analysis")
    model, images = model_of(prior), torch.randn(2, 3, 64, 64)
    if prior != "dense":  # of so few patches a mask is faster, and all pairs are computed
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")
    # torch does not count its own flash attention on CPUs.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    linear = torch.nn.Module()
    linear.model, linear.forward = model, lambda images: model(images).logits
    with warnings.catch_warnings(), flop_handles() as handles:
        warnings.simplefilter("ignore")
        found = analysis.FlopAnalyzer(linear, images).set_op_handle(**handles).by_operator()
    own = sum(found[name] for name in ("diagonal_forward", "decayed_forward", "scaled_dot_product_attention"))
    assert own == attention_of_model(prior)
    products = own + found["linear"] + found["conv"]
    assert counter.get_total_flops() == 2 * products


def test_a_first_call_that_is_counted_counts(tmp_path):
    """Kernels are loaded by their first call, after the counter has copied torch's formulas."""
    code = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from hf_sparseprior.attention.functional import attention

q, decay = torch.randn(1, 2, 17, 8), {"name": "manhattan", "beta": torch.ones(1, 2)}
options = {"num_prefix_tokens": 1, "grid": (4, 4), "backend": "cpp" if BUILDS else "reference"}
with FlopCounterMode(display=False) as counter:
    attention(q, q, q, "dense", decay, **options)
print(counter.get_total_flops())
"""
    builds = diagonal_cpu.ready() is None
    done = run_script(code.replace("BUILDS", str(builds)), folder=tmp_path, package=True)
    assert int(done.stdout) == 2 * 2 * 2 * 17 * 17 * 8
