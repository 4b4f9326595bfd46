import itertools
import json
import os
import re
import resource
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_sparseprior.runs import locks, run_folder
from hf_sparseprior.runs.run_folder import (
    check_place,
    claim,
    config_differences,
    cut_off,
    default_output_dir,
    evaluation_folder,
    finished_results,
    full_disk_in_one_line,
    newest_whole,
    owned,
    stored_config,
)
from tests.each import each


def test_runs_of_two_tasks_never_share_a_folder_by_default():
    assert default_output_dir("video", "configs/video/smoke.yaml") == "outputs/video/smoke"
    assert default_output_dir("classification", "configs/classification/smoke.yaml") == "outputs/classification/smoke"


def test_evaluation_lies_in_the_run_and_tells_models_of_one_run_apart(tmp_path):
    assert evaluation_folder(tmp_path / "run" / "model") == tmp_path / "run" / "evaluation"
    assert evaluation_folder(tmp_path / "run" / "model_ema") == tmp_path / "run" / "evaluation" / "model_ema"


SAME = {"trainer": {"seed": 1, "output_dir": "a"}, "model": {"prior": {"shuffle_seed": 0}, "depth": None}}


@each(
    "change, expected",
    [
        ({"trainer": {"seed": 1, "output_dir": "b"}, "model": {"prior": {"shuffle_seed": 0}}}, []),  # cosmetic, null
        ({"trainer": {"seed": 2}}, ["trainer.seed: 1 there, 2 here"]),
        ({"trainer": {}}, ["trainer.seed: 1 there, None here"]),
        ({"data": {"source": "x"}}, ["data.source: None there, 'x' here"]),
        ({"model": {"prior": {"shuffle_seed": None}}}, ["model.prior.shuffle_seed: 0 there, None here"]),
        ({"model": {"prior": {}}}, ["model.prior.shuffle_seed: 0 there, nothing here"]),
        ({"model": {"prior": "dense"}}, ["model.prior: {'shuffle_seed': 0} there, 'dense' here"]),
        ({"config": {}}, []),
    ],
)
def test_differences_name_the_key_and_both_values(change, expected):
    assert config_differences(SAME, change) == expected


def test_lists_and_nested_sections_are_compared_part_by_part():
    def config(number, workers):
        return {"config": {"hooks": [{"type": "a"}, {"type": "b", "every": number}], "data": {"num_workers": workers}}}

    assert config_differences(config(1, 0), config(1, 8)) == []
    assert config_differences(config(1, 0), config(2, 0)) == ["config.hooks.1.every: 1 there, 2 here"]
    shorter = {"config": {"hooks": [], "data": {}}}
    assert len(config_differences(config(1, 0), shorter)) == 1


def test_the_newest_whole_checkpoint_counts_numbers_not_letters(tmp_path, capsys):
    for name in ("iter_9.pth", "iter_10.pth", "epoch_2.pth", "last_checkpoint", "other_99.pth", "iter_x.pth"):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("data", json.dumps(name))
    patterns = ("iter_*.pth", "epoch_*.pth")
    assert newest_whole(tmp_path, patterns, cut_off) == str(tmp_path / "iter_10.pth")
    (tmp_path / "iter_10.pth").write_bytes(b"PK")
    assert newest_whole(tmp_path, patterns, cut_off) == str(tmp_path / "iter_9.pth")
    assert capsys.readouterr().err == f"{tmp_path / 'iter_10.pth'} is skipped: it is cut off\n"
    assert newest_whole(Path(tmp_path / "missing"), patterns, cut_off) is None


def test_a_file_or_a_link_to_nowhere_is_no_folder_of_a_run(tmp_path):
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/run/seed 0"):
        message = rf"^trainer\.output_dir={tmp_path}/{name}: {tmp_path}/file is not a folder$"
        with pytest.raises(OSError, match=message):
            finished_results(tmp_path / name, {"trainer": {}}, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match="link is not a folder"):
        check_place(tmp_path / "link" / "run", "--out")


