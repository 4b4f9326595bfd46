"""docs/results.md: it is what the records say, has every comparison once, and shows the numbers of their tables."""

import re
import shutil

import pytest

from tasks.claims import results
from tasks.claims.page import ROOT
from tests.each import each

PAGE = (ROOT / results.PAGE).read_text(encoding="utf-8")


def test_the_page_is_what_the_records_say(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_says_something_else_is_found(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        shutil.copytree(ROOT / "tasks/heads/results/masks", tmp_path / f"tasks/heads/results/{name}")
    entry = "tasks/heads/results/{}: {{what: Masks, text: tasks/heads/README.md}}\n"
    (tmp_path / "configs").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / results.COMPARISONS).write_text(entry.format("a"))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.main([]) == 2 and "tasks/heads/results/b has no entry" in capsys.readouterr().err
    (tmp_path / results.COMPARISONS).write_text(entry.format("a") + entry.format("b") + entry.format("c"))
    assert results.main([]) == 2 and "tasks/heads/results/c has no records" in capsys.readouterr().err
    (tmp_path / results.COMPARISONS).write_text(entry.format("a") + entry.format("b"))
    assert results.main(["--check"]) == 2 and results.main([]) == 0 == results.main(["--check"])
    page = tmp_path / results.PAGE
    page.write_text(page.read_text().replace("Masks", "Boxes", 1))
    assert results.main(["--check"]) == 2 and "docs/results.md is not what" in capsys.readouterr().err


def test_the_contents_lead_to_every_task_and_every_comparison():
    """The counts are those of the records, and every link has its place on the page."""
    head, *tasks = re.split(r"\n## ", PAGE)
    rows = re.findall(r"^\| \[(\w+)\]\(#\1\) \| .* \| (\d+) \| (\d+) \|", tasks[0], re.M)
    contents = {name: cells for name, *cells in rows}
    assert len(head.split()) < 250 and "claims/judging.md" in head
    comparisons = results.read_comparisons(ROOT)
    assert list(contents) == [text.partition("\n")[0] for text in tasks[1:]]
    for text in tasks[1:]:
        name, index = text.partition("\n")[0], text.partition("<a id=")[0]
        own = [one for one in comparisons if one.task == name]
        assert re.findall(r"\(#(.*?)\)", index) == [one.anchor for one in own]
        assert all(f'<a id="{one.anchor}"></a>' in text for one in own)
        runs = [seeds for one in own for seeds in results.read_records(ROOT / one.folder).values()]
        assert contents[name] == [str(len(own)), str(sum(map(len, runs)))]


def test_a_task_that_the_page_does_not_know_is_refused(tmp_path):
    shutil.copytree(ROOT / "tasks/heads/results/masks", tmp_path / "tasks/unknown/results/a")
    (tmp_path / "configs").mkdir()
    (tmp_path / results.COMPARISONS).write_text("tasks/unknown/results/a: {what: Masks, text: README.md}\n")
    with pytest.raises(ValueError, match="the task 'unknown' must be one of classification, "):
        results.read_comparisons(tmp_path)


@each("one", results.read_comparisons(ROOT))
def test_numbers_are_those_of_the_table_of_the_runs(one):
    """Every cell of the page's tables is a cell of the folder's table, in the row of the same name."""
    section = re.split(r"\n##+ ", PAGE.split(f'<a id="{one.anchor}"></a>')[1])[1]
    shown = [line.strip("| ").split(" | ") for line in re.findall(r"^\| .*$", section, re.MULTILINE)]
    table = ROOT / one.folder / "table.md"
    if not table.is_file():
        assert not shown
        return
    rows = [line.strip("| ").split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")]
    assert len(shown) == len(rows) > 0
    for own, row in zip(shown, rows, strict=True):
        assert own[0].startswith("minus ") or own[0] == row[0]
        assert set(own[1:]) <= set(row) and len(own) > 2


def test_columns_are_left_out_and_metrics_keep_their_names():
    text = (
        "| row | minus dense, points, by seed | mean |\n|---|---|---|\n| b | +1.00 | +1.00 |\n\nA rule.\n\n"
        "test mask AP:\n\n| prior | test | parameters |\n|---|---|---|\n| a | 2.00 | 7 |"
    )
    assert results.short_tables(text) == [
        "| minus dense | mean |\n|---|---|\n| b | +1.00 |",
        "test mask AP:",
        "| prior | test |\n|---|---|\n| a | 2.00 |",
    ]
