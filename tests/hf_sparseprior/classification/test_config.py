import dataclasses
import functools
import itertools
import json
import re

import pytest
import torch

from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.model import build_model
from hf_sparseprior.runs.config import WITHOUT_EFFECT, parse_value, read_cells
from hf_sparseprior.training import SparsePriorTrainingArguments
from tasks.classification.compare import load_comparison
from tasks.common.compare import builds_on, needed_first
from tests.configs import shipped
from tests.each import each

FILES = ("imagenet", "digits", "cifar10_small", "cifar10_pretrain_tiny", "smoke")
RUNS = [run for name in FILES for run in shipped.runs(f"classification/{name}.yaml") if "40x40" not in run]
RUNS += [*shipped.runs("experiments/fib_tables_2_3.yaml"), "recipes/finetune.yaml"]


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@functools.cache
def built(model):
    """The config of the model of a section in JSON, made without memory. Many configurations have the same one."""
    with torch.device("meta"):
        return build_model(json.loads(model), ["a", "b", "c"]).config


@each("name", RUNS)
def test_every_shipped_configuration_builds_its_model(name):
    model = built(json.dumps(load_config(shipped.path(name))["model"]))
    assert model.id2label == {0: "a", 1: "b", 2: "c"}
    # finetune takes the prior of the model that it starts from
    named = [prior for prior in ("fibottention", "violin") if prior in name or "smoke" in name]
    assert model.prior_name == ("+".join(named) or "dense")
    assert model.prior["support"].get("modified", False) == ("modified" in name)


@each("name", shipped.comparisons())
def test_every_shipped_comparison_builds_its_models(name):
    comparison = load_comparison(shipped.path(name))
    first = {f"first {number}": config for number, config in enumerate(comparison.first)}
    if first:  # and then rows and later runs read nothing else that a run leaves
        read = [(config, list(first.values())) for config in comparison.configs.values()]
        read += [(config, list(first.values())[:number]) for number, config in enumerate(first.values())]
        for config, earlier in read:
            made = str(config["model"].get("pretrained")).startswith("outputs/")
            assert any(builds_on(CLASSIFICATION, config, other) for other in earlier) >= made
        assert needed_first(CLASSIFICATION, comparison.first, list(comparison.configs.values())) == comparison.first
    for config in {**first, **comparison.configs}.values():
        model = config["model"]
        model.pop("pretrained", None)  # of a run that this machine need not have
        assert built(json.dumps(model)).num_labels == 3
    assert len(comparison.seeds) >= 1 and len(comparison.configs) >= 2


@each(
    "data, model, prior",
    itertools.product(
        *(["cifar10", "cifar100", "tiny_imagenet", "imagenet"], [("vit_base", 768, 12), ("vit_tiny", 192, 3)]),
        ["dense", "fibottention", "fibottention_modified"],
    ),
)
def test_the_rows_of_fibottention_table_2_are_full_size(data, model, prior):
    name, *sizes = model
    config = load_config(shipped.path(f"experiments/fib_tables_2_3.yaml#{data}-{name}-{prior}"))
    found = built(json.dumps(config["model"]))
    assert [found.hidden_size, found.num_attention_heads, found.num_hidden_layers] == [*sizes, 12]
    assert (found.grid, found.num_prefix_tokens) == ((14, 14), 1)
    if name == "vit_base":  # spec.md, prefix token included
        golden = {"dense": 0.0, "fibottention": 97.014, "fibottention_modified": 95.241}
        assert found.pruning_ratio == pytest.approx(golden[prior], abs=5e-4)


