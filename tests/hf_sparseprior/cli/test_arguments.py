"""`python -m hf_sparseprior`: help is there at once, and parsers know what they repeat."""

import subprocess
import sys
import tomllib

import pytest

from hf_sparseprior.__main__ import COMMANDS, main
from hf_sparseprior.analysis import explain_time
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli import arguments, deployment, runtimes
from hf_sparseprior.cli.doctor import REQUIRABLE
from hf_sparseprior.convert import target_formats
from hf_sparseprior.prediction import predict, predictors
from tests.hf_sparseprior.small import shipped_families
from tests.processes import ROOT

HEAVY = {"torch", "transformers", "numpy", "matplotlib"}


def asked(*given):
    """Exit status, output and the packages that are imported in a process of its own."""
    python = [sys.executable, "-X", "importtime", "-m", "hf_sparseprior", *given]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in times}
    return done.returncode, done.stdout + "\n".join(line for line in lines if line not in times), imported


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_answered_without_torch(command):
    own = [] if command is None else [command]
    status, out, imported = asked(*own, "--help")
    assert status == 0 and out.startswith(" ".join(["usage: python -m hf_sparseprior", *own]))
    assert "hf_sparseprior" in imported and not imported & HEAVY


def test_wrong_arguments_are_answered_without_torch():
    status, out, imported = asked("explain", "violin", "--grid", "3")
    assert status == 2 and "must be HEIGHTxWIDTH" in out and not imported & HEAVY
    status, out, imported = asked("explain", "violin", "--gird", "3x3")
    assert status == 2 and "unrecognized arguments: --gird" in out and not imported & HEAVY


def test_another_program_is_not_answered(monkeypatch):
    """A module that is run with -m and imports the package, and a program whose own arguments look alike."""
    for given in (["python", "-m", "other", "--help"], ["python", "program.py", "-m", "hf_sparseprior"], ["python"]):
        monkeypatch.setattr(sys, "orig_argv", given)
        monkeypatch.setattr(sys, "argv", ["program.py" if "program.py" in given else "-m", "--help"])
        arguments.answer_at_once()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", "hf_sparseprior", "--help"])
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    with pytest.raises(SystemExit) as end:
        arguments.answer_at_once()
    assert end.value.code == 0


def test_what_the_parser_repeats_is_what_the_work_knows():
    assert set(arguments.TARGETS) == set(target_formats()) - (FAMILIES.keys() - {*shipped_families()})
    assert tuple(REQUIRABLE) == arguments.EXTRAS
    assert tuple(explain_time.DTYPES) == arguments.DTYPES
    assert (tuple(runtimes.FORMATS), runtimes.WEIGHTS) == (arguments.FORMATS, arguments.WEIGHTS)
    assert deployment.BACKENDS == arguments.BACKENDS
    assert (predictors.FEATURES, predict.UNREADABLE) == (arguments.FEATURES, arguments.UNREADABLE)


def test_the_console_script_is_the_module(monkeypatch):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {arguments.SCRIPT: f"{main.__module__}:{main.__name__}"}
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{arguments.SCRIPT}", "predict"])
    with pytest.raises(SystemExit) as end:  # before anything else is imported
        arguments.answer_at_once()
    assert end.value.code == 2
