"""The table and the figure, from records that are written by hand, and what is measured for them."""

import re

import numpy as np
import pytest

from hf_sparseprior.analysis import pictures
from hf_sparseprior.runs.metrics import pack_correct
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.tables import wilson_interval
from tasks.canvases import report, times
from tasks.canvases.contenders import CONTENDERS, SCALES
from tasks.canvases.loop import do_run
from tasks.canvases.report import (
    PATCHES,
    TIMES,
    dense_twin,
    draw,
    draw_patches,
    frontier,
    report_text,
    write_report,
)
from tasks.canvases.run import Experiment, runs_of
from tasks.common.paired import RULE
from tasks.common.records import add_records, read_records
from tests.each import each
from tests.tasks.canvases.conftest import Ticks


def record(name, seed, accuracy, side=128, start="one", count=100):
    """A record with the fields that a report reads."""
    contender = CONTENDERS[name]
    right = np.arange(count) < round(accuracy * count)
    history = [
        {"minutes": minutes, "images": 100 * minutes, "loss": None, "validation_accuracy": accuracy * minutes / 8}
        for minutes in (0, 4, 8)
    ]
    return {
        **{"seed": seed, "metrics": {"test_accuracy": float(right.mean())}, "history": history, "chance": 0.1},
        **{"minutes": 8.0, "images": 2400, "patch": 4 * contender.patch, "tokens": 1024, "start_sha256": start},
        **{"test_correct": pack_correct(np.ones(count), right), "data": f"canvases of {side} pixels"},
        "prior_settings": "dense",
    }


def write(folder, group, **accuracies):
    """{row: accuracies by seed} as the records of a group."""
    rows = [(name.replace("_", "-"), value) for name, values in accuracies.items() for value in enumerate(values)]
    add_records(folder / group, [(row, record(row, seed, value)) for row, (seed, value) in rows], list(CONTENDERS))


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made and not written, which takes longer than all else."""
    monkeypatch.setattr(pictures, "save", lambda figure, path: pictures.pyplot().close(figure) or path)


def test_the_table_has_means_intervals_and_paired_differences(tmp_path, undrawn, capsys):
    write(tmp_path, "128_class", **{"patch-x2": [0.50, 0.52, 0.51], "fibottention": [0.55, 0.58, 0.56], "dense": [0.3]})
    write_results(tmp_path / TIMES, {"times": {"128_class": {"fibottention": {"ms": 12.345}}}})
    write_report(SCALES["cpu"], tmp_path)
    text = (tmp_path / "table.md").read_text()
    low, high = wilson_interval(55, 100)
    interval = f"{100 * low:.1f} to {100 * high:.1f} (seed 0)"
    assert f"| fibottention | 4 | 1024 | 3 | 56.33 ± 1.53 | {interval} | 8.0 |  | 2400 | 200.0 | 12.35 |" in text
    assert "| dense | 4 | 1024 | 1 | 30.00 |" in text and "not measured" in text
    assert "| fibottention | +5.00, +6.00, +5.00 | +5.33 ± 0.33 |" in text and "significantly above" in text
    assert RULE in text and "minus patch-x2" in text
    assert "Without a record: half, quarter" in text and text in capsys.readouterr().out


def test_what_comes_before_training_is_apart(tmp_path):
    """The time and the smaller images of Sparsifiner's first phase are in its minutes, and not in those of an image."""
    one = record("sparsifiner", 0, 0.5)
    one["history"][0] |= {"minutes": 2.0, "images": 1400}
    add_records(tmp_path / "128_class", [("sparsifiner", one)])
    assert "| 8.0 | 2.0 | 1000 | 360.0 | not measured |" in report_text(SCALES["cpu"], tmp_path)