def test_the_recipe_is_fibottention_table_9():
    config = load_config(shipped.path("experiments/fib_tables_2_3.yaml#cifar10-vit_base-fibottention"))
    augmentation, trainer = config["augmentation"], config["trainer"]
    assert augmentation["randaugment"] == "rand-m15-n2-mstd1.0-inc1"
    assert (augmentation["scale"], augmentation["ratio"]) == ([0.08, 1.0], [0.67, 1.5])
    named = ("flip", "color_jitter", "label_smoothing", "eval_crop_ratio")
    assert [augmentation[name] for name in named] == [0.5, 0.4, 0.1, 0.9]
    assert augmentation["mixup"] > 0 and augmentation["cutmix"] > 0 and augmentation["switch_probability"] == 0.5
    named = ("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "num_train_epochs", "ema_decay")
    assert [trainer[name] for name in named] == [1e-3, 0.05, 1.0, 1e-6, 100, 0.99992]
    assert trainer["warmup_steps"] * trainer["num_train_epochs"] == 5
    rates = trainer["lr_scheduler_kwargs"]
    assert rates["min_lr"] == 1e-5 and rates["warmup_lr_rate"] * trainer["learning_rate"] == pytest.approx(1e-6)


def test_base_is_inherited_and_overridden(tmp_path):
    write(tmp_path, "data: {source: digits}\nmodel: {prior: dense, image_size: 8}\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nmodel: {prior: violin}\n")
    config = load_config(path, ["model.image_size=16", "trainer.learning_rate=1e-3"])
    assert config["model"] == {"prior": "violin", "image_size": 16}
    assert config["trainer"] == {"learning_rate": 0.001}


def test_override_values_are_yaml(tmp_path):
    given = {"1e-3": 1e-3, "2.5E4": 2.5e4, "null": None, "[1, 2]": [1, 2]}
    assert {text: parse_value(text) for text in given} == given
    # a bare no is a strategy
    assert load_config(write(tmp_path, ""), ["trainer.eval_strategy=no"])["trainer"]["eval_strategy"] == "no"


@each(
    "text, overrides, message",
    [
        ("model: {piror: violin}", [], "section 'model' has no key 'piror'; did you mean 'prior'"),
        ("trainer: {learning_rat: 1}", [], "did you mean 'learning_rate'"),
        ("data: {sourse: digits}", [], "did you mean 'source'"),
        ("modle: {}", [], "has no key 'modle'; did you mean 'model'"),
        ("", ["trainer.sed=1"], "did you mean 'seed'"),
        ("", ["modle.prior=1"], "did you mean 'model'"),
        ("", ["seed"], "must be SECTION.KEY=VALUE"),
        ("", ["data.source=cifar"], "data.source='cifar' must be one of digits, imagefolder, parquet"),
        ("", ["data.source=imagefolder"], "needs data.path"),
        ("", ["data.test_fraction=1.5"], "data.test_fraction=1.5 must be a number between 0 and 1"),
        ("", ["data.test_fraction=0.6", "data.validation_fraction=0.4"], "leave no training images"),
        ("model: 3", [], "section 'model' must hold keys and values"),
        ("model: [", [], "is not YAML"),
        ("- 1", [], "must hold keys and values"),
        ("base: 5", [], "base=5 must be the name of a file"),
        ("", ["model.prior=["], "is not a YAML value"),
        ("base: run.yaml", [], "leads back to this file"),
        ("model: {prior: dense}\ndata: {}\nmodel: {}", [], "is not YAML: key 'model' stands twice, in lines 1 and 3"),
        ("model: {prior: dense, prior: violin}", [], "key 'prior' stands twice, in lines 1 and 1"),
        ("", ["model.prior={name: violin, name: dense}"], "key 'name' stands twice"),
        ("data: {path: my_images}", [], "data.path='my_images' is not for data.source digits"),
        ("", ["data.published_validation=validation"], "is for data.source tiny_imagenet, imagenet, not digits"),
        ("", ["trainer.seed=1.5"], "trainer.seed=1.5 must be an integer of 0 or more"),
        ("", ["trainer.num_train_epochs=-1"], "trainer.num_train_epochs=-1 must be 0 or more"),
        ("", ["trainer.eval_accumulation_steps=0"], "must be an integer of 1 or more"),
        ("", ["trainer.gradient_accumulation_steps=0"], "gradient_accumulation_steps=0 must be an integer of 1 or"),
        ("", ["trainer.per_device_train_batch_size=2.5"], "per_device_train_batch_size=2.5 must be an integer of 1"),
        ("", ["trainer.output_dir=2026"], "trainer.output_dir=2026 must be text"),
        ("", ["trainer.metric_for_best_model=f1"], "metric_for_best_model='f1' must be one of accuracy, loss"),
    ],
)
def test_bad_configurations_name_the_key(tmp_path, text, overrides, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_config(write(tmp_path, text), overrides)


@each("key", WITHOUT_EFFECT)
def test_arguments_of_transformers_that_would_do_nothing_are_refused(tmp_path, key):
    field = next(field for field in dataclasses.fields(SparsePriorTrainingArguments) if field.name == key)
    default = [] if field.default is dataclasses.MISSING else field.default
    other = not default if isinstance(default, bool) else 3
    with pytest.raises(ValueError, match=re.escape(f"trainer.{key}={other!r} would do nothing: ")):
        load_config(write(tmp_path, ""), [f"trainer.{key}={json.dumps(other)}"])
    load_config(write(tmp_path, ""), [f"trainer.{key}={json.dumps(default)}"])


def test_the_batch_of_a_device_over_that_of_all_is_refused_in_files_too(tmp_path):
    write(tmp_path, "trainer: {effective_batch_size: 20, per_device_train_batch_size: 4}", "base.yaml")
    message = "per_device_train_batch_size does nothing with trainer.effective_batch_size=20; give another or null"
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, "base: base.yaml\ntrainer: {per_device_train_batch_size: 2}"))
    text = "base: base.yaml\ntrainer: {per_device_train_batch_size: 2, effective_batch_size: null}"
    assert load_config(write(tmp_path, text))["trainer"]["per_device_train_batch_size"] == 2


def test_a_key_may_stand_again_where_an_anchor_brings_it(tmp_path):
    text = "model: &model {prior: dense, image_size: 8}\ndata: {}\ntrainer: {}\naugmentation: {}\n"
    rows = "matrix: {size: {a: {model: {<<: {prior: dense}, prior: violin}}}}\n"
    assert read_cells(write(tmp_path, text + rows))["a"]["model"]["prior"] == "violin"


def test_yaml_cannot_make_objects(tmp_path):
    path = write(tmp_path, "model: {prior: !!python/object/apply:os.getcwd []}")
    with pytest.raises(ValueError, match="is not YAML"):
        load_config(path)


def test_preset_and_pretrained_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        build_model({"preset": "vit_tiny", "pretrained": "somewhere"}, ["a", "b"])
