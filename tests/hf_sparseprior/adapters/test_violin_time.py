"""Adapters with a decay on models of clips: how they see time, as `apply_prior` with the same decay does."""

import json
from itertools import cycle, product

import peft
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.base.resolved import TIMES
from hf_sparseprior.priors.layer import PriorAttention
from tests.hf_sparseprior.adapters.stock_models import STOCK, output

CURVES = {"name": "violin", "curves": ["hilbert", "snake_t"], "init": "moving"}
LORA = {"r": 2, "target_modules": "all-linear"}
CONFIGS = {
    "violin": lambda **extra: sp.ViolinAdapterConfig(**extra),
    "dora": lambda **extra: sp.LoraViolinConfig(**LORA, use_dora=True, **extra),
}
methods = pytest.mark.parametrize("method", CONFIGS)
CLIPS = ["videomae", "videomae_masked", "vivit", "timesformer_joint"]


def ours(prior="dense"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    config = sp.SparsePriorTimesformerConfig(
        **sizes, image_size=32, patch_size=8, num_frames=3, prior=prior, attention_type="joint_space_time"
    )
    model = sp.SparsePriorTimesformerModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ours_output(model):
    pixels = torch.randn(2, 3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(pixels).last_hidden_state


def take_scalars(model, other, adapter="default"):
    """Give the prior of a model the scalars of an adapter."""
    layers = [[module for module in one.modules() if isinstance(module, PriorAttention)] for one in (other, model)]
    assert layers[0]
    for mine, theirs in zip(*layers, strict=True):
        theirs.decay_bias.load_state_dict(mine.decay_adapter.decay_biases[adapter].state_dict())
    return model


@pytest.mark.parametrize(
    ("name", "time", "method"),
    [(*case, method) for case, method in zip(product(CLIPS, TIMES), cycle(CONFIGS))],
)
def test_it_computes_what_a_prior_with_this_time_does(name, time, method, tmp_path):
    before = output(STOCK[name].build(), name)
    model = peft.get_peft_model(STOCK[name].build(), CONFIGS[method](decay=CURVES, time=time)).eval()
    other = take_scalars(sp.apply_prior(STOCK[name].build(), {"decay": CURVES, "time": time}), model)
    expected = output(other, name)
    assert (expected - before).abs().max() > 1e-4
    torch.testing.assert_close(output(model, name), expected, rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["time"] == time
    again = peft.PeftModel.from_pretrained(STOCK[name].build(), tmp_path).eval()
    assert output(again, name).equal(output(model, name))
    with again.disable_adapter():
        torch.testing.assert_close(output(again, name), before, rtol=1e-5, atol=1e-6)
    assert output(again.unload(), name).equal(before)


@methods
def test_adapters_that_see_time_differently_stand_side_by_side(method):
    make_config = CONFIGS[method]
    model = peft.get_peft_model(STOCK["vivit"].build(), make_config(decay=CURVES, time="frame"), "frame").eval()
    for time in TIMES[1:]:
        model.add_adapter(time, make_config(decay=CURVES, time=time))
    outputs = {}
    for time in (*TIMES, TIMES[0]):
        model.set_adapter(time)
        prior = sp.apply_prior(STOCK["vivit"].build(), {"decay": CURVES, "time": time})
        outputs[time] = output(take_scalars(prior, model, time), "vivit")
        torch.testing.assert_close(output(model, "vivit"), outputs[time], rtol=1e-5, atol=1e-6)
    for one, two in (("frame", "clip"), ("clip", "axes"), ("frame", "axes")):
        assert (outputs[one] - outputs[two]).abs().max() > 1e-4


@pytest.mark.parametrize("time", TIMES)
def test_our_joint_model_takes_it_as_well(time):
    model = peft.get_peft_model(ours(), sp.ViolinAdapterConfig(decay=CURVES, time=time)).eval()
    twin = ours({"decay": CURVES, "time": time})
    twin.load_state_dict(ours().state_dict(), strict=False)
    take_scalars(twin, model)
    torch.testing.assert_close(ours_output(model), ours_output(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("time", TIMES)
def test_without_a_time_it_is_that_of_the_models_support(time):
    support = {"support": {"name": "fibottention", "w_min": 2, "w_max": 9}, "time": time}
    for given in (None, time):
        model = sp.apply_prior(STOCK["vivit"].build(), support)
        model = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay=CURVES, time=given))
        expected = sp.apply_prior(STOCK["vivit"].build(), {**support, "decay": CURVES})
        assert output(model, "vivit").equal(output(take_scalars(expected, model), "vivit"))
    other = next(one for one in TIMES if one != time)
    message = f"time={other!r} must be {time!r}, as the support of VivitModel sees time"
    with pytest.raises(ValueError, match=message):
        model = sp.apply_prior(STOCK["vivit"].build(), support)
        peft.get_peft_model(model, sp.ViolinAdapterConfig(decay=CURVES, time=other))


def test_what_has_no_meaning_is_refused_as_in_a_prior(tmp_path):
    for value in ("clips", 3, ""):
        with pytest.raises(ValueError, match=f"time={value!r} must be one of frame, clip, axes"):
            sp.ViolinAdapterConfig(time=value)
    for name in ("vit", "timesformer", "swin"):
        model = STOCK[name].build()
        with pytest.raises(
            ValueError, match=r"^time='clip' is for attention over the frames of a clip; here it sees one"
        ):
            peft.get_peft_model(model, sp.ViolinAdapterConfig(time="clip"))
        assert not any(isinstance(module, PriorAttention) for module in model.modules())
        assert peft.get_peft_model(model, sp.ViolinAdapterConfig(time="frame")) is not None
    learned = {"name": "learned_order", "grid": [8, 8]}
    with pytest.raises(ValueError, match=r"learned_order: grid=\[8, 8\] must be \(frames, height, width\)"):
        peft.get_peft_model(STOCK["vivit"].build(), sp.ViolinAdapterConfig(decay=learned, time="clip"))
    peft.get_peft_model(STOCK["vivit"].build(), sp.ViolinAdapterConfig(time="clip")).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    for value, said in (("clips", "time='clips' must be one of"), (3, "time=3 must be")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**written, "time": value}))
        with pytest.raises(ValueError, match=f"adapter_config.json: {said}"):
            peft.PeftModel.from_pretrained(STOCK["vivit"].build(), tmp_path)


def test_adapters_of_earlier_versions_see_frames(tmp_path):
    """They have no `time` in their file."""
    model = peft.get_peft_model(STOCK["videomae"].build(), sp.ViolinAdapterConfig(decay=CURVES))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written.pop("time") is None
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    again = peft.PeftModel.from_pretrained(STOCK["videomae"].build(), tmp_path)
    expected = sp.apply_prior(STOCK["videomae"].build(), {"decay": CURVES, "time": "frame"})
    assert output(again, "videomae").equal(output(take_scalars(expected, again), "videomae"))