def test_machines_are_named(tmp_path):
    rows = [("half", record("half", seed, 0.5)) for seed in range(3)]
    for (_, one), cpu in zip(rows, ("A", "A", "B"), strict=True):
        one |= {"hardware": {"cpu": cpu}, "versions": {"torch": "2"}}
    add_records(tmp_path / "128_class", rows[:2])
    assert "Runs: A, torch 2. Times of inference: not measured yet." in report_text(SCALES["cpu"], tmp_path)
    add_records(tmp_path / "128_class", rows[2:])
    write_results(tmp_path / TIMES, {"times": {}, "hardware": {"cpu": "x", "gpu": "G"}, "versions": {"torch": "3"}})
    text = report_text(SCALES["cpu"], tmp_path)
    assert "Runs: several machines: A, torch 2 (2); B, torch 2 (1). Times of inference: G, torch 3." in text


def test_groups_come_by_variant_and_side(tmp_path):
    for group in ("256_count", "256_class", "128_class"):
        write(tmp_path, group, half=[0.4])
    headings = re.findall("^## (.*)$", report_text(SCALES["cpu"], tmp_path), re.MULTILINE)
    assert headings == ["128 pixels, class", "256 pixels, class", "256 pixels, count", "Differences"]


def test_a_dropped_size_is_said(tmp_path):
    write(tmp_path, "256_class", dense=[0.19], half=[0.5])
    assert "dense has no further seeds at 256 pixels: in 8.0 minutes seed 0 reached 19.0 %" in report_text(
        SCALES["cpu"], tmp_path
    )
    write(tmp_path, "128_class", dense=[0.3])
    assert report_text(SCALES["cpu"], tmp_path).count("no further seeds") == 1


def test_without_records_there_is_no_report(tmp_path, capsys):
    assert report.main(["--scale", "cpu", "--records", str(tmp_path)]) == 2
    assert "has no records of scale cpu; `run` makes them" in capsys.readouterr().err and not any(tmp_path.iterdir())
    assert times.main(["--scale", "cpu", "--records", str(tmp_path)]) == 2


def test_runs_from_two_starts_are_not_compared(tmp_path):
    rows = [("dense", record("dense", 0, 0.5)), ("half", record("half", 0, 0.5, start="two"))]
    add_records(tmp_path / "128_class", rows)
    with pytest.raises(ValueError, match="128_class: the runs of seed 0 started from 2 models, not from one"):
        report_text(SCALES["cpu"], tmp_path)


def test_seeds_from_two_starts_are_said(tmp_path):
    add_records(tmp_path / "128_class", [("half", record("half", seed, 0.5, start=str(seed))) for seed in (0, 1)])
    assert "The runs began from 2 starts, made in the same way" in report_text(SCALES["cpu"], tmp_path)


def test_every_contender_is_drawn(tmp_path, monkeypatch):
    """Each has its curve and its mark, at the values of its records."""
    accuracies = {name: [0.2 + 0.03 * number, 0.22 + 0.03 * number] for number, name in enumerate(CONTENDERS)}
    write(tmp_path, "128_class", **accuracies)
    measured = {name: {"ms": 2.0 + number} for number, name in enumerate(CONTENDERS)}
    write_results(tmp_path / TIMES, {"times": {"128_class": measured}})
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure) or path)
    draw(SCALES["cpu"], tmp_path)
    left, right = figures[0].axes
    curves = {line.get_label().removesuffix(", 2 seeds"): line for line in left.lines}
    for name, accuracies_of in accuracies.items():
        ends = 100 * np.mean([round(100 * value) / 100 for value in accuracies_of])
        assert curves[name].get_xdata()[-1] == 8 and curves[name].get_ydata()[-1] == pytest.approx(
            100 * np.mean(accuracies_of)
        )
        marks = [line for line in right.lines if list(line.get_xdata()) == [measured[name]["ms"]]]
        assert any(line.get_ydata()[0] == pytest.approx(ends) for line in marks)
    assert {text.get_text() for text in right.texts} == set(CONTENDERS)
    pictures.pyplot().close(figures[0])


