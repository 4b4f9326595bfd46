"""What trackers get of a run, and which epoch a run chooses and stops at."""

import copy
import json
import os
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import TrainerCallback

from hf_sparseprior.analysis import pictures
from hf_sparseprior.runs import hf_run, plots, tracking
from hf_sparseprior.runs.config import check_trainer
from hf_sparseprior.runs.printed import print_results, tell_best_epoch
from tasks.classification import train as training
from tests.each import each

CONFIG = {
    "data": {"source": "digits", "limit_train": 120, "limit_validation": 60, "limit_test": 60},
    "model": {
        "prior": "violin", "image_size": 8, "patch_size": 4, "hidden_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 1, "intermediate_size": 12, "initializer_range": 0.1,
    },
    "trainer": {
        "num_train_epochs": 3, "per_device_train_batch_size": 30, "learning_rate": 5e-3, "seed": 3,
        "disable_tqdm": True, "use_cpu": True,
    },
}  # fmt: skip
EPOCH = 4  # steps
TIMED = ("data_wait", "runtime", "samples_per_second", "steps_per_second")


def config_in(folder, **trainer):
    config = copy.deepcopy(CONFIG)
    config["trainer"].update(output_dir=str(folder), **trainer)
    return config


class Kill(TrainerCallback):
    """Stands for a kill at a step, or after its checkpoint was written."""

    def __init__(self, step, saved=False):
        self.step, self.saved = step, saved

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.saved:
            raise KeyboardInterrupt

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.saved:
            raise KeyboardInterrupt


def killed(config, step, saved=False):
    with pytest.raises(KeyboardInterrupt):
        training.run(config, callbacks=[Kill(step, saved)])


# ---- trackers -------------------------------------------------------------------------------------------------------


def metrics_of(results):
    """(step, value) by tag, as a run's history and test say."""
    expected = {}
    for entry in results["history"]:
        for name, value in entry.items():
            if name != "step":
                tag = name.replace("validation_", "validation/") if "validation_" in name else f"train/{name}"
                points = expected.setdefault(tag, [])
                points += [(entry["step"], value)] if (entry["step"], value) not in points else []
    for name, value in results["metrics"].items():
        if name.startswith("test_"):
            expected[name.replace("test_", "test/")] = [(results["steps"], value)]
    return expected


