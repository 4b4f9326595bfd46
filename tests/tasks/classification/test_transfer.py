"""The experiment of transfer: its steps on tiny models, that nothing is done twice, and its report."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hf_sparseprior.images.sources.images import ImageData, array_images
from hf_sparseprior.sparsification import timing
from tasks.classification import transfer
from tasks.classification.commands import TRANSFER_DATA
from tasks.classification.transfer import (
    Case,
    dense_configs,
    do,
    main,
    photos,
    read_records,
    report_text,
    time_again,
)
from tests.each import each

CHANGES = [
    *("data.validation_fraction=0.2", "data.limit_train=null", "data.limit_validation=10", "data.limit_test=10"),
    *("model.hidden_size=16", "model.intermediate_size=16", "model.num_hidden_layers=2", "model.patch_size=14"),
    *("trainer.minutes=null", "trainer.max_steps=2", "trainer.progressive_sizes=null"),
]
SETTINGS = {
    **{"calibration": 4, "test": 10, "device": "cpu", "minutes": 1e-6, "learning_rate": 1e-4, "recover_all": True},
    "candidates": [{"name": "window", "w": 2}],
}
CASES = [Case(112, 0.7, 1e-6, 10)]


@pytest.fixture
def small(monkeypatch):
    """Twenty garments of noise a split, and times in which the window halves a layer's attention."""
    draw = np.random.default_rng(0)
    splits = {
        name: array_images(draw.integers(0, 256, (60, 28, 28)).astype(np.uint8), np.arange(60) % 10, name)
        for name in ("train", "test")
    }
    monkeypatch.setattr(Case, "settings", SETTINGS)
    readers = {"fashion_mnist": lambda config: ImageData(dict(splits), list("0123456789"), "noise")}
    monkeypatch.setattr("hf_sparseprior.images.data.READERS", readers)

    def seconds(calls, device, budget):
        known = {"dense": 1.0, "112": 1.0, "dense attention": 0.4, "window w=2": 0.1}
        return {name: [known.get(name, 0.65 if name.startswith("choice") else 0.5)] for name in calls}

    monkeypatch.setattr(timing, "seconds_of_rounds", seconds)


