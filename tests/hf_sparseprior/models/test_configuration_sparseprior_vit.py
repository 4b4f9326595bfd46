"""SparsePriorViTConfig: presets, checks, derived values and what is written to config.json."""

import copy
import json
import logging
from itertools import cycle

import numpy as np
import pytest
import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.models.configuration_sparseprior_vit import PRESETS
from hf_sparseprior.patterns.curves import curve_names
from hf_sparseprior.patterns.decay import DECAYS, INIT_PRESETS
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.priors.prior import SLOTS
from tests.each import each

PRIORS = {support: {"support": support, "decay": decay} for support, decay in zip(SUPPORTS, cycle(DECAYS))}
PRIORS |= {f"{name} sequence": {"support": {"name": "fibottention", "sequence": name}} for name in SEQUENCES}
PRIORS |= {f"{name} init": {"decay": {"name": "violin", "init": name}} for name in INIT_PRESETS}


def tiny(**settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return SparsePriorViTConfig(**{**sizes, "image_size": 32, "patch_size": 4, **settings})


# ---- presets and parameter counts -----------------------------------------------------------------------------------


@each("preset", PRESETS)
def test_every_preset_builds_and_takes_overrides(preset):
    own = SparsePriorViTConfig.from_preset(preset, prior="fibottention+violin", num_hidden_layers=3, num_labels=7)
    assert (own.prior_name, own.num_hidden_layers, own.num_labels) == ("fibottention+violin", 3, 7)
    config = SparsePriorViTConfig.from_preset(preset)  # the overrides left the table alone
    assert all(getattr(config, name) == value for name, value in PRESETS[preset].items() if name[:5] != "image")
    assert config.prior_name == "dense" and config.pruning_ratio == 0 and config.num_hidden_layers != 3
    assert config.grid == ((16, 16) if preset == "deit3_huge" else (14, 14))


def test_unknown_preset_lists_what_there_is():
    with pytest.raises(ValueError, match=r"preset='deit_giant' must be one of vit_tiny, .*dino_base"):
        SparsePriorViTConfig.from_preset("deit_giant")


def count_parameters(preset, **overrides):
    config = SparsePriorViTConfig.from_preset(preset, num_labels=1000, **overrides)
    with torch.device("meta"):
        return SparsePriorViTForImageClassification(config).num_parameters()


def closed_form(width, layers=12, prefix=1, labels=1000, patch=16, tokens=196):
    hidden = 4 * width
    embedding = 3 * patch * patch * width + width + prefix * width + (tokens + prefix) * width
    attention, mlp, norms = 4 * (width * width + width), 2 * width * hidden + hidden + width, 2 * 2 * width
    # A distillation token brings a second classifier.
    return embedding + layers * (attention + mlp + norms) + 2 * width + prefix * (width * labels + labels)


# The literals are the counts that timm gives for these models.
@pytest.mark.parametrize(
    ("size", "width", "golden"), [("tiny", 192, 5_717_416), ("small", 384, 22_050_664), ("base", 768, 86_567_656)]
)
def test_parameter_counts_of_vit_and_deit(size, width, golden):
    assert closed_form(width) == golden
    assert count_parameters(f"vit_{size}") == golden
    assert count_parameters(f"deit_{size}") == golden


def test_parameter_counts_of_other_presets():
    assert count_parameters("deit_base_distilled") == closed_form(768, prefix=2) == 87_338_192
    # No position of the class token, two LayerScales a layer.
    assert count_parameters("deit3_base") == 86_567_656 - 768 + 24 * 768
    assert count_parameters("dino_small") == 22_050_664


def test_violin_adds_nine_scalars_a_head_and_layer_to_deit_base():
    dense = count_parameters("deit_base")
    assert count_parameters("deit_base", prior="violin") - dense == 12 * 12 * (8 + 1) == 1296
    assert count_parameters("deit_base", prior="fibottention") == dense
    # One curve with its transpose (VIOLIN Tables 7 and 11) and the ablations without alpha.
    pair = {"name": "violin", "curves": ["hilbert", "hilbert_t"]}
    assert count_parameters("deit_base", prior={"decay": pair}) - dense == 432
    assert count_parameters("deit_base", prior={"decay": {**pair, "learn_alpha": False}}) - dense == 288
    fixed = {"name": "violin", "learn_alpha": False, "learn_beta": False}
    assert count_parameters("deit_base", prior={"decay": fixed}) == dense


# ---- derived values -------------------------------------------------------------------------------------------------


def test_pruning_ratio_counts_prefix_tokens():
    """Fibottention Table 1's settings at N = 196; other settings: test_supports.py."""
    config = SparsePriorViTConfig.from_preset("deit_base", prior="fibottention")
    assert config.pruning_ratio == pytest.approx(97.014, abs=5e-4)
    config = SparsePriorViTConfig.from_preset("deit_base", prior="fibottention", use_class_token=False, pooling="mean")
    assert config.pruning_ratio == pytest.approx(98.006, abs=5e-4)


def test_grid_and_prefix_tokens_follow_the_fields():
    config = tiny(image_size=(32, 48), patch_size=(4, 8), use_distillation_token=True, num_register_tokens=3)
    assert config.grid == (8, 6) and config.num_prefix_tokens == 5
    assert tiny(use_class_token=False, pooling="mean").num_prefix_tokens == 0


@each(
    "prior, name",
    [
        ("dense", "dense"),
        (None, "dense"),
        ({}, "dense"),
        ("violin", "violin"),
        ("violin+fibottention", "fibottention+violin"),
        (" fibottention + violin ", "fibottention+violin"),
        ({"support": "window", "decay": "manhattan"}, "window+manhattan"),
        ("fibottention+softmax", "fibottention"),
    ],
)
def test_prior_name(prior, name):
    assert tiny(prior=prior).prior_name == name


def test_stages_of_the_backbone():
    config = tiny(num_hidden_layers=3, out_features=["stem", "stage2"])
    assert config.stage_names == ["stem", "stage1", "stage2", "stage3"]
    assert config.out_indices == [0, 2]
    assert tiny().out_features == ["stage2"]


# ---- checks ---------------------------------------------------------------------------------------------------------


def fibottention(**settings):
    return {"prior": {"support": {"name": "fibottention", **settings}}}


def violin(**settings):
    return {"prior": {"decay": {"name": "violin", **settings}}}


# Fields, and what the one message has to contain: the field, the value, what is allowed. Those of supports and decays
# are in test_supports.py and test_decay.py.
BAD = [
    ({"image_size": 30}, ["image_size=30", "patch_size=4", "multiple"]),
    ({"image_size": (30, 32)}, ["image_size=[30, 32]", "patch_size=4"]),
    ({"image_size": (32, 32, 3)}, ["image_size=(32, 32, 3)", "one number or (height, width)"]),
    ({"image_size": "32"}, ["image_size='32'", "1 or more, or (height, width)"]),
    ({"image_size": 0}, ["image_size=0", "1 or more"]),
    ({"image_size": 32.0}, ["image_size=32.0", "integer"]),
    ({"patch_size": [4, 0]}, ["patch_size=0", "1 or more"]),
    ({"num_channels": 0}, ["num_channels=0", "1 or more"]),
    ({"num_attention_heads": 0}, ["num_attention_heads=0", "1 or more"]),
    ({"num_attention_heads": 5}, ["hidden_size=24", "num_attention_heads=5", "multiple"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers=True", "integer"]),
    ({"hidden_size": 24.0}, ["hidden_size=24.0", "integer"]),
    ({"intermediate_size": None}, ["intermediate_size=None", "integer"]),
    ({"num_register_tokens": -1}, ["num_register_tokens=-1", "0 or more"]),
    ({"hidden_act": "gelo"}, ["hidden_act='gelo'", "gelu"]),
    ({"hidden_act": ["gelu"]}, ["hidden_act=['gelu']", "gelu"]),
    ({"qkv_bias": "yes"}, ["qkv_bias='yes'", "True or False"]),
    ({"mlp_bias": 1}, ["mlp_bias=1", "True or False"]),
    ({"use_class_token": "False"}, ["use_class_token='False'", "True or False"]),
    ({"pooling": "max"}, ["pooling='max'", "class_token, mean, class_token_and_mean"]),
    ({"use_class_token": False}, ["pooling='class_token'", "use_class_token", "'mean'"]),
    (
        {"use_class_token": False, "pooling": "class_token_and_mean"},
        ["pooling='class_token_and_mean'", "use_class_token=True", "'mean'"],
    ),
    (
        {"use_distillation_classifier": None},
        ["use_distillation_classifier=None", "True or False"],
    ),
    (
        {"use_class_token": False, "pooling": "mean", "use_distillation_token": True},
        ["use_distillation_token=True", "use_class_token=True"],
    ),
    ({"position_embedding": "sincos"}, ["position_embedding='sincos'", "learned, rotary, none"]),
    ({"interpolation": "cubic"}, ["interpolation='cubic'", "bicubic, bilinear"]),
    ({"drop_path_rate": 1.1}, ["drop_path_rate=1.1", "[0, 1]"]),
    ({"hidden_dropout_prob": -0.1}, ["hidden_dropout_prob=-0.1", "[0, 1]"]),
    ({"attention_probs_dropout_prob": 2}, ["attention_probs_dropout_prob=2", "[0, 1]"]),
    ({"hidden_dropout_prob": float("nan")}, ["hidden_dropout_prob=nan", "[0, 1]"]),
    ({"hidden_dropout_prob": "0.1"}, ["hidden_dropout_prob='0.1'", "[0, 1]"]),
    ({"layer_norm_eps": -1e-6}, ["layer_norm_eps=-1e-06", "[0, inf)"]),
    ({"initializer_range": -1}, ["initializer_range=-1", "[0, inf)"]),
    ({"layerscale_value": "small"}, ["layerscale_value='small'", "number"]),
    ({"image_mean": [0.5, 0.5]}, ["image_mean=[0.5, 0.5]", "each of 3 channels"]),
    ({"image_std": ["a", "b", "c"]}, ["image_std", "'a'", "number"]),
    ({"image_std": [0.5, 0, 0.5]}, ["image_std", "0"]),
    ({"prior": "attention"}, ["prior='attention'", "fibottention", "violin", "dense"]),
    ({"prior": 3}, ["prior=3", "name", "dict"]),
    ({"prior": ""}, ["prior=''", "fibottention"]),
    ({"prior": "window+fibottention"}, ["support twice", "'window'", "'fibottention'"]),
    ({"prior": "violin+manhattan"}, ["decay twice", "'violin'", "'manhattan'"]),
    ({"prior": {"suport": "dense"}}, ["'suport'", "did you mean 'support'"]),
    ({"prior": {"support": "violin"}}, ["support='violin'", "fibottention"]),
    ({"prior": {"support": {"w_min": 3}}}, ["support", "fibottention", "{'w_min': 3}"]),
    ({"prior": {"support": 5}}, ["support", "5", "fibottention"]),
    ({"prior": {"decay": "violn"}}, ["decay='violn'", "violin"]),
    ({"prior": {"decay": 5}}, ["decay", "5", "violin"]),
    ({"prior": {"predictor": "sparsifier"}}, ["predictor='sparsifier'", "topk"]),
    ({"prior": {"mixer": "linear"}}, ["mixer='linear'", "softmax"]),
    ({"prior": {"mixer": ["softmax"]}}, ["mixer=['softmax']"]),
    ({"prior": {"extras": ["lora"]}}, ["extras='lora'", "swin_rpb"]),
    (fibottention(w_min=-1), ["w_min=-1", "1 or more", "64 patch tokens", "8x8 grid"]),
    (fibottention(w_mim=3), ["'w_mim'", "did you mean 'w_min'"]),
    (fibottention(sequence="primes"), ["sequence='primes'", "wythoff"]),
    (fibottention(sequence={"name": "powers", "base": 1}), ["base=1", "2 or more"]),
    (fibottention(sequence={"name": "powers", "bas": 3}), ["'bas'", "did you mean 'base'"]),
    (fibottention(sequence={"name": "fibonacci", "a": 0, "b": 0}), ["a=0", "b=0"]),
    (violin(curves=["hilbert", "moore"]), ["'moore'", *curve_names()]),
    (violin(init="big"), ["init='big'", *INIT_PRESETS]),
    ({"out_features": ["stage9"]}, ["stage9", "stage2"]),
]


@each("fields, fragments", BAD)
def test_bad_values_are_named_in_one_error(fields, fragments):
    with pytest.raises(ValueError) as caught:
        tiny(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert not [fragment for fragment in fragments if fragment not in message], message


def test_unknown_prior_suggests_the_nearest_name():
    for name, near in (("fibotention", "fibottention"), ("violn", "violin"), ("windows", "window")):
        with pytest.raises(ValueError, match=f"{name}.*did you mean '{near}'"):
            tiny(prior=name)


def test_every_bad_field_is_also_refused_by_validate():
    """`validate` is what models and tools call on a config that was changed after it was made."""
    config = tiny()
    config.pooling = "max"
    with pytest.raises(ValueError, match="pooling='max'"):
        config.validate()


def test_numpy_and_boundary_values_are_accepted_and_become_plain():
    config = tiny(
        hidden_size=np.int64(24),
        num_attention_heads=np.int32(4),
        image_size=(np.int64(32), np.int64(32)),
        patch_size=np.uint8(4),
        num_register_tokens=np.int64(0),
        qkv_bias=np.bool_(False),
        layer_norm_eps=0,
        drop_path_rate=0,
        hidden_dropout_prob=np.float64(0.5),
        layerscale_value=1,
        image_mean=0,
        prior={"support": {"name": "fibottention", "shuffle_seed": np.int64(3), "w_max": np.int64(9)}},
    )
    assert type(config.hidden_size) is int and type(config.image_size[0]) is int and config.qkv_bias is False
    assert config.layer_norm_eps == 0 and config.image_mean == [0.0, 0.0, 0.0]
    support = json.loads(config.to_json_string())["prior"]["support"]
    assert (support["shuffle_seed"], support["w_max"]) == (3, 9)
    SparsePriorViTModel(config)


# ---- the log --------------------------------------------------------------------------------------------------------


def test_empty_heads_are_logged_once(caplog):
    # Supports 2 to 4 start at 4, 6 and 9, windows are 1 to 5.
    with caplog.at_level(logging.INFO, logger="hf_sparseprior"):
        config = tiny(image_size=16, prior={"support": {"name": "fibottention", "w_min": 1}})
        assert len(caplog.records) == 1
        text = caplog.records[0].getMessage()
        assert "supports 2, 3, 4 of 4" in text and "4x4 grid" in text and "prefix tokens only" in text
        assert caplog.records[0].name == "hf_sparseprior.config"
        caplog.clear()
        SparsePriorViTModel(config)
        assert not caplog.records


def test_clipped_windows_and_empty_heads_without_prefix_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="hf_sparseprior"):
        tiny(prior={"support": {"name": "fibottention", "w_min": 1, "w_max": 196}})
        assert caplog.text.count("w_max=196 is clipped to the 64 patch tokens of the 8x8 grid") == 1
        prior = {"support": {"name": "fibottention", "w_min": 1}}
        tiny(image_size=16, prior=prior, use_class_token=False, pooling="mean")
    assert "themselves only" in caplog.text


def test_nothing_is_logged_for_a_sound_config(caplog):
    with caplog.at_level(logging.DEBUG, logger="hf_sparseprior"):
        tiny(prior="fibottention+violin")
        SparsePriorViTConfig.from_preset("deit_base", prior="fibottention")
    assert not caplog.records


# ---- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRIORS)
def test_json_keeps_the_prior_in_full(name, tmp_path):
    config = tiny(prior=PRIORS[name])
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["prior"]
    assert list(config.prior) == list(SLOTS) and written == config.prior
    reloaded = SparsePriorViTConfig.from_pretrained(tmp_path)
    assert reloaded.prior == config.prior
    assert reloaded.to_dict() == config.to_dict()


def test_json_keeps_every_field(tmp_path):
    fields = {
        "image_size": [32, 48],
        "patch_size": [4, 8],
        "num_channels": 2,
        "hidden_act": "relu",
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
        "use_distillation_token": True,
        "use_distillation_classifier": False,
        "num_register_tokens": 2,
        "pooling": "class_token_and_mean",
        "position_embedding_for_class_token": False,
        "interpolation": "bilinear",
        "layerscale_value": 0.5,
        "drop_path_rate": 0.25,
        "layer_norm_eps": 0,
        "image_mean": [0.1, 0.2],
        "apply_layernorm": False,
        "reshape_hidden_states": False,
        "num_labels": 5,
        "out_features": ["stem", "stage1"],
    }
    tiny(**fields).save_pretrained(tmp_path)
    reloaded = SparsePriorViTConfig.from_pretrained(tmp_path)
    assert {name: getattr(reloaded, name) for name in fields} == fields


def test_default_config_writes_its_prior():
    """A default that changed in a later version must not change a saved model."""
    assert "prior" in json.loads(SparsePriorViTConfig().to_json_string())


def test_two_configs_share_no_prior_and_copies_are_equal():
    given = {"support": {"name": "fibottention"}, "decay": {"name": "violin"}}
    before = copy.deepcopy(given)
    for prior in (given, "fibottention"):
        first, second = tiny(prior=prior), tiny(prior=prior)
        assert copy.deepcopy(first).to_dict() == first.to_dict()
        assert SparsePriorViTConfig.from_dict(first.to_dict()).to_dict() == first.to_dict()
        first.prior["support"]["w_min"] = 1
        assert second.prior["support"]["w_min"] == 5 and tiny(prior=prior).prior["support"]["w_min"] == 5
    assert given == before


# ---- from_pretrained(prior=...) -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    SparsePriorViTModel(tiny()).save_pretrained(folder)
    return folder


@each("prior", ["violin", "fibottention", {"support": {"name": "fibottention", "w_min": 2}}])
def test_a_prior_given_on_loading_is_the_configs(saved_dense, prior):
    expected = tiny(prior=prior)
    model = SparsePriorViTModel.from_pretrained(saved_dense, prior=prior)
    assert model.config.prior == expected.prior
    assert (model.layers[0].attention.decay_bias is not None) == (prior == "violin")


@each("prior", ["violn", {"support": {"name": "fibottention", "w_min": -1}}, {"suport": "dense"}, 3])
def test_a_bad_prior_given_on_loading_is_refused(saved_dense, prior):
    with pytest.raises(ValueError) as at_config:
        tiny(prior=prior)
    with pytest.raises(ValueError) as at_loading:
        SparsePriorViTModel.from_pretrained(saved_dense, prior=prior)
    assert str(at_loading.value) == str(at_config.value)


def test_other_fields_given_on_loading_are_taken_or_refused(saved_dense):
    for field, value in (("pooling", "max"), ("drop_path_rate", 2), ("hidden_dropout_prob", "0.1"), ("image_size", 30)):
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            SparsePriorViTModel.from_pretrained(saved_dense, **{field: value})
    model = SparsePriorViTModel.from_pretrained(saved_dense, pooling="mean", drop_path_rate=0.5)
    assert model.config.pooling == "mean" and model.layers[1].drop_path.rate == 0.5


def test_a_prior_follows_a_presets_name():
    assert SparsePriorViTConfig.from_preset("deit_small", "violin") == SparsePriorViTConfig.from_preset(
        "deit_small", prior="violin"
    )
    assert SparsePriorViTConfig.from_preset("deit_small").prior_name == "dense"


def test_the_prior_of_a_model_that_exists_cannot_be_set():
    config = tiny(prior="fibottention")
    config.prior = "violin"  # of a config alone
    model = SparsePriorViTModel(config)
    with pytest.raises(
        ValueError, match=r"config\.prior='dense' cannot be set: a model with the prior 'violin' was made"
    ):
        model.config.prior = "dense"
    model.config.prior = model.config.prior
    other = copy.deepcopy(model.config)
    other.prior = "dense"
    assert SparsePriorViTModel(other).config.prior_name == "dense" and model.config.prior_name == "violin"
    assert not [key for key in (*model.config.to_dict(), *model.config.to_diff_dict()) if "own" in key]
