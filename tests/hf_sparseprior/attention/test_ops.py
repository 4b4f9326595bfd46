import gc
import sys
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS, SUPPORTS, build_mask
from hf_sparseprior.priors.prior import resolve_prior
from tests.hf_sparseprior.attention.attention_cases import (
    DECAY_VARIANTS,
    FILLED,
    PATTERNS,
    assert_equals_reference,
    assert_near,
    backend_cases,
    brute_mask,
    call,
    gradients,
    make_leaves,
    refusal,
    runnable,
)

OTHERS = [name for name in BACKENDS if name != "reference"]
UNCOMPILED = [name for name in OTHERS if name not in ("cpp", "triton")]
GRIDS = [(1, 1), (1, 2), (3, 5), (4, 4)]
# "frames" is for clips: test_time.py; "flex" has no gradients on a CPU: test_flex.py
PYTORCH = [name for name in BACKENDS if name not in ("cpp", "triton", "frames", "flex")]
ZERO_FILLED = [{"name": name, "mask_fill": "zero"} for name in PATTERNS]
HALF = [{"name": name, "mask_fill": fill} for name, fill in product(SUPPORTS, MASK_FILLS)]
HALF_VARIANTS = (None, DECAY_VARIANTS[1], DECAY_VARIANTS[-1])
# One support of each kind: all pairs, diagonals, lists; of both of these one that leaves each patch itself alone.
KINDS = [
    *({"name": name} for name in ("dense", "fibottention", "bigbird")),
    *({"name": "fibottention", "w_min": 1, "w_max": 1}, {"name": "random", "pruning_ratio": 100}),
]
FILLED_KINDS = [{**settings, "mask_fill": fill} for settings, fill in product(KINDS, MASK_FILLS)]


