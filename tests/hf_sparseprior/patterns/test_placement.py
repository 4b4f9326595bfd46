"""Decays other than VIOLIN's eight curves, and where M acts (VIOLIN Tables 7, 12 to 15, 25)."""

import math
import random

import pytest
import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.attention.functional import attention, run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import (
    ALPHA_SCALES,
    DECAYS,
    PLACEMENTS,
    decay_mask,
    init_values,
    make_decay,
    random_rank,
    resized_order,
    resolve_decay,
    transposed_rank,
)
from hf_sparseprior.patterns.supports import LayerKey, build_mask, resolve_support
from tests.each import each
from tests.hf_sparseprior.attention.attention_cases import SHIPPED_BACKENDS

GRID, HEADS = (3, 4), 2
SUPPORTS = {
    "dense": "dense",
    "sparse": {"name": "fibottention", "modified": True, "w_max": 6},
    "zero": {"name": "fibottention", "modified": True, "w_max": 6, "mask_fill": "zero"},
}
LEARNED_ORDER_BACKENDS = ("diagonal", "gather")  # in float64, over a support
IDENTICAL = [name for name in PLACEMENTS if name not in ("add_after_as_printed", "residual")]


def leaves(prefix=1, batch=2, width=4, prefix_beta=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, prefix + GRID[0] * GRID[1], width)
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in "qkv"}
    found["alpha"] = 1 + torch.randn(HEADS, generator=generator, dtype=torch.float64) / 4
    found["beta"] = 1 + torch.randn(2, HEADS, generator=generator, dtype=torch.float64)
    if prefix_beta:
        found["prefix_beta"] = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    return {name: leaf.requires_grad_() for name, leaf in found.items()}


def attend(found, placement, support, prefix, scaled="logits", **options):
    scalars = {name: leaf for name, leaf in found.items() if name not in "qkv"}
    settings = {"name": "violin", "curves": ["peano", "peano_t"], "placement": placement, "alpha_scales": scaled}
    decay = {**settings, **scalars}
    inputs = (found["q"], found["k"], found["v"])
    return attention(*inputs, SUPPORTS[support], decay, num_prefix_tokens=prefix, grid=GRID, **options)


def by_hand(found, placement, support, prefix, scaled="logits"):
    # One query at a time in Python floats, from the formulas: S runs over the pairs that are kept.
    plan = DECAYS["violin"].positions({"curves": ["peano", "peano_t"]}, GRID)[:, 0].tolist()
    fill = SUPPORTS[support]["mask_fill"] if support == "zero" else "neg_inf"
    keep = build_mask(SUPPORTS[support], num_heads=HEADS, num_tokens=12, num_prefix_tokens=prefix)
    sigmoid = torch.sigmoid(found["beta"]).tolist()
    gamma_prefix = torch.sigmoid(found["prefix_beta"]).tolist() if "prefix_beta" in found else [1.0] * HEADS
    q, k, v, alpha = (found[name].tolist() for name in ("q", "k", "v", "alpha"))
    total, width = len(q[0][0]), len(q[0][0][0])
    out = torch.zeros(len(q), HEADS, total, width, dtype=torch.float64)
    for b in range(len(q)):
        for h in range(HEADS):
            for j in range(total):
                logits, decays = [], []
                for i in range(total):
                    a = sum(x * y for x, y in zip(q[b][h][j], k[b][h][i], strict=True)) / math.sqrt(width)
                    m = gamma_prefix[h]
                    if j >= prefix and i >= prefix:
                        ranks = [abs(rank[j - prefix] - rank[i - prefix]) for rank in plan]
                        m = sum(g[h] ** d for g, d in zip(sigmoid, ranks, strict=True)) / 2
                    one = 1.0
                    if scaled == "logits":
                        a *= alpha[h]
                    else:
                        m, one = alpha[h] * m, alpha[h]
                    a = {"multiply": a * m, "add": a + m - one, "residual": a * (1 + m)}.get(placement, a)
                    if not keep[h, j, i]:
                        a = -math.inf if fill == "neg_inf" else 0.0
                    logits.append(a)
                    decays.append(m)
                weights = [math.exp(a) for a in logits]
                weights = [w / sum(weights) for w in weights]
                for i, m in enumerate(decays):
                    if keep[h, j, i]:
                        w = weights[i]
                        after = {"multiply_after": w * m, "add_after": w + m - one, "add_after_as_printed": w + m}
                        weights[i] = after.get(placement, w)
                for i, w in enumerate(weights):
                    out[b, h, j] += w * torch.tensor(v[b][h][i], dtype=torch.float64)
    return out


