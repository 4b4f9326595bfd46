"""`make release-check`: the package from an index on this machine, a Space, and the one address of the project."""

import email
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest
import yaml

from hf_sparseprior.base.version import ADDRESS, __version__
from tests import address, app_browser, release, release_index
from tests.processes import ROOT


@pytest.mark.slow
def test_it_installs_from_an_index_and_its_commands_run(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "outputs", "build")
    shutil.copytree(ROOT / "hf_sparseprior", source / "hf_sparseprior", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = release_index.index_of_checkout(tmp_path / "index", source)
    assert wheel.name == f"hf_sparseprior-{__version__}-py3-none-any.whl"
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    release_index.borrow_packages(python)
    with release_index.served_index(tmp_path / "index") as index:
        with pytest.raises(AssertionError, match="No matching distribution"):
            release_index.install_from(index, python, "hf_sparseprior==99")
        release_index.install_from(index, python)
    (tmp_path / "work").mkdir()
    said = release_index.try_installed(python, tmp_path / "work")
    assert f"sparseprior {__version__}" in said and "test_accuracy" in said


def test_release_check_knows_the_index_and_the_space():
    text = (ROOT / "docs" / "releasing.md").read_text()
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {"index", "space"} <= {*release.CHECKS} and {"index", "space"} <= rows


def test_a_space_has_what_spaces_read(tmp_path):
    gradio = pytest.importorskip("gradio")
    assert release_index.write_space(tmp_path / "space") == ["README.md", "app.py", "requirements.txt"]
    _, head, text = (tmp_path / "space" / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert (about["sdk"], about["sdk_version"], about["app_file"]) == ("gradio", gradio.__version__, "app.py")
    colors = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}  # that Spaces know
    assert {about["colorFrom"], about["colorTo"]} <= colors and len(about["short_description"]) <= 60
    assert (tmp_path / "space" / "requirements.txt").read_text() == f"hf_sparseprior[app]=={__version__}\n"
    assert "\n# " in text and __version__ in text


@pytest.mark.slow
def test_a_space_starts(tmp_path):
    pytest.importorskip("gradio")
    release_index.write_space(tmp_path / "space")
    assert "hf_sparseprior" in started(tmp_path / "space")


def started(folder: Path) -> str:
    """The page of a Space, which is started as Spaces do: `python app.py` with the port in the environment."""
    port = app_browser.free_port()
    variables = {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    log = folder / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, "app.py"]
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 120
        while "Running on local URL" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
            return page.read().decode()
    finally:
        process.terminate()
        process.wait(30)


# ---- one address ----------------------------------------------------------------------------------------------------

SOMEWHERE = "https://example.org/owner/name"


def test_files_have_the_links_that_the_address_gives():
    for name, text in address.documents(ADDRESS).items():
        assert (ROOT / name).read_text() == text, f"{name}: python -m tests.address"


def test_links_are_written_and_taken_away_again(tmp_path):
    for name in ("README.md", "CITATION.cff", "mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    bare = address.documents(None, tmp_path)
    assert not any(SOMEWHERE in text for text in bare.values())
    linked = address.documents(SOMEWHERE, tmp_path)
    for name, text in linked.items():
        (tmp_path / name).write_text(text)
    assert address.documents(SOMEWHERE, tmp_path) == linked and address.documents(None, tmp_path) == bare
    title, links = linked["README.md"].split("\n\n")[:2]
    assert title.startswith("# ") and f"]({SOMEWHERE}/tree/main/docs)" in links and "badge.svg" in links
    assert yaml.safe_load(linked["CITATION.cff"])["repository-code"] == SOMEWHERE
    assert f"\nrepo_url: {SOMEWHERE}\n" in linked["mkdocs.yml"]
    assert linked["README.md"].replace(links + "\n\n", "") == bare["README.md"]


@pytest.mark.parametrize("repository", [None, SOMEWHERE])
def test_the_urls_of_the_project_are_made_from_the_address(repository, tmp_path):
    """As setuptools reads them from setup.py and pyproject.toml."""
    (tmp_path / "hf_sparseprior" / "base").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("__init__.py", "base/__init__.py", "base/version.py"):
        shutil.copy(ROOT / "hf_sparseprior" / name, tmp_path / "hf_sparseprior" / name)
    shutil.copytree(ROOT / "hf_sparseprior" / "kernels", tmp_path / "hf_sparseprior" / "kernels")
    file = tmp_path / "hf_sparseprior" / "base" / "version.py"
    text = re.sub(r"^ADDRESS: .*$", f"ADDRESS: str | None = {repository!r}", file.read_text(), flags=re.MULTILINE)
    file.write_text(text)
    release_index.output([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=tmp_path)
    about = email.message_from_string((tmp_path / "hf_sparseprior.egg-info" / "PKG-INFO").read_text())
    urls = dict(line.split(", ") for line in about.get_all("Project-URL", []))
    assert about["Version"] == __version__
    if repository is None:
        assert urls == {}
    else:
        assert urls["Repository"] == repository and urls["Documentation"] == f"{repository}/tree/main/docs"


def test_the_citation_is_of_this_version():
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["version"] == __version__ and about["license"] == project["license"]
    assert about["title"].lower() == f"{project['name']}: {project['description']}".lower()
    dates = re.findall(rf"^## \[{re.escape(__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert [str(about["date-released"])] == dates
    assert about["cff-version"] == "1.2.0" and about["authors"] and about["message"]
