"""The check of predicted costs: what is compared, and what is refused."""

import json

import pytest

from tasks.benchmark import commands, predicted
from tasks.benchmark.predicted import main

QUICK = ["--threads", "1", "--device", "cpu", "--rounds", "3", "--budget", "0.1"]


def test_predicted_and_measured_stand_side_by_side(tmp_path, capsys):
    assert main([*QUICK, "--models", "vit_tiny dense 32x1", "--out", str(tmp_path / "out")]) == 0
    entries = json.loads((tmp_path / "out" / predicted.RECORDS).read_text())["entries"]
    assert [entry["pass"] for entry in entries] == list(predicted.PASSES)
    for entry in entries:
        assert entry["predicted"] > 0 and entry["measured"] > 0
        assert entry["error"] == pytest.approx(100 * (entry["predicted"] / entry["measured"] - 1))
        assert abs(entry["error_bytes"]) < 2
    within = sum(abs(entry["error"]) <= predicted.TARGET for entry in entries)
    assert f"{within} of 2 times" in capsys.readouterr().out
    assert f"{within} of 2 times" in (tmp_path / "out" / predicted.TABLE).read_text()
    assert (tmp_path / "out" / predicted.PICTURE).stat().st_size > 1000


def test_there_are_five_models_of_different_kinds():
    models = [predicted.parse_model(text) for text in commands.MODELS]
    assert len(models) == 5 and len({prior for _, prior, *_ in models}) == 5
    assert {preset.partition("_")[0] for preset, *_ in models} == {"vit", "swin", "convit"}


@pytest.mark.parametrize("text", ["vit_tiny", "vit_tiny dense 224", "resnet dense 224x1", "vit_tiny nothing 224x1"])
def test_bad_models_are_refused(text, tmp_path, capsys):
    assert main([*QUICK, "--models", text, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()
