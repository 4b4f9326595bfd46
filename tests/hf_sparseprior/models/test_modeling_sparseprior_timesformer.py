"""SparsePriorTimesformer against transformers' TimeSformer, its image model, and what every saved model must hold."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForVideoClassification,
    TimesformerConfig,
    TimesformerForVideoClassification,
    TimesformerModel,
)

from hf_sparseprior import (
    SparsePriorTimesformerConfig,
    SparsePriorTimesformerForVideoClassification,
    SparsePriorTimesformerModel,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.__main__ import main
from hf_sparseprior.cli.export import export_folder
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.convert.timesformer import rename
from tests.hf_sparseprior.small import noise, scatter
from tests.processes import run_script
from tests.remote import check_remote_code

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TYPES = ["divided_space_time", "joint_space_time", "space_only"]
PRIORS = ["dense", "fibottention", "fibottention+violin", "topk", "linformer", "sparsifiner", "localvit", "swin_rpb"]


def tiny(prior="fibottention", **settings):
    sizes = {**SIZES, "image_size": 32, "patch_size": 8, "num_frames": 3, "num_labels": 5}
    return SparsePriorTimesformerConfig(prior=prior, **{**sizes, **settings})


def make(cls=SparsePriorTimesformerForVideoClassification, **settings):
    torch.manual_seed(0)
    return scatter(cls(tiny(**settings)))


def clips(batch=2, frames=3, height=32, width=32):
    return noise(batch, frames, 3, height, width)


def stock(cls=TimesformerForVideoClassification, **settings):
    torch.manual_seed(0)
    sizes = {**SIZES, "image_size": 32, "patch_size": 8, "num_frames": 3, "num_labels": 5}
    return scatter(cls(TimesformerConfig(**{**sizes, **settings})))


# ---- transformers' TimeSformer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (TimesformerForVideoClassification, {}),
        (TimesformerModel, {"qkv_bias": False, "layer_norm_eps": 1e-3}),
        *((TimesformerForVideoClassification, {"attention_type": kind}) for kind in TYPES[1:]),
        (TimesformerModel, {"attention_type": "space_only"}),
    ],
    ids=str,
)
def test_dense_equals_transformers_timesformer_both_ways(cls, settings, tmp_path):
    source = stock(cls, **settings)
    source.save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    classifies = cls is TimesformerForVideoClassification
    loader = AutoModelForVideoClassification if classifies else AutoModel
    model = loader.from_pretrained(tmp_path / "ours")
    assert model.config.model_type == "sparseprior_timesformer"
    expected, found = (one(clips(), output_hidden_states=True, output_attentions=True) for one in (source, model))
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-4, atol=1e-5)
    name = "logits" if classifies else "last_hidden_state"
    own, theirs = found[name], expected[name]
    if classifies and settings.get("attention_type") == "space_only":
        assert theirs.shape == (6, 5)  # transformers' class has no mean over the frames
        theirs = theirs.unflatten(0, (2, 3)).mean(1)
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
    for one in (own, theirs):
        one.square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in source.named_parameters()}
    renamed, unknown = rename(gradients)
    assert not unknown and len(renamed) >= len(gradients)
    prefix = "" if classifies else "vit."
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, renamed[prefix + key], rtol=1e-4, atol=1e-4)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "timesformer"]) == 0
    back, info = cls.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    assert all(value.equal(source.state_dict()[key]) for key, value in back.state_dict().items())
    assert back.config.num_frames == 3 and back.config.layer_norm_eps == source.config.layer_norm_eps
    assert back.config.attention_type == source.config.attention_type
    with torch.no_grad():
        assert back(clips())[0].equal(source(clips())[0])


def test_what_timesformer_cannot_express_is_refused(tmp_path, capsys):
    make(prior="dense", num_register_tokens=1, patch_size=[8, 16]).save_pretrained(tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "timesformer"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "num_register_tokens=1 must be 0" in error and "patch_size=[8, 16] must be square" in error
    with pytest.raises(ValueError, match="is a sparseprior_timesformer, which vit cannot express"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "out", to="vit")
    stock().save_pretrained(tmp_path / "other")
    saved = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**saved, "attention_type": "axial"}))
    with pytest.raises(ValueError, match="attention_type='axial' must be one of divided_space_time, joint_space_time,"):
        convert_checkpoint(tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- the image model ------------------------------------------------------------------------------------------------


def image_model(cls=SparsePriorViTForImageClassification, **settings):
    torch.manual_seed(0)
    sizes = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 5}
    return scatter(cls(SparsePriorViTConfig(**{**sizes, "prior": "fibottention+violin", **settings})))


@pytest.mark.parametrize(
    ("prior", "settings"),
    [
        *((prior, {}) for prior in PRIORS),
        ("fibottention+violin", {"num_register_tokens": 2, "pooling": "mean"}),
        ("fibottention+violin", {"layerscale_value": 0.5}),
    ],
)
def test_a_still_clip_gives_the_image_models_output(prior, settings):
    image = image_model(prior=prior, **settings)
    each = SparsePriorTimesformerForVideoClassification.from_image_model(image, attention_type="space_only")
    with torch.no_grad():
        expected = image(clips().flatten(0, 1)).logits.unflatten(0, (2, 3)).mean(1)
        torch.testing.assert_close(each(clips()).logits, expected, rtol=1e-5, atol=1e-6)
    video = SparsePriorTimesformerForVideoClassification.from_image_model(image, num_frames=4)
    pixels = clips()[:, 0]
    with torch.no_grad():
        found = video(pixels[:, None].expand(-1, 4, -1, -1, -1)).logits
        torch.testing.assert_close(found, image(pixels).logits, rtol=1e-5, atol=1e-6)
        moving = video(clips(frames=4)).logits
    assert (moving - found).abs().max() > 1e-3
    layer = video.vit.layers[0]
    if prior != "linformer":  # whose keys are not those of a dense layer
        assert layer.temporal_attention.k_proj.weight.equal(layer.attention.k_proj.weight)
    assert layer.temporal_layernorm.weight.equal(layer.layernorm_before.weight)


def test_from_a_folder_with_other_classes_frames_and_size(tmp_path):
    image = image_model()
    image.save_pretrained(tmp_path)
    video = SparsePriorTimesformerForVideoClassification.from_image_model(tmp_path, num_labels=7, image_size=48)
    assert video.config.num_frames == 8 and video(clips(height=48, width=48)).logits.shape == (2, 7)
    positions = image.vit.embeddings.resized_positions((6, 6))
    assert video.vit.embeddings.position_embeddings.equal(positions)
    assert 0 < video.classifier.weight.std() < 0.05  # a fresh one
    base = SparsePriorTimesformerModel.from_image_model(tmp_path, prior="dense")
    assert base.config.prior_name == "dense" and not [key for key in base.state_dict() if "decay_bias" in key]
    image.vit.save_pretrained(tmp_path / "base")
    headless = SparsePriorTimesformerForVideoClassification.from_image_model(tmp_path / "base", num_labels=3)
    assert headless.vit.layers[1].mlp.fc1.weight.equal(image.vit.layers[1].mlp.fc1.weight)


def test_weights_that_would_start_at_random_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"does not fit .*: layers.0.mlp.fc1.weight"):
        SparsePriorTimesformerModel.from_image_model(image_model(SparsePriorViTModel), intermediate_size=40)
    make().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="of type 'sparseprior_timesformer', not 'sparseprior_vit'"):
        SparsePriorTimesformerModel.from_image_model(tmp_path)


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prior", "size"), [("fibottention+violin", (24, 48)), ("topk", (64, 32))])
def test_other_grids_and_numbers_of_frames(prior, size):
    odd = make(prior=prior, image_size=list(size), num_frames=5)
    assert odd(clips(frames=5, height=size[0], width=size[1])).logits.shape == (2, 5)
    model = make(prior=prior)
    assert model(clips(frames=7, height=size[0], width=size[1])).logits.shape == (2, 5)
    assert model(clips(batch=0)).logits.shape == (0, 5)
    nearest = model.vit.embeddings.frame_positions(6)
    assert nearest.equal(model.vit.embeddings.time_embeddings.repeat_interleave(2, 1))


def test_pooled_frames_of_every_type():
    for kind in TYPES:
        base = make(SparsePriorTimesformerModel, attention_type=kind)
        assert base(clips()).pooler_output.shape == base(clips(), return_dict=False)[1].shape == (2, 24)
        assert base(clips(batch=0, frames=5, width=64)).pooler_output.shape == (0, 24)


def test_clips_that_do_not_fit_are_refused():
    model = make()
    for shape in ((2, 3, 32, 32), (2, 3, 1, 32, 32), (2, 0, 3, 32, 32), (2, 3, 3, 30, 32)):
        with pytest.raises(ValueError, match=r"must be \(batch, frames, 3, height, width\)|multiple of the 8x8 patch"):
            model(torch.zeros(shape))


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "prior"),
    [
        ("divided_space_time", "swin_rpb"),
        ("divided_space_time", "localvit"),
        ("space_only", "fibottention+violin"),
        ("joint_space_time", "localvit"),
        ("joint_space_time", "fibottention+violin+clip"),
    ],
)
def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(kind, prior):
    gradients = []
    for checkpointing in (False, True):
        model = make(prior=prior, attention_type=kind, num_register_tokens=1, pooling="mean").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(clips(), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    # A key's bias shifts all logits of a query alike.
    without = [name for name, gradient in gradients[0].items() if gradient is None or not gradient.abs().max() > 0]
    assert not [name for name in without if not name.endswith("k_proj.bias")]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_fresh_models_start_without_time():
    model = SparsePriorTimesformerForVideoClassification(tiny())
    names = [name for name, value in model.named_parameters() if "temporal_dense" in name or "time_emb" in name]
    assert len(names) == 5 and all(not model.get_parameter(name).any() for name in names)
    assert {"vit.embeddings.time_embeddings", "vit.embeddings.position_embeddings"} <= model.no_weight_decay()
    assert model.vit.layers[0].temporal_attention.q_proj.weight.std() > 0.01
    with_time = SparsePriorTimesformerForVideoClassification(tiny(time_initializer_range=0.5))
    assert all(with_time.get_parameter(name).std() > 0.3 for name in names if not name.endswith("bias"))
    still = SparsePriorTimesformerModel(tiny(attention_type="joint_space_time"))
    assert not still.embeddings.time_embeddings.any()
    joint = SparsePriorTimesformerModel(tiny(attention_type="joint_space_time", time_initializer_range=0.5))
    assert joint.embeddings.time_embeddings.std() > 0.3 and not [key for key in joint.state_dict() if "temporal" in key]
    alone = SparsePriorTimesformerModel(tiny(attention_type="space_only"))
    image = image_model(SparsePriorViTModel, prior="fibottention")
    assert alone.state_dict().keys() == image.state_dict().keys()
    image = image_model(SparsePriorViTModel)
    still = SparsePriorTimesformerModel.from_image_model(image, time_initializer_range=0.5)
    assert not still.embeddings.time_embeddings.any() and not still.layers[1].temporal_dense.weight.any()


# ---- saved models ---------------------------------------------------------------------------------------------------


def test_missing_time_starts_at_zero_and_not_as_garbage(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in weights.items() if "temporal_dense" not in key and "time_emb" not in key}
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = SparsePriorTimesformerForVideoClassification.from_pretrained(tmp_path)
    for name, value in loaded.named_parameters():
        assert value.equal(model.get_parameter(name)) if name in left else not value.any(), name


@pytest.mark.parametrize("cls", [SparsePriorTimesformerModel, SparsePriorTimesformerForVideoClassification])
def test_folder_is_complete(cls, tmp_path):
    make(cls).save_pretrained(tmp_path / "model")
    auto_map = json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForVideoClassification"}
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (tmp_path / "model" / f"{module}.py").read_text()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# SparsePriorTimesformer, prior: fibottention" in card and "| frames | 3 |" in card
    classifies = cls is SparsePriorTimesformerForVideoClassification
    assert f"pipeline_tag: {'video-classification' if classifies else 'feature-extraction'}\n" in card
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    frames = [torch.full((3, 40, 50), 51, dtype=torch.uint8)] * 3
    pixels = processor(frames, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 3, 32, 32)
    torch.testing.assert_close(pixels, torch.full_like(pixels, (0.2 - 0.5) / 0.5))
    lines = export_folder(tmp_path / "model", tmp_path / "exported")
    assert "modeling_sparseprior_timesformer.py" in lines[0]


@pytest.mark.slow
def test_models_come_back_by_remote_code(tmp_path):
    """Priors whose parts are not those of test_attention_types.py."""
    models = {prior: make(prior=prior) for prior in ("sparsifiner", "linformer", "localvit", "swin_rpb")}
    models["joint"] = make(prior="learned_order+clip", attention_type="joint_space_time")
    check_remote_code({name: (model, clips()) for name, model in models.items()}, tmp_path)
    for name, model in models.items():
        loaded = AutoModelForVideoClassification.from_pretrained(tmp_path / "models" / name)
        assert type(loaded) is SparsePriorTimesformerForVideoClassification
        assert loaded(clips()).logits.equal(model(clips()).logits)
        assert loaded.config.prior == model.config.prior


REMOTE = """
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForVideoClassification

pixels = load_file("pixels.safetensors")["pixels"]
base = AutoModel.from_pretrained("clips", trust_remote_code=True)
model = AutoModelForVideoClassification.from_pretrained("clips", trust_remote_code=True)
model.save_pretrained("again")
again = AutoModelForVideoClassification.from_pretrained("again", trust_remote_code=True)
assert again(pixels).logits.equal(model(pixels).logits)
still = type(model).from_image_model("image")
assert type(still).__name__ == "SparsePriorTimesformerForVideoClassification"
save_file({"base": base(pixels).pooler_output.detach().contiguous()}, "outputs.safetensors")
"""


@pytest.mark.slow
def test_remote_code_saves_again_and_starts_from_image_models(tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "clips")
    image_model().save_pretrained(tmp_path / "image")
    save_file({"pixels": clips()}, tmp_path / "pixels.safetensors")
    run_script(REMOTE, folder=tmp_path)
    expected = model.vit(clips()).pooler_output
    torch.testing.assert_close(load_file(tmp_path / "outputs.safetensors")["base"], expected)
    first, second = ({path.name for path in (tmp_path / name).iterdir()} for name in ("clips", "again"))
    assert first == second
