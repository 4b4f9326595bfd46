"""A process of pytest-xdist that dies costs one test: the others run once each, and the run ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests.scheduling import FileScheduling

def pytest_xdist_make_scheduler(config, log):
    return FileScheduling(config, log)
"""
MODULE = """
import os, pathlib, signal, pytest

@pytest.mark.parametrize("number", range({number}))
def test(number):
    with open({log!r}, "a") as file:
        print(pathlib.Path(__file__).stem, number, file=file)
    if number in {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "files",
    [
        [(6, []), (6, [3]), (6, []), (6, [])],
        [(2, [1]), (2, [])],
        [(1, [0])],
        [(1, [0]), (1, []), (1, [0]), (1, [])],
        [(3, []), (4, [0, 3])],
    ],
    ids=["middle", "last_of_a_file", "only_test", "files_of_one", "twice"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_dies_costs_one_test(files, processes, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(Path(__file__).parents[1])))
    log = tmp_path / "log"
    for i, (number, dies) in enumerate(files):
        (tmp_path / f"test_{i}.py").write_text(MODULE.format(number=number, dies=dies, log=str(log)))
    options = f"-p xdist -n {processes} --dist loadfile --no-loadscope-reorder -p no:cacheprovider".split()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert run.returncode == 1, run.stdout + run.stderr
    expected = [f"test_{i} {k}" for i, (number, _) in enumerate(files) for k in range(number)]
    assert sorted(log.read_text().split("\n")[:-1]) == sorted(expected)
    died = sum(len(dies) for _, dies in files)
    passed = len(expected) - died
    assert f"{died} failed" in run.stdout.splitlines()[-1]
    assert not passed or f"{passed} passed" in run.stdout.splitlines()[-1]
