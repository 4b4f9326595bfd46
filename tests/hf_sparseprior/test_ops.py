import dataclasses
import gc
import logging
import math
import sys
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_sparseprior import compiled_kernels, ops
from hf_sparseprior.attention_plan import AttentionPlan, plan_table
from hf_sparseprior.attention_request import AttentionRequest
from hf_sparseprior.backend_choice import BACKENDS, slower_than_dense
from hf_sparseprior.compiled_kernels import diagonal_cpu, triton_device
from hf_sparseprior.curves import curve_names, curve_rank
from hf_sparseprior.decay import DECAYS, resolve_decay
from hf_sparseprior.ops import attention, run_plan
from hf_sparseprior.prior import resolve_prior
from hf_sparseprior.supports import (
    MASK_FILLS,
    SUPPORTS,
    build_mask,
    has_pairs,
    head_offsets,
    layer_order,
    layer_pairs,
    resolve_support,
)

OTHERS = [name for name in BACKENDS if name != "reference"]
# These take any dtype on any device; what compiled kernels do is tested in kernels/.
PYTORCH = [name for name in BACKENDS if name not in ("cpp", "triton")]
PATTERNS = [name for name in SUPPORTS if name != "dense"]
ON_DIAGONALS = [name for name in PATTERNS if not has_pairs(name)]

# Settings besides the defaults: small windows for small grids, empty heads, the diagonal left out, everything kept.
MORE = {
    "fibottention": [
        {"w_min": 1, "modified": True},
        {"w_min": 1, "w_max": 1},
        {"w_min": 2, "w_max": 4, "shuffle_seed": None},
    ],
    "window": [{"w": 2, "diagonal": False}, {"w": 0}],
    "strided": [{"stride": 3, "local": 1}],
    "random": [{"pruning_ratio": 70.0, "per_head": True, "seed": 3}, {"pruning_ratio": 100}],
    "bigbird": [{"random_keys": 2, "per_head": True}, {"pruning_ratio": 60}],
}
CASES = [
    pytest.param({"name": name, **more}, id="-".join([name, *(f"{key}={value}" for key, value in more.items())]))
    for name in SUPPORTS
    for more in [{}, *MORE.get(name, [])]
]
# (decay, with alpha, with prefix_beta)
DECAY_VARIANTS = [None, *product(DECAYS, (True, False), (True, False))]
GRIDS = [(1, 1), (1, 2), (3, 5), (4, 4)]


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)


def make_leaves(grid, prefix, variant=None, *, batch=2, heads=3, width=4, dtype=torch.float64, seed=0):
    # q, k, v and the decay's tensors, all of them leaves with gradients; beta is low enough that M is far from 1.
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + grid[0] * grid[1], width)
    leaves = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in "qkv"}
    if variant is not None:
        name, with_alpha, with_prefix_beta = variant
        num_curves = DECAYS[name].positions(DECAYS[name].SETTINGS, (1, 1)).shape[0]
        leaves["beta"] = torch.randn(num_curves, heads, generator=generator, dtype=torch.float64) + 1
        if with_alpha:
            leaves["alpha"] = torch.randn(heads, generator=generator, dtype=torch.float64) + 1
        if with_prefix_beta:
            leaves["prefix_beta"] = torch.randn(heads, generator=generator, dtype=torch.float64)
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()}


def call(leaves, support, variant, grid, prefix, **options):
    decay = None if variant is None else {"name": variant[0], **{k: t for k, t in leaves.items() if k not in "qkv"}}
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    return attention(*inputs, support, decay, num_prefix_tokens=prefix, grid=grid, layer=2, **options)


def call_if_possible(backend, *arguments, **options):
    try:
        return call(*arguments, **options, backend=backend)
    except ValueError as error:
        assert f"backend='{backend}' cannot run this attention: " in str(error)
        return None


def gradients(out, leaves, seed=1):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * direction).sum(), leaves.values(), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def assert_near(actual, expected, tolerance, what=""):
    # Relative to the largest entry; what ought to be 0 may be rounding of values of about 1.
    assert actual.shape == expected.shape
    limit = tolerance * max(0.01, expected.abs().max().item())
    assert (actual.double() - expected.double()).abs().max().item() <= limit, what


def brute_mask(support, heads, grid, prefix, layer=2):
    # attended[h][j][k] from the definition of the support, for the heads of one layer.
    num_tokens = grid[0] * grid[1]
    offsets = head_offsets(support, num_heads=heads, num_tokens=num_tokens)
    resolved = resolve_support(support, heads, num_tokens)
    pairs = layer_pairs(resolved, num_heads=heads, num_tokens=num_tokens, layer=layer)
    total = prefix + num_tokens
    masks = []
    for head, number in enumerate(layer_order(heads, layer, resolved["shuffle_seed"])):
        own = set(offsets[number])
        mask = [[j < prefix or k < prefix or abs(j - k) in own for k in range(total)] for j in range(total)]
        for j, k in [] if pairs is None else pairs[head]:
            mask[prefix + j][prefix + k] = True
        for j in range(total):
            mask[j][j] = mask[j][j] or not any(mask[j])
        masks.append(mask)
    return masks


