import copy
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import evaluate
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

from hf_sparseprior.analysis import pictures
from hf_sparseprior.classification import task
from hf_sparseprior.images.model import build_model
from hf_sparseprior.runs import hf_run, plots
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.metrics import accuracy_metric, confusion_matrix
from hf_sparseprior.runs.run_folder import last_whole_checkpoint
from tasks.classification import demo
from tasks.classification import evaluate as evaluation
from tasks.classification import train as training
from tests.each import each
from tests.processes import run_script

pytestmark = pytest.mark.slow

CONFIG = {
    "data": {"source": "digits"},
    "model": {
        "prior": "fibottention+violin", "image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 48, "drop_path_rate": 0.1, "initializer_range": 0.1,
    },
    "trainer": {
        "num_train_epochs": 2, "per_device_train_batch_size": 16, "learning_rate": 5e-3, "weight_decay": 0.05,
        "seed": 3, "disable_tqdm": True, "use_cpu": True,
    },
}  # fmt: skip


FEW = {"limit_train": 240, "limit_validation": 100, "limit_test": 64}


def config_in(folder, limits=None, **trainer):
    config = copy.deepcopy(CONFIG)
    config["data"].update(limits or {})
    config["trainer"].update(output_dir=str(folder), **trainer)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", pictures.save)
        return folder, training.run(config_in(folder))


def test_a_run_learns_and_leaves_everything(finished):
    folder, results = finished
    assert results["metrics"]["test_accuracy"] > 0.5  # chance is 0.1
    stored = json.loads((folder / "results.json").read_text())
    assert stored["metrics"] == results["metrics"] and stored["prior"] == "fibottention+violin"
    counts = np.array(stored["confusion"])
    assert np.trace(counts) / counts.sum() == pytest.approx(results["metrics"]["test_accuracy"])
    assert counts.sum() == 359
    for name in ("curves.png", "confusion.png", "model/model.safetensors", "model/preprocessor_config.json"):
        assert (folder / name).stat().st_size > 0
    assert all((folder / name).stat().st_size > 5000 for name in ("curves.png", "confusion.png"))
    card = (folder / "model" / "README.md").read_text()
    assert "scikit-learn digits" in card and str(results["metrics"]["test_accuracy"]) in card
    assert {"versions", "hardware", "command", "config", "seconds_per_step", "seed"} <= set(stored)
    assert results["prior_settings"]["support"]["mask_fill"] == "neg_inf"
    # beta ~ U(5, 9) on 16 patches: at least 1 - sigmoid(9) ** 1, at most 1 - sigmoid(4.5) ** 15.
    assert 1e-4 < results["max_decay_change"] < 0.16


def evaluated(folder, out, split="test"):
    """Results of `evaluate` for the model of a run."""
    assert evaluation.main([str(folder / "model"), "--split", split, "--out", str(out)]) == 0
    return json.loads((out / f"results_{split}.json").read_text())


def check_same(stored, results):
    """What `evaluate` measures is what the run measured of its test images."""
    tested = {name: value for name, value in results["metrics"].items() if name.startswith("test_")}
    assert set(tested) == {"test_accuracy", "test_balanced_accuracy", "test_calibration_error"}
    assert stored["metrics"] == pytest.approx(tested, abs=1e-6)


def test_evaluate_agrees_with_the_run(finished, tmp_path, capsys):
    folder, results = finished
    stored = evaluated(folder, tmp_path)
    check_same(stored, results)
    assert stored["confusion"] == results["confusion"]
    assert (tmp_path / "confusion_test.png").exists()
    assert f"{100 * results['metrics']['test_accuracy']:.2f} % of 359 images" in capsys.readouterr().out
    stored = evaluated(folder, tmp_path, "validation")
    assert stored["metrics"]["validation_accuracy"] == results["metrics"]["validation_accuracy"]


def test_the_saved_model_of_a_compiled_run_is_the_trained_one(tmp_path):
    options = {"num_train_epochs": 1, "torch_compile": True, "torch_compile_backend": "eager"}
    config = config_in(tmp_path / "run", {**FEW, "limit_train": 160, "limit_validation": 64}, **options)
    results = training.run(config)
    check_same(evaluated(tmp_path / "run", tmp_path), results)


@pytest.mark.parametrize("options", [{"metric_for_best_model": "loss"}, {"load_best_model_at_end": False}], ids=str)
def test_validation_accuracy_is_that_of_the_saved_weights(tmp_path, options):
    metrics = training.run(config_in(tmp_path / "run", FEW, **options))["metrics"]
    stored = evaluated(tmp_path / "run", tmp_path, "validation")
    assert stored["metrics"]["validation_accuracy"] == metrics["validation_accuracy"]