def events(folder):
    """(scalars by tag, images by tag, hyperparameters) of event files. Nothing is dropped that was written twice."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = EventAccumulator(str(folder), {"images": 0, "scalars": 0}, purge_orphaned_data=False).Reload()
    scalars = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    images = {tag: read.Images(tag) for tag in read.Tags()["images"]}
    content = read.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    return scalars, images, HParamsPluginData.FromString(content).session_start_info.hparams


def check_events(folder, results):
    scalars, images, settings = events(folder / "tracking" / "tensorboard")
    expected = metrics_of(results)
    assert scalars.keys() == expected.keys() and {"train/loss", "validation/accuracy", "test/accuracy"} <= set(scalars)
    for tag, points in scalars.items():
        steps, values = zip(*points, strict=True)
        assert list(steps) == sorted(set(steps)) and steps == tuple(step for step, _ in expected[tag]), tag
        np.testing.assert_allclose(values, [value for _, value in expected[tag]], rtol=1e-6, err_msg=tag)
    assert set(images) == {"curves", "confusion", "errors"} == {Path(name).stem for name in results["pictures"]}
    with Image.open(folder / "curves.png") as picture:
        [image] = images["curves"]
        assert (image.width, image.height, image.step) == (*picture.size, results["steps"])
    assert settings["model.prior"].string_value == "violin" and settings["trainer.seed"].number_value == 3


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", pictures.save)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("tracked") / "run"
    before = dict(os.environ)
    results = training.run(config_in(folder, report_to="tensorboard"))
    assert dict(os.environ) == before
    return folder, results


def test_tensorboard_has_the_history_the_test_and_the_pictures(finished):
    check_events(*finished)
    assert not (finished[0] / "runs").exists()  # of transformers


@pytest.mark.parametrize(
    ("step", "saved"),
    [(EPOCH + 2, False), (3 * EPOCH, True)],  # in the second epoch; when training is done
)
def test_a_resumed_run_has_every_step_once(finished, step, saved, tmp_path):
    config = config_in(tmp_path / "run", report_to=["tensorboard"], logging_strategy="steps", logging_steps=1)
    killed(config, step, saved)
    results = training.run(config)
    assert results["resumed_from"] == f"checkpoint-{step // EPOCH * EPOCH}"
    check_events(tmp_path / "run", results)
    assert results["metrics"] == finished[1]["metrics"]  # nor does logging change what is learned


@pytest.mark.slow
def test_a_tracker_can_be_added_to_an_interrupted_run(finished, tmp_path):
    killed(config_in(tmp_path / "run"), EPOCH + 2)
    check_events(tmp_path / "run", training.run(config_in(tmp_path / "run", report_to="tensorboard")))


def test_an_error_closes_the_trackers(tmp_path, monkeypatch):
    closed = []

    class Noted(tracking.Tracker):
        package = "json"

        def write(self, values, step):
            pass

        def close(self, done):
            closed.append(done)

    monkeypatch.setitem(tracking.TRACKERS, "noted", Noted)
    killed(config_in(tmp_path / "run", report_to="noted"), EPOCH + 2)
    assert closed == [False]


@each("value", ["tensorbord", ["tensorboard", "clearml"], "all", 3, [["wandb"]]])
def test_an_unknown_tracker_is_refused(value):
    with pytest.raises(ValueError, match=r"trainer\.report_to=.* must be none or some of tensorboard, wandb, mlflow"):
        check_trainer({"report_to": value})


def test_none_and_lists_of_trackers():
    assert [tracking.trackers(value) for value in (None, "none", [], ["none"])] == [[]] * 4
    assert tracking.trackers(["mlflow", "wandb", "mlflow"]) == ["mlflow", "wandb"]


def test_a_missing_tracker_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"trainer\.report_to=wandb needs wandb: pip install wandb"):
        training.run(config_in(tmp_path / "run", report_to="wandb"))
    assert not (tmp_path / "run").exists()


def test_the_environment_is_what_it_was(monkeypatch):
    monkeypatch.setenv("TRACKER_MODE", "online")
    before = dict(os.environ)
    with tracking.variables("TRACKER_", TRACKER_MODE="offline", TRACKER_OTHER="1"):
        assert (os.environ["TRACKER_MODE"], os.environ["TRACKER_OTHER"]) == ("online", "1")
        os.environ["TRACKER_SERVICE"] = os.environ.pop("TRACKER_MODE")
        monkeypatch.setenv("OTHER", "of another thread")
    assert dict(os.environ) == before | {"OTHER": "of another thread"}


def wandb_records(file):
    """The records of a file of W&B: LevelDB's log, whose records are cut where a block of 32 KiB ends."""
    content, position, parts = file.read_bytes(), 7, []
    assert content.startswith(b":W&B")
    while position < len(content):
        if (left := -position % 2**15) and left < 7:  # no room for a header
            position += left
        length, part = struct.unpack_from("<4xHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def read_wandb(folder):
    """(scalars, names of images, configuration) of the only offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = (folder / "tracking" / "wandb").glob("offline-run-*/*.wandb")
    rows, config = [], {}
    for record in map(Record.FromString, wandb_records(file)):
        if record.HasField("history"):
            items = record.history.item
            rows.append({(item.key, *item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    scalars, images = {}, set()
    for row in rows:
        named = {key[0] or key[1]: (value, len(key) > 2) for key, value in row.items()}
        for tag, (value, is_image) in named.items():
            if is_image:
                images.add(tag)
            elif not tag.startswith("_"):
                scalars.setdefault(tag, []).append((named["_step"][0], value))
    return scalars, images, config


def read_mlflow(folder):
    """The same of the only run of the database."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'tracking' / 'mlflow' / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name(tracking.PROJECT).experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    scalars = {
        tag: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, tag)]
        for tag in run.data.metrics
    }
    images = {Path(file.path).stem for file in client.list_artifacts(run.info.run_id)}
    return scalars, images, run.data.params


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_offline_runs_of_others_have_the_same(name, tmp_path, monkeypatch):
    """tests/release.py installs them: its check `trackers`."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}")
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    before, hook = dict(os.environ), sys.excepthook
    folder = tmp_path / "run"
    config = config_in(folder, report_to=name, logging_strategy="steps", logging_steps=1)
    killed(config, EPOCH + 2)
    assert dict(os.environ) == before and sys.excepthook is hook
    results = training.run(config)
    assert results["resumed_from"] == f"checkpoint-{EPOCH}"
    training.run(config_in(tmp_path / "other", report_to=name))  # does not mix with it
    assert dict(os.environ) == before and sys.excepthook is hook
    scalars, images, settings = {"wandb": read_wandb, "mlflow": read_mlflow}[name](folder)
    expected = metrics_of(results)
    assert scalars.keys() == expected.keys()
    for tag, points in expected.items():
        if tag.endswith(TIMED) and name == "mlflow":  # has those of the steps that were done twice from the first time
            assert [step for step, _ in scalars[tag]] == [step for step, _ in points]
            continue
        np.testing.assert_allclose(scalars[tag], points, rtol=1e-6, err_msg=tag)
    assert images == {"curves", "confusion", "errors"}
    assert (settings["model"]["prior"] if name == "wandb" else settings["model.prior"]) == "violin"


# ---- the best epoch -------------------------------------------------------------------------------------------------


class Given(TrainerCallback):
    """Validation accuracies by epoch, in place of what the model has."""

    def __init__(self, *accuracies):
        self.accuracies, self.epoch = accuracies, 0

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epoch = round(state.epoch)

    def __call__(self, prediction, **options):
        return {"accuracy": self.accuracies[self.epoch - 1]}


@pytest.fixture
def given(monkeypatch):
    """Accuracies of which the second is the best until the sixth, which a patience of three does not see."""
    accuracies = Given(0.5, 0.75, 0.25, 0.75, 0.5, 0.875)
    monkeypatch.setattr(hf_run, "compute_metrics", accuracies)
    make = hf_run.make_trainer

    def watched(*arguments):
        trainer = make(*arguments)
        trainer.add_callback(accuracies)
        return trainer

    monkeypatch.setattr(hf_run, "make_trainer", watched)


def stopping(folder, **trainer):
    return config_in(folder, num_train_epochs=6, **{"early_stopping": 3, **trainer})


BEST = {
    "epoch": 2.0, "step": 2 * EPOCH, "epochs": 6, "metric": "validation_accuracy", "value": 0.75, "stopped_epoch": 5.0,
}  # fmt: skip


def learned(results):
    return [{key: value for key, value in entry.items() if not key.endswith(TIMED)} for entry in results["history"]]


def test_a_run_stops_where_validation_no_longer_gets_better(given, tmp_path, capsys):
    results = training.run(stopping(tmp_path / "run"))
    assert results["best_epoch"] == BEST and results["steps"] == 5 * EPOCH
    assert results["metrics"]["validation_accuracy"] == 0.75
    judged = {entry["epoch"]: entry["validation_accuracy"] for entry in learned(results) if "validation_loss" in entry}
    assert judged == {1.0: 0.5, 2.0: 0.75, 3.0: 0.25, 4.0: 0.75, 5.0: 0.5}
    print_results(results, "out")
    line = "best epoch: 2 of 6, validation accuracy 75.00 %; stopped early after epoch 5\n"
    assert line in capsys.readouterr().out
    for name, step, saved in [("within", 3 * EPOCH + 2, False), ("stopped", 5 * EPOCH, True)]:
        killed(stopping(tmp_path / name), step, saved)
        again = training.run(stopping(tmp_path / name))
        assert again["resumed_from"] == f"checkpoint-{step // EPOCH * EPOCH}"
        assert again["best_epoch"] == BEST and learned(again) == learned(results)
        assert again["model_sha256"] == results["model_sha256"]


@pytest.mark.slow
def test_a_patient_run_goes_on(given, tmp_path):
    results = training.run(stopping(tmp_path / "run", early_stopping=4))
    assert results["best_epoch"] == {**BEST, "epoch": 6.0, "step": 6 * EPOCH, "value": 0.875, "stopped_epoch": None}


def test_the_best_epoch_is_that_of_the_history(finished, capsys):
    results = finished[1]
    best = results["best_epoch"]
    judged = [entry for entry in results["history"] if "validation_accuracy" in entry]
    chosen = max(judged, key=lambda entry: entry["validation_accuracy"])  # the first of equal ones
    found = best["epoch"], best["step"], best["value"]
    assert found == (chosen["epoch"], chosen["step"], chosen["validation_accuracy"])
    assert best["epochs"] == 3 and best["stopped_epoch"] is None
    print_results(results, "out")
    line = f"best epoch: {best['epoch']:.0f} of 3, validation accuracy {100 * best['value']:.2f} %\n"
    assert line in capsys.readouterr().out
    loss = {**BEST, "epoch": 1.5, "metric": "validation_ema_loss", "stopped_epoch": None}  # is no share
    assert tell_best_epoch(loss) == "best epoch: 1.5 of 6, validation ema loss 0.7500"


@pytest.mark.parametrize("trainer", [{}, {"eval_strategy": "no"}])
def test_without_choosing_the_last_epoch_is_saved(trainer, tmp_path, capsys):
    results = training.run(config_in(tmp_path / "run", load_best_model_at_end=False, num_train_epochs=1, **trainer))
    assert results["best_epoch"] is None
    print_results(results, "out")
    assert "no epoch was chosen on validation: the weights of the last step are saved\n" in capsys.readouterr().out


@each(
    "section, message",
    [
        ({"early_stopping": 0}, "early_stopping=0 must be an integer of 1 or more, or null"),
        ({"early_stopping": True}, "early_stopping=True must be an integer of 1 or more"),
        ({"early_stopping": 3, "load_best_model_at_end": False}, "early_stopping=3 needs load_best_model_at_end=true"),
        (
            {"early_stopping": 3, "eval_strategy": "no", "save_strategy": "no"},
            "early_stopping=3 needs a validation split; eval_strategy=no does not look at one",
        ),
    ],
)
def test_early_stopping_needs_validation(section, message, tmp_path):
    with pytest.raises(ValueError, match=f"trainer: {message}"):
        training.run(config_in(tmp_path / "run", **section))
    assert not (tmp_path / "run").exists()


def test_early_stopping_is_refused_where_training_has_the_validation_images(tmp_path):
    config = stopping(tmp_path / "run")
    config["data"] = {"source": "imagefolder", "path": str(tmp_path / "nowhere"), "stage": "final"}
    message = r"early_stopping=3 needs a validation split, and data\.stage=final has its validation images among"
    with pytest.raises(ValueError, match=message):
        training.run(config)
    assert not (tmp_path / "run").exists()