# ---- every backend equals the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "support"), backend_cases(FILLED, backends=OTHERS))
def test_outputs_and_gradients_equal_the_reference(backend, support):
    # Two prefixes with each grid and a variant of a decay with each, others in the next case.
    variants, first = runnable(backend, support), FILLED.index(support)
    for number, (grid, prefix) in enumerate(product(GRIDS, range(4))):
        if (number // 4 + prefix + first // 2) % 2 == 0:
            assert_equals_reference(backend, support, variants[(first + number) % len(variants)], grid, prefix)


@pytest.mark.parametrize(("backend", "support"), backend_cases(ZERO_FILLED, (None,), torch.float32, OTHERS))
def test_a_key_of_the_support_with_a_logit_of_minus_infinity_is_not_one_outside_of_it(backend, support):
    for prefix in (0, 1):
        leaves = make_leaves((3, 4), prefix, dtype=torch.float32)
        with torch.no_grad():  # no number is infinite, their products are
            leaves["k"][:, :, 2:6, 0], leaves["q"][..., 0], leaves["q"][:, :, 4:9, 0] = 1e30, 0.0, -1e30
        assert torch.isneginf(leaves["q"] @ leaves["k"].mT).any()
        out, expected = (call(leaves, support, None, (3, 4), prefix, backend=name) for name in (backend, "reference"))
        assert expected.isfinite().any()
        torch.testing.assert_close(out, expected, equal_nan=True)
        own, exact = ({"v": gradients(each, leaves)["v"]} for each in (out, expected))
        torch.testing.assert_close(own, exact, equal_nan=True)


VALUE_VARIANTS = (None, DECAY_VARIANTS[1])


@pytest.mark.parametrize(("backend", "support"), backend_cases(FILLED_KINDS, VALUE_VARIANTS, torch.float32))
def test_values_may_be_wider_or_narrower_than_queries_and_keys(backend, support):
    """Four channels of the values at a time, it is the attention of values of the queries' width."""
    variants, first = runnable(backend, support, VALUE_VARIANTS, torch.float32), FILLED_KINDS.index(support)
    for value_width in (2, 7):
        variant, prefix = variants[(first + value_width) % len(variants)], value_width % 3
        leaves = make_leaves((3, 4), prefix, variant, dtype=torch.float32)
        leaves["v"] = make_leaves((3, 4), prefix, width=value_width, dtype=torch.float32)["v"]
        exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        out = call(leaves, support, variant, (3, 4), prefix, backend=backend)
        filled = torch.nn.functional.pad(exact["v"], (0, -value_width % 4))
        parts = [
            call({**exact, "v": part}, support, variant, (3, 4), prefix, backend="reference")
            for part in filled.split(4, -1)
        ]
        expected = torch.cat(parts, -1)[..., :value_width]
        assert_near(out, expected, 1e-5)
        own, reference = gradients(out, leaves), gradients(expected, exact)
        for name in leaves:
            assert_near(own[name], reference[name], 1e-5, f"gradient of {name}")


@pytest.mark.parametrize(("backend", "support"), backend_cases(FILLED_KINDS, dtype=torch.float32))
def test_float32_is_near_float64(backend, support):
    cases = {DECAY_VARIANTS[-1]: 0, DECAY_VARIANTS[1]: 1, None: 2}
    for variant in runnable(backend, support, cases, torch.float32):
        assert_equals_reference(backend, support, variant, (4, 5), cases[variant], torch.float32, tolerance=1e-5)


@pytest.mark.parametrize(
    ("dtype", "backend", "support"),
    [
        pytest.param(dtype, *case.values, id=f"{str(dtype).removeprefix('torch.')}-{case.id}")
        for dtype in (torch.bfloat16, torch.float16)
        for case in backend_cases(FILLED_KINDS, HALF_VARIANTS, dtype)
    ],
)
def test_half_precision_is_near_float64(backend, support, dtype):
    for prefix, variant in product((0, 1), runnable(backend, support, HALF_VARIANTS, dtype)):
        exact = make_leaves((4, 5), prefix, variant)
        # The scalars of a decay stay in float32 in a half-precision model.
        leaves = {n: leaf.detach().to(dtype if n in "qkv" else torch.float32) for n, leaf in exact.items()}
        doubles = {name: leaf.double() for name, leaf in leaves.items()}
        expected = call(doubles, support, variant, (4, 5), prefix, backend="reference")
        for leaf in leaves.values():
            leaf.requires_grad_()
        out = call(leaves, support, variant, (4, 5), prefix, backend=backend)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
        for name, grad in gradients(out, leaves).items():
            assert grad.dtype == leaves[name].dtype
            assert grad.isfinite().all()


@pytest.mark.parametrize(("backend", "support"), backend_cases(KINDS, (None, DECAY_VARIANTS[1]), torch.bfloat16))
def test_autocast_is_near_float64(backend, support):
    # Under autocast the projections give bfloat16, as in a Trainer with bf16=True.
    prefixes = {None: 0, DECAY_VARIANTS[1]: 1}
    for variant in runnable(backend, support, prefixes, torch.bfloat16):
        prefix = prefixes[variant]
        leaves = {n: leaf.detach() for n, leaf in make_leaves((4, 5), prefix, variant).items()}
        half = {n: leaf.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, leaf in leaves.items()}
        exact = {name: leaf.double() for name, leaf in half.items()}
        expected = call(exact, support, variant, (4, 5), prefix, backend="reference")
        with torch.autocast("cpu", torch.bfloat16):
            out = call(half, support, variant, (4, 5), prefix, backend=backend)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [name for name in PYTORCH if name != "sdpa"])
def test_logits_are_not_rounded_to_half_precision_under_autocast(backend, dtype):
    # Logits near 40 come in steps of 0.25 in bfloat16; a mask of 0.999 would be lost in them.
    support = {"name": "window", "w": 3}
    leaves = {n: leaf.detach() for n, leaf in make_leaves((3, 3), 1, width=16).items()}
    half = {n: (leaf * (1 if n == "v" else 3)).to(dtype) for n, leaf in leaves.items()}
    outside = call(half, support, None, (3, 3), 1, backend=backend)
    with torch.autocast("cpu", dtype):
        inside = call(half, support, None, (3, 3), 1, backend=backend)
    # One unit in the last place of the output for what the weighted sum of v may round.
    torch.testing.assert_close(inside.double(), outside.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("mask_fill", "variant", "prefix"),
    [
        (mask_fill, variant, (number + (mask_fill == "zero")) % 2)
        for number, variant in enumerate([None, *((name, True, True) for name in DECAYS)])
        for mask_fill in MASK_FILLS
    ],
)
def test_gradcheck_of_the_reference(mask_fill, variant, prefix):
    support = {"name": "fibottention", "w_min": 1, "w_max": 2, "modified": True, "mask_fill": mask_fill}
    leaves = make_leaves((2, 2), prefix, variant, batch=1, heads=2, width=2)
    if prefix == 0:
        leaves.pop("prefix_beta", None)

    def run(*values):
        inputs = dict(zip(leaves, values, strict=True))
        return call(inputs, support, variant, (2, 2), prefix, backend="reference", need_weights=True)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=False)


