"""Runs: what they leave, that a stop changes nothing, who may do them, and what is left out."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hf_sparseprior
from hf_sparseprior.runs import run_folder as run_folders
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.locks import locked
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import LOCK, MODEL, RESULTS, InUse
from tasks.canvases import loop, report, times
from tasks.canvases.contenders import CONTENDERS, SCALES, runs_of
from tasks.canvases.loop import STATE, do_run, run_folder
from tasks.canvases.run import Experiment, main
from tasks.common.records import read_records
from tests.each import each
from tests.processes import ROOT

POSSIBLE = [name for name, one in CONTENDERS.items() if one.budget is None and one.missing() is None]


def folder_of(out, run):
    return run_folder(out, run.group, run.row, run.seed)


def done(run, scale, out):
    """The results of a run that is done now."""
    do_run(run, scale, out)
    return read_results(folder_of(out, run) / RESULTS)


@pytest.fixture
def started(small, tmp_path):
    """A folder with a dense start."""
    do_run(runs_of(small.scale)[0], small.scale, tmp_path / "out")
    return tmp_path / "out"


@each("name", POSSIBLE)
def test_every_contender_leaves_its_curve_and_its_test(name, started, small):
    scale = small.of([name])
    run = runs_of(scale)[1]
    results = done(run, scale, started)
    contender = CONTENDERS[name]
    seconds = [round(60 * point["minutes"], 6) for point in results["history"]]
    # A fifth of 6 seconds ends with the third step, of 4 images as the start's; no accuracy is measured before.
    assert seconds == ([1.5, 3, 4.5, 6] if contender.predictor_share else [0, 1.5, 3, 4.5, 6])
    assert results["seconds"] == 6 and results["images"] == (3 * 4 + 9 * 2 if contender.predictor_share else 12 * 2)
    assert len(results["test_correct"]["bits"]) and 0 <= results["metrics"]["test_accuracy"] <= 1
    assert results["patch"] == 4 * contender.patch
    assert results["tokens"] == (64 // contender.shrink // results["patch"]) ** 2
    assert {path.name for path in folder_of(started, run).iterdir()} == {RESULTS, "run_config.json"}


def test_evaluations_come_at_fixed_times_and_losses_are_between_them(started, small):
    results = done(runs_of(small.scale)[1], small.scale, started)
    assert [round(60 * point["minutes"], 6) for point in results["history"]] == [0, 1.5, 3, 4.5, 6]
    assert [point["images"] for point in results["history"]] == [0, 6, 12, 18, 24]
    assert results["history"][0]["loss"] is None and all(point["loss"] > 0 for point in results["history"][1:])


def test_the_learning_rate_rises_and_falls_with_the_clock(started, small, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *given: (rates.append(self.param_groups[0]["lr"]), step(self, *given))
    )
    do_run(runs_of(small.scale)[1], small.scale, started)
    shares = np.arange(12) / 12
    expected = 3e-4 * np.minimum(1, np.maximum(shares, 0.005) / 0.05) * (0.5 + 0.5 * np.cos(np.pi * shares))
    assert np.allclose(rates, expected)


@each("name, stop", [("fibottention", 1), ("fibottention", 7), ("sparsifiner", 2), ("sparsifiner", 8)])
def test_a_run_that_is_stopped_ends_as_one_that_is_not(name, stop, started, small):
    scale = small.of([name])
    run = runs_of(scale)[1]
    (folder_of(started, run) / RESULTS).unlink(missing_ok=True)
    whole = done(run, scale, started)
    (folder_of(started, run) / RESULTS).unlink()
    steps = []

    def count(*ignored):
        steps.append(1)
        if len(steps) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunStopped):
        do_run(run, scale, started, callbacks=[SimpleNamespace(on_step_end=count)])
    assert (folder_of(started, run) / STATE).exists() and len(steps) == stop
    again = done(run, scale, started)
    same = ("metrics", "history", "test_correct", "images", "steps", "seconds")
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}


def test_the_state_is_saved_at_evaluations_and_every_minute(started, small, monkeypatch):
    saved = []
    monkeypatch.setattr(loop.Training, "_save", lambda self: saved.append(self.spent))
    do_run(runs_of(small.scale)[1], small.scale, started)
    assert saved == [0, 1.5, 3, 4.5, 6]
    monkeypatch.setattr(loop, "SAVE_EVERY", 1.0)
    saved.clear()
    do_run(runs_of(small.scale)[2], small.scale, started)
    assert saved == [0, 1, 1.5, 2.5, 3, 4, 4.5, 5.5, 6]


def test_a_state_that_is_cut_off_is_not_used(started, small):
    run = runs_of(small.scale)[1]
    folder = folder_of(started, run)
    folder.mkdir(parents=True)
    (folder / STATE).write_bytes(b"PK")
    (folder / run_folders.RUN_CONFIG).write_text(json.dumps(run.config(small.scale)))
    assert done(run, small.scale, started)["images"] == 24


def test_one_process_does_a_run(started, small, monkeypatch):
    run = runs_of(small.scale)[1]
    monkeypatch.setattr(run_folders, "PATIENCE", 0.0)
    with locked(folder_of(started, run) / LOCK) as mine, pytest.raises(InUse, match="is in use by"):
        assert mine
        do_run(run, small.scale, started)


def test_runs_of_one_seed_see_the_same_images(started, small, monkeypatch):
    seen = {}
    batch = loop.Canvases.batch

    def record(self, first, count):
        images, labels = batch(self, first, count)
        seen.setdefault(current, []).append((first, int(images.long().sum()), labels.tolist()))
        return images, labels

    monkeypatch.setattr(loop.Canvases, "batch", record)
    for run in runs_of(small.scale)[1:]:
        current = run.row
        do_run(run, small.scale, started)
    assert seen["dense"] == seen["half"] == seen["fibottention"]


def test_what_sparsify_chooses_is_trained_and_its_time_counts(started, small, monkeypatch):
    """With a stand-in for it, which looks at the clock of the run once."""
    asked = []

    def choose(model, images, budget, settings):
        asked.append((model.config.prior_name, tuple(images.shape), budget, settings["seed"]))
        return SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(prior="neighborhood")))

    rates, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *given: (rates.append(self.param_groups[0]["lr"]), step(self, *given))
    )
    monkeypatch.setattr(hf_sparseprior, "sparsify", choose, raising=False)
    run = runs_of(small.of(["sparsify-0.5"]))[1]
    results = done(run, small.of(["sparsify-0.5"]), started)
    shares = np.arange(11) / 11  # the rate rises after the choice, and falls as of every other run
    expected = 3e-4 * np.minimum(1, np.maximum(shares, 0.005) / 0.05) * (0.5 + 0.5 * np.cos(np.pi * shares))
    assert np.allclose(rates, expected, rtol=0.02)
    assert asked == [("dense", (32, 1, 64, 64), 0.5, 0)] and results["prior"] == "neighborhood"
    assert results["history"][0]["minutes"] * 60 == 0.5 and results["images"] == 2 * 11 and results["seconds"] == 6

    def refuse(model, images, budget, settings):
        raise ValueError("budget=0.5 cannot be met")

    monkeypatch.setattr(hf_sparseprior, "sparsify", refuse)
    (folder_of(started, run) / RESULTS).unlink()
    with pytest.raises(ValueError, match="cannot be met"):
        do_run(run, small.of(["sparsify-0.5"]), started)


def test_a_loss_that_is_not_finite_ends_the_run(started, small, monkeypatch):
    monkeypatch.setattr(loop.Training, "_loss", lambda self, *given: self.model.classifier.bias.sum() * float("nan"))
    with pytest.raises(ValueError, match="64_class/dense seed 0: the loss is nan at step 0"):
        do_run(runs_of(small.scale)[1], small.scale, started)


def test_a_start_of_two_stages_goes_up(small, tmp_path):
    scale = small.of(["dense"], stages=(28, 32))
    Experiment(scale, runs_of(scale), tmp_path / "out", tmp_path / "records").do(None)
    rows = read_records(tmp_path / "records" / "start_class")
    assert list(rows) == ["28", "32"] and rows["28"][0]["start_sha256"] is None
    assert rows["32"][0]["start_sha256"] != read_records(tmp_path / "records/64_class")["dense"][0]["start_sha256"]
    assert (tmp_path / "out/start_class/32/seed0" / MODEL).is_dir()


# ---- the whole command ----------------------------------------------------------------------------------------------


def command(tmp_path, *arguments):
    return ["--scale", "smoke", "--out", str(tmp_path / "out"), "--records", str(tmp_path / "records"), *arguments]


def test_the_command_does_what_is_left_and_nothing_twice(small, tmp_path, capsys, monkeypatch):
    assert main(command(tmp_path, "--only", "dense")) == 0
    assert set(read_records(tmp_path / "records/64_class")) == {"dense"}
    before = (tmp_path / "records/64_class/records.jsonl").read_text()
    assert main(command(tmp_path)) == 0
    assert list(read_records(tmp_path / "records/64_class")) == ["dense", "half", "fibottention"]
    assert (tmp_path / "records" / report.FIGURE).stat().st_size > 10_000
    assert "| fibottention | 4 | 256 | 1 |" in capsys.readouterr().out
    assert json.loads(before.splitlines()[1])["seed"] == 0
    monkeypatch.setattr("tasks.canvases.run.do_run", None)  # would be called for whatever is not done
    assert main(command(tmp_path)) == 0


def test_records_are_enough(small, tmp_path, capsys):
    """Where the runs' folder is gone, nothing is done again; a new run of a recorded seed would need another start."""
    assert main(command(tmp_path, "--only", "dense", "half")) == 0
    (tmp_path / "out").rename(tmp_path / "gone")
    assert main(command(tmp_path, "--only", "dense", "half")) == 0 and not (tmp_path / "out").exists()
    assert main(command(tmp_path)) == 2 and not (tmp_path / "out").exists()
    assert "from a start (" in capsys.readouterr().err


