"""Configs refuse keys that mean nothing to them, however given, and a saved config can always be read again."""

import inspect
import json
import re

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, ViTConfig

from hf_sparseprior import (
    SparsePriorTimesformerConfig,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.base.families import FAMILIES
from tests.hf_sparseprior.small import SMALL

TINY = SMALL["sparseprior_vit"]
FOREIGN = {
    "tubelet_size": 2,  # of VideoMAE
    "num_registers": 4,
    "frozen_stages": 2,
    "layer_norm_epsilon": 1e-5,
    "temperature": 2.0,  # of generation; transformers drops these
    "max_length": 5,
    "per_layer_config": {0: {"hidden_act": "relu"}},
    "rope_scaling": {"rope_type": "default"},
    "is_decoder": True,
    "validate": 3,  # a method
    "grid": [2, 2],  # a property
}
CONFIGS = {name: family.config_class for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    SparsePriorViTModel(SparsePriorViTConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_without_meaning_is_refused_however_it_is_given(name, key, tmp_path):
    cls, value, tiny = CONFIGS[name], FOREIGN[key], SMALL[name]
    message = rf"^{key!r} is no field of {cls.__name__}(; did you mean '\w+'\?$|\. Fields: prior, compressed)"
    with pytest.raises(ValueError, match=message):
        cls(**tiny, **{key: value})
    config = cls(**tiny)
    with pytest.raises(ValueError, match=message):
        setattr(config, key, value)
    with pytest.raises(ValueError, match=message):
        cls.from_dict(config.to_dict(), **{key: value})
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        cls.from_pretrained(tmp_path, **{key: value})
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, key: value}))
    in_the_file = rf"^{re.escape(str(tmp_path))}/config\.json: {message[1:]}"
    with pytest.raises(ValueError, match=in_the_file):
        cls.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=in_the_file):
        AutoConfig.from_pretrained(tmp_path, num_labels=5)
    with pytest.raises(ValueError, match=in_the_file):
        FAMILIES[name].base.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("key", "near"), [("frames", "num_frames"), ("num_registers", "num_register_tokens"), ("num_frame", "num_frames")]
)
def test_the_nearest_field_is_named(key, near):
    with pytest.raises(
        ValueError, match=f"{key!r} is no field of SparsePriorTimesformerConfig; did you mean {near!r}?"
    ):
        SparsePriorTimesformerConfig(**TINY, **{key: 4})


def test_other_families_fields_are_not_suggested():
    with pytest.raises(ValueError, match=r"'frames' is no field of SparsePriorViTConfig\. Fields"):
        SparsePriorViTConfig(**TINY, frames=4)


def test_what_transformers_gives_to_every_config_is_taken(tmp_path):
    """Its arguments of the base class, what its example scripts pass, and what its Trainer and peft set."""
    given = {"num_labels": 3, "finetuning_task": "image-classification", "torch_dtype": "bfloat16"}
    config = SparsePriorViTConfig(**TINY, **given, attn_implementation="eager", output_attentions=True)
    assert (config.num_labels, config.dtype, config.output_attentions) == (3, torch.bfloat16, True)
    config.use_cache = False
    config.problem_type = "regression"
    config.quantization_config = {"quant_method": "bitsandbytes"}
    config.tie_word_embeddings = False
    config._attn_implementation = "sdpa"
    config.save_pretrained(tmp_path)
    del config.use_cache  # saved, and dropped on reading, as other settings of generation
    assert SparsePriorViTConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert AutoConfig.from_pretrained(tmp_path, num_labels=5).num_labels == 5


def test_configs_of_other_versions_of_transformers_are_read():
    """Version 4 wrote torch_dtype and its own private keys, 5.23 dtype."""
    older = {"torch_dtype": "float32", "_name_or_path": "somewhere", "_attn_implementation_autoset": True}
    written = {**SparsePriorViTConfig(**TINY).to_dict(), **older, "dtype": None, "transformers_version": "4.57.0"}
    assert SparsePriorViTConfig.from_dict(written).dtype == torch.float32


def test_every_field_of_the_base_config_is_taken_at_its_default():
    SparsePriorViTConfig(**TINY, **{name: getattr(PretrainedConfig(), name) for name in PretrainedConfig().to_dict()})


def test_keywords_of_processors_do_not_reach_the_config(folder):
    assert AutoImageProcessor.from_pretrained(folder, use_fast=False, do_resize=False).do_resize is False


def test_another_number_of_classes_replaces_the_saved_names(folder, caplog):
    model = SparsePriorViTForImageClassification.from_pretrained(folder, num_labels=5)
    assert model.config.id2label == {index: f"LABEL_{index}" for index in range(5)}
    assert model.classifier.out_features == 5 and "incompatible" not in caplog.text


