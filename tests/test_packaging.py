"""What an installation brings: the library with its kernels' sources and its types, and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """Names of the files in the wheel of a copy of this checkout."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    assert setuptools
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "outputs", "build")
    for name in ("hf_sparseprior", "tasks"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check"]  # nothing is asked of the network
    # Compiled ones are `make release-check`'s.
    environment = {**os.environ, "SPARSEPRIOR_WHEEL": "pure"}
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "source")], check=True, capture_output=True, env=environment
    )
    assert [path.name.split("-", 2)[2] for path in folder.glob("*.whl")] == ["py3-none-any.whl"]
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"hf_sparseprior"}


def test_the_wheel_holds_every_file_of_the_library(wheel):
    suffixes = (".py", ".cpp", ".h", "py.typed")
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hf_sparseprior").rglob("*")
        if path.name.endswith(suffixes) and "__pycache__" not in path.parts
    }
    assert {"hf_sparseprior/py.typed", "hf_sparseprior/kernels/vectors.h"} <= expected
    assert {name for name in wheel if ".dist-info/" not in name} == expected


def test_citation_and_version_agree():
    from hf_sparseprior import __version__

    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {__version__}" in lines and "license: Apache-2.0" in lines
