"""The C++ kernel of weights along diagonals, against a loop over pairs in float64, and how operators are called."""

import math
from itertools import pairwise

import pytest
import torch

from hf_sparseprior.attention.kernels import KEPT_BYTES, DecayScalars, _pair_weights
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.kernels import diagonal_cpu, weights_cpu
from hf_sparseprior.kernels.calling import call, records
from hf_sparseprior.patterns.decay import make_decay
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import resolve_prior

NAMES = ("positions_in_order", "signed_offsets", "offset_counts", "pair_begin")


@pytest.fixture(autouse=True)
def kernels_are_there():
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)


def make_plan(grid, support, decay, heads=3):
    prior = resolve_prior({"support": support, "decay": decay}, heads, grid)
    return AttentionPlan(LayerKey(heads, grid, 2), 1, prior["support"], prior["decay"])


PLANS = {
    "violin": lambda: make_plan((7, 9), "fibottention", "violin"),
    "manhattan": lambda: make_plan((6, 6), {"name": "fibottention", "modified": True}, "manhattan"),
    "two_axes": lambda: AttentionPlan(LayerKey(2, (3, 4, 5), time="clip"), 0, *two_axes()),
    "orders": lambda: make_plan((6, 8), {"name": "fibottention", "order": ["hilbert", "z", "snake_t"]}, "violin"),
    "fewer_than_a_vector": lambda: make_plan((2, 5), {"name": "fibottention", "w_min": 5}, "violin"),
}


def two_axes():
    prior = resolve_prior({"support": "fibottention", "decay": "manhattan", "time": "clip"}, 2, (3, 4, 5))
    return prior["support"], prior["decay"]


def arguments_of(plan, seed=0):
    tables = [plan_table(plan, name, torch.device("cpu")) for name in NAMES]
    curves, heads = tables[0].shape[1], plan.num_heads
    generator = torch.Generator().manual_seed(seed)
    log_gamma = -(torch.rand(curves, heads, generator=generator) ** 4)
    return tables, log_gamma, torch.rand(heads, generator=generator) + 0.5


def by_hand(plan, tables, log_gamma, alpha):
    """The weights in a loop over the pairs, in Python's floats."""
    positions, offsets, counts, begin = tables
    weights, first = [math.nan] * plan.offset_pairs, 0
    for head, count in enumerate(counts.tolist()):
        own = positions[head if positions.shape[0] > 1 else 0].tolist()
        for number in range(first, first + count):
            offset = int(offsets[number])
            for row in range(plan.num_tokens - offset if offset >= 0 else 0):
                terms = [
                    math.exp(float(log_gamma[c, head]) * sum(abs(axis[row + offset] - axis[row]) for axis in curve))
                    for c, curve in enumerate(own)
                ]
                weights[int(begin[number]) + row] = float(alpha[head]) * sum(terms) / len(terms)
        first += count
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("name", PLANS)
def test_weights_and_gradients(name):
    plan = PLANS[name]()
    assert plan.offset_pairs > 10
    assert name != "orders" or plan_table(plan, NAMES[0], torch.device("cpu")).shape[0] == plan.num_heads
    tables, *scalars = arguments_of(plan)
    leaves = [x.clone().requires_grad_() for x in scalars]
    found = weights_cpu.pair_weights(*tables, *leaves, plan.offset_pairs)
    torch.testing.assert_close(found.double(), by_hand(plan, tables, *scalars), rtol=1e-5, atol=1e-30)

    grad = torch.randn(plan.offset_pairs, generator=torch.Generator().manual_seed(1))
    found.backward(grad)
    exact = [x.double().requires_grad_() for x in scalars]
    options = dict(zip(("positions", "offsets", "counts", "pair_begin"), tables, strict=True))
    weights_cpu.weigh(*exact, **options, pairs=plan.offset_pairs).backward(grad.double())
    for leaf, other in zip(leaves, exact, strict=True):
        assert other.grad.abs().max() > 0.01
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", PLANS)
def test_weights_in_plain_pytorch_are_the_same(name, monkeypatch):
    # What runs on a GPU.
    plan = PLANS[name]()
    _, *scalars = arguments_of(plan)
    results = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(diagonal_cpu, "ready", lambda: "none")
            monkeypatch.delattr(weights_cpu, "pair_weights")
        leaves = [x.clone().requires_grad_() for x in scalars]
        weights = _pair_weights(plan, DecayScalars(*leaves, torch.ones_like(scalars[1])))
        (weights * torch.linspace(-1, 2, plan.offset_pairs)).sum().backward()
        results.append([weights.detach(), *(leaf.grad for leaf in leaves)])
    for kernel, plain in zip(*results, strict=True):
        torch.testing.assert_close(plain, kernel, rtol=2e-5, atol=2e-5)


