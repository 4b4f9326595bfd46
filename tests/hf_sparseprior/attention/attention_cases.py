"""Inputs, brute force and comparisons for tests of attention, and which backends run which of them.

The backends themselves say which cases they run, so that no test passes by comparing nothing. test_backend_choice.py
states once what each of them refuses.
"""

import functools
import json
import math
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import DECAYS, resolve_decay
from hf_sparseprior.patterns.supports import (
    MASK_FILLS,
    SUPPORTS,
    LayerKey,
    has_pairs,
    head_offsets,
    layer_order,
    layer_pattern,
    resolve_support,
)

PATTERNS = [name for name in SUPPORTS if name != "dense"]
ON_DIAGONALS = [name for name in PATTERNS if not has_pairs(name)]


# Settings besides the defaults: small windows for small grids, empty heads, the diagonal left out, everything kept.
MORE = {
    "fibottention": [
        {"w_min": 1, "modified": True},
        {"w_min": 1, "w_max": 1},
        {"w_min": 2, "w_max": 4, "shuffle_seed": None},
        {"w_min": 1, "order": "hilbert"},
    ],
    "window": [{"w": 2, "diagonal": False, "order": "peano_t"}, {"w": 0}],
    "strided": [{"stride": 3, "local": 1}],
    "random": [{"pruning_ratio": 70.0, "per_head": True, "seed": 3}, {"pruning_ratio": 100}],
    "bigbird": [{"random_keys": 2, "per_head": True}, {"pruning_ratio": 60, "order": "snake_t"}],
    "neighborhood": [{"window": 3, "dilation": [1, 2]}, {"window": [1, 3], "edges": "cut"}],
}


SETTINGS = [{"name": name, **more} for name in SUPPORTS for more in [{}, *MORE.get(name, [])]]


def setting_id(settings):
    """The settings of a support as part of a test's name."""
    values = dict(settings)
    return "-".join([values.pop("name"), *(f"{key}={value}" for key, value in values.items())])


CASES = [pytest.param(settings, id=setting_id(settings)) for settings in SETTINGS]
FILLED = [{**settings, "mask_fill": fill} for settings in SETTINGS for fill in MASK_FILLS]


# (decay, with alpha, with prefix_beta)
DECAY_VARIANTS = [None, *product(DECAYS, (True, False), (True, False))]


def make_plan(support, grid, prefix=1, heads=3, decay=None, layer=2):
    resolved = resolve_support(support, heads, grid[0] * grid[1], grid)
    return AttentionPlan(LayerKey(heads, grid, layer), prefix, resolved, resolve_decay(decay))


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


# ---- which backends run which attention ------------------------------------------------------------------------------


def refusal(backend, support, variant=None, dtype=torch.float64, **fields):
    """Why a backend's `can_run` refuses such an attention on the CPU; None if it runs it."""
    key = json.dumps(support, sort_keys=True)
    return _asked(BACKENDS[backend].can_run, key, variant, dtype, tuple(fields.items()))


@functools.cache
def _asked(can_run, support, variant, dtype, fields):
    plan = _plan(support, None if variant is None else variant[0])
    leaves = _leaves(variant, dtype)
    decay = None if variant is None else {**plan.decay, **{k: t for k, t in leaves.items() if k not in "qkv"}}
    return can_run(AttentionRequest(leaves["q"], leaves["k"], leaves["v"], plan, decay, **dict(fields)))


@functools.cache
def _plan(support, decay):
    return make_plan(json.loads(support), (3, 4), decay=decay)


@functools.cache
def _leaves(variant, dtype):
    return make_leaves((3, 4), 1, variant, dtype=dtype)


def shipped(registry, of=lambda entry: entry):
    """Names of the package's own entries, for tests that state what each of them does; others may be registered too."""
    return [name for name, entry in registry.items() if of(entry).__module__.startswith("hf_sparseprior.")]


SHIPPED_SUPPORTS = shipped(SUPPORTS, lambda support: support.function)
SHIPPED_BACKENDS = shipped(BACKENDS, lambda backend: backend.run)


def runnable(backend, support, variants=DECAY_VARIANTS, dtype=torch.float64, **fields):
    """The variants of a decay that a backend runs with a support."""
    return [variant for variant in variants if refusal(backend, support, variant, dtype, **fields) is None]


def backend_cases(supports, variants=DECAY_VARIANTS, dtype=torch.float64, backends=None, **fields):
    """Parameters (backend, support) of all backends, or of some, where at least one of the variants runs."""
    return [
        pytest.param(backend, support, id=f"{backend}-{setting_id(support)}")
        for backend, support in product(BACKENDS if backends is None else backends, supports)
        if runnable(backend, support, variants, dtype, **fields)
    ]


# ---- gradients and brute force ---------------------------------------------------------------------------------------


def gradients(out, leaves, seed=1):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * direction).sum(), leaves.values(), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def assert_near(actual, expected, tolerance, what=""):
    # Relative to the largest entry. Entries that should be 0 may be rounding errors of values of about 1.
    assert actual.shape == expected.shape
    limit = tolerance * max(0.01, expected.abs().max().item())
    assert (actual.double() - expected.double()).abs().max().item() <= limit, what


def assert_equals_reference(backend, support, variant, grid, prefix, dtype=torch.float64, tolerance=1e-10):
    """Output and every gradient of a backend against those of `reference` in float64 with the same inputs."""
    leaves = make_leaves(grid, prefix, variant, dtype=dtype)
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    where = f"{grid} prefix {prefix} {variant}"
    out = call(leaves, support, variant, grid, prefix, backend=backend)
    expected = call(exact, support, variant, grid, prefix, backend="reference")
    assert out.dtype == dtype
    assert_near(out, expected, tolerance, where)
    own, reference = gradients(out, leaves), gradients(expected, exact)
    for name in leaves:
        assert own[name].dtype == leaves[name].dtype
        assert_near(own[name], reference[name], tolerance, f"gradient of {name}, {where}")


def brute_mask(support, heads, grid, prefix, layer=2):
    # attended[h][j][k] from the definition of the support, for the heads of one layer.
    num_tokens = grid[0] * grid[1]
    offsets = head_offsets(support, num_heads=heads, num_tokens=num_tokens, grid=grid)
    resolved = resolve_support(support, heads, num_tokens, grid)
    pairs = layer_pattern(resolved, LayerKey(heads, grid, layer)).pairs
    total = prefix + num_tokens
    order = support.get("order", "raster")
    masks = []
    for head, number in enumerate(layer_order(heads, layer, resolved["shuffle_seed"])):
        own = set(offsets[number])
        name = order if isinstance(order, str) else order[number]
        rank = [None] * prefix + curve_rank(name.replace("raster", "z"), grid).ravel().tolist()
        mask = [[j < prefix or k < prefix or abs(rank[j] - rank[k]) in own for k in range(total)] for j in range(total)]
        for j, k in [] if pairs is None else pairs[head]:
            mask[rank.index(j)][rank.index(k)] = True
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


# ---- memory ----------------------------------------------------------------------------------------------------------


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
