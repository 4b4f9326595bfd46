"""How the commands of all tasks end."""

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_sparseprior.runs.command import RunStopped, run_command, sigterm_as_interrupt, tell_data
from tests.each import each


def raising(error):
    def work():
        raise error

    return work


@each("kind, shown", itertools.product([ValueError, OSError, ImportError, FileNotFoundError], ["0", "1"]))
def test_what_a_user_can_cause_is_one_line(kind, shown, monkeypatch, capsys):
    monkeypatch.setenv("SPARSEPRIOR_TRACEBACK", shown)
    assert run_command("python -m tasks.x", raising(kind("a=1"))) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == "python -m tasks.x: a=1"
    assert (lines[0] == "Traceback (most recent call last):") if shown == "1" else len(lines) == 1


@each("mistake", [TypeError, AttributeError, KeyError, IndexError, RuntimeError])
def test_a_mistake_of_the_program_is_raised(mistake):
    with pytest.raises(mistake, match="a slip"):
        run_command("python -m tasks.x", raising(mistake("a slip")))


def test_the_ends_that_are_no_errors(capsys):
    assert run_command("x", lambda: None) == 0
    assert run_command("x", raising(RunStopped("stopped at step 3"))) == 128 + signal.SIGTERM
    assert run_command("x", raising(KeyboardInterrupt()), "where it stopped") == 130
    assert run_command("x", raising(KeyboardInterrupt())) == 130
    with sigterm_as_interrupt():
        assert run_command("x", lambda: signal.raise_signal(signal.SIGTERM)) == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one ends the process
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == [
        "x: stopped at step 3",
        "x: interrupted; the same command goes on where it stopped",
        "x: interrupted; nothing was written",
        "x: ended by SIGTERM; nothing was written",
    ]


def test_sigterm_does_afterwards_what_it_did_before():
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt():
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with ThreadPoolExecutor(1) as pool:  # Python has handlers in the main thread alone
            assert pool.submit(_handler_within).result() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _handler_within():
    with sigterm_as_interrupt():
        return signal.getsignal(signal.SIGTERM)


def test_what_a_run_learns_from_is_one_line(capsys):
    tell_data(
        "images",
        {"trains": (None, "train and validation"), "validates": (1, "val200"), "tests": (7, "a\nb\udcff")},
        ["1\udcff", *"23456789ab"],
    )
    tell_data("demonstrations", {"trains": (2, "train")})
    assert capsys.readouterr().out.splitlines() == [
        r"trains on an unknown number of images of 11 classes ['1\udcff', '2', '3', '4', '5', '6', '7', '8', '9', 'a'] "
        r"and 1 more (train and validation), validates on 1 image (val200), tests on 7 images (a\nb\\udcff)",
        "trains on 2 demonstrations (train)",
    ]
