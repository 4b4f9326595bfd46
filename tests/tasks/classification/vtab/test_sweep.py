import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hf_sparseprior import SparsePriorViTConfig
from hf_sparseprior.images.vtab_tasks import TASKS
from hf_sparseprior.runs import hf_run, locks
from tasks.classification import train as training
from tasks.classification.vtab import sweep as sweeping
from tasks.classification.vtab.plan import Records, choose, load_sweep, point_name
from tasks.classification.vtab.report import summarize
from tasks.classification.vtab.sweep import Job, claim, main, work
from tasks.common.compare import RECORDED
from tasks.common.machines import Shard
from tasks.common.queue import RunsFailed
from tests.configs import shipped
from tests.each import each
from tests.processes import ROOT, Started, module, script, wait_until

pytestmark = pytest.mark.slow


TASK = ["--tasks", "eurosat"]


def judged(config, accuracy):
    """What a training run returns."""
    return {
        **dict.fromkeys(RECORDED),
        "metrics": {"test_accuracy": accuracy},
        "config": config,
        **{"seconds": 1.0, "seconds_per_step": 0.1, "parameters": 7, "pruning_ratio": 0.0},
        "confusion": [[1, 2], [3, 4]],
    }


@pytest.fixture
def trained(monkeypatch):
    """Runs take no time; the accuracy of one is what the function in the list says. -> the configurations of all."""
    done, accuracy = [], [lambda config: 0.5]

    def train(config, command=None):
        done.append(config)
        return judged(config, accuracy[0](config))

    monkeypatch.setattr(sweeping, "train", train)
    return done, accuracy


def sweep_of(path, tasks=("eurosat",), **options):
    return Job(str(path), [], path.parent / "out", path.parent / "records", list(tasks), **options)


def key(config):
    data, trainer = config["data"], config["trainer"]
    return data["task"], data["stage"], config["model"].get("prior"), trainer["learning_rate"], trainer["seed"]


# ---- selection ------------------------------------------------------------------------------------------------------


def test_every_grid_point_is_tried_and_the_best_is_trained_with_every_seed(trained, write):
    done, accuracy = trained
    rates = {1e-2: 0.5, 1e-3: 0.8, 1e-4: 0.7}
    accuracy[0] = lambda config: rates[config["trainer"]["learning_rate"]]
    job = sweep_of(write(grid={"trainer.learning_rate": list(rates)}, selection_seeds=[5, 6]))
    work(job)
    expected = [
        ("eurosat", stage, prior, rate, seed)
        for prior in (None, "violin")
        for stage, chosen, seeds in (("selection", rates, (5, 6)), ("final", [1e-3], (0, 1)))
        for rate in chosen
        for seed in seeds
    ]
    assert [key(config) for config in done] == expected
    records = Records(job.sweep(), job.records)
    assert records.selection("violin", "eurosat") == [50, 80, 70] and records.chosen_point("violin", "eurosat") == 1
    work(job)
    assert len(done) == len(expected)  # nothing is done twice


def test_the_mean_over_seeds_decides_and_of_equal_points_the_first(trained, write):
    done, accuracy = trained
    # In percent 7 is 7.000000000000001 and more than 5 + 2, which must not decide; it is the best single run, too.
    values = {1e-1: (0.06, 0.0), 1e-2: (0.05, 0.02), 1e-3: (0.07, 0.0)}
    assert 100 * 0.07 > 100 * 0.05 + 100 * 0.02
    accuracy[0] = lambda config: values[config["trainer"]["learning_rate"]][config["trainer"]["seed"]]
    job = sweep_of(write(grid={"trainer.learning_rate": [1e-1, 1e-2, 1e-3]}, selection_seeds=[0, 1], seeds=[0]))
    work(job)
    assert [key(config)[3] for config in done if key(config)[1] == "final"] == [1e-2, 1e-2]


