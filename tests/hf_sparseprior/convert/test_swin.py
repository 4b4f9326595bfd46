"""Swin of transformers, of timm and from its own files as SparsePriorSwin, and back.

The oracles are transformers' and timm's own classes.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    SwinBackbone,
    SwinConfig,
    SwinForImageClassification,
    SwinForMaskedImageModeling,
    SwinModel,
    Swinv2Config,
    Swinv2Model,
)

from hf_sparseprior import SparsePriorSwinConfig, SparsePriorSwinForImageClassification, SparsePriorSwinModel
from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.models.pretrained import load_changed_model, load_whole_model
from tests.hf_sparseprior.convert.conversions import (
    assert_same,
    check_refused,
    check_round_trip,
    check_same_as_transformers,
    check_stock_prior_is_carried_over,
    check_there_and_back,
    check_timm_both_ways,
    check_timm_folder,
    outputs,
    pixels_for,
    write_timm_folder,
)
from tests.hf_sparseprior.small import scatter
from tests.timm_oracle import import_timm

# Grids of 8x8 and 4x4 patches; the windows of the second layer are shifted.
SIZES = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
SOURCES = {
    "classifier": (SwinForImageClassification, {"num_labels": 5}),
    "base": (SwinModel, {"qkv_bias": False, "mlp_ratio": 2.7}),
    "rectangle": (SwinForImageClassification, {"num_labels": 3, "image_size": [32, 72], "patch_size": [4, 6]}),
    "not a multiple of the window": (SwinForImageClassification, {"image_size": 40, "window_size": 3, "num_labels": 2}),
    "three stages": (
        SwinForImageClassification,
        {"depths": [1, 1, 2], "num_heads": [2, 2, 2], "window_size": 2, "num_labels": 2},
    ),
    "trained": (
        SwinForImageClassification,
        {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}, "hidden_act": "relu"},
    ),
}


def make_source(kind):
    cls, options = SOURCES[kind]
    return scatter(cls(SwinConfig(**{**SIZES, **options})))


def ours(folder, cls=SparsePriorSwinForImageClassification, **fields):
    """A saved model of ours."""
    labels = {} if "id2label" in fields else {"num_labels": 5}
    model = scatter(cls(SparsePriorSwinConfig(**{**SIZES, **labels, **fields})))
    model.save_pretrained(folder)
    return model


# ---- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "base", "three stages"])
def test_models_of_transformers_compute_the_same(kind, tmp_path):
    source = make_source(kind)
    check_same_as_transformers(source, pixels_for(source.config), tmp_path, "attention.self.query")


@pytest.mark.parametrize("kind", SOURCES)
def test_round_trips_through_ours_give_the_very_same_weights(kind, tmp_path):
    source = make_source(kind)
    check_round_trip(source, pixels_for(source.config), tmp_path)


@pytest.mark.parametrize("cls", [SparsePriorSwinForImageClassification, SparsePriorSwinModel])
def test_ours_as_a_model_of_transformers_and_back(cls, tmp_path):
    stock = check_there_and_back(ours(tmp_path / "ours", cls, drop_path_rate=0.2, window_size=4), "swin", tmp_path)
    assert isinstance(stock, SwinModel) == (cls is SparsePriorSwinModel)


def test_what_follows_from_the_window_or_only_pretraining_needs_is_left_out(tmp_path):
    source = scatter(SwinForMaskedImageModeling(SwinConfig(**SIZES, encoder_stride=8)))
    source.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    index = "swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"  # as version 4 saved it
    save_file({**load_file(path), index: torch.arange(256).view(16, 16)}, path)
    lines = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    left_out = "decoder.0.bias, decoder.0.weight, swin.embeddings.mask_token"
    assert f"note: left out, no output depends on it: {left_out}" in lines
    assert not any("relative_position_index" in line for line in lines)
    model = SparsePriorSwinModel.from_pretrained(tmp_path / "out").eval()
    pixels = pixels_for(source.config)
    torch.testing.assert_close(outputs(model, pixels), outputs(source.swin, pixels), rtol=1e-5, atol=1e-5)


REFUSED_SOURCES = {
    "positions": (SwinModel, SwinConfig, {"use_absolute_embeddings": True}, "use_absolute_embeddings=True must be"),
    "norms": (SwinModel, SwinConfig, {"layer_norm_eps": 1e-3}, "layer_norm_eps=0.001 must be 1e-05, which Swin"),
    "windows": (SwinModel, SwinConfig, {"image_size": 16}, r"window_size=4 must not .* stages of 4x4, 2x2 patches"),
    "no classes": (SwinForImageClassification, SwinConfig, {"num_labels": 0}, "num_labels=0 must be at least 1"),
    "version 2": (Swinv2Model, Swinv2Config, {}, "model_type='swinv2' must be 'swin'"),
    "backbone": (SwinBackbone, SwinConfig, {}, "left over: hidden_states_norms.stage2.bias"),
}


@pytest.mark.parametrize("case", REFUSED_SOURCES)
def test_what_has_no_counterpart_is_refused_by_name(case, tmp_path):
    cls, config, options, message = REFUSED_SOURCES[case]
    cls(config(**{**SIZES, **options})).save_pretrained(tmp_path / "source")
    check_refused(tmp_path / "source", message)


def test_missing_and_left_over_weights_are_named(tmp_path):
    make_source("classifier").save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    weights = load_file(path)
    table = "swin.encoder.layers.1.blocks.0.attention.self.relative_position_bias_table"
    del weights["swin.layernorm.bias"]
    weights["swin.extra.weight"] = torch.ones(3)
    weights[table] = torch.ones(9, 4)
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"missing: swin\.layernorm\.bias; left over: swin\.extra\.weight") as raised:
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    place = "swin.stages.1.layers.0.attention.relative_position_bias.bias_table"
    assert f"of another shape: {place} (4, 3, 3) instead of (4, 7, 7)" in str(raised.value)
    weights[table] = torch.ones(20, 4)  # of no square window
    save_file(weights, path)
    check_refused(tmp_path / "source", re.escape(f"{place} (20, 4) instead of (4, 7, 7)"))
    (tmp_path / "source" / "config.json").unlink()
    check_refused(tmp_path / "source", r"needs its config\.json")


# ---- priors, image sizes, precision ---------------------------------------------------------------------------------


def test_a_prior_goes_to_the_stages_and_starts_where_the_source_is(tmp_path):
    source = make_source("classifier")
    source.save_pretrained(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--prior", "violin"]) == 0
    model = SparsePriorSwinForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.prior_name == "violin" and len(model.config.prior) == 2
    convert_checkpoint(tmp_path / "source", tmp_path / "dense")
    dense = SparsePriorSwinForImageClassification.from_pretrained(tmp_path / "dense").state_dict()
    shared = {key: value for key, value in model.state_dict().items() if "decay_bias" not in key}
    assert len(shared) < len(model.state_dict())
    assert_same(shared, dense)


TABLE = "attention.relative_position_bias.bias_table"


def test_an_image_size_that_keeps_the_windows_keeps_the_weights(tmp_path):
    source = make_source("classifier")
    source.save_pretrained(tmp_path / "source")
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--image-size", "64"]
    assert main(command) == 0
    model = load_whole_model(tmp_path / "out")
    assert model.config.image_size == 64
    pixels = torch.randn(1, 3, 64, 64)
    larger = SwinForImageClassification.from_pretrained(tmp_path / "source", image_size=64).eval()
    torch.testing.assert_close(outputs(model, pixels), outputs(larger, pixels), rtol=1e-5, atol=1e-5)


def test_an_image_size_that_shrinks_a_window_interpolates_its_table(tmp_path):
    model = ours(tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "out", image_size=16)
    small = load_whole_model(tmp_path / "out")
    assert small.config.windows == [4, 2]
    name = f"swin.stages.1.layers.0.{TABLE}"
    expected = {**model.state_dict()}
    expected[name] = F.interpolate(expected[name][None], size=(3, 3), mode="bicubic", align_corners=False)[0]
    assert_same(small.state_dict(), expected)
    # and where a model is made from a saved one
    changed, anew = load_changed_model(tmp_path / "ours", SparsePriorSwinForImageClassification, image_size=16)
    assert anew == []
    assert_same(changed.state_dict(), expected)
    with pytest.raises(ValueError, match=r"^swin cannot express .*window_size=4 .* stages of 4x4, 2x2 patches"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", image_size=16, to="swin")


@pytest.mark.parametrize(
    ("kind", "prior"),
    [
        ("rectangle", "fibottention+violin"),
        ("base", {"support": {"name": "longformer", "w": 6}, "extras": ["irpe_k"]}),
        ("three stages", {"support": {"name": "longformer", "w": 2}, "decay": "violin"}),
    ],
)
def test_the_prior_of_a_stock_model_is_carried_over(kind, prior, tmp_path):
    """Of three stages, the last has no support, there and here."""
    source = make_source(kind)
    check_stock_prior_is_carried_over(source, prior, pixels_for(source.config), tmp_path)


# ---- timm and the original ------------------------------------------------------------------------------------------

TIMM = {
    "two stages": {},
    "three stages, the last smaller than a window": {"depths": [2, 2, 2], "num_heads": [2, 2, 4]},
    "larger": {"img_size": 64, "depths": [2, 2], "qkv_bias": False, "mlp_ratio": 2.7},
    "rectangle": {"img_size": [32, 64], "window_size": 2, "in_chans": 1},
}


def timm_swin(**options):
    """timm's own class."""
    import_timm()
    from timm.models.swin_transformer import SwinTransformer

    sizes = {**SIZES, "num_classes": 5, "img_size": SIZES["image_size"], **options}
    del sizes["image_size"]
    return scatter(SwinTransformer(**sizes))


