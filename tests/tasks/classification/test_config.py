from pathlib import Path

import pytest

from tasks.classification.config import DataConfig, load_config, parse_value
from tasks.classification.train import build_model

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "classification").glob("*.yaml"))


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_builds_its_model(path):
    config = load_config(path)
    model = build_model(config["model"], ["a", "b", "c"])
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    expected = config["model"]["prior"]
    assert model.config.prior_name == expected


def test_base_is_inherited_and_overridden(tmp_path):
    write(tmp_path, "data: {source: digits}\nmodel: {prior: dense, image_size: 8}\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nmodel: {prior: violin}\n")
    config = load_config(path, ["model.image_size=16", "trainer.learning_rate=1e-3"])
    assert config["model"] == {"prior": "violin", "image_size": 16}
    assert config["trainer"] == {"learning_rate": 0.001}


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2.5E4", 2.5e4), ("null", None), ("[1, 2]", [1, 2])])
def test_override_values_are_yaml(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
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
    ],
)
def test_bad_configurations_name_the_key(tmp_path, text, overrides, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_config(write(tmp_path, text), overrides)


def test_yaml_cannot_make_objects(tmp_path):
    path = write(tmp_path, "model: {prior: !!python/object/apply:os.getcwd []}")
    with pytest.raises(ValueError, match="is not YAML"):
        load_config(path)


def test_preset_and_pretrained_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        build_model({"preset": "vit_tiny", "pretrained": "somewhere"}, ["a", "b"])


def test_defaults_are_valid():
    assert DataConfig().source == "digits"


def test_a_bare_no_is_a_strategy(tmp_path):
    assert load_config(write(tmp_path, ""), ["trainer.eval_strategy=no"])["trainer"]["eval_strategy"] == "no"
