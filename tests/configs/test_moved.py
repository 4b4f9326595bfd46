"""Configurations keep their content: each file from before `matrix:` is compared with the cell or file that replaced
it.

moved.tsv has a line for each: its old name, its name now, its kind, where its run lies if others read its model from
there, and the start of the SHA-256 of its resolved content as JSON, made with the last commit that had the old file.
changed.py says what is different on purpose since then, and why.
"""

import copy
import hashlib
import json
from pathlib import Path

import pytest

import tasks.classification.compare
import tasks.classification.config
import tasks.classification.vtab.plan
import tasks.common.compare
import tasks.robotics.config
import tasks.video.compare
import tasks.video.config
from tasks.common.config import COMPARISON, read_layers
from tasks.common.run_folder import claim, folder_differences
from tests.configs.changed import CHANGES, FEWER_SEEDS, changes_of

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
    """A run's content without its folder, and with the old name of the validation split in motion clips."""
    kept = {key: value for key, value in config["trainer"].items() if key != "output_dir"}
    config = {**config, "trainer": kept}
    if motion := config["data"].get("motion"):
        earlier = {"val" if key == "validation" else key: value for key, value in motion.items()}
        config["data"] = {**config["data"], "motion": earlier}
    return config


def content(path, kind):
    """The resolved configuration: {section: {key: value}}, or that of all the runs that it describes, in order."""
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
    layers = read_layers(path, SECTIONS, COMPARISON)
    return {section: layers[section] for section in SECTIONS}


def as_before(found, kind, name):
    """The content with every later change undone; each of them must be there to be undone."""
    for change in changes_of(name):
        found, changed = copy.deepcopy(found), found
        if kind in COMPARISONS:
            firsts = {f"first {number}": config for number, config in enumerate(found[2])}
            rows = {**dict(found[0]), **firsts}
            change.undo(rows)
            found[0] = [[row, config] for row, config in rows.items() if row not in firsts]
        else:
            change.undo({name.partition("#")[2]: found})
        assert found != changed, f"not in {name}: {change.reason}"
    if fewer := FEWER_SEEDS.get(name):
        assert found[1][: len(fewer)] == fewer != found[1]
        found = [found[0], fewer, found[2]]
    return found


# Sections that came later, of which these configurations have nothing.
LATER = ("compression",)


def checksum(found):
    return hashlib.sha256(json.dumps(without_later(found), sort_keys=True, default=repr).encode()).hexdigest()[:16]


def without_later(found):
    """Nested content without later sections that are empty."""
    if isinstance(found, (list, tuple)):
        return [without_later(part) for part in found]
    if isinstance(found, dict):
        return {key: without_later(part) for key, part in found.items() if key not in LATER or part}
    return found


@pytest.mark.parametrize(("old", "new", "kind", "folder", "expected"), MOVED, ids=[line[0] for line in MOVED])
def test_content_is_what_it_was(old, new, kind, folder, expected):
    path = ROOT / "configs" / new
    assert checksum(as_before(content(path, kind), kind, new)) == expected
    if folder:
        assert RUNS[kind](path)["trainer"]["output_dir"] == folder


RESULTS = ROOT / "tasks" / "classification" / "results"
TASKS = ("count", "fashion", "orientation", "position")
RECORDED = {
    "cifar10_small": "classification/cifar10_small_priors.yaml",
    "fib_table2_small": "experiments/fib_table2.yaml#small",
    **{f"evidence_{task}": f"classification/evidence.yaml#{task}" for task in TASKS},
}


@pytest.mark.parametrize("folder", RECORDED)
def test_runs_of_before_are_recognised(folder, tmp_path):
    """The comparison accepts their records, and a row as a run of its own accepts the folder that such a run left."""
    path = ROOT / "configs" / RECORDED[folder]
    records = tasks.common.compare.all_records(COMPARISONS["comparison"](path), RESULTS / folder)
    assert sum(map(len, records.values())) == len([*(RESULTS / folder).glob("*/seed*.json")]) > 0
    mark = "-" if "#" in path.name else "#"
    for row, (record, *_) in records.items():
        claim(tmp_path / row, record["config"])
        now = RUNS["classification"](f"{path}{mark}{row}", [f"trainer.seed={record['seed']}"])
        assert folder_differences(tmp_path / row, now) == []
        assert folder_differences(tmp_path / row, {**now, "model": {}}) != []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.names)
def test_every_change_is_of_a_configuration(change):
    assert change.reason.endswith(".") and any(change in changes_of(line[1]) for line in MOVED)


def test_every_old_configuration_is_there():
    assert len(MOVED) == len({line[0] for line in MOVED}) == 235
