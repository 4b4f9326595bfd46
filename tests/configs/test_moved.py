"""Configurations keep their content: each of before there was a `matrix:` against the cell or file that it is now.

moved.tsv has a line for each: its old name, its name now, what it is, where its run lies if others read its model from
there, and the start of the SHA-256 of its resolved content as JSON, made with the last commit that had the old file.
"""

import hashlib
import json
from pathlib import Path

import pytest

import tasks.classification.compare
import tasks.classification.config
import tasks.classification.vtab.plan
import tasks.robotics.config
import tasks.video.compare
import tasks.video.config
from tasks.common.config import read_layers

ROOT = Path(__file__).parents[2]
MOVED = [line.split("\t") for line in Path(__file__).with_name("moved.tsv").read_text().splitlines()]
RUNS = {
    "classification": tasks.classification.config.load_config,
    "video": tasks.video.config.load_config,
    "robotics": tasks.robotics.config.load_config,
}
COMPARISONS = {
    "comparison": tasks.classification.compare.load_comparison,
    "video comparison": tasks.video.compare.load_comparison,
}
MM = {"segmentation": ("mmcv", "mmseg"), "detection": ("mmcv.ops", "mmdet")}
SECTIONS = sorted(
    {*tasks.classification.config.SECTIONS, *tasks.video.config.SECTIONS, *tasks.robotics.config.SECTIONS}
)


def without_folder(config):
    """A run's content without where it lies."""
    kept = {key: value for key, value in config["trainer"].items() if key != "output_dir"}
    return {**config, "trainer": kept}


def content(path, kind):
    """What a configuration comes to: {section: {key: value}}, or that of all the runs that it describes, in order."""
    if kind in RUNS:
        needs_model = "tuning" in str(path) and "digits" not in str(path)
        return without_folder(RUNS[kind](path, ["model.pretrained=x"] if needs_model else []))
    if kind in MM:
        for package in MM[kind]:
            pytest.importorskip(package, reason="the extra `dense` is not installed", exc_type=ImportError)
        from tasks.common.mm.config import load_config

        return {key: value for key, value in load_config(kind, path).to_dict().items() if key != "work_dir"}
    if kind in COMPARISONS:
        comparison = COMPARISONS[kind](path)
        rows = [[name, without_folder(config)] for name, config in comparison.configs.items()]
        return [rows, comparison.seeds, comparison.first]
    if kind == "sweep":
        sweep = tasks.classification.vtab.plan.load_sweep(path)
        return [sweep.title, list(sweep.configs.items()), sweep.points, sweep.selection_seeds, sweep.seeds]
    layers = read_layers(path, SECTIONS, ("seeds", "variants"))
    return {section: layers[section] for section in SECTIONS}


def checksum(path, kind):
    return hashlib.sha256(json.dumps(content(path, kind), sort_keys=True, default=repr).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("old", "new", "kind", "folder", "expected"), MOVED, ids=[line[0] for line in MOVED])
def test_content_is_what_it_was(old, new, kind, folder, expected):
    path = ROOT / "configs" / new
    assert checksum(path, kind) == expected
    if folder:
        assert RUNS[kind](path)["trainer"]["output_dir"] == folder


def test_every_old_configuration_is_there():
    assert len(MOVED) == len({line[0] for line in MOVED}) == 235
