"""A folder of measurements: going on, what is refused, limits, stops, and the summary of what is there."""

import json
import multiprocessing
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from hf_sparseprior.runs.locks import locked
from tasks.benchmark import lone_process, report, runner
from tasks.benchmark.__main__ import main
from tasks.benchmark.entry import Benchmark, Target, turned

RESULTS = runner.Path(report.__file__).parent / "results"
QUICK = ["backbones", "--models", "vit_tiny", "--priors", "dense", "violin", "--sizes", "32", "--threads", "1",
         "--device", "cpu"]  # fmt: skip
FOUND = {"seconds": 0.5, "calls": 1, "first_call": 0.5, "memory": 7, "weights": 9, "ran": "sdpa"}


def measured(out):
    return json.loads((out / "records.json").read_text())["measured"]


@pytest.fixture
def alone(monkeypatch):
    """Measurements that take no time; what was asked for, and answers by its number."""
    asked, answers = [], {}

    def answer(server, function, arguments, limit, seconds, stop):
        asked.append((arguments[0]["prior"], arguments[0]["round"]))
        found = answers.get(len(asked), FOUND)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(lone_process, "measured_alone", answer)
    return asked, answers


def test_rounds_go_through_everything_and_a_stopped_command_goes_on(alone, tmp_path, capsys):
    asked, answers = alone
    command = [*QUICK, "--out", str(tmp_path)]
    answers[3] = KeyboardInterrupt()
    assert main([*command, "--rounds", "2"]) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    assert len(measured(tmp_path)) == 2
    assert main([*command, "--rounds", "2"]) == 0
    assert asked == [("dense", 0), ("violin", 0), ("violin", 1), ("violin", 1), ("dense", 1)]
    assert len(measured(tmp_path)) == 4 and (tmp_path / "table.md").read_text().count("| vit_tiny | 32 |") == 2
    assert main([*command, "--rounds", "2"]) == 0 and len(asked) == 5  # nothing is left
    assert main([*command, "--rounds", "3", "--for-seconds", "1e-9"]) == 0 and len(asked) == 5
    assert "stopped at 5 of 6; the same command goes on" in capsys.readouterr().out


def test_what_failed_is_not_tried_again_unless_it_may_take_more_or_was_missing(alone, tmp_path, capsys):
    asked, answers = alone
    command = [*QUICK, "--rounds", "2", "--out", str(tmp_path)]
    answers[1] = {"failed": "more than 5 s", "limit_seconds": 5.0}
    answers[2] = {"failed": "more than 1 GiB", "limit_bytes": 2**30}
    assert main([*command, "--seconds", "5", "--memory-gib", "1"]) == 0
    assert asked == [("dense", 0), ("violin", 0)] and "| more than 1 GiB |" in (tmp_path / "table.md").read_text()
    assert main([*command, "--seconds", "5", "--memory-gib", "1"]) == 0 and len(asked) == 2
    answers[3] = {"failed": "x is missing", "missing": True}
    assert main([*command, "--seconds", "6", "--memory-gib", "1", "--rounds", "1"]) == 0 and asked[2:] == [("dense", 0)]
    assert main([*command, "--seconds", "6", "--memory-gib", "2", "--rounds", "1"]) == 0
    assert asked[3:] == [("dense", 0), ("violin", 0)]
    assert {record["seconds"] for record in measured(tmp_path)} == {0.5}


def test_a_wrong_output_is_status_1(alone, tmp_path, capsys):
    alone[1][1] = {"failed": "RuntimeError: wrong: 5 from what is plainly computed, 1 allowed"}
    assert main([*QUICK, "--rounds", "1", "--out", str(tmp_path)]) == 1
    assert "wrong: 5" in (tmp_path / "table.md").read_text()


def test_other_settings_machines_versions_and_a_second_process_are_refused(alone, tmp_path, capsys):
    folder = tmp_path / "first"
    assert main([*QUICK, "--rounds", "1", "--out", str(folder)]) == 0
    assert main([*QUICK, "--dtype", "bfloat16", "--out", str(folder)]) == 2
    assert "dtype: 'float32' there, 'bfloat16' here" in capsys.readouterr().err
    content = json.loads((folder / "records.json").read_text())
    changes = (
        ({"versions": {**content["versions"], "torch": "2.0.0"}}, "(torch: '2.0.0' there, '"),
        ({"hardware": {**content["hardware"], "cpu": "abacus"}}, "(cpu: 'abacus' there, '"),
        ({"benchmark": "rivals"}, "is of rivals, not of backbones"),
        ({"measured": None}, "is damaged"),
    )
    for change, message in changes:
        other = shutil.copytree(folder, tmp_path / "other", dirs_exist_ok=True)
        (other / "records.json").write_text(json.dumps({**content, **change}))
        assert main([*QUICK, "--out", str(other)]) == 2
        assert message in capsys.readouterr().err
    with locked(folder / runner.LOCK) as mine:
        assert mine and main([*QUICK, "--out", str(folder)]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*QUICK, "--out", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} is not a folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "reason"), [("--memory-gib", "more than 0.05 GiB"), ("--seconds", "more than 0.05 s")]
)
def test_too_little_memory_and_time_are_reasons(option, reason, tmp_path):
    command = ["backbones", "--models", "vit_tiny", "--priors", "dense", "--sizes", "512", "--threads", "1"]
    assert main([*command, "--device", "cpu", option, "0.05", "--out", str(tmp_path)]) == 0
    assert [record["failed"] for record in measured(tmp_path)] == [reason]


