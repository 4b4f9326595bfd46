"""records.jsonl: what is shared stands once, and is there again for who reads; one file for each comparison."""

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common import records
from tasks.common.comparison_table import COVERAGE, label, table
from tasks.common.paired import difference_table, differences
from tasks.common.records import add_records, convert, read_records, records_text
from tests.each import each

ROOT = Path(__file__).parents[3]
FOLDERS = sorted(path.parent for path in ROOT.glob("tasks/*/results/**/records.jsonl"))
TABLES = [folder for folder in FOLDERS if (folder / "table.md").is_file()]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5]) | st.sampled_from(["", "a", "ä"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.dictionaries(st.sampled_from(["metrics", "config", "data"]), VALUES, max_size=3)


def record(seed, **parts):
    return {
        "seed": seed,
        "metrics": {"test_accuracy": 0.5},
        "config": {"model": {"prior": "dense", "width": 8}},
        **parts,
    }


@given(st.dictionaries(st.sampled_from(["dense", "a+b"]), st.dictionaries(st.integers(0, 9), RECORDS, max_size=4)))
def test_what_is_written_is_read_again_and_written_the_same(tmp_path_factory, given_records):
    folder = tmp_path_factory.mktemp("records")
    new = [(row, {"seed": seed, **own}) for row, runs in given_records.items() for seed, own in runs.items()]
    add_records(folder, new)
    found = read_records(folder)
    expected = {row: {run["seed"]: run for name, run in new if name == row} for row, _ in new}
    # As JSON, in which 1, 1.0 and true differ.
    assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    if new:
        text = (folder / "records.jsonl").read_text()
        assert records_text(found) == text == records_text(expected, list(found))


def test_what_most_runs_share_stands_once_and_a_line_may_say_otherwise(tmp_path):
    runs = [record(seed, data="digits", versions={"torch": "2.13", "own": str(seed)}) for seed in range(4)]
    runs[2]["versions"]["torch"] = "2.12"
    add_records(tmp_path, [("dense", run) for run in runs])
    head, *lines = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert head == {
        "shared": {
            "config": {"model": {"prior": "dense", "width": 8}}, "data": "digits", "metrics": {"test_accuracy": 0.5},
            "versions": {"torch": "2.13"},
        }
    }  # fmt: skip
    assert lines[1] == {"row": "dense", "seed": 1, "versions": {"own": "1"}}
    assert lines[2] == {"row": "dense", "seed": 2, "versions": {"own": "2", "torch": "2.12"}}
    assert read_records(tmp_path)["dense"] == dict(enumerate(runs))


def test_rows_stand_in_the_order_of_their_comparison_and_seeds_in_theirs(tmp_path):
    add_records(tmp_path, [("b", record(10)), ("old", record(0)), ("a", record(2))], ["a", "b"])
    add_records(tmp_path, [("b", record(9)), ("c", record(0))], ["a", "c", "b"])
    assert {row: list(runs) for row, runs in read_records(tmp_path).items()} == {
        "a": [2], "c": [0], "b": [9, 10], "old": [0],
    }  # fmt: skip
    assert list(read_records(tmp_path)) == ["a", "c", "b", "old"]


def test_the_same_record_again_writes_nothing_and_another_one_is_refused(tmp_path):
    add_records(tmp_path, [("dense", record(0)), ("dense", record(1))])
    file = tmp_path / "records.jsonl"
    before = file.read_bytes(), file.stat().st_mtime_ns
    add_records(tmp_path, [("dense", record(1)), ("dense", record(0))])
    add_records(tmp_path, [])
    with pytest.raises(ValueError, match="two records of dense, seed 1, which differ in metrics; keep one of them"):
        add_records(tmp_path, [("new", record(0)), ("dense", record(1, metrics={"test_accuracy": 0.6}))])
    assert before == (file.read_bytes(), file.stat().st_mtime_ns)
    # As when two branches were merged: lines that are the same are one, others are refused.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[-1]]))
    assert list(read_records(tmp_path)["dense"]) == [0, 1]
    file.write_text("".join([*lines, '{"row": "dense", "seed": 1, "steps": 3}\n']))
    with pytest.raises(ValueError, match="two records of dense, seed 1, which differ in steps"):
        read_records(tmp_path)


@each(
    "content, line",
    [
        ("", None),
        ('{"shared": {}}\n{"row": "dense", "seed": 0', 2),
        ("{}", 1),
        ('{"shared": 3}', 1),
        ('{"shared": {}}\n{"seed": 0}', 2),
        ('{"shared": {}}\n{"row": "dense"}', 2),
        ('{"shared": {}}\n[]', 2),
        ('{"shared": {}}\nnull', 2),
        ("text", 1),
        (b"\xff", 1),
    ],
)
def test_a_damaged_line_is_named(content, line, tmp_path):
    (tmp_path / "records.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    if line is None:
        assert read_records(tmp_path) == {}
        return
    way_out = "restore the file, all others need that line" if line == 1 else "remove it"
    with pytest.raises(ValueError, match=rf"^{tmp_path}/records.jsonl, line {line} is damaged \(.*\); {way_out}$"):
        read_records(tmp_path)


def _add(folder, seed):
    add_records(Path(folder), [("dense", record(seed)), ("violin", record(seed))])


def test_several_processes_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(str(tmp_path), seed)) for seed in range(12)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 12
    assert {row: list(runs) for row, runs in read_records(tmp_path).items()} == {
        "dense": list(range(12)), "violin": list(range(12)),
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_file_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    add_records(tmp_path, [("dense", record(0))])
    before = (tmp_path / "records.jsonl").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        add_records(tmp_path, [("dense", record(1))])
    assert (tmp_path / "records.jsonl").read_bytes() == before


# ---- records of earlier versions ------------------------------------------------------------------------------------


def leave_old(folder, row, seed, content):
    (folder / row).mkdir(parents=True, exist_ok=True)
    (folder / row / f"seed{seed}.json").write_text(json.dumps(content))


def test_records_of_earlier_versions_are_brought_in_and_other_files_stay(tmp_path, capsys):
    runs = {("violin", 0): record(0), ("violin", 10): record(10, data="x"), ("dense", 3): record(3)}
    for (row, seed), content in runs.items():
        leave_old(tmp_path, row, seed, content)
    (tmp_path / "summary.json").write_text(json.dumps({"violin": [], "dense": []}))
    for name in ("differences.json", "differences_segm_mAP.json", "mine.json", "table.md"):
        (tmp_path / name).write_text("{}")
    for other in ("seed01", "seed²", "seed-1", "seed1 (copy)"):
        (tmp_path / "violin" / f"{other}.json").write_text("{}")
    (tmp_path / "dense" / "seed3").mkdir()  # a run
    assert records.main([str(tmp_path)]) == 0
    assert "3 records of earlier versions brought into records.jsonl" in capsys.readouterr().out
    found = read_records(tmp_path)
    assert {(row, seed): own for row, own_runs in found.items() for seed, own in own_runs.items()} == runs
    assert list(found) == ["violin", "dense"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {
        "records.jsonl", "mine.json", "table.md", "dense", "dense/seed3", "violin", "violin/seed01.json",
        "violin/seed².json", "violin/seed-1.json", "violin/seed1 (copy).json",
    }  # fmt: skip
    assert records.main([str(tmp_path)]) == 0
    assert "no records of earlier versions" in capsys.readouterr().out


@each("content", ["", "[]", '{"metrics": {}', '{"seed": 1}', "null"])
def test_a_damaged_record_of_earlier_versions_is_named_and_nothing_moved(content, tmp_path):
    leave_old(tmp_path, "dense", 1, record(1))
    (tmp_path / "dense" / "seed0.json").write_text(content)
    with pytest.raises(ValueError, match=r"dense/seed0.json is (damaged|no record of its seed)"):
        convert(tmp_path)
    assert not (tmp_path / "records.jsonl").exists() and (tmp_path / "dense" / "seed1.json").is_file()


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert records.main([str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path}/nowhere is not a folder" in capsys.readouterr().err


# ---- the repository's own -------------------------------------------------------------------------------------------


def table_again(folder):
    """table.md from the records alone; of the old table: which rows, metrics and references it has."""
    text = (folder / "table.md").read_text()
    columns, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[0].splitlines()
    )
    kept = read_records(folder)
    results = {row: list(kept[row].values()) for row, *_ in lines}
    of = {f"{label(metric)}, %": metric for metric in results[lines[0][0]][0]["metrics"]}
    [metric] = [of[name] for name in of if columns[1] == name or columns[1].startswith(f"{name}, mean")]
    also = [of[name] for name in columns[2:] if name in of and of[name] not in COVERAGE]
    one_run = columns[1] in of  # the demo's, in which a mean of one says nothing
    parts = [table(results, metric, also).replace(", mean ± std of 1" if one_run else "", "")]
    if first := re.search("minus (.+?), points, by seed", text):
        named = dict(re.findall(r"^\| (.+?) \(minus (.+?)\) \|", text, re.MULTILINE))
        for name in (metric, *also):
            found = differences(results, {row: named.get(row, first[1]) for row in results}, name)
            parts += [f"{label(name)}:"] * bool(also and found) + [difference_table(found, first[1])] * bool(found)
    return "\n\n".join(parts) + "\n"


def test_every_table_of_a_comparison_is_what_its_records_say():
    assert len(TABLES) >= 60
    wrong = [folder.relative_to(ROOT) for folder in TABLES if table_again(folder) != (folder / "table.md").read_text()]
    assert not wrong


def test_every_file_of_records_is_as_it_would_be_written_again():
    wrong = [
        folder.relative_to(ROOT)
        for folder in FOLDERS
        if records_text(read_records(folder)) != (folder / "records.jsonl").read_text()
    ]
    assert not wrong
