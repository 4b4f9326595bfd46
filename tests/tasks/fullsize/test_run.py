"""The command itself, on configurations of a few thousand parameters."""

import json
import os
import time

import pytest
import yaml

from tasks.common.locks import locked
from tasks.fullsize import run as command
from tasks.fullsize.configs import PaperRun, find_groups
from tasks.fullsize.predict import IMPORTED_GIB, Need, memory_of_machine, parted, sibling_need, whole_need
from tasks.fullsize.process import is_whole
from tasks.fullsize.steps import Batch, train_overrides
from tests.processes import ROOT

SIZES = {"patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TINY = {
    "data": {"source": "cifar10", "path": "data/cifar10", "stage": "final"},
    "augmentation": {"mixup": 0.8, "flip": 0.5},
    "model": {"image_size": 32, "prior": "dense", **SIZES},
    "trainer": {
        "per_device_train_batch_size": 4, "num_train_epochs": 100, "learning_rate": 1e-3, "optim": "adamw_torch",
        "load_best_model_at_end": False, "eval_strategy": "no", "ema_decay": 0.9, "use_cpu": True,
    },
}  # fmt: skip
ROWS = {"dense": {}, "violin": {"model": {"prior": "violin"}}, "other-seed": {"trainer": {"learning_rate": 1e-4}}}


def write_configs(folder, rows=ROWS, **changes):
    (folder / "experiments").mkdir(parents=True, exist_ok=True)
    content = {**TINY, **changes, "seeds": [0], "variants": rows}
    (folder / "experiments" / "table.yaml").write_text(yaml.safe_dump(content))
    return folder


def start(tmp_path, *arguments):
    return command.main(["--configs", str(tmp_path / "configs"), "--out", str(tmp_path / "out"), *arguments])


def records(tmp_path):
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out" / "records").glob("*.json")}


