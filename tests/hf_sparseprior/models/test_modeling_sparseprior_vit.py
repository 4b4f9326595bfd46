"""SparsePriorViT against independent models: transformers' own classes, and a ViT written out in float64."""

import copy
import hashlib
import math
from itertools import cycle

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModel,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTModel,
)
from transformers.utils import find_labels

from hf_sparseprior import (
    SparsePriorViTBackbone,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask, has_pairs
from tests.hf_sparseprior.models.vit_oracle import (
    EACH,
    PATHS,
    PRIORS,
    decays,
    images,
    make,
    observed_masks,
    tiny,
    vit_by_hand,
)
from tests.processes import run_script

ARCHITECTURES = {
    "class token": {},
    "distillation token": {"use_distillation_token": True},
    "registers": {"num_register_tokens": 3},
    "every prefix token": {"use_distillation_token": True, "num_register_tokens": 2},
    "no prefix token": {"use_class_token": False, "pooling": "mean"},
    "registers only": {"use_class_token": False, "pooling": "mean", "num_register_tokens": 2},
    "no position embedding": {"position_embedding": "none"},
    "no position nor class token": {"position_embedding": "none", "use_class_token": False, "pooling": "mean"},
    "no position of the class token": {"position_embedding_for_class_token": False, "num_register_tokens": 1},
    "LayerScale": {"layerscale_value": 0.1},
    "no qkv bias": {"qkv_bias": False},
    "no proj bias": {"proj_bias": False},
    "no mlp bias": {"mlp_bias": False},
    "mean pooling": {"pooling": "mean"},
    "class token and mean": {"pooling": "class_token_and_mean", "num_register_tokens": 2},
    "distillation token without classifier": {"use_distillation_token": True, "use_distillation_classifier": False},
    "distillation, class token and mean": {"pooling": "class_token_and_mean", "use_distillation_token": True},
    "image not square": {"image_size": (20, 32)},
    "patch not square": {"patch_size": (8, 4)},
    "neither square": {"image_size": (24, 16), "patch_size": (4, 2), "num_channels": 1},
    "one head": {"num_attention_heads": 1},
    "eps 0": {"layer_norm_eps": 0},
    "six heads, three layers": {"num_attention_heads": 6, "num_hidden_layers": 3},
}


@pytest.mark.parametrize(("architecture", "prior"), zip(ARCHITECTURES, cycle(["fibottention+violin", "dense"])))
def test_architectures_equal_a_vit_by_hand(architecture, prior):
    model = make(prior, **ARCHITECTURES[architecture]).double()
    size = model.config.image_size
    size = size if isinstance(size, list) else [size, size]
    pixels = images(size=size, channels=model.config.num_channels, dtype=torch.float64)
    expected, _ = vit_by_hand(model, pixels)
    with torch.no_grad():
        output = model.base_model(pixels)
        logits = model(pixels).logits
    assert output.last_hidden_state.dtype == logits.dtype == torch.float64
    torch.testing.assert_close(output.last_hidden_state, expected, rtol=1e-10, atol=1e-10)
    patches = expected[:, model.config.num_prefix_tokens :]
    kinds = {"class_token": [expected[:, 0]], "mean": [patches.mean(1)]}
    pooled = torch.cat(kinds.get(model.config.pooling) or [*kinds["class_token"], *kinds["mean"]], 1)
    torch.testing.assert_close(output.pooler_output, pooled, rtol=1e-10, atol=1e-10)
    class_logits = F.linear(pooled, model.classifier.weight, model.classifier.bias)
    if model.config.use_distillation_token and model.config.use_distillation_classifier:
        head = model.distillation_classifier
        class_logits = (class_logits + F.linear(expected[:, 1], head.weight, head.bias)) / 2
    else:
        assert model.distillation_classifier is None
    torch.testing.assert_close(logits, class_logits)


def reason_against_diagonals(support):
    if support["name"] == "dense":
        return "the support is dense"
    return f"support '{support['name']}' has pairs off its diagonals" if has_pairs(support["name"]) else None


@pytest.mark.parametrize("prior", EACH)
def test_priors_on_every_backend_equal_a_vit_by_hand(prior, monkeypatch):
    model, pixels = make(prior, num_register_tokens=1), images()
    expected, attentions = vit_by_hand(model, pixels)
    with torch.no_grad():
        single = model.base_model(pixels, output_attentions=True)
        double = model.double().base_model(pixels.double(), output_attentions=True)
    torch.testing.assert_close(double.last_hidden_state, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.stack(double.attentions), torch.stack(attentions), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(single.last_hidden_state.double(), expected, rtol=1e-4, atol=1e-4)
    for way in ("eager", "reference", "diagonal"):
        if way == "eager":
            model.set_attn_implementation("eager")
        else:
            model.set_attn_implementation("sdpa")
            monkeypatch.setenv("SPARSEPRIOR_BACKEND", way)
        if way == "diagonal" and (reason := reason_against_diagonals(model.config.prior["support"])):
            message = f"^SPARSEPRIOR_BACKEND='diagonal' cannot run this attention: {reason}"
            with pytest.raises(ValueError, match=message):
                model(pixels.double())
            continue
        found = model.base_model(pixels.double()).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        weights = model.base_model(pixels.double(), output_attentions=True).attentions
        torch.testing.assert_close(torch.stack(weights), torch.stack(attentions), rtol=1e-10, atol=1e-12)


# ---- transformers' own models ---------------------------------------------------------------------------------------

STOCK = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "layer_norm_eps": 1e-6,
}
EMBEDDINGS = {
    "embeddings.class_token": "embeddings.cls_token",
    "embeddings.projection.": "embeddings.patch_embeddings.projection.",
}
DINO_NAMES = EMBEDDINGS | {
    "layers.": "encoder.layer.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "layerscale_attention.scale": "layer_scale1.lambda1",
    "layerscale_mlp.scale": "layer_scale2.lambda1",
}


def copy_weights(source, target, names, may_lack=()):
    """Give `target` the weights of `source`. Replacing the keys of `names` by their values gives the target's names."""
    renamed = {}
    for name, tensor in source.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    missing, unexpected = target.load_state_dict(renamed, strict=False)
    assert set(missing) == set(may_lack) and not unexpected
    return target.eval()


def test_dense_equals_transformers_vit():
    ours = make(cls=SparsePriorViTModel)
    stock = ViTModel(ViTConfig(intermediate_size=48, **STOCK), add_pooling_layer=False)
    copy_weights(ours, stock, EMBEDDINGS)
    pixels = images()
    expected = stock(pixels, output_hidden_states=True)
    output = ours(pixels, output_hidden_states=True)
    torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=1e-5)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for own, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
    pixels = images(size=(40, 24))
    expected = stock(pixels, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(ours(pixels).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_distilled_classifier_equals_transformers_deit():
    ours = make(use_distillation_token=True)
    stock = DeiTForImageClassificationWithTeacher(DeiTConfig(intermediate_size=48, num_labels=3, **STOCK))
    names = {
        "vit.": "deit.",
        "classifier.": "cls_classifier.",
        "distillation_cls_classifier.": "distillation_classifier.",
    }
    copy_weights(ours, stock, EMBEDDINGS | names)
    expected, output = stock(images()), ours(images())
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.class_logits, expected.cls_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.distillation_logits, expected.distillation_logits, rtol=1e-5, atol=1e-5)
    own, theirs = (model.base_model(images()).last_hidden_state for model in (ours, stock))
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


def test_dense_equals_transformers_dinov2_with_registers():
    ours = make(cls=SparsePriorViTModel, num_register_tokens=4, layerscale_value=0.3)
    stock = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=4, **STOCK))
    copy_weights(ours, stock, DINO_NAMES, may_lack=["embeddings.mask_token"])
    expected = stock(images()).last_hidden_state
    torch.testing.assert_close(ours(images()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "support", [name for name in SUPPORTS if name not in ("dense", "radial")]
)  # the latter for clips
def test_support_equals_transformers_vit_with_a_4d_mask(support):
    # One mask serves all layers of the stock model, so the layers must not be shuffled; random pairs are a layer's own.
    depth = 1 if has_pairs(support) else 2
    ours = make({"support": {"name": support, "shuffle_seed": None}}, cls=SparsePriorViTModel, num_hidden_layers=depth)
    stock = ViTModel(ViTConfig(intermediate_size=48, **STOCK | {"num_hidden_layers": depth}), add_pooling_layer=False)
    copy_weights(ours, stock, EMBEDDINGS)
    mask = build_mask(support, num_heads=4, num_tokens=64, num_prefix_tokens=1, shuffle_seed=None)
    expected = stock(images(), attention_mask=torch.tensor(mask)[None]).last_hidden_state
    dense = stock(images()).last_hidden_state
    torch.testing.assert_close(ours(images()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert (expected - dense).abs().max() > 0.01  # the mask reached the stock model


@pytest.mark.parametrize(("prior", "backend"), PATHS)
def test_autocast_is_close_to_float32_and_trains_the_scalars_in_float32(prior, backend, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    model = make(prior, amount=0.2, pooling="mean")
    expected = model(images()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images(), labels=torch.tensor([0, 2]), output_attentions=True)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits.float(), expected, rtol=0.05, atol=0.05)
    support = PRIORS[prior]["support"]
    mask = torch.tensor(build_mask(support, num_heads=4, num_tokens=64, num_prefix_tokens=1, layer=1))
    assert torch.equal(output.attentions[1] != 0, mask.expand(2, -1, -1, -1))
    for decay in decays(model):
        for parameter in decay.parameters() if decay is not None else ():
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all() and parameter.grad.any()


# ---- other resolutions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "interpolation", "size"),
    [
        ("dense", "bicubic", (40, 24)),
        ("fibottention", "bilinear", (48, 32)),
        ("dense+violin", "bilinear", (40, 24)),
        ("fibottention+violin", "bicubic", (16, 16)),
        ("fibottention+violin", "bicubic", (48, 32)),
    ],
)
def test_other_resolutions_equal_a_vit_by_hand(prior, interpolation, size):
    model = make(prior, interpolation=interpolation, num_register_tokens=1)
    expected, _ = vit_by_hand(model, images(size=size))
    output = model.base_model(images(size=size)).last_hidden_state
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)


def test_models_made_in_float64_compute_and_interpolate_in_float64():
    model = AutoModel.from_config(tiny("fibottention+violin"), dtype=torch.float64).eval()
    for size in ((32, 32), (40, 24)):
        pixels = images(size=size, dtype=torch.float64)
        expected, _ = vit_by_hand(model, pixels)
        torch.testing.assert_close(model(pixels).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


def test_positions_are_those_of_torchs_interpolate():
    model = make(cls=SparsePriorViTModel)
    positions = model.embeddings.position_embeddings[:, 1:]
    resized = F.interpolate(positions.mT.reshape(1, 24, 8, 8), (5, 3), mode="bicubic").flatten(2).mT
    torch.testing.assert_close(model.embeddings.patch_positions((5, 3)), resized)
    assert torch.equal(model.embeddings.patch_positions((8, 8)), positions)
    rounded = model.bfloat16().embeddings.patch_positions((5, 3))  # computed in float32
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), resized, rtol=1e-2, atol=1e-2)


