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


def test_an_interrupted_command_goes_on_and_another_begins_anew(tmp_path, monkeypatch, capsys):
    models, seen, compared = ["vit_tiny dense 32x1", "vit_tiny dense 32x2"], [], predicted.compared

    def stops(model, arguments):
        seen.append(model[3])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return compared(model, arguments)

    monkeypatch.setattr(predicted, "compared", stops)
    command = [*QUICK, "--models", *models, "--out", str(tmp_path / "out")]
    assert main(command) == 130 and "goes on after the last model" in capsys.readouterr().err
    assert not (tmp_path / "out" / predicted.TABLE).exists()
    assert main(command) == 0 and seen == [1, 2, 2]
    content = json.loads((tmp_path / "out" / predicted.RECORDS).read_text())
    assert [entry["images"] for entry in content["entries"]] == [1, 1, 2, 2] and predicted.UNFINISHED not in content
    assert main(command) == 0 and seen == [1, 2, 2, 1, 2]


def test_a_model_that_has_no_time_is_left_out_with_the_reason(tmp_path, monkeypatch, capsys):
    nothing = {"contenders": {}, "left_out": {"dense": "would take 9 s"}}
    monkeypatch.setattr(predicted.Benchmark, "at", lambda *_: {"passes": dict.fromkeys(predicted.PASSES, nothing)})
    assert main([*QUICK, "--models", "vit_tiny dense 32x1", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "vit_tiny dense 32x1, forward: left out, would take 9 s" in said.out
    assert "nothing could be measured" in said.err and said.err.count("\n") == 1


def test_there_are_five_models_of_different_kinds():
    models = [predicted.parse_model(text) for text in commands.MODELS]
    assert len(models) == 5 and len({prior for _, prior, *_ in models}) == 5
    assert {preset.partition("_")[0] for preset, *_ in models} == {"vit", "swin", "convit"}


@pytest.mark.parametrize("text", ["vit_tiny", "vit_tiny dense 224", "resnet dense 224x1", "vit_tiny nothing 224x1"])
def test_bad_models_are_refused(text, tmp_path, capsys):
    assert main([*QUICK, "--models", text, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()