def test_a_gamma_of_zero_leaves_only_patches_at_a_distance_of_zero():
    plan = PLANS["violin"]()
    tables, log_gamma, alpha = arguments_of(plan)
    log_gamma[:] = -1e30  # as `decay.log_gamma` gives it
    weights = weights_cpu.pair_weights(*tables, log_gamma, alpha, plan.offset_pairs)
    assert weights.max() < 1e-30 and torch.isfinite(weights).all()


def test_threads_change_no_bit():
    plan = make_plan((20, 20), "fibottention", "violin", heads=6)
    tables, *scalars = arguments_of(plan)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_() for x in scalars]
            weights = weights_cpu.pair_weights(*tables, *leaves, plan.offset_pairs)
            weights.sum().backward()
            results.append([weights.detach(), *(leaf.grad for leaf in leaves)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_torch_knows_the_operators():
    plan = PLANS["violin"]()
    tables, *scalars = arguments_of(plan)
    leaves = [x.requires_grad_() for x in scalars]
    torch.library.opcheck(torch.ops.hf_sparseprior.pair_weights.default, (*tables, *leaves, plan.offset_pairs))


def test_what_does_not_fit_is_refused():
    plan = PLANS["violin"]()
    tables, *scalars = arguments_of(plan)
    for place, change, message in (
        (0, lambda x: x[0], "positions of shape"),
        (2, lambda x: x - 1, "counts of"),
        (2, lambda x: -x, "counts must be 0 or more"),
        (3, lambda x: x + 1, "pair_begin"),
        (4, lambda x: x.t(), "log_gamma of shape"),
        (5, lambda x: x.double(), "alpha of shape"),
    ):
        arguments = [*tables, *scalars, plan.offset_pairs]
        arguments[place] = change(arguments[place])
        with pytest.raises(RuntimeError, match=message):
            weights_cpu.pair_weights(*arguments)


# ---- lists ----------------------------------------------------------------------------------------------------------


def lists_of(seed, images=1, heads=2, patches=11, places=18, prefix=2, curves=3, axes=2):
    """Positions, lists of random length and scalars."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 30, (curves, axes, patches), generator=generator).float()
    keys = torch.randint(0, patches + prefix, (images, heads, patches, places), generator=generator).int()
    lengths = torch.randint(1, places + 1, (images, heads, patches, 1), generator=generator)
    keys[torch.arange(places) >= lengths] = -1
    log_gamma = -(torch.rand(curves, heads, generator=generator) ** 4)
    alpha, prefix_gamma = torch.rand(2, heads, generator=generator) + 0.2
    return positions, keys, prefix, log_gamma, alpha, prefix_gamma


def lists_by_hand(positions, keys, prefix, log_gamma, alpha, prefix_gamma):
    out = torch.zeros(keys.shape, dtype=torch.float64)
    places, curves = positions.tolist(), positions.shape[0]
    for image, head, row, place in torch.cartesian_prod(*map(torch.arange, keys.shape)).tolist():
        key = int(keys[image, head, row, place])
        if key < 0:
            continue
        weight = float(prefix_gamma[head])
        if key >= prefix:
            distances = [sum(abs(axis[row] - axis[key - prefix]) for axis in curve) for curve in places]
            weight = sum(math.exp(float(log_gamma[c, head]) * distances[c]) for c in range(curves)) / curves
        out[image, head, row, place] = float(alpha[head]) * weight
    return out


@pytest.mark.parametrize(
    "case", [{}, {"images": 3}, {"prefix": 0, "axes": 1, "places": 5}, {"places": 16, "curves": 1}]
)
def test_lists_and_their_gradients(case):
    positions, keys, prefix, *scalars = lists_of(len(case), **case)
    leaves = [x.clone().requires_grad_() for x in scalars]
    found = weights_cpu.listed_weights(positions, keys, prefix, *leaves)
    torch.testing.assert_close(found.double(), lists_by_hand(positions, keys, prefix, *scalars), rtol=1e-5, atol=1e-30)

    grad = torch.randn(keys.shape, generator=torch.Generator().manual_seed(1))
    found.backward(grad)
    exact = [x.double().requires_grad_() for x in scalars]
    weights = weights_cpu.weigh_lists(*exact, positions=positions.double(), keys=keys, prefix=prefix)
    weights.backward(grad.double())
    assert exact[0].grad.abs().max() > 0.01 and (prefix == 0 or exact[2].grad.abs().max() > 0.01)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=2e-5, atol=2e-5)


def test_torch_knows_the_operator_of_lists():
    positions, keys, prefix, *scalars = lists_of(3)
    leaves = [x.requires_grad_() for x in scalars]
    torch.library.opcheck(torch.ops.hf_sparseprior.listed_weights.default, (positions, keys, prefix, *leaves))


def test_lists_that_do_not_fit_are_refused():
    for place, change, message in (
        (0, lambda x: x[0], "positions of shape"),
        (1, lambda x: x.long(), "keys of shape"),
        (1, lambda x: x + 3, "keys from"),
        (1, lambda x: x - 1, "keys from -2"),
        (3, lambda x: x.t(), "log_gamma of shape"),
        (5, lambda x: x[:1], "prefix_gamma of shape"),
    ):
        arguments = list(lists_of(2))
        arguments[place] = change(arguments[place])
        with pytest.raises(RuntimeError, match=message):
            weights_cpu.listed_weights(*arguments)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_only_calls_that_record_go_through_autograd():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    assert records(y, x, None) and not records(y, None)
    with torch.no_grad():
        assert not records(x)
    assert call(torch.mul, True, x, y).requires_grad
    assert not call(torch.mul, False, x, y).requires_grad


def test_layers_of_a_model_share_what_follows_from_the_decay():
    device = torch.device("cpu")
    plans = [make_plan((6, 6), "fibottention", "violin") for _ in range(2)]
    other = make_plan((6, 7), "fibottention", "violin")
    first, second, third = (plan_table(plan, "positions_in_order", device) for plan in (*plans, other))
    assert first is second and first.shape != third.shape
    assert torch.equal(first[0].long(), torch.tensor(plans[0].build_table("positions")))
    # Orders of heads are a plan's own.
    own = [plan_table(PLANS["orders"](), "positions_in_order", device) for _ in range(2)]
    assert own[0] is not own[1] and torch.equal(*own)


# ---- what is kept of a decay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["violin", "fibottention+violin", "window+manhattan"])
def test_what_is_kept_of_a_decay_follows_its_scalars(prior):
    """However they change: by an optimizer, through `.data`, in another dtype, or as another decay of the layer."""
    resolved = resolve_prior(prior, 2, (5, 6))
    layer = PriorAttention(2, resolved).eval()
    q = torch.randn(1, 2, 31, 8, generator=torch.Generator().manual_seed(0))
    request = AttentionRequest(q, q, q, layer.plan((5, 6), 1))
    seen = []

    def check():
        for _ in range(2):
            with torch.no_grad():
                out, expected = (layer.attend(request, backend)[0] for backend in ("cpp", "reference"))
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        seen.append(out)

    decay = layer.decay_bias
    check()
    assert request.plan.of_decay
    decay.beta.data.sub_(4.0)
    check()
    decay.alpha.data.mul_(3.0)
    check()
    optimizer = torch.optim.SGD(decay.parameters(), lr=5.0)
    layer.attend(request, "cpp")[0].square().sum().backward()
    optimizer.step()
    check()
    layer.decay_bias = make_decay(resolved["decay"], 2)
    check()
    layer.decay_bias.double()
    layer.decay_bias.beta.data.sub_(2.0)
    check()
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))
    with torch.inference_mode():
        layer.attend(request, "cpp")
    layer.attend(AttentionRequest(*[q.clone().requires_grad_()] * 3, request.plan), "cpp")[0].sum().backward()


def test_nothing_large_is_kept_of_a_decay():
    resolved = resolve_prior({"support": {"name": "window", "w": 40}, "decay": "violin"}, 4, (40, 40))
    layer = PriorAttention(4, resolved).eval()
    q = torch.zeros(1, 4, 1600, 2)
    request = AttentionRequest(q, q, q, layer.plan((40, 40)))
    with torch.no_grad():
        layer.attend(request, "cpp")
    assert request.plan.offset_pairs * 4 > KEPT_BYTES and not request.plan.of_decay