def test_a_folder_that_may_not_be_written_into_is_named_before_anything_runs(tmp_path, monkeypatch):
    """Asked of the system, as root may write anywhere."""
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    with pytest.raises(OSError, match=rf"^--out={tmp_path}/a/b: {tmp_path} may not be written into$"):
        check_place(tmp_path / "a" / "b", "--out")
    (tmp_path / "a").mkdir()
    check_place(tmp_path / "a" / "b", "--out")
    # A run that is done already is read from where nothing can be written.
    config = {"trainer": {"seed": 1}}
    claim(tmp_path, config)
    with pytest.raises(OSError, match="may not be written into"):
        finished_results(tmp_path, config, overwrite=False)
    results = {"results_version": 2, "metrics": {}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert finished_results(tmp_path, config, overwrite=False) == results


@each("content", ["", '{"metrics": {"test', "[1]", "null", '"text"', '{"results_version": "2"}'])
def test_half_written_results_are_named(content, tmp_path):
    claim(tmp_path, {"trainer": {"seed": 1}})
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/results\.json is damaged \(.*\); remove it$"):
        finished_results(tmp_path, {"trainer": {"seed": 1}}, overwrite=False)
    (tmp_path / "results.json").unlink()
    assert finished_results(tmp_path, {"trainer": {"seed": 1}}, overwrite=False) is None


@each("content", ["", '{"data": ', "[1]"])
def test_a_damaged_configuration_next_to_a_model_is_named(content, tmp_path):
    (tmp_path / "run_config.json").write_text(content)
    with pytest.raises(OSError, match=r"run_config\.json is damaged, so the data is not known; give --config"):
        stored_config(tmp_path / "model")


# ---- one process at a time ------------------------------------------------------------------------------------------

MINE, OTHER = {"trainer": {"seed": 1}}, {"trainer": {"seed": 2}}


@pytest.mark.parametrize("config", [MINE, OTHER], ids=["this run", "another run"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_start_in_a_folder_names_the_process_that_trains_there(config, overwrite, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "PATIENCE", 0.0)
    expected = rf"^--out={tmp_path}/run is in use by process {os.getpid()} on \S+ \(python .*\); wait for its end or"
    with owned(tmp_path / "run", MINE, lambda: "checkpoint-3") as checkpoint:
        assert checkpoint == "checkpoint-3"
        with pytest.raises(ValueError, match=expected):  # before it reads any data
            finished_results(tmp_path / "run", config, overwrite, "--out")
        with pytest.raises(ValueError, match=expected):  # if it looked before the first one started
            owned(tmp_path / "run", config, lambda: None, overwrite, "--out").__enter__()
        assert json.loads((tmp_path / "run" / "run_config.json").read_text()) == MINE
    with owned(tmp_path / "run", MINE, lambda: None):  # given back
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run_config.json"]


def test_a_folder_that_was_taken_since_it_was_looked_at_is_not_taken_again(tmp_path):
    """Two starts look at an empty folder; the second reaches it when the first one has ended."""
    assert finished_results(tmp_path / "run", OTHER, False) is None
    with owned(tmp_path / "run", MINE, lambda: None):
        pass
    with pytest.raises(ValueError, match=r"belongs to another run .*seed: 1 there, 2 here"):
        owned(tmp_path / "run", OTHER, lambda: None).__enter__()
    (tmp_path / "run" / "results.json").write_text(json.dumps({"results_version": 2, "config": MINE, "metrics": {}}))
    with pytest.raises(ValueError, match="was finished by another process meanwhile"):
        owned(tmp_path / "run", MINE, lambda: None).__enter__()
    with owned(tmp_path / "run", OTHER, lambda: None, overwrite=True):
        left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["run.lock", "run_config.json"]


def test_results_of_another_configuration_do_not_count_as_finished(tmp_path):
    """As two runs in one folder left them, with the configuration of one and the results of the other."""
    claim(tmp_path, MINE)
    (tmp_path / "results.json").write_text(json.dumps({"results_version": 2, "config": OTHER}))
    with pytest.raises(ValueError, match=r"results\.json has trainer\.seed: 2 there, 1 here"):
        finished_results(tmp_path, MINE, overwrite=False)
    assert finished_results(tmp_path, MINE, overwrite=True) is None
    claim(tmp_path, MINE)
    assert [path.name for path in tmp_path.iterdir()] == ["run_config.json"]


@each(
    "change, message",
    [
        ({"metrics": None}, "it has no 'metrics'"),
        ({"metrics": [1]}, "metrics=[1] must be a map of names to numbers or null"),
        ({"metrics": {"test_accuracy": "high"}}, "metrics={'test_accuracy': 'high'} must be a map"),
        ({"seconds": None}, "it has no 'seconds'"),
        ({"seconds": "long"}, "seconds='long' must be a number"),
        ({"parameters": 0.5}, "parameters=0.5 must be an integer"),
        ({"history": {"loss": 1}}, "history={'loss': 1} must be a list of maps"),
    ],
)
def test_results_without_a_part_are_named_with_it(change, message, tmp_path):
    """Commands that show a finished run looked up what is not there."""
    claim(tmp_path, {"trainer": {"seed": 1}})
    whole = {"results_version": 2, "metrics": {"test_accuracy": 0.5, "test_IoU": None}, "seconds": 3.5, "parameters": 7}

    def finished(content):
        (tmp_path / "results.json").write_text(json.dumps(content))
        return finished_results(tmp_path, {"trainer": {"seed": 1}}, overwrite=False, needed=("metrics", "seconds"))

    assert finished(whole) == whole
    with pytest.raises(ValueError, match=rf"^{tmp_path}/results\.json is damaged \({re.escape(message)}.*; remove it$"):
        finished({**whole, **change})


@pytest.mark.parametrize("load_from", [None, "run/iter_4.pth"], ids=["today", "earlier"])
def test_results_of_mmengine_are_compared_by_their_nested_names(load_from, tmp_path):
    identity = {"config": {"optimizer": {"custom_keys": {"norm": {"decay": 0}}}, "load_from": None}}
    claim(tmp_path, identity)
    results = {"results_version": 2, "resumed_from": "iter_4.pth", "metrics": {}}
    results["config"] = {"optimizer": {"custom_keys": {"norm.decay": 0}}, "load_from": load_from}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert finished_results(tmp_path, identity, overwrite=False) == results


def test_a_lock_ends_with_its_process_though_a_worker_lives_on(tmp_path):
    """A data loader's worker outlives a killed parent by some seconds, in which the run may be started again."""
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        with owned(tmp_path / "run", MINE, lambda: None):
            if not os.fork():
                os.write(done, str(os.getpid()).encode())  # by now it has let go of its copy of the lock
            time.sleep(600)
        os._exit(0)
    worker = int(os.read(ready, 10))
    try:
        assert f"process {child} " in locks.holder(tmp_path / "run" / "run.lock")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with owned(tmp_path / "run", MINE, lambda: None):
            os.kill(worker, 0)  # it lives
    finally:
        os.kill(worker, signal.SIGKILL)


def test_who_waits_for_a_lock_gets_it_after_its_owner(tmp_path):
    ready, done = os.pipe()
    if not os.fork():
        with locks.locked(tmp_path / "a.lock"):
            os.write(done, b"1")
            time.sleep(0.2)
            (tmp_path / "was here").touch()
        os._exit(0)
    assert os.read(ready, 1) == b"1"
    with locks.turn(tmp_path / "a.lock"):
        assert (tmp_path / "was here").exists() and locks.holder(tmp_path / "a.lock")
    assert not (tmp_path / "a.lock").exists()


def test_a_folder_that_another_process_removes_before_the_lock_is_in_it_is_made_again(tmp_path, monkeypatch):
    system, removed = os.open, []

    def late(path, *how):
        if not removed:
            removed.append(Path(path).parent.rmdir())
        return system(path, *how)

    monkeypatch.setattr(locks.os, "open", late)
    with locks.locked(tmp_path / "a" / "b" / "x.lock") as mine:
        assert mine and removed


def test_where_nothing_can_be_locked_a_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def none(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", none)
    with owned(tmp_path / "run", MINE, lambda: None):
        assert finished_results(tmp_path / "run", MINE, overwrite=False) is None
    with locks.turn(tmp_path / "a.lock"):
        pass
    assert "run.lock cannot be locked (Function not implemented)" in capsys.readouterr().err


CONTENT = {f"w{number}": torch.zeros(1000) for number in range(20)}
WRITERS = {
    "torch": lambda folder: torch.save(CONTENT, folder / "a.pt"),
    "torch and a file": lambda folder: torch.save(CONTENT, (folder / "a.pt").open("wb", buffering=0)),
    "safetensors": lambda folder: save_file(CONTENT, folder / "a.safetensors"),
    "text": lambda folder: (folder / "a.txt").write_text("x" * 80_000),
}


@each("name, room", itertools.product(WRITERS, [0, 1, 4 << 10, 30_001, 64 << 10, 79_999]))
def test_whatever_finds_a_full_disk_it_is_one_line_with_the_folder(tmp_path, name, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError) as error, full_disk_in_one_line(tmp_path):
            WRITERS[name](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value).startswith(f"{tmp_path} cannot be written (File too large; ")
    assert "\n" not in str(error.value)


def test_what_is_no_full_disk_is_left_alone(tmp_path):
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more"), (tmp_path / "cut.safetensors").touch()
    save = torch.save
    for read in (
        lambda: torch.load(tmp_path / "cut.pt"),
        lambda: load_file(tmp_path / "cut.safetensors"),
        lambda: 1 / 0,
    ):
        with (
            pytest.raises((RuntimeError, SafetensorError, ZeroDivisionError)) as error,
            full_disk_in_one_line(tmp_path),
        ):
            read()
        assert "make room" not in str(error.value)
    with full_disk_in_one_line(tmp_path):
        torch.save(CONTENT, tmp_path / "whole.pt")
        torch.save(CONTENT, str(tmp_path / "whole.pt"))
    assert torch.save is save and torch.load(tmp_path / "whole.pt").keys() == CONTENT.keys()