def brute_weights(variant, leaves, heads, grid, prefix):
    # alpha * M[h][j][k], prefix rows and columns included.
    total = prefix + grid[0] * grid[1]
    if variant is None:
        return [[[1.0] * total for _ in range(total)] for _ in range(heads)]
    name = variant[0]
    positions = DECAYS[name].positions(resolve_decay(name), grid).tolist()
    alpha = leaves["alpha"].tolist() if "alpha" in leaves else [1.0] * heads

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def weight(h, j, k):
        if j < prefix or k < prefix:
            return sigmoid(leaves["prefix_beta"][h].item()) if "prefix_beta" in leaves else 1.0
        distances = [sum(abs(axis[j - prefix] - axis[k - prefix]) for axis in curve) for curve in positions]
        gammas = [sigmoid(beta[h]) for beta in leaves["beta"].tolist()]
        return sum(gamma**d for gamma, d in zip(gammas, distances, strict=True)) / len(distances)

    return [[[alpha[h] * weight(h, j, k) for k in range(total)] for j in range(total)] for h in range(heads)]


def brute_attention(leaves, mask, weights, mask_fill, scale):
    # softmax over the attended pairs, or over all pairs with 0 for the others; Python floats and loops.
    q, k, v = (leaves[name].tolist() for name in "qkv")
    outs, all_probs = [], []
    for q_H, k_H, v_H in zip(q, k, v, strict=True):
        for h, (q_T, k_T, v_T) in enumerate(zip(q_H, k_H, v_H, strict=True)):
            for j, query in enumerate(q_T):
                exps = []
                for t, key in enumerate(k_T):
                    logit = scale * sum(a * b for a, b in zip(query, key, strict=True)) * weights[h][j][t]
                    masked = 1.0 if mask_fill == "zero" else 0.0
                    exps.append(math.exp(logit) if mask[h][j][t] else masked)
                probs = [e / sum(exps) for e in exps]
                all_probs.append(probs)
                outs.append([sum(p * row[d] for p, row in zip(probs, v_T, strict=True)) for d in range(len(query))])
    shape = leaves["q"].shape
    return torch.tensor(outs).view(shape), torch.tensor(all_probs).view(*shape[:3], shape[2])