@each("data", TRANSFER_DATA)
def test_each_size_starts_from_the_one_before(data, tmp_path):
    configs = dense_configs(data, tmp_path)
    assert list(configs) == list(transfer.SIZES)
    grids = [(config["model"]["image_size"] // config["model"]["patch_size"]) ** 2 for config in configs.values()]
    assert grids == [196, 784, 3136]
    starts = [config["model"].get("pretrained") for config in configs.values()]
    assert starts == [None, str(tmp_path / "dense_56/model"), str(tmp_path / "dense_112/model")]
    assert {case.size for case in transfer.CASES} == set(transfer.SIZES[1:])
    assert all(config["trainer"]["minutes"] <= 20 for config in configs.values())


def test_images_of_the_test_are_those_of_the_runs(small):
    images, labels = photos(dense_configs("fashion_mnist", transfer.Path("out"), (56,), CHANGES)[56], 5)
    assert len(images["train"]) == len(labels["train"]) == 5 and len(images["test"]) == 10
    assert images["test"][0].size == (28, 28) and sorted(labels["test"]) == list(range(10))


def test_all_of_it(small, tmp_path, capsys, monkeypatch):
    out, records = tmp_path / "out", tmp_path / "records"
    do("fashion_mnist", out, records, CASES, CHANGES)
    record = json.loads((records / "fashion_mnist.json").read_text())
    assert [dense["size"] for dense in record["dense"]] == [56, 112]
    assert [dense["test_images"] for dense in record["dense"]] == [10, 10]
    (report,) = record["reports"]
    names = [row["name"] for row in report["rows"] if row["value"] is not None]
    assert names[:3] == ["dense", "the choice", "after recovery"] and report["images"]["test"] == 10
    assert report["rows"][0]["value"] == record["dense"][1]["test_accuracy"]  # on the same images
    assert {row["name"]: row["steps"] for row in report["rows"]}["after recovery"] == 1
    ((smaller,),) = record["smaller"]
    assert smaller["right"] == 10 * record["dense"][0]["test_accuracy"]
    assert {**smaller, "right": 0} == {"size": 56, "share": 0.5, "right": 0, "test_images": 10}
    assert main(["--records", str(records)]) == 0
    table = (records / transfer.TABLE).read_text()
    assert "| the choice | 0.650 |" in table and "Dense at 112 pixels: " in table
    assert "| the dense model of 56 pixels | 0.500 |" in table
    assert (records / transfer.FIGURE).stat().st_size > 10_000
    for name in ("run", "sparsify"):  # a run that is left would call them
        monkeypatch.setattr(transfer.hf_run if name == "run" else transfer.sp, name, None)
    do("fashion_mnist", out, records, CASES, CHANGES)
    assert "fashion_mnist.json: done" in capsys.readouterr().out


def test_saved_models_are_timed_once_more(small, tmp_path, monkeypatch, capsys):
    out, records = tmp_path / "out", tmp_path / "records"
    do("fashion_mnist", out, records, CASES, CHANGES)
    turns = {"dense_112": [1.0, 2.0, 2.0, 4.0, 1.0], "112_0.7": [0.7, 1.2, 1.3, 2.4, 0.8]}
    monkeypatch.setattr(timing, "seconds_of_rounds", lambda calls, *given: {name: turns[name] for name in calls})
    time_again(["fashion_mnist"], out, records, CASES)
    found = json.loads((records / transfer.TIMES).read_text())
    assert found["times"]["fashion_mnist"]["112_0.7"]["share"] == pytest.approx(0.65)
    assert found["command"] == "python -m tasks.classification.transfer fashion_mnist --again"
    assert main(["--records", str(records)]) == 0
    line = "The saved model, timed once more: 0.650 (quartiles 0.600 to 0.700, 5 rounds)."
    assert line in (records / transfer.TABLE).read_text()
    assert main(["cifar10", "--again", "--out", str(out), "--records", str(records)]) == 2
    assert "dense_112" in capsys.readouterr().err.splitlines()[-1]


def test_a_record_is_lost_and_made_of_what_is_done(small, tmp_path, monkeypatch):
    out, records = tmp_path / "out", tmp_path / "records"
    do("fashion_mnist", out, records, CASES, CHANGES)
    before = (records / "fashion_mnist.json").read_text()
    (records / "fashion_mnist.json").unlink()
    monkeypatch.setattr(transfer.sp, "sparsify", None)
    do("fashion_mnist", out, records, CASES, CHANGES)
    assert (records / "fashion_mnist.json").read_text() == before


def test_a_report_of_another_dense_model_is_refused(small, tmp_path):
    do("fashion_mnist", tmp_path / "out", tmp_path / "records", CASES, CHANGES)
    (tmp_path / "records/fashion_mnist.json").unlink()
    file = tmp_path / "out/fashion_mnist/dense_112/model/model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"112_0.7 is of another dense model or other settings; remove it and .*json"):
        do("fashion_mnist", tmp_path / "out", tmp_path / "records", CASES, CHANGES)


def test_bad_arguments_are_one_line(tmp_path, capsys):
    assert main(["imagenet", "--out", str(tmp_path / "out")]) == 2
    assert "DATA='imagenet' must be one of cifar10, fashion_mnist" in capsys.readouterr().err
    assert main(["--records", str(tmp_path)]) == 2
    assert "has no record; run the command for cifar10 or fashion_mnist" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no record"):
        read_records(tmp_path)


def test_the_text_says_how_it_was_measured():
    row = {
        "name": "dense",
        "share": 1.0,
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "note": "",
        "changes": {},
        "difference": None,
        "steps": None,
    }
    choice = {
        **row,
        "name": "the choice",
        "changes": {"prior": "window"},
        "difference": [-0.02, -0.05, 0.01],
        "steps": 9,
    }
    report = {
        **{"image_size": [112, 112], "budget": 0.5, "measured": 0.49, "dense_seconds": 0.02, "minutes": 3.0},
        "layers": ["dense", "window w=2"],
        "rows": [
            row,
            {**row, "name": "token merging", "share": None, "value": None, "note": "left out: too slow"},
            choice,
        ],
    }
    dense = {"size": 56, "steps": 7, "minutes": 20.0, "test_accuracy": 0.5, "test_images": 500}
    hardware = {"cpu": "a processor", "cpu_threads": 1}
    smaller = [{"size": 56, "share": 0.03, "right": 300, "test_images": 500}]
    record = {"dense": [dense], "reports": [report], "smaller": [smaller], "hardware": hardware, "command": "run x"}
    text = report_text({"x": record})
    assert "Dense at 56 pixels: 20.0 minutes, 7 steps, test accuracy 50.0 % (45.6 to 54.4)." in text
    assert "| dense | 1.000 | 50.0 (40.0 to 60.0) |  |  |\n| token merging |  | left out: too slow |  |  |" in text
    assert "| the choice | 1.000 | 50.0 (40.0 to 60.0) | -2.0 (-5.0 to +1.0) | 9 |" in text
    assert "| the dense model of 56 pixels | 0.030 | 60.0 (55.6 to 64.2) |  |  |" in text
    assert "`run x`, a processor, 1 threads, one seed." in text
