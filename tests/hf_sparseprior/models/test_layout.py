"""Patches that a model moves once, against attention that moves queries, keys and values in every layer."""

import contextlib
from itertools import cycle

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.layers import find_attention, watch_heads
from hf_sparseprior.attention import request as attention_request
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.base.extras import EXTRAS, Extra, register_extra
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models.base_config import BaseConfig
from hf_sparseprior.models.modeling_sparseprior_swin import SparsePriorSwinAttention
from hf_sparseprior.patterns.supports import LayerKey, build_mask, resolve_support
from hf_sparseprior.priors.prior import common_order, resolve_prior
from tests.hf_sparseprior.attention.attention_cases import assert_near
from tests.hf_sparseprior.small import shipped_families

HILBERT = {"name": "fibottention", "w_min": 1, "w_max": 6, "order": "hilbert"}
PRIORS = {
    "violin": {"support": HILBERT, "decay": "violin"},
    "learned_order": {"support": {**HILBERT, "order": "peano_t"}, "decay": "learned_order"},
    "zero": {"support": {**HILBERT, "mask_fill": "zero"}},
    "bigbird": {"support": {"name": "bigbird", "order": "snake_t"}, "decay": "manhattan"},
    "relative": {"support": HILBERT, "extras": ["irpe_qkv", "transformer_xl"]},
}
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16, "patch_size": 4,
    "image_size": (12, 20),
}  # fmt: skip
LARGER = {
    "sparseprior_vit": {**SIZES, "num_register_tokens": 1},
    "sparseprior_timesformer": {**SIZES, "num_frames": 3},
    "sparseprior_timesformer joint": {**SIZES, "num_frames": 3, "attention_type": "joint_space_time"},
    "sparseprior_timesformer space": {**SIZES, "num_frames": 3, "attention_type": "space_only"},
    "sparseprior_convit": {**SIZES, "num_hidden_layers": 3, "num_local_layers": 1},
    "sparseprior_swin": {
        "embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 4, "image_size": 32, "patch_size": 4,
    },
}  # fmt: skip


