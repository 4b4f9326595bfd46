"""Saved models, loaded whole or as the start of another model: what is copied, starts anew or is refused."""

import hashlib
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, SwinConfig, SwinModel

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.models.pretrained import (
    check_classes,
    check_saved_folder,
    copy_weights,
    load_changed_model,
    load_whole_model,
    weights_sha256,
)
from tests.each import each

SMALL = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "num_labels": 3,
}  # fmt: skip
POSITIONS = "embeddings.position_embeddings"


def make(cls=SparsePriorViTForImageClassification, seed=0, **settings):
    """A model whose weights all have values that its initialisation could not give."""
    torch.manual_seed(seed)
    model = cls(SparsePriorViTConfig(**{**SMALL, "prior": "fibottention+violin", **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def remove_weight(folder, name):
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})


def assert_equal(found, expected, but=()):
    """Weights of the same names and values, except for names that contain a text of `but`."""
    assert set(found) == set(expected)
    for name, value in found.items():
        assert value.equal(expected[name]) != any(text in name for text in but), name


# ---- whole models ---------------------------------------------------------------------------------------------------


def test_a_whole_model_has_the_saved_weights(saved):
    model, folder = saved
    for classes, expected in (([], model), ([AutoModel], model.vit), ([SparsePriorViTModel], model.vit)):
        assert_equal(load_whole_model(folder, *classes).state_dict(), expected.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    assert load_whole_model(folder).dtype == torch.bfloat16


def test_a_folder_that_lacks_a_weight_is_refused(saved, tmp_path):
    _, folder = saved
    remove_weight(folder, "vit.layers.1.mlp.fc2.weight")
    with pytest.raises(OSError, match=r"lacks weights that fit its config: vit\.layers\.1\.mlp\.fc2\.weight \(1 in"):
        load_whole_model(folder)
    with pytest.raises(OSError, match="nowhere is not a folder of a saved model"):
        load_whole_model(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"^model\.pretrained=nowhere is not a folder of a saved model"):
        check_saved_folder("nowhere", "model.pretrained")
    check_saved_folder(folder)


WEIGHT = "vit.layers.1.mlp.fc2.weight"
BETA = "vit.layers.0.attention.decay_bias.beta"
BAD_WEIGHTS = {
    "NaN": (WEIGHT, lambda value: value.index_fill(0, torch.tensor(3), torch.nan), "NaN or infinite"),
    "infinite": (BETA, lambda value: value - torch.inf, "NaN or infinite"),
    "int64": (WEIGHT, torch.Tensor.long, "must be floating-point, not I64"),
    "uint8": (BETA, lambda value: value.to(torch.uint8), "must be floating-point, not U8"),
    "bool": (WEIGHT, torch.Tensor.bool, "must be floating-point, not BOOL"),
    "complex": (WEIGHT, lambda value: value.to(torch.complex64), "must be floating-point, not C64"),
}


@each("bad", BAD_WEIGHTS)
def test_weights_that_are_no_numbers_are_refused_by_name(bad, saved):
    name, change, message = BAD_WEIGHTS[bad]
    model, folder = saved
    weights = model.state_dict()
    save_file({**weights, name: change(weights[name])}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=rf"{message}: {re.escape(name)} \(1 in all\)"):
        load_whole_model(folder)
    with pytest.raises(OSError, match=re.escape(name)):  # as a start, too
        load_changed_model(folder, SparsePriorViTForImageClassification, num_labels=5)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prior": None}, "decay_bias.alpha"),
        ({"prior": "fibottention"}, "decay_bias.alpha"),
        ({"num_hidden_layers": 1, "out_features": None, "out_indices": None, "stage_names": None}, "layers.1."),
    ],
)
def test_weights_without_a_place_in_the_config_are_refused_by_name(saved, changes, name):
    """A config without its prior would load as a dense model, one with fewer layers as a shorter one."""
    path = saved[1] / "config.json"
    config = {key: value for key, value in {**json.loads(path.read_text()), **changes}.items() if value is not None}
    path.write_text(json.dumps(config))
    for classes in ([], [AutoModel]):
        with pytest.raises(OSError, match=f"no place: .*{re.escape(name)}"):
            load_whole_model(saved[1], *classes)


def test_a_stock_model_may_store_indices(tmp_path):
    swin = SwinModel(
        SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
    )
    sp.apply_prior(swin, "violin").save_pretrained(tmp_path / "swin")
    assert any(not value.is_floating_point() for value in load_file(tmp_path / "swin" / "model.safetensors").values())
    found = load_whole_model(tmp_path / "swin", AutoModel)
    assert_equal(found.state_dict(), swin.state_dict())


def test_classes_are_compared_in_order(saved):
    check_classes(saved[0], ["LABEL_0", "LABEL_1", "LABEL_2"])
    with pytest.raises(ValueError, match="are not those of the data"):
        check_classes(saved[0], ["LABEL_1", "LABEL_0", "LABEL_2"])


def test_the_checksum_is_of_the_weights(saved, tmp_path):
    content = (saved[1] / "model.safetensors").read_bytes()
    assert weights_sha256(saved[1]) == hashlib.sha256(content).hexdigest()
    assert weights_sha256(tmp_path) is None


# ---- changed models -------------------------------------------------------------------------------------------------


