"""The demo's console, its tables, and what its page shows of them."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.images.sources.cifar import CLASSES
from hf_sparseprior.images.sources.tables import write_parquet
from tasks.classification import demo, demo_speed
from tasks.common.records import read_records

ROOT = Path(__file__).parents[3]
STEPS = ["trainer.max_steps=2", "trainer.eval_steps=1", "trainer.save_steps=1", "trainer.logging_steps=1"]
DIGITS = demo.material("digits", ROOT)


@pytest.fixture
def short(monkeypatch):
    """Two priors, two steps each, without the bars for files, as `main` sets it."""
    transformers_logging.disable_progress_bar()
    monkeypatch.setattr(demo, "PRIORS", ("dense", "violin"))
    load = demo.load_config
    monkeypatch.setattr(demo, "load_config", lambda path, changes: load(path, [*changes, *STEPS]))
    yield
    transformers_logging.enable_progress_bar()


@pytest.mark.slow
def test_without_a_terminal_there_is_one_line_a_run(short, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    results = demo.train_all(DIGITS, tmp_path, seeds=1)
    assert {prior: len(runs) for prior, runs in results.items()} == {"dense": 1, "violin": 1}
    out, err = capsys.readouterr()
    # transformers says so of a file system in memory.
    rows = [line for line in err.splitlines() if "mtime may not be reliable" not in line]
    assert out == "" and rows == ["[1/2] dense, seed 0", "[2/2] violin, seed 0"]
    # The runs are the same ones whether or not bars are shown.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert demo.train_all(DIGITS, tmp_path, seeds=1) == results and capsys.readouterr().err == ""
    demo.train_all(DIGITS, tmp_path, seeds=2)
    out, err = capsys.readouterr()
    assert "trains on" in out and all(row in err for row in ("[3/4] dense, seed 1", "[4/4] violin, seed 1"))
    assert "2/2" in err and "seed 0" not in err  # a bar


@pytest.fixture
def photos(tmp_path):
    """A folder as CIFAR-10's, of few images: a colour for each class, and noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", 100), ("test", 40)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = random.integers(0, 100, (count, 32, 32, 3)) + 15 * labels[:, None, None, None]
        (tmp_path / "photos").mkdir(exist_ok=True)
        write_parquet(images.astype(np.uint8), labels, CLASSES, tmp_path / "photos" / f"{split}.parquet")
    return tmp_path / "photos"


def test_photographs_if_they_are_there_else_digits_and_a_line_says_so(photos, tmp_path, capsys):
    chosen = demo.material(None, photos)
    assert (chosen.name, chosen.seeds, chosen.changes) == ("photos", 1, (f"data.path={photos}",))
    assert capsys.readouterr().out == ""
    for folder in (tmp_path / "none", photos):
        (photos / "test.parquet").unlink(missing_ok=True)  # half of it is no data set
        chosen = demo.material(None, folder)
        said = capsys.readouterr().out
        assert (chosen.name, chosen.seeds) == ("digits", 3) and chosen.changes == ()
        assert f"{folder} has no photographs, so this is scikit-learn's digits" in said and len(said.splitlines()) == 1
    with pytest.raises(OSError, match=r"--data photos: .*test.parquet is missing; python -m .*fetch_cifar10"):
        demo.material("photos", photos)
    assert demo.material("digits", photos).name == "digits" and capsys.readouterr().out == ""
    assert demo.main(["--data", "photos", "--photos", str(tmp_path / "none")]) == 2


def test_photographs_are_of_32_pixels_with_patches_of_2(photos):
    for prior in demo.PRIORS:
        config = demo.load_config(f"{demo.CONFIGS / 'demo.yaml'}#{prior}", demo.material(None, photos).changes)
        assert (config["model"]["image_size"], config["model"]["patch_size"]) == (32, 2)
        assert config["data"]["path"] == str(photos) and config["model"]["prior"] == prior


