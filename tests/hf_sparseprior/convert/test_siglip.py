"""SigLIP of transformers and timm as ours and back, and models with rotary positions that are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    CLIPVisionConfig,
    CLIPVisionModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipModel,
    SiglipTextConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.convert.timm_vit import ACTIVATIONS, TANH
from tests.hf_sparseprior.convert.conversions import (
    assert_same,
    check_stock_prior_is_carried_over,
    check_there_and_back,
    outputs,
)
from tests.hf_sparseprior.small import scatter
from tests.timm_oracle import import_timm

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
TOWER = {**SIZES, "intermediate_size": 40}
TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 9}
CLASSES = {
    "tower": SiglipVisionModel,
    "tower with head": SiglipVisionModel,
    "classifier": SiglipForImageClassification,
    "two towers": SiglipModel,
}
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def make_source(kind, **fields):
    """A model of transformers."""
    if kind.startswith("tower"):
        config = SiglipVisionConfig(**{**TOWER, **fields}, vision_use_head="head" in kind)
    else:
        text = SiglipTextConfig(**TEXT, projection_size=24)
        tower = SiglipVisionConfig(**{**TOWER, **fields})
        config = SiglipConfig(vision_config=tower.to_dict(), text_config=text.to_dict(), num_labels=5)
    torch.manual_seed(0)
    return scatter(CLASSES[kind](config))


def features(model):
    """Logits, or the tokens after the last norm."""
    return outputs(getattr(model, "vision_model", model) if hasattr(model, "text_model") else model, PIXELS)


def saved(model, folder, names="files"):
    """A folder with the names that transformers writes, or those that its models have in memory."""
    model.save_pretrained(folder)
    if names == "memory":
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder):
    """The model of ours in a folder."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(sp, architecture).from_pretrained(folder).eval()


def near(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "names"), [(kind, ("memory", "files")[i % 2]) for i, kind in enumerate(CLASSES)])
def test_models_of_transformers_compute_the_same(kind, names, tmp_path, capsys):
    source = make_source(kind)
    command = ["convert", str(saved(source, tmp_path / "source", names)), str(tmp_path / "ours")]
    pools = kind in ("tower with head", "two towers")
    if pools:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "attention pooling has no counterpart in SparsePriorViT; --drop-classifier leaves it out" in error
        assert len(error.splitlines()) == 1 and not (tmp_path / "ours").exists()
    assert main([*command, *(["--drop-classifier"] if pools else [])]) == 0
    said = capsys.readouterr().out
    assert ("attention pooling is left out" in said) == pools
    assert ("the text tower" in said) == (kind == "two towers")
    assert "image_mean is not in the source; SigLIP's [0.5, 0.5, 0.5] is assumed" in said
    model = loaded(tmp_path / "ours")
    assert isinstance(model, SparsePriorViTForImageClassification if kind == "classifier" else SparsePriorViTModel)
    assert model.config.hidden_act == "gelu_pytorch_tanh" and model.config.image_mean == [0.5] * 3
    near(features(model), features(source))