def penalty_gradients(leaves, *arguments, **options):
    """Gradients of the sum of the squared gradients of attention, by every leaf."""
    out = call(leaves, *arguments, **options)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    inputs = list(leaves.values())
    first = torch.autograd.grad(out, inputs, direction, create_graph=True, allow_unused=True)
    penalty = sum(grad.square().sum() for grad in first if grad is not None)
    second = torch.autograd.grad(penalty, inputs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, second, strict=True)]


# Of the compiled kernels: test_second_derivatives.py.
@pytest.mark.parametrize(("backend", "support"), backend_cases(HALF, HALF_VARIANTS, torch.float32, backends=UNCOMPILED))
def test_second_derivatives_equal_the_reference_or_are_refused(backend, support):
    compared = backend == "sdpa"
    for number, variant in enumerate(
        runnable(backend, support, HALF_VARIANTS, torch.float32), HALF.index(support) // 2
    ):
        prefix = 2 * (number % 2)
        exact = make_leaves((3, 4), prefix, variant)
        leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in exact.items()}
        if backend == "sdpa":
            with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
                penalty_gradients(leaves, support, variant, (3, 4), prefix, backend=backend)
            continue
        own = penalty_gradients(leaves, support, variant, (3, 4), prefix, backend=backend)
        expected = penalty_gradients(exact, support, variant, (3, 4), prefix, backend="reference")
        compared |= expected[0].abs().max() > 1e-3
        for name, one, other in zip(leaves, own, expected, strict=True):
            assert_near(one, other, 1e-4, f"{name} with {prefix} prefix tokens and {variant}")
    assert compared


@pytest.mark.parametrize("backend", ["cpp", "gather"])
def test_transforms_get_a_backend_that_they_can_differentiate(backend):
    # A compiled operator would silently drop the tangent of a forward-mode derivative.
    leaves = make_leaves((3, 4), 1, dtype=torch.float32)
    k, v = leaves["k"].detach(), leaves["v"].detach()
    support = {"name": "random", "pruning_ratio": 50.0}

    def loss(q, backend="auto"):
        return attention(q, k, v, support, num_prefix_tokens=1, grid=(3, 4), backend=backend).square().sum()

    q, direction = leaves["q"].detach(), torch.ones_like(leaves["q"])
    expected = torch.autograd.functional.vjp(loss, q)[1]
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (direction,))[1], (expected * direction).sum())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, direction)
        torch.testing.assert_close(forward_ad.unpack_dual(loss(dual)).tangent, (expected * direction).sum())
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot run .* forward-mode derivatives"):
            loss(dual, backend)


# ---- what a mask means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *product(["reference"], PATTERNS),
        ("diagonal", "fibottention"),
        *product(["sdpa", "gather"], ["random", "bigbird"]),
    ],
)
def test_masked_keys_change_nothing(backend, name):
    # The reference in every way. The others agree with it, so each runs once without and, if it can, once with a decay.
    violin = DECAY_VARIANTS[1]
    cases = [(0, None), (2, violin), *([(0, violin), (2, None)] if backend == "reference" else [])]
    for prefix, variant in cases[: 1 if backend == "sdpa" else None]:
        leaves = {n: leaf.detach() for n, leaf in make_leaves((4, 5), prefix, variant).items()}
        mask = torch.tensor(
            build_mask(name, num_heads=3, num_tokens=20, num_prefix_tokens=prefix, layer=2, grid=(4, 5))
        )
        before = call(leaves, name, variant, (4, 5), prefix, backend=backend)
        for changed in "kv":
            # One batch of copies, of which each has another key changed.
            copies = {n: leaf.repeat(prefix + 20, 1, 1, 1) if n in "qkv" else leaf for n, leaf in leaves.items()}
            for key, part in enumerate(copies[changed].chunk(prefix + 20)):
                part[:, :, key] += 3.0
            after = call(copies, name, variant, (4, 5), prefix, backend=backend).unflatten(0, (-1, len(before)))
            for key, moved in enumerate((after - before).abs().amax((1, 4))):
                blind = ~mask[:, :, key]
                assert not blind.any() or moved[blind].max() < 1e-13
                # And every query that sees the key notices a change of its value.
                assert changed == "k" or (moved[mask[:, :, key]] > 1e-9).all()