def test_a_process_that_a_stop_ended_is_no_result():
    """`timeout` and schedulers send SIGTERM to the process that measures, too."""
    stop = SimpleNamespace(requested=False)

    class Server:
        def __init__(self, stops):
            self.stops = stops

        def Pipe(self, duplex):
            return multiprocessing.Pipe(duplex)

        def Process(self, target, args, daemon):
            stop.requested = self.stops
            return multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))

    for stops, expected in ((True, None), (False, {"failed": "the process ended with 7"})):
        assert lone_process.measured_alone(Server(stops), print, (), 1 << 40, 60.0, stop) == expected


@pytest.mark.parametrize("name", ["backbones", "rivals", "video", "chooser", "predicted", "deployment"])
def test_records_of_earlier_versions_are_read(name, tmp_path):
    """Those of the repository, which README and docs rest on: the numbers are theirs, and the page is made of them."""
    benchmark = runner.load(name)
    content = runner.read_content(benchmark, RESULTS / name)
    assert len(content["measured"]) > 5
    report.write_report(benchmark, tmp_path, content)
    rows, before = report.summary(benchmark, content["measured"]), (RESULTS / name / "table.md").read_text()
    for row in rows:
        assert row["records"] and ("seconds" not in row or row["seconds"]["rounds"] == len(row["records"]))
    if name in ("backbones", "rivals"):
        for row in (row for row in rows if "seconds" in row):
            assert f"| {report.milliseconds(row['seconds'])} | {row['seconds']['rounds']} |" in before
            assert report.ratio_text(row["times"].get("dense")) in before
    if name == "video":
        for row in (row for row in rows if row["frames"] > 4):
            assert f"| {row['row']} | {row['seconds']['median']:.3g} |" in before
            assert f"| {row['memory'] / 2**30:.3g} |" in before


# ---- the summary ----------------------------------------------------------------------------------------------------

PAIR = Benchmark(name="pair", keys=("pixels", "contender"), bases=("dense",), size="pixels")


def records_of(seconds, pixels=8, memory=100):
    return [{"pixels": pixels, "contender": name, "seconds": own, "memory": memory, "ran": name}
            for name, own in seconds.items()]  # fmt: skip


def test_turns_begin_with_another_one_each_round():
    assert [turned("abc", number) for number in range(3)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_ratios_are_of_the_same_rounds():
    random = np.random.default_rng(0)
    made = [
        {"pixels": 8, "contender": name, "round": number, "seconds": float(random.random()), "memory": number + 1}
        for number in range(5)
        for name in ("violin", "dense")
        if (name, number) != ("dense", 3)
    ]
    own, base = ({r["round"]: r["seconds"] for r in made if r["contender"] == name} for name in ("violin", "dense"))
    violin, dense = report.summary(PAIR, made)
    ratios = [own[number] / base[number] for number in base]
    assert violin["times"]["dense"]["median"] == pytest.approx(np.median(ratios)) and dense["seconds"]["rounds"] == 4
    assert violin["memory"] == 5 and violin["memory_times"] == {"dense": 1.0}
    # The rounds of one record are a list.
    listed = report.summary(PAIR, records_of({"violin": list(own.values()), "dense": [base.get(n, 1.0) for n in own]}))
    assert listed[0]["seconds"]["median"] == violin["seconds"]["median"]


def test_the_table_has_reasons_and_the_sizes_together():
    made = [*records_of({"violin": [2.0]}), *records_of({"dense": [3.0]}, 16), *records_of({"dense": [1.0]})]
    made.append({"pixels": 16, "contender": "violin", "failed": "more than 1 s"})
    rows = report.summary(PAIR, made)
    assert [(row["pixels"], row["contender"]) for row in rows] == [
        (8, "violin"), (8, "dense"), (16, "dense"), (16, "violin"),
    ]  # fmt: skip
    text = report.table(PAIR, rows)
    assert "| 8 | violin | 2000 (2000-2000) | 1 | 2.00 (2.00-2.00) |" in text and "| more than 1 s |" in text


def test_crossover_of_power_laws():
    ratio = [(size, 100 / size) for size in (16, 64, 256, 1024)]  # n over n^2 / 100
    assert report.crossover(ratio) == pytest.approx(100)
    assert report.crossover([(size, 1 / value) for size, value in ratio]) is None
    assert report.crossover([(size, value / 100) for size, value in ratio]) is None and report.crossover([]) is None
    made = [own for size, value in ratio for own in records_of({"dense": [1.0], "violin": [value]}, size)]
    (line,) = report.crossovers(PAIR, report.summary(PAIR, made))
    assert line == "violin: faster than dense from 100 pixels on"


def test_targets_are_met_missed_or_not_measured():
    rows = report.summary(PAIR, [*records_of({"dense": [2.0], "violin": [1.0], "window": [3.0]})])
    where = {"pixels": 8}
    for target, expected in (
        (Target(where, "dense", 0.6, among=("violin", "window")), [("8 violin", True), ("8 window", False)]),
        (Target(where, "dense", 1.5, faster=True, among=("violin", "window"), fastest=True), [("8 violin", True)]),
        (Target(where, "dense", 0.9, "memory_times", among=("violin",)), [("8 violin", False)]),
        (Target({"pixels": 9}, "dense", 1.0), []),
    ):
        reached = target.reached(rows)
        assert [(name, target.is_met(value)) for name, value in reached.items()] == expected


def test_any_number_of_contenders_is_drawn_each_in_its_own_way(tmp_path):
    names = ["dense", *map(str, range(40))]
    rows = report.summary(PAIR, [own for size in (8, 16) for own in records_of({n: [1.0, 2.0] for n in names}, size)])
    assert report.draw(PAIR, rows, tmp_path / "a.png", "many").stat().st_size > 1000
    looks = {(style["color"], style["marker"]) for style in report.line_styles(PAIR, rows).values()}
    assert len(looks) == 41