# ---- the reference is the specification -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("support", CASES)
def test_reference_matches_loops(support, mask_fill):
    torch.set_default_dtype(torch.float64)
    try:
        support = {**support, "mask_fill": mask_fill}
        for grid, prefix, variant in product([(1, 1), (1, 3), (3, 2), (3, 3)], (0, 1, 3), DECAY_VARIANTS):
            leaves = make_leaves(grid, prefix, variant, batch=1, heads=2, width=2)
            mask = brute_mask(support, 2, grid, prefix)
            weights = brute_weights(variant, leaves, 2, grid, prefix)
            out, probs = brute_attention(leaves, mask, weights, mask_fill, scale=0.7)
            options = {"backend": "reference", "scale": 0.7, "need_weights": True}
            own_out, own_probs = call(leaves, support, variant, grid, prefix, **options)
            assert_near(own_out, out, 1e-13)
            assert_near(own_probs, probs, 1e-13)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_scale_is_one_over_the_root_of_the_head_width():
    leaves = make_leaves((2, 3), 1, width=9)
    default = call(leaves, "dense", None, (2, 3), 1)
    assert torch.equal(default, call(leaves, "dense", None, (2, 3), 1, scale=1 / 3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("support", CASES)
def test_equal_logits_give_plain_means(support, backend):
    # With q = 0 the softmax is uniform: a mean over the support, or over everything where masked logits are 0.
    leaves = make_leaves((3, 4), 1)
    leaves["q"] = torch.zeros_like(leaves["q"])
    mask = torch.tensor(brute_mask(support, 3, (3, 4), 1), dtype=torch.float64)
    kept = call_if_possible(backend, leaves, {**support, "mask_fill": "neg_inf"}, None, (3, 4), 1)
    everything = call_if_possible(backend, leaves, {**support, "mask_fill": "zero"}, None, (3, 4), 1)
    if kept is not None:
        assert_near(kept, (mask / mask.sum(-1, keepdim=True)) @ leaves["v"], 1e-12)
    if everything is not None:
        assert_near(everything, leaves["v"].mean(2, keepdim=True).expand_as(everything), 1e-12)


# ---- every backend equals the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("backend", OTHERS)
def test_outputs_and_gradients_equal_the_reference(backend, support, mask_fill):
    support = {**support, "mask_fill": mask_fill}
    for number, (grid, prefix) in enumerate(product(GRIDS, range(4))):
        # No decay and three of the variants each time; all of them come up over the grids and prefixes.
        for step in (0, 3 * number, 3 * number + 1, 3 * number + 2):
            variant = DECAY_VARIANTS[1 + step % (len(DECAY_VARIANTS) - 1)] if step else None
            leaves = make_leaves(grid, prefix, variant)
            out = call_if_possible(backend, leaves, support, variant, grid, prefix)
            if out is None:
                continue
            expected = call(leaves, support, variant, grid, prefix, backend="reference")
            where = f"{grid} prefix {prefix} {variant}"
            assert out.dtype == torch.float64
            assert_near(out, expected, 1e-10, where)
            own, reference = gradients(out, leaves), gradients(expected, leaves)
            for name in leaves:
                assert_near(own[name], reference[name], 1e-10, f"gradient of {name}, {where}")


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_near_float64(backend, support, mask_fill):
    support = {**support, "mask_fill": mask_fill}
    for prefix, variant in ((0, DECAY_VARIANTS[-1]), (1, DECAY_VARIANTS[1]), (2, None)):
        exact = make_leaves((4, 5), prefix, variant)
        leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in exact.items()}
        out = call_if_possible(backend, leaves, support, variant, (4, 5), prefix)
        if out is None:
            continue
        exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        expected = call(exact, support, variant, (4, 5), prefix, backend="reference")
        assert out.dtype == torch.float32
        assert_near(out, expected, 1e-5)
        own, reference = gradients(out, leaves), gradients(expected, exact)
        for name in leaves:
            assert own[name].dtype == torch.float32
            assert_near(own[name], reference[name], 1e-5, f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_near_float64(backend, support, dtype):
    for mask_fill, prefix, variant in product(MASK_FILLS, (0, 1), (None, DECAY_VARIANTS[1], DECAY_VARIANTS[-1])):
        exact = make_leaves((4, 5), prefix, variant)
        # The scalars of a decay stay in float32 in a half-precision model.
        leaves = {n: leaf.detach().to(dtype if n in "qkv" else torch.float32) for n, leaf in exact.items()}
        expected = call(
            {name: leaf.double() for name, leaf in leaves.items()},
            {**support, "mask_fill": mask_fill},
            variant,
            (4, 5),
            prefix,
            backend="reference",
        )
        for leaf in leaves.values():
            leaf.requires_grad_()
        out = call_if_possible(backend, leaves, {**support, "mask_fill": mask_fill}, variant, (4, 5), prefix)
        if out is None:
            continue
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
        for name, grad in gradients(out, leaves).items():
            assert grad.dtype == leaves[name].dtype
            assert grad.isfinite().all()


@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_is_near_float64(backend, support):
    # Under autocast the projections hand over bfloat16, as a Trainer with bf16=True does.
    for prefix, variant in ((0, None), (1, DECAY_VARIANTS[1])):
        leaves = {n: leaf.detach() for n, leaf in make_leaves((4, 5), prefix, variant).items()}
        half = {n: leaf.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, leaf in leaves.items()}
        exact = {name: leaf.double() for name, leaf in half.items()}
        expected = call(exact, support, variant, (4, 5), prefix, backend="reference")
        with torch.autocast("cpu", torch.bfloat16):
            out = call_if_possible(backend, half, support, variant, (4, 5), prefix)
        if out is not None:
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


def test_backends_run_where_they_should():
    # Without this the comparisons above could pass by comparing nothing.
    leaves = make_leaves((4, 4), 1)
    for name in PATTERNS:
        for mask_fill, variant in product(MASK_FILLS, DECAY_VARIANTS):
            leaves = make_leaves((4, 4), 1, variant)
            support = {"name": name, "mask_fill": mask_fill}
            assert call_if_possible("reference", leaves, support, variant, (4, 4), 1) is not None
            runs = call_if_possible("diagonal", leaves, support, variant, (4, 4), 1) is not None
            assert runs == (name in ON_DIAGONALS)
            runs = call_if_possible("gather", leaves, support, variant, (4, 4), 1) is not None
            assert runs == (mask_fill == "neg_inf")
            runs = call_if_possible("sdpa", leaves, support, variant, (4, 4), 1) is not None
            assert runs == (mask_fill == "neg_inf" and variant is None)


@pytest.mark.parametrize("backend", ["reference", "diagonal"])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("variant", [None, *((name, True, True) for name in DECAYS)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_gradcheck(backend, mask_fill, variant, prefix):
    support = {"name": "fibottention", "w_min": 1, "w_max": 2, "modified": True, "mask_fill": mask_fill}
    leaves = make_leaves((2, 2), prefix, variant, batch=1, heads=2, width=2)
    if prefix == 0:
        leaves.pop("prefix_beta", None)

    def run(*values):
        inputs = dict(zip(leaves, values, strict=True))
        return call(inputs, support, variant, (2, 2), prefix, backend=backend, need_weights=True)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=False)


@pytest.mark.parametrize("backend", PYTORCH)
def test_inputs_may_be_views(backend):
    # The attention layer hands over transposed views.
    leaves = make_leaves((3, 4), 2)
    views = {n: leaf.detach().transpose(1, 2).contiguous().transpose(1, 2) for n, leaf in leaves.items()}
    assert not views["q"].is_contiguous()
    out = call(views, "fibottention", None, (3, 4), 2, backend=backend)
    assert_near(out, call(leaves, "fibottention", None, (3, 4), 2, backend=backend), 1e-13)


# ---- what a mask means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "name"),
    [pair for pair in product(PYTORCH, PATTERNS) if pair[0] != "diagonal" or pair[1] in ON_DIAGONALS],
)
def test_masked_keys_change_nothing(backend, name):
    variants = [None] if backend == "sdpa" else [None, DECAY_VARIANTS[1]]
    for prefix, variant in product((0, 2), variants):
        leaves = {n: leaf.detach() for n, leaf in make_leaves((4, 5), prefix, variant).items()}
        mask = torch.tensor(build_mask(name, num_heads=3, num_tokens=20, num_prefix_tokens=prefix, layer=2))
        before = call(leaves, name, variant, (4, 5), prefix, backend=backend)
        for changed, key in product("kv", range(prefix + 20)):
            other = {**leaves, changed: leaves[changed].clone()}
            other[changed][:, :, key] += 3.0
            moved = (call(other, name, variant, (4, 5), prefix, backend=backend) - before).abs().amax((0, 3))
            blind = ~mask[:, :, key]
            assert not blind.any() or moved[blind].max() < 1e-13
            # And every query that sees the key notices a change of its value.
            assert changed == "k" or (moved[mask[:, :, key]] > 1e-9).all()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_fill_is_the_published_form(backend, name):
    # The code published with Fibottention multiplies the logits by a 0/1 mask: softmax(logits * mask) v.
    support = {"name": name, "mask_fill": "zero"}
    for prefix in (0, 1):
        leaves = make_leaves((5, 5), prefix)
        out = call_if_possible(backend, leaves, support, None, (5, 5), prefix)
        if out is None:
            continue
        mask = torch.tensor(build_mask(name, num_heads=3, num_tokens=25, num_prefix_tokens=prefix, layer=2))
        logits = leaves["q"] @ leaves["k"].transpose(-1, -2) / 2  # head width 4
        expected = torch.softmax(logits * mask, -1) @ leaves["v"]
        assert_near(out, expected, 1e-12)
        # It is another function than the softmax over the support.
        assert (out - call(leaves, name, None, (5, 5), prefix, backend="reference")).abs().max() > 0.01


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("name", PATTERNS)
def test_supports_change_the_output(name, mask_fill):
    leaves = make_leaves((7, 7), 1)
    dense = call(leaves, "dense", None, (7, 7), 1)
    out = call(leaves, {"name": name, "mask_fill": mask_fill}, None, (7, 7), 1)
    # Prefix rows see everything, so they alone stay as they are.
    assert (out - dense)[:, :, 1:].abs().amax((0, 2, 3)).min() > 0.01
    assert_near(out[:, :, :1], dense[:, :, :1], 1e-12)


@pytest.mark.parametrize("name", DECAYS)
def test_decays_change_the_output(name):
    leaves = make_leaves((7, 7), 1, (name, False, False))
    dense = call(leaves, "dense", None, (7, 7), 1)
    out = call(leaves, "dense", (name, False, False), (7, 7), 1)
    assert (out - dense)[:, :, 1:].abs().amax((0, 2, 3)).min() > 0.01
    assert_near(out[:, :, :1], dense[:, :, :1], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("name", DECAYS)
def test_a_decay_without_effect_is_exactly_the_base_model(name, support, dtype):
    # alpha = 1, beta -> infinity (VIOLIN section 3.4): not near the plain attention but the same numbers.
    for backend in ("reference", "diagonal"):
        leaves = make_leaves((4, 5), 1, (name, True, True), dtype=dtype)
        with torch.no_grad():
            leaves["alpha"].fill_(1), leaves["beta"].fill_(200.0), leaves["prefix_beta"].fill_(200.0)
        plain = call_if_possible(backend, leaves, support, None, (4, 5), 1)
        if plain is not None:
            assert torch.equal(call(leaves, support, (name, True, True), (4, 5), 1, backend=backend), plain)


def test_layers_and_seeds_choose_who_sees_what():
    leaves = make_leaves((4, 4), 0, heads=6)
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    outs = [attention(*inputs, "fibottention", layer=layer) for layer in (0, 0, 1)]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    shifted = attention(*inputs, {"name": "fibottention", "shuffle_seed": 1}, layer=0)
    assert torch.equal(shifted, outs[2])


# ---- VIOLIN Eqs. 8 to 11 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", curve_names())
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_permuting_the_tokens_equals_permuting_the_mask(curve, grid):
    leaves = make_leaves(grid, 0)
    gamma = 0.9
    decay = {"name": "violin", "curves": [curve], "beta": torch.full((1, 3), math.log(gamma / (1 - gamma))).double()}
    # Eqs. 8 and 9: tokens in the curve's order, the plain mask gamma^|i - j|, and back.
    order = torch.tensor(np.argsort(curve_rank(curve, grid), axis=None))
    q, k, v = (leaves[name][:, :, order] for name in "qkv")
    place = torch.arange(len(order))
    mask = gamma ** (place[:, None] - place[None]).abs().double()
    expected = torch.empty_like(q)
    expected[:, :, order] = torch.softmax(q @ k.transpose(-1, -2) / 2 * mask, -1) @ v
    # Eq. 11: raster order, the mask permuted. A window of everything lets the diagonal path show the same.
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    for backend, support in (("reference", "dense"), ("diagonal", {"name": "window", "w": len(order)})):
        out = attention(*inputs, support, decay, grid=grid, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("support", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_reproduce_the_output(backend, support, mask_fill):
    support = {**support, "mask_fill": mask_fill}
    for (grid, prefix), variant in product(product(GRIDS, (0, 2)), (None, DECAY_VARIANTS[1])):
        leaves = make_leaves(grid, prefix, variant)
        result = call_if_possible(backend, leaves, support, variant, grid, prefix, need_weights=True)
        if result is None:
            continue
        out, weights = result
        assert weights.shape == (2, 3, prefix + grid[0] * grid[1], prefix + grid[0] * grid[1])
        assert_near(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-12)
        assert_near(weights @ leaves["v"], out, 1e-12)
        mask = torch.tensor(brute_mask(support, 3, grid, prefix))
        if mask_fill == "neg_inf":
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


def test_dropout_with_zero_fill_goes_to_the_reference():
    leaves = make_leaves((16, 16), 0, batch=1)
    support = {"name": "fibottention", "mask_fill": "zero"}
    with pytest.raises(ValueError, match="backend='diagonal' cannot run this attention: dropout with mask_fill='zero'"):
        call(leaves, support, None, (16, 16), 0, backend="diagonal", dropout_p=0.1)
    call(leaves, support, None, (16, 16), 0, dropout_p=0.1)


# ---- never NaN ------------------------------------------------------------------------------------------------------


@st.composite
def small_supports(draw):
    mask_fill = draw(st.sampled_from(MASK_FILLS))
    w, more, flag = draw(st.integers(1, 30)), draw(st.integers(0, 30)), draw(st.booleans())
    if draw(st.booleans()):
        return {"name": "window", "w": w, "diagonal": flag, "mask_fill": mask_fill}
    return {"name": "fibottention", "w_min": w, "w_max": w + more, "modified": flag, "mask_fill": mask_fill}


@settings(max_examples=200, deadline=None, derandomize=True)
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
        out = call_if_possible(backend, leaves, support, variant, grid, prefix)
        if out is not None:
            assert out.isfinite().all(), backend
            assert all(grad.isfinite().all() for grad in gradients(out, leaves).values()), backend
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("logit", [-200.0, -30.0, -5.0, 5.0, 200.0])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_everything_take_any_logits(backend, mask_fill, logit):
    # Nothing is masked in these rows, so a masked pair's exp(0) has no part in them, however small the others are.
    support = {"name": "window", "w": 9, "mask_fill": mask_fill}
    for grid, prefix in (((1, 1), 0), ((1, 1), 1), ((3, 3), 0), ((3, 3), 2)):
        leaves = make_leaves(grid, prefix, dtype=torch.float32)
        with torch.no_grad():
            leaves["q"].fill_(logit), leaves["k"].uniform_(0.49, 0.51)  # scale 1/2, width 4: logits within 2 %
        expected = call(leaves, "dense", None, grid, prefix, backend="reference")
        out = call_if_possible(backend, leaves, support, None, grid, prefix)
        if out is not None:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


# ---- memory ---------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    # Elements of the largest storage that any operation returned.
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest_tensor(backend, support, variant, side=32):
    leaves = make_leaves((side, side), 1, variant, batch=1, heads=2, dtype=torch.float32)
    with LargestTensor() as largest:
        out = call(leaves, support, variant, (side, side), 1, backend=backend)
        gradients(out, leaves)
    return largest.elements


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("variant", [None, *((name, True, True) for name in DECAYS)])
@pytest.mark.parametrize("name", ON_DIAGONALS)
def test_the_diagonal_path_makes_no_tensor_of_all_pairs(name, variant, mask_fill):
    pairs = 1024 * 1024
    assert largest_tensor("diagonal", {"name": name, "mask_fill": mask_fill}, variant) < pairs / 16


def test_the_measure_of_memory_sees_a_tensor_of_all_pairs():
    assert largest_tensor("reference", "fibottention", None, side=16) >= 2 * 257 * 257


def test_the_diagonal_path_keeps_no_mask():
    plan = make_plan("fibottention", (8, 8), decay="violin")
    leaves = make_leaves((8, 8), 1, ("violin", True, False))
    decay = {**plan.decay, "alpha": leaves["alpha"], "beta": leaves["beta"]}
    run_plan(AttentionRequest(leaves["q"], leaves["k"], leaves["v"], plan, decay), backend="diagonal")
    assert [name for name, _ in plan.tables] == ["positions"]


# ---- plans and tables -----------------------------------------------------------------------------------------------


def make_plan(support, grid, prefix=1, heads=3, decay=None, layer=2):
    resolved = resolve_support(support, heads, grid[0] * grid[1])
    return AttentionPlan(heads, grid, prefix, resolved, resolve_decay(decay), layer)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("support", CASES)
def test_plans_hold_what_follows_from_the_settings(support, prefix):
    plan = make_plan(support, (3, 5), prefix, decay="violin")
    mask = torch.tensor(brute_mask(support, 3, (3, 5), prefix))
    assert plan.density == pytest.approx(mask.double().mean().item())
    if support["name"] != "dense":
        assert torch.equal(plan_table(plan, "mask", torch.device("cpu")), mask)
    positions = plan_table(plan, "positions", torch.device("cpu"))
    assert positions.shape == (8, 1, 15) and positions.dtype == torch.int64
    again = AttentionPlan.from_key(plan.key)
    assert again.key == plan.key and again.offsets == plan.offsets and again.decay == plan.decay
    assert (again.grid, again.num_prefix_tokens, again.layer) == ((3, 5), prefix, 2)


def test_tables_are_made_once_for_a_device():
    plan = make_plan("fibottention", (4, 4))
    cpu = torch.device("cpu")
    assert plan_table(plan, "mask", cpu) is plan_table(plan, "mask", cpu)
    # Two plans share nothing.
    assert plan_table(plan, "mask", cpu) is not plan_table(make_plan("fibottention", (4, 4)), "mask", cpu)


@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_tables_made_under_inference_mode_can_be_trained_with(backend):
    plan = make_plan({"name": "fibottention", "w_min": 3}, (4, 4), decay="violin")
    leaves = make_leaves((4, 4), 1, ("violin", True, False))
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    decay = {**plan.decay, "alpha": leaves["alpha"], "beta": leaves["beta"]}
    with torch.inference_mode():
        first, _ = run_plan(AttentionRequest(*inputs, plan, decay), backend=backend)
    assert plan.tables and not any(table.is_inference() for table in plan.tables.values())
    out, _ = run_plan(AttentionRequest(*inputs, plan, decay), backend=backend)
    assert torch.equal(out, first)
    assert all(grad.abs().max() > 0 for grad in gradients(out, leaves).values())


def test_tables_made_for_fake_tensors_are_not_kept():
    plan = make_plan("fibottention", (4, 4))
    with torch._subclasses.FakeTensorMode():
        assert plan_table(plan, "mask", torch.device("cpu")).shape == (3, 17, 17)
    assert not plan.tables
    assert plan_table(plan, "mask", torch.device("cpu")).any()


def test_global_generators_are_left_alone(global_generators_left_alone):
    leaves = make_leaves((14, 14), 1, ("violin", True, True), batch=1)
    with global_generators_left_alone():
        for backend, name in product(("auto", *BACKENDS), SUPPORTS):
            call_if_possible(backend, leaves, {"name": name, "shuffle_seed": 4}, None, (14, 14), 1)
            call_if_possible(backend, leaves, {"name": name, "shuffle_seed": 4}, ("violin", True, True), (14, 14), 1)


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
            build_mask(support, num_heads=3, num_tokens=height * width, layer=height)

    use(1, 2)
    before = global_entries()
    for height in range(2, 6):
        use(height, 3)
    assert global_entries() == before


def test_the_measure_of_global_entries_sees_a_cache(monkeypatch):
    before = global_entries()
    monkeypatch.setattr(ops, "some_cache", {1: 2}, raising=False)
    assert global_entries() > before


def test_numpy_integers_are_fine():
    leaves = make_leaves((4, 4), 1)
    expected = call(leaves, {"name": "fibottention", "w_min": 2, "w_max": 5}, None, (4, 4), 1)
    support = {"name": "fibottention", "w_min": np.int64(2), "w_max": np.int64(5)}
    assert torch.equal(call(leaves, support, None, (4, 4), 1), expected)
    assert torch.equal(call(leaves, support, None, (np.int64(4), np.int64(4)), 1), expected)
    assert torch.equal(call(leaves, support, None, (4, 4), np.int64(1)), expected)


# ---- choice of a backend --------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(caplog, monkeypatch):
    # Runs one attention and returns what the chooser wrote about it.
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)

    def run(support, variant, side, prefix=1, heads=12, **options):
        leaves = make_leaves((side, side), prefix, variant, batch=1, heads=heads, width=2, dtype=torch.float32)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="hf_sparseprior.ops"):
            call(leaves, support, variant, (side, side), prefix, **options)
        return " | ".join(record.getMessage() for record in caplog.records)

    return run


def test_the_log_names_the_path_and_why_not_others(chosen, monkeypatch):
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # as in a saved model without the package
    assert "layer 2: sdpa (16 patches, 100.0 % of the pairs kept; not cpp: dense attention" in chosen("dense", None, 4)
    message = chosen("dense", DECAY_VARIANTS[1], 4)
    assert "layer 2: reference" in message and "not sdpa: a decay multiplies the logits" in message
    assert "not cpp: the package hf_sparseprior is not installed" in message
    message = chosen("dense", None, 4, need_weights=True)
    assert "layer 2: reference" in message and "not sdpa: " in message and "weights" in message
    message = chosen({"name": "fibottention", "mask_fill": "zero"}, None, 4)
    assert "layer 2: reference" in message and "not sdpa: mask_fill='zero'" in message
    message = chosen("fibottention", None, 20)
    assert "layer 2: diagonal" in message and "400 patches, 2." in message
    message = chosen("fibottention", None, 6)
    assert "layer 2: sdpa" in message and "not diagonal: dense is faster below 400 patches" in message
    message = chosen({"name": "window", "w": 60}, None, 20)
    assert "layer 2: sdpa" in message and "not diagonal: dense is faster with more than 6.2 % of the pairs" in message
    message = chosen({"name": "fibottention", "mask_fill": "zero"}, None, 14, dropout_p=0.1)
    assert "layer 2: reference" in message and "not diagonal: dropout" in message and "not sdpa: " in message


def test_the_compiled_kernel_is_chosen_where_it_is_faster(chosen, monkeypatch):
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)
    monkeypatch.setattr(diagonal_cpu, "can_run", lambda q: None)
    assert "layer 2: sdpa" in chosen("dense", None, 4)
    assert "layer 2: cpp" in chosen("dense", DECAY_VARIANTS[1], 4)
    assert "layer 2: cpp" in chosen("fibottention", None, 14)
    assert "not cpp: dense is faster below 36 patches" in chosen("fibottention", None, 3)
    assert "not cpp: dense is faster with more than 45.0 %" in chosen({"name": "window", "w": 120}, None, 14)
    assert "not cpp: the C++ kernel has no dropout of dense attention" in chosen(
        "dense", DECAY_VARIANTS[1], 4, dropout_p=0.1
    )
    monkeypatch.setattr(diagonal_cpu, "can_run", lambda q: "no compiler")
    assert "layer 2: diagonal" in (message := chosen("fibottention", None, 20)) and "not cpp: no compiler" in message


def test_every_crossover_is_of_a_sparse_path_and_a_dense_one():
    crossovers = [(name, *key, limits) for name in BACKENDS for key, limits in BACKENDS[name].crossovers.items()]
    assert {name for name, *_ in crossovers} == {name for name in BACKENDS if not BACKENDS[name].dense}
    for name, device_type, trains, dense_path, limits in crossovers:
        assert BACKENDS[dense_path].dense and device_type in ("cpu", "cuda")
        if limits.tokens > 1:
            support = resolve_support({"name": "window", "w": 1}, 3, 2)
            below = AttentionPlan(3, (1, limits.tokens - 1), 0, support, None, 0)
            reason = slower_than_dense(BACKENDS[name], below, device_type, trains, dense_path)
            assert reason == f"dense is faster below {limits.tokens} patches"


def test_triton_is_for_cuda_and_many_patches():
    support = resolve_support("fibottention", 3, 1024)
    many, few = (AttentionPlan(3, grid, 1, support, None, 0) for grid in ((32, 32), (4, 4)))
    assert slower_than_dense(BACKENDS["triton"], many, "cuda", True, "sdpa") is None
    assert slower_than_dense(BACKENDS["triton"], few, "cuda", True, "sdpa") == "dense is faster below 400 patches"
    for dtype in (torch.float32, torch.float64):  # the device is said before anything else
        assert "not for cpu" in triton_device.can_run(torch.zeros(1, 1, 1, 8, dtype=dtype))


@pytest.mark.parametrize("backend", [*PYTORCH, "cpp"])
def test_the_log_names_a_forced_path_too(chosen, backend):
    assert backend in chosen("fibottention", None, 4, backend=backend)


def test_the_log_is_silent_above_debug(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="hf_sparseprior"):
        call(make_leaves((4, 4), 1), "fibottention", None, (4, 4), 1)
    assert not caplog.records


@pytest.mark.parametrize("backend", PYTORCH)
def test_the_environment_forces_a_backend(monkeypatch, backend):
    ran = []
    for name, entry in BACKENDS.items():
        spy = dataclasses.replace(entry, run=lambda c, name=name, run=entry.run: ran.append(name) or run(c))
        monkeypatch.setitem(BACKENDS, name, spy)
    leaves = make_leaves((4, 4), 1)
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    call(leaves, "fibottention", None, (4, 4), 1)
    assert ran == [backend]
    # The argument is nearer than the environment.
    call(leaves, "fibottention", None, (4, 4), 1, backend="reference")
    assert ran == [backend, "reference"]
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "auto")
    call(leaves, "fibottention", None, (4, 4), 1)
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("backend", "support", "variant", "options", "reason"),
    [
        ("sdpa", "dense", DECAY_VARIANTS[1], {}, "a decay multiplies the logits"),
        ("sdpa", "dense", None, {"need_weights": True}, "does not return attention weights"),
        ("sdpa", {"name": "window", "mask_fill": "zero"}, None, {}, "mask_fill='zero' keeps exp"),
        ("diagonal", "dense", None, {}, "the support is dense"),
        (
            "diagonal",
            {"name": "window", "mask_fill": "zero"},
            None,
            {"dropout_p": 0.1},
            "dropout with mask_fill='zero'",
        ),
    ],
)
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_forced_backend_that_cannot_run_is_an_error(monkeypatch, how, backend, support, variant, options, reason):
    leaves = make_leaves((3, 3), 0, variant)
    if how == "environment":
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    else:
        options = {**options, "backend": backend}
    source = "SPARSEPRIOR_BACKEND" if how == "environment" else "backend"
    with pytest.raises(ValueError, match=rf"^{source}='{backend}' cannot run this attention: .*{reason}"):
        call(leaves, support, variant, (3, 3), 0, **options)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_an_unknown_backend_is_an_error(monkeypatch, how):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "flash" if how == "environment" else "auto")
    options = {} if how == "environment" else {"backend": "flash"}
    source = "SPARSEPRIOR_BACKEND" if how == "environment" else "backend"
    with pytest.raises(ValueError, match=rf"^{source}='flash' must be one of auto, {', '.join(BACKENDS)}"):
        call(make_leaves((2, 2), 0), "dense", None, (2, 2), 0, **options)