def test_sparse_rows_are_compared_with_dense_ones_of_the_same_patches(tmp_path):
    twins = {row: dense_twin(row) for row in CONTENDERS}
    assert {row: twin for row, twin in twins.items() if "patch" in row or row in ("half", "quarter")} == {
        **{row: row for row in ("half", "quarter", "patch-x2", "patch-x4")},
        **{"patch-x2-fibottention": "patch-x2", "patch-x4-fibottention": "patch-x4"},
    }
    assert all(twins[row] == "dense" for row in CONTENDERS if CONTENDERS[row].sees == (1, 1))
    write(tmp_path, "256_class", **{"patch-x4": [0.5, 0.5, 0.5], "patch-x4-fibottention": [0.54, 0.55, 0.56]})
    text = report_text(SCALES["cpu"], tmp_path)
    assert "| patch-x4-fibottention (minus patch-x4) | +4.00, +5.00, +6.00 | +5.00 ± 0.58 |" in text
    assert "minus patch-x2" not in text and text.count(RULE) == 1


def test_each_size_of_patches_has_a_dense_and_a_sparse_curve(tmp_path, monkeypatch):
    """Of the largest canvases where a size has both, over the seeds that both have."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure) or path)
    write(tmp_path, "256_class", **{"patch-x4": [0.5], "half": [0.4]})
    assert draw_patches(SCALES["cpu"], tmp_path) is None
    write(tmp_path, "128_class", dense=[0.3, 0.34], fibottention=[0.4], windows=[0.3], **{"patch-x2": [0.5]})
    write_results(tmp_path / TIMES, {"times": {"128_class": {"dense": {"ms": 9.0}, "fibottention": {"ms": 3.0}}}})
    assert draw_patches(SCALES["cpu"], tmp_path) == tmp_path / PATCHES
    left, right = figures[0].axes
    lines = {line.get_label(): line for line in left.lines if not line.get_label().startswith("_")}
    dense, sparse, large = lines.values()
    assert list(lines) == [
        f"patches of {kind}, 1 seed" for kind in ("4 pixels, dense", "4 pixels, Fibottention", "8 pixels, dense")
    ]
    assert dense.get_ydata()[-1] == pytest.approx(30) and sparse.get_ydata()[-1] == pytest.approx(40)
    assert dense.get_color() == sparse.get_color() != large.get_color()
    assert left.get_title("left") == "128 pixels, 8 minutes from a dense start"
    (arrow,) = right.texts
    assert arrow.xyann == (9.0, pytest.approx(30)) and arrow.xy == (3.0, pytest.approx(40))
    pictures.pyplot().close(figures[0])


@each(
    "points, expected",
    [
        ([(1, 5), (2, 4), (3, 6)], [(1, 5), (3, 6)]),
        ([(2, 5), (2, 7), (1, 1)], [(1, 1), (2, 7)]),
        ([(1, 5)], [(1, 5)]),
    ],
)
def test_the_frontier_is_what_nothing_faster_is_above(points, expected):
    assert frontier(points) == expected
    better = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)]
    assert sorted(better) == expected


def test_inference_is_measured_for_every_row_in_turns(small, tmp_path, monkeypatch):
    scale = small.of(["dense", "half", "fibottention"])
    monkeypatch.setitem(SCALES, "smoke", scale)
    Experiment(scale, runs_of(scale), tmp_path / "out", tmp_path).do(None)
    monkeypatch.setattr(times, "clock_of", lambda device: Ticks())
    measured_now = times.measure_all(scale, tmp_path, rounds=2)["times"]
    assert list(measured_now) == ["64_class"] and list(measured_now["64_class"]) == ["dense", "half", "fibottention"]
    # Two readings of the clock half a second apart, and one call between them.
    assert {one["ms"] for one in measured_now["64_class"].values()} == {1000.0}
    assert report.read_times(tmp_path) == measured_now
    assert times.main(["--scale", "smoke", "--records", str(tmp_path), "--rounds", "0"]) == 2


def test_a_model_is_measured_with_the_prior_of_its_record(small, tmp_path):
    scale = small.of(["sparsifiner"])
    for run in runs_of(scale):
        do_run(run, scale, tmp_path / "out")
    experiment = Experiment(scale, runs_of(scale), tmp_path / "out", tmp_path)
    experiment.collect()
    prior = read_records(tmp_path / "64_class")["sparsifiner"][0]["prior_settings"]
    assert prior["predictor"]["grid"] == [8, 8]  # of the start, where it was trained
    assert times._model(scale, 64, "sparsifiner", prior, 10).config.grid == (16, 16)
