"""Another commit's code next to today's: the same call through public names, and what is refused."""

import json
import subprocess

import pytest
import torch

from tasks.benchmark import attention, model, revision, revision_worker
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
    ("command", "only"),
    [
        (["attention", "--sizes", "16x2", "--heads", "2", "--width", "8", "--prefix-tokens", "1"], "forward"),
        (["model", "--models", "vit_tiny", "--sizes", "32x2", "--priors", "violin", "transformers"], "training"),
    ],
)
def test_both_are_timed_in_turns_and_kept(here, command, only, tmp_path, capsys, monkeypatch):
    """In one of two passes: two processes start for each."""
    monkeypatch.setattr(f"tasks.benchmark.{command[0]}.PASSES", (only,))
    command = [*command, *TINY, "--base", "main", "--out", str(tmp_path)]
    assert main(command) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    codes = {(own["pass"], own["code"]): own for own in content["measured"]}
    assert len(codes) == len(content["measured"]) == 2 and content["settings"]["commit"] == "0123abcd"
    for own in codes.values():
        assert len(own["seconds"]) == 3 and min(own["seconds"]) > 0 and own["memory"] > 0 and own["ran"]
    assert "| times 0123abcd |" in (tmp_path / "table.md").read_text()


def test_a_worker_calls_each_pass():
    shared = {"device": "cpu", "dtype": "float32", "heads": 2, "width": 8, "prefix_tokens": 1}
    shared |= {"support": "fibottention", "decay": "none"}
    case = {"tokens": 16, "batch": 2}
    output, gradient = (
        revision_worker.attention_call({**shared, "case": {**case, "pass": key}})() for key in attention.PASSES
    )
    assert output.shape == gradient.shape == (2, 2, 17, 8) and not torch.allclose(output, gradient)
    case = {"model": "vit_tiny", "pixels": 32, "images": 2, "what": "violin"}
    logits = [revision_worker.model_call({**shared, "case": {**case, "pass": key}})() for key in model.PASSES]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


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