def test_an_axis_of_the_grid_may_be_any_key(trained, write):
    done, accuracy = trained
    accuracy[0] = lambda config: config["trainer"]["learning_rate"] + config["model"]["drop_path_rate"]
    grid = {"trainer.learning_rate": [1e-2, 1e-3], "model.drop_path_rate": [0.0, 0.1, 0.2]}
    job = sweep_of(write(grid=grid, variants={"baseline": {}}, seeds=[0]))
    work(job)
    tried = [(config["trainer"]["learning_rate"], config["model"]["drop_path_rate"]) for config in done]
    assert tried == [(rate, drop) for rate in (1e-2, 1e-3) for drop in (0.0, 0.1, 0.2)] + [(1e-2, 0.2)]
    chosen = summarize(Records(job.sweep(), job.records))["variants"]["baseline"]["tasks"]["eurosat"]["chosen"]
    assert chosen == {"trainer.learning_rate": 1e-2, "model.drop_path_rate": 0.2}
    assert (job.records / "baseline/eurosat/final/learning_rate=0.01,drop_path_rate=0.2/seed0.json").exists()


def test_without_all_of_selection_nothing_is_chosen(trained, write):
    job = sweep_of(write())
    work(job)
    records = Records(job.sweep(), job.records)
    lost = records.sweep.selection_runs("violin", "eurosat", 1)[0]
    records.path(lost).unlink()
    records = Records(job.sweep(), job.records)
    assert records.chosen_point("violin", "eurosat") is None and records.chosen_point("baseline", "eurosat") == 0
    assert list(records.missing()) == [lost]
    result = summarize(records)["variants"]["violin"]["tasks"]["eurosat"]
    assert result["accuracies"] == [None, None] and result["mean"] is None


