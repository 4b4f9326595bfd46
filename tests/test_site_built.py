"""The built site opens from disk: search, code that is not cut, notebooks with what their cells printed and drew."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.app_browser import SECONDS, Page, why_not

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install '.[docs]'")
pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
WIDTH = 1300  # of a window in which no line of code may be cut
CUT = """
return [...document.querySelectorAll("pre > code")].filter((code) => code.scrollWidth > code.clientWidth + 1)
    .map((code) => code.innerText)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without the outputs of notebooks, which take a minute."""
    place = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    given = {key: value for key, value in os.environ.items() if key != "SPARSEPRIOR_NOTEBOOKS"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr[-4000:]
    return place


@pytest.fixture(scope="module")
def notebooks():
    """The hook that makes pages of notebooks."""
    spec = importlib.util.spec_from_file_location("site_notebooks", ROOT / "docs" / "site" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_notebook_becomes_a_page_with_what_it_printed_and_drew(notebooks, tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell("# Two cells\n\nA text."),
        nbformat.v4.new_code_cell("print(6 * 7)\n'a value'"),
        nbformat.v4.new_code_cell("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"),
    ]
    path = tmp_path / "two.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    pictures = {}
    page = notebooks.page("two", notebooks.executed(path), pictures)
    assert page.startswith("# Two cells\n") and "A text." in page
    assert "```text\n42\n```" in page and "```text\n'a value'\n```" in page
    ((place, content),) = pictures.items()
    assert f"]({Path(place).name})" in page and content.startswith(b"\x89PNG")
    assert notebooks.NOT_RUN not in page
    assert notebooks.NOT_RUN in notebooks.page("two", nbformat.read(path, as_version=4), {})


@pytest.mark.slow
def test_a_cell_that_fails_ends_the_build(notebooks, tmp_path):
    path = tmp_path / "bad.ipynb"
    cells = [nbformat.v4.new_markdown_cell("# Bad"), nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.executed(path)


@pytest.mark.slow
def test_every_notebook_has_its_page_and_links_lead_there(site):
    for path in NOTEBOOKS:
        text = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert f'href="{path.name}"' in text and (site / "notebooks" / path.name).is_file()
    linked = re.findall(r'href="[^"]*notebooks/(\w+)\.(\w+)"', (site / "how-to" / "adapters.html").read_text())
    assert ("adapters", "html") in linked and all(kind == "html" for _, kind in linked)


@pytest.mark.slow
def test_pages_ask_no_server(site):
    for path in site.rglob("*.html"):
        assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://', path.read_text()), path


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_search_works_from_disk_and_no_code_is_cut(site):
    cut = {}
    with Page(f"file://{site}/index.html", width=WIDTH) as page:
        page.driver.find_element("css selector", ".md-search__input").send_keys("hilbert")
        end, links = time.monotonic() + SECONDS, []
        while not links and time.monotonic() < end:
            time.sleep(0.2)
            links = [link.get_attribute("href") for link in page.all(".md-search-result__link")]
        assert links and all(link.startswith("file://") for link in links)
        assert not re.match(r"(tasks|claims|results)\b", links[0].removeprefix(f"file://{site}/"))  # these come last
        for place in sorted([*site.glob("how-to/*.html"), *site.glob("*.html"), *site.glob("notebooks/*.html")]):
            page.driver.get(f"file://{place}")
            if lines := page.driver.execute_script(CUT):
                cut[place.name] = lines
    assert not cut