COMMON = {
    "dtype": [("nn", "floating dtype"), ("int64", "floating dtype"), (3, "floating dtype")],
    "id2label": [([1], "0, 1, 2"), ({"cat": 0}, "0, 1, 2"), ({"0": "a", "2": "b"}, "0, 1, 2"), ({"0": []}, "0, 1, 2")],
    "label2id": [("cat", "0, 1, 2"), ({"cat": []}, "0, 1, 2")],
    "num_labels": [(-1, "an integer of 0"), (10**12, "at most 1048576"), ("3", "an integer"), (True, "an integer")],
    "problem_type": [("classification", "regression, single"), (1, "regression, single")],
    "return_dict": [("yes", "True or False")],
    "is_encoder_decoder": [(True, "False")],
    "chunk_size_feed_forward": [(4, "0")],
    "architectures": [("ViT", "a list"), ([3], "a list")],
    "output_hidden_states": [("yes", "True, False")],
    "output_attentions": [("yes", "True or False")],
}


@pytest.mark.parametrize(("key", "value", "allowed"), [(key, *case) for key, cases in COMMON.items() for case in cases])
def test_fields_of_every_config_are_checked(key, value, allowed):
    """transformers checks few of them; dtype="nn" became a module, a bad id2label an AttributeError."""
    with pytest.raises(ValueError, match=f"^{key}=.*must be .*{allowed}"):
        SparsePriorViTConfig(**TINY, **{key: value})
    with pytest.raises(ValueError, match=f"^{key}=.*must be .*{allowed}"):
        setattr(SparsePriorViTConfig(**TINY), key, value)


@pytest.mark.parametrize("value", [3, "stem", [[1]], [{}], [None]])
@pytest.mark.parametrize("name", ["out_features", "out_indices"])
def test_feature_maps_are_checked(name, value):
    if (name, value) == ("out_features", "stem") or not isinstance(value, str):
        with pytest.raises(ValueError, match=f"{name}=.* must be a list of some of stem, stage1"):
            SparsePriorViTConfig(**TINY, **{name: value})


@pytest.mark.parametrize("name", ["layer_norm_eps", "layerscale_value", "image_mean", "initializer_range"])
def test_integers_beyond_every_float_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=1000"):
        SparsePriorViTConfig(**TINY, **{name: 10**400})


def test_two_numbers_of_classes_are_refused():
    with pytest.raises(ValueError, match="num_labels=3 must be the 2 classes of id2label"):
        SparsePriorViTConfig(**TINY, num_labels=3, id2label={0: "cat", 1: "dog"})


# ---- stock configs and models ---------------------------------------------------------------------------------------

STOCK = {"layer_norm_eps": 1.0, "hidden_dropout_prob": 1.0, "attention_probs_dropout_prob": 1.0, "drop_path_rate": 1.0}


@pytest.mark.parametrize("field", STOCK)
def test_what_stock_vit_takes_is_taken_and_trains(field):
    value = STOCK[field]
    if field != "drop_path_rate":
        ViTConfig(**{field: value})
    model = SparsePriorViTForImageClassification(SparsePriorViTConfig(prior="violin", **TINY, **{field: value})).train()
    loss = model(torch.randn(2, 3, 8, 8), labels=torch.tensor([0, 1])).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in (loss, *gradients))


@pytest.mark.parametrize(("prior", "kept"), [("dense", set()), ("fibottention", set()), ("violin", {"decay_bias"})])
def test_float32_is_kept_for_modules_that_the_model_has(prior, kept):
    model = SparsePriorViTForImageClassification(SparsePriorViTConfig(prior=prior, **TINY))
    assert model._keep_in_fp32_modules_strict == model.vit._keep_in_fp32_modules_strict == kept
    names = {part for name, _ in model.named_modules() for part in name.split(".")}
    assert kept <= names


def test_stock_models_load_by_every_keyword(tmp_path):
    """`from_pretrained` of stock classes is transformers' own, so its first argument has its name."""
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    model = transformers.BertModel.from_pretrained(pretrained_model_name_or_path=tmp_path, config=config)
    assert isinstance(model, transformers.BertModel)
    method = inspect.unwrap(transformers.BertModel.from_pretrained.__func__)
    assert method.__module__.startswith("transformers.")
    ours = inspect.signature(SparsePriorViTModel.from_pretrained)
    assert next(iter(ours.parameters)) == next(
        iter(inspect.signature(transformers.BertModel.from_pretrained).parameters)
    )


def test_keywords_over_a_saved_config_are_checked_and_resolved(tmp_path):
    SparsePriorViTConfig(**TINY).save_pretrained(tmp_path)
    for config_class in (AutoConfig, SparsePriorViTConfig):
        changed = config_class.from_pretrained(tmp_path, prior="fibottention")
        assert changed.prior_name == "fibottention" and changed.pruning_ratio > 0
        for keywords, message in (({"prior": "nonsense"}, "'nonsense' is no prior"), ({"image_size": 33}, "33")):
            with pytest.raises(ValueError, match=message):
                config_class.from_pretrained(tmp_path, **keywords)