# ---- grids and errors -----------------------------------------------------------------------------------------------


def test_a_square_grid_may_be_left_out():
    leaves = make_leaves((4, 4), 1, ("violin", True, False))
    decay = {"name": "violin", "alpha": leaves["alpha"], "beta": leaves["beta"]}
    inputs = (leaves["q"], leaves["k"], leaves["v"], "fibottention", decay, 1)
    assert torch.equal(attention(*inputs), attention(*inputs, grid=(4, 4)))
    leaves = make_leaves((2, 3), 1)
    attention(leaves["q"], leaves["k"], leaves["v"], "fibottention", num_prefix_tokens=1)  # no decay: no grid needed


Q = torch.randn(1, 2, 7, 4)
BETA = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, r"q of shape \(2, 7, 4\) must be \(batch, heads, tokens, head width\)"),
        ({"k": Q[:, :, :5]}, r"k of shape \(1, 2, 5, 4\) must have the shape of q, \(1, 2, 7, 4\)"),
        ({"v": Q.double()}, r"v of dtype torch.float64 must be floating and the dtype of q, torch.float32"),
        ({"q": Q.long()}, r"q of dtype torch.int64 must be floating"),
        ({"k": Q.to("meta")}, r"k on meta must be on the device of q, cpu"),
        ({"num_prefix_tokens": -1}, r"num_prefix_tokens=-1 must be an integer of 0 or more and at most 6"),
        ({"num_prefix_tokens": 7}, r"num_prefix_tokens=7 must be 0 or more and at most 6"),
        ({"num_prefix_tokens": 1.0}, r"num_prefix_tokens=1.0 must be "),
        ({"grid": (2, 3)}, r"grid=\(2, 3\) must be \(height, width\) with 7 patch tokens"),
        ({"grid": (7,)}, r"grid=\(7,\) must be \(height, width\) with 7 patch tokens"),
        ({"grid": (-7, -1)}, r"grid=\(-7, -1\) must be \(height, width\)"),
        ({"grid": (3.5, 2)}, r"grid=\(3.5, 2\) must be \(height, width\)"),
        ({"layer": -1}, r"layer=-1 must be an integer of 0 or more"),
        ({"layer": 0.5}, r"layer=0.5 must be an integer of 0 or more"),
        ({"support": "fibotention"}, r"support='fibotention' must be one of dense, fibottention"),
        ({"support": {"name": "fibottention", "w_mx": 3}}, r"has no setting 'w_mx'.*mean 'w_max'"),
        ({"decay": {"name": "violn"}, "grid": (1, 7)}, r"decay='violn' must be one of violin, manhattan"),
        ({"decay": {"name": "manhattan", "beta": BETA}}, r"grid=None with a decay needs a square number .* got 7"),
        ({"decay": {"name": "manhattan"}, "grid": (1, 7)}, r"decay beta=None must be a tensor of shape \(1, 2\)"),
        ({"decay": {"name": "manhattan", "beta": 3.0}, "grid": (1, 7)}, r"decay beta=3.0 must be a tensor of shape"),
        (
            {"decay": {"name": "violin", "beta": BETA}, "grid": (1, 7)},
            r"beta=\(1, 2\) must be a tensor of shape \(8, 2\)",
        ),
        (
            {"decay": {"name": "violin", "curves": ["x"], "beta": BETA}, "grid": (1, 7)},
            r"curves: 'x' must be one of z, z_t",
        ),
        (
            {"decay": {"name": "manhattan", "beta": BETA, "alpha": torch.ones(3)}, "grid": (1, 7)},
            r"decay alpha=\(3,\) must be a tensor of shape \(2,\)",
        ),
        (
            {"decay": {"name": "manhattan", "beta": BETA, "prefix_beta": torch.ones(1)}, "grid": (1, 7)},
            r"decay prefix_beta=\(1,\) must be a tensor of shape \(2,\)",
        ),
        (  # a misspelt alpha must not be an attention without alpha
            {"decay": {"name": "manhattan", "beta": BETA, "alhpa": torch.ones(2)}, "grid": (1, 7)},
            r"no setting 'alhpa'.*mean 'alpha'",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": Q, "v": Q, **changes})


def test_an_empty_environment_variable_forces_nothing(monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "")
    call(make_leaves((2, 2), 0), "dense", None, (2, 2), 0)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.1])
def test_dropout_outside_its_range_is_refused(dropout_p):
    with pytest.raises(ValueError, match=rf"dropout_p={dropout_p} must be between 0 and 1"):
        attention(Q, Q, Q, dropout_p=dropout_p)
