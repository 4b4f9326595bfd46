"""Priors on stock models of clips: as our own model with the same weights, per frame, over the clip and along axes."""

import json

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, TimesformerForVideoClassification, VideoMAEModel, VivitModel

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import StockPrior, applied_prior
from hf_sparseprior.base.resolved import TIMES
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.patterns.supports import build_mask
from tests.hf_sparseprior.adapters.stock_models import CLIP, SIZES, STOCK, move_decays, output

TYPES = ["divided_space_time", "joint_space_time", "space_only"]
HILBERT = {"name": "fibottention", "w_min": 2, "w_max": 9, "order": "hilbert"}


def prior_of(time):
    return {"support": HILBERT, "decay": {"name": "violin", "init": "identity"}, "time": time}


def twins(tmp_path, kind, prior):
    """A model of ours, and transformers' with its weights and the same prior."""
    torch.manual_seed(0)
    config = sp.SparsePriorTimesformerConfig(
        **SIZES, image_size=32, patch_size=8, num_frames=3, num_labels=5, prior=prior, attention_type=kind
    )
    ours = sp.SparsePriorTimesformerForVideoClassification(config).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    move_decays(ours)
    ours.save_pretrained(tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "stock", prior="dense", to="timesformer")
    stock = TimesformerForVideoClassification.from_pretrained(tmp_path / "stock").eval()
    plain = stock(clip()).logits.detach()
    sp.apply_prior(stock, prior)
    layers = [module for module in stock.modules() if isinstance(module, StockPrior)]
    for layer, own in zip(layers, ours.vit.layers, strict=True):
        assert layer.prior == own.attention.prior
        layer.decay_bias.load_state_dict(own.attention.decay_bias.state_dict())
    return ours, stock, plain


def clip(frames=3):
    return torch.randn(2, frames, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("kind", "time"), [(TYPES[0], "frame"), (TYPES[2], "frame"), *((TYPES[1], t) for t in TIMES)])
def test_a_stock_timesformer_computes_what_ours_does(kind, time, tmp_path):
    ours, stock, plain = twins(tmp_path, kind, prior_of(time))
    options = {"output_attentions": True, "output_hidden_states": True}
    expected, found = ours(clip(), **options), stock(clip(), **options)
    logits = found.logits if kind != "space_only" else found.logits.unflatten(0, (2, 3)).mean(1)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-4)
    assert (found.logits - plain).abs().max() > 1e-3
    expected.logits.square().sum().backward()
    logits.square().sum().backward()
    layers = [module for module in stock.modules() if isinstance(module, StockPrior)]
    for layer, own in zip(layers, ours.vit.layers, strict=True):
        theirs, gradient = layer.decay_bias.beta.grad, own.attention.decay_bias.beta.grad
        assert gradient.abs().max() > 0 or layer is layers[-1]  # whose class token alone is read, and M is 1 there
        torch.testing.assert_close(theirs, gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().clamp_min(1).item())
    if kind == "joint_space_time":  # attention follows the clip, not the configured number of frames
        with torch.no_grad():
            torch.testing.assert_close(stock(clip(5)).logits, ours(clip(5)).logits, rtol=1e-4, atol=1e-5)
    stock.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["sparse_prior"]["prior"]
    assert saved.get("time", "frame") == time
    again = TimesformerForVideoClassification.from_pretrained(tmp_path / "saved").eval()
    assert (
        again(clip(), **options).logits.equal(found.logits) and applied_prior(again).prior == applied_prior(stock).prior
    )
    assert sp.remove_prior(stock)(clip()).logits.equal(plain)
    assert not any("forward" in module.__dict__ for module in stock.modules())


@pytest.mark.parametrize(
    ("name", "time"),
    [*(("vivit", time) for time in TIMES), ("videomae", "clip"), *(("videomae_masked", time) for time in TIMES[1:])],
)
def test_tubelets_are_the_frames_of_patches(name, time):
    """Each layer of the plain model gets the support as a mask over (frames / tubelet, height, width)."""
    case = STOCK[name]
    model = sp.apply_prior(case.build(), {"support": HILBERT, "time": time})
    visible = None if name != "videomae_masked" else ~case.inputs["bool_masked_pos"]
    calls = []

    def masked(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        sizes = {"num_heads": 4, "num_tokens": 128, "num_prefix_tokens": case.prefix, "layer": len(calls)}
        whole = torch.tensor(build_mask(HILBERT, grid=(2, 8, 8), time=time, **sizes))
        calls.append(0)
        kept = whole[None]
        if visible is not None:
            kept = torch.stack([whole[:, own][:, :, own] for own in visible])
            kept = kept | (~kept.any(-1, keepdim=True) & torch.eye(kept.shape[-1], dtype=torch.bool))
        logits = (query @ key.mT * scaling).masked_fill(~kept, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("masked_over_time", masked)
    plain = case.build()
    plain.set_attn_implementation("masked_over_time")
    torch.testing.assert_close(output(model, name), output(plain, name), rtol=1e-4, atol=1e-5)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["vivit", "videomae", "timesformer_joint"])
def test_curves_in_three_dimensions_are_saved_and_loaded(name, tmp_path):
    model = sp.apply_prior(STOCK[name].build(), "violin+clip")
    with torch.no_grad():
        before = output(model, name)
        move_decays(model)
    expected = output(model, name)
    assert (expected - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert output(again, name).equal(expected)
    layer = next(module for module in again.modules() if isinstance(module, StockPrior))
    (plan,) = layer._plans.values()
    positions, case = plan.build_table("positions"), STOCK[name]
    assert positions.shape[-1] == case.frames * 64 and (positions[..., :64] != positions[..., 64:128]).any()
    assert np.array_equal(np.sort(positions[0, 0]), np.arange(case.frames * 64))


def test_what_stock_models_of_clips_refuse():
    for name, prior, message in [
        ("timesformer", "violin+clip", "time='clip' is for attention over the frames of a clip"),
        ("vivit", "irpe_k", "'irpe_k' is of places in one image"),
        ("timesformer_joint", "violin+transformer_xl", "'transformer_xl' is of places in one image"),
        ("vivit", "clip", "time='clip' is how support and decay see time, and 'dense' has neither"),
        ("vivit", "localvit", "'localvit' changes the MLP; apply_prior reaches attention alone"),
    ]:
        model = STOCK[name].build()
        with pytest.raises(ValueError, match=message):
            sp.apply_prior(model, prior)
        assert not any(isinstance(module, StockPrior) for module in model.modules())


def test_temporal_attention_stays_as_it_is():
    model = sp.apply_prior(STOCK["timesformer"].build(), "fibottention+violin")
    names = applied_prior(model).attention
    assert len(names) == 3 and not any("temporal" in name for name in names)
    assert isinstance(model, STOCK["timesformer"].model) and STOCK["timesformer"].shape == CLIP
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        expected = output(model, "timesformer")
        torch.testing.assert_close(output(compiled, "timesformer"), expected, rtol=1e-4, atol=1e-5)
    assert {VideoMAEModel, VivitModel} <= {case.model for case in STOCK.values()}
