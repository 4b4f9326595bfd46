"""A family that a test registers in one place is found by the tasks: classification, analysis, benchmark, policies."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.images.model import build_model, check_pretrained
from hf_sparseprior.images.sections import check_image_sections
from tasks.analysis import flops
from tasks.benchmark.__main__ import main as benchmark
from tasks.classification import evaluate, train
from tasks.robotics.policy_config import PolicyConfig
from tests.hf_sparseprior.toys import (
    HEADS,
    TwoStageConfig,
    TwoStageForImageClassification,
    TwoStageModel,
    registered_family,
)

pytestmark = pytest.mark.slow

SIZES = {"image_size": 8, "patch_size": 2, "use_class_token": False, "pooling": "mean"}
MODEL = {
    "family": "toy_two_stage", "prior": "fibottention+violin", **SIZES,
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 12,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def toy_family():
    with registered_family() as family:
        yield family


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run of two steps."""
    folder = tmp_path_factory.mktemp("toy")
    trainer = {"max_steps": 2, "per_device_train_batch_size": 8, "disable_tqdm": True, "use_cpu": True}
    config = {"data": {"source": "digits"}, "model": MODEL, "trainer": {**trainer, "output_dir": str(folder / "run")}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert train.main(["--config", str(folder / "run.yaml")]) == 0
    return folder / "run"


def test_it_is_trained_and_evaluated(run, toy_family):
    results = json.loads((run / "results.json").read_text())
    saved = TwoStageForImageClassification.from_pretrained(run / "model")
    assert results["prior"] == "fibottention+violin" and len(results["prior_settings"]) == 2
    assert results["parameters"] == sum(parameter.numel() for parameter in saved.parameters())
    assert results["attention_flops"] == model_flops(saved.config).attention
    assert results["pruning_ratio"] == saved.config.pruning_ratio
    assert results["max_decay_change"] > 0 and results["config"]["model"]["family"] == "toy_two_stage"
    assert evaluate.main([str(run / "model"), "--split", "test"]) == 0
    metrics = json.loads((run / "evaluation" / "results_test.json").read_text())["metrics"]
    assert metrics["test_accuracy"] == results["metrics"]["test_accuracy"]


def test_a_run_starts_from_it(run):
    folder, classes = str(run / "model"), [str(digit) for digit in range(10)]
    weights = load_file(run / "model" / "model.safetensors")
    model = build_model({"pretrained": folder, "prior": "dense", "image_size": 16}, classes)
    assert type(model) is TwoStageForImageClassification and model.config.grid == (8, 8)
    assert torch.equal(model.vit.layers[1].q_proj.weight, weights["vit.layers.1.q_proj.weight"])
    assert torch.equal(model.classifier.weight, weights["classifier.weight"])
    check_pretrained({"pretrained": folder, "prior": "violin"})
    with pytest.raises(ValueError, match="w=-1"):
        check_pretrained({"pretrained": folder, "prior": {"support": {"name": "window", "w": -1}}})
    with pytest.raises(ValueError, match=r"model\.family='sparseprior_vit', and model\.pretrained=.* is a 'toy_two"):
        build_model({"family": "sparseprior_vit", "pretrained": folder}, classes)


def test_its_name_and_fields_are_checked():
    with pytest.raises(ValueError, match=r"model\.family='toy' must be one of sparseprior_vit, .*, toy_two_stage$"):
        check_image_sections({"model": {"family": "toy"}})
    with pytest.raises(ValueError, match=r"hiden_size.*did you mean 'hidden_size'"):
        check_image_sections({"model": {**MODEL, "hiden_size": 8}})
    check_image_sections({"model": {"preset": "toy_tiny", "prior": "violin"}})
    model = build_model({"preset": "toy_tiny", "prior": "violin"}, ["a", "b"])
    assert type(model) is TwoStageForImageClassification and type(model.config) is TwoStageConfig


def test_its_flops_are_counted(run, tmp_path, capsys):
    models = ["toy_tiny", str(run), str(run.parent / "run.yaml")]
    assert flops.main([*models, "--image-sizes", "16", "--prior", "violin", "--out", str(tmp_path)]) == 0
    counted = json.loads((tmp_path / "flops.json").read_text())["models"]
    assert [own["model"] for own in counted] == models and "toy_tiny violin, 2 layers" in capsys.readouterr().out
    expected = model_flops(TwoStageConfig.from_preset("toy_tiny"), prior="violin")
    assert counted[0]["sparse"][0]["layers"] == expected.layers
    assert flops.main(["toy_tini", "--out", str(tmp_path)]) == 2
    assert "did you mean 'toy_tiny'" in capsys.readouterr().err


def test_its_time_is_measured(tmp_path, capsys):
    arguments = ["model", "--models", "toy_tiny", "--priors", "dense", "violin", "--sizes", "16x2", "--rounds", "2"]
    assert benchmark([*arguments, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "records.json").read_text())["measured"]
    names = {own["contender"] for own in found if own["model"] == "toy_tiny" and own["pass"] == "training"}
    assert names == {"dense", "violin", "copy_attention"} and all(own["seconds"] for own in found)
    assert benchmark(["model", "--models", "toy_tini", "--out", str(tmp_path / "other")]) == 2
    assert "preset='toy_tini' must be one of" in capsys.readouterr().err


def test_a_policy_has_encoders_of_it(toy_family):
    encoder = {"patch_size": 4, **{key: MODEL[key] for key in MODEL if key not in ("image_size", "patch_size")}}
    config = PolicyConfig(observations={"camera": [16, 16, 3]}, encoder=encoder)
    assert config.encoder_family is toy_family
    assert type(config.encoder_family.base(config.encoder_config("camera"))) is TwoStageModel
    with pytest.raises(ValueError, match=r"encoder\.family='toy' must be one of sparseprior_vit, .*, toy_two_stage"):
        PolicyConfig(observations={"camera": [16, 16, 3]}, encoder={"family": "toy"}).encoder_config("camera")
