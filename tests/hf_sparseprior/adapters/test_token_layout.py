"""Where the tokens of a stock model lie: other grids, shuffled and masked patches, layers that run twice."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Event

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import StockPrior
from hf_sparseprior.adapters.token_layout import LayoutCheckpoint
from hf_sparseprior.priors.prior import is_prior_weight
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK, move_decays


@each("name", ["vit", "deit", "dinov2_registers", "ijepa", "clip", "siglip", "swin", "dinov3"])
def test_another_resolution_and_a_grid_that_is_no_square(name):
    """The grid follows the image: 8 x 10 patches of a model made for 8 x 8."""
    model = STOCK[name].build()
    images = torch.randn(2, 3, 32, 40)
    extra = {} if name in ("dinov2_registers", "dinov3") else {"interpolate_pos_encoding": True}
    sp.apply_prior(model, "fibottention+violin")
    with torch.no_grad():
        model(pixel_values=images, **extra)
    layer = next(module for module in model.modules() if isinstance(module, StockPrior))
    (plan,) = layer._plans.values()
    assert plan.grid == ((4, 4) if name == "swin" else (8, 10)) and plan.num_prefix_tokens == STOCK[name].prefix


def test_no_offset_and_no_curve_crosses_from_one_frame_into_the_next():
    """The last patch of a frame and the first of the next are neighbours in memory and far apart in space."""
    model = sp.apply_prior(STOCK["videomae"].build(), {"support": {"name": "window", "w": 1}, "decay": "violin"})
    with torch.no_grad():
        model(**STOCK["videomae"].example())
    layer = next(module for module in model.modules() if isinstance(module, StockPrior))
    (plan,) = layer._plans.values()
    mask, positions = plan.build_table("mask"), plan.build_table("positions")
    assert not mask[:, 63, 64].any() and mask[:, 63, 62].all() and mask[:, 64, 65].all()
    assert mask[:, 5, 64 + 6].all() and mask[:, 5, 64 + 5].all()  # and between frames as within one
    assert positions.shape[-1] == 128 and (positions[..., :64] == positions[..., 64:]).all()
    assert plan.density == mask[:, :64, :64].mean()


def two_inputs(name):
    """Inputs whose tokens lie elsewhere: with other visible patches, or of another grid."""
    first, second = STOCK[name].example(1), STOCK[name].example(2)
    if name == "mae":
        second["noise"] = 1 - second["noise"]
    else:
        first, second = ({"pixel_values": torch.randn(2, 3, *size)} for size in ((32, 48), (48, 32)))
        first["interpolate_pos_encoding"] = second["interpolate_pos_encoding"] = True
    return first, second


@pytest.mark.parametrize("name", ["vit", "mae"])
def test_two_forwards_before_one_checkpointed_backward(name):
    """The layers run again with the layout of their own forward, with other visible patches or another grid."""
    first, second = two_inputs(name)
    gradients = []
    for checkpointed in (False, True):
        model = sp.apply_prior(STOCK[name].build(), "fibottention+violin").train()
        move_decays(model)
        if checkpointed:
            model.gradient_checkpointing_enable()
        loss = sum(model(**view).last_hidden_state.square().sum() for view in (first, second))
        loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)
    sp.remove_prior(model)
    assert not any(
        isinstance(getattr(module, "_gradient_checkpointing_func", None), LayoutCheckpoint)
        for module in model.modules()
    )


@pytest.mark.parametrize(
    ("name", "reentrant", "alone"),
    [*(("vit", *both) for both in product((False, True), repeat=2)), ("swin", True, True), ("mae", True, False)],
)
def test_gradient_checkpointing_gives_the_same_gradients(name, reentrant, alone):
    """Also where the decay learns alone: a reentrant checkpoint wants an input that needs a gradient."""
    gradients = []
    for checkpointed in (False, True):
        model = sp.apply_prior(STOCK[name].build(), "fibottention+violin").train()
        move_decays(model)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(not alone or is_prior_weight(key))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**STOCK[name].example()).last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and any(map(is_prior_weight, gradients[0]))
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)


@pytest.mark.parametrize("name", ["vit", "mae"])
def test_two_threads_use_one_model(name):
    """A forward goes on where its tokens lie, although one of other images began and ended in between."""
    first, second = two_inputs(name)
    model = sp.apply_prior(STOCK[name].build(), "fibottention+violin")
    move_decays(model)

    @torch.no_grad()
    def run(images):
        return model(**images).last_hidden_state

    expected = [run(first), run(second)]
    embedded, other_ended = Event(), Event()

    def wait(module, args, output):
        if not embedded.is_set():
            embedded.set()
            assert other_ended.wait(60)

    model.embeddings.register_forward_hook(wait)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(run, first)
        assert embedded.wait(60)
        assert torch.equal(run(second), expected[1])
        other_ended.set()
        assert torch.equal(found.result(), expected[0])


def test_a_copied_layout_is_in_no_forward():
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention")
    layout = next(module.layout for module in model.modules() if isinstance(module, StockPrior))
    with torch.no_grad():
        model(**STOCK["vit"].example())
    assert layout.grid == (8, 8) and copy.deepcopy(layout).grid is None