@pytest.mark.slow
def test_the_demo_on_photographs_from_start_to_end(photos, tmp_path, capsys, monkeypatch):
    """Four runs, their table and pictures, a model in another process, and a time for each size; then none anew."""
    few = ["data.limit_train=40", "data.limit_validation=10", "data.limit_test=40"]
    steps = ["trainer.max_steps=2", "trainer.eval_strategy=steps", "trainer.save_strategy=steps", *STEPS]
    load = demo.load_config
    monkeypatch.setattr(demo, "load_config", lambda path, changes: load(path, [*changes, *few, *steps]))
    monkeypatch.setattr(demo_speed, "SIZES", (32, 64))
    monkeypatch.setattr(demo_speed, "SECONDS", 0.0)
    words = ["--photos", str(photos), "--out", str(tmp_path / "out")]
    assert demo.main(words) == 0
    out, err = capsys.readouterr()
    table = (tmp_path / "out" / "photos" / "table.md").read_text()
    assert table.startswith("| prior | test accuracy, % |") and table in out
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == list(demo.PRIORS)
    drawn = ("support", "curves", "decay", "attention", "results")
    assert all((tmp_path / "out" / "photos" / f"{name}.png").stat().st_size > 1000 for name in drawn)
    assert "in a fresh process: SparsePriorViTForImageClassification" in out and "logits bit-equal: True" in out
    rows = out[out.index("| pixels a side") :].split("\n\n")[0].splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 32", "| 64"]
    assert all(float(cell) > 0 for row in rows for cell in row.strip("| ").split(" | "))
    assert "32 x 32 pixels" in err and "[4/4] fibottention+violin, seed 0" in err
    model = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "out/photos/violin/seed0/model")
    assert model.config.grid == (16, 16) and model.config.id2label[3] == "cat"
    assert demo.main(words) == 0
    out, err = capsys.readouterr()
    assert "seed 0" not in err and table in out


def test_the_data_of_the_demo_is_fetched_once_and_the_digits_are_its_rest():
    """As the Makefile has it: with pip's npm where there is none, and no failure ends the demo."""
    rules = (ROOT / "Makefile").read_text()
    assert "\ndemo: $(VENV)/demo data/cifar10/test.parquet\n" in rules
    photos = yaml.safe_load((demo.CONFIGS / "demo.yaml").read_text())["data"]["path"]
    assert f"{photos}/test.parquet: | $(VENV)/demo" in rules and f"fetch_cifar10 {photos}\n" in rules


class Model:
    """Stands for a model: counts its calls."""

    def __init__(self, log, pixels, prior):
        self.log, self.name = log, (pixels, prior)

    def __call__(self):
        self.log.append(self.name)


def test_contenders_take_turns_and_every_size_is_measured(monkeypatch):
    log, said, now = [], [], itertools.count(0.0, 3.0)  # every look at the clock is three seconds later
    times = {"dense": 3.0, "fibottention": 1.5}
    monkeypatch.setattr(demo_speed, "seconds_per_call", lambda call, calls, device: (call(), times[call.name[1]])[1])
    make = lambda pixels, prior: (Model(log, pixels, prior), (pixels // 16) ** 2)  # noqa: E731
    rows = list(demo_speed.measured(make, (32, 64), clock=lambda: next(now), say=said.append))
    first, turns = ["dense", "fibottention"], ["fibottention", "dense", "dense", "fibottention"]
    assert log == [(pixels, prior) for pixels in (32, 64) for prior in (*first, *turns)]
    assert rows == [demo_speed.Row(32, 4, times), demo_speed.Row(64, 16, times)]
    assert said == ["32 x 32 pixels", "64 x 64 pixels"]
    assert demo_speed.table(rows).splitlines()[2:] == [
        "| 32 | 4 | 3.000 | 1.500 | 2.00 |",
        "| 64 | 16 | 3.000 | 1.500 | 2.00 |",
    ]


def test_a_slow_machine_does_one_round_of_each_size(monkeypatch):
    log, now = [], itertools.count(0.0, 1000.0)
    monkeypatch.setattr(demo_speed, "seconds_per_call", lambda call, calls, device: (call(), 500.0)[1])
    make = lambda pixels, prior: (Model(log, pixels, prior), 4)  # noqa: E731
    rows = list(demo_speed.measured(make, (32, 64), clock=lambda: next(now)))
    assert [row.pixels for row in rows] == [32, 64] and len(log) == 8  # a first call and a round of two contenders
    assert demo_speed.table(rows).splitlines()[-1] == "| 64 | 4 | 500.000 | 500.000 | 1.00 |"


def test_what_is_timed_is_the_model_of_that_size_and_prior():
    outputs = {}
    for prior in demo_speed.PRIORS:
        call, tokens = demo_speed.forward_of(224, prior)
        outputs[prior] = call().numpy()
        assert tokens == 196 and len(outputs[prior]) == 1
    assert not np.allclose(outputs["dense"], outputs["fibottention"])


def test_the_page_shows_the_table_that_the_demo_prints():
    """But for columns that say little, as the times of a busy machine."""
    folder = ROOT / "tasks" / "classification" / "results" / "demo"
    printed = demo.results_table({prior: list(runs.values()) for prior, runs in read_records(folder).items()})
    assert printed == (folder / "table.md").read_text().strip()
    first, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines())
    page = (ROOT / "docs" / "demo.md").read_text().partition("## On digits")[0]
    columns, *shown = ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*", page, re.M))
    assert columns[:2] == first[:2] and len(shown) == len(demo.PRIORS)
    assert shown == [[row[first.index(column)] for column in columns] for row in rows]
