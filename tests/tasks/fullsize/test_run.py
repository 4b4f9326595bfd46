"""Three configurations, one of each framework, do a step at full size; of all, the model is built on the meta device.

`python -m tasks.fullsize.run` does the step of all ten.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from tasks.fullsize import process, run
from tasks.fullsize.configs import find_runs
from tasks.fullsize.parameters import FILE, parameter_counts
from tasks.fullsize.process import is_whole
from tasks.fullsize.run import TEN, do_run

KNOWN = json.loads(FILE.read_text())
KINDS = ("vtab.yaml#deit_tiny-dora", "dino_small", "ade20k")  # the others take minutes, or 10 GiB
METRIC = {"pretraining": "test_knn_accuracy", "segmentation": "test_mIoU", "detection": "test_coco/bbox_mAP"}


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("mmengine", reason="needs make dense")
    return {run.name: run for run in find_runs()}


@pytest.fixture(scope="module")
def out():
    """On a disk: the tests' own folder is in memory, and checkpoints are of hundreds of megabytes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
        yield Path(folder)


def test_models_of_all_configurations_have_the_parameters_that_are_told(runs):
    assert len(KNOWN) > 600
    assert parameter_counts(list(runs.values())) == KNOWN


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TEN if any(kind in name for kind in KINDS)])
def test_a_step_is_done_killed_goes_on_and_is_evaluated(name, runs, out, monkeypatch):
    killed, command = [], process.run_command

    def watched(*given, **options):
        ended = command(*given, **options)
        killed.append(ended.status is None)
        return ended

    monkeypatch.setattr(process, "run_command", watched)
    found = do_run(runs[name], list(runs.values()), out)
    assert killed[0] and not any(killed[1:]) and len(killed) == 3
    assert len(found["losses"]) == 2 and found["resumed_from"] in ("checkpoint-1", "iter_1.pth", "epoch_1.pth")
    assert found["parameters"] == KNOWN[name] or "dora" in name  # whose tuning is not in the count
    assert 0 <= found["evaluated"][METRIC.get(runs[name].task, "test_accuracy")] <= 1
    assert 0.1 < found["peak_gib"] < 16
    assert not list((out / "runs").iterdir())


def test_names_are_checked_and_a_failure_is_named(runs, tmp_path, monkeypatch, capsys):
    assert run.main(["classification/imagenet.yaml#vit_smal", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'classification/imagenet.yaml#vit_small" in error and error.count("\n") == 1
    first, second = TEN[:2]

    def fails(one, *given):
        if one.name == first:
            raise run.Failed("train ended with status 1: no reason")
        return {"seconds": 3.0, "peak_gib": 1.0}

    monkeypatch.setattr(run, "do_run", fails)
    assert run.main([first, second, "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3].endswith("no reason") and "goes on and is evaluated, 3 s" in lines[-2]
    assert lines[-1].endswith(f"1 failed: {first}")


def test_what_there_is_is_listed_with_its_parameters(runs, capsys):
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(KNOWN)
    assert any(line.split() == ["5.8", "M", "classification", "classification/deit_tiny_384.yaml"] for line in lines)


def test_a_checkpoint_is_whole_when_nothing_of_it_changes(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    assert not is_whole(None) and not is_whole(folder)
    (folder / "model.safetensors").touch()
    old = time.time() - 60
    for path in (folder / "model.safetensors", folder):
        os.utime(path, (old, old))
    assert not is_whole(folder)  # its last file is not there
    (folder / "trainer_state.json").touch()
    assert not is_whole(folder)  # it may be written at this moment
    for path in (folder / "trainer_state.json", folder):
        os.utime(path, (old, old))
    assert is_whole(folder) and is_whole(folder / "trainer_state.json")
