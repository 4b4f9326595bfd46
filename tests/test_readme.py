"""The README stays true: names, files and commands that it mentions exist."""

import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.models.configuration_sparseprior_vit import PRESETS
from hf_sparseprior.patterns.curves import CURVES
from hf_sparseprior.patterns.decay import DECAYS, INIT_PRESETS, PLACEMENTS
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import MASK_FILLS, SUPPORTS
from tasks.common.records import read_records
from tests.each import each

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (
    ROOT / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "tasks").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)

EXISTS = (ROOT / "docs" / "what-works.md").read_text().partition("<!-- made by")[0]  # the part by hand
NAMES = [*SUPPORTS, *SEQUENCES, *DECAYS, *CURVES, *INIT_PRESETS, *PLACEMENTS, *EXTRAS, *MASK_FILLS, *ops.BACKENDS]


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_name_is_in_the_table_of_what_exists(name):
    assert f"`{name}`" in EXISTS


def modules_that_run() -> Iterator[str]:
    """What `python -m` takes, without the folder of its task."""
    for package in ("hf_sparseprior", "tasks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if 'if __name__ == "__main__":' in path.read_text():
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def test_every_command_is_in_the_table_of_what_exists():
    table = EXISTS.partition("### Commands\n")[2].partition("\n## ")[0]
    named, folder = set(), ""
    for text in re.findall(r"`([^`]*)`", table):
        if found := re.match(r"python -m (hf_sparseprior|tasks(?:\.\w+)+)", text):
            folder = found[1].rpartition(".")[0]
            named.add(found[1])
        else:
            named.add(f"{folder}.{text}")
    missing = {module for module in modules_that_run() if module not in named}
    assert not missing and len(named) > 50


LINK = re.compile(r'\]\(([^)\s]+)(?: "[^"]*")?\)|<(?:a|img)\b[^>]*? (?:href|src)="([^"]+)"')


def prose(text: str) -> str:
    """A page without code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """What `#...` may name: the headings, as GitHub writes them, and anchors in HTML."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S), re.MULTILINE):
        name = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        found.add(next(new for new in (name, *(f"{name}-{n}" for n in range(1, 100))) if new not in found))
    return found | set(re.findall(r'<a id="([^"]+)"></a>', prose(text)))


def dead_links(folder: Path, text: str) -> list[str]:
    """Links and pictures of a page in this folder that lead to no file, or to no heading of a page."""
    dead = []
    for link in ("".join(groups) for groups in LINK.findall(prose(text))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name
        if not target.exists():
            dead.append(link)
        elif anchor and (not name or target.suffix == ".md"):
            there = target.read_text() if name else text
            if anchor not in anchors(there):
                dead.append(link)
    return dead


@each("page", [path.relative_to(ROOT) for path in PAGES])
def test_no_link_anchor_or_picture_is_dead(page):
    assert dead_links((ROOT / page).parent, (ROOT / page).read_text()) == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text(
        '# A `b`, c-d\n## Same\n## Same\n```bash\n# no heading\n```\n1. <a id="in-a-list"></a>d\n'
    )
    alive = [
        *("other.md", "other.md#a-b-c-d", "other.md#same", "other.md#same-1", "#here"),
        *("https://example.org/x#y", "mailto:a@b.c", ".", "other.md#in-a-list"),
    ]
    dead = ["none.md", "none.png", "other.md#no-heading", "other.md#same-2", "#there", "none.md#same"]
    for form in ("[text]({})", "![picture]({})", 'see [a](other.md), [b]({} "title").', '<img width="3" src="{}">'):
        text = "# Here\n" + "\n".join(form.format(link) for link in (*alive, *dead)) + "\n`[code](none.md)`\n"
        assert dead_links(tmp_path, text) == dead, form


def linked_pages(page: Path) -> set[Path]:
    """Pages of the repository that a page links to; a folder stands for its README."""
    links = ("".join(groups).partition("#")[0] for groups in LINK.findall(prose(page.read_text())))
    targets = ((page.parent / link).resolve() for link in links if link and not re.match(r"\w+:", link))
    return {target / "README.md" if target.is_dir() else target for target in targets}


def test_every_page_of_docs_is_two_clicks_from_the_readme():
    first = {page for page in linked_pages(ROOT / "README.md") if page.suffix == ".md"}
    second = set[Path]().union(*map(linked_pages, first))
    docs = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    assert len(docs) > 40 and sorted(map(str, docs - first - second)) == []


def test_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [re.search(rf"{name}>=([\d.]+)", " ".join(project["dependencies"])) for name in ("torch", "transformers")]
    torch, transformers = (found.group(1) for found in asked)
    python = project["requires-python"].removeprefix(">=")
    assert f"Python {python}, torch {torch}, transformers {transformers}, or newer" in README


def test_the_page_on_installing_has_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = next(text for text in sections(ROOT / "docs" / "install.md") if text.startswith("Extras"))
    rows = [row.split("|")[1] for _, *rows in tables(section) for row in rows]
    assert sorted(name for cell in rows for name in re.findall(r"`(\w+)`", cell)) == sorted(extras)


def test_make_targets_exist():
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in (README, (ROOT / "docs" / "install.md").read_text()):
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page, re.MULTILINE))
        assert named and named <= set(" ".join(rules).split())
    assert "make test" in (ROOT / ".ci" / "run").read_text() and "make test" in README


