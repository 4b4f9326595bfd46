"""The configurations of the papers, found in a folder.

A configuration counts if it is of full size: it names a published data set in its published layout and does not cut it.
Small forms, smoke runs and what has no data set of its own do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_sparseprior.runs.config import (
    COMPARISON,
    SWEEP,
    merge_bases,
    read_cells,
    read_layers,
    read_rows,
)
from tasks.fullsize.commands import ROOT

PARTS = ("data", "models", "recipes", "base", "mm")  # folders of what runs are made of
EXPERIMENTS = "experiments"  # folder of the papers' tables
# All sections of all tasks that the papers have, and which of them only one task has.
SECTIONS = (
    *("data", "augmentation", "model", "tuning", "token_labels", "distillation", "compression"),
    *("crops", "dino", "evaluation", "policy", "encoder", "trainer"),
)
OWN_SECTIONS = {"policy": "robotics", "dino": "pretraining"}
VIDEO_KEYS = ("image_model", "num_frames")
# Data that is made here, and data of no published set.
OURS = ("digits", "motion", "folder", "imagefolder", "parquet", "arrow", "hub", "mnist", "fashion_mnist")
OWN_DATA = "data/own"  # where configurations of mmsegmentation and mmdetection for data of one's own look for it
MADE_DATA = ("scenes", "photographs")  # the same of data that commands here make


@dataclass(frozen=True)
class PaperRun:
    """One run of a paper's table.

    name: FILE#CELL as commands take it, relative to the folder of configurations. task: its task's folder.
    config: its sections, resolved; of segmentation and detection the whole configuration.
    sweep: whether it is a row of a sweep of VTAB-1K, which no `train` takes by name.
    """

    name: str
    task: str
    config: dict[str, Any] = field(compare=False)
    sweep: bool = False

    @property
    def source(self) -> str:
        """What its data is called."""
        data = self.config.get("data", {})
        return data.get("source") or Path(str(data.get("path", self.config.get("data_root", "")))).name

    @property
    def trains(self) -> bool:
        """Whether it has any step; some rows are a model as it is."""
        return self.config.get("trainer", {}).get("num_train_epochs") != 0


def find_runs(root: Path = ROOT) -> Iterator[PaperRun]:
    """Every run of full size that the files of a folder describe."""
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".yaml", ".py")]
    for file in files:
        if not {*file.relative_to(root).parts[:-1]} & {*PARTS}:
            found = _yaml_runs(file, root) if file.suffix == ".yaml" else _mm_runs(file, root)
            yield from (run for run in found if is_full_size(run))


def is_full_size(run: PaperRun) -> bool:
    """Whether a run reads a published data set, whole."""
    data = run.config.get("data", {})
    path = str(data.get("path", run.config.get("data_root", "")))
    if run.task in ("robotics", "segmentation", "detection"):
        return path.startswith("data/") and not any(name in path for name in MADE_DATA)
    return bool(data) and data.get("source", "digits") not in OURS and not data.get("limit_train")


def _yaml_runs(file: Path, root: Path) -> list[PaperRun]:
    try:
        return list(_read_runs(file, root))
    except ValueError:
        if file.parent.name == EXPERIMENTS:
            raise
        return []  # of a task with other sections, and of no paper


def _read_runs(file: Path, root: Path) -> Iterator[PaperRun]:
    cells = read_cells(file)
    rows = read_rows(cells, file)
    for cell, content in cells.items():
        name = f"{file}#{cell}" if cell else str(file)
        shared = read_layers(name, SECTIONS, (*COMPARISON, *SWEEP))
        if shared["data"].get("source") == "vtab":
            yield from _sweep_runs(name, shared, root)
        elif not content.get("variants"):
            if "variants" not in shared:
                yield _yaml_run(name, shared, root)
            continue
    if rows and not _is_sweep(file):
        for row in rows:
            name = f"{file}#{row}"
            content = merge_bases(rows[row], name, SECTIONS)
            yield _yaml_run(name, content, root)


def _is_sweep(file: Path) -> bool:
    cell = next(iter(read_cells(file)))
    shared = read_layers(f"{file}#{cell}" if cell else str(file), SECTIONS, (*COMPARISON, *SWEEP))
    return shared["data"].get("source") == "vtab"


def _sweep_runs(name: str, shared: dict[str, Any], root: Path) -> Iterator[PaperRun]:
    """Rows of a sweep at its grid's first point."""
    variants, grid = shared.pop("variants", None) or {"": {}}, shared.pop("grid", None) or {}
    for row, changes in variants.items():
        config = {section: dict(shared[section]) for section in SECTIONS}
        for section, values in copy.deepcopy(changes or {}).items():
            config[section].update(values)
        for key, values in grid.items():
            section, _, own = key.partition(".")
            config[section].setdefault(own, values[0])
        config["data"] |= {"stage": "final"}
        yield _yaml_run(f"{name}{'-' if '#' in name else '#'}{row}", config, root, sweep=True)


def _yaml_run(name: str, content: Mapping[str, Any], root: Path, sweep: bool = False) -> PaperRun:
    config = {section: dict(content[section]) for section in SECTIONS if content.get(section)}
    return PaperRun(str(Path(name).relative_to(root)), task_of(config), config, sweep)


def task_of(config: Mapping[str, Any]) -> str:
    """The task whose sections these are."""
    for section, task in OWN_SECTIONS.items():
        if section in config:
            return task
    return "video" if any(key in config.get("model", {}) for key in VIDEO_KEYS) else "classification"


def _mm_runs(file: Path, root: Path) -> Iterator[PaperRun]:
    from mmengine.config import Config as MMConfig

    from tasks.common.mm.config import as_json, load_config

    task, said = file.parent.name, MMConfig.fromfile(str(file))
    if said.get("data_root") == OWN_DATA:
        return
    for cell in said.get("cells", {}) or ("",):
        name = f"{file}#{cell}" if cell else str(file)
        config = as_json(load_config(task, name).to_dict())
        yield PaperRun(str(Path(name).relative_to(root)), task, {**config, "data_root": _data_root(config)})


def _data_root(config: Mapping[str, Any]) -> str:
    return str(config["train_dataloader"]["dataset"].get("data_root", ""))