def write_digits(root, labels):
    """Class folders without splits, one image of each of these labels; returns how many there are."""
    for index, label in enumerate(labels):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        array = np.rint(load_digits().images[index] * 255 / 16).astype(np.uint8)
        Image.fromarray(array).save(root / str(label) / f"{index}.png")
    return len(labels)


def test_other_data_is_measured_whole_and_replaces_no_results(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    model, out = str(folder / "model"), folder / "evaluation"
    assert evaluation.main([model]) == 0
    assert (
        "measures 359 of 1797 images, cut as test (data.test_fraction=0.2, data.split_seed=0)"
        in capsys.readouterr().out
    )
    own = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(own) == {"results_test.json", "report_test.md", "confusion_test.png", "errors_test.png"}
    new = ["data.source=imagefolder", f"data.path={tmp_path / 'new'}"]
    count = write_digits(tmp_path / "new", load_digits().target[:40])
    assert evaluation.main([model, *new]) == 0
    printed = capsys.readouterr().out
    assert f"measures {count} images (test): images in new" in printed and f"of {count} images" in printed
    [named] = [path for path in out.glob("results*.json") if path.name not in own]
    assert re.fullmatch(r"results_test_path-source_[0-9a-f]{8}\.json", named.name) and f"results: {named}" in printed
    assert np.sum(json.loads(named.read_text())["confusion"]) == count
    other = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(other) == 8 and own.items() <= other.items()
    # Of the same images fewer; and with the first images among a source's splits, those alone.
    assert evaluation.main([model, *new, "data.limit_test=20"]) == 0
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        shutil.copytree(tmp_path / "new", tmp_path / "split" / name)
    capsys.readouterr()
    assert evaluation.main([model, new[0], f"data.path={tmp_path / 'split'}", "--split", "validation"]) == 0
    assert "measures 10 of 40 images, cut as validation (data.validation_fraction=0.2" in capsys.readouterr().out
    assert other.items() <= {path.name: path.read_bytes() for path in out.iterdir()}.items()
    assert len(list(out.glob("results_test*.json"))) == 3 and len(list(out.glob("results_validation_*.json"))) == 1


def test_results_of_several_evaluations_in_one_folder_stay(finished, tmp_path):
    """The first has the plain name; the same again replaces it, and another does not."""
    model, out = str(finished[0] / "model"), tmp_path / "out"
    for _ in range(2):
        assert evaluation.main([model, "--out", str(out), "data.limit_test=20"]) == 0
    first = (out / "results_test.json").read_bytes()
    assert evaluation.main([model, "--out", str(out)]) == 0
    assert (out / "results_test.json").read_bytes() == first and json.loads(first)["images"] == 20
    [other] = out.glob("results_test_limit_test_*.json")
    assert json.loads(other.read_text())["images"] == 359 and len(list(out.glob("confusion_*.png"))) == 2


def test_the_limit_of_a_run_is_not_that_of_other_data(finished, tmp_path, capsys):
    stored = json.loads((shutil.copytree(finished[0], tmp_path / "run") / "run_config.json").read_text())
    stored["data"].update(FEW)
    (tmp_path / "run" / "run_config.json").write_text(json.dumps(stored))
    count = write_digits(tmp_path / "new", load_digits().target[:40])
    assert FEW["limit_test"] > count  # which would be refused
    for more, said in (([], count), (["data.limit_test=10"], 10)):
        overrides = ["data.source=imagefolder", f"data.path={tmp_path / 'new'}", *more]
        assert evaluation.main([str(tmp_path / "run"), *overrides]) == 0
        limited = ", data.limit_test=10" if more else ""
        assert f"measures {said} images (test{limited}): images in new" in capsys.readouterr().out


def test_evaluate_refuses_other_classes_and_unknown_keys(finished, tmp_path, capsys):
    folder, _ = finished
    model = tmp_path / "other" / "model"
    shutil.copytree(folder / "model", model)
    assert evaluation.main([str(model)]) == 2
    assert "run_config.json is missing" in capsys.readouterr().err
    settings = json.loads((model / "config.json").read_text())
    settings["id2label"]["0"] = "zero"
    (model / "config.json").write_text(json.dumps(settings))
    (model.parent / "run_config.json").write_text((folder / "run_config.json").read_text())
    assert evaluation.main([str(model)]) == 2
    assert "'zero'" in capsys.readouterr().err
    assert evaluation.main([str(model.with_name("gone"))]) == 2
    assert capsys.readouterr().err.endswith(f"{model.with_name('gone')} is not a folder of a saved model\n")
    assert evaluation.main([str(folder / "model"), "data.sourse=digits"]) == 2
    assert "did you mean 'source'" in capsys.readouterr().err


def test_accuracy_is_an_evaluate_metric_that_needs_no_network():
    metric = accuracy_metric()
    assert isinstance(metric, evaluate.Metric)
    assert metric.compute(predictions=[1, 2, 3, 3], references=[1, 2, 0, 3]) == {"accuracy": 0.75}
    metric.add_batch(predictions=[1, 0], references=[1, 1])
    metric.add(prediction=2, reference=2)
    assert metric.compute() == {"accuracy": pytest.approx(2 / 3)}


def test_confusion_matrix_counts_true_by_predicted():
    counts = confusion_matrix(np.array([0, 0, 2]), np.array([0, 1, 2]), 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_a_demo_that_is_stopped_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    for ends, code, said in (
        (RunStopped("stopped after step 3"), 143, "stopped after step 3"),
        (KeyboardInterrupt(), 130, f"the same command goes on from the last checkpoint in {tmp_path}"),
        (ValueError("no such prior"), 2, "no such prior"),
    ):
        monkeypatch.setattr(demo, "train_all", Mock(side_effect=ends))
        assert demo.main(["--out", str(tmp_path)]) == code
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_end_to_end(tmp_path, monkeypatch, capsys):
    load = demo.load_config
    few = ["data.limit_train=32", "data.limit_validation=32", "data.limit_test=32"]
    few += ["trainer.num_train_epochs=1", "trainer.per_device_train_batch_size=16"]
    monkeypatch.setattr(demo, "load_config", lambda path, given=(): load(path, [*given, *few]))

    def reload(command, **options):
        """In a process that has imported transformers already, and has no package to import."""
        assert command[:2] == [sys.executable, "-c"] and options["capture_output"] and options["text"]
        return run_script(*command[2:], folder=tmp_path)

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=reload))
    command = ["--out", str(tmp_path), "--data", "digits", "--seeds", "1"]
    assert demo.main(command) == 0
    text = capsys.readouterr().out
    for prior in demo.PRIORS:
        assert f"| {prior} |" in text
    for picture in ("support", "curves", "decay", "attention", "results"):
        assert (tmp_path / "digits" / f"{picture}.png").stat().st_size > 5000
    assert "from transformers_modules, logits bit-equal: True" in text
    # A second call trains nothing. Its pictures are drawn and left empty.
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **settings: None)
    monkeypatch.setattr(task, "read_data", lambda *a: pytest.fail("trained again"))
    assert demo.main(command) == 0


