"""An error that a user can cause ends a command with one line; a mistake of the program keeps its traceback."""

import pytest

from hf_sparseprior import __main__
from hf_sparseprior.analysis import explain
from hf_sparseprior.cli.command import USER_ERRORS, one_line
from tests.each import each

COMMAND = ["explain", "nonsense", "--grid", "14x14", "--no-picture"]


@pytest.mark.parametrize("shown", ["", "0", "1"])
def test_a_bad_value_is_one_line_and_its_traceback_shows_on_demand(shown, monkeypatch, capsys):
    monkeypatch.setenv("SPARSEPRIOR_TRACEBACK", shown)
    assert __main__.main(COMMAND) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("python -m hf_sparseprior explain: ") and "nonsense" in lines[-1]
    assert (len(lines) > 1 and lines[0].startswith("Traceback")) if shown == "1" else len(lines) == 1


@each("mistake", [TypeError, AttributeError, KeyError, AssertionError, RuntimeError])
def test_a_mistake_of_the_program_keeps_its_traceback(mistake, monkeypatch):
    def broken(arguments):
        raise mistake("a slip")

    monkeypatch.setattr(explain, "run", broken)
    with pytest.raises(mistake, match="a slip"):
        __main__.main(COMMAND)


def test_errors_without_text_and_of_data_loaders():
    assert one_line(MemoryError()) == "MemoryError"
    assert MemoryError in USER_ERRORS and TypeError not in USER_ERRORS
    worker = "Caught ValueError in DataLoader worker process 0.\nTraceback ...\nValueError: cat.png is damaged: twice"
    assert one_line(ValueError(worker)) == "cat.png is damaged: twice"
