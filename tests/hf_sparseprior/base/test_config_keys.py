"""Configs keep keys as transformers' do and warn of mistyped ones, and a saved config can always be read again."""

import inspect
import itertools
import json
import re

import numpy as np
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
from hf_sparseprior.base import config_keys
from hf_sparseprior.base.families import FAMILIES
from tests.each import each
from tests.hf_sparseprior.small import SMALL

TINY = SMALL["sparseprior_vit"]
FOREIGN = {
    "tubelet_size": 2,  # of VideoMAE
    "frozen_stages": 2,
    "rms_norm_eps": 1e-5,
    "is_decoder": True,
    "note": {"by": ["me"]},
}
CONFIGS = {name: family.config_class for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    SparsePriorViTModel(SparsePriorViTConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_no_field_is_kept_as_transformers_keeps_it(name, tmp_path, caplog):
    """As a keyword, an attribute and a key of config.json; `from_pretrained` leaves other keywords aside."""
    cls, tiny = CONFIGS[name], SMALL[name]
    stock, given, set_later = ViTConfig(**FOREIGN), cls(**tiny, **FOREIGN), cls(**tiny)
    given.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    for key, value in FOREIGN.items():
        setattr(set_later, key, value)
        assert getattr(stock, key) == getattr(given, key) == getattr(set_later, key) == value
        for folder, kind in ((tmp_path / "ours", cls), (tmp_path / "stock", ViTConfig)):
            assert json.loads((folder / "config.json").read_text())[key] == value
            assert getattr(kind.from_pretrained(folder), key) == value
            assert getattr(AutoConfig.from_pretrained(folder), key) == value
        assert cls.from_pretrained(tmp_path / "ours", num_labels=5, **{key: None}).to_dict()[key] is None
        with pytest.raises(ValueError, match=f"{key!r} is no field of {cls.__name__}"):  # our own settings stay strict
            FAMILIES[name].make_config(**tiny, **{key: value})
    _, unused = cls.from_pretrained(tmp_path / "ours", return_unused_kwargs=True, unknown_to_all=1)
    assert unused == {"unknown_to_all": 1}
    assert "did you mean" not in caplog.text


@pytest.mark.parametrize("name", CONFIGS)
@each("key", ["validate", "grid"])  # a method, and what is derived
def test_what_the_class_derives_cannot_be_given(name, key, tmp_path):
    cls = CONFIGS[name]
    message = f"{key}=3 cannot be set: {cls.__name__} derives it"
    with pytest.raises(ValueError, match=f"^{message}"):
        cls(**SMALL[name], **{key: 3})
    cls(**SMALL[name]).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, key: 3}))
    for read in (cls.from_pretrained, AutoConfig.from_pretrained, FAMILIES[name].base.from_pretrained):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}/config\.json: {message}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        *(("promt", "prior"), ("patchsize", "patch_size"), ("PatchSize", "patch_size"), ("hiden_size", "hidden_size")),
        *(("num_atention_heads", "num_attention_heads"), ("priors", "prior")),
        *(("stme", "stem"), ("num_frame", "num_frames"), ("frames", "num_frames"), ("depth", "num_hidden_layers")),
    ],
)
def test_a_keyword_that_nearly_is_a_field_is_warned_of_once(key, near, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(config_keys, "_WARNED", set())
    for _ in range(3):
        SparsePriorTimesformerConfig(**TINY, **{key: 4})
    warning = f"'{key}' is no field of SparsePriorTimesformerConfig and has no effect; did you mean '{near}'?"
    assert [record.getMessage() for record in caplog.records] == [warning]
    config_keys._WARNED.clear()
    SparsePriorTimesformerConfig(**TINY).save_pretrained(tmp_path)
    SparsePriorTimesformerConfig.from_pretrained(tmp_path, **{key: 4})
    assert caplog.text.count(warning) == 2


@pytest.mark.parametrize("key", ["rms_norm_eps", "hidden_sizes", "seed", "gradient_checkpointing", "frames", "_prior"])
def test_other_names_are_not_warned_of(key, caplog, monkeypatch):
    """A field of another config of transformers, what is far from all fields, and a field of another family."""
    monkeypatch.setattr(config_keys, "_WARNED", set())
    SparsePriorViTConfig(**TINY, **{key: 4})
    assert not caplog.records


@each("seed", range(30))
def test_distance_of_words_is_the_shortest_way(seed):
    """By breadth-first search over all words that one change more leads to."""
    random = np.random.default_rng(seed)
    one, other = ("".join(random.choice(list("ab"), random.integers(0, 4))) for _ in range(2))
    reached, steps = {one}, 0
    while other not in reached:
        reached, steps = {word for start in reached for word in changed(start)} | reached, steps + 1
    # The alignment changes no letter twice, which may take a step more than the free search.
    assert steps <= config_keys._edits(one, other) <= steps + 1


def changed(word):
    """Words of the letters a and b that are one change away."""
    for place in range(len(word) + 1):
        yield from (word[:place] + letter + word[place:] for letter in "ab")
        if place < len(word):
            yield word[:place] + word[place + 1 :]
            yield from (word[:place] + letter + word[place + 1 :] for letter in "ab")
        if place + 1 < len(word):
            yield word[:place] + word[place + 1] + word[place] + word[place + 2 :]


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
    "is_encoder_decoder": [("no", "True or False")],
    "chunk_size_feed_forward": [(-1, "0 or more"), ("4", "an integer")],
    "architectures": [("ViT", "a list"), ([3], "a list")],
    "output_hidden_states": [("yes", "True, False")],
    "output_attentions": [("yes", "True or False")],
}


@each("key, value, allowed", [(key, *case) for key, cases in COMMON.items() for case in cases])
def test_fields_of_every_config_are_checked(key, value, allowed):
    """transformers checks few of them; dtype="nn" became a module, a bad id2label an AttributeError."""
    with pytest.raises(ValueError, match=f"^{key}=.*must be .*{allowed}"):
        SparsePriorViTConfig(**TINY, **{key: value})
    with pytest.raises(ValueError, match=f"^{key}=.*must be .*{allowed}"):
        setattr(SparsePriorViTConfig(**TINY), key, value)


@each(
    "name, value",
    [*itertools.product(["out_features", "out_indices"], [3, [[1]], [{}], [None]]), ("out_features", "stem")],
)
def test_feature_maps_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be a list of some of stem, stage1"):
        SparsePriorViTConfig(**TINY, **{name: value})


@each("name", ["layer_norm_eps", "layerscale_value", "image_mean", "initializer_range"])
def test_integers_beyond_every_float_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=1000"):
        SparsePriorViTConfig(**TINY, **{name: 10**400})


def test_two_numbers_of_classes_are_refused():
    with pytest.raises(ValueError, match="num_labels=3 must be the 2 classes of id2label"):
        SparsePriorViTConfig(**TINY, num_labels=3, id2label={0: "cat", 1: "dog"})


# ---- stock configs and models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_norm_eps": 1.0, "hidden_dropout_prob": 1.0},
        {"attention_probs_dropout_prob": 1.0, "drop_path_rate": 1.0},
    ],
)
def test_what_stock_vit_takes_is_taken_and_trains(fields):
    ViTConfig(**{key: value for key, value in fields.items() if key != "drop_path_rate"})
    model = SparsePriorViTForImageClassification(SparsePriorViTConfig(prior="violin", **TINY, **fields)).train()
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