def test_records_of_another_configuration_and_of_two_checkpoints_are_refused(trained, write):
    work(sweep_of(write()))
    changed = sweep_of(write(trainer={"weight_decay": 0.1}))
    with pytest.raises(ValueError, match=r"learning_rate=0.01/seed0.json is of another configuration .*weight_decay"):
        work(changed)
    job = sweep_of(write())
    path = next(job.records.rglob("seed0.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "pretrained_sha256": "abc"}))
    with pytest.raises(ValueError, match=r"started from 2 checkpoints \(abc, unknown\), not from one"):
        summarize(Records(job.sweep(), job.records))


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_holds_until_its_process_is_dead(tmp_path):
    record = tmp_path / "a" / "seed0.json"
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        with claim(record) as mine:
            os.write(done, b"1" if mine else b"0")
            time.sleep(600)
        os._exit(0)
    assert os.read(ready, 1) == b"1"
    with claim(record) as mine:
        assert not mine
    assert (tmp_path / "a" / "seed0.lock").read_text().split()[1] == str(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with claim(record) as mine:
        assert mine
        with claim(record) as twice:
            assert not twice
    with claim(record) as mine:  # given back
        assert mine
    assert not (tmp_path / "a" / "seed0.lock").exists()


def test_a_lock_file_that_its_owner_removed_meanwhile_is_no_claim(tmp_path, monkeypatch):
    record, lock = tmp_path / "seed0.json", locks.fcntl.flock
    late = lambda file, how: (record.with_suffix(".lock").unlink(), lock(file, how))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(locks.fcntl, "flock", late)
        with claim(record) as mine:
            assert not mine
    with claim(record) as mine:
        assert mine


def test_nothing_empty_is_left_behind(write, tmp_path, monkeypatch, capsys):
    def train(config, command=None):
        if config["trainer"]["learning_rate"] == 1e-3 and config["data"]["stage"] == "selection":
            raise ValueError("refused")
        Path(config["trainer"]["output_dir"]).mkdir(parents=True)
        return judged(config, 0.5)

    monkeypatch.setattr(sweeping, "train", train)
    arguments = ["--config", str(write()), "--out", str(tmp_path / "out"), "--records", str(tmp_path / "records")]
    assert main([*arguments, *TASK]) == 2 and "refused" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    left = [path.relative_to(tmp_path / "records") for path in (tmp_path / "records").rglob("*") if not path.is_dir()]
    assert [str(path) for path in left] == ["baseline/eurosat/selection/learning_rate=0.01/seed0.json"]
    assert not [path for path in (tmp_path / "records").rglob("*") if path.is_dir() and not list(path.iterdir())]


def test_a_run_of_another_process_is_left_to_it_and_taken_over_when_it_ends(trained, write, monkeypatch):
    done, _ = trained
    job = sweep_of(write(variants={"baseline": {}}))
    records = Records(job.sweep(), job.records)
    taken = records.sweep.selection_runs("baseline", "eurosat")[0]
    other, waits = claim(records.path(taken)), []
    assert other.__enter__()

    def wait(seconds):
        waits.append([key(config)[3] for config in done])
        if len(waits) == 2:
            other.__exit__(None, None, None)

    monkeypatch.setattr(sweeping.time, "sleep", wait)
    work(job)
    assert waits == [[1e-3], [1e-3]]  # the other point only, and nothing of the final stage
    assert [key(config)[1:4:2] for config in done[1:]] == [("selection", 1e-2), ("final", 1e-2), ("final", 1e-2)]


def test_a_run_that_another_process_finished_meanwhile_is_not_done(trained, write, monkeypatch):
    done, _ = trained
    job = sweep_of(write(variants={"baseline": {}}))
    whole = sweeping.claim

    def late(path):
        if "selection/learning_rate=0.001/" in str(path) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            config = records.sweep.config(records.sweep.selection_runs("baseline", "eurosat", 1)[0])
            path.write_text(json.dumps({"images_judged": 10, **judged(config, 0.9)}))
        return whole(path)

    records = Records(job.sweep(), job.records)
    monkeypatch.setattr(sweeping, "claim", late)
    work(job)
    assert [key(config)[1:4:2] for config in done] == [("selection", 1e-2), ("final", 1e-3), ("final", 1e-3)]


# ---- kills ----------------------------------------------------------------------------------------------------------

KILLS = """
import os, signal, sys
from pathlib import Path
from transformers import Trainer
from tasks.classification.vtab import sweep

job = sweep.Job(sys.argv[1], [], Path(sys.argv[2]) / "out", Path(sys.argv[2]) / "records", ["eurosat"], ["violin"])
log = open(Path(sys.argv[2]) / "steps", "a", buffering=1)
step, replace, remove = Trainer.training_step, os.replace, sweep.shutil.rmtree

def logged(trainer, *args, **kwargs):
    log.write(f"{Path(trainer.args.output_dir).relative_to(job.out)} {trainer.state.global_step}\\n")
    return step(trainer, *args, **kwargs)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def in_step(trainer, *args, **kwargs):
    return die() if trainer.state.global_step == 3 else logged(trainer, *args, **kwargs)

def before(name):
    return lambda source, target: die() if Path(target).name == name else replace(source, target)

def after(name):
    return lambda source, target: (replace(source, target), Path(target).name == name and die())

Trainer.training_step = logged
POINTS = [
    (Trainer, "training_step", in_step),  # after the checkpoint of step 2
    (os, "replace", before("seed0.json")),  # trained, without a record
    (os, "replace", after("seed0.json")),  # with one, its folder not removed
    (Trainer, "training_step", in_step),  # in the second run
]
for number, point in enumerate(POINTS):
    child = os.fork()
    if not child:
        setattr(*point)
        sweep.work(job)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, status)
sweep.work(job)
"""


def test_killed_at_any_moment_the_same_command_goes_on_and_does_nothing_twice(write, tmp_path):
    path = write()
    log = tmp_path / "log.txt"
    process = script(KILLS, str(path), str(tmp_path), folder=ROOT, log=log, here=True)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    names = [f"violin/eurosat/selection/learning_rate={rate}/seed0" for rate in (0.01, 0.001)]
    steps = Counter((tmp_path / "steps").read_text().splitlines())
    finals = {line.split()[0] for line in steps} - set(names)
    assert len(finals) == 2 and all("/final/" in name for name in finals)
    # 32 and 52 images in batches of 16, the smaller last one left out, two epochs; every step once, but for the one
    # between the last checkpoint and the kill.
    expected = [f"{name} {step}" for name in names for step in (0, 1, 2, 2, 3)]
    expected += [f"{name} {step}" for name in finals for step in range(6)]
    assert steps == Counter(expected)
    assert log.read_text().count("going on from") == 2
    found = sorted(path.relative_to(tmp_path / "records") for path in (tmp_path / "records").rglob("*.json"))
    assert sorted(map(str, found)) == sorted(f"{name}.json" for name in (*names, *finals))
    assert not list((tmp_path / "records").rglob("*.lock"))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    records = Records(load_sweep(path), tmp_path / "records")
    for run in records.sweep.selection_runs("violin", "eurosat"):
        record = records.read(run)
        assert record["steps"] == 4 and record["images_judged"] == 20 and record["max_decay_change"] > 0
        assert record["prior"] == "violin" and record["task"] == "eurosat" and record["stage"] == "selection"


def start(path, folder, log, *more, call=None):
    """The command in a process of its own, which prints into a file of the folder."""
    arguments = ["--config", str(path), *TASK, *more]
    arguments += ["--out", str(folder / "out"), "--records", str(folder / "records")]
    place = {"folder": ROOT, "log": folder / log, "here": True}
    if call is not None:
        return Started(call, arguments, **place)
    return module("tasks.classification.vtab.sweep", *arguments, **place)


def forking(arguments):
    """The command, with jobs that are forked, which takes no time; test_jobs_and_commands_... has jobs of its own."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
    sys.exit(main(arguments))


def spawning_once(arguments):
    """The command, with one job that starts as a user's does, importing everything, and others that are forked."""
    get_context, spawned = multiprocessing.get_context, []

    def first_as_asked(method=None):
        if method == "spawn":
            spawned.append(method)
        return get_context("fork" if len(spawned) > 1 else method)

    multiprocessing.get_context = first_as_asked
    sys.exit(main(arguments))


def test_jobs_and_commands_at_once_do_every_run_once(write, tmp_path):
    path = write(selection_seeds=[0, 1], variants={"violin": {"model": {"prior": "violin"}}})
    both = [start(path, tmp_path, "0.txt", "--jobs", "2", call=spawning_once), start(path, tmp_path, "1.txt")]
    codes = [process.wait(500) for process in both]
    outputs = [(tmp_path / log).read_text() for log in ("0.txt", "1.txt")]
    assert codes == [0, 0], outputs
    printed = [name for text in outputs for name in re.findall(r"^\[\d+/6\] (\S+): ", text, re.MULTILINE)]
    found = [str(path.relative_to(tmp_path / "records"))[:-5] for path in (tmp_path / "records").rglob("seed*.json")]
    assert len(found) == 2 * 2 + 2 and sorted(printed) == sorted(found)
    assert all("eurosat" in text and "Missing:" in text for text in outputs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_command_ends_its_jobs_end_with_a_checkpoint(write, tmp_path, number):
    trainer = {"per_device_train_batch_size": 16, "dataloader_num_workers": 0, "bf16": False, "use_cpu": True}
    path = write(trainer={**trainer, "save_steps": 50, "num_train_epochs": 5000})
    process = start(path, tmp_path, "log.txt", "--jobs", "2", call=forking)
    # Of a run's folder only the names are read, as older checkpoints are removed meanwhile.
    wait_until(lambda: len({path.parent for path in (tmp_path / "out").glob("*/*/*/*/*/checkpoint-*")}) >= 2, process)
    process.send_signal(number)
    assert process.wait(300) == (143 if number == signal.SIGTERM else -9)
    # Jobs whose command was killed end a little after it.
    wait_until(lambda: (tmp_path / "log.txt").read_text().count("the same command goes on from there") >= 2)
    wait_until(lambda: not list((tmp_path / "records").glob("*/*/*/*/*.lock")))


# ---- several machines -----------------------------------------------------------------------------------------------

TWO_POINTS = {"grid": {"trainer.learning_rate": [1e-2, 1e-3]}, "selection_seeds": [0, 1, 2]}


def in_turn(runs, number, of):
    """Keys of runs as a shard does them that is alone: the first of its own that can be done, else of the next one's.

    runs: all keys in order, whose places are their numbers.
    """
    left, order = dict(enumerate(runs)), []

    def ready(key):
        row = (key[0], key[2])
        return key[1] == "selection" or all((o[0], o[2]) != row or o[1] == "final" for o in left.values())

    while left:
        place = min((p for p, key in left.items() if ready(key)), key=lambda p: ((p - number + 1) % of, p))
        order.append(left.pop(place))
    return order


@pytest.fixture
def whole(trained, write):
    """A sweep that one process did alone: its job and the keys of all runs in order. The list of runs is empty then."""
    done, accuracy = trained
    accuracy[0] = lambda config: config["trainer"]["learning_rate"]
    job = sweep_of(write(**TWO_POINTS))
    work(job)
    keys = [key(config) for config in done]
    assert len(keys) == len(set(keys)) == job.sweep().size == 16
    done.clear()
    return job, keys


def test_a_shard_does_its_own_runs_first_and_then_what_the_others_left(trained, whole, tmp_path):
    (done, _), (job, keys) = trained, whole
    for number, of in ((1, 1), (2, 2), (3, 5)):
        shard = replace(job, records=tmp_path / f"{number}_of_{of}", shard=Shard(number, of))
        work(shard)
        assert [key(config) for config in done] == in_turn(keys, number, of), (number, of)
        done.clear()
    work(replace(shard, shard=Shard(1, 2)))
    assert done == []


class Alone:
    """Stands for a Ray cluster: does jobs in this process, one after another."""

    def __init__(self, modules, address):
        assert modules == ["tasks.classification.vtab.sweep"]
        self.failed = []

    def run(self, jobs):
        self.failed = []
        for one in jobs:
            one.log.parent.mkdir(parents=True, exist_ok=True)
            one.log.touch()
            call, arguments = pickle.loads(pickle.dumps((one.call, one.arguments)))
            try:
                assert not one.is_done()
                call(*arguments, callbacks=[])
                assert one.is_done()
            except ValueError as error:
                self.failed.append(f"{one.name}: {error}")
        if self.failed:
            raise RunsFailed("some")


def test_a_cluster_chooses_grid_points_before_it_does_final_runs(trained, whole, tmp_path, monkeypatch):
    (done, _), (job, keys) = trained, whole
    monkeypatch.setattr(sweeping, "RayQueue", Alone)
    arguments = ["--config", job.config, *TASK, "--out", str(tmp_path / "ray"), "--records", str(tmp_path / "again")]
    assert main([*arguments, "--ray", "auto"]) == 0
    expected = [one for stage in ("selection", "final") for one in keys if one[1] == stage]
    assert [key(config) for config in done] == expected and not (tmp_path / "ray").exists()
    again, summary = (summarize(Records(job.sweep(), folder)) for folder in (tmp_path / "again", job.records))
    assert again == summary and summary["variants"]["violin"]["tasks"]["eurosat"]["accuracies"] == [1, 1]


def test_on_a_cluster_a_run_that_fails_is_named_after_all_others_are_done(
    trained, write, tmp_path, monkeypatch, capsys
):
    def fails(config):
        if key(config)[1:3] == ("selection", "violin") and config["trainer"]["seed"] == 1:
            raise ValueError("no reason")
        return 0.5

    trained[1][0] = fails
    monkeypatch.setattr(sweeping, "RayQueue", Alone)
    arguments = ["--config", str(write(**TWO_POINTS)), *TASK, "--out", str(tmp_path / "out"), "--ray", "auto"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "2 of 16 runs failed:\nviolin/eurosat/selection/learning_rate=0.01/seed1: no reason\n" in error
    assert len(list((tmp_path / "out").rglob("seed*.json"))) == 16 - 2 - 2  # nor what they would have chosen


# ---- command --------------------------------------------------------------------------------------------------------


def test_the_command_writes_tables_of_the_whole_sweep(trained, write, tmp_path, capsys):
    arguments = ["--config", str(write()), "--out", str(tmp_path / "out"), *TASK]
    assert main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "baseline: selection 0 of 2, final 0 of 2",
        "violin: selection 0 of 2, final 0 of 2",
        "0 of 8 runs done, 8 to do",
    ]
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "--variants", "violin", "--seeds", "1"]) == 0
    output = capsys.readouterr()
    assert "[3/3] violin/eurosat/final/learning_rate=0.01/seed1: 50.00 % in 1 s" in output.err
    # Whatever part of it ran, the table is of all variants, tasks and seeds.
    assert "- violin: cifar (selection)" in output.out and "eurosat (1 of 2 seeds)" in output.out
    assert (tmp_path / "out" / "table.md").read_text() in output.out
    assert (tmp_path / "out" / "results.png").stat().st_size > 5000
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["variants"]["violin"]["tasks"]["eurosat"]["accuracies"] == [None, 50.0]
    assert main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 8 runs done, 5 to do"
    assert main(arguments) == 0
    assert "| violin | - | 50.00 ± 0.00 | - | - |" in capsys.readouterr().out


@each(
    "arguments, message",
    [
        (["--tasks", "eurosta"], "--tasks eurosta must be among cifar, caltech101"),
        (["--variants", "violn"], "--variants violn must be among baseline, violin"),
        (["--seeds", "7"], "--seeds 7 must be among 0, 1"),
        (["--tasks", "cifar"], "has no folder cifar"),
        (["data.path=none"], "data.path=none has no folder eurosat"),
        (["trainer.seed=3"], "trainer.seed is the sweep's to choose"),
        (["data.stage=final"], "data.stage is the sweep's to choose"),
        (["trainer.learning_rate=1"], "trainer.learning_rate is an axis of the grid"),
        (["data.source=digits"], "data.source='digits' must be 'vtab'"),
        (["model.prior=violn"], "violn"),
        (["model.pretrained=nowhere"], "model.pretrained=nowhere is not a folder of a saved model"),
        (["--jobs", "0"], "--jobs=0 must be 1 or more"),
        (["--shard", "3/2"], "--shard=3/2 must be K/N with whole numbers 1 <= K <= N"),
        (["--shard", "1/2", "--ray", "auto"], "--shard=1/2 and --ray=auto exclude each other"),
    ],
)
def test_the_command_line_reports_errors_in_one_line(write, tmp_path, capsys, arguments, message):
    assert main([*TASK, "--config", str(write()), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


@each(
    "changes, message",
    [
        ({"gird": {}}, "has no key 'gird'; did you mean 'grid'"),
        ({"grid": {"trainer.learning_rate": []}}, "must be like"),
        ({"grid": {"learning_rate": [1]}}, "grid key 'learning_rate' must be SECTION.KEY"),
        ({"grid": {"trianer.learning_rate": [1]}}, "did you mean 'trainer'"),
        ({"grid": {"trainer.learning_rat": [1]}}, "did you mean 'learning_rate'"),
        ({"grid": {"trainer.learning_rate": ["fast"]}}, "trainer.learning_rate='fast' must be a number"),
        ({"grid": {"trainer.learning_rate": [1, 1]}}, "must be different"),
        ({"grid": {"model.pooling": ["../mean"]}}, "'pooling=../mean' must be a name of letters"),
        ({"grid": {"model.prior": [{"support": "window"}]}}, "must be a name of letters"),
        ({"grid": {"model.x": [1], "trainer.x": [2]}}, "grid keys model.x, trainer.x must differ after the dot"),
        ({"grid": {"model.pooling": [1, "1"]}}, "grid values model.pooling=[1, '1'] must be different"),
        ({"seeds": [1, 1]}, "must be a list of different integers"),
        ({"selection_seeds": []}, "selection_seeds: seeds=[] must be a list of different integers"),
        ({"variants": {"a": {"trainer": {"learning_rate": 1}}}}, "trainer.learning_rate is an axis of the grid"),
        ({"variants": {"a": {"data": {"task": "cifar"}}}}, "data.task is the sweep's to choose"),
        ({"trainer": {"output_dir": "x"}}, "trainer.output_dir is the sweep's to choose"),
        ({"variants": {"../a": {}}}, "must be a name of letters"),
    ],
)
def test_a_bad_file_is_named_before_anything_runs(write, changes, message):
    with pytest.raises(ValueError) as error:
        load_sweep(write(**changes))
    assert message in str(error.value)


def test_a_title_that_a_base_gave_to_its_model_says_which_it_is_instead(write):
    base = write(title="DeiT-B")
    above = base.with_name("above.yaml")
    above.write_text("base: tiny.yaml\nmodel: {pretrained: checkpoints/mine}\n")
    assert load_sweep(base).title == "DeiT-B"
    assert load_sweep(above).title == "DeiT-B changed to model.pretrained=checkpoints/mine"
    assert load_sweep(base, ["model.pretrained=other"]).title == "DeiT-B changed to model.pretrained=other"
    above.write_text("base: tiny.yaml\ntitle: Mine\nmodel: {pretrained: checkpoints/mine}\n")
    assert load_sweep(above).title == "Mine"


def test_a_file_that_is_no_sweep_says_what_it_lacks(write):
    path = write()
    content = yaml.safe_load(path.read_text())
    del content["base"], content["seeds"], content["grid"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"tiny\.yaml is no sweep, it lacks `seeds`, `grid`$"):
        load_sweep(path)


def test_choosing_keeps_the_order_of_the_file():
    assert choose("seeds", [2, 0], [0, 1, 2]) == [0, 2] and choose("seeds", None, [1]) == [1]


# ---- shipped configurations -----------------------------------------------------------------------------------------


TITLES = {
    "deit_tiny": "DeiT-T", "deit_small": "DeiT-S", "deit_base": "DeiT-B", "dino_small": "DINO-S", "dino_base": "DINO-B",
    **{f"deit3_{size}": f"DeiT-III-{size[0].upper()}" for size in ("small", "base", "large", "huge")},
}  # fmt: skip


RATES = [1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4]
TABLE_29 = {  # 5 of 50 epochs warm up
    "num_train_epochs": 50, "per_device_train_batch_size": 64, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "layer_decay": 0.65, "weight_decay": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "bf16": True,
    "optim": "adamw_torch",
}  # fmt: skip


@each("model, method", itertools.product(TITLES, ["full", "lora", "dora"]))
def test_every_shipped_sweep_is_the_recipe_of_table_29(model, method):
    sweep = load_sweep(shipped.path(f"{shipped.VTAB}#{model}-{method}"))
    ranks = [{}] if method == "full" else [{"tuning.rank": rank} for rank in (2, 4, 8, 16)]
    assert sweep.points == [{"trainer.learning_rate": rate, **rank} for rate in RATES for rank in ranks]
    assert sweep.seeds == sweep.selection_seeds == [0, 1, 2, 3, 4] and sweep.tasks == list(TASKS)
    priors = {name: SparsePriorViTConfig(prior=config["model"]["prior"]) for name, config in sweep.configs.items()}
    assert {name: (prior.prior_name, (prior.prior["decay"] or {}).get("init")) for name, prior in priors.items()} == {
        "baseline": ("dense", None), "violin": ("violin", "finetune"), "violin_moving": ("violin", "moving"),
    }  # fmt: skip
    # Adapters as in github.com/BenediktAlkin/vtab1k-pytorch: LoraTrainer.
    adapters = {"method": method, "targets": "attention+mlp", "alpha": 1, "bias": "all"}
    assert all(config["tuning"] == ({} if method == "full" else adapters) for config in sweep.configs.values())
    trainer = sweep.configs["baseline"]["trainer"]
    table = TABLE_29 if method == "full" else {**TABLE_29, "layer_decay": 1.0}
    assert {key: trainer[key] for key in table} == table
    assert sweep.configs["violin"]["model"]["pretrained"] == f"checkpoints/{model}"
    assert sweep.title == TITLES[model] + {"full": "", "lora": ", LoRA", "dora": ", DoRA"}[method]


@each("name", [name for file in shipped.SWEEPS[1:] for name in shipped.cells(file)])
def test_tables_7_and_18_have_the_recipe_of_table_29(name):
    """And a baseline that is dense whatever it starts from."""
    sweep = load_sweep(shipped.path(name))
    assert [point["trainer.learning_rate"] for point in sweep.points] == RATES
    assert sweep.seeds == sweep.selection_seeds == [0, 1, 2, 3, 4]
    assert sweep.configs["baseline"]["model"]["prior"] == "dense"
    for config in sweep.configs.values():
        assert {key: config["trainer"][key] for key in TABLE_29} == TABLE_29
        assert config["model"]["image_size"] == 224 and not config["augmentation"]


def test_table_7_has_the_papers_rows_and_table_18_keeps_the_pretrained_mask():
    rows = load_sweep(shipped.path(shipped.SWEEPS[1])).configs
    printed = ["baseline", "violin", "additive", "swin_rpb", "irpe_qkv", "localvit", "manhattan", "peano", "random"]
    assert list(rows) == printed
    assert {config["model"]["pretrained"] for config in rows.values()} == {"checkpoints/deit_base"}
    pretrained = load_sweep(shipped.path("experiments/vio_table18.yaml#dino_small")).configs["violin"]["model"]
    assert pretrained["pretrained"] == "checkpoints/violin_dino_small" and "prior" not in pretrained


def test_a_run_trains_without_augmentation_and_judges_the_last_step(trained, write):
    done, _ = trained
    work(sweep_of(write()))
    for config in done:
        assert config["augmentation"] == {} and config["trainer"]["max_grad_norm"] == 0
        assert config["trainer"]["eval_strategy"] == "no" and config["trainer"]["load_best_model_at_end"] is False
    assert point_name({}) == "only" and load_sweep(write(grid={})).points == [{}]


def test_training_sees_the_images_as_the_processor_makes_them(write, data, tmp_path, monkeypatch):
    """No augmentation, no aspect kept, ImageNet's mean and deviation."""
    import numpy as np
    from PIL import Image

    sweep, batches = load_sweep(write()), []
    run = sweep.selection_runs("baseline", "eurosat")[0]
    config = sweep.config(run)
    config["trainer"].update(output_dir=str(tmp_path / "run"), max_steps=1)
    step = hf_run.SparsePriorTrainer.training_step

    def noted(self, model, inputs, *args):
        batches.append(inputs)
        return step(self, model, inputs, *args)

    monkeypatch.setattr(hf_run.SparsePriorTrainer, "training_step", noted)
    training.run(config)
    pixels = batches[0]["pixel_values"].double().numpy()
    assert pixels.shape == (16, 3, 8, 8)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    images = [
        (np.asarray(Image.open(path).convert("RGB")) / 255 - mean) / deviation
        for path in (data / "eurosat" / "images" / "train800").iterdir()
    ]
    nearest = [min(np.abs(one.transpose(1, 2, 0) - image).max() for image in images) for one in pixels]
    assert max(nearest) < 1e-5
