"""Tables of motion clips from records."""

import json
import statistics

from tasks.common.paired import differences
from tasks.video.evidence import DIRECTION, PLAYING, compared, main, read_records

ROWS = {
    "dense": [(0.6, 0.9, 0.7, 0.8), (0.62, 0.92, 0.72, 0.81), (0.61, 0.91, 0.73, 0.82)],
    "sparse": [(0.5, 0.9, 0.5, 0.6), (0.53, 0.92, 0.53, 0.6), (0.5, 0.91, 0.52, 0.63)],
    "blind": [(0.11, 0.33, 0.34, None), (0.11, 0.33, 0.33, None), (0.11, 0.33, 0.3, None)],
}
NAMES = ("test_accuracy", "test_accuracy_of_left_right_still", PLAYING, DIRECTION)


def write_records(folder, rows):
    for row, seeds in rows.items():
        (folder / row).mkdir(parents=True)
        for seed, values in enumerate(seeds):
            metrics = {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
            record = {"seed": seed, "metrics": metrics, "results_version": 2}
            (folder / row / f"seed{seed}.json").write_text(json.dumps(record))
    (folder / "summary.json").write_text(json.dumps({row: [] for row in rows}))


def test_the_table_has_every_factor_and_what_is_told(tmp_path, capsys):
    write_records(tmp_path, ROWS)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "MOTION.md").read_text()
    assert text in capsys.readouterr().out + "\n" and (tmp_path / "motion.png").is_file()
    cells = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in text.splitlines() if " | " in line
    }
    assert list(cells) == ["row", *ROWS]
    for row, seeds in ROWS.items():
        for place, cell in enumerate(cells[row][:4]):
            values = [100 * own[place] for own in seeds if own[place] is not None]
            wanted = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" if values else "-"
            assert cell == wanted
    mean = statistics.mean(100 * (own[2] - base[2]) for own, base in zip(ROWS["sparse"], ROWS["dense"], strict=True))
    assert cells["sparse"][4].startswith(f"{mean:+.2f} ± ") and cells["sparse"][5] == "told: below"
    assert cells["dense"][4:6] == ["-", "-"] and cells["blind"][6].startswith("-")


def test_differences_are_those_of_the_comparisons(tmp_path):
    write_records(tmp_path, ROWS)
    records = read_records(tmp_path)
    assert list(records) == list(ROWS) and [own["seed"] for own in records["dense"]] == [0, 1, 2]
    assert compared(records, PLAYING) == differences(records, "dense", PLAYING)
    assert set(compared(records, DIRECTION)) == {"sparse"}


def test_other_folders_are_refused_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    write_records(tmp_path, {"dense": [(0.5, 0.5, None, None)]})
    assert main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "has no summary.json" in lines[0] and "something else than motion clips" in lines[1] and len(lines) == 2