# ---- placements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaled", "placement", "support", "prefix"),
    [
        (scaled, placement, support, 2 * ((i + j + k) % 2))
        for i, scaled in enumerate(ALPHA_SCALES)
        for j, placement in enumerate(PLACEMENTS)
        for k, support in enumerate(SUPPORTS)
        if (i + j + k) % 3 or support == "zero"  # what is filled in at pairs outside is of each placement
    ],
)
def test_every_placement_is_its_formula(scaled, placement, support, prefix):
    found = leaves(prefix, batch=1)
    out = attend(found, placement, support, prefix, scaled)
    torch.testing.assert_close(out, by_hand(found, placement, support, prefix, scaled), rtol=1e-10, atol=1e-11)


def test_alpha_that_scales_logits_or_m_is_the_same_in_a_product_and_nowhere_else():
    found = leaves()
    for placement in PLACEMENTS:
        both = [attend(found, placement, "dense", 1, scaled) for scaled in ALPHA_SCALES]
        assert torch.allclose(*both, rtol=1e-10, atol=1e-12) == (placement == "multiply"), placement


@pytest.mark.parametrize("support", ["dense", "sparse"])
def test_adding_m_less_one_is_adding_m(support):
    # S(A + M) itself, by a bias: the softmax takes away what all its logits have in common.
    found = leaves(0)
    decay = {"beta": found["beta"]}
    positions = torch.tensor(DECAYS["violin"].positions({"curves": ["peano", "peano_t"]}, GRID))
    plan = AttentionPlan(LayerKey(HEADS, GRID), 0, resolve_support(SUPPORTS[support], HEADS, 12))
    q = found["q"] * found["alpha"].view(-1, 1, 1)
    bias = decay_mask(decay, positions, torch.float64)
    expected, _ = run_plan(AttentionRequest(q, found["k"], found["v"], plan, bias=bias))
    torch.testing.assert_close(attend(found, "add", support, 0), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("placement", "support"),
    [(placement, [*SUPPORTS][(i + j) % 3]) for i, placement in enumerate(PLACEMENTS) for j in (0, 1)],
)
def test_gradients_of_every_placement(placement, support):
    found = leaves(1, batch=1, width=2)

    def function(*tensors):
        return attend(dict(zip(found, tensors, strict=True)), placement, support, 1)

    assert torch.autograd.gradcheck(function, tuple(found.values()), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("placement", [placement for placement in PLACEMENTS if placement != "multiply"])
def test_only_the_reference_places_m_elsewhere(placement):
    found = leaves()
    for backend in (backend for backend in SHIPPED_BACKENDS if backend != "reference"):
        with pytest.raises(ValueError, match="cannot run this attention"):
            attend(found, placement, "sparse", 1, backend=backend)
    with pytest.raises(ValueError, match=r"placement='add' of the decay is for the reference alone"):
        attend(found, "add", "sparse", 1, backend="diagonal")


def test_weights_are_those_behind_m():
    found = leaves()
    out, weights = attend(found, "multiply_after", "sparse", 1, need_weights=True)
    torch.testing.assert_close(weights @ found["v"], out)
    assert (weights.sum(-1) < 1 - 1e-3).all()  # M is below 1 and nothing scales it back
    keep = torch.tensor(build_mask(SUPPORTS["sparse"], num_heads=HEADS, num_tokens=12, num_prefix_tokens=1))
    added = attend(found, "add_after_as_printed", "sparse", 1, need_weights=True)[1]
    assert torch.equal((added != 0).all(0), keep)


# ---- models ---------------------------------------------------------------------------------------------------------


def tiny(prior, **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    settings = {**sizes, "image_size": 24, "patch_size": 4, "num_labels": 3, **settings}
    torch.manual_seed(0)
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(prior=prior, **settings)).eval()


def images(height=24, width=24):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(7))


def difference_from_base(decay, support="dense"):
    base = tiny({"support": support})
    model = tiny({"support": support, "decay": decay})
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert missing and all("decay_bias" in name for name in missing)
    with torch.no_grad():
        return (model(images()).logits - base(images()).logits).abs().max().item()


@pytest.mark.parametrize(
    ("placement", "support"), [(placement, [*SUPPORTS][(i + 1) % 3]) for i, placement in enumerate(PLACEMENTS)]
)
def test_which_placements_start_as_the_base_model(placement, support):
    decay = {"name": "violin", "init": "identity", "placement": placement}
    difference = difference_from_base(decay, SUPPORTS[support])
    assert difference < 1e-5 if placement in IDENTICAL else difference > 1e-4