ARCHITECTURE = {"architecture": "swin_tiny_patch4_window7_224", "global_pool": "avg"}


@pytest.mark.parametrize("kind", TIMM)
def test_models_of_timm_go_both_ways(kind, tmp_path):
    source, size = timm_swin(**TIMM[kind]), TIMM[kind].get("img_size", 32)
    sides = [size, size] if isinstance(size, int) else size
    write_timm_folder(tmp_path / "source", source.state_dict(), sides, source.in_chans, **ARCHITECTURE)
    check_timm_both_ways(source, tmp_path)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back.safetensors", to="timm")
    assert_same(source.state_dict(), load_file(tmp_path / "back.safetensors"))


def test_a_base_model_as_timms(tmp_path):
    check_timm_folder(ours(tmp_path / "ours", SparsePriorSwinModel), tmp_path)


def original_state(source):
    """The weights of timm's class as the original repository has them, with its indices and masks."""
    state = {}
    for key, value in source.state_dict().items():
        if merging := re.fullmatch(r"layers\.(\d+)\.downsample\.(.+)", key):
            key = f"layers.{int(merging[1]) - 1}.downsample.{merging[2]}"
        state[key.replace("head.fc.", "head.")] = value
    for stage, layers in enumerate(source.layers):
        for index, block in enumerate(layers.blocks):
            name = f"layers.{stage}.blocks.{index}"
            state[f"{name}.attn.relative_position_index"] = block.attn.relative_position_index
            if block.attn_mask is not None:
                state[f"{name}.attn_mask"] = block.attn_mask
    return state


