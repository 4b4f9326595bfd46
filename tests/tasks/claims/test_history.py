"""When claims were written, by the history of a repository."""

import copy
import json
import shutil
import subprocess

import pytest
import yaml

from tasks.claims import history, page
from tasks.claims.claim import AFTER, TIERS, read_papers
from tests.tasks.claims.test_claims import GOOD, METRIC

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def commit(root) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    history.git(root, "add", "-A")
    history.git(root, *who, "commit", "--quiet", "--message", "a")


@pytest.fixture
def repository(tmp_path):
    """The first claim was written before its runs, the second among them, the third after them."""
    (tmp_path / page.CLAIMS).mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    content = copy.deepcopy(GOOD)
    first = content["claims"]["table1-a"]

    def write_claims() -> None:
        (tmp_path / page.CLAIMS / "paper.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        commit(tmp_path)

    def write_records(row: str) -> None:
        (tmp_path / "r" / row).mkdir(parents=True, exist_ok=True)
        for seed in range(TIERS["A"]):
            record = {"seed": seed, "metrics": {METRIC: 0.5}, "seconds": 1, "hardware": {"cpu_threads": 1}}
            (tmp_path / "r" / row / f"seed{seed}.json").write_text(json.dumps(record), encoding="utf-8")
        commit(tmp_path)

    write_claims()
    write_records("a")
    content["claims"]["table1-b"] = {**first, "where": "Table 4"}
    write_claims()
    write_records("b")
    content["claims"]["table1-c"] = {**first, "where": "Table 5"}
    write_claims()
    # What is written and removed again does not make it younger.
    (tmp_path / "r" / "b" / "seed0.json").unlink()
    commit(tmp_path)
    write_records("b")
    return tmp_path


def test_a_claim_is_as_old_as_its_name_and_a_record_as_its_first_file(repository) -> None:
    papers = read_papers(repository / page.CLAIMS)
    assert history.written_after(papers, repository) == [("paper", "table1-c")]


def test_claims_that_say_otherwise_are_refused(repository, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(history, "ROOT", repository)
    assert history.main([]) == 0 and capsys.readouterr().out == "paper table1-c\n"
    assert history.main(["--check"]) == 2
    assert "paper.yaml, table1-c does not say written: after its rows (1 such claims)" in capsys.readouterr().err
    file = repository / page.CLAIMS / "paper.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["claims"]["table1-c"]["written"] = AFTER
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert history.main(["--check"]) == 0
    content["claims"]["table1-a"]["written"] = AFTER
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert history.main(["--check"]) == 2
    assert "table1-a should not say written: after its rows" in capsys.readouterr().err
    papers = read_papers(repository / page.CLAIMS)
    outcomes = {(paper.name, claim.name): page.outcome(claim, repository) for paper in papers for claim in paper.claims}
    marked = [line for line in page.text(papers, outcomes).splitlines() if line.endswith(f"** {page.WRITTEN_AFTER} |")]
    assert not marked and page.text(papers, outcomes).count(f"** {page.WRITTEN_AFTER} | [") == 2


def test_without_a_whole_history_it_says_so(repository, tmp_path, monkeypatch, capsys) -> None:
    clone = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone)], check=True)
    monkeypatch.setattr(history, "ROOT", clone)
    assert history.main([]) == 2
    assert "is a shallow clone; git fetch --unshallow" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a git repository"):
        history.places(tmp_path.parent)


def test_claims_of_this_repository_say_when_they_were_written(capsys) -> None:
    try:
        history.places(page.ROOT)
    except ValueError as error:
        pytest.skip(f"no history: {error}")
    assert history.main(["--check"]) == 0, capsys.readouterr().err
