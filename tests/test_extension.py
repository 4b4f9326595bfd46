"""What the how-to pages add is tested by tests that do not know it, and nothing fails but the row that documents it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pasted import ADDED, DOCUMENTS, blocks, failures

ROOT = Path(__file__).parents[1]


def test_the_pages_add_what_is_expected():
    """A support of offsets, one of pairs, a decay, a backend and a family; another page would be pasted, too."""
    text = "".join(blocks().values())
    assert all(f'"{name}"' in text for name in ADDED) and len(re.findall(r"sp\.register_", text)) == len(ADDED)


def run_pasted(*words):
    """What a run of these tests prints, with what the pages add."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.pasted", "-p", "no:cacheprovider", "-q", "-rfE", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_cases_of_what_the_pages_add_fail_nothing_but_their_rows():
    output = run_pasted("--sample=4", "-m", "not slow", "-k", " or ".join(ADDED), "tests")
    assert failures(output) == DOCUMENTS and int(re.search(r"(\d+) passed", output)[1]) > 100, output[-3000:]


@pytest.mark.slow
def test_the_task_of_the_page_keeps_the_contract():
    output = run_pasted("-k", "turned", "tests/tasks/test_contract.py")
    assert not failures(output) and int(re.search(r"(\d+) passed", output)[1]) >= 10, output[-3000:]
