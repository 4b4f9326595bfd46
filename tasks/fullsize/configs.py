"""The configurations of the papers, found in a folder, and which of them are the same step.

A configuration counts if it is of full size: it names a published data set in its published layout and does not cut it.
Small forms, smoke runs and what has no data set of its own do not.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.common.config import (
    COMPARISON,
    SWEEP,
    Config,
    config_name,
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
# Their data sets have layouts of their own, each read by code of its own; images come from any folder alike.
LAYOUTS = ("robotics", "video")
OWN_DATA = "data/own"  # where configurations of mmsegmentation and mmdetection for data of one's own look for it
MADE_DATA = ("scenes", "photographs")  # the same of data that commands here make
# The data set that stands for others with the same step, where there is a choice.
PREFERRED = ("imagenet", "cifar10", "cifar100")
# What of the trainer decides which code a step runs and what it keeps in memory, besides the batch.
KINDS = ("optim", "bf16", "fp16", "num_train_epochs")
SWITCHES = ("ema_decay", "layer_decay", "backbone_learning_rate")


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
    def images(self) -> int:
        """Examples of a step: of all devices where the configuration says it, else of one device of the paper's."""
        if "train_dataloader" in self.config:
            return int(self.config["train_dataloader"]["batch_size"])
        trainer = self.config["trainer"]
        keys = ("batch_size",) if self.task == "robotics" else ("effective_batch_size", "per_device_train_batch_size")
        return next((int(trainer[key]) for key in keys if trainer.get(key)), 64 if self.task == "robotics" else 8)

    @property
    def trains(self) -> bool:
        """Whether it has any step; some rows are a model as it is."""
        return self.config.get("trainer", {}).get("num_train_epochs") != 0


@dataclass
class Group:
    """Runs that are the same step but for seed, data set, rates and the numbers in the settings of a prior.

    Data sets of videos and demonstrations are in groups of their own.

    runs: the first one stands for all.
    """

    runs: list[PaperRun]

    @property
    def run(self) -> PaperRun:
        """The one that is done."""
        return self.runs[0]

    @cached_property
    def key(self) -> str:
        """Of what its step is made: a changed configuration has another."""
        return digest(step_of(self.run))

    @property
    def name(self) -> str:
        """Name of its record and folders."""
        return f"{self.run.task}_{config_name(Path(self.run.name).name)}"


def find_groups(root: Path = ROOT) -> list[Group]:
    """All groups of the configurations in a folder, in the order of their first names."""
    groups: dict[str, list[PaperRun]] = {}
    for run in find_runs(root):
        groups.setdefault(digest(step_of(run)), []).append(run)
    return [Group(sorted(runs, key=_preference)) for runs in groups.values()]


def _preference(run: PaperRun) -> tuple[bool, int]:
    return run.sweep, PREFERRED.index(run.source) if run.source in PREFERRED else len(PREFERRED)


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


# ---- what is the same step ------------------------------------------------------------------------------------------


def step_of(run: PaperRun) -> dict[str, Any]:
    """What a step is made of: everything but seed, data, rates, lengths and the numbers in the settings of a prior.

    Of videos and demonstrations it has the data set's layout.
    """
    config = run.config
    if "train_dataloader" in config:
        model = {**config["model"], "backbone": _without_prior_numbers(config["model"]["backbone"])}
        return {"task": run.task, "model": model, "images": run.images}
    trainer = config["trainer"]
    kinds = {key: trainer.get(key) for key in KINDS if key != "num_train_epochs"}
    kinds |= {key: trainer.get(key) is not None for key in SWITCHES}
    step = {"task": run.task, "images": run.images, "trains": run.trains, "kinds": kinds}
    if run.task in LAYOUTS:
        step["layout"] = config["data"].get("source") or config["data"]["path"]
    for section in ("model", "encoder"):
        if section in config:
            step[section] = _without_prior_numbers(config[section])
    for section in ("augmentation", "tuning", "token_labels", "distillation", "compression", "crops", "dino", "policy"):
        if section in config:
            step[section] = _without_rates(config[section])
    return step


def _without_rates(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section without the sizes of effects: which are there, and not how strong, decides what runs."""
    words = ("size", "crops", "widths", "rank", "layers", "repeats")
    return {
        key: value
        if not isinstance(value, float) or any(word in key for word in words)
        else "none" if value == 0 else "some"
        for key, value in section.items()
        if not (isinstance(value, int) and not isinstance(value, bool) and key.endswith("epochs"))
    }  # fmt: skip


def _without_prior_numbers(model: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _no_numbers(value) if key == "prior" else value for key, value in model.items()}
    return {key: value for key, value in found.items() if key != "drop_path_rate"}


def _no_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _no_numbers(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_no_numbers(part) for part in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def digest(value: Any) -> str:
    """Twelve digits that stand for plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def chosen(groups: Sequence[Group], patterns: Iterable[str]) -> list[Group]:
    """The groups of which some run's name, or task and name, holds one of the texts; all of them without any text.

    Raises:
        ValueError: for a text that is in none.
    """
    kept: dict[str, Group] = {}
    patterns = list(patterns)
    for pattern in patterns:
        found = [group for group in groups if any(pattern in f"{run.task} {run.name}" for run in group.runs)]
        if not found:
            raise ValueError(f"--only {pattern!r} is in the name of no configuration; --list shows them")
        kept |= {group.key: group for group in found}
    return list(kept.values()) if patterns else list(groups)


__all__ = ["Config", "Group", "PaperRun", "chosen", "find_groups", "find_runs"]
