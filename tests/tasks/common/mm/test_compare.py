"""Comparisons of segmentation and detection: records, resuming, what is refused, and what its rows are."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed")
pytest.importorskip("mmseg", reason="the extra `dense` is not installed")
pytest.importorskip("mmdet", reason="the extra `dense` is not installed")

from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import folder_differences
from tasks.common.compare import all_records
from tasks.common.comparison_table import table
from tasks.common.mm import compare
from tasks.common.mm.config import load_config, run_identity
from tasks.common.mm.task import task_named
from tasks.common.mm.train import run
from tasks.common.records import read_records
from tasks.detection.compare import main as compare_detection
from tasks.segmentation.compare import main as compare_segmentation
from tasks.segmentation.task import SEGMENTATION
from tests.each import each
from tests.tasks.common.mm.shapes import data_roots, write_shapes
from tests.tasks.detection import tiny as tiny_detection
from tests.tasks.segmentation import tiny as tiny_segmentation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
MAINS = {"segmentation": compare_segmentation, "detection": compare_detection}
SEEDS = {"segmentation": (0, 1), "detection": (0,)}  # of detection's slow runs one of each row
METRICS = {"segmentation": ("test_mIoU",), "detection": ("test_coco/bbox_mAP", "test_coco/segm_mAP")}
TINY = {"segmentation": tiny_segmentation.OVERRIDES, "detection": tiny_detection.OVERRIDES}
RECORDED = sorted(path.parent for task in MAINS for path in ROOT.glob(f"tasks/{task}/results/*/table.md"))
TIMES = ("seconds", "seconds_per_step", "data_wait", "config", "hardware")
FILE = """
_base_ = ["{base}"]
seeds = [0, 1]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    both=dict(model=dict(backbone=dict(initializer_range=0.03))),
)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes")


def write(folder, task, text=FILE):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.py"
    path.write_text(text.format(base=ROOT / "configs" / task / "smoke.py"))
    return path


def arguments(task, folder, data, *more, out="out"):
    # `both` keeps smoke.py's prior: an override for every row would win over the cells.
    tiny = [override for override in TINY[task] if ".prior=" not in override]
    shown = ["--config", str(folder / "rows.py"), "--out", str(folder / out), "--records", str(folder / "records")]
    return [*shown, *tiny, *data_roots(data), *more]


@pytest.fixture(scope="module", params=MAINS)
def finished(request, data, tmp_path_factory):
    """A whole comparison: its task and folder."""
    task, folder = request.param, tmp_path_factory.mktemp("comparison")
    write(folder, task)
    assert MAINS[task](arguments(task, folder, data, "--seeds", *map(str, SEEDS[task]))) == 0
    return task, folder


def records(folder):
    kept = read_records(folder / "records")
    return {(row, seed): record for row, runs in kept.items() for seed, record in runs.items()}


def lose(folder):
    """The last record, whose run is there."""
    file = folder / "records" / "records.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


on_segmentation = pytest.mark.parametrize("finished", ["segmentation"], indirect=True)  # one task will do


def forbid(patch):
    patch.setattr(compare, "run", lambda *args, **options: pytest.fail("trained again"))


def test_every_run_leaves_a_record_and_tables_show_them(finished):
    task, folder = finished
    found, seeds = records(folder), SEEDS[task]
    assert list(found) == [(row, seed) for row in ("dense", "both") for seed in seeds]
    text = (folder / "records" / "table.md").read_text()
    for row, prior in (("dense", "dense"), ("both", "fibottention+violin")):
        runs = [found[row, seed] for seed in seeds]
        assert [(record["prior"], record["seed"]) for record in runs] == [(prior, seed) for seed in seeds]
        assert all((record["pruning_ratio"] > 0) == (row == "both") for record in runs)
        assert all((record["max_decay_change"] is not None) == (row == "both") for record in runs)
        line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
        for metric in METRICS[task]:
            values = 100 * np.array([record["metrics"][metric] for record in runs])
            deviation = f" ± {values.std(ddof=1):.2f}" if len(seeds) > 1 else ""
            assert f"| {values.mean():.2f}{deviation} |" in line
            assert f"| {100 * runs[0]['baseline'][metric]:.2f} |" in line
    for metric in METRICS[task]:
        values = [found["both", seed]["metrics"][metric] - found["dense", seed]["metrics"][metric] for seed in seeds]
        assert f"| both | {', '.join(f'{100 * value:+.2f}' for value in values)} |" in text
    left = {"records.jsonl", "table.md", "results.png", "predictions.png"}
    assert {path.name for path in (folder / "records").iterdir()} == left


