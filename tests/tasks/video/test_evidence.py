"""Tables of motion clips from records."""

import statistics
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

from hf_sparseprior.runs.metrics import pack_correct
from tasks.common.paired import differences
from tasks.common.records import add_records
from tasks.video.evidence import DIRECTION, PLAYING, by_video, compared, main, read_records, table
from tasks.video.motion import CLASSES
from tasks.video.rendered import SCENES

ROOT = Path(__file__).parents[3]
ROWS = {
    "dense": [(0.6, 0.9, 0.7, 0.8), (0.62, 0.92, 0.72, 0.81), (0.61, 0.91, 0.73, 0.82)],
    "sparse": [(0.5, 0.9, 0.5, 0.6), (0.53, 0.92, 0.53, 0.6), (0.5, 0.91, 0.52, 0.63)],
    "blind": [(0.11, 0.33, 0.34, None), (0.11, 0.33, 0.33, None), (0.11, 0.33, 0.3, None)],
}
NAMES = ("test_accuracy", "test_accuracy_of_left_right_still", PLAYING, DIRECTION)


def write_records(folder, rows):
    for row, seeds in rows.items():
        for seed, values in enumerate(seeds):
            metrics = {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
            right = np.random.default_rng([seed, len(row)]).integers(0, 2, 9 * 3 * 2)
            data = {"motion": {"videos": "rendered", "test": 2}}
            record = {"seed": seed, "metrics": metrics, "results_version": 2, "config": {"data": data}}
            record["test_correct"] = pack_correct(np.ones(9 * 3 * 2, int), right)
            add_records(folder, [(row, record)])


def test_the_table_has_every_factor_and_what_is_told(tmp_path, capsys):
    write_records(tmp_path, ROWS)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "MOTION.md").read_text()
    assert text in capsys.readouterr().out + "\n" and (tmp_path / "motion.png").is_file()
    lines = [line.removeprefix("| ").split(" | ") for line in text.splitlines() if " | " in line]
    assert [line[0] for line in lines] == ["row", *ROWS, "nine classes, %, in clips of", *ROWS]
    cells = {name: rest for name, *rest in lines[: len(ROWS) + 1]}
    for row, seeds in ROWS.items():
        for place, cell in enumerate(cells[row][:4]):
            values = [100 * own[place] for own in seeds if own[place] is not None]
            wanted = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" if values else "-"
            assert cell == wanted
    mean = statistics.mean(100 * (own[2] - base[2]) for own, base in zip(ROWS["sparse"], ROWS["dense"], strict=True))
    assert cells["sparse"][4].startswith(f"{mean:+.2f} ± ") and cells["sparse"][5] == "significantly below"
    assert cells["dense"][4:6] == ["-", "-"] and cells["blind"][6].startswith("-")


def test_differences_are_those_of_the_comparisons(tmp_path):
    write_records(tmp_path, ROWS)
    records = read_records(tmp_path)
    assert list(records) == list(ROWS) and [own["seed"] for own in records["dense"]] == [0, 1, 2]
    found, wanted = compared(records, PLAYING), differences(records, "dense", PLAYING)
    assert {row: own.by_seed for row, own in found.items()} == {row: own.by_seed for row, own in wanted.items()}
    assert all(own.image_errors == {} for own in found.values())  # those are of all nine classes
    assert set(compared(records, DIRECTION)) == {"sparse"}


def test_other_folders_are_refused_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    write_records(tmp_path, {"dense": [(0.5, 0.5, None, None)]})
    assert main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "has no records.jsonl" in lines[0] and "something else than motion clips" in lines[1] and len(lines) == 2


def test_accuracy_by_video_is_that_of_the_names_of_the_clips(tmp_path):
    clips = sorted((kind, f"{video}_{number:03d}") for kind in CLASSES for video in SCENES for number in range(4))
    right = np.random.default_rng(0).integers(0, 2, len(clips))
    motion = {"videos": "rendered", "test": 4}
    record = {"config": {"data": {"motion": motion}}, "test_correct": pack_correct(np.ones_like(right), right)}
    found = by_video(record)
    for video in SCENES:
        own = [own for own, (_, name) in zip(right, clips, strict=True) if name.startswith(video)]
        assert found[video] == pytest.approx(np.mean(own))
    record["config"]["data"]["motion"]["test"] = 5
    with pytest.raises(ValueError, match="a record of 108 test clips must have 5 of each"):
        by_video(record)


def test_the_pages_in_the_repository_are_those_of_their_records():
    pages = sorted(ROOT.glob("tasks/video/results/*/MOTION.md"))
    assert "motion_rendered" in [page.parent.name for page in pages]
    for page in pages:
        assert page.read_text() == table(read_records(page.parent)) + "\n", page