@pytest.mark.parametrize(("backend", "support"), backend_cases(ZERO_FILLED, [None], backends=["reference"]))
def test_zero_fill_is_the_published_form(backend, support):
    # The code published with Fibottention multiplies the logits by a 0/1 mask: softmax(logits * mask) v.
    name = support["name"]
    for prefix in (0, 1):
        leaves = make_leaves((5, 5), prefix)
        out = call(leaves, support, None, (5, 5), prefix, backend=backend)
        sizes = {"num_heads": 3, "num_tokens": 25, "num_prefix_tokens": prefix, "grid": (5, 5)}
        mask = torch.tensor(build_mask(name, **sizes, layer=2))
        logits = leaves["q"] @ leaves["k"].transpose(-1, -2) / 2  # head width 4
        expected = torch.softmax(logits * mask, -1) @ leaves["v"]
        assert_near(out, expected, 1e-12)
        # It is another function than the softmax over the support, but where that has all pairs.
        over_support = call(leaves, name, None, (5, 5), prefix, backend="reference")
        assert mask.all() or (out - over_support).abs().max() > 0.01


@pytest.mark.parametrize(("backend", "support"), backend_cases(KINDS, [None], backends=("reference", "diagonal")))
def test_a_decay_without_effect_is_exactly_the_base_model(backend, support):
    # alpha = 1, beta -> infinity (VIOLIN section 3.4): not near the plain attention but the same numbers.
    for number, name in enumerate(DECAYS, KINDS.index(support)):
        dtype = (torch.float32, torch.float64)[number % 2]
        leaves = make_leaves((4, 5), 1, (name, True, True), dtype=dtype)
        with torch.no_grad():
            leaves["alpha"].fill_(1), leaves["beta"].fill_(200.0), leaves["prefix_beta"].fill_(200.0)
        without = call(leaves, support, None, (4, 5), 1, backend=backend)
        assert torch.equal(call(leaves, support, (name, True, True), (4, 5), 1, backend=backend), without), name


@pytest.mark.parametrize(
    ("backend", "support"),
    backend_cases([{"name": n} for n in ("dense", "fibottention", "random")], [DECAY_VARIANTS[1]], torch.float32),
)
def test_a_gamma_of_zero_keeps_the_diagonal_of_m_alone(backend, support):
    # 0^0 is 1: a patch keeps its own logit, all others are 0. Of prefix tokens all logits are 0.
    variant = ("violin", True, True)
    leaves = make_leaves((3, 4), 1, variant, dtype=torch.float32)
    with torch.no_grad():
        leaves["beta"].fill_(-torch.inf), leaves["prefix_beta"].fill_(-torch.inf)
    out = call(leaves, support, variant, (3, 4), 1, backend=backend)
    logits = torch.diag_embed((leaves["q"] * leaves["k"]).sum(-1) * 0.5 * leaves["alpha"].view(-1, 1))
    logits[:, :, 0, 0] = 0
    logits = logits.masked_fill(~torch.tensor(brute_mask(support, 3, (3, 4), 1)), -torch.inf)
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ leaves["v"])
    assert all(grad.isfinite().all() for grad in gradients(out, leaves).values())