@pytest.mark.parametrize("name", [name for name in DECAYS if name != "violin"])
def test_every_decay_starts_as_the_base_model(name):
    assert difference_from_base({"name": name, "init": "identity"}) < 1e-5


@each(
    "decay, scalars",
    [
        ("violin", 1296),
        ({"name": "violin", "curves": ["peano", "peano_t"]}, 432),
        ({"name": "violin", "curves": ["z", "z_t"]}, 432),
        ({"name": "violin", "curves": ["snake", "zigzag", "peano", "hilbert"]}, 720),
        ("manhattan", 288),
        ({"name": "manhattan", "with_transpose": True}, 432),
        ("random_order", 432),
        ({"name": "violin", "learn_beta": False, "gamma": 0.9996}, 144),
        ({"name": "violin", "learn_alpha": False}, 1152),
        ("learned_order", 288 + 12 * 196),
    ],
)
def test_scalars_of_deit_b(decay, scalars):
    with torch.device("meta"):
        config = SparsePriorViTConfig.from_preset("deit_base", prior={"decay": decay})
        model = SparsePriorViTForImageClassification(config)
    assert sum(p.numel() for name, p in model.named_parameters() if "decay_bias" in name) == scalars


# ---- further decays -------------------------------------------------------------------------------------------------


def test_a_random_order_is_pythons_own_and_the_same_everywhere():
    order = list(range(12))
    random.Random(3).shuffle(order)
    assert random_rank((3, 4), 3).ravel().tolist() == order
    assert random_rank((2, 2), 0).tolist() == [[2, 0], [1, 3]]
    # The transpose: the rank on the transposed grid at (column, row).
    other = random_rank((4, 3), 3)
    own = transposed_rank(random_rank((3, 4), 3))
    assert all(own[row, column] == other[column, row] for row in range(3) for column in range(4))
    state = random.getstate()
    random_rank((3, 4), 5)
    assert random.getstate() == state


def test_random_orders_differ_by_seed_alone():
    masks = [
        DECAYS["random_order"].positions(resolve_decay({"name": "random_order", "seed": seed}), (4, 4)).tolist()
        for seed in (0, 0, 1)
    ]
    assert masks[0] == masks[1] != masks[2]
    assert len(masks[0]) == 2 and sorted(masks[0][0][0]) == sorted(masks[0][1][0]) == list(range(16))


def test_the_transpose_of_the_manhattan_distance_is_the_same_distance():
    positions = DECAYS["manhattan"].positions({"with_transpose": True}, (3, 5))
    distances = torch.tensor(positions.copy())
    distances = (distances[..., :, None] - distances[..., None, :]).abs().sum(1)
    assert torch.equal(distances[0], distances[1])


def test_a_fixed_gamma():
    decay = make_decay(resolve_decay({"name": "violin", "gamma": 0.9996, "learn_beta": False}), 3)
    assert torch.sigmoid(decay.beta.double()) == pytest.approx(torch.full((8, 3), 0.9996), abs=1e-7)
    assert not decay.beta.requires_grad
    learned = make_decay(resolve_decay({"name": "violin", "gamma": 0.9996, "init": "finetune"}), 3)
    assert torch.equal(learned.beta, decay.beta) and learned.beta.requires_grad
    assert init_values("zeros") == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_a_learned_order_learns_its_positions():
    decay = make_decay(resolve_decay({"name": "learned_order", "gamma": 0.9}, (2, 3)), 2).double()
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = AttentionPlan(LayerKey(2, (2, 3)), 0, resolve_support("dense", 2, 6), decay.settings)
    order = torch.tensor([[[0.3, -1.0, 2.5], [2.0, 7.0, 0.0]]], dtype=torch.float64)
    with torch.no_grad():
        decay.order.copy_(order)
    p = order.flatten()
    mask = 0.9 ** (p[:, None] - p[None]).abs()
    expected = torch.softmax(q @ k.transpose(-1, -2) / 2 * mask, -1) @ v
    torch.testing.assert_close(run_plan(AttentionRequest(q, k, v, plan, decay()))[0], expected, rtol=1e-7, atol=1e-8)

    def function(order):
        return run_plan(AttentionRequest(q, k, v, plan, {**decay(), "order": order}))[0]

    assert torch.autograd.gradcheck(function, (order.requires_grad_(),))


