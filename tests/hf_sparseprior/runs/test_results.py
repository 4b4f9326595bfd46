"""results.json: one form for all tasks."""

import json
import re

import pytest

from hf_sparseprior.runs.measured import settings, suffix
from hf_sparseprior.runs.results import RESULTS_VERSION, Results, read_results, trainer_history, write_results


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


# ---- names ----------------------------------------------------------------------------------------------------------


def name_of(out, config, model="weights", own=None):
    return "results_test" + suffix(out, "results_test", config, model, lambda of: settings(of, "data"), own)


def test_results_are_named_by_what_differs_from_the_runs_own(tmp_path):
    own = {"data": {"path": "a", "test_size": [8, 8], "pipeline": [{"type": "Resize", "scale": 4}]}, "model": {"x": 1}}
    same = {"data": {**own["data"], "test_size": (8, 8), "cache": True, "classes": None}, "model": {"x": 2}}
    assert name_of(tmp_path, own, own=own) == name_of(tmp_path, same, own=own) == "results_test"
    changes = {
        "path": {"path": "b"},
        "test_size": {"test_size": [9, 8]},
        "scale": {"pipeline": [{"type": "Resize", "scale": 5}]},
        "path-test_size": {"path": "b", "test_size": None},
    }
    names = {key: name_of(tmp_path, {"data": {**own["data"], **new}}, own=own) for key, new in changes.items()}
    assert all(re.fullmatch(rf"results_test_{key}_[0-9a-f]{{8}}", name) for key, name in names.items())
    assert name_of(tmp_path, {"data": {**own["data"], "path": "c"}}, own=own) != names["path"]  # of the same length
    long = {"data": {f"setting_{number}": number for number in range(99)}}
    assert len(name_of(tmp_path, long, own=own)) <= len("results_test_") + 40 + 9


def test_in_a_folder_of_no_run_the_first_has_the_plain_name(tmp_path):
    config = {"data": {"path": "a"}}
    assert name_of(tmp_path, config) == "results_test"
    for stored in ({"config": config, "model_sha256": "weights"}, {"metrics": {}}):
        write_results(tmp_path / "results_test.json", stored)
        assert (name_of(tmp_path, config) == "results_test") == ("config" in stored)
    write_results(tmp_path / "results_test.json", {"config": config, "model_sha256": "weights"})
    assert name_of(tmp_path, config, "others").startswith("results_test_model_")
    assert name_of(tmp_path, {"data": {"path": "b"}}, "others").startswith("results_test_path-model_")
    assert name_of(tmp_path, {"data": {"path": "b"}}).startswith("results_test_path_")