def test_layers_and_seeds_choose_who_sees_what():
    leaves = make_leaves((4, 4), 0, heads=6)
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    outs = [attention(*inputs, "fibottention", layer=layer) for layer in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    shifted = attention(*inputs, {"name": "fibottention", "shuffle_seed": 1}, layer=0)
    assert torch.equal(shifted, outs[2])


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "support"), backend_cases(FILLED, (None, DECAY_VARIANTS[1]), need_weights=True))
def test_weights_reproduce_the_output(backend, support):
    # Of prefix and variant one with each grid, others in the next case.
    for number, grid in enumerate(GRIDS, FILLED.index(support)):
        prefix, variant = [*product((0, 2), (None, DECAY_VARIANTS[1]))][number % 4]
        leaves = make_leaves(grid, prefix, variant)
        out, weights = call(leaves, support, variant, grid, prefix, need_weights=True, backend=backend)
        assert weights.shape == (2, 3, prefix + grid[0] * grid[1], prefix + grid[0] * grid[1])
        assert_near(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-12)
        assert_near(weights @ leaves["v"], out, 1e-12)
        mask = torch.tensor(brute_mask(support, 3, grid, prefix))
        if support["mask_fill"] == "neg_inf":
            assert (weights[:, ~mask] == 0).all() and (weights[:, mask] > 0).all()
        expected_out, expected = call(leaves, support, variant, grid, prefix, need_weights=True, backend="reference")
        assert_near(weights, expected, 1e-11)
        # Weights are part of the graph: a loss on attention maps trains as well.
        own, reference = gradients(weights, leaves), gradients(expected, leaves)
        for name in leaves:
            assert_near(own[name], reference[name], 1e-10, name)
        assert_near(out, expected_out, 1e-11)


def test_weights_come_only_when_asked_for():
    leaves = make_leaves((2, 2), 1)
    assert isinstance(call(leaves, "fibottention", None, (2, 2), 1), torch.Tensor)
    out, weights = call(leaves, "fibottention", None, (2, 2), 1, need_weights=True)
    assert out.shape[-1] == 4 and weights.shape[-1] == 5


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "mask_fill"), [("reference", "neg_inf"), ("reference", "zero"), ("diagonal", "neg_inf")]
)
def test_dropout_drops_weights_and_scales_the_others(backend, mask_fill):
    support = {"name": "fibottention", "w_min": 3, "mask_fill": mask_fill}
    leaves = make_leaves((6, 6), 1, ("violin", True, False), batch=8)
    options = {"backend": backend, "need_weights": True}
    _, weights = call(leaves, support, ("violin", True, False), (6, 6), 1, **options)
    torch.manual_seed(0)
    out, dropped = call(leaves, support, ("violin", True, False), (6, 6), 1, **options, dropout_p=0.25)
    kept = dropped != 0
    assert_near(dropped[kept], weights[kept] / 0.75, 1e-12)
    assert 1 - kept[weights > 0].double().mean() == pytest.approx(0.25, abs=0.02)
    assert_near(dropped @ leaves["v"], out, 1e-12)
    torch.manual_seed(0)
    assert torch.equal(call(leaves, support, ("violin", True, False), (6, 6), 1, **options, dropout_p=0.25)[0], out)


@pytest.mark.parametrize("backend", [name for name in PYTORCH if name != "gather"])
def test_dropout_keeps_the_mean(backend):
    leaves = make_leaves((3, 3), 1, batch=1)
    many = {name: leaf.detach().expand(4000, -1, -1, -1) for name, leaf in leaves.items()}
    torch.manual_seed(0)
    mean = call(many, "fibottention", None, (3, 3), 1, backend=backend, dropout_p=0.3).mean(0, keepdim=True)
    plain = call(leaves, "fibottention", None, (3, 3), 1, backend=backend)
    assert (mean - plain).abs().max() < 0.1
    assert (mean - plain).abs().max() > 0  # it did something


# ---- never NaN ------------------------------------------------------------------------------------------------------


