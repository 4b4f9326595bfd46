"""A run of DINO: what it leaves, and that other tasks start from it."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_sparseprior import SparsePriorViTBackbone
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.images.model import build_model
from hf_sparseprior.models.pretrained import load_changed_model
from hf_sparseprior.runs.results import read_results
from tasks.classification import train as classification
from tasks.common.records import read_records
from tasks.pretraining import compare, evaluate, evidence, train
from tasks.pretraining.evaluation import LinearState
from tests.hf_sparseprior.small import SMALL
from tests.tasks import test_contract as contract

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a finished run, with a linear classifier."""
    folder = tmp_path_factory.mktemp("dino")
    arguments = contract.pretraining(folder)
    linear = ["evaluation.linear=true", "evaluation.linear_layers=2", "evaluation.linear_epochs=1"]
    options = [*linear, "evaluation.linear_batch_size=50", f"trainer.output_dir={folder}/run"]
    assert train.main([*arguments, *options]) == 0
    return folder / "run"


def test_results_have_the_accuracies_and_how_sure_they_are(run):
    found = read_results(run / "results.json")
    names = {"test_knn_accuracy", "test_knn_accuracy_at_start", "test_knn_accuracy_of_pixels", "test_linear_accuracy"}
    assert set(found["metrics"]) == names == set(found["standard_errors"])
    for name, accuracy in found["metrics"].items():
        assert found["standard_errors"][name] == pytest.approx((accuracy * (1 - accuracy) / 50) ** 0.5)
    for name in ("at_start", "of_pixels"):
        difference = found["metrics"]["test_knn_accuracy"] - found["metrics"][f"test_knn_accuracy_{name}"]
        assert found["k_nn_above"][name]["difference"] == pytest.approx(difference)
    logged = [entry for entry in found["history"] if "loss" in entry]
    assert logged and all(
        entry["loss"] == pytest.approx(entry["loss_entropy"] + entry["loss_kl"], abs=2e-3) for entry in logged
    )
    assert any("validation_knn_accuracy" in entry for entry in found["history"])
    assert {path.name for path in run.iterdir()} >= {"model", "curves.png", "confusion.png", "results.json"}


def test_evaluate_finds_the_same_and_takes_other_images(run, capsys):
    assert evaluate.main([str(run), "--linear"]) == 0
    found, trained = (read_results(run / name) for name in ("evaluation/results_test_linear.json", "results.json"))
    assert found["metrics"]["test_knn_accuracy"] == trained["metrics"]["test_knn_accuracy"]
    assert set(found["metrics"]) == {"test_knn_accuracy", "test_linear_accuracy"}
    arguments = ["data.limit_validation=20", "evaluation.neighbours=3", "--split", "validation"]
    assert evaluate.main([str(run), *arguments]) == 0
    assert "measures 20 of 1797 images, cut as validation (data.validation_fraction=" in capsys.readouterr().out
    [other] = (run / "evaluation").glob("results_validation_*.json")
    assert other.name.startswith("results_validation_limit_validation-neighbours_")
    assert read_results(other)["images"] == 20
    assert evaluate.main([str(run)]) == 0  # without the linear classifier, whose results stay
    assert read_results(run / "evaluation/results_test_linear.json") == found
    assert set(read_results(run / "evaluation/results_test.json")["metrics"]) == {"test_knn_accuracy"}


def test_priors_are_compared_by_their_neighbours_and_the_records_are_evidence(tmp_path, capsys):
    config = yaml.safe_load(Path(contract.pretraining(tmp_path)[1]).read_text())
    config |= {"seeds": [0, 3], "variants": {"dense": {"model": {"prior": "dense"}}, "both": {}}}
    config["trainer"] = {"max_steps": 2, **{key: value for key, value in config["trainer"].items() if key != "seed"}}
    file, records = tmp_path / "comparison.yaml", tmp_path / "records"
    file.write_text(yaml.safe_dump(config))
    command = ["--config", str(file), "--out", str(tmp_path / "runs"), "--records", str(records)]
    assert compare.main(command) == 0
    table = (records / "table.md").read_text()
    for row in ("dense", "both"):
        runs = [read_records(records)[row][seed] for seed in (0, 3)]
        accuracy = [100 * run["metrics"]["test_knn_accuracy"] for run in runs]
        spread = abs(accuracy[0] - accuracy[1]) / 2**0.5
        assert f"| {row} | {sum(accuracy) / 2:.2f} ± {spread:.2f} |" in table
    assert "k-NN test accuracy" in table and "minus both" in table and (records / "results.png").is_file()
    capsys.readouterr()
    from_runs, from_records = [
        (evidence.main([str(place) for place in places]), capsys.readouterr().out)
        for places in ([tmp_path / "runs/both/seed0", tmp_path / "runs/both/seed3"], [records / "both"])
    ]
    assert from_runs == from_records and from_runs[0] in (0, 1) and "all" in from_runs[1]


