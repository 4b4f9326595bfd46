"""Gradients of gradients of the compiled kernels against `reference` in float64."""

import pytest
import torch

from hf_sparseprior.attention.functional import attention, run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS, LayerKey, resolve_support
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior

SUPPORTS = [
    "dense",
    *({"name": "fibottention", "mask_fill": fill} for fill in MASK_FILLS),
    {"name": "fibottention", "w_min": 1, "w_max": 1},  # heads without an offset: patches that see themselves alone
    {"name": "random", "pruning_ratio": 60.0},
]


def direction(like, seed):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(like)


def second_derivatives(out, leaves):
    """Gradients, and those of a function of the gradients, by every leaf."""
    names, inputs = list(leaves), list(leaves.values())
    first = torch.autograd.grad(out, inputs, direction(out, 1), create_graph=True, allow_unused=True)
    assert all(grad.requires_grad for grad in first if grad is not None)
    terms = [(grad.square() * direction(grad, 2)).sum() for grad in first if grad is not None]
    second = torch.autograd.grad(sum(terms), inputs, allow_unused=True)
    grads = [0 * leaf if grad is None else grad for leaf, grad in zip(inputs * 2, [*first, *second], strict=True)]
    return dict(zip([*names, *(f"second {name}" for name in names)], grads, strict=True))


def assert_equal(own, expected, tolerance=1e-4):
    assert own.keys() == expected.keys() and any(expected[name].any() for name in own if name.startswith("second"))
    for name, value in expected.items():
        assert own[name].dtype in (torch.float32, value.dtype)
        difference = (own[name].double() - value).abs().max().item()
        assert difference <= tolerance * max(0.01, value.abs().max().item()), name


def check(kernels, support, decay, prefix, grid=(3, 4)):
    values = kernels.make(grid, prefix, width=6, decay=decay)

    def found(dtype, backend):
        leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in values.items()}
        out = kernels.attend(leaves, support, decay, grid, prefix, backend=backend)
        return second_derivatives(out, leaves)

    assert_equal(found(torch.float32, kernels.backend), found(torch.float64, "reference"))


@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_cpp_equals_the_reference(cpp, support):
    for decay in DECAYS if support == "dense" else [None, *DECAYS]:  # no kernel runs dense attention without a decay
        for prefix in (0, 2):
            check(cpp, support, decay, prefix)


@pytest.mark.parametrize("support", SUPPORTS[:-1], ids=str)
def test_triton_equals_the_reference(kernels, support):
    cases = [("violin", 0), ("manhattan", 2)] if support == "dense" else [(None, 2), ("violin", 0)]
    for decay, prefix in cases:
        check(kernels, support, decay, prefix)


def check_dropout(kernels, decay, prefix):
    """What dropout multiplied each weight with shows where unit vectors are the values: the output is the weights."""
    grid, tokens = (3, 4), prefix + 12
    support = "fibottention" if kernels.backend == "cpp" or decay is None else "dense"
    leaves = kernels.make(grid, prefix, width=16, decay=decay)
    unit = torch.eye(tokens, 16, device=kernels.device).expand_as(leaves["v"])

    def attend(dropout_p, **changes):
        torch.manual_seed(3)
        return kernels.attend({**leaves, **changes}, support, decay, grid, prefix, dropout_p=dropout_p)

    kept, plain = (attend(dropout_p, v=unit)[..., :tokens] for dropout_p in (0.4, 0.0))
    factor = torch.where(plain > 0, kept / plain.clamp_min(1e-30), 0.0).double()
    assert 0.1 < (factor == 0).double().mean() < 0.95
    for leaf in leaves.values():
        leaf.requires_grad_()
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    options = {"backend": "reference", "need_weights": True}
    _, weights = kernels.attend(exact, support, decay, grid, prefix, **options)
    expected = second_derivatives((weights * factor) @ exact["v"], exact)
    assert_equal(second_derivatives(attend(0.4), leaves), expected)


@pytest.mark.parametrize(("decay", "prefix"), [(None, 0), ("manhattan", 2)])
def test_cpp_with_dropout(cpp, decay, prefix):
    check_dropout(cpp, decay, prefix)


@pytest.mark.parametrize(("decay", "prefix"), [(None, 0), ("manhattan", 2)])
def test_triton_with_dropout(kernels, decay, prefix):
    check_dropout(kernels, decay, prefix)


@pytest.mark.parametrize(("decay", "prefix"), [(None, 1), ("violin", 0), ("violin", 1)])
def test_lists_of_each_image(cpp, decay, prefix):
    settings = None if decay is None else {"name": decay, **DECAYS[decay].SETTINGS}
    values = cpp.make((3, 3), prefix, decay=decay, batch=2, width=6)
    keys = torch.tensor([[0, prefix + 2, prefix + 5, -1], [prefix + 1, prefix + 8, -1, -1]] * 9).view(2, 1, 9, 4)
    keys = torch.cat([keys, keys.flip(2)], 1)
    plan = AttentionPlan(LayerKey(2, (3, 3)), prefix, resolve_support(None, 2, 9), settings)

    def found(dtype, backend):
        own = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in values.items()}
        scalars = None if decay is None else {**settings, **{k: x for k, x in own.items() if k not in "qkv"}}
        request = AttentionRequest(own["q"], own["k"], own["v"], plan, scalars, key_ids=keys)
        return second_derivatives(run_plan(request, backend)[0], own)

    assert_equal(found(torch.float32, "cpp"), found(torch.float64, "reference"))


def test_one_tensor_in_three_places(cpp):
    """As queries, keys and values at once it gets the sum of three gradients, not each of them three times."""
    tokens = torch.randn(1, 2, 17, 8, generator=torch.Generator().manual_seed(0))

    def found(dtype, backend):
        leaf = tokens.to(dtype).requires_grad_()
        out = attention(leaf, leaf, leaf, "fibottention", num_prefix_tokens=1, backend=backend)
        return second_derivatives(out, {"x": leaf})

    assert_equal(found(torch.float32, "cpp"), found(torch.float64, "reference"))


def test_third_derivatives(cpp):
    values = cpp.make((2, 3), 1, width=4, decay="violin")

    def found(dtype, backend):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in values.values()]
        out = cpp.attend(dict(zip(values, leaves, strict=True)), "fibottention", "violin", (2, 3), 1, backend=backend)
        for seed in range(3):
            grads = torch.autograd.grad(out, leaves, direction(out, seed), create_graph=True, allow_unused=True)
            out = torch.stack([grad.square().sum() for grad in grads if grad is not None])
        return {"second": out}

    assert_equal(found(torch.float32, "cpp"), found(torch.float64, "reference"), 1e-3)


def test_compiled_layers_refuse_a_second_derivative(cpp):
    """By torch itself, and nothing that is not needed gets into the compiled backward pass."""
    layer = SparsePriorAttention(16, 2, resolve_prior("fibottention", 2, (4, 4)))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(1, 17, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        out = run(hidden, (4, 4), 1, backend="cpp")[0]
        (grad,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
        grad.square().sum().backward()