@pytest.mark.slow
def test_configurations_are_trained_go_on_and_are_evaluated(tmp_path, capfd):
    write_configs(tmp_path / "configs", {"dense": {}, "other-rate": {"trainer": {"learning_rate": 1e-4}}})
    assert start(tmp_path) == 0
    found = records(tmp_path)
    record = found["classification_table_dense"]
    assert len(found) == 1 and record["status"] == "done" and record["parameters"] > 1000 and record["runs"] == 2
    for part, images in (("small", 2), ("whole", 4)):
        step = record[part]
        assert step["images"] == images and step["resumed_from"] == "checkpoint-1"
        assert len(step["losses"]) == 2 and 0 <= step["evaluated"]["test_accuracy"] <= 1
        assert 0.1 < step["peak_gib"] < 20 and step["seconds"] > step["seconds_per_step"] > 0
    table = (tmp_path / "out" / "TABLE.md").read_text()
    assert "2 runs in 1 groups" in table and "1 done; they stand for 2 runs" in table
    assert (tmp_path / "out" / "fullsize.png").stat().st_size > 5000
    assert not list((tmp_path / "out" / "runs").iterdir())  # the models of runs that are done
    # What has a record is not done again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()}
    assert start(tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").iterdir()} == before
    capfd.readouterr()
    # A table of the records alone is the same one.
    (tmp_path / "out" / "TABLE.md").unlink()
    assert start(tmp_path, "--table") == 0 and (tmp_path / "out" / "TABLE.md").read_text() == table
    # What has changed is, and what fails does not stop it.
    changed = {"broken": {"model": {"pretrained": "nowhere/model"}}, "dense": {"model": {"prior": "violin"}}}
    write_configs(tmp_path / "configs", changed)
    assert start(tmp_path, "--small") == 1
    again = records(tmp_path)
    assert again["classification_table_dense"]["key"] != record["key"]
    assert again["classification_table_dense"]["status"] == "done"
    assert again["classification_table_broken"]["status"] == "failed"
    assert "nowhere/model is written by no configuration" in again["classification_table_broken"]["reason"]
    assert "1 of 2 failed: experiments/table.yaml#broken" in capfd.readouterr().err


def test_what_needs_too_much_is_refused_with_its_figure_before_it_starts(tmp_path, capsys):
    write_configs(tmp_path / "configs", {"huge": {}}, model={"preset": "deit3_huge"})
    assert start(tmp_path, "--memory-gib", "4") == 0
    (record,) = records(tmp_path).values()
    # 632 million parameters: weights, gradients, two moments and an average of four bytes each.
    assert record["status"] == "refused" and record["parameters"] == pytest.approx(632e6, rel=0.02)
    assert record["first_need"]["memory_gib"] == pytest.approx(IMPORTED_GIB + 632e6 * 20 / 2**30, rel=0.02)
    assert record["reason"].startswith("memory: 12.5") and record["reason"].endswith("GiB predicted, 4.0 allowed")
    assert "refused: memory: 12.5" in (tmp_path / "out" / "TABLE.md").read_text()
    assert not (tmp_path / "out" / "fixtures").exists()
    # With another limit it is looked at again.
    assert start(tmp_path, "--memory-gib", "5") == 0
    (record,) = records(tmp_path).values()
    assert record["reason"].endswith("5.0 allowed")


def test_what_was_done_stays_done_where_the_limits_are_lower(tmp_path):
    write_configs(tmp_path / "configs", {"huge": {}}, model={"preset": "deit3_huge"})
    assert start(tmp_path, "--memory-gib", "4") == 0
    (place,) = (tmp_path / "out" / "records").glob("*.json")
    record = json.loads(place.read_text())
    small = {
        "images": 2, "parts": 1, "parameters": 632_000_000, "losses": [7.0, 6.9], "resumed_from": "checkpoint-1",
        "killed": True, "evaluated": {"test_accuracy": 0.0}, "seconds_per_step": 9.0, "train_seconds": 20.0,
        "seconds": 60.0, "peak_gib": 13.0, "arguments": "",
    }  # fmt: skip
    place.write_text(json.dumps({**record, "status": "done", "small": small}))
    assert start(tmp_path, "--memory-gib", "5") == 0
    again = json.loads(place.read_text())
    assert again["status"] == "done" and again["small"] == small and "reason" not in again
    assert again["whole"]["status"] == "refused" and "5.0 allowed" in again["whole"]["reason"]


def test_a_configuration_that_another_process_does_is_left_to_it(tmp_path):
    write_configs(tmp_path / "configs", {"dense": {}})
    with locked(tmp_path / "out" / "records" / "classification_table_dense.lock") as mine:
        assert mine and start(tmp_path) == 0
    assert records(tmp_path) == {} and "not yet done" in (tmp_path / "out" / "TABLE.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--only", "nothing"), "--only 'nothing' is in the name of no configuration"),
        (("--configs", "nowhere"), "--configs nowhere is not a folder"),
    ],
)
def test_bad_values_are_one_line(arguments, line, tmp_path, capsys):
    write_configs(tmp_path / "configs")
    assert start(tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert line in err and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--jobs", "--threads", "--minutes", "--memory-gib"])
def test_numbers_must_be_above_0(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        start(tmp_path, option, "0")
    assert f"{option} 0" in capsys.readouterr().err


def test_a_damaged_record_is_named(tmp_path, capsys):
    write_configs(tmp_path / "configs", {"dense": {}})
    place = tmp_path / "out" / "records" / "classification_table_dense.json"
    place.parent.mkdir(parents=True)
    place.write_text("{")
    assert start(tmp_path) == 2
    assert f"{place} is damaged" in capsys.readouterr().err


def test_the_list_says_what_each_needs_and_does_nothing(tmp_path, capsys):
    write_configs(tmp_path / "configs")
    assert start(tmp_path, "--list") == 0
    out = capsys.readouterr().out
    assert out.count("to do; 0.0 M parameters, at least 0.8 GiB") == 2 and not (tmp_path / "out").exists()


# ---- figures and overrides ------------------------------------------------------------------------------------------


def big(task="classification", images=64, **trainer):
    given = {"per_device_train_batch_size": images, "optim": "adamw_torch", **trainer}
    return PaperRun("a.yaml", task, {"data": {"source": "imagenet"}, "model": {}, "trainer": given})


SMALL = {"images": 2, "parameters": 2**28, "peak_gib": 6.0, "seconds_per_step": 3.0, "seconds": 30.0}


def test_the_own_step_is_predicted_from_the_small_one():
    """2^28 parameters of 16 bytes are 4 GiB; 2 images had the rest of 6 GiB."""
    fixed = IMPORTED_GIB + 4
    need = whole_need(big(), SMALL, Batch(64))
    assert need.memory_gib == pytest.approx(fixed + (6 - fixed) * 32)
    assert need.minutes == pytest.approx((30 + 2 * 3 * 31) / 60)
    assert whole_need(big(), SMALL, Batch(64, 4)).memory_gib == pytest.approx(fixed + (6 - fixed) * 8)
    # SGD has one moment less, an average of the weights one more, and adapters leave the weights alone.
    assert whole_need(big(optim="sgd"), SMALL, Batch(2)).memory_gib == pytest.approx(6)
    averaged = whole_need(big(ema_decay=0.9), SMALL, Batch(64)).memory_gib
    assert averaged == pytest.approx(fixed + 1 + (5 - fixed) * 32)


def test_models_that_are_not_counted_have_the_figure_of_a_run_of_their_table(tmp_path):
    run = PaperRun("experiments/t.yaml#lift-violin", "robotics", {})
    named = {"name": "experiments/t.yaml#lift-dense", "task": "robotics"}
    records = [
        {**named, "small": {**SMALL, "seconds": 90.0}},
        {**named, "small": {**SMALL, "peak_gib": 7.0}},
        {**named, "status": "refused"},
        {**named, "task": "video", "small": {**SMALL, "peak_gib": 99.0}},
        {**named, "name": "experiments/other.yaml#lift-dense", "small": {**SMALL, "peak_gib": 99.0}},
    ]
    assert sibling_need(run, records) == Need(7.0, 1.5)
    assert sibling_need(run, records[2:]) == sibling_need(run, []) == Need(None, None)


def test_a_step_is_done_in_as_few_parts_as_fit():
    assert parted(big(), SMALL, 100) == Batch(64)
    batch = parted(big(), SMALL, 16)
    assert batch == Batch(64, 4) and whole_need(big(), SMALL, Batch(64, 2)).memory_gib > 16
    assert parted(big(), SMALL, 1) == Batch(64, 32)  # of two images each
    assert parted(big("robotics"), SMALL, 1) == Batch(64)  # whose training has no parts


def test_limits_are_said_with_both_figures():
    assert Need(3.0, 1.0).over(4, 2) is None and Need(None, None).over(4, 2) is None
    assert Need(5.04, 1.0).over(4, 2) == "memory: 5.0 GiB predicted, 4.0 allowed"
    assert Need(3.0, 2.5).over(4, 2) == "time: 2.5 minutes predicted, 2.0 allowed"
    assert 0.1 < memory_of_machine() < 100_000


def test_parts_keep_the_images_of_a_step(tmp_path):
    given = train_overrides(big(), Batch(64, 4), tmp_path, tmp_path, {})
    assert {"trainer.per_device_train_batch_size=16", "trainer.gradient_accumulation_steps=4"} <= {*given}
    given = train_overrides(big(effective_batch_size=64), Batch(64, 4), tmp_path, tmp_path, {})
    assert "trainer.effective_batch_size=64" in given and not any("per_device" in each for each in given)


def test_a_checkpoint_is_whole_when_nothing_of_it_changes(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    assert not is_whole(None) and not is_whole(folder)
    (folder / "model.safetensors").touch()
    old = time.time() - 60
    for path in (folder / "model.safetensors", folder):
        os.utime(path, (old, old))
    assert not is_whole(folder)  # its last file is not there
    (folder / "trainer_state.json").touch()
    assert not is_whole(folder)  # it may be written at this moment
    for path in (folder / "trainer_state.json", folder):
        os.utime(path, (old, old))
    assert is_whole(folder) and is_whole(folder / "trainer_state.json")


def test_tiny_configurations_are_found(tmp_path):
    groups = find_groups(write_configs(tmp_path))
    assert [[run.name for run in group.runs] for group in groups] == [
        ["experiments/table.yaml#dense", "experiments/table.yaml#other-seed"],
        ["experiments/table.yaml#violin"],
    ]


def test_the_table_in_the_repository_has_the_figures_of_its_records():
    folder = ROOT / "tasks" / "fullsize" / "results"
    kept = [json.loads(path.read_text()) for path in (folder / "records").glob("*.json")]
    lines = {line.split("`")[1]: line for line in (folder / "TABLE.md").read_text().splitlines() if "| `" in line}
    done = [record for record in kept if record["status"] == "done"]
    assert len(done) >= 20 and {record["task"] for record in done} >= {"classification", "detection", "segmentation"}
    for record in kept:
        steps = [record.get(part) or {} for part in ("small", "whole")]
        for step in (step for step in steps if step.get("losses")):
            assert (
                len(step["losses"]) == 2
                and None not in step["losses"]
                and step["resumed_from"].endswith(("1", "1.pth"))
            )
            assert f"{step['seconds_per_step']:.1f}, {step['peak_gib']:.1f}" in lines[record["name"]]
        reason = record.get("reason") or steps[1].get("reason")
        assert reason is None or ("predicted" in reason and reason in lines[record["name"]])
