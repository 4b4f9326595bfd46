"""Commands that share the runs of a comparison: which shard does which run first, and what it takes over."""

import errno
import fcntl
import itertools
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from hf_sparseprior.classification.task import CLASSIFICATION
from tasks.classification.compare import load_comparison
from tasks.classification.compare import main as compare_main
from tasks.common.compare import Comparison, run_comparison
from tasks.common.machines import Shard
from tasks.common.records import read_records
from tests.each import each
from tests.processes import ROOT, Started, module, wait_until
from tests.tasks.common.test_compare import same
from tests.tasks.common.test_compare import write as write_comparison
from tests.tasks.common.test_compare_first import chain
from tests.tasks.common.test_queue import job, records, work

# ---- numbers --------------------------------------------------------------------------------------------------------


@each("runs, of", itertools.product([0, 1, 5, 12], [1, 2, 3, 7]))
def test_a_shard_does_its_own_runs_first_and_then_those_of_the_next_ones(runs, of):
    for number in range(1, of + 1):
        shards = [(number - 1 + step) % of for step in range(of)]  # counted from 0, its own first
        expected = [run for shard in shards for run in range(runs) if run % of == shard]
        assert Shard(number, of).order(runs) == expected and sorted(expected) == list(range(runs))


@each("text", ["0/4", "5/4", "1/0", "3", "3/", "-1/4", "1.0/4", "1/4/2", "a/b", "", "²/4"])
def test_the_form_is_that_of_a_job_array_and_another_is_named(text, tmp_path, capsys):
    assert Shard.parse("3/16") == Shard(3, 16) and Shard.parse("1/1") == Shard(1, 1)
    arguments = ["--config", str(write_comparison(tmp_path)), "--out", str(tmp_path / "out"), f"--shard={text}"]
    assert compare_main(arguments) == 2
    message = f"--shard={text} must be K/N with whole numbers 1 <= K <= N, such as 3/16\n"
    assert capsys.readouterr().err == f"python -m tasks.classification.compare: {message}"
    assert not (tmp_path / "out").exists()


