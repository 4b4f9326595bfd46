"""Another commit's code next to today's: the same call through public names, and what is refused."""

import json
import subprocess

import pytest

from tasks.benchmark import revision
from tasks.benchmark.__main__ import main

TINY = ["--device", "cpu", "--threads", "1", "--rounds", "3", "--seconds", "1"]


@pytest.fixture
def here(monkeypatch):
    """The worktree of the base is this folder, where tests have no history of git."""
    import contextlib

    monkeypatch.setattr(revision, "git", lambda *arguments: "0123abcd")
    monkeypatch.setattr(revision, "worktree", lambda commit: contextlib.nullcontext(revision.ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["attention", "--sizes", "16x2", "--heads", "2", "--width", "8", "--prefix-tokens", "1"],
        ["model", "--models", "vit_tiny", "--sizes", "32x2", "--priors", "violin", "transformers"],
    ],
)
def test_both_are_timed_in_turns_and_kept(here, command, tmp_path, capsys):
    command = [*command, *TINY, "--base", "main", "--out", str(tmp_path)]
    assert main(command) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    codes = {(own["pass"], own["code"]): own for own in content["measured"]}
    assert len(codes) == len(content["measured"]) == 4 and content["settings"]["commit"] == "0123abcd"
    for own in codes.values():
        assert len(own["seconds"]) == 3 and min(own["seconds"]) > 0 and own["memory"] > 0 and own["ran"]
    assert "| times 0123abcd |" in (tmp_path / "table.md").read_text()


def test_other_outputs_are_not_timed(tmp_path):
    class Fake:
        def __init__(self, value):
            self.about = {"output": [1.0, value], "seconds": 1.0, "memory": 1, "ran": ""}

    cases = [{"code": "old"}, {"code": revision.AFTER}]
    workers = {"old": Fake(2.0), revision.AFTER: Fake(2.5)}
    found = revision.measured_turns(cases, workers, None, 1e-3)
    assert [own["failed"] for own in found] == ["wrong: the outputs of both differ by 0.5, allowed 0.002"] * 2


def test_a_worker_that_ends_says_why_and_the_library_is_that_of_the_folder(tmp_path):
    with pytest.raises(revision.WorkerError, match="the library came from"):
        revision.Worker(tmp_path, {}).__enter__()


def test_an_unknown_commit_is_refused(tmp_path, capsys):
    inside = subprocess.run(["git", "-C", str(revision.ROOT), "rev-parse"], capture_output=True).returncode == 0
    assert main(["attention", *TINY, "--base", "no-such-commit", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("no-such-commit" in error or not inside)
    assert not (tmp_path / "out").exists()