def learned_order_attention(backend, support):
    """What a backend computes, and what may have a gradient."""
    found = leaves(1, prefix_beta=False)
    found["beta"] = found["beta"][:1]
    decay = {"name": "learned_order", "alpha": found["alpha"], "beta": found["beta"], "order": torch.rand(1, 3, 4) * 9}
    decay["order"] = decay["order"].double().requires_grad_()
    inputs = [found[name] for name in "qkv"]
    options = {"num_prefix_tokens": 1, "grid": GRID}
    return attention(*inputs, SUPPORTS[support], decay, backend=backend, **options), [*inputs, decay["order"]]


@pytest.mark.parametrize("backend", LEARNED_ORDER_BACKENDS)
def test_backends_take_a_learned_order(backend):
    torch.manual_seed(0)
    out, leaves_of_out = learned_order_attention(backend, "sparse")
    torch.manual_seed(0)
    expected, leaves_of_expected = learned_order_attention("reference", "sparse")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for own, reference in zip(
        torch.autograd.grad(out.square().sum(), leaves_of_out),
        torch.autograd.grad(expected.square().sum(), leaves_of_expected),
        strict=True,
    ):
        torch.testing.assert_close(own, reference, rtol=1e-9, atol=1e-11)


def test_backends_refuse_a_learned_order():
    refused = [(name, "sparse") for name in SHIPPED_BACKENDS if name not in ("reference", *LEARNED_ORDER_BACKENDS)]
    refused += [(name, "dense") for name in SHIPPED_BACKENDS if name != "reference"]
    for backend, support in refused:
        with pytest.raises(ValueError, match=f"^backend='{backend}' cannot run this attention: "):
            learned_order_attention(backend, support)


@pytest.mark.parametrize("start", ["z", "hilbert_t", "random"])
def test_a_learned_order_starts_where_it_is_told(start):
    decay = make_decay(resolve_decay({"name": "learned_order", "start": start, "seed": 2}, (4, 4)), 2)
    expected = DECAYS["learned_order"].positions(decay.settings, (4, 4))
    assert decay.order.flatten().tolist() == expected.flatten().tolist()
    assert sorted(decay.order.flatten().tolist()) == list(range(16))


def test_a_learned_order_on_another_grid():
    order = torch.arange(12.0).view(1, 3, 4)
    assert torch.equal(resized_order(order, (3, 4)), order.view(1, 1, 12))
    larger = resized_order(order, (5, 7)).view(5, 7)
    # Corners on corners, along rows and columns in equal steps, and as many ranks as there are patches.
    stretch = 34 / 11
    expected = stretch * (4 * torch.linspace(0, 2, 5)[:, None] + torch.linspace(0, 3, 7)[None])
    torch.testing.assert_close(larger, expected)
    assert (larger[0, 0], larger[-1, -1]) == (0.0, pytest.approx(34.0))


def test_a_learned_order_survives_saving_and_another_image_size(tmp_path):
    model = tiny("learned_order")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("order"):
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    assert loaded.config.prior["decay"]["grid"] == [6, 6]
    assert torch.equal(loaded(images(32, 16)).logits, model(images(32, 16)).logits)


@each(
    "decay, message",
    [
        ({"name": "violin", "alpha_scales": "M"}, "alpha_scales='M' must be one of logits, mask"),
        ({"name": "violin", "placement": "plus"}, r"placement='plus' must be one of multiply \(S\(A \* M\)\), add"),
        ({"name": "violin", "placement": None}, r"placement=None must be one of multiply"),
        ({"name": "violin", "gamma": 1.0}, r"gamma=1.0 must be a number above 0 and below 1"),
        ({"name": "violin", "gamma": "0.9"}, r"gamma='0.9' must be a number above 0 and below 1"),
        ({"name": "random_order", "seed": -1}, r"seed=-1 must be an integer of 0 or more"),
        ({"name": "random_order", "with_transpose": 1}, r"with_transpose=1 must be True or False"),
        ({"name": "learned_order", "start": "spiral"}, r"start='spiral' must be one of random, z, z_t"),
        ({"name": "learned_order", "grid": 4}, r"grid=4 must be \(height, width\) in patches"),
        ({"name": "learned_order", "grid": [4, 0]}, r"grid=0 must be an integer of 1 or more"),
    ],
)
def test_wrong_settings_are_refused(decay, message):
    with pytest.raises(ValueError, match=message):
        resolve_decay(decay)


def test_a_learned_order_needs_a_grid():
    with pytest.raises(ValueError, match=r"learned_order: grid=None must be \(height, width\)"):
        make_decay(resolve_decay("learned_order"), 2)