def test_a_record_of_another_configuration_is_refused(small, tmp_path, monkeypatch, capsys):
    """A row of the same name that was something else would be averaged with it."""
    assert main(["--scale", "smoke", "--out", str(tmp_path / "out"), "--records", str(tmp_path / "records")]) == 0
    capsys.readouterr()
    changed = dataclasses.replace(CONTENDERS["fibottention"], prior="fibottention")
    monkeypatch.setitem(CONTENDERS, "fibottention", changed)
    assert main(["--scale", "smoke", "--out", str(tmp_path / "new"), "--records", str(tmp_path / "records")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "has 64_class/fibottention seed 0 of another configuration (contender.prior" in error
    assert not (tmp_path / "new").exists()


def test_another_seed_may_have_another_start(small, tmp_path, monkeypatch, capsys):
    assert main(command(tmp_path, "--only", "half")) == 0
    (tmp_path / "out").rename(tmp_path / "gone")
    monkeypatch.setitem(SCALES, "smoke", small.of(["half"], seeds=(0, 1)))
    monkeypatch.setattr(loop.torch, "manual_seed", lambda seed, draw=loop.torch.manual_seed: draw(seed + 5))
    assert main(command(tmp_path)) == 0
    assert sorted(read_records(tmp_path / "records/64_class")["half"]) == [0, 1]
    assert "The runs began from 2 starts" in capsys.readouterr().out
    assert len(read_records(tmp_path / "records/start_class")) == 1


def test_a_list_does_nothing(tmp_path, capsys):
    assert main(["--scale", "cpu", "--out", str(tmp_path / "out"), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  8.00 minutes  128_class/fibottention seed 0" in lines and not (tmp_path / "out").exists()
    assert lines[-1].endswith("dense runs are left out if the first of their size stays below twice chance")


def test_dense_is_dropped_where_its_pilot_learns_nothing(small, tmp_path, monkeypatch, capsys):
    scale = small.of(["dense", "fibottention"], seeds=(0, 1))
    monkeypatch.setitem(SCALES, "smoke", scale)
    monkeypatch.setattr("tasks.canvases.run.learns_nothing", lambda record: True)
    monkeypatch.setattr(report, "learns_nothing", lambda record: True)
    assert main(command(tmp_path)) == 0
    records = read_records(tmp_path / "records/64_class")
    assert sorted(records["dense"]) == [0] and sorted(records["fibottention"]) == [0, 1]
    out, err = capsys.readouterr()
    assert "64_class/dense seed 1: dropped" in err and "dense has no further seeds at 64 pixels" in out
    (tmp_path / "out").rename(tmp_path / "gone")
    assert main(command(tmp_path)) == 0  # nothing is left that would need the start


def test_what_another_command_does_is_refused_or_left_to_it(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folders, "PATIENCE", 0.0)
    assert main(command(tmp_path, "--only", "dense")) == 0
    run = runs_of(small.scale)[2]
    with locked(folder_of(tmp_path / "out", run) / LOCK):
        assert main(command(tmp_path)) == 1
    assert "1 of 2 runs failed:\n64_class/half seed 0: OUT=" in capsys.readouterr().err
    assert list(read_records(tmp_path / "records/64_class")) == ["dense", "fibottention"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, AssertionError])
def test_a_run_that_fails_is_named_and_the_others_are_done(error, small, tmp_path, monkeypatch, capsys):
    train = loop.Training._train

    def too_large(self, *given):
        if self.run.row == "half":
            raise error("CUDA out of memory. Tried to allocate 1 GiB\nmore")
        train(self, *given)

    monkeypatch.setattr(loop.Training, "_train", too_large)
    assert main(command(tmp_path)) == 1
    err = capsys.readouterr().err
    assert "1 of 3 runs failed:\n64_class/half seed 0: CUDA out of memory. Tried to allocate 1 GiB\n" in err
    assert list(read_records(tmp_path / "records/64_class")) == ["dense", "fibottention"]
    monkeypatch.setattr(loop.Training, "_train", train)
    assert main(command(tmp_path)) == 0


def test_a_stop_after_the_last_step_is_heard(small, tmp_path, monkeypatch, capsys):
    finish = loop.Training.finish

    def killed(self):
        os.kill(os.getpid(), signal.SIGTERM)
        finish(self)

    monkeypatch.setattr(loop.Training, "finish", killed)
    assert main(command(tmp_path)) not in (0, 2)
    assert "stopped after this run" in capsys.readouterr().err
    assert len(list((tmp_path / "out").rglob("results.json"))) == 1  # of the start
    monkeypatch.setattr(loop.Training, "finish", finish)
    assert main(command(tmp_path)) == 0


def test_what_cannot_be_timed_is_named_and_the_others_are_timed(small, tmp_path, monkeypatch, capsys):
    assert main(command(tmp_path)) == 0
    predicted = times.as_input

    def fails(images, shrink):
        if shrink > 1:
            raise RuntimeError("out of shared memory")
        return predicted(images, shrink)

    monkeypatch.setattr(times, "as_input", fails)
    monkeypatch.setattr(times, "CALL_SECONDS", 0.001)
    measured = times.measure_all(small.scale, tmp_path / "records", rounds=1)["times"]["64_class"]
    assert set(measured) == {"dense", "fibottention"}
    assert "half: not measured, out of shared memory" in capsys.readouterr().err


def test_runs_of_a_gpu_take_turns(monkeypatch, objects, tmp_path, capsys):
    assert main(["--scale", "gpu", "--out", str(tmp_path), "--jobs", "2"]) == 2
    assert "--jobs 2" in capsys.readouterr().err


def test_a_contender_that_the_library_lacks_brings_no_start(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tasks.canvases.contenders.SPARSIFY", "no_such_function")
    monkeypatch.setitem(SCALES, "smoke", small.of(["sparsify-0.5"]))
    assert main(command(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out.startswith("skipped: sparsify-0.5, this version has no hf_sparseprior.no_such_function\n0 runs")
    assert "has no records of scale smoke" in err and not (tmp_path / "out").exists()


@each("accuracies, dropped", [([0.1, 0.19], True), ([0.1, 0.2, 0.1], False)])
def test_twice_chance_at_any_time_is_enough(accuracies, dropped):
    record = {"chance": 0.1, "history": [{"validation_accuracy": accuracy} for accuracy in accuracies]}
    assert report.learns_nothing(record) is dropped


@each(
    "arguments, message",
    [
        (("--only", "fib"), "'fib' is in no run of scale smoke"),
        (("--jobs", "0"), "--jobs=0 must be"),
        (("--fashion-mnist", "nowhere"), "data.path=nowhere is not a folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message, tmp_path, capsys):
    assert main(command(tmp_path, *arguments)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_gpu_is_asked_for_before_anything_runs(monkeypatch, objects, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--scale", "gpu", "--out", str(tmp_path)]) == 2
    assert "scale gpu needs a CUDA device" in capsys.readouterr().err


def write_idx(folder, count, name):
    """A Fashion-MNIST of noise, as its files are."""
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28)).astype(np.uint8)
    for kind, header, values in (
        ("images-idx3", (2051, count, 28, 28), images),
        ("labels-idx1", (2049, count), np.arange(count, dtype=np.uint8) % 10),
    ):
        head = np.array(header, ">i4").tobytes()
        (folder / f"{name}-{kind}-ubyte").write_bytes(head + values.tobytes())


PROGRAM = """
import sys
from dataclasses import replace
from tasks.canvases.contenders import SCALES
from tests.tasks.canvases.conftest import scale_of
scale = scale_of(("dense", "fibottention"))
start, group = (replace(part, minutes=0.01) for part in (*scale.start, *scale.groups))
SCALES["smoke"] = replace(scale, start=(start,), groups=(group,))
from tasks.canvases.run import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_do_the_runs(tmp_path):
    """With the processor's clock, in processes of the queue."""
    for count, name in ((5100, "train"), (50, "t10k")):
        write_idx(tmp_path, count, name)
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = command(tmp_path, "--jobs", "2", "--fashion-mnist", str(tmp_path))
    python = [sys.executable, str(tmp_path / "program.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(python, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    records = read_records(tmp_path / "records/64_class")
    assert set(records) == {"dense", "fibottention"} and "[2/2]" in ended.stderr
    assert all(record[0]["minutes"] >= 0.01 for record in records.values())
