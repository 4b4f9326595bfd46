import io
import json
import pickle
import shutil
from contextlib import redirect_stdout
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from hf_sparseprior import SparsePriorViTForImageClassification
from tasks.analysis import corruptions, robustness, robustness_pictures, trained
from tasks.analysis.robustness import Robustness, corruption_errors, mean_corruption_error
from tests.each import each
from tests.tasks.analysis.saved_runs import NEEDS_CORRUPTIONS, accuracy_by_evaluate, write_images, write_run

pytestmark = pytest.mark.slow

CHOICE = ["--corruptions", "fog", "gaussian_noise", "contrast", "--severities", "1", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_images(folder / "images")
    return [
        write_run(folder / "dense" / "seed0", data, "dense", 0),
        write_run(folder / "fib" / "seed0", data, "fibottention", 1),
    ]


@pytest.fixture
def corrupted(monkeypatch):
    """The (corruption, severity) of every image that is corrupted for an accuracy."""
    calls = []

    def counted(image, name, severity, benchmark):
        calls.append((name, severity))
        return corruptions.corrupt(image, name, severity, benchmark)

    monkeypatch.setattr(robustness, "corrupt", counted)
    return calls


@pytest.fixture
def without_pictures(monkeypatch):
    """Figures are made and not drawn; `test_the_pictures_show_every_model` looks at them."""

    def close(figure, path):
        robustness_pictures.pyplot().close(figure)
        return path

    monkeypatch.setattr(robustness_pictures, "save", close)


def command(runs, out, *arguments):
    return robustness.main([*map(str, runs), *CHOICE, "--out", str(out), *arguments])


def models_of(out):
    """What a command has written about each model."""
    return json.loads((out / "robustness.json").read_text())["models"]


@pytest.fixture(scope="module")
def finished(runs, tmp_path_factory):
    """What the command leaves and prints."""
    out = tmp_path_factory.mktemp("finished") / "out"
    with redirect_stdout(printed := io.StringIO()):
        assert command(runs, out, "--batch-size", "5") == 0
    return out, printed.getvalue()


# ---- numbers by hand ------------------------------------------------------------------------------------------------

BASELINE = Robustness("alexnet", 0.9, {"fog": {1: 0.8, 3: 0.4}, "snow": {1: 0.5, 3: 0.3}})
BETTER = Robustness("better", 0.95, {"fog": {1: 0.9, 3: 0.7}, "snow": {1: 0.5, 3: 0.4}})


def test_mean_corruption_error_by_hand():
    # fog: (0.1 + 0.3) / (0.2 + 0.6) = 1/2; snow: (0.5 + 0.6) / (0.5 + 0.7) = 11/12
    errors = corruption_errors(BETTER, BASELINE)
    assert errors == pytest.approx({"fog": 1 / 2, "snow": 11 / 12})
    assert mean_corruption_error(errors, ["fog", "snow"]) == pytest.approx(17 / 24)
    assert mean_corruption_error(errors, ["snow"]) == pytest.approx(11 / 12)
    assert set(corruption_errors(BASELINE, BASELINE).values()) == {1}


def test_a_baseline_without_errors_gives_no_corruption_error():
    perfect = Robustness("perfect", 1.0, {"fog": {1: 1.0, 3: 1.0}, "snow": {1: 0.9, 3: 1.0}})
    errors = corruption_errors(BASELINE, perfect)
    assert errors == {"fog": None, "snow": pytest.approx(12)}
    assert mean_corruption_error(errors, ["fog", "snow"]) is None
    assert "| mCE of 2, % of perfect | - | - |" in robustness.corruption_table([perfect, BASELINE])


def test_the_tables():
    lines = robustness.corruption_table([BASELINE, BETTER]).splitlines()
    assert lines[0] == "| corruption | alexnet | better |" and lines[2:] == [
        "| fog | 60.00 | 80.00 |",
        "| snow | 40.00 | 45.00 |",
        "| mean of 2 | 50.00 | 62.50 |",
        "| clean | 90.00 | 95.00 |",
        "| mCE of 2, % of alexnet | 100.00 | 70.83 |",
    ]
    lines = robustness.severity_table([BASELINE, BETTER]).splitlines()
    assert lines[2:] == ["| 1 | 65.00 | 70.00 |", "| 3 | 35.00 | 55.00 |"]


def test_with_all_19_the_benchmarks_15_have_an_mce_of_their_own():
    extra = corruptions.FAMILIES["extra"]
    half = Robustness("half", 1.0, {name: {1: 0.5} for name in corruptions.CORRUPTIONS})
    worse = Robustness("worse", 1.0, {name: {1: 0.5 if name in extra else 0.4} for name in corruptions.CORRUPTIONS})
    lines = robustness.corruption_table([half, worse]).splitlines()
    assert lines[-2] == f"| mCE of 19, % of half | 100.00 | {100 * (15 * 1.2 + 4) / 19:.2f} |"
    assert lines[-1] == "| mCE of the benchmark's 15, % of half | 100.00 | 120.00 |"


# ---- the command ----------------------------------------------------------------------------------------------------


@NEEDS_CORRUPTIONS
def test_accuracies_are_those_of_a_plain_loop_and_of_evaluate(runs, finished, tmp_path):
    out, text = finished
    results = json.loads((out / "robustness.json").read_text())
    assert [model["name"] for model in results["models"]] == ["dense", "fib"] and results["baseline"] == "dense"
    files = sorted((runs[0].parents[1] / "images" / "test").glob("*/*.png"))
    for run, model in zip(runs, results["models"], strict=True):
        network = SparsePriorViTForImageClassification.from_pretrained(run / "model").eval()
        processor = AutoImageProcessor.from_pretrained(run / "model")
        assert list(model["accuracy"]) == ["gaussian_noise", "fog", "contrast"]  # in the benchmark's order
        for name, severities in model["accuracy"].items():
            for severity, accuracy in severities.items():
                right = 0
                for file in files:
                    pixels = corruptions.corrupt(np.asarray(Image.open(file)), name, int(severity))
                    with torch.no_grad():
                        logits = network(**processor(Image.fromarray(pixels), return_tensors="pt")).logits
                    right += network.config.id2label[int(logits.argmax())] == file.parent.name
                assert accuracy == right / len(files)
        assert model["clean_accuracy"] == accuracy_by_evaluate(run, tmp_path / model["name"])
        assert model["mean_accuracy"] == pytest.approx(np.mean([list(s.values()) for s in model["accuracy"].values()]))
        for severity, mean in model["accuracy_of_severity"].items():
            assert mean == pytest.approx(np.mean([own[severity] for own in model["accuracy"].values()]))
    assert (out / "robustness.md").read_text().strip() in text
    assert results["versions"]["torch"] and results["corruption_versions"]["opencv"] and results["images"] == 12


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_images_are_corrupted_once_for_all_models_and_never_again(runs, finished, tmp_path, corrupted):
    assert command(runs, tmp_path) == 0
    cells = [(name, severity) for name in ("gaussian_noise", "fog", "contrast") for severity in (1, 5)]
    assert corrupted == [cell for cell in cells for _ in range(12)]
    corrupted.clear()
    assert command(runs, tmp_path) == 0
    assert corrupted == [] and models_of(tmp_path) == models_of(finished[0])
    assert robustness.main([*map(str, runs), "--corruptions", "fog", "--out", str(tmp_path)]) == 0
    assert corrupted == [("fog", severity) for severity in (2, 3, 4) for _ in range(12)]
    corrupted.clear()
    for _ in range(2):  # fewer images are other cells, which are kept as well
        assert command(runs, tmp_path, "--limit", "6") == 0
        assert json.loads((tmp_path / "robustness.json").read_text())["images"] == 6 and len(corrupted) == 6 * 6


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_an_interrupted_command_goes_on(runs, finished, tmp_path, corrupted, monkeypatch, capsys):
    stop, own = 12 * 3 + 5, robustness.corrupt

    def interrupted(*arguments):
        if len(corrupted) == stop:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(robustness, "corrupt", interrupted)
    assert command(runs, tmp_path) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    assert not (tmp_path / "robustness.json").exists()
    assert len(list(tmp_path.glob("cells/*/*.json"))) == 2 * 4  # clean and three whole cells of each model
    monkeypatch.setattr(robustness, "corrupt", own)
    corrupted.clear()
    assert command(runs, tmp_path) == 0
    assert len(corrupted) == 12 * 3 and models_of(tmp_path) == models_of(finished[0])


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_a_changed_model_is_counted_again_and_no_other(runs, tmp_path, monkeypatch):
    own = [shutil.copytree(run, tmp_path / run.parent.name) for run in runs]
    assert command(own, tmp_path / "out") == 0
    counted, count_right = [], trained.count_right
    monkeypatch.setattr(
        trained, "count_right", lambda networks, *rest: counted.append(len(networks)) or count_right(networks, *rest)
    )

    def set_values(name, **values):
        file = own[1] / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    for change in (
        lambda: set_values("config.json", attention_probs_dropout_prob=0.5),
        lambda: set_values("preprocessor_config.json", resample=2),
        lambda: write_run(own[1], runs[0].parents[1] / "images", "fibottention", 5),
    ):
        change()
        counted.clear()
        assert command(own, tmp_path / "out") == 0
        assert counted == [1] * 7


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_worker_processes_find_the_same(runs, finished, tmp_path):
    change = partial(robustness.corrupted, name="fog", severity=2, benchmark="cifar-c")
    assert pickle.loads(pickle.dumps(change)).keywords == change.keywords
    assert command(runs, tmp_path, "--workers", "1") == 0
    assert models_of(tmp_path) == models_of(finished[0])


@NEEDS_CORRUPTIONS
def test_the_pictures_show_every_model(finished):
    out, _ = finished
    for name in ("by_severity", "by_corruption", "four_corruptions"):
        image = np.asarray(Image.open(out / f"{name}.png").convert("RGB")).astype(int)
        for colour in ((0x1B, 0x3A, 0x4B), (0xC8, 0x55, 0x3D)):
            assert (np.abs(image - np.array(colour)).sum(-1) < 30).sum() > 100, name
    assert (out / "corruptions.png").exists()


# ---- bad input ------------------------------------------------------------------------------------------------------


@NEEDS_CORRUPTIONS
@each(
    "arguments, message",
    [
        (["--corruptions", "gausian_noise"], "did you mean 'gaussian_noise'"),
        (["--severities", "6"], "--severities 6 must be from 1 to 5"),
        (["--benchmark", "cifar"], "did you mean 'cifar-c'"),
        (["--limit", "0"], "--limit 0 must be 1 or more"),
        (["--limit", "13"], "must be at most the 12 images"),
        (["--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["--workers", "-1"], "--workers -1 must be 0 or more"),
        (["--names", "a"], "--names a must be 2 different names"),
        (["--names", "a", "a"], "--names a a must be 2 different names"),
        (["--set", "data.sourse=digits"], "did you mean 'source'"),
    ],
)
def test_bad_arguments_give_one_line(runs, arguments, message, tmp_path, capsys):
    assert robustness.main([*map(str, runs), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_models_that_cannot_be_compared_give_one_line(runs, tmp_path, capsys):
    small = write_run(tmp_path / "small", write_images(tmp_path / "small_images", each=2, side=16), "dense", 0)
    other = write_run(tmp_path / "other", write_images(tmp_path / "other_images", seed=1), "dense", 0)
    for arguments, message in (
        ([small], "a test image has 16x16 pixels; --benchmark cifar-c is for 32x32"),
        ([small, "--benchmark", "imagenet-c"], "16x16 pixels; the corruptions need 32x32 or more"),
        ([runs[0], other], "other/model has other test images than"),
        ([runs[0], runs[0] / "model"], "a model is given twice"),
        ([tmp_path / "nowhere"], "nowhere is neither the folder of a run nor of a saved model or adapter"),
    ):
        assert robustness.main([*map(str, arguments), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]  # after the bars of reading
    # The same images in another folder are the same images.
    same = write_run(tmp_path / "same", write_images(tmp_path / "same_images"), "dense", 0)
    assert command([runs[0], same], tmp_path / "out") == 0


@NEEDS_CORRUPTIONS
@pytest.mark.usefixtures("without_pictures")
def test_a_damaged_cell_is_named(runs, finished, tmp_path, capsys):
    shutil.copytree(finished[0] / "cells", tmp_path / "cells")
    cell, _ = sorted(tmp_path.glob("cells/*/fog_5.json"))
    cell.write_text('{"right": ')
    assert command(runs, tmp_path) == 2
    assert f"{cell} is not a whole record; remove it" in capsys.readouterr().err
