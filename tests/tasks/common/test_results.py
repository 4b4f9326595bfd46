"""results.json: one form for all tasks, and files of earlier versions read as today's.

old_results/ holds what a run of each task wrote before results had a version, shortened by hand (and, of video,
an evaluation of the split that was `val` then).
"""

import json
from pathlib import Path

import pytest

from tasks.common.results import RESULTS_VERSION, Results, read_results, trainer_history, write_results
from tasks.common.upgrade import nested

OLD = Path(__file__).parent / "old_results"
ROOT = Path(__file__).parents[3]
RECORDS = sorted((ROOT / "tasks" / "classification" / "results").rglob("seed*.json"))


def whole(**options):
    return Results("toy", {"test_accuracy": 0.5}, {"data": {"source": "x"}}, **options)


def test_a_file_that_was_written_is_read_back_the_same(tmp_path):
    results = whole(seed=3, parameters=7, history=[{"step": 1, "loss": 2.0}], details={"classes": ["a", "b"]})
    content = results.write(tmp_path / "new" / "results.json")
    assert read_results(tmp_path / "new" / "results.json") == content == json.loads(json.dumps(results.content()))
    assert content["results_version"] == RESULTS_VERSION and content["classes"] == ["a", "b"]
    assert {"torch", "transformers"} <= set(content["versions"]) and content["hardware"]["machine"]
    assert content["command"] and "details" not in content


def test_details_cannot_hide_a_field_and_other_files_are_read_as_they_are(tmp_path):
    with pytest.raises(ValueError, match="must not be named metrics"):
        whole(details={"metrics": {}})
    write_results(tmp_path / "other.json", {"right": 3})
    assert read_results(tmp_path / "other.json") == {"right": 3}


@pytest.mark.parametrize("path", sorted(OLD.glob("*.json")), ids=lambda path: path.stem)
def test_old_files_of_every_task_are_read_in_one_form(path):
    old, results = json.loads(path.read_text()), read_results(path)
    assert "results_version" not in old and results["results_version"] == RESULTS_VERSION
    assert results["task"] == path.stem.removesuffix("_evaluation") and results["command"] == old["command"]
    assert all(isinstance(section, (dict, list)) for section in results["config"].values())  # nested
    assert all(value <= 1 for name, value in results["metrics"].items() if name.startswith("test_"))
    assert not any(name.startswith(("eval_", "val_")) for name in results["metrics"])
    assert results["versions"] == old["versions"] and results["hardware"] == old["hardware"]
    if "evaluation" in path.stem:
        assert results["metrics"] == {"validation_accuracy": 0.5}
        return
    assert (
        isinstance(results["parameters"], int) and isinstance(results["seed"], int) and results["steps"] == old["steps"]
    )
    assert results["history"] and all(isinstance(entry["step"], int) for entry in results["history"])
    assert not any(name.startswith("eval_") for entry in results["history"] for name in entry)
    # Nothing is lost.
    assert {*old} <= results.keys()


def test_what_each_old_form_becomes():
    def read(name):
        return json.loads((OLD / f"{name}.json").read_text()), read_results(OLD / f"{name}.json")

    old, new = read("segmentation")
    assert new["metrics"] == {name: value / 100 for name, value in old["metrics"].items()}
    assert new["baseline"]["test_mIoU"] == old["baseline"]["test_mIoU"] / 100
    assert new["baseline"]["class"] == "background"
    assert new["config"]["custom_hooks"][0] == {"type": "SeedSteps"}
    assert new["config"]["model"]["backbone"]["prior"] == "fibottention+violin"
    assert new["history"][1] == {"step": 2, "loss": old["history"]["loss"][1]}
    old, new = read("detection")
    assert new["metrics"] == old["metrics"]  # fractions already
    old, new = read("robotics")
    assert new["parameters"] == sum(old["parameters"].values()) == 91_233
    assert new["parameters_by_part"] == old["parameters"] and new["seed"] == 0
    assert new["history"] == old["history"]
    old, new = read("video")
    assert new["config"]["data"]["motion"] == {"train": 8, "validation": 2, "test": 2}
    old, new = read("classification")
    assert new["config"] == old["config"] and new["metrics"] == old["metrics"]
    assert new["history"][1]["validation_loss"] == old["history"][1]["eval_loss"]


def test_the_records_of_earlier_comparisons_are_read_as_they_are():
    assert len(RECORDS) > 100
    for path in RECORDS:
        assert read_results(path) == json.loads(path.read_text())


def test_dotted_keys_become_sections_and_lists():
    flat = {"a.0.b": 1, "a.1.b": 2, "a.10.b": 3, "c.d.e": [4], "f": None}
    assert nested(flat) == {"a": [{"b": 1}, {"b": 2}, {"b": 3}], "c": {"d": {"e": [4]}}, "f": None}


def test_the_trainers_log_says_validation():
    log = [{"step": 1, "epoch": 0.5, "loss": 2.0}, {"step": 2, "eval_loss": 1.0, "eval_ema_accuracy": 0.5}]
    summary = {"step": 2, "train_runtime": 3.0, "train_loss": 1.5}
    assert trainer_history([*log, summary]) == [
        log[0],
        {"step": 2, "validation_loss": 1.0, "validation_ema_accuracy": 0.5},
    ]


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    """JSON has neither NaN nor infinity; strict readers refuse a file with them."""
    infinite = {"loss": float("inf"), "step": 1}
    results = Results("toy", {"test_IoU": float("nan"), "test_accuracy": 0.5}, {"data": {"x": (1, float("-inf"))}})
    results.history, results.details = [infinite], {"deep": {"list": [[float("nan")], True, 3]}}
    written = results.write(tmp_path / "results.json")

    def refuse(name):
        raise AssertionError(name)

    read = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert read == written and read["metrics"] == {"test_IoU": None, "test_accuracy": 0.5}
    assert read["history"] == [{"loss": None, "step": 1}] and read["config"] == {"data": {"x": [1, None]}}
    assert read["deep"] == {"list": [[None], True, 3]}