def test_the_preset_of_the_example_exists():
    assert re.search(r'from_preset\(\s*"(\w+)"', README).group(1) in PRESETS


# ---- measured numbers -----------------------------------------------------------------------------------------------

READMES = (
    ROOT / "README.md",
    ROOT / "docs" / "ambiguities.md",
    ROOT / "docs" / "choose.md",
    ROOT / "docs" / "demo.md",
    ROOT / "docs" / "results-in-words.md",
    *(page for page in ROOT.glob("tasks/*/*.md") if page.name != "RESULTS.md"),
    *ROOT.glob("tasks/*/*/README.md"),
)
RESULTS = tuple(ROOT.glob("tasks/*/RESULTS.md"))
SPREAD = re.compile(r"(-?\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")
MEASURED = re.compile(r"\b(seconds|ms|s a run|times faster|GiB|MB|images a second)\b")  # in the first line of a table
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def sections(page: Path) -> Iterator[str]:
    """The parts of a page from one heading to the next."""
    return iter(re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE))


def linked_records(page: Path, section: str) -> list[Path]:
    """The records that a section links to: RESULTS.md files and tables of runs.

    What tests/tasks/video/test_evidence.py compares with its records is one too.
    """
    links = (page.parent / link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", section))
    return [link.resolve() for link in links if link.name in ("RESULTS.md", "table.md", "MOTION.md") and link.is_file()]


def tables(section: str) -> Iterator[list[str]]:
    """The Markdown tables of a section, line by line, without the line below the first."""
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        first, _, *rows = block.splitlines()
        yield [first, *rows]


def strays(page: Path, section: str) -> list[str]:
    """Measured numbers of a section that no record has: spreads anywhere, and whole rows of tables of measurements.

    A row is in a record if all of its numbers are in one line there.
    """
    lines = [line for record in linked_records(page, section) for line in record.read_text().splitlines()]
    known = [match for line in lines for match in SPREAD.findall(line)]
    found = []
    for spread in SPREAD.findall(section):
        digits = [len(number.partition(".")[2]) for number in spread]
        rounded = {tuple(f"{float(n):.{d}f}" for n, d in zip(pair, digits, strict=True)) for pair in known}
        if spread not in rounded:
            found.append(" ± ".join(spread))
    for first, *rows in tables(section):
        if MEASURED.search(first) or any("±" in row for row in rows):
            numbers = ([NUMBER.findall(row), row] for row in rows)
            found += [row for wanted, row in numbers if not any({*wanted} <= {*NUMBER.findall(line)} for line in lines)]
    return found


@each("page", READMES)
def test_measured_numbers_are_those_of_a_record_that_is_linked_next_to_them(page):
    assert [stray for section in sections(page) for stray in strays(page, section)] == []


def test_a_number_that_is_changed_on_one_side_is_found():
    demo, words = ROOT / "docs" / "demo.md", ROOT / "docs" / "results-in-words.md"
    rows = next(section for section in sections(words) if section.startswith("What came out"))
    for page, section, change in (
        (demo, next(section for section in sections(demo) if "105782" in section), ("105782", "105783")),
        (words, rows, ("± 0.8", "± 0.9")),
    ):
        changed = section.replace(*change, 1)
        assert strays(page, section) == [] and section != changed
        assert strays(page, changed) != []


FOLDERS = sorted(path.parent for path in ROOT.glob("tasks/*/results/*/table.md"))


JUDGED = (
    *("test_accuracy", "test_knn_accuracy", "test_mIoU", "test_coco/bbox_mAP"),
    *("test_box_mAP", "test_mask_mAP"),
)


def accuracy(record: Mapping[str, Any]) -> float:
    """Of a record: what its task is judged by, on the test images."""
    return next(float(record["metrics"][name]) for name in JUDGED if name in record["metrics"])


def runs_of(folder: Path) -> dict[str, list[float]]:
    """Accuracies in percent of every row of a folder of records."""
    return {row: [100 * accuracy(run) for run in runs.values()] for row, runs in read_records(folder).items()}


def accuracies(folder: Path) -> dict[str, tuple[float, float]]:
    """Mean and spread of every row of a folder of records, from what its runs say. A single run has no spread."""
    return {row: (statistics.mean(v), statistics.stdev(v)) for row, v in runs_of(folder).items() if len(v) > 1}


@each("folder", FOLDERS)
def test_tables_of_records_are_those_of_their_runs(folder):
    first, *_differences = (folder / "table.md").read_text().split("\n\n")
    rows = [line.split(" | ")[:2] for line in first.splitlines() if SPREAD.search(line)]
    shown = {name.removeprefix("| "): SPREAD.search(cell).groups() for name, cell in rows}
    whole = max(map(len, runs_of(folder).values()), default=0)
    # A row of a sweep that goes on has fewer runs than the others, and may have no place in the table yet.
    assert {name for name, runs in runs_of(folder).items() if len(runs) == whole > 1} <= set(shown)
    assert {name: tuple(map(float, pair)) for name, pair in shown.items()} == {
        name: pytest.approx(pair, abs=0.0051) for name, pair in accuracies(folder).items() if name in shown
    }


@each("page", RESULTS)
def test_accuracies_of_results_pages_are_those_of_runs(page):
    """Columns of test accuracies; each is a row of some folder of records."""
    known = {f"{mean:.2f} ± {std:.2f}" for folder in FOLDERS for mean, std in accuracies(folder).values()}
    for folder in FOLDERS:
        known |= {
            f"{mean:.2f} ± {std:.2f} ({len(runs_of(folder)[row])} seeds)"
            for row, (mean, std) in accuracies(folder).items()
        }
    known |= {", ".join(f"{one:.2f}" for one in runs) for folder in FOLDERS for runs in runs_of(folder).values()}
    for section in sections(page):
        for first, *rows in tables(section):
            for column, name in enumerate(first.split("|")):
                if name.strip().startswith("test accuracy"):
                    cells = [row.split("|")[column].strip() for row in rows]
                    assert [cell for cell in cells if cell not in known] == []


def test_there_are_records_and_pages_that_show_them():
    assert len(FOLDERS) >= 7 and len(RESULTS) == 2 and len(READMES) >= 8
    shown = [section for page in READMES for section in sections(page) if linked_records(page, section)]
    assert sum(bool(SPREAD.search(section)) for section in shown) >= 2