def test_the_picture_has_a_part_for_each_row(finished):
    """Image and truth, or the truth alone, and a prediction more than the picture of one run."""
    task, folder = finished
    with Image.open(folder / "records" / "predictions.png") as picture:
        both = picture.size
    with Image.open(folder / "out" / "dense" / "seed0" / "predictions.png") as picture:
        one = picture.size
    axis, parts = (0, 4 / 3) if task == "segmentation" else (1, 3 / 2)
    assert both[axis] == pytest.approx(parts * one[axis], rel=0.05) and both[1 - axis] == pytest.approx(one[1 - axis])


@on_segmentation
def test_a_row_is_a_run_of_train_bit_for_bit(finished, data, tmp_path):
    task, folder = finished
    overrides = [*arguments(task, folder, data)[6:], "randomness.seed=1", f"output_dir={tmp_path / 'alone'}"]
    config = load_config(task, f"{folder / 'rows.py'}#dense", overrides)
    assert "seeds" not in config and "cells" not in config
    assert folder_differences(folder / "out" / "dense" / "seed1", run_identity(config)) == []
    alone = run(SEGMENTATION, config)
    compared = read_results(folder / "out" / "dense" / "seed1" / "results.json")
    assert alone["model_sha256"] == compared["model_sha256"] and alone["metrics"] == compared["metrics"]
    other = read_results(folder / "out" / "dense" / "seed0" / "results.json")
    assert other["model_sha256"] != compared["model_sha256"]


@on_segmentation
def test_a_finished_comparison_is_not_done_again_and_a_lost_record_is_written_from_the_run(finished, data, monkeypatch):
    task, folder = finished
    before, picture = records(folder), folder / "records" / "predictions.png"
    drawn = picture.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        forbid(patch)
        assert MAINS[task](arguments(task, folder, data)) == 0
    assert picture.stat().st_mtime_ns == drawn
    lose(folder)
    assert MAINS[task](arguments(task, folder, data)) == 0
    assert records(folder) == before


@on_segmentation
def test_a_killed_comparison_ends_with_the_same_records(finished, data, tmp_path, monkeypatch):
    """It is stopped in the middle of its second run, after a checkpoint, as Ctrl-C stops it."""
    task, folder = finished
    one_seed = arguments(task, tmp_path, data, "--seeds", "0")
    write(tmp_path, task)
    work, runs = compare.run, []

    def stopped(*given, hooks, **options):
        class Stop(compare.Hook):
            def after_train_iter(self, runner, *rest, **more):
                if len(runs) == 2 and runner.iter == 5:
                    raise KeyboardInterrupt

        runs.append(None)
        return work(*given, hooks=[*hooks, Stop()], **options)

    with monkeypatch.context() as patch:
        patch.setattr(compare, "run", stopped)
        assert MAINS[task](one_seed) == 130
    assert len(records(tmp_path)) == 1
    assert MAINS[task](one_seed) == 0
    assert read_results(tmp_path / "out" / "both" / "seed0" / "results.json")["resumed_from"] == "iter_3.pth"
    whole, resumed = records(folder), records(tmp_path)
    assert resumed.keys() == {("dense", 0), ("both", 0)}
    for name, record in resumed.items():
        assert record.keys() == whole[name].keys()
        for key in {*record} - {*TIMES}:
            assert whole[name][key] == record[key], (name, key)


@on_segmentation
def test_a_job_of_its_own_process_gives_the_same_record(finished, data, tmp_path, capfd):
    task, folder = finished
    write(tmp_path, task)
    assert MAINS[task](arguments(task, tmp_path, data, "--jobs", "2", "--seeds", "0", "--variants", "both")) == 0
    found = records(tmp_path)
    assert list(found) == [("both", 0)]
    assert found["both", 0]["metrics"] == pytest.approx(records(folder)["both", 0]["metrics"], abs=1e-3)
    assert "[1/1]" in capfd.readouterr().err