def test_another_prior_starts_anew_and_everything_else_is_kept(saved):
    model, folder = saved
    found, anew = load_changed_model(folder, SparsePriorViTForImageClassification, prior="swin_rpb")
    kept = {name: value for name, value in model.state_dict().items() if "decay_bias" not in name}
    fresh = {name for name in found.state_dict() if "relative_position" in name}
    assert set(anew) == fresh != set()
    assert_equal({name: value for name, value in found.state_dict().items() if name not in fresh}, kept)


def test_other_classes_alone_start_a_classifier_anew(saved):
    model, folder = saved
    found, anew = load_changed_model(folder, SparsePriorViTForImageClassification)
    assert anew == []
    assert_equal(found.state_dict(), model.state_dict())
    found, anew = load_changed_model(folder, SparsePriorViTForImageClassification, num_labels=5)
    assert anew == ["classifier.bias", "classifier.weight"] and found.classifier.weight.shape == (5, 24)
    assert_equal(found.vit.state_dict(), model.vit.state_dict())


@pytest.mark.parametrize("with_classifier", [True, False])
def test_another_image_size_interpolates_positions(saved, tmp_path, with_classifier):
    model, folder = saved
    if not with_classifier:
        folder = tmp_path / "bare"
        model.vit.save_pretrained(folder)
    found, anew = load_changed_model(folder, SparsePriorViTForImageClassification, image_size=48)
    assert anew == ([] if with_classifier else ["classifier.bias", "classifier.weight"])
    expected = {**model.vit.state_dict(), POSITIONS: model.vit.embeddings.resized_positions((6, 6))}
    assert expected[POSITIONS].shape == (1, 1 + 36, 24)
    assert_equal(found.vit.state_dict(), expected)
    assert found.classifier.weight.equal(model.classifier.weight) == with_classifier


def test_weights_that_would_start_anew_are_named(saved, tmp_path):
    _, folder = saved
    with pytest.raises(ValueError, match=r"saved does not fit .*; missing: layers\.2\.layernorm_before\.weight"):
        load_changed_model(folder, SparsePriorViTForImageClassification, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"of another shape: layers\.0\.mlp\.fc1\.weight.* \(6 in all\)"):
        load_changed_model(folder, SparsePriorViTForImageClassification, intermediate_size=40)
    remove_weight(folder, "vit.layernorm.weight")
    with pytest.raises(ValueError, match=r"missing: layernorm\.weight \(1 in all\)"):
        load_changed_model(folder, SparsePriorViTForImageClassification, image_size=48)
    with pytest.raises(OSError, match="nowhere is not a folder of a saved model"):
        load_changed_model(tmp_path / "nowhere", SparsePriorViTForImageClassification)


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_has_every_weight_of_the_same_name_and_shape():
    source, target = make(), make(SparsePriorViTModel, seed=1)
    copy_weights(source, target, strict=True)
    assert_equal(target.state_dict(), source.vit.state_dict())


def test_a_copy_between_priors_leaves_the_targets_prior_and_classifier_alone():
    source, target = make(), make(seed=1, prior="violin", num_labels=5)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    copy_weights(source, target, copy_prior=False)
    assert_equal(target.vit.state_dict(), source.vit.state_dict(), but=["decay_bias"])
    own = {name: value for name, value in target.state_dict().items() if "decay_bias" in name or "classifier" in name}
    assert own and all(value.equal(before[name]) for name, value in own.items())
    copy_weights(source, target)  # the decay of both priors is the same
    assert_equal(target.vit.state_dict(), source.vit.state_dict())


def test_a_copy_keeps_the_targets_dtype_and_takes_names_from_a_map():
    source, target = make(prior="dense"), make(seed=1, prior="dense").bfloat16()
    copy_weights(source, target, source_name=lambda name: name.replace("layers.1", "layers.0"))
    for name, value in target.vit.state_dict().items():
        expected = source.vit.state_dict()[name.replace("layers.1", "layers.0")]
        assert value.dtype == torch.bfloat16 and value.equal(expected.bfloat16()), name


def test_nothing_is_written_if_the_models_do_not_fit():
    source, target = make(), make(seed=1, intermediate_size=40)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(ValueError, match=r"SparsePriorViTForImageClassification does not fit .*of another shape"):
        copy_weights(source, target)
    assert_equal(target.state_dict(), before)


def test_a_strict_copy_refuses_what_is_left_over_and_a_prior_of_another_shape():
    shallow = make(seed=1, num_hidden_layers=1)
    copy_weights(make(), shallow)
    with pytest.raises(ValueError, match=r"left over: layers\.1\.layernorm_before\.weight"):
        copy_weights(make(), shallow, strict=True)
    one_curve = make(seed=1, prior={"decay": {"name": "violin", "curves": ["snake"]}})
    copy_weights(make(), one_curve)
    with pytest.raises(ValueError, match=r"of another shape: layers\.0\.attention\.decay_bias"):
        copy_weights(make(), one_curve, strict=True)
    copy_weights(make(), make(seed=1, prior="dense"), strict=True)  # a prior that the target does not have has no place


def test_absent_weights_are_not_copied():
    source, target = make(), make(seed=1)
    own = target.classifier.weight.clone()
    copy_weights(source, target, absent=["classifier.weight"])
    assert target.classifier.weight.equal(own) and target.classifier.bias.equal(source.classifier.bias)