@each(
    "arguments, message",
    [
        (["--shard", "1/2", "--jobs", "0"], "--jobs=0 must be 1 or more"),
        (["--shard", "1/2", "--ray", "auto"], "--shard=1/2 and --ray=auto exclude each other"),
        (["--jobs", "2", "--ray", "local"], "--jobs=2 and --ray=local exclude each other"),
        (["--ray", ""], "--ray='' must be local, auto, or HOST:PORT"),
        (["--ray", "ray://a:1"], "--ray='ray://a:1' must be local, auto, or HOST:PORT of a cluster that this machine"),
    ],
)
def test_options_that_do_not_go_together_are_named(arguments, message, tmp_path, capsys):
    assert compare_main(["--config", str(write_comparison(tmp_path)), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


# ---- what stands for a comparison: six runs of one row --------------------------------------------------------------


def hold(folder, callbacks=()):
    """Run number 1 takes ten minutes, unless it was killed before."""
    work(folder, 600 if folder.name == "a1" and not (folder.parent / "killed").exists() else 0.2)


class Row:
    """A run that takes its lock and leaves a file."""

    def __init__(self, seed, out):
        self.name, self.seed, self.folder = "a", seed, out / f"a{seed}"

    def record(self):
        return {"seconds": 1.0, "seed": self.seed} if (self.folder / "record").exists() else None

    folder_record = record

    def check_folder(self):
        pass

    def job(self, command):
        return job(self.folder, hold)


class Runs(Comparison):
    def row(self, name, seed, out, records):
        return Row(seed, out)

    def prepare(self, *arguments):
        pass


def do_shard(folder, number):
    comparison = Runs(CLASSIFICATION, "stub", {"a": {}}, list(range(6)))
    return run_comparison(comparison, Path(folder), Path(folder), shard=Shard(number, 2))


def begun(folder):
    """How often each run began."""
    return [len(list(folder.glob(f"a{number}/began-*"))) for number in range(6)]


@pytest.mark.slow
def test_the_runs_of_a_shard_that_is_killed_are_done_by_the_other(tmp_path):
    second = Started(do_shard, str(tmp_path), 2, folder=ROOT, log=tmp_path / "second.log")
    try:
        wait_until(lambda: list(tmp_path.glob("a1/began-*")), second)

        def kill():
            wait_until(lambda: len(records(tmp_path)) == 5)  # all but the one that it holds
            (tmp_path / "killed").touch()
            os.kill(second.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        found = do_shard(tmp_path, 1)
        thread.join()
    finally:
        second.kill()
    assert [record["seed"] for record in found["a"]] == list(range(6))
    assert begun(tmp_path) == [1, 2, 1, 1, 1, 1]
    moments = {name: begin for name, (begin, *_) in records(tmp_path).items()}
    assert sorted(moments, key=moments.get) == ["a0", "a2", "a4", "a3", "a5", "a1"]


@pytest.mark.slow
def test_without_locks_nothing_begins(tmp_path, monkeypatch):
    def no_lock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(
        OSError, match=rf"^--shard: {tmp_path}/out/shards\.lock cannot be locked \(No locks available\)"
    ):
        do_shard(tmp_path / "out", 1)
    assert not list(tmp_path.rglob("began-*"))


# ---- a comparison ---------------------------------------------------------------------------------------------------


def comparison_of(folder):
    """A comparison of two rows that start from one run, with two seeds; its file."""
    start = {"pretrained": str(folder / "outputs" / "dense" / "model")}
    return chain(folder, ["dense.yaml"], {"plain": {"model": start}, "violin": {"model": {**start, "prior": "violin"}}})


@pytest.mark.slow
def test_two_shards_at_once_do_each_run_once_and_write_the_table_of_one_process(tmp_path):
    path, folder = comparison_of(tmp_path / "two"), tmp_path / "two"
    arguments = ["--config", str(path), "--out", str(folder / "out"), "--seeds", "0", "1"]
    logs = [tmp_path / f"{number}.log" for number in (1, 2)]
    both = [
        module("tasks.classification.compare", *arguments, "--shard", f"{number}/2", folder=ROOT, log=log)
        for number, log in enumerate(logs, start=1)
    ]
    alone = load_comparison(comparison_of(tmp_path / "one"))
    alone.seeds = [0, 1]
    expected = run_comparison(alone, tmp_path / "one" / "out", tmp_path / "one" / "out")
    codes = [process.wait(300) for process in both]
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], texts
    rows = [f"{name}, seed {seed}" for seed in (0, 1) for name in ("plain", "violin")]
    done = [name for text in texts for name in re.findall(r"^\[\d+/\d+\] (.+): done in ", text, re.MULTILINE)]
    assert sorted(done) == sorted([f"first [1/1] {folder}/outputs/dense", *rows])
    for text, own in zip(texts, rows, strict=False):
        assert re.findall(r"^\[0/4\] (.+): started as process", text, re.MULTILINE)[0] == own
    found = {name: list(runs.values()) for name, runs in read_records(folder / "out").items()}
    assert found.keys() == {"plain", "violin"} and same(found) == same(expected)
    assert all((folder / "out" / "table.md").read_text().strip() in text for text in texts)
    assert not list(folder.rglob("*.lock"))

    results = {path: path.stat().st_mtime_ns for path in folder.glob("out/*/seed*/results.json")}
    (folder / "out" / "records.jsonl").unlink()
    again = module("tasks.classification.compare", *arguments, "--jobs", "2", folder=ROOT, log=tmp_path / "again.log")
    text = (tmp_path / "again.log").read_text() if again.wait(300) == 0 else ""
    assert " done in " not in text and "started" not in text and len(results) == 4
    assert {name: list(runs.values()) for name, runs in read_records(folder / "out").items()} == found
    assert results == {path: path.stat().st_mtime_ns for path in folder.glob("out/*/seed*/results.json")}