# ---- what a run does to its folder ----------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and not of this program"):
        training.run(config_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def copy_run(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def test_overwrite_with_a_bad_value_keeps_the_old_run_which_may_move_and_hide_its_bar(finished, tmp_path):
    folder = copy_run(finished, tmp_path)
    config = config_in(folder)
    config["model"]["prior"] = "violn"
    with pytest.raises(ValueError, match="violn"):
        training.run(config, overwrite=True)
    assert training.run(config_in(folder, disable_tqdm=False))["metrics"] == finished[1]["metrics"]


def test_killed_while_it_throws_away_another_run_overwriting_can_be_repeated(finished, tmp_path, monkeypatch):
    folder = copy_run(finished, tmp_path)
    config = config_in(folder)
    config["model"]["prior"] = "dense"
    removed = []

    def die(path, *args, **kwargs):
        removed.append(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            training.run(config, overwrite=True)
    assert removed and not (folder / "results.json").exists()
    with pytest.raises(ValueError, match="belongs to another run"):
        training.run(config)


def test_overwrite_replaces_another_run(finished, tmp_path):
    folder = copy_run(finished, tmp_path)
    (folder / "leftover").touch()
    options = {"num_train_epochs": 1, "load_best_model_at_end": False, "eval_strategy": "no"}
    results = training.run(config_in(folder, FEW, **options), overwrite=True)
    assert results["config"]["trainer"]["num_train_epochs"] == 1
    assert not [name for name in results["metrics"] if name.startswith("validation")]  # which is of no interest then
    assert not (folder / "leftover").exists()


@each(
    "section, values",
    [
        ("trainer", {"learning_rate": "abc"}),
        ("trainer", {"per_device_train_batch_size": 0}),
        ("trainer", {"learning_rate": -1}),
        ("trainer", {"optim": "adamw_torch", "adam_beta1": 2.0}),
        ("trainer", {"lr_scheduler_type": "cosine_with_min_lr"}),
        ("trainer", {"lr_scheduler_kwargs": {"min_lrr": 0.1}}),
        ("model", {"num_channels": 2}),
        ("model", {"patch_size": 3}),
        ("model", {"prior": {"support": {"name": "fibottention", "w_min": -1}}}),
    ],
)
def test_a_failed_start_leaves_nothing_and_does_not_block_its_correction(tmp_path, section, values):
    config = config_in(tmp_path / "run")
    config[section].update(values)
    named = r"learning.rate|abc|batch|beta|min_lr|num_channels=2|patch_size=3|w_min=-1 must be .* 1 or more .*4x4 grid"
    with pytest.raises(ValueError, match=named):
        training.run(config)
    assert not list(tmp_path.glob("run/*"))


def test_an_error_after_a_checkpoint_leaves_it(tmp_path, monkeypatch):
    """And one of a start that goes on with it, too."""
    config = config_in(tmp_path / "run", FEW, num_train_epochs=1)

    def fails(*arguments):
        raise ValueError("the test cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(hf_run, "judge", fails)
        for _ in range(2):
            with pytest.raises(ValueError, match="the test cannot be read"):
                training.run(config)
            assert list((tmp_path / "run").glob("checkpoint-*")) and (tmp_path / "run" / "run_config.json").exists()
    assert training.run(config)["resumed_from"].startswith("checkpoint-")


def test_an_error_after_the_model_was_saved_leaves_it(tmp_path, monkeypatch):
    def fails(*arguments):
        raise ValueError("the picture cannot be drawn")

    monkeypatch.setattr(hf_run, "draw", fails)
    without = {"num_train_epochs": 1, "save_strategy": "no", "load_best_model_at_end": False}
    with pytest.raises(ValueError, match="the picture cannot be drawn"):
        training.run(config_in(tmp_path / "run", FEW, **without))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_checkpoint_that_is_not_whole_is_skipped_and_named(finished, tmp_path, capsys):
    """Without a file, or with so many bytes of it, as a kill or a power cut leaves it; and an empty folder."""
    folder = copy_run(finished, tmp_path)
    last = folder / "checkpoint-136"
    whole = [path.name for path in (folder / "checkpoint-68").iterdir() if path.suffix in (".pt", ".pth")]

    def check(name):
        assert last_whole_checkpoint(folder, ["trainer_state.json", *whole]) == str(folder / "checkpoint-68"), name
        error = capsys.readouterr().err
        assert error.startswith(f"{last} is skipped: {name} is ") and error.count("\n") == 1

    for name, left in (
        *[("trainer_state.json", 0), ("model.safetensors", 100), ("optimizer.pt", 100), ("scheduler.pt", 0)],
        *[("rng_state.pth", 50), ("clock.json", 0), ("clock.json", 9), ("processes.txt", 0), ("config.json", 0)],
        *[("config.json", 40), ("preprocessor_config.json", 1), ("running.json", 0)],
    ):
        content = (last / name).read_bytes()
        os.truncate(last / name, left)
        check(name)
        (last / name).write_bytes(content)
    assert last_whole_checkpoint(folder, ["trainer_state.json", *whole]) == str(last)
    (last / "trainer_state.json").unlink()
    check("trainer_state.json")
    shutil.rmtree(last)
    last.mkdir()
    check("trainer_state.json")


# ---- starting from a saved model ------------------------------------------------------------------------------------


def build(finished, **options):
    model = {**CONFIG["model"], **options, "pretrained": str(finished[0] / "model")}
    return build_model(model, [str(digit) for digit in range(10)])


def test_pretrained_weights_are_taken_over(finished):
    source = build(finished)
    expected = load_file(finished[0] / "model" / "model.safetensors")
    assert all(value.equal(expected[name]) for name, value in source.state_dict().items())
    # With another prior and other classes those parts start anew; for another size positions are interpolated.
    model = {**CONFIG["model"], "prior": "dense", "pretrained": str(finished[0] / "model")}
    other = build_model(model, ["a", "b"])
    assert other.classifier.weight.shape == (2, 24) and other.config.prior_name == "dense"
    small, large = source.vit.embeddings, build(finished, image_size=16).vit.embeddings
    assert large.position_embeddings.shape == (1, 1 + 64, 24)
    assert large.position_embeddings[:, 1:].equal(small.patch_positions((8, 8)))
    assert large.position_embeddings[:, :1].equal(small.position_embeddings[:, :1])


def test_a_model_of_another_shape_is_refused(finished):
    with pytest.raises(ValueError, match=r"does not fit SparsePriorViTForImageClassification; of another shape: emb"):
        build(finished, hidden_size=48)
    with pytest.raises(OSError, match="nowhere is not a folder of a saved model"):
        build_model({"pretrained": "nowhere"}, ["a", "b"])


def test_evaluate_refuses_a_model_with_missing_weights(finished, tmp_path, capsys):
    folder = copy_run(finished, tmp_path)
    path = folder / "model" / "model.safetensors"
    weights = {name: value for name, value in load_file(path).items() if "layers.1" not in name}
    save_file(weights, path, metadata={"format": "pt"})
    assert evaluation.main([str(folder / "model")]) == 2
    assert "lacks weights that fit its config: vit.layers.1" in capsys.readouterr().err