def test_images_that_do_not_fit_are_refused():
    """Other shapes: test_every_family.py."""
    model = make("fibottention+violin")
    for size in ((30, 32), (32, 33), (0, 32), (2, 2)):
        with pytest.raises(ValueError, match="image of {}x{} pixels must be a multiple of the 4x4 patch".format(*size)):
            model(torch.zeros(2, 3, *size))
    for given in (None, np.zeros((1, 3, 32, 32), np.float32)):
        with pytest.raises(ValueError, match=rf"pixel_values of {type(given).__name__} must be \(batch, 3, "):
            model.base_model(given)


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["default", "reference", "diagonal", "eager"])
def test_zero_fill_keeps_weight_off_the_support(way, monkeypatch):
    if way in ("reference", "diagonal"):
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", way)
    model = make("zero fill", attn_implementation="eager" if way == "eager" else "sdpa")
    weights = model(images(), output_attentions=True).attentions[0]
    mask = torch.tensor(build_mask("fibottention", num_heads=4, num_tokens=64, num_prefix_tokens=1))
    off = weights.masked_fill(mask, math.nan)[:, :, 1:]
    lowest, highest = off.nan_to_num(math.inf).amin(-1), off.nan_to_num(-math.inf).amax(-1)
    assert (lowest > 0).all()
    torch.testing.assert_close(lowest, highest)  # exp(0) / sum, the same for all pruned keys of a row