@on_segmentation
@each(
    "more, message",
    [
        (["randomness.seed=3"], "randomness.seed is the comparison's to choose"),
        (["output_dir=x"], "output_dir is the comparison's to choose"),
        (["--variants", "densee"], "no key 'densee'; did you mean 'dense'?"),
        (["--seeds", "1", "1"], "must be a list of different integers"),
        (["--jobs", "0"], "--jobs=0 must be 1 or more"),
        (["train_cfg.max_iter.s=3"], "there is no 'train_cfg.max_iter'"),
        (["train_cfg.max_iters=9"], "is of another configuration"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(finished, data, more, message, capsys, monkeypatch):
    task, folder = finished
    kept = (folder / "records" / "records.jsonl").read_text()
    if more[0] == "--jobs":
        lose(folder)
    forbid(monkeypatch)
    assert MAINS[task](arguments(task, folder, data, *more)) == 2
    (folder / "records" / "records.jsonl").write_text(kept)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


@each(
    "text, message",
    [
        ('_base_ = ["{base}"]\n', "is no comparison, it lacks `seeds`, `cells`"),
        ('_base_ = ["{base}"]\nseeds = [0]\n', "is no comparison, it lacks `cells`"),
        (FILE.replace("[0, 1]", "[0, 0]"), "must be a list of different integers of 0 or more"),
    ],
)
def test_a_file_that_is_no_comparison_is_refused(text, message, data, tmp_path, capsys):
    write(tmp_path, "segmentation", text)
    assert compare_segmentation(arguments("segmentation", tmp_path, data)) == 2
    assert message in capsys.readouterr().err


def test_missing_data_is_named_before_the_first_run(data, tmp_path, capsys, monkeypatch):
    forbid(monkeypatch)
    write(tmp_path, "segmentation")
    missing = "test_dataloader.dataset.data_root=nowhere/"
    assert compare_segmentation(arguments("segmentation", tmp_path, data, missing)) == 2
    assert f"{missing} is not a folder" in capsys.readouterr().err


def test_several_processes_are_refused(data, tmp_path, capsys, monkeypatch):
    write(tmp_path, "segmentation")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare_segmentation(arguments("segmentation", tmp_path, data)) == 2
    assert "compare runs in one process" in capsys.readouterr().err


@on_segmentation
def test_a_damaged_record_is_refused(finished, data, tmp_path, capsys):
    task, folder = finished
    write(tmp_path, task)
    shutil.copytree(folder / "records", tmp_path / "records", dirs_exist_ok=True)
    file = tmp_path / "records" / "records.jsonl"
    file.write_text(file.read_text()[:-40])
    assert MAINS[task](arguments(task, tmp_path, data)) == 2
    assert "records.jsonl, line 5 is damaged" in capsys.readouterr().err


@each("folder", RECORDED)
def test_records_that_are_kept_are_of_todays_configurations(folder):
    assert {folder.parts[-3] for folder in RECORDED} == {*MAINS}
    task = task_named(folder.parts[-3])
    older = folder.name.endswith("_other_starts")  # of fewer seeds
    name = folder.name.removesuffix("_other_starts")
    comparison = compare.load_comparison(task, ROOT / "configs" / task.name / f"{name}.py")
    found = all_records(comparison, folder)
    assert sum(map(len, found.values())) == sum(map(len, read_records(folder).values())) >= 8
    for runs in found.values():
        assert [record["seed"] for record in runs] == comparison.seeds[: 3 if older else None]
        # Short runs: one of photographs with Fibottention found no coin, and has 1.95 times the baseline.
        shares = [record["metrics"][task.metric] for record in runs]
        baseline = runs[0]["baseline"][task.metric]
        assert min(shares) > 1.9 * baseline and sum(shares) / len(shares) > 2 * baseline
    assert table(found, task.metric, task.also) in (folder / "table.md").read_text()