def test_a_linear_classifier_that_was_killed_goes_on_to_the_same_bits(run, monkeypatch):
    epochs = ["--linear", "evaluation.linear_epochs=3"]
    assert evaluate.main([str(run), *epochs]) == 0
    kept = run / "evaluation" / "test_linear.safetensors"
    whole = {name: value.clone() for name, value in load_file(kept).items()}  # a file that is mapped changes with it
    [file] = (run / "evaluation").glob("results_test_linear_linear_epochs_*.json")
    found = read_results(file)
    seen = []

    class Stopped(LinearState):
        def save(self, *given):
            super().save(*given)
            raise KeyboardInterrupt

    class Counted(LinearState):
        def load(self, *given):
            seen.append(super().load(*given))
            return seen[-1]

    monkeypatch.setattr(evaluate, "LinearState", Counted)
    assert evaluate.main([str(run), *epochs]) == 0 and seen == [3]  # nothing is done twice
    assert read_results(file)["metrics"] == found["metrics"]
    kept.write_bytes(kept.read_bytes()[:50])
    monkeypatch.setattr(evaluate, "LinearState", Stopped)
    with suppress(KeyboardInterrupt):
        evaluate.main([str(run), *epochs])
    assert not load_file(kept)["weight"].equal(whole["weight"])
    monkeypatch.setattr(evaluate, "LinearState", Counted)
    assert evaluate.main([str(run), *epochs]) == 0 and seen == [3, 1]
    again = load_file(kept)
    assert set(again) == set(whole) == {"weight", "bias", "momentum.weight", "momentum.bias"}
    assert all(value.equal(whole[name]) for name, value in again.items())
    assert evaluate.main([str(run), *epochs, "evaluation.linear_learning_rate=0.5"]) == 0 and seen == [3, 1, 0]
    assert [path.name for path in kept.parent.glob("*linear.safetensors")] == [kept.name]


def test_bad_values_are_one_line(run, tmp_path, capsys):
    options = ["evaluation.linear=true", "evaluation.linear_layers=40", f"trainer.output_dir={tmp_path}/run"]
    assert train.main([*contract.pretraining(tmp_path), *options]) == 2
    assert "evaluation.linear_layers=40 must be at most" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert evaluate.main([str(run), "evaluation.neighbours=101"]) == 2
    assert "evaluation.neighbours=101 must be at most the 100 images" in capsys.readouterr().err
    assert evaluate.main([str(run), "trainer.seed=1"]) == 2
    assert "trainer" in capsys.readouterr().err
    assert evaluate.main([str(run), "--split", "validation", "data.stage=final"]) == 2
    assert "each would be its own nearest neighbour" in capsys.readouterr().err


def test_what_evaluate_is_given_acts(run, tmp_path):
    """`evaluation.linear=true` trains the classifier, and another crop is seen."""
    out = tmp_path / "out"
    assert evaluate.main([str(run), "--out", str(out), "evaluation.linear=true", "evaluation.eval_crop_ratio=0.5"]) == 0
    found = json.loads((out / "results_test_linear.json").read_text())
    own = json.loads((run / "results.json").read_text())["metrics"]
    assert found["metrics"].keys() == {"test_knn_accuracy", "test_linear_accuracy"}
    assert found["metrics"]["test_knn_accuracy"] != own["test_knn_accuracy"]


def test_the_teacher_is_a_model_that_other_tasks_start_from(run, tmp_path):
    """Nothing but a classifier starts anew, and a backbone's weights are the teacher's. Its card says what it is."""
    assert json.loads((run / "model" / "config.json").read_text())["architectures"] == ["SparsePriorViTModel"]
    card = (run / "model" / "README.md").read_text()
    assert "image-feature-extraction" in card and "test_knn_accuracy" in card
    stored = load_file(run / "model" / "model.safetensors")
    model = build_model({"pretrained": str(run / "model")}, ["a", "b"])
    _, anew = load_changed_model(run / "model", type(model), id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    assert anew and all("classifier" in name for name in anew)
    for name, value in stored.items():
        assert torch.equal(model.vit.get_parameter(name), value), name
    backbone = SparsePriorViTBackbone.from_pretrained(run / "model")
    assert all(torch.equal(backbone.state_dict()[name], value) for name, value in stored.items())
    content = {
        "data": {"source": "digits", "limit_train": 50},
        "model": {"pretrained": str(run / "model")},
        "trainer": {"max_steps": 1, "use_cpu": True, "disable_tqdm": True, "output_dir": str(tmp_path / "tuned")},
    }
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(content))
    assert classification.main(["--config", str(tmp_path / "tuned.yaml")]) == 0
    assert evaluate.main([str(tmp_path / "tuned"), "data.limit_train=50"]) == 0  # of a classifier


def test_another_family_is_pretrained(tmp_path):
    name, arguments = "sparseprior_swin", contract.pretraining(tmp_path)
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    small = {**SMALL[name], "image_size": 16, "patch_size": 2}
    content |= {"model": {"family": name, "prior": "violin", **small}, "crops": {"local_crops": 1, "local_size": 8}}
    content["trainer"] |= {"max_steps": 2, "eval_strategy": "no", "logging_steps": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert train.main([*arguments, f"trainer.output_dir={tmp_path}/run"]) == 0
    assert FAMILIES[name].base.from_pretrained(tmp_path / "run" / "model") is not None