def test_distilled_loss_is_the_mean_of_both_heads():
    model, labels, teacher = make(use_distillation_token=True), torch.tensor([0, 2]), torch.tensor([1, 2])
    output = model(images(), labels=labels, distillation_targets=teacher)
    by_class, by_teacher = (
        F.cross_entropy(output.class_logits, labels),
        F.cross_entropy(output.distillation_logits, teacher),
    )
    torch.testing.assert_close(output.loss, (by_class + by_teacher) / 2)
    torch.testing.assert_close(output.logits, (output.class_logits + output.distillation_logits) / 2)
    both = model(images(), labels=labels)
    torch.testing.assert_close(both.loss, (by_class + F.cross_entropy(output.distillation_logits, labels)) / 2)


def test_the_trainer_sees_one_kind_of_labels():
    assert find_labels(SparsePriorViTForImageClassification) == ["labels"]


def test_no_labels_give_features():
    model = make(num_labels=0)
    torch.testing.assert_close(model(images()).logits, model.base_model(images()).pooler_output)


# ---- backbone -------------------------------------------------------------------------------------------------------


def test_backbone_maps_are_the_normed_hidden_states():
    stages = ["stem", "stage1", "stage2"]
    model = make("fibottention", cls=SparsePriorViTBackbone, image_size=(32, 24), out_features=stages)
    pixels = images(size=(32, 24))
    output = model(pixels, output_hidden_states=True, output_attentions=True)
    assert model.channels == [24, 24, 24] and len(output.attentions) == 2
    for map_, state in zip(output.feature_maps, output.hidden_states, strict=True):
        assert map_.shape == (2, 24, 8, 6)
        torch.testing.assert_close(map_.flatten(2).mT, model.layernorm(state)[:, 1:])
    assert [tuple(map_.shape[2:]) for map_ in model(images(size=(40, 20))).feature_maps] == [(10, 5)] * 3


