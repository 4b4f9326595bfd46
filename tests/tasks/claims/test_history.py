"""When claims were written, by the history of a repository."""

import copy
import json
import shutil
import subprocess

import pytest
import yaml

from tasks.claims import history, page
from tasks.claims.claim import AFTER, TIERS, read_papers
from tasks.common.records import add_records, convert
from tests.tasks.claims.test_claims import GOOD, METRIC

ROOT_COMMIT = "958df97b1f3988cfe85c30d13018447fc4e7f3dd"  # of the history that the claims tell of
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def commit(root) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    history.git(root, "add", "-A")
    history.git(root, *who, "commit", "--quiet", "--message", "a")


@pytest.fixture(scope="module", params=["a", "none"])
def original(tmp_path_factory, request):
    """The first claim was written before its runs, the second among them, the third after them."""
    root = tmp_path_factory.mktemp("history")
    (root / page.CLAIMS).mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    content = copy.deepcopy(GOOD)
    first = content["claims"]["table1-a"]

    def write_claims() -> None:
        (root / page.CLAIMS / "paper.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        commit(root)

    def write_records(row: str) -> None:
        """The rows of before as they once were, a file for each run; those that follow in one file."""
        for seed in range(TIERS["A"]):
            record = {"seed": seed, "metrics": {METRIC: 0.5}, "seconds": 1, "hardware": {"cpu_threads": 1}}
            if request.param == row:
                (root / "r" / row).mkdir(parents=True, exist_ok=True)
                (root / "r" / row / f"seed{seed}.json").write_text(json.dumps(record), encoding="utf-8")
            else:
                add_records(root / "r", [(row, record)])
        commit(root)

    write_claims()
    write_records("a")
    content["claims"]["table1-b"] = {**first, "where": "Table 4"}
    write_claims()
    write_records("b")
    content["claims"]["table1-c"] = {**first, "where": "Table 5"}
    write_claims()
    # A file that is no YAML, and what is removed and written again, change nothing.
    (root / page.CLAIMS / "broken.yaml").write_text("claims: a: b", encoding="utf-8")
    commit(root)
    (root / page.CLAIMS / "broken.yaml").unlink()
    kept = (root / "r" / "records.jsonl").read_text(encoding="utf-8")
    (root / "r" / "records.jsonl").unlink()
    commit(root)
    convert(root / "r")
    (root / "r" / "records.jsonl").write_text(kept, encoding="utf-8")
    commit(root)
    return root


@pytest.fixture
def repository(original, tmp_path):
    return shutil.copytree(original, tmp_path / "repository")


def test_a_claim_is_as_old_as_its_name_and_a_record_as_its_first_file(repository) -> None:
    papers = read_papers(repository / page.CLAIMS)
    assert history.written_after(papers, repository) == [("paper", "table1-c")]


def test_a_claim_that_is_not_committed_yet_was_written_last(repository) -> None:
    file = repository / page.CLAIMS / "paper.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["claims"]["table9-d"] = {**content["claims"]["table1-a"], "where": "Table 9"}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = [("paper", "table1-c"), ("paper", "table9-d")]
    assert history.written_after(read_papers(repository / page.CLAIMS), repository) == found
    commit(repository)
    assert history.written_after(read_papers(repository / page.CLAIMS), repository) == found


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
    assert page.paper_text(papers[0], outcomes).count(f"** {page.WRITTEN_AFTER} | [") == 2  # how each was tried


def test_without_a_whole_history_it_says_so(repository, tmp_path, monkeypatch, capsys) -> None:
    clone = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone)], check=True)
    monkeypatch.setattr(history, "ROOT", clone)
    assert history.main([]) == 2
    assert "is a shallow clone; git fetch --unshallow" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"git rev-parse in .*none: "):
        history.places(tmp_path / "none")


def test_claims_of_this_repository_say_when_they_were_written(capsys) -> None:
    try:
        history.git(page.ROOT, "merge-base", "--is-ancestor", ROOT_COMMIT, "HEAD")
        history.places(page.ROOT)
    except ValueError as error:
        pytest.skip(f"not with the history that it is about: {error}")
    assert history.main(["--check"]) == 0, capsys.readouterr().err