@st.composite
def small_supports(draw):
    mask_fill = draw(st.sampled_from(MASK_FILLS))
    w, more, flag = draw(st.integers(1, 30)), draw(st.integers(0, 30)), draw(st.booleans())
    if draw(st.booleans()):
        return {"name": "window", "w": w, "diagonal": flag, "mask_fill": mask_fill}
    return {"name": "fibottention", "w_min": w, "w_max": w + more, "modified": flag, "mask_fill": mask_fill}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    support=small_supports(),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    heads=st.integers(1, 5),
    prefix=st.integers(0, 2),
    variant=st.sampled_from(DECAY_VARIANTS),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_nothing_is_ever_nan(support, grid, heads, prefix, variant, size, seed):
    leaves = make_leaves(grid, prefix, variant, batch=1, heads=heads, width=2, dtype=torch.float32, seed=seed)
    with torch.no_grad():
        leaves["q"].mul_(size)
    expected = call(leaves, support, variant, grid, prefix, backend="reference")
    for backend in BACKENDS:
        if refusal(backend, support, variant, torch.float32) is None:
            out = call(leaves, support, variant, grid, prefix, backend=backend)
            assert out.isfinite().all(), backend
            assert all(grad.isfinite().all() for grad in gradients(out, leaves).values()), backend
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("backend", "support"),
    backend_cases([{"name": "window", "w": 9, "mask_fill": fill} for fill in MASK_FILLS], [None], torch.float32),
)
def test_rows_that_see_everything_take_any_logits(backend, support):
    # Nothing is masked in these rows, so no exp(0) of masked pairs enters them, however small the other values are.
    sizes = (((1, 1), 0), ((1, 1), 1), ((3, 3), 0), ((3, 3), 2))
    for (grid, prefix), logit in product(sizes, (-200.0, -30.0, -5.0, 5.0, 200.0)):
        leaves = make_leaves(grid, prefix, dtype=torch.float32)
        with torch.no_grad():
            leaves["q"].fill_(logit), leaves["k"].uniform_(0.49, 0.51)  # scale 1/2, width 4: logits within 2 %
        expected = call(leaves, "dense", None, grid, prefix, backend="reference")
        out = call(leaves, support, None, grid, prefix, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


# ---- nothing global -------------------------------------------------------------------------------------------------


def test_global_generators_are_left_alone(global_generators_left_alone):
    violin = ("violin", True, True)
    leaves = make_leaves((3, 4), 1, violin, batch=1, dtype=torch.float32)
    with global_generators_left_alone():
        for name in SUPPORTS:
            support = {"name": name, "shuffle_seed": 4}
            for backend in ("auto", *BACKENDS):
                variants = (None, violin)
                if backend != "auto":
                    variants = runnable(backend, support, variants, torch.float32)
                for variant in variants:
                    call(leaves, support, variant, (3, 4), 1, backend=backend)


def global_entries():
    # Entries of every container of the package's modules and classes, and of every functools cache on its functions.
    total = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "hf_sparseprior":
            continue
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in [module, *(cls for cls in classes if cls.__module__.startswith("hf_sparseprior"))]:
            total += len(vars(owner))
            total += sum(len(value) for value in vars(owner).values() if isinstance(value, (dict, list, set)))
    for thing in gc.get_objects():
        if hasattr(type(thing), "cache_info") and str(thing.__module__).startswith("hf_sparseprior"):
            total += thing.cache_info().currsize
    return total


def test_nothing_global_grows():
    def use(height, width):
        for support, variant, prefix in product(SUPPORTS, (None, DECAY_VARIANTS[1]), range(2)):
            call(make_leaves((height, width), prefix, variant), support, variant, (height, width), prefix)
            resolve_prior(support, 3, (height, width))
            build_mask(support, num_heads=3, num_tokens=height * width, layer=height, grid=(height, width))

    use(1, 2)
    before = global_entries()
    for height in range(2, 6):
        use(height, 3)
    assert global_entries() == before


def test_the_measure_of_global_entries_sees_a_cache(monkeypatch):
    before = global_entries()
    monkeypatch.setattr(ops, "some_cache", {1: 2}, raising=False)
    assert global_entries() > before


# ---- grids and errors -----------------------------------------------------------------------------------------------


def test_numpy_integers_are_fine():
    leaves = make_leaves((4, 4), 1)
    expected = call(leaves, {"name": "fibottention", "w_min": 2, "w_max": 5}, None, (4, 4), 1)
    support = {"name": "fibottention", "w_min": np.int64(2), "w_max": np.int64(5)}
    assert torch.equal(call(leaves, support, None, (4, 4), 1), expected)
    assert torch.equal(call(leaves, support, None, (np.int64(4), np.int64(4)), 1), expected)
    assert torch.equal(call(leaves, support, None, (4, 4), np.int64(1)), expected)


def test_a_square_grid_may_be_left_out():
    leaves = make_leaves((4, 4), 1, ("violin", True, False))
    decay = {"name": "violin", "alpha": leaves["alpha"], "beta": leaves["beta"]}
    inputs = (leaves["q"], leaves["k"], leaves["v"], "fibottention", decay, 1)
    assert torch.equal(attention(*inputs), attention(*inputs, grid=(4, 4)))
    leaves = make_leaves((2, 3), 1)
    attention(leaves["q"], leaves["k"], leaves["v"], "fibottention", num_prefix_tokens=1)  # no decay: no grid needed


Q = torch.randn(1, 2, 7, 4)
BETA = torch.zeros(1, 2)


def of_decay(name="manhattan", **tensors):
    return {"decay": {"name": name, **tensors}, "grid": (1, 7)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, r"q of shape \(2, 7, 4\) must be \(batch, heads, tokens, head width\)"),
        ({"k": Q[:, :, :5]}, r"k of shape \(1, 2, 5, 4\) must have the shape of q, \(1, 2, 7, 4\)"),
        ({"k": Q[..., :3]}, r"k of shape \(1, 2, 7, 3\) must have the shape of q, \(1, 2, 7, 4\)"),
        ({"v": Q[:, :, :5]}, r"v of shape \(1, 2, 5, 4\) must have the shape of q, \(1, 2, 7, 4\), but for its width"),
        ({"v": Q.double()}, r"v of dtype torch.float64 must be floating and the dtype of q, torch.float32"),
        ({"q": Q.long()}, r"q of dtype torch.int64 must be floating"),
        ({"k": Q.to("meta")}, r"k on meta must be on the device of q, cpu"),
        ({"num_prefix_tokens": -1}, r"num_prefix_tokens=-1 must be an integer of 0 or more and at most 6"),
        ({"num_prefix_tokens": 7}, r"num_prefix_tokens=7 must be 0 or more and at most 6"),
        ({"num_prefix_tokens": 1.0}, r"num_prefix_tokens=1.0 must be "),
        ({"grid": (2, 3)}, r"grid=\(2, 3\) must be \(height, width\) or \(frames, height, width\) with 7 patch tokens"),
        ({"grid": (7,)}, r"grid=\(7,\) must be \(height, width\) or \(frames, height, width\) with 7 patch tokens"),
        ({"grid": (-7, -1)}, r"grid=\(-7, -1\) must be \(height, width\)"),
        ({"grid": (3.5, 2)}, r"grid=\(3.5, 2\) must be \(height, width\)"),
        ({"dropout_p": -0.1}, r"dropout_p=-0.1 must be between 0 and 1"),
        ({"dropout_p": 1.1}, r"dropout_p=1.1 must be between 0 and 1"),
        ({"layer": -1}, r"layer=-1 must be an integer of 0 or more"),
        ({"layer": 0.5}, r"layer=0.5 must be an integer of 0 or more"),
        ({"support": "fibotention"}, r"support='fibotention' must be one of dense, fibottention"),
        ({"support": {"name": "fibottention", "w_mx": 3}}, r"has no setting 'w_mx'.*mean 'w_max'"),
        (of_decay(name="violn"), r"decay='violn' must be one of violin, manhattan"),
        ({"decay": {"name": "manhattan", "beta": BETA}}, r"grid=None with a decay needs a square number .* got 7"),
        (of_decay(), r"decay beta=None must be a tensor of shape \(1, 2\)"),
        (of_decay(beta=3.0), r"decay beta=3.0 must be a tensor of shape"),
        (of_decay(beta=BETA, name="violin"), r"beta=\(1, 2\) must be a tensor of shape \(8, 2\)"),
        (of_decay(beta=BETA, name="violin", curves=["x"]), r"curves: 'x' must be one of z, z_t"),
        (of_decay(beta=BETA, alpha=torch.ones(3)), r"decay alpha=\(3,\) must be a tensor of shape \(2,\)"),
        (of_decay(beta=BETA, prefix_beta=torch.ones(1)), r"decay prefix_beta=\(1,\) must be a tensor of shape \(2,\)"),
        # A misspelt alpha must not be an attention without alpha.
        (of_decay(beta=BETA, alhpa=torch.ones(2)), r"no setting 'alhpa'.*mean 'alpha'"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": Q, "v": Q, **changes})
