"""ConViT of timm and from its original files as SparsePriorConvit, and back. The oracle is timm's own class."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparseprior import SparsePriorConvitConfig, SparsePriorConvitForImageClassification, SparsePriorConvitModel
from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.models.pretrained import load_changed_model, load_whole_model
from tests.hf_sparseprior.convert.conversions import (
    assert_same,
    check_refused,
    check_timm_both_ways,
    check_timm_folder,
    outputs,
    pixels_for,
    write_timm_folder,
)
from tests.hf_sparseprior.small import scatter
from tests.timm_oracle import import_timm

SIZES = {"embed_dim": 4, "num_heads": 4, "depth": 3, "local_up_to_layer": 2, "img_size": 32, "patch_size": 8}
OURS = {
    "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "num_local_layers": 2, "image_size": 32,
    "patch_size": 8, "intermediate_size": 24, "num_labels": 5,
}  # fmt: skip
TIMM = {
    "usual": {},
    "biases, odd widths": {"qkv_bias": True, "mlp_ratio": 2.7, "num_heads": 9},
    "mean pooling, one channel": {"global_pool": "avg", "in_chans": 1},
    "no positions, larger": {"use_pos_embed": False, "img_size": 40, "local_up_to_layer": 1, "locality_strength": 2.0},
}


def timm_convit(**options):
    """timm's own class."""
    import_timm()
    from timm.models.convit import ConVit

    return scatter(ConVit(**{**SIZES, "num_classes": 5, **options}))


def ours(folder, cls=SparsePriorConvitForImageClassification, **options):
    """A saved model of ours."""
    model = scatter(cls(SparsePriorConvitConfig(**{**OURS, **options})))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", TIMM)
def test_models_of_timm_go_both_ways(kind, tmp_path):
    options = TIMM[kind]
    source, size = timm_convit(**options), options.get("img_size", SIZES["img_size"])
    arguments = {key: options[key] for key in ("global_pool", "locality_strength") if key in options}
    config = {"architecture": "convit_tiny", "model_args": arguments}
    write_timm_folder(tmp_path / "source", source.state_dict(), [size, size], source.in_chans, **config)
    model, again = check_timm_both_ways(source, tmp_path)
    assert model.config.locality_strength == again.locality_strength == source.locality_strength


@pytest.mark.parametrize(("suffix", "positions"), [(".pth", True), (".safetensors", False)])
def test_files_go_both_ways(suffix, positions, tmp_path):
    """An original .pth file holds the weights by name, nothing around them."""
    source = timm_convit(use_pos_embed=positions, qkv_bias=True)
    first, back = tmp_path / f"source{suffix}", tmp_path / f"back{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save(source.state_dict(), first)
    lines = convert_checkpoint(first, tmp_path / "ours")
    note = "note: image_size is not in the source; 224, that of the published models, is assumed"
    assert (note in lines) == (not positions)
    model = load_whole_model(tmp_path / "ours")
    pixels = pixels_for(model.config, 32)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, pixels), source(pixels), rtol=1e-5, atol=1e-5)
    target = "timm" if suffix == ".safetensors" else "original"
    assert main(["convert", str(tmp_path / "ours"), str(back), "--to", target]) == 0
    written = load_file(back) if suffix == ".safetensors" else torch.load(back, weights_only=True)
    assert_same(source.state_dict(), written)


def test_a_base_model_as_timms(tmp_path):
    check_timm_folder(ours(tmp_path / "ours", SparsePriorConvitModel), tmp_path)


def test_a_prior_is_added_to_the_plain_layers(tmp_path):
    torch.save(timm_convit().state_dict(), tmp_path / "source.pth")
    convert_checkpoint(tmp_path / "source.pth", tmp_path / "out", prior="fibottention+violin")
    model = load_whole_model(tmp_path / "out")
    assert model.config.prior_name == "fibottention+violin"
    assert {name.split(".")[2] for name, _ in model.named_parameters() if "decay_bias" in name} == {"2"}


def test_another_image_size_interpolates_the_positions(tmp_path):
    model = ours(tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "out", image_size=64)
    larger = load_whole_model(tmp_path / "out")
    name = "convit.embeddings.position_embeddings"
    map_ = model.convit.embeddings.position_embeddings.detach().transpose(1, 2).unflatten(2, (4, 4))
    resized = torch.nn.functional.interpolate(map_, size=(8, 8), mode="bicubic", align_corners=False)
    assert_same(larger.state_dict(), {**model.state_dict(), name: resized.flatten(2).transpose(1, 2)})
    pixels = pixels_for(larger.config)
    torch.testing.assert_close(outputs(larger, pixels), outputs(model, pixels), rtol=1e-5, atol=1e-5)
    changed, anew = load_changed_model(tmp_path / "ours", SparsePriorConvitForImageClassification, image_size=64)
    assert anew == []
    assert_same(changed.state_dict(), larger.state_dict())


REFUSED_FILES = {
    "gates": (
        {"blocks.1.attn.gating_param": None, "blocks.2.attn.gating_param": torch.zeros(4)}, {}, "blocks 0, 2 have",
    ),
    "missing": (
        {"norm.bias": None, "more.weight": torch.zeros(1)}, {}, "missing: convit.layernorm.bias; left over: more",
    ),
    "no grid": ({"pos_embed": torch.zeros(1, 15, 16)}, {}, "pos_embed: 15 positions are no square grid"),
    "image": ({}, {"img_size": 40}, "pos_embed: 16 positions are no grid of 40 pixels"),
    "pool": ({}, {"global_pool": "max"}, "global_pool='max' must be 'token' or 'avg'"),
    "norm": ({}, {"norm_layer": "rmsnorm"}, r"norm_layer='rmsnorm' must be timm's default \(None\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_other_architectures_of_timm_are_refused(case, tmp_path):
    changes, arguments, message = REFUSED_FILES[case]
    state = {name: value for name, value in {**timm_convit().state_dict(), **changes}.items() if value is not None}
    write_timm_folder(tmp_path / "source", state, architecture="convit_tiny", model_args=arguments)
    check_refused(tmp_path / "source", message)
