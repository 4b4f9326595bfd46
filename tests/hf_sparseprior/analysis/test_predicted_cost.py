"""Costs predicted from less deep models, against the whole model."""

import pytest
import torch

from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis.costs_measured import traced_bytes
from hf_sparseprior.analysis.predicted_cost import PASSES, Twin, call_of, predicted_costs, twins
from hf_sparseprior.base.families import preset_family, presets
from tests.each import each

CPU = torch.device("cpu")
PRESETS = [("images", name) for name in presets()] + [("clips", name) for name in ("vit_tiny", "vit_large")]


@pytest.mark.parametrize(("takes", "preset"), PRESETS)
def test_shares_make_up_every_depth(takes, preset):
    """What is linear in the number of layers of each kind comes out exactly."""
    config = preset_family(preset, takes).make_config(preset)
    own = twins(config)
    assert sum(twin.share for twin in own) == pytest.approx(1)
    if not own[0].changes:
        assert len(own) == 1 and preset.startswith("iformer")
        return
    for key in own[0].changes:
        values = [torch.tensor(twin.changes[key], dtype=torch.float64) for twin in own]
        total = sum(twin.share * value for twin, value in zip(own, values, strict=True))
        torch.testing.assert_close(total, torch.tensor(getattr(config, key), dtype=torch.float64))
        assert all((value <= torch.tensor(getattr(config, key)) + 2).all() for value in values)


SMALL = {
    "vit_tiny": {
        "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48,
    },
    "swin_tiny": {"image_size": 56, "embed_dim": 12, "num_heads": [1, 1, 2, 2], "depths": [2, 2, 5, 2]},
    "convit_tiny": {"image_size": 32, "patch_size": 8},
    "iformer_tiny": {"image_size": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "prior"), [(preset, ("fibottention", "dense")[i % 2]) for i, preset in enumerate(SMALL)]
)
def test_memory_is_that_of_the_whole_model(preset, prior):
    config = preset_family(preset).make_config(preset, prior=prior, num_labels=3, **SMALL[preset])
    before = config.to_dict()
    found = predicted_costs(config, 2, CPU, budget=0.01)
    assert config.to_dict() == before and tuple(found) == PASSES
    for name, cost in found.items():
        call = call_of(config, Twin({}, 1.0), 2, CPU, torch.float32, name == "training")
        call()
        assert cost.bytes == pytest.approx(traced_bytes(call, CPU)[0], rel=0.02)
        assert cost.lower <= cost.seconds <= cost.upper and cost.seconds > 0


def test_seconds_follow_the_layers(monkeypatch):
    """With a clock that knows what a layer and the rest take."""
    from hf_sparseprior.analysis import predicted_cost

    config = preset_family("swin_tiny").make_config("swin_tiny")
    took = {"depths": (0.1, [3.0, 2.0, 5.0, 7.0])}

    def rounds(calls, device, budget):
        rest, layers = took["depths"]
        return [[rest + sum(n * own for n, own in zip(call.depths, layers, strict=True)) for call in calls]] * 3

    class Call:
        def __init__(self, depths):
            self.depths = depths

        def __call__(self):
            return None

    monkeypatch.setattr(predicted_cost, "interleaved_rounds", rounds)
    monkeypatch.setattr(predicted_cost, "call_of", lambda config, twin, *rest: Call(twin.changes["depths"]))
    monkeypatch.setattr(predicted_cost, "traced_bytes", lambda call, device: (100 + sum(call.depths), 0))
    [cost] = predicted_cost.predicted_costs(config, 1, CPU, passes=("forward",)).values()
    assert cost.seconds == pytest.approx(0.1 + 2 * 3 + 2 * 2 + 6 * 5 + 2 * 7) and cost.bytes == 112


def test_noise_does_not_make_the_whole_cheaper_than_a_part(monkeypatch):
    from hf_sparseprior.analysis import predicted_cost

    config = preset_family("vit_tiny").make_config("vit_tiny", num_labels=3, **SMALL["vit_tiny"])
    # Two more layers seem to take less time than none; in the third round, 0.5 a layer.
    monkeypatch.setattr(predicted_cost, "interleaved_rounds", lambda *given: [[2.0, 1.0], [3.0, 0.5], [1.0, 2.0]])
    [cost] = predicted_cost.predicted_costs(config, 1, CPU, passes=("forward",)).values()
    assert config.num_hidden_layers == 12
    assert (cost.lower, cost.seconds, cost.upper) == (2.5, 3.0, 4.5)  # quartiles of 2, 3 and 1 + 10 * 0.5


def test_what_a_first_call_makes_is_not_counted(monkeypatch):
    """It may compile a kernel for seconds; then the call would hardly be repeated."""
    from hf_sparseprior.analysis import predicted_cost

    timed = {"slow at first": [], "fast": []}

    def seconds_per_call(call, repeats, device):
        timed[call].append(repeats)
        return 2.0 if call == "slow at first" and len(timed[call]) == 1 else 2e-4

    monkeypatch.setattr(predicted_cost, "seconds_per_call", seconds_per_call)
    monkeypatch.setattr(predicted_cost, "WARM_UP", 0.0)
    rounds = predicted_cost.interleaved_rounds(list(timed), CPU, 1e9)
    assert rounds == [[2e-4, 2e-4]] * 10
    assert timed["slow at first"] == timed["fast"] and timed["fast"][-1] > 1


def test_what_cannot_be_predicted_is_refused():
    for prior in ("evit", "dynamicvit"):
        config = preset_family("vit_tiny").make_config("vit_tiny", prior=f"fibottention+{prior}")
        with pytest.raises(ValueError, match=f"{prior} drops tokens between layers"):
            twins(config)


@pytest.mark.parametrize(
    "options",
    [
        ["fibottention", "--heads", "3", "--head-dim", "8", "--layers", "5"],
        ["violin", "--model", "vit_tiny", "--images", "2", "--dtype", "bfloat16"],
        ["fibottention", "--prefix", "0", "--heads", "2", "--head-dim", "8"],
    ],
)
def test_the_command_prints_time_and_memory(options, capsys, monkeypatch):
    from hf_sparseprior.analysis import predicted_cost

    monkeypatch.setattr(predicted_cost, "WARM_UP", 0.0)
    assert main(["explain", *options, "--time", "--grid", "4x4", "--no-picture"]) == 0
    said = capsys.readouterr()
    assert "predicted" in said.out and "forward " in said.out and "MiB besides weights and images" in said.out
    assert "timing 2 models" in said.err


@each(
    "options, message",
    [
        (["--images", "2"], "--images=2 belongs to --time"),
        (["--model", "vit_tiny"], "--model=vit_tiny belongs to --time"),
        (["--time", "--images", "0"], "--images"),
        (["--time", "--model", "resnet"], "resnet"),
        (["--time", "--prefix", "2"], "--prefix=2"),
        (["--time", "--grid", "2x4x4"], "needs --model"),
    ],
)
def test_bad_values_are_refused(options, message, capsys):
    assert main(["explain", "fibottention", "--no-picture", *options]) == 2
    assert message in capsys.readouterr().err
