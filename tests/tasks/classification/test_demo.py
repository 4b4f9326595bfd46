"""The demo's console and its table of times."""

import itertools

import numpy as np
import pytest
from transformers.utils import logging as transformers_logging

from tasks.classification import demo, demo_speed


@pytest.fixture
def short(monkeypatch):
    """Two priors, two steps each, without the bars for files, as `main` sets it."""
    transformers_logging.disable_progress_bar()
    monkeypatch.setattr(demo, "PRIORS", ("dense", "violin"))
    load = demo.load_config
    changes = ["trainer.max_steps=2", "trainer.eval_steps=1", "trainer.save_steps=1", "trainer.logging_steps=1"]
    monkeypatch.setattr(demo, "load_config", lambda path: load(path, changes))
    yield
    transformers_logging.enable_progress_bar()


@pytest.mark.slow
def test_without_a_terminal_there_is_one_line_a_run(short, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    results = demo.train_all(tmp_path, seeds=1)
    assert {prior: len(runs) for prior, runs in results.items()} == {"dense": 1, "violin": 1}
    out, err = capsys.readouterr()
    # transformers says so of a file system in memory.
    rows = [line for line in err.splitlines() if "mtime may not be reliable" not in line]
    assert out == "" and rows == ["[1/2] dense, seed 0", "[2/2] violin, seed 0"]
    # The runs are the same ones whether or not bars are shown.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert demo.train_all(tmp_path, seeds=1) == results and capsys.readouterr().err == ""
    demo.train_all(tmp_path, seeds=2)
    out, err = capsys.readouterr()
    assert "trains on" in out and all(row in err for row in ("[3/4] dense, seed 1", "[4/4] violin, seed 1"))
    assert "2/2" in err and "seed 0" not in err  # a bar


class Model:
    """Stands for a model: counts its calls."""

    def __init__(self, log, pixels, prior):
        self.log, self.name = log, (pixels, prior)

    def __call__(self):
        self.log.append(self.name)


def test_contenders_take_turns_and_a_slow_size_is_left_out(monkeypatch):
    log, now = [], itertools.count(0.0, 6.0)  # every look at the clock is six seconds later
    times = {"dense": 3.0, "fibottention": 1.5}
    monkeypatch.setattr(demo_speed, "seconds_per_call", lambda call, calls, device: (call(), times[call.name[1]])[1])
    make = lambda pixels, prior: (Model(log, pixels, prior), (pixels // 16) ** 2)  # noqa: E731
    rows = list(demo_speed.measured(make, (32, 64), clock=lambda: next(now)))
    first, turns = ["dense", "fibottention"], ["fibottention", "dense", "dense", "fibottention"]
    assert [prior for _, prior in log] == [*first, *turns]
    assert rows == [demo_speed.Row(32, 4, times), demo_speed.Row(64, 16, {})]
    assert demo_speed.table(rows).splitlines()[2:] == [
        "| 32 | 4 | 3.000 | 1.500 | 2.00 |",
        "| 64 | 16 | too slow here | too slow here | - |",
    ]


def test_what_is_timed_is_the_model_of_that_size_and_prior():
    outputs = {}
    for prior in demo_speed.PRIORS:
        call, tokens = demo_speed.forward_of(224, prior)
        outputs[prior] = call().numpy()
        assert tokens == 196 and len(outputs[prior]) == 1
    assert not np.allclose(outputs["dense"], outputs["fibottention"])
