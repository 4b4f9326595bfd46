"""The workflows of .github: they fit their schema, and what they run is here. They run on a server alone."""

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import release

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FILES}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]


def steps(name, job):
    return WORKFLOWS[name]["jobs"][job]["steps"]


def commands(name, job):
    """Words of each command of a job, once for each value of its matrix."""
    matrix = WORKFLOWS[name]["jobs"][job].get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        for step in steps(name, job):
            text = step.get("run", "")
            for key, value in zip(matrix, values, strict=True):
                text = text.replace(f"${{{{ matrix.{key} }}}}", value)
            assert "${{" not in text, text
            yield from (shlex.split(line) for line in text.splitlines() if line.strip())


def validate(*files):
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: make install")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(words, capture_output=True, text=True)


def test_they_fit_the_schema():
    done = validate(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in FILES} == {"docs", "tests", "wheels"}


@pytest.mark.parametrize(("right", "wrong"), [("runs-on:", "run-on:"), ("  contents: read", "  contents: all")])
def test_a_mistake_is_seen(right, wrong, tmp_path):
    text = FILES[0].read_text()
    assert right in text
    (tmp_path / "wrong.yml").write_text(text.replace(right, wrong))
    assert validate(tmp_path / "wrong.yml").returncode == 1


@pytest.mark.parametrize("name", WORKFLOWS)
def test_they_may_read_alone_and_older_runs_end(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["cancel-in-progress"] is True
    assert not any("permissions" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_jobs_end_and_name_the_major_version_of_actions(name, job):
    assert 0 < WORKFLOWS[name]["jobs"][job]["timeout-minutes"] <= 300
    for step in steps(name, job):
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step
    (python,) = (step["with"] for step in steps(name, job) if "setup-python" in step.get("uses", ""))
    assert python["cache"] == "pip" and all((ROOT / file).is_file() for file in python["cache-dependency-path"].split())
    assert "3.11" in python["python-version"].split()


def targets():
    """The targets of the Makefile that are no files."""
    lines = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for line in lines for target in line.split()}


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_what_they_run_is_here(name, job):
    installed = set()
    for program, *words in commands(name, job):
        if program == "make":
            for word in words:
                variable, given, value = word.partition("=")
                assert given or word in targets(), word
                known = {"CHECKS": release.CHECKS, "PYTHON": {f"python{version}" for version in release.PYTHONS}}
                assert not given or set(value.split()) <= set(known[variable]), word
        elif words[:1] == ["-m"]:
            module = words[1]
            if module == "pip":
                installed |= {re.split(r"[<>=\[]", word)[0] for word in words}
            assert module in installed or importlib.util.find_spec(module), module
            paths = [word for word in words if word.startswith("tests/")]
            assert all((ROOT / path).exists() for path in paths) and (paths or module != "pytest")
        elif words[:1] == ["-c"]:
            assert program == ".venv/bin/python"
            compile(words[1], "workflow", "exec")
        else:
            assert os.access(ROOT / program, os.X_OK) and not words, program


def test_every_system_and_version_has_a_job():
    checks = WORKFLOWS["tests"]["jobs"]["versions"]["strategy"]["matrix"]["check"]
    assert {"minimum", "newest", *(f"python{version}" for version in release.PYTHONS)} == set(checks)
    assert PROJECT["project"]["requires-python"] == f">={release.PYTHONS[0]}"
    used = {WORKFLOWS["tests"]["jobs"][job]["runs-on"].split("-")[0] for job in WORKFLOWS["tests"]["jobs"]}
    assert used == {"ubuntu", "macos", "windows"}


def test_cibuildwheel_makes_the_wheel_of_a_release():
    settings = PROJECT["tool"]["cibuildwheel"]
    image = settings["manylinux-x86_64-image"]
    assert f"{image}_x86_64" == release.PLATFORM and settings["build"] == "cp311-manylinux_x86_64"
    assert settings["environment"] == {"SPARSEPRIOR_WHEEL": "compiled"}
    program, option, code = shlex.split(settings["test-command"])
    assert (program, option) == ("python", "-c")
    compile(code, "test-command", "exec")