def make(family, prior, auto_class=None, **options):
    torch.manual_seed(0)
    name = family.partition(" ")[0]
    if family.endswith("joint"):  # over frames there is one order only along a curve in three dimensions
        prior = {**prior, "extras": [], "time": "clip"}
    config = FAMILIES[name].make_config(**{**LARGER[family], "num_labels": 3, "prior": prior, **options})
    models = FAMILIES[name].models
    auto_class = auto_class or next(name for name in models if name.endswith("Classification"))
    model = models[auto_class](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def pixels(model, factor=1):
    sides = model.config.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    shape = (2, *frames, 3, factor * height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@contextlib.contextmanager
def in_raster_order(model):
    """Inside the block the model's patches stay where they are, and attention moves what it needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.config), "layout", "raster")
        for module in model.modules():
            if isinstance(module, SparsePriorSwinAttention):
                patch.setattr(module, "layout", "raster")
        yield


def results(model, images):
    model.zero_grad()
    out = model(images, output_attentions=True, output_hidden_states=True)
    plain = model(images)
    plain.logits.square().sum().backward()
    found = {"logits": out.logits, "plain": plain.logits, "last": model.base_model(images)[0]}
    found |= {f"state {number}": state for number, state in enumerate(out.hidden_states)}
    found |= {f"weights {number}": weights for number, weights in enumerate(out.attentions)}
    return {name: value.detach() for name, value in found.items()} | {
        f"gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


# Every prior with two or three families, the learned order, of which grids of other sizes are made, with each.
CASES = [
    *((family, "learned_order") for family in LARGER),
    *zip(LARGER, cycle(["violin", "zero", "bigbird", "relative"])),
    ("sparseprior_vit", "relative"), ("sparseprior_swin", "relative"), ("sparseprior_swin", "bigbird"),
    ("sparseprior_timesformer joint", "violin"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "prior"), CASES)
def test_it_is_the_same_as_moving_in_every_layer(family, prior):
    model = make(family, PRIORS[prior])
    for factor in (1, 2) if prior == "learned_order" else (1,):
        images = pixels(model, factor)
        moved = results(model, images)
        with in_raster_order(model):
            expected = results(model, images)
        assert moved.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(moved[name], value, 1e-4 if name.startswith("gradient") else 1e-5, name)


def test_every_family_that_moves_its_patches_is_here():
    moving = {name for name, family in FAMILIES.items() if family.config_class.layout is not BaseConfig.layout}
    assert moving and moving & {*shipped_families()} <= LARGER.keys()


@pytest.mark.parametrize("family", LARGER)
def test_how_often_tokens_move(family, monkeypatch):
    """Twice in a model; in one with windows, which every layer makes anew, twice in a layer."""
    calls = []
    move = attention_request.reordered
    monkeypatch.setattr(attention_request, "reordered", lambda *given: calls.append(1) or move(*given))
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "diagonal" if family != "sparseprior_swin" else "reference")
    model = make(family, PRIORS["violin"])
    layers = sum(stage.num_layers for stage in model.config.stages if stage.takes_prior)
    with torch.no_grad():
        model(pixels(model))
        assert len(calls) == (2 * layers if family == "sparseprior_swin" else 2)
        each = make(family, {"support": {**HILBERT, "order": ["hilbert", "snake", "raster"]}})
        calls.clear()
        each(pixels(each))
        assert len(calls) == (0 if family == "sparseprior_swin" else 4 * layers)


def test_what_needs_raster_order_keeps_it():
    def order_of(support, **slots):
        return common_order(resolve_prior({"support": support, **slots}, 3, (4, 4)))

    assert order_of(HILBERT) == order_of(HILBERT, decay="learned_order") == "hilbert"
    assert order_of(HILBERT, extras=["swin_rpb", "irpe_k", "transformer_xl"]) == "hilbert"
    assert order_of("fibottention") == order_of("dense", extras=["swin_rpb"]) == "raster"
    assert order_of({**HILBERT, "order": ["hilbert", "hilbert", "snake"]}) == "raster"
    for extra in ("localvit", "evit", "dynamicvit"):
        assert order_of(HILBERT, extras=[extra]) == "raster"
    try:
        register_extra("toy_extra")(type("ToyExtra", (Extra,), {"__doc__": "An extra of a user's own."}))
        assert order_of(HILBERT, extras=["toy_extra"]) == "raster"
    finally:
        EXTRAS.pop("toy_extra", None)


def test_a_plan_takes_the_order_of_its_support_alone():
    support = resolve_support(HILBERT, 3, 16)
    for layout, grid in (("snake", (4, 4)), ("hilbert", (2, 4, 4))):
        with pytest.raises(ValueError, match=f"layout='{layout}' must be the order of the support"):
            AttentionPlan(LayerKey(3, grid), 1, support, layout=layout)
    plan = AttentionPlan(LayerKey(3, (4, 4)), 1, support, layout="hilbert")
    again = AttentionPlan.from_key(plan.key)
    raster = build_mask({**HILBERT, "order": "raster"}, num_heads=3, num_tokens=16, num_prefix_tokens=1)
    assert (plan.build_table("mask") == raster).all() and (again.build_table("mask") == raster).all()


def test_feature_maps_and_labels_of_tokens_are_in_raster_order():
    prior = PRIORS["violin"]
    backbone = make("sparseprior_vit", prior, "AutoBackbone", out_features=["stem", "stage1", "stage2"])
    labels = make("sparseprior_vit", prior, token_classifier=True, use_class_token=True)
    images, sources = pixels(backbone), torch.randint(2, (2, 15), generator=torch.Generator().manual_seed(5))
    found = []
    for block in (contextlib.nullcontext(), in_raster_order(backbone)):
        with block, torch.no_grad():
            found.append([*backbone(images).feature_maps, labels(images, token_sources=sources).token_logits])
    assert len(found[0]) == 4
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", LARGER)
def test_heads_are_seen_in_raster_order(family):
    model, found = make(family, PRIORS["violin"]), []
    for block in (contextlib.nullcontext(), in_raster_order(model)):
        seen = {}
        with block, torch.no_grad(), watch_heads(find_attention(model), seen.__setitem__):
            model(pixels(model))
        found.append(seen)
    assert found[0].keys() == found[1].keys() and len(found[0]) == sum(s.num_layers for s in model.config.stages)
    for number, heads in found[1].items():
        if family == "sparseprior_swin" and number == 1:  # the others come shifted from a layer with shifted windows
            heads = heads.unflatten(2, (8, 8)).roll((2, 2), (2, 3)).flatten(2, 3)
        torch.testing.assert_close(found[0][number], heads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["sparseprior_vit", "sparseprior_timesformer joint", "sparseprior_swin"])
def test_gradient_checkpointing(family):
    model = make(family, PRIORS["violin"], drop_path_rate=0.0)
    images = pixels(model)
    model(images).logits.square().sum().backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable()
    model(images).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sparseprior_vit", "sparseprior_timesformer joint"])
def test_it_compiles_into_one_graph(family):
    model = make(family, PRIORS["violin"])
    images = pixels(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images).logits, model(images).logits, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sparseprior_timesformer", "sparseprior_swin"])
def test_it_is_exported(family):
    model = make(family, PRIORS["violin"])
    images = pixels(model)
    batch = {"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(model, (images,), dynamic_shapes=batch)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images)["logits"], model(images).logits, atol=1e-5, rtol=1e-5)


def test_a_layer_alone_takes_patches_in_raster_order():
    """Other code than the model calls layers, too."""
    model = make("sparseprior_vit", PRIORS["violin"], "AutoModel")
    assert isinstance(model, sp.SparsePriorViTModel)
    tokens, plan = torch.randn(2, 17, 24), model.layers[0].attention.plan((3, 5), 2, layout="hilbert")
    with torch.no_grad():
        own = model.layers[0](tokens, (3, 5), 2)[0]
        options = CallOptions(layout="hilbert")
        moved = model.layers[0](model.move_patches(tokens, plan), (3, 5), 2, options)[0]
        torch.testing.assert_close(model.move_patches(moved, plan, back=True), own, atol=1e-5, rtol=1e-5)