def test_backbone_without_norm_or_reshaping():
    plain = make("dense", cls=SparsePriorViTBackbone, apply_layernorm=False, reshape_hidden_states=False)
    output = plain(images(), output_hidden_states=True)
    assert len(output.feature_maps) == 1
    torch.testing.assert_close(output.feature_maps[0], output.hidden_states[-1])
    assert plain(images(), return_dict=False)[0][0].shape == (2, 65, 24)


def test_a_backbone_takes_the_weights_of_a_bare_model(tmp_path):
    model = make("fibottention+violin", cls=SparsePriorViTModel)
    model.save_pretrained(tmp_path)
    backbone = SparsePriorViTBackbone.from_pretrained(tmp_path, out_features=["stage1"])
    assert backbone.out_features == ["stage1"]
    expected = model(images(), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(backbone(images()).feature_maps[0].flatten(2).mT, model.layernorm(expected)[:, 1:])


# ---- masks and randomness -------------------------------------------------------------------------------------------


def test_masks_are_the_same_in_training_after_reload_and_for_every_batch(tmp_path):
    model = make("fibottention+violin", drop_path_rate=0.1)
    expected = observed_masks(model)
    assert torch.equal(observed_masks(model.train()), expected)
    assert torch.equal(observed_masks(model, batch=5), expected)
    assert torch.equal(observed_masks(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path)
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(observed_masks(loaded), expected)


def test_layers_differ_unless_shuffling_is_off():
    first, second, third = observed_masks(make("fibottention", num_hidden_layers=3))
    assert not torch.equal(first, second) and not torch.equal(second, third)
    # The same four supports, on other heads.
    assert sorted(first.sum((1, 2)).tolist()) == sorted(second.sum((1, 2)).tolist())
    prior = {"support": {"name": "fibottention", "shuffle_seed": None}}
    first, second = observed_masks(make(prior))
    assert torch.equal(first, second)
    prior["support"]["shuffle_seed"] = 1
    # Layer 0 of seed 1 is layer 1 of seed 0.
    assert torch.equal(observed_masks(make(prior))[0], observed_masks(make("fibottention"))[1])


@pytest.mark.slow
def test_masks_are_the_same_in_another_process(tmp_path):
    """Which hashes text otherwise."""
    script = """
import hashlib, random, sys, torch
random.seed(99); torch.manual_seed(99)
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
config = SparsePriorViTConfig(prior="fibottention", image_size=32, patch_size=4, hidden_size=24,
                              num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
output = SparsePriorViTModel(config)(torch.randn(1, 3, 32, 32), output_attentions=True)
print(hashlib.sha256((torch.cat(output.attentions) != 0).numpy().tobytes()).hexdigest(), hash("fibottention"))
"""
    found, hashed = run_script(script, folder=tmp_path, package=True).stdout.split()
    assert int(hashed) != hash("fibottention")
    assert found == hashlib.sha256(observed_masks(make("fibottention")).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
def test_forward_leaves_global_generators_alone(prior, global_generators_left_alone):
    model = make(prior)
    with global_generators_left_alone():
        tiny(prior)
        model(images(size=(32, 24)))