@pytest.mark.parametrize("kind", ["tower", "classifier"])
def test_round_trips_give_the_very_same_weights(kind, tmp_path):
    source = make_source(kind, hidden_act="gelu", layer_norm_eps=1e-4, attention_dropout=0.1, num_channels=3)
    convert_checkpoint(saved(source, tmp_path / "source"), tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", to="siglip")
    before, after = (
        {
            key.removeprefix("vision_model."): value
            for key, value in load_file(tmp_path / name / "model.safetensors").items()
            if not key.startswith("vision_model.head.")
        }
        for name in ("source", "back")
    )
    assert len(before) > 30
    assert_same(before, after)
    back, info = type(source).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(features(back.eval()), features(source))
    tower = getattr(source.config, "vision_config", source.config).to_dict()
    again = getattr(back.config, "vision_config", back.config).to_dict()
    differing = {key for key, value in tower.items() if again[key] != value}
    assert differing <= {"_name_or_path", "dtype", "architectures", "transformers_version", "vision_use_head"}
    assert back.config.id2label == source.config.id2label
    loader = AutoModel if kind == "tower" else AutoModelForImageClassification
    assert type(loader.from_pretrained(tmp_path / "back")) is type(source)
    assert AutoImageProcessor.from_pretrained(tmp_path / "back").size == {"height": 32, "width": 32}


def small(**fields):
    """A config of ours that SigLIP can express."""
    defaults = {**TOWER, "use_class_token": False, "pooling": "mean", "num_labels": 5}
    return SparsePriorViTConfig(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (SparsePriorViTForImageClassification, {"num_channels": 1, "layer_norm_eps": 1e-3}),
        (SparsePriorViTModel, {"hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_ours_as_siglip_and_back(cls, fields, tmp_path, capsys):
    model = scatter(cls(small(**fields, drop_path_rate=0.1)))
    model.save_pretrained(tmp_path / "ours")
    labels = ["id2label", "label2id"] if cls is SparsePriorViTModel else []
    check_there_and_back(model, "siglip", tmp_path, but=["drop_path_rate", *labels])
    assert "note: drop_path_rate=0.1 is left out, siglip has none" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "prior"), [("tower", "fibottention+violin"), ("classifier", "manhattan")])
def test_the_prior_of_a_stock_model_is_carried_over(kind, prior, tmp_path):
    check_stock_prior_is_carried_over(make_source(kind), prior, PIXELS, tmp_path)


def test_other_towers_of_this_kind_are_refused(tmp_path):
    saved(CLIPVisionModel(CLIPVisionConfig(**TOWER)), tmp_path / "clip")
    with pytest.raises(ValueError, match="model_type='clip_vision_model' must be siglip or siglip_vision_model"):
        convert_checkpoint(tmp_path / "clip", tmp_path / "out")
    (tmp_path / "clip" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"needs its config\.json next to the weights"):
        convert_checkpoint(tmp_path / "clip", tmp_path / "out")


# ---- timm's ---------------------------------------------------------------------------------------------------------

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
TIMM = {
    "gap": ("vit_base_patch16_siglip_gap_224", {}, 5),
    "gap without classes": ("vit_base_patch16_siglip_gap_224", {}, 0),
    "gap tanh": ("vit_base_patch32_siglip_gap_256", {}, 5),
    "map": ("vit_base_patch16_siglip_224", {}, 0),
    "map tanh": ("vit_so400m_patch16_siglip_256", {"mlp_ratio": 2.0}, 5),
    "map said": ("vit_base_patch16_siglip_224", {"act_layer": "gelu_tanh"}, 0),
}


def timm_folder(folder, name, arguments, classes):
    """A model of timm and its folder, as timm writes it for the hub."""
    timm = import_timm()
    torch.manual_seed(0)
    model = scatter(timm.create_model(name, num_classes=classes, **TINY, **arguments))
    timm.models.save_for_hf(model, folder, model_args={**TINY, **arguments}, safe_serialization=True)
    return model


@pytest.mark.parametrize("kind", TIMM)
def test_models_of_timm_go_both_ways(kind, tmp_path, capsys):
    source, pools = timm_folder(tmp_path / "source", *TIMM[kind]), kind.startswith("map")
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "ours")]
    if pools:
        assert main(command) == 2
        assert "attention pooling has no counterpart" in capsys.readouterr().err
        command.append("--drop-classifier")
    assert main(command) == 0
    assert ("attention pooling is left out" in capsys.readouterr().out) == pools
    model, classifies = loaded(tmp_path / "ours"), source.num_classes and not pools
    assert isinstance(model, SparsePriorViTForImageClassification) == bool(classifies)
    with torch.no_grad():
        expected = source(PIXELS) if classifies else source.forward_features(PIXELS)
    near(features(model), expected)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", to="timm")
    back = import_timm().create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        near(back(PIXELS) if classifies else back.forward_features(PIXELS), expected)
    weights = source.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in back.state_dict().items())
    if "tanh" in kind or "said" in kind:
        with pytest.raises(ValueError, match="hidden_act='gelu_pytorch_tanh' must be 'gelu' in a file"):
            convert_checkpoint(tmp_path / "ours", tmp_path / "back.safetensors", to="timm")


def test_a_file_of_timm_alone_says_what_is_assumed(tmp_path):
    source = timm_folder(tmp_path / "source", *TIMM["map"])
    file = tmp_path / "source" / "model.safetensors"
    lines = convert_checkpoint(file, tmp_path / "ours", num_attention_heads=3, drop_classifier=True)
    assert "note: hidden_act is not in the source; gelu (some SigLIP models have gelu_tanh) is assumed" in lines
    assert "note: image_mean is not in the source; SigLIP's 0.5 is assumed" in lines
    with torch.no_grad():
        near(features(loaded(tmp_path / "ours")), source.forward_features(PIXELS))


def test_the_activation_follows_from_the_name():
    timm = import_timm()
    names = [name for name in timm.list_models("vit_*siglip*") if "naflex" not in name]
    assert len(names) > 30
    for name in names:
        model = timm.create_model(name, device="meta", depth=1, weight_init="skip")
        tanh = torch.equal(
            model.blocks[0].mlp.act(torch.ones(1)), torch.nn.functional.gelu(torch.ones(1), approximate="tanh")
        )
        assert tanh == bool(TANH.match(name)), name
    assert set(ACTIVATIONS) == {"gelu", "gelu_tanh"}


# ---- rotary positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_rope_ape_224"])
def test_rotary_positions_are_refused_by_name(name, tmp_path, capsys):
    """Of EVA-02, and with learned positions too."""
    timm_folder(tmp_path / "source", name, {}, 0)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{name}: " in error and "rotary" in error
    assert "hf_sparseprior.apply_prior(model, prior)" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_the_refusal_proposes_works():
    model = import_timm().create_model("eva02_tiny_patch14_224", num_classes=5, **TINY).eval()
    with torch.no_grad():
        before = model(PIXELS)
        near(sp.apply_prior(model, "violin")(PIXELS), before)
