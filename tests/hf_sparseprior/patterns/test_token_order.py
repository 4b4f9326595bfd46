"""Supports along a curve, against masks that loops make from the ranks, and what must not depend on the order."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import attention, run_plan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.patterns.curves import curve_names, curve_rank
from hf_sparseprior.patterns.supports import (
    MASK_FILLS,
    SUPPORTS,
    build_mask,
    head_offsets,
    layer_order,
    resolve_support,
)
from hf_sparseprior.priors.prior import resolve_prior
from tests.hf_sparseprior.attention.attention_cases import assert_equals_reference, assert_near, make_plan, runnable
from tests.hf_sparseprior.small import small

ORDERED = [name for name, support in SUPPORTS.items() if support.ordered]
GRIDS = [(4, 4), (3, 5), (1, 7), (6, 1)]
HILBERT_4X4 = [0, 1, 14, 15, 3, 2, 13, 12, 4, 7, 8, 11, 5, 6, 9, 10]  # VIOLIN's figure, see test_curves.py


def along(order, **settings):
    return {"name": "fibottention", "w_min": 1, **settings, "order": order}


def loop_mask(offsets, ranks, prefix):
    """Query i sees key j if the distance of their ranks is an offset, if one of them is a prefix token, or itself."""
    total = prefix + len(ranks)
    mask = np.zeros((total, total), dtype=bool)
    for i in range(total):
        for j in range(total):
            mask[i, j] = i < prefix or j < prefix or abs(ranks[i - prefix] - ranks[j - prefix]) in offsets
        mask[i, i] |= not mask[i].any()
    return mask


def test_the_supports_of_offsets_have_an_order():
    assert {"fibottention", "window", "longformer", "strided", "bigbird"} <= set(ORDERED)
    assert not {"dense", "random"} & set(ORDERED)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *(("fibottention", grid) for grid in GRIDS),
        *((name, GRIDS[i % 2]) for i, name in enumerate(ORDERED) if name not in ("fibottention", "bigbird")),
    ],
)
def test_masks_follow_the_ranks(name, grid):
    heads, tokens = 3, grid[0] * grid[1]
    sizes = {"num_heads": heads, "num_tokens": tokens, "grid": grid}
    offsets = head_offsets(name, **sizes)
    for order in ("hilbert", "peano", "zigzag_t", ["snake", "raster", "hilbert_t"]):
        orders = [order] * heads if isinstance(order, str) else order
        for prefix, layer in ((0, 0), (2, 5)):
            mask = build_mask({"name": name, "order": order}, **sizes, num_prefix_tokens=prefix, layer=layer)
            for own, number in zip(mask, layer_order(heads, layer, 0), strict=True):
                ranks = curve_rank(orders[number].replace("raster", "z"), grid).ravel()
                assert np.array_equal(own, loop_mask(offsets[number], ranks, prefix))


def test_a_window_along_hilbert_in_golden_ranks():
    mask = build_mask({"name": "window", "w": 1, "diagonal": False, "order": "hilbert"}, num_heads=1, num_tokens=16)[0]
    places = {rank: patch for patch, rank in enumerate(HILBERT_4X4)}
    pairs = {(places[rank], places[rank + 1]) for rank in range(15)}
    assert {(i, j) for i, j in np.argwhere(mask) if places[0] >= 0} == pairs | {(j, i) for i, j in pairs}


def test_bigbird_keeps_its_number_of_random_pairs_and_its_window_follows_the_ranks():
    sizes = {"num_heads": 2, "num_tokens": 15, "grid": (3, 5), "layer": 4}
    raster = build_mask("bigbird", **sizes)
    mask, ranks = build_mask({"name": "bigbird", "order": "hilbert"}, **sizes), curve_rank("hilbert", (3, 5)).ravel()
    assert (mask.sum((1, 2)) == raster.sum((1, 2))).all()
    assert mask[:, loop_mask({0, 1}, ranks, 0)].all() and not np.array_equal(mask, raster)


@pytest.mark.parametrize("name", ORDERED)
def test_raster_order_is_what_there_was_before(name):
    for order in ("raster", "z", ["raster"] * 4, ["z", "raster", "z", "raster"]):
        assert resolve_support({"name": name, "order": order}, 4, 16) == resolve_support(name, 4, 16)
    assert resolve_support({"name": name, "order": ["snake"] * 4}, 4, 16)["order"] == "snake"


def test_along_the_snake_of_one_row_it_is_raster_order():
    q, k, v = torch.randn(3, 2, 2, 13, 4, generator=torch.Generator().manual_seed(0))
    for backend in ("reference", "gather", "diagonal", "cpp"):
        plain, snake = (
            attention(q, k, v, along(order), num_prefix_tokens=1, grid=(1, 12), backend=backend)
            for order in ("raster", "snake")
        )
        assert torch.equal(plain, snake)


def test_tokens_in_the_order_with_a_plain_support_are_the_same():
    """Permute, attend in raster order, permute back (VIOLIN Eqs. 8 and 9)."""
    grid = (3, 5)
    q, k, v = torch.randn(3, 2, 3, 15, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for curve in curve_names():
        ranks = torch.tensor(curve_rank(curve, grid).ravel())
        visits = ranks.argsort()
        expected = attention(*(x[:, :, visits] for x in (q, k, v)), along("raster"), layer=3, backend="reference")
        for backend in ("reference", "diagonal"):
            out = attention(q, k, v, along(curve), layer=3, grid=grid, backend=backend)
            torch.testing.assert_close(out, expected[:, :, ranks])


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_changes_no_count(name):
    supports = ({"name": name, "order": "hilbert"}, name)
    config, plain = (sp.SparsePriorViTConfig(image_size=(48, 80), prior={"support": support}) for support in supports)
    assert "order" not in plain.prior["support"]
    assert config.pruning_ratio == plain.pruning_ratio < 100
    assert make_plan(supports[0], (3, 5)).density == make_plan(name, (3, 5)).density
    assert model_flops(config) == model_flops(plain)
    sizes = {"num_heads": 12, "num_tokens": 15, "grid": (3, 5), "num_prefix_tokens": 1, "layer": 2}
    mask, own = (build_mask(support, **sizes).sum((1, 2)) for support in supports)
    assert np.array_equal(mask, own)


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (along("hilbrt"), "order='hilbrt' must be one of raster, z, z_t, snake"),
        (along(3), "order=3 must be one of raster"),
        (along(["hilbert", "moon", "z", "z"]), "order: 'moon' must be one of raster"),
        (along(["hilbert", "snake"]), "must be one name, or a list with one for each of 4 heads"),
        ({"name": "dense", "order": "hilbert"}, "support 'dense' has no order"),
        ({"name": "random", "order": "raster"}, "support 'random' has no order"),
        ({"name": "fibottention", "ordr": "snake"}, "did you mean 'order'"),
    ],
)
def test_bad_orders_are_refused_in_one_line(support, message):
    with pytest.raises(ValueError, match="prior: ") as error:
        resolve_prior({"support": support}, 4, (4, 4))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_where_the_grid_is_unknown():
    with pytest.raises(ValueError, match="grid=None with this support needs a square number"):
        attention(*torch.randn(3, 1, 1, 12, 4), along("hilbert"))
    with pytest.raises(
        ValueError, match="grid=None with order='hilbert' needs a square number of patch tokens, got 12"
    ):
        build_mask(along("hilbert"), num_heads=1, num_tokens=12)


def test_two_dimensional_supports_have_no_order():
    from hf_sparseprior.patterns.supports import register_support

    try:
        register_support("toy_rows")(lambda num_heads, grid: [[0]] * num_heads)
        with pytest.raises(ValueError, match="support 'toy_rows' has no order"):
            resolve_support({"name": "toy_rows", "order": "hilbert"}, 2, 16)
        with pytest.raises(TypeError, match="ordered=True has no meaning"):
            register_support("toy_columns", ordered=True)(lambda num_heads, grid: [[0]] * num_heads)
    finally:
        SUPPORTS.pop("toy_rows", None)


EACH = along(["snake", "raster", "peano_t"])
VARIANTS = [None, ("violin", True, True), ("learned_order", True, False)]


@pytest.mark.parametrize("mask_fill", MASK_FILLS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_every_backend_has_an_order_for_each_head(backend, mask_fill):
    """One order for all heads is among the cases of attention_cases.py."""
    support, compared = {**EACH, "mask_fill": mask_fill}, 0
    dtype, tolerance = (torch.float32, 1e-4) if backend in ("cpp", "triton") else (torch.float64, 1e-10)
    for variant in runnable(backend, support, VARIANTS, dtype):
        for grid, prefix in (((3, 4), 1), ((2, 5), 0)):
            assert_equals_reference(backend, support, variant, grid, prefix, dtype, tolerance)
            compared += 1
    refused = backend in ("triton", "frames", "flex") or (mask_fill == "zero" and backend in ("sdpa", "gather"))
    assert (compared == 0) == refused


# ---- requests that restrict the pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["hilbert", ["snake", "raster", "peano_t"]])
def test_tokens_that_are_left_see_what_the_whole_mask_says(order):
    grid, prefix = (3, 4), 1
    for support in (along(order, w_max=2), {"name": "bigbird", "order": order}):
        plan = make_plan(support, grid, prefix)
        mask = torch.tensor(build_mask(support, num_heads=3, num_tokens=12, grid=grid, num_prefix_tokens=1, layer=2))
        token_ids = torch.tensor([[11, 0, 5, 3], [2, 7, 1, 10]])
        q, k, v = torch.randn(3, 2, 3, 5, 4, generator=torch.Generator().manual_seed(2))
        _, weights = run_plan(AttentionRequest(q, k, v, plan, token_ids=token_ids, need_weights=True))
        for image, own in zip(weights, torch.cat([torch.zeros(2, 1).long(), token_ids + 1], 1), strict=True):
            assert torch.equal(image > 0, mask[:, own][:, :, own])


@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_weights_are_in_raster_order(backend):
    support = along(["snake", "raster", "peano_t"], w_max=3)
    plan = make_plan(support, (3, 4), 2)
    q, k, v = torch.randn(3, 2, 3, 14, 4, generator=torch.Generator().manual_seed(3))
    out, weights = run_plan(AttentionRequest(q, k, v, plan, need_weights=True), backend)
    mask = torch.tensor(build_mask(support, num_heads=3, num_tokens=12, grid=(3, 4), num_prefix_tokens=2, layer=2))
    assert torch.equal(weights[0] > 0, mask)
    torch.testing.assert_close(weights @ v, out)


def test_the_gradient_of_the_order_can_be_differentiated_and_mapped():
    plan = make_plan(along(["snake", "hilbert"]), (2, 3), 1, heads=2)
    q, k, v = torch.randn(3, 1, 2, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def call(q, backend):
        return run_plan(AttentionRequest(q, k, v, plan), backend)[0]

    assert torch.autograd.gradgradcheck(lambda q: call(q, "diagonal"), q.clone().requires_grad_())
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        own, expected = (transform(lambda q: call(q, name))(q) for name in ("diagonal", "reference"))  # noqa: B023
        torch.testing.assert_close(own, expected)


# ---- models ----------------------------------------------------------------------------------------------------------

BOTH = {"support": along("hilbert"), "decay": {"name": "violin", "init": "zeros"}}
VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16, "patch_size": 4,
    "image_size": (12, 20), "num_labels": 3, "num_register_tokens": 1,
}  # fmt: skip


def make(prior=BOTH, family="sparseprior_vit", **options):
    torch.manual_seed(0)
    made = sp.SparsePriorViTConfig(**{**VIT, "prior": prior, **options}) if family == "sparseprior_vit" else None
    config = made or small(family, prior=prior, num_labels=3, **options)
    model = next(cls for name, cls in FAMILIES[family].models.items() if name.endswith("Classification"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def pixels(model):
    sides = model.config.image_size
    sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    return torch.randn(2, *frames, 3, *sides, generator=torch.Generator().manual_seed(7))


def gradients_of(model, images):
    model.zero_grad()
    model(images).logits.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_in_its_written_out_form(family):
    model = make(family=family)
    assert "hilbert" in [prior["support"].get("order") for prior in model.config.layer_priors]
    images, outs, grads = pixels(model), {}, {}
    for backend in ("reference", "auto"):
        model.config._attn_implementation = "eager" if backend == "reference" else "sdpa"
        outs[backend], grads[backend] = model(images).logits, gradients_of(model, images)
    assert_near(outs["auto"], outs["reference"], 1e-5)
    for name, grad in grads["auto"].items():
        assert_near(grad, grads["reference"][name], 1e-4, name)
    raster = make({**BOTH, "support": along("raster")}, family)
    raster.load_state_dict(model.state_dict())
    assert (raster.base_model(images)[0] - model.base_model(images)[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("backend", "order"), [("cpp", "hilbert"), ("diagonal", ["snake", "raster", "peano_t"])])
def test_weights_and_states_of_a_model_are_in_raster_order(backend, order, monkeypatch):
    model = make({"support": along(order), "decay": "violin"})
    images = pixels(model)
    with torch.no_grad():
        expected = model(images, output_attentions=True, output_hidden_states=True)
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
        out = model(images, output_hidden_states=True)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-5, rtol=1e-5)
    for own, state in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(own, state, atol=1e-5, rtol=1e-5)
    for layer, weights in enumerate(expected.attentions):
        mask = build_mask(along(order), num_heads=3, num_tokens=15, grid=(3, 5), num_prefix_tokens=2, layer=layer)
        assert np.array_equal((weights[0] > 0).numpy(), mask)


@pytest.mark.parametrize("extras", [["swin_rpb"], ["irpe_qk"], ["localvit"], ["evit"], ["dynamicvit"]])
def test_extras_mean_the_same_patches(extras):
    """What goes by places in the image does not move: the model is that with its support given as a bias."""
    prior = {"support": along("hilbert"), "decay": "violin", "extras": extras}
    options = {"num_hidden_layers": 4, "num_register_tokens": 0}
    model = make(prior, **options)
    masked = make({**prior, "support": "dense"}, **options)
    masked.load_state_dict(model.state_dict())
    for index, layer in enumerate(masked.vit.layers):
        mask = build_mask(along("hilbert"), num_heads=3, num_tokens=15, grid=(3, 5), num_prefix_tokens=1, layer=index)
        layer.attention.attend = masked_attend(layer.attention, torch.tensor(mask))
    images = pixels(model)
    with torch.no_grad():
        torch.testing.assert_close(model(images).logits, masked(images).logits, atol=1e-5, rtol=1e-5)


def masked_attend(attention_layer, mask):
    whole = type(attention_layer).attend

    def attend(request, backend="auto"):
        own = mask[None]
        if request.token_ids is not None:
            assert (request.token_ids >= 0).all() or request.token_ids.shape[1] < 15
            places = torch.cat([torch.zeros_like(request.token_ids[:, :1]), request.token_ids + 1], 1)
            seen = torch.stack([mask[:, own_places][:, :, own_places] for own_places in places.clamp_min(0)])
            off = torch.nn.functional.pad(request.token_ids < 0, (1, 0))
            own = seen | off[:, None, :, None] | off[:, None, None, :]
        bias = torch.zeros(own.shape).masked_fill(~own, -torch.inf)
        if request.weight_rows is not None:
            out, weights = whole(attention_layer, request._replace(bias=bias, weight_rows=None), backend)
            return out, weights[:, :, : request.weight_rows]
        return whole(attention_layer, request._replace(bias=bias), backend)

    return attend


def test_a_model_comes_back_with_its_order(tmp_path):
    model = make({"support": EACH})
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["prior"]["support"]["order"] == EACH["order"]
    again, images = type(model).from_pretrained(tmp_path).eval(), pixels(model)
    with torch.no_grad():
        assert torch.equal(again(images).logits, model(images).logits)


def test_a_stock_model_takes_an_order(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 8}
    stock = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4)).eval()
    images = torch.randn(2, 3, 16, 16)
    ordered = sp.apply_prior(copy.deepcopy(stock), {"support": along("hilbert", w_max=2)})
    with torch.no_grad():
        out = ordered(images, output_attentions=True)
        for layer, weights in enumerate(out.attentions):
            mask = build_mask(along("hilbert", w_max=2), num_heads=3, num_tokens=16, num_prefix_tokens=1, layer=layer)
            assert np.array_equal((weights[0] > 0).numpy(), mask)
        ordered.save_pretrained(tmp_path)
        again = ViTForImageClassification.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(images).logits, ordered(images).logits)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["diagonal", "gather"])
def test_it_compiles_into_one_graph(backend, monkeypatch):
    """The backend that is chosen: test_layout.py; exports: tests/hf_sparseprior/cli/test_deployment.py."""
    # The code of diagonals is unrolled over heads, offsets and curves: one layer on a small grid.
    decay = {"name": "violin", "curves": ["hilbert"]}
    few, each = {"support": along("hilbert"), "decay": decay}, {"support": along(["snake", "raster", "peano_t"])}
    model = make(few if backend == "diagonal" else each, num_hidden_layers=1, image_size=(8, 12))
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    images = pixels(model)
    expected = gradients_of(model, images)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name, grad in gradients_of(compiled, images).items():
        torch.testing.assert_close(grad, expected[name.removeprefix("_orig_mod.")], atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()