@pytest.mark.parametrize("kind", ["two stages", "three stages, the last smaller than a window"])
def test_original_files_go_both_ways(kind, tmp_path):
    source = timm_swin(**TIMM[kind])
    state = original_state(source)
    assert any("attn_mask" in key for key in state) and "layers.0.downsample.reduction.weight" in state
    torch.save({"model": state}, tmp_path / "source.pth")
    lines = convert_checkpoint(tmp_path / "source.pth", tmp_path / "ours")
    assert "note: image_size is not in the source; 32, at which the last stage is one window, is assumed" in lines
    assert not any("left out" in line for line in lines)
    model = load_whole_model(tmp_path / "ours")
    pixels = pixels_for(model.config)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, pixels), source(pixels), rtol=1e-5, atol=1e-5)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back.pth"), "--to", "original"]) == 0
    written = torch.load(tmp_path / "back.pth", weights_only=True)["model"]
    assert_same(state, written)
    # timm reads the original's files, too.
    from timm.models.swin_transformer import checkpoint_filter_fn

    source.load_state_dict(checkpoint_filter_fn(written, source))


@pytest.mark.parametrize(("window", "image"), [(7, 224), (12, 384)])
def test_the_published_image_sizes_follow_from_the_window(window, image, tmp_path):
    sizes = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": window, "image_size": image}
    model = ours(tmp_path / "ours", **{**SIZES, **sizes, "embed_dim": 2})
    convert_checkpoint(tmp_path / "ours", tmp_path / "file.safetensors", to="timm")
    convert_checkpoint(tmp_path / "file.safetensors", tmp_path / "back")
    back = load_whole_model(tmp_path / "back")
    assert (back.config.image_size, back.config.window_size) == (image, window)
    assert_same(model.state_dict(), back.state_dict())


def zeros(*shape):
    return torch.zeros(shape)


BLOCK = "layers.1.blocks.0"
TABLE_OF_BLOCK = f"{BLOCK}.attn.relative_position_bias_table"
REFUSED_FILES = {
    "Swin V2": ({f"{BLOCK}.attn.logit_scale": zeros(4, 1, 1)}, {}, f"{BLOCK}.attn.logit_scale: Swin V2 has no"),
    "positions": ({"absolute_pos_embed": zeros(1, 64, 8)}, {}, "absolute_pos_embed: SparsePriorSwin has relative"),
    "no table": ({TABLE_OF_BLOCK: None}, {}, "layers.1.blocks: no block has a matrix"),
    "odd table": ({TABLE_OF_BLOCK: zeros(20, 4)}, {}, "20 offsets, which no square window has"),
    "larger window": ({TABLE_OF_BLOCK: zeros(121, 4)}, {}, r"the stages have windows of \[4, 6\]"),
    "missing": ({"norm.bias": None, "more.weight": zeros(1)}, {}, "missing: swin.layernorm.bias; left over: more.weig"),
    "pool": ({}, {"global_pool": "max"}, "global_pool='max' must be 'avg'"),
    "head width": ({}, {"head_dim": 32}, r"head_dim=32 must be timm's default \(None\)"),
    "image": ({}, {"img_size": 16}, r"image_size=16 gives windows of \[4, 2\], not \[4, 4\]"),
    "padding": ({}, {"img_size": 40}, "image_size=40: stage 1 has 10x10 patches, which must be a multiple of its wind"),
    "one side": ({}, {"img_size": [32, 64]}, "stage 2 has 4x8 patches, which must be square or above a window"),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_other_architectures_of_timm_are_refused(case, tmp_path):
    changes, arguments, message = REFUSED_FILES[case]
    state = {name: value for name, value in {**timm_swin().state_dict(), **changes}.items() if value is not None}
    config = {**ARCHITECTURE, "global_pool": arguments.get("global_pool", "avg"), "model_args": arguments}
    write_timm_folder(tmp_path / "source", state, [32, 32] if "img_size" in arguments else None, **config)
    check_refused(tmp_path / "source", message)
