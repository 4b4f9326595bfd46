import copy
import itertools
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import TrainerCallback

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.classification.config import SECTIONS
from hf_sparseprior.runs import hf_run
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.run_folder import claim
from hf_sparseprior.training import SoftTargetCollator
from tasks.classification import train as training
from tasks.classification.compare import load_comparison
from tasks.classification.compare import main as compare_main
from tasks.common import compare
from tasks.common.compare import run_comparison
from tasks.common.comparison_table import table
from tasks.common.queue import Queue, RunsFailed
from tasks.common.records import add_records, read_records
from tasks.common.records import main as records_main
from tests.each import each
from tests.processes import IMPORTED, ROOT, script

pytestmark = pytest.mark.slow

BASE = {
    "data": {"source": "digits", "limit_train": 128, "limit_validation": 60, "limit_test": 60},
    "augmentation": {"crop": "random", "padding": 1, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
    "model": {
        "prior": "dense", "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "drop_path_rate": 0.1,
    },
    "trainer": {
        "max_steps": 6, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 512, "learning_rate": 5e-2,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "ema_decay": 0.5,
        "layer_decay": 0.8, "disable_tqdm": True, "use_cpu": True, "seed": 77,
    },
}  # fmt: skip
VARIANTS = {"dense": {}, "violin": {"model": {"prior": "violin"}}}
# What two runs of one configuration may differ in.
TIMES = ("seconds", "seconds_per_step", "data_wait", "config")


def write(folder, variants=VARIANTS, seeds=(0, 1), **content):
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml", "seeds": list(seeds), "variants": variants, **content}))
    return path


def same(results):
    """Records by variant, without what may differ."""
    return {
        name: [{key: value for key, value in record.items() if key not in TIMES} for record in runs]
        for name, runs in results.items()
    }


def weights(folder):
    """The checksum of each run's model."""
    found = {path.parent: json.loads(path.read_text())["model_sha256"] for path in folder.rglob("results.json")}
    return {str(path.relative_to(folder)): checksum for path, checksum in found.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole comparison: its file, folder of records, results, and the draws of each run's samples and its batches."""
    folder = tmp_path_factory.mktemp("comparison")
    path, draws, batches = write(folder), [], []
    train, collate = compare.run, SoftTargetCollator.__call__

    def start(*args, **options):
        draws.append([])
        batches.append([])
        return train(*args, **options)

    def note(collator, samples):
        batch = collate(collator, samples)
        draws[-1].extend(sample["draw"] for sample in samples)
        batches[-1].append({name: value.clone() for name, value in batch.items()})
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run", start)
        patch.setattr(SoftTargetCollator, "__call__", note)
        results = run_comparison(load_comparison(path), folder / "out", folder / "records")
    return path, folder / "records", results, (draws, batches)


def test_seeds_take_turns_and_each_run_leaves_a_record(finished):
    _, records, results, _ = finished
    assert list(results) == ["dense", "violin"]
    for name, runs in results.items():
        assert [record["seed"] for record in runs] == [0, 1]
        assert all(record["prior"] == name and record["steps"] == 6 for record in runs)
        assert all("test_ema_accuracy" in record["metrics"] for record in runs)
    assert {row: list(runs.values()) for row, runs in read_records(records).items()} == results


def test_variants_of_one_seed_get_the_same_batches_bit_for_bit(finished):
    """The same images in the same order, with the same crops, mixup, CutMix and soft labels, though the models draw
    differently: violin has more parameters."""
    draws, batches = finished[3]
    assert len(draws) == 4  # dense 0, violin 0, dense 1, violin 1
    assert draws[0] == draws[1] and draws[2] == draws[3] and draws[0] != draws[2]
    assert len(draws[0]) >= 6 * 16
    for one, other in (batches[:2], batches[2:]):
        assert len(one) == len(other) >= 6
        for batch, same_batch in zip(one, other, strict=True):
            assert {"pixel_values", "labels"} <= batch.keys() == same_batch.keys()
            assert all(torch.equal(value, same_batch[name]) for name, value in batch.items())
    assert not torch.equal(batches[0][0]["pixel_values"], batches[2][0]["pixel_values"])


def test_every_test_image_counts_and_the_record_says_which_were_right(finished):
    _, records, results, _ = finished
    for name, seed in itertools.product(VARIANTS, (0, 1)):
        record = results[name][seed]
        stored = json.loads((records.parent / "out" / name / f"seed{seed}" / "results.json").read_text())
        counts = np.array(stored["confusion"])
        assert counts.sum() == 60 == record["test_correct"]["count"]
        right = unpack_correct(record["test_correct"])
        assert right.sum() == np.trace(counts)
        assert right.mean() == pytest.approx(record["metrics"]["test_accuracy"])


def forbid(patch):
    patch.setattr(compare, "run", lambda *args, **options: pytest.fail("trained again"))


def test_nothing_is_done_twice(finished, monkeypatch, tmp_path):
    path, records, results, _ = finished
    forbid(monkeypatch)
    assert run_comparison(load_comparison(path), tmp_path / "elsewhere", records) == results
    assert run_comparison(load_comparison(path), tmp_path, records, ["violin", "violin"]) == {
        "violin": results["violin"]
    }


def test_nobody_asks_how_processes_are_joined_before_the_first_run(finished, tmp_path, monkeypatch):
    """Who asks accelerate first settles it, and that is the task, which may want the CPU and its own timeout."""
    path, _, results, _ = finished
    asked = []

    def run(task, config, **_):
        assert asked == []
        return {**results["dense"][0], "config": config}

    def state():
        asked.append(None)
        return SimpleNamespace(is_main_process=True)

    monkeypatch.setattr(compare, "PartialState", state)
    monkeypatch.setattr(compare, "run", run)
    comparison = load_comparison(path)
    comparison.seeds = [0]
    run_comparison(comparison, tmp_path, tmp_path, ["dense"])
    assert asked


def test_one_more_seed_runs_only_that(finished, tmp_path, monkeypatch):
    _, records, results, _ = finished
    started = []

    def run(task, config, **_):
        started.append(config["trainer"])
        return {**results["dense"][0], "config": config, "seed": config["trainer"]["seed"]}

    monkeypatch.setattr(compare, "run", run)
    path = write(tmp_path, seeds=(0, 1, 2))
    shutil.copytree(records, tmp_path / "records")
    run_comparison(load_comparison(path), tmp_path / "out", tmp_path / "records")
    assert [(t["seed"], Path(t["output_dir"]).parts[-2:]) for t in started] == [
        (2, ("dense", "seed2")),
        (2, ("violin", "seed2")),
    ]


def test_a_record_of_another_configuration_is_refused_before_anything_runs(finished, monkeypatch, tmp_path):
    path, records, _, _ = finished
    forbid(monkeypatch)
    comparison = load_comparison(path, ["trainer.learning_rate=1e-3"])
    comparison.configs = {"new": copy.deepcopy(comparison.configs["dense"]), **comparison.configs}
    message = r"jsonl: the record of dense, seed 0 is of another configuration \(trainer.learning_rate: 0.05"
    with pytest.raises(ValueError, match=message):
        run_comparison(comparison, tmp_path, records)


def test_a_half_done_run_of_another_configuration_is_refused_before_anything_runs(finished, monkeypatch, tmp_path):
    forbid(monkeypatch)
    last = tmp_path / "violin" / "seed1"
    last.mkdir(parents=True)
    config = load_comparison(finished[0], ["trainer.learning_rate=1e-3"]).configs["violin"]
    (last / "run_config.json").write_text(json.dumps(config))
    message = r"seed1 is of another configuration \(.*learning_rate.*remove it or choose another --out"
    with pytest.raises(ValueError, match=message):
        run_comparison(load_comparison(finished[0]), tmp_path, tmp_path)


def test_records_of_earlier_versions_are_brought_in_before_anything_runs(finished, tmp_path, monkeypatch, capsys):
    path, records, results, _ = finished
    forbid(monkeypatch)
    for name, runs in results.items():
        for record in runs:
            write_results(tmp_path / "records" / name / f"seed{record['seed']}.json", record)
    arguments = ["--config", str(path), "--out", str(tmp_path / "out"), "--records", str(tmp_path / "records")]
    assert compare_main(arguments) == 2
    message = f"has 4 records of earlier versions, such as dense/seed0.json; python -m tasks.common.records {tmp_path}"
    assert message in capsys.readouterr().err
    assert records_main([str(tmp_path / "records")]) == 0 and compare_main(arguments) == 0
    assert (tmp_path / "records" / "records.jsonl").read_text() == (records / "records.jsonl").read_text()


@each("option", ["--out", "--records"])
def test_a_file_in_place_of_a_folder_is_named_before_anything_runs(finished, monkeypatch, tmp_path, capsys, option):
    forbid(monkeypatch)
    (tmp_path / "file").write_text("mine")
    folders = {"--out": str(tmp_path / "out"), "--records": str(tmp_path / "records"), option: str(tmp_path / "file")}
    arguments = [word for pair in folders.items() for word in pair]
    assert compare_main(["--config", str(finished[0]), *arguments]) == 2
    assert f"{option}={tmp_path}/file: {tmp_path}/file is not a folder\n" in capsys.readouterr().err


# ---- saved models ---------------------------------------------------------------------------------------------------


def save_model(folder, seed=0):
    torch.manual_seed(seed)
    config = SparsePriorViTConfig(**BASE["model"], num_labels=10)
    SparsePriorViTForImageClassification(config).save_pretrained(folder)
    return folder


def from_saved(folder, variants=VARIANTS):
    return load_comparison(write(folder, variants), [f"model.pretrained={folder / 'model'}"])


@each(
    "options, message",
    [
        ({"patch_size": 3}, "image_size=8 must be a multiple of patch_size=3"),
        ({"prior": "violn"}, "violn"),
        ({"pretrained": "nowhere"}, "model.pretrained=nowhere is not a folder of a saved model"),
    ],
)
def test_what_does_not_fit_a_saved_model_is_named_before_anything_runs(tmp_path, monkeypatch, options, message):
    forbid(monkeypatch)
    variants = {"ok": {}, "bad": {"model": options}}
    save_model(tmp_path / "model")
    with monkeypatch.context() as patch, pytest.raises((ValueError, OSError), match=message):
        patch.setitem(BASE["model"], "pretrained", str(tmp_path / "model"))
        run_comparison(load_comparison(write(tmp_path, variants)), tmp_path / "out", tmp_path / "records")
    assert not (tmp_path / "out").exists()


NUMBERS = {"parameters": 7, "pruning_ratio": 0.0, "seconds": 1.0, "seconds_per_step": 0.1}
WHOLE = {**dict.fromkeys(compare.RECORDED), "metrics": {"test_accuracy": 0.5}, "config": {}, **NUMBERS}


@each(
    "change, message",
    [
        ({"metrics": {}}, "is not whole, it lacks metrics.test_accuracy"),
        ({"metrics": {"test_accuracy": "high"}}, "metrics={'test_accuracy': 'high'} must be a map of names to numbers"),
        ({"seconds": None}, "it has no 'seconds'"),
        ({"parameters": "many"}, "parameters='many' must be an integer"),
    ],
)
def test_a_damaged_part_of_a_record_is_named(change, message, tmp_path):
    compare.check_record(tmp_path / "seed0.json", WHOLE)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/seed0\.json .*{message}.*; remove it$"):
        compare.check_record(tmp_path / "seed0.json", {**WHOLE, **change})


def leave_record(records, name, config, checksum):
    kept = {**WHOLE, "config": copy.deepcopy(config), "pretrained_sha256": checksum}
    kept["config"]["trainer"]["seed"] = 0
    kept["seed"] = 0
    add_records(records, [(name, kept)])


def test_records_of_two_checkpoints_are_not_put_in_one_table(tmp_path):
    comparison = from_saved(tmp_path)
    for name, checksum in (("dense", "abc"), ("violin", "def")):
        leave_record(tmp_path / "records", name, comparison.configs[name], checksum)
    with pytest.raises(ValueError, match=r"model started from 2 checkpoints \(abc, def\), not from one"):
        compare.all_records(comparison, tmp_path / "records")


def test_searches_from_scratch_leave_a_checkpoint_each():
    """A run with UPop from scratch had the checksum of what its own search left."""

    def records(**sections):
        config = {"model": {"prior": "dense"}, **sections}
        return [{"config": config, "pretrained_sha256": checksum} for checksum in ("abc", "def")]

    compare.check_one_checkpoint(records(compression={"method": "upop"}))
    for other in (records(), records(model={"pretrained": "model"}, compression={"method": "upop"})):
        with pytest.raises(ValueError, match="2 checkpoints"):
            compare.check_one_checkpoint(other)


def test_another_checkpoint_than_that_of_the_records_is_refused_before_anything_runs(tmp_path, monkeypatch):
    comparison = from_saved(tmp_path)
    save_model(tmp_path / "model")
    checksum = file_sha256(tmp_path / "model" / "model.safetensors")
    leave_record(tmp_path / "records", "dense", comparison.configs["dense"], checksum)
    started = []

    def run(task, config, **_):
        started.append(config)
        return {**WHOLE, "config": config, "seed": config["trainer"]["seed"]}

    monkeypatch.setattr(compare, "run", run)
    run_comparison(comparison, tmp_path / "out", tmp_path / "elsewhere", ["dense"])
    run_comparison(comparison, tmp_path / "out", tmp_path / "records", ["dense"])
    assert len(started) == 2 + 1
    (tmp_path / "records" / "records.jsonl").unlink()
    leave_record(tmp_path / "records", "dense", comparison.configs["dense"], checksum)
    forbid(monkeypatch)
    save_model(tmp_path / "model", seed=1)
    with pytest.raises(ValueError, match="started from 2 checkpoints"):
        run_comparison(comparison, tmp_path / "out", tmp_path / "records", ["dense"])


def test_the_checksum_is_of_the_weights_that_were_read(tmp_path, monkeypatch):
    checksum = file_sha256(save_model(tmp_path / "model") / "model.safetensors")
    config = from_saved(tmp_path).configs["dense"]
    config["trainer"].update(output_dir=str(tmp_path / "out"), max_steps=1)
    train = hf_run.SparsePriorTrainer.train
    replace = lambda self, **options: (save_model(tmp_path / "model", seed=1), train(self, **options))[1]  # noqa: E731
    monkeypatch.setattr(hf_run.SparsePriorTrainer, "train", replace)
    assert training.run(config)["pretrained_sha256"] == checksum


# ---- kills ----------------------------------------------------------------------------------------------------------

KILLS = """
import os, signal, sys, torch
from pathlib import Path
from transformers import Trainer
from tasks.classification.compare import load_comparison
from tasks.common.compare import run_comparison
from tasks.common.records import read_records

path, folder = Path(sys.argv[1]), Path(sys.argv[2])
step, replace, save = Trainer.training_step, os.replace, torch.save

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def in_step(trainer, *args, **kwargs):
    return die() if trainer.state.global_step == 3 else step(trainer, *args, **kwargs)

def before(name):  # the file is about to appear
    return lambda source, target: die() if Path(target).name == name else replace(source, target)

def after(name):
    return lambda source, target: (replace(source, target), Path(target).name == name and die())

def half(name):
    def write(value, target, *args, **kwargs):
        path = Path(getattr(target, "name", target))  # torch may be given a file that is open
        if path.name == name:
            path.write_bytes(b"PK half")
            die()
        return save(value, target, *args, **kwargs)
    return write

# Each process goes on where the one before was killed.
POINTS = [
    (os, "replace", before("run_config.json")),  # dense, seed 0: claiming its folder
    (os, "replace", after("run_config.json")),
    (torch, "save", half("scheduler.pt")),  # saving the first checkpoint
    (Trainer, "training_step", in_step),
    (os, "replace", before("results.json")),
    (os, "replace", after("results.json")),  # done, but without a record
    (os, "replace", before("records.jsonl")),
    (os, "replace", after("records.jsonl")),  # between two runs
    (Trainer, "training_step", in_step),  # violin, seed 0
]
for number, point in enumerate(POINTS):
    child = os.fork()
    if not child:
        setattr(*point)
        run_comparison(load_comparison(path), folder / "out", folder / "records")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, status)
    done = {row: list(runs) for row, runs in read_records(folder / "records").items()}
    assert done == ({"dense": [0]} if number >= 7 else {}), (number, done)
"""


def test_killed_at_any_moment_the_same_command_goes_on(finished, tmp_path):
    path, records, results, _ = finished
    log = tmp_path / "log.txt"
    process = script(KILLS, str(path), str(tmp_path), folder=ROOT, log=log, here=True)
    assert process.wait(300) == 0, log.read_text()[-3000:]
    comparison = load_comparison(path)
    comparison.seeds = [0]  # in whose runs all the kills were
    again = run_comparison(comparison, tmp_path / "out", tmp_path / "records")
    assert same(again) == same({name: runs[:1] for name, runs in results.items()})
    whole = weights(records.parent / "out")
    assert weights(tmp_path / "out") == {run: whole[run] for run in ("dense/seed0", "violin/seed0")}
    configurations = [record["config"] for record in itertools.chain(*again.values())]
    assert all(config["trainer"]["output_dir"].startswith(str(tmp_path)) for config in configurations)
    # The run that was killed in a step went on from its checkpoint.
    results = json.loads((tmp_path / "out" / "violin" / "seed0" / "results.json").read_text())
    assert results["resumed_from"] == "checkpoint-2"


# ---- several at a time ----------------------------------------------------------------------------------------------


class Dies(TrainerCallback):
    """Kills the process in the fourth step, one after a checkpoint, unless that was done before."""

    def __init__(self, done):
        self.done = done

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def killed_once(task, config, command, metric=None, callbacks=()):
    """What a queue's process calls for a run."""
    done = Path(config["trainer"]["output_dir"]).parents[1] / "killed"
    return compare.do_run(task, config, command, metric, [*callbacks, Dies(done)])


def test_a_queue_gives_the_same_records_though_a_run_is_killed(finished, tmp_path, capsys, monkeypatch):
    path, _, results, _ = finished
    out, records = tmp_path / "out" / "violin" / "seed0", tmp_path / "records"
    monkeypatch.setattr(compare, "do_run", killed_once)  # here, not in the queue's processes
    arguments = ["--out", str(tmp_path / "out"), "--records", str(records), "--variants", "violin", "--seeds", "0"]
    Queue(IMPORTED, 1)  # its server is the tests'
    assert compare_main(["--config", str(path), *arguments, "--jobs", "2"]) == 0
    found = read_records(records)["violin"][0]
    assert same({"violin": [found]}) == same({"violin": results["violin"][:1]})
    assert json.loads((out / "results.json").read_text())["resumed_from"] == "checkpoint-2"
    printed = capsys.readouterr()
    assert "violin, seed 0: killed (signal 9); it is put back" in printed.err and "| violin | " in printed.out


def test_a_file_of_the_users_is_imported_wherever_a_run_is_done(own_file, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "files", {"cross": {"model": {"prior": "cross+columns"}}}, seeds=[0])
    monkeypatch.setattr(compare, "do_run", killed_once)
    Queue(IMPORTED, 1)
    options = ["--config", str(path), "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert compare_main(options) == 2  # nobody knows its names yet
    assert "cross" in capsys.readouterr().err
    assert compare_main([*options, "--import", str(own_file)]) == 0
    out = tmp_path / "out" / "cross" / "seed0"
    results = json.loads((out / "results.json").read_text())
    assert results["resumed_from"] == "checkpoint-2" and results["prior"] == "cross+columns"
    assert (out / "model" / "own_cross.py").is_file()


def finish(folder, config, results, **changes):
    """Leave in a run's folder what a process of a queue would."""
    claim(folder, config)
    record = results[config["model"]["prior"]][config["trainer"]["seed"]]
    write_results(folder / "results.json", {**record, "config": config, **changes})


def test_a_queue_names_what_failed_after_the_others_are_done(finished, tmp_path, monkeypatch, capsys):
    """Results that lack something fail their run and stop no other: before a queue, while its runs end, and when the
    command is given again. The table has the others, and the exit status is 1."""
    path, _, results, _ = finished

    def run(queue, jobs):
        assert "dense, seed 0" in [job.name for job in jobs]
        for job in jobs:
            damage = {"metrics": {"test_accuracy": None}} if job.name == "dense, seed 0" else {}
            finish(job.folder, job.arguments[1], results, **damage)
            queue.when_done()
        raise RunsFailed("1 of 4 runs failed:\ndense, seed 0: it lacks metrics.test_accuracy (x.log)")

    monkeypatch.setattr(Queue, "run", run)
    for _ in range(2):
        assert compare_main(["--config", str(path), "--out", str(tmp_path), "--jobs", "2"]) == 1
        printed = capsys.readouterr()
        assert "it lacks metrics.test_accuracy" in printed.err and "(1 seed)" in printed.out
        assert (tmp_path / "table.md").read_text().strip() in printed.out
        kept = {row: list(runs) for row, runs in read_records(tmp_path).items()}
        assert kept == {"dense": [1], "violin": [0, 1]}


def test_what_another_command_did_meanwhile_is_in_the_records(finished, tmp_path, monkeypatch):
    path, _, results, _ = finished
    comparison = load_comparison(path)

    def run(queue, jobs):  # all rows are done, though this command does dense alone, and nothing says so
        for name, seed in itertools.product(results, (0, 1)):
            row = comparison.row(name, seed, tmp_path, tmp_path)
            finish(row.folder, row.config, results)

    monkeypatch.setattr(Queue, "run", run)
    found = run_comparison(comparison, tmp_path, tmp_path, ["dense"], jobs=2)
    assert list(found) == ["dense"]
    assert {row: list(runs) for row, runs in read_records(tmp_path).items()} == {"dense": [0, 1], "violin": [0, 1]}


def test_a_queue_starts_seeds_in_turn_and_only_what_is_missing(finished, tmp_path, monkeypatch):
    path, _, results, _ = finished
    started = []
    monkeypatch.setattr(Queue, "run", lambda queue, jobs: started.extend(job.name for job in jobs))
    add_records(tmp_path / "records", [("violin", results["violin"][0])])
    comparison = load_comparison(path)
    comparison.seeds = [1, 0]
    monkeypatch.setattr(compare, "do_run", lambda *args, **_: None)
    run_comparison(comparison, tmp_path / "out", tmp_path / "records", jobs=2)
    assert started == ["dense, seed 1", "violin, seed 1", "dense, seed 0"]


@each("name", ["classification", "heads", "pretraining", "video"])
def test_tasks_are_pickled_by_name(name):
    """As a queue's processes get them."""
    pytest.importorskip(f"tasks.{name}.task", reason=f"the packages of {name} are not installed", exc_type=ImportError)
    task = hf_run.task_in(f"tasks.{name}.task")
    assert pickle.loads(pickle.dumps(task)) is task


# ---- configurations -------------------------------------------------------------------------------------------------


def test_variants_do_not_leak_into_each_other(tmp_path):
    variants = {
        "first": {"model": {"hidden_size": 16, "num_attention_heads": 4}, "trainer": {"weight_decay": 0.3}},
        "second": {"augmentation": {"mixup": 0.0, "cutmix": 0.0}},
        "third": None,
        "fourth": {"model": {"prior": "violin"}},
    }
    configs = load_comparison(write(tmp_path, variants)).configs
    expected = {name: {**{section: {} for section in SECTIONS}, **copy.deepcopy(BASE)} for name in variants}
    expected["first"]["model"].update(hidden_size=16, num_attention_heads=4)
    expected["first"]["trainer"]["weight_decay"] = 0.3
    expected["second"]["augmentation"].update(mixup=0.0, cutmix=0.0)
    expected["fourth"]["model"]["prior"] = "violin"
    assert configs == expected
    configs["first"]["model"]["hidden_size"] = 0
    configs["first"]["data"]["source"] = {"name": "violin"}
    assert all(configs[name] == expected[name] for name in ("second", "third"))


def test_overrides_reach_every_variant_and_win(tmp_path):
    configs = load_comparison(write(tmp_path), ["model.prior=fibottention", "trainer.max_steps=2"]).configs
    assert all(c["model"]["prior"] == "fibottention" and c["trainer"]["max_steps"] == 2 for c in configs.values())


@each("name", ["..", ".hidden", "a/b", "", "-x", "a\\b"])
def test_a_variant_cannot_leave_its_folder(tmp_path, name):
    with pytest.raises(ValueError, match="must be a name of letters"):
        load_comparison(write(tmp_path, {name: {}}))


@each(
    "changes, message",
    [
        ({"modle": {}}, "has no key 'modle'; did you mean 'model'"),
        ({"model": {"piror": "dense"}}, "did you mean 'prior'"),
        ({"model": "dense"}, "model must hold keys and values, got 'dense'"),
        ("dense", "must hold sections, got 'dense'"),
        ({"augmentation": {"mixup": -1}}, "augmentation.mixup=-1 must be"),
        ({"model": {"preset": "deti"}}, "deti"),
        ({"trainer": {"seed": 4}}, "trainer.seed is the comparison's to choose"),
        ({"trainer": {"output_dir": "x"}}, "trainer.output_dir is the comparison's to choose"),
    ],
)
def test_a_bad_variant_is_named_before_anything_runs(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        load_comparison(write(tmp_path, {"ok": {}, "a": changes}))
    assert message in str(error.value) and "variant 'a'" in str(error.value)


@each(
    "reference, message",
    [
        ("c", "reference has no row 'c'; known: a, b"),
        ("", "reference has no row ''; known: a, b"),
        ({"c": "a"}, "reference has no row 'c'; known: a, b"),
        ({"a": ""}, "reference has no row ''; known: a, b"),
        (1.0, "reference=1.0 must be a row, or a map of rows to the rows they are compared with; a name that YAML"),
        ({"a": "a"}, "reference: 'a' is compared with itself"),
        ({}, "reference={} must be a row, or a map of rows"),
        ({"a": 1}, "reference={'a': 1} must be a row, or a map of rows"),
    ],
)
def test_a_bad_reference_is_named_before_anything_runs(tmp_path, reference, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_comparison(write(tmp_path, {"a": {}, "b": {}}, reference=reference))


def test_rows_have_the_reference_that_the_file_names(tmp_path):
    variants = {"a": {}, "b": {}, "c": {}}
    plain = load_comparison(write(tmp_path, variants))
    assert (plain.main_reference, plain.references) == ("a", None)
    named = load_comparison(write(tmp_path, variants, reference="b"))
    assert (named.main_reference, named.references) == ("b", None)
    own = load_comparison(write(tmp_path, variants, reference={"c": "b"}))
    assert (own.main_reference, own.references) == ("a", {"a": "a", "b": "a", "c": "b"})
    assert own.configs == plain.configs == named.configs  # so that records go on to count


def test_what_rows_share_need_not_be_a_whole_configuration(tmp_path):
    """Each row says how many heads its width has; without a row hidden_size=12 has none that fit."""
    rows = {"a": {"model": {"num_attention_heads": 3}}, "b": {"model": {"num_attention_heads": 4}}}
    configs = load_comparison(write(tmp_path, rows, model={"hidden_size": 12, "num_attention_heads": 5})).configs
    assert [config["model"]["num_attention_heads"] for config in configs.values()] == [3, 4]
    path = write(tmp_path, {**rows, "c": {}}, model={"hidden_size": 12, "num_attention_heads": 5})
    with pytest.raises(ValueError, match=r"small\.yaml, variant 'c': hidden_size=12 must be a multiple of .*5"):
        load_comparison(path)


@each("key, way", [("seed", "use `seeds` or --seeds"), ("output_dir", "use --out")])
def test_the_file_does_not_set_what_the_comparison_chooses(tmp_path, key, way):
    """Its bases may: they are runs of their own, as BASE is with its seed."""
    path = write(tmp_path, trainer={key: 3 if key == "seed" else "here"})
    with pytest.raises(ValueError) as error:
        load_comparison(path)
    assert f"small.yaml: trainer.{key} is the comparison's to choose; {way}" in str(error.value)
    matrix = {"base": "small.yaml", "matrix": {"axis": {"one": {"trainer": {key: "x"}}}}}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    with pytest.raises(ValueError, match=rf"matrix\.yaml#one: trainer\.{key} is the comparison's"):
        load_comparison(tmp_path / "matrix.yaml#one")


def test_bad_rows_and_seeds_are_named(tmp_path):
    path, whole = write(tmp_path), {"base": "base.yaml", "seeds": [0], "variants": VARIANTS}
    bad = [(("seeds", "variants"), {}, ValueError, r"small\.yaml is no comparison, it lacks `seeds`, `variants`$")]
    bad += [((key,), {}, ValueError, f"is no comparison, it lacks `{key}`$") for key in ("seeds", "variants")]
    message = r"variants=.* must hold a name and changes for each row"
    bad += [((), {"variants": variants}, ValueError, message) for variants in ({}, None, ["dense"])]
    bad += [((), {"variants": "no_such_rows.yaml"}, FileNotFoundError, "no_such_rows")]
    message = r"seeds=.* must be a list of different integers of 0 or more"
    bad += [((), {"seeds": seeds}, ValueError, message) for seeds in ([], [0, 0], [-1], [1.5], [True], ["0"], 3)]
    for lacking, changes, error, message in bad:
        content = {key: value for key, value in {**whole, **changes}.items() if key not in lacking}
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(error, match=message):
            load_comparison(path)


@each(
    "arguments, message",
    [
        (["--seeds", "1", "1"], "must be a list of different integers"),
        (["--variants", "vilin"], "did you mean 'violin'"),
        (["trainer.seed=3"], "trainer.seed is the comparison's to choose"),
        (["--jobs", "0"], "--jobs=0 must be 1 or more"),
        (["trainer.learning_rate=abc"], "trainer.learning_rate='abc' must be a number"),
    ],
)
def test_the_command_line_reports_errors_in_one_line(tmp_path, capsys, arguments, message):
    assert compare_main(["--config", str(write(tmp_path)), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


# ---- table ----------------------------------------------------------------------------------------------------------


def record(accuracy, ema=None, seconds=2.0):
    metrics = {"test_accuracy": accuracy, **({} if ema is None else {"test_ema_accuracy": ema})}
    return {"metrics": metrics, "pruning_ratio": 60.0, "parameters": 123, "seconds_per_step": 0.01, "seconds": seconds}


def test_the_table_has_mean_and_sample_standard_deviation():
    lines = table({"a": [record(0.5), record(0.7), record(0.9, seconds=5.0)], "b": [record(0.25)]}).split("\n")
    assert lines[0].startswith("| prior | test accuracy, %, mean ± std of 3 |") and "average" not in lines[0]
    assert lines[2] == "| a | 70.00 ± 20.00 | 40.0 | 123 | 10 | 3.0 |"
    assert lines[3] == "| b | 25.00 (1 seed) | 40.0 | 123 | 10 | 2.0 |"  # a single seed has no deviation


def test_the_table_shows_the_largest_change_of_the_mask_where_there_is_a_decay():
    decayed = [{**record(0.5), "max_decay_change": change} for change in (0.0125, 0.25)]
    lines = table({"a": [record(0.5)], "b": decayed}).split("\n")
    assert lines[0].split(" | ")[2] == "max abs(M - 1)"
    assert [line.split(" | ")[2] for line in lines[2:]] == ["-", "0.25"]
    assert lines[2].split(" | ")[1] == "50.00 (1 seed)" and lines[3].split(" | ")[1] == "50.00 ± 0.00"


def test_the_table_shows_the_cost_of_attention_where_runs_recorded_it():
    counted = {**record(0.5), "attention_flops": 147_460_000}
    lines = table({"a": [counted], "b": [record(0.5)], "c": [{**record(0.5), "attention_flops": None}]}).split("\n")
    assert lines[0].split(" | ")[3] == "MHSA, MFLOPs"
    assert [line.split(" | ")[3] for line in lines[2:]] == ["147.5", "-", "-"]


def test_the_table_shows_the_moving_average_where_there_is_one():
    lines = table({"a": [record(0.5, 0.6), record(0.5, 0.8)], "b": [record(0.5)]}).split("\n")
    assert lines[2].split(" | ")[2] == "70.00 ± 14.14" and lines[3].split(" | ")[2] == "-"
    assert len({line.count("|") for line in lines}) == 1
