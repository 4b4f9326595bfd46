"""iFormer's published files as SparsePriorIformer, and back. The oracle is iFormer written out (iformer_oracle.py)."""

import pytest
import torch
from transformers import AutoModel, AutoModelForImageClassification

from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from tests.hf_sparseprior.models.iformer_oracle import SMALL, published_forward, published_state

SOURCES = {
    "classifier": {},
    "layer scale and two classifiers": {"gamma": True, "distilled": True},
    "base": {"labels": 0},
}


def pixels():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def saved(state, folder):
    torch.save({"model": state, "epoch": 299}, folder / "source.pth")
    return folder / "source.pth"


@pytest.mark.parametrize("kind", SOURCES)
def test_published_files_compute_the_same_and_come_back(kind, tmp_path):
    state = published_state(**SOURCES[kind])
    source = saved(state, tmp_path)
    lines = convert_checkpoint(source, tmp_path / "ours")
    assert any(
        "image_size is not in the source; 224, at which iFormer was trained, is assumed" in line for line in lines
    )
    loader = AutoModelForImageClassification if state.keys() & {"classifier.classifier.l.weight"} else AutoModel
    model = loader.from_pretrained(tmp_path / "ours").eval()
    assert model.dtype == torch.float64 and model.config.image_size == 224
    for name in ("hidden_sizes", "conv_depths", "attention_depths", "final_conv_depths", "key_reduction"):
        assert getattr(model.config, name) == list(SMALL[name])
    assert (model.config.conv_ratio, model.config.mlp_ratio, model.config.stem_kernel_size) == (3, 2, 5)
    with torch.no_grad():
        output, expected = model(pixels()), published_forward(state, pixels())
    own = output.logits if loader is AutoModelForImageClassification else output.pooler_output
    torch.testing.assert_close(own, expected, atol=1e-9, rtol=0)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back.pth"), "--to", "original"]) == 0
    back = torch.load(tmp_path / "back.pth", weights_only=True)["model"]
    assert back.keys() == state.keys()
    assert all(torch.equal(value, state[name]) and value.shape == state[name].shape for name, value in back.items())


def test_a_prior_is_put_on_a_published_file(tmp_path):
    convert_checkpoint(
        saved(published_state(), tmp_path), tmp_path / "ours", prior="fibottention+violin", image_size=64
    )
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert model.config.prior_name == "fibottention+violin" and model.config.image_size == 64


def test_a_classifier_is_left_out_on_request(tmp_path):
    state = published_state(distilled=True)
    convert_checkpoint(saved(state, tmp_path), tmp_path / "ours", drop_classifier=True)
    model = AutoModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        expected = published_forward({key: value for key, value in state.items() if "classifier" not in key}, pixels())
        torch.testing.assert_close(model(pixels()).pooler_output, expected, atol=1e-9, rtol=0)


def without(state, part):
    return {name: value for name, value in state.items() if part not in name}


QUERY = "stages.2.2.block.token_channel_mixer.m.q.c.weight"
CHANGES = {
    r"stages\.2 has blocks convolution, encoding, attention, encoding": lambda state: without(state, "stages.2.3."),
    "missing: .*k_proj.weight": lambda state: without(state, "stages.3.1.block.token_channel_mixer.m.k.c"),
    r"downsample_layers\.2\.0\.c\.weight is missing": lambda state: without(state, "downsample_layers.2."),
    "left over": lambda state: {**state, "stages.0.0.block.token_channel_mixer.m.0.conv2.weight": torch.ones(1)},
    r"queries of shape \(4, 8, 3, 3\).* must be 1x1": lambda state: {**state, QUERY: torch.ones(4, 8, 3, 3)},
}


@pytest.mark.parametrize(("message", "change"), CHANGES.items())
def test_other_architectures_are_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(saved(change(published_state()), tmp_path), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
