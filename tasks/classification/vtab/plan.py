"""Which runs a VTAB-1K sweep consists of, their records, and which grid point selection chose.

base: vtab.yaml#deit_base-full          file or cell that this one changes, relative to it; its keys are those here
title: DeiT-B                          of the table
seeds: [0, 1, 2, 3, 4]                 of the final stage
selection_seeds: [0, 1, 2, 3, 4]       of every grid point
grid: {trainer.learning_rate: [1e-3, 1e-4]}    {section.key: values}; every combination is tried
variants:                              name of a row: what it changes; the first is the baseline
  baseline: {model: {prior: dense}}
  violin: {model: {prior: {decay: {name: violin, init: finetune}}}}
data, augmentation, model, trainer:    as in a training configuration, shared by all variants
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.classification.config import SECTIONS, check_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.vtab_tasks import SELECTION, TASKS
from hf_sparseprior.runs.config import (
    FINAL,
    SWEEP,
    apply_overrides,
    check_known,
    check_name,
    config_name,
    read_cell,
    read_layers,
)
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import config_differences
from tasks.common.compare import (
    check_one_checkpoint,
    check_present,
    check_record,
    check_seeds,
    check_start,
    refuse_owned,
    variant_configs,
)

_OWNER = "the sweep's to choose"
WHICH = ("pretrained", "preset", "family")  # of a `model` section: they say which model it is
OWNED = {
    "trainer.seed": f"{_OWNER}; use `seeds` and `selection_seeds`",
    "trainer.output_dir": f"{_OWNER}; use --out",
    "data.task": f"{_OWNER}; use --tasks",
    "data.stage": _OWNER,
}


@dataclass(frozen=True)
class Run:
    """One training run. point: the index of its grid point. name: the path of its record and of its folder."""

    variant: str
    task: str
    stage: str
    point: int
    seed: int
    name: str = field(compare=False)


@dataclass
class Sweep:
    """A sweep as its file describes it.

    configs: by variant, without what the sweep chooses. points: the grid's points in order, each {section.key: value}.
    """

    title: str
    configs: dict[str, dict[str, dict[str, Any]]]
    points: list[dict[str, Any]]
    selection_seeds: list[int]
    seeds: list[int]
    tasks: list[str] = field(default_factory=lambda: list(TASKS))

    def selection_runs(self, variant: str, task: str, point: int | None = None) -> list[Run]:
        """The runs that choose a grid point, or those of one point."""
        points = range(len(self.points)) if point is None else (point,)
        return [self._run(variant, task, SELECTION, index, seed) for index in points for seed in self.selection_seeds]

    def final_runs(self, variant: str, task: str, point: int) -> list[Run]:
        """The runs with the chosen grid point."""
        return [self._run(variant, task, FINAL, point, seed) for seed in self.seeds]

    def _run(self, variant: str, task: str, stage: str, point: int, seed: int) -> Run:
        name = f"{variant}/{task}/{stage}/{point_name(self.points[point])}/seed{seed}"
        return Run(variant, task, stage, point, seed, name)

    def config(self, run: Run) -> dict[str, dict[str, Any]]:
        """The configuration of a run, without its output folder."""
        config = copy.deepcopy(self.configs[run.variant])
        _set_point(config, self.points[run.point])
        config["data"].update(task=run.task, stage=run.stage)
        config["trainer"].update(seed=run.seed)
        return config

    def number(self, run: Run) -> int:
        """Its place in the order in which runs are done, from 0 on; a final run's is the same for every point."""
        if run.stage == FINAL:
            place = len(self.points) * len(self.selection_seeds) + self.seeds.index(run.seed)
        else:
            place = run.point * len(self.selection_seeds) + self.selection_seeds.index(run.seed)
        row = self.tasks.index(run.task) * len(self.configs) + list(self.configs).index(run.variant)
        return row * self._size_of_row + place

    @property
    def size(self) -> int:
        """How many runs there are."""
        return len(self.configs) * len(self.tasks) * self._size_of_row

    @property
    def _size_of_row(self) -> int:
        return len(self.points) * len(self.selection_seeds) + len(self.seeds)


def point_name(point: Mapping[str, Any]) -> str:
    """A grid point as the name of a folder: `learning_rate=0.001,rank=4`."""
    return ",".join(f"{key.partition('.')[2]}={value}" for key, value in point.items()) or "only"


def _set_point(config: dict[str, dict[str, Any]], point: Mapping[str, Any]) -> None:
    for key, value in point.items():
        section, _, name = key.partition(".")
        config[section][name] = value


# ---- the file -------------------------------------------------------------------------------------------------------


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep and check every configuration in it before anything runs.

    Raises:
        ValueError: for unknown keys and bad values; the message names the variant or the grid point.
        OSError: for a missing file.
    """
    path = Path(path)
    content = read_layers(path, SECTIONS, SWEEP)
    check_present(content, ("seeds", "selection_seeds", "grid", "variants"), f"{path} is no sweep")
    shared = {section: content[section] for section in SECTIONS}
    seeds = check_seeds(content.get("seeds"), str(path))
    selection_seeds = check_seeds(content.get("selection_seeds"), f"{path}, selection_seeds")
    points = _read_grid(content.get("grid"), str(path))
    refuse_owned([f"{section}.{key}" for section in SECTIONS for key in shared[section]], OWNED, str(path))
    owned = {**OWNED, **{key: "an axis of the grid" for key in points[0]}}
    refuse_owned([override.partition("=")[0] for override in overrides], owned, "the command line")
    apply_overrides(shared, overrides, SECTIONS)
    if shared["data"].get("source") != "vtab":
        raise ValueError(f"{path}: data.source={shared['data'].get('source')!r} must be 'vtab'")
    shared["trainer"].setdefault("disable_tqdm", True)
    configs = variant_configs(CLASSIFICATION, content.get("variants"), shared, overrides, owned, str(path))
    for (name, config), point in itertools.product(configs.items(), points):
        tried = copy.deepcopy(config)
        try:
            _set_point(tried, point)
            check_config(tried)
        except ValueError as error:
            raise ValueError(f"{path}, variant {name!r}, {point_name(point)}: {error}") from None
    return Sweep(_title(path, content, overrides), configs, points, selection_seeds, seeds)


def _title(path: Path, content: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The sweep's title. One that a base gave to its own model says what the model is instead, and so do overrides."""
    title, own = str(content.get("title") or config_name(path)), read_cell(path)
    named = {} if "title" in own else {key: value for key, value in (own.get("model") or {}).items() if key in WHICH}
    changes = [f"model.{key}={value}" for key, value in named.items()]
    changes += [override for override in overrides if override.partition("=")[0] in {f"model.{key}" for key in WHICH}]
    return f"{title} changed to {', '.join(changes)}" if changes else title


def _read_grid(grid: Any, path: str) -> list[dict[str, Any]]:
    """Every combination of the axes' values; the last axis varies fastest."""
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise ValueError(f"{path}: grid={grid!r} must be like {{section.key: [value, ...]}}")
    for key, values in grid.items():
        section, dot, _ = str(key).partition(".")
        if not dot:
            raise ValueError(f"{path}: grid key {key!r} must be SECTION.KEY, for example trainer.learning_rate")
        check_known([section], SECTIONS, f"{path}: grid")
        names = [point_name({key: value}) for value in values]
        for name in names:
            check_name(name, f"{path}: grid value")
        if len(set(names)) < len(names) or any(values.count(value) > 1 for value in values):
            raise ValueError(f"{path}: grid values {key}={values} must be different")
    if len({key.partition(".")[2] for key in grid}) < len(grid):
        raise ValueError(f"{path}: grid keys {', '.join(grid)} must differ after the dot")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def choose(what: str, wanted: Sequence[Any] | None, known: Sequence[Any]) -> list[Any]:
    """The wanted ones among the known, in the order of the known; None: all."""
    unknown = [value for value in wanted or () if value not in known]
    if unknown:
        raise ValueError(f"--{what} {unknown[0]} must be among {', '.join(map(str, known))}")
    return [value for value in known if wanted is None or value in wanted]


# ---- records --------------------------------------------------------------------------------------------------------


class Records:
    """The folder of a sweep's records, with one file a finished run. What was read is remembered."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.sweep = sweep
        self.folder = folder
        self._read: dict[Run, dict[str, Any]] = {}
        self._started: dict[str | None, dict[str, Any]] = {}  # by `model.pretrained`, the first record that was read

    def path(self, run: Run) -> Path:
        """The file of a run's record."""
        return self.folder / f"{run.name}.json"

    def read(self, run: Run) -> dict[str, Any] | None:
        """A run's record; None if there is none.

        Raises:
            ValueError: if it is damaged, of another configuration, or of other weights in `model.pretrained` than a
                record that was read before.
        """
        if run not in self._read:
            path = self.path(run)
            if not path.exists():
                return None
            record = read_results(path)
            check_record(path, record)
            if differences := config_differences(record["config"], self.sweep.config(run)):
                raise ValueError(
                    f"{path} is of another configuration ({'; '.join(differences)}); remove it or choose another "
                    "--records"
                )
            first = self._started.setdefault(record["config"]["model"].get("pretrained"), record)
            check_one_checkpoint([first, record])
            self._read[run] = record
        return self._read[run]

    def check_start(self) -> None:
        """Raise ValueError or OSError if a missing run cannot start, or would start from other weights than the
        records.
        """
        variants = {run.variant: None for run in self.missing()}
        check_start(CLASSIFICATION, [self.sweep.configs[variant] for variant in variants], list(self._started.values()))

    def accuracy(self, run: Run) -> float | None:
        """In percent: of val200 in selection, of test in the final stage."""
        record = self.read(run)
        return None if record is None else 100 * record["metrics"]["test_accuracy"]

    def selection(self, variant: str, task: str) -> list[float | None]:
        """The validation accuracy of each grid point, in percent, the mean over seeds; None where a run is missing."""
        means: list[float | None] = []
        for point in range(len(self.sweep.points)):
            values = [self.accuracy(run) for run in self.sweep.selection_runs(variant, task, point)]
            whole = [value for value in values if value is not None]
            # Rounded, because the order of a sum must not decide between equal points.
            means.append(round(float(np.mean(whole)), 6) if len(whole) == len(values) else None)
        return means

    def chosen_point(self, variant: str, task: str) -> int | None:
        """The grid point with the best validation accuracy, the first of equal ones; None before all runs are done."""
        means = self.selection(variant, task)
        whole = [mean for mean in means if mean is not None]
        return whole.index(max(whole)) if len(whole) == len(means) else None

    def missing(self) -> Iterator[Run]:
        """The runs that could be done now, in order: those of selection, then those of the chosen point."""
        for task, variant in itertools.product(self.sweep.tasks, self.sweep.configs):
            yield from (run for run in self.sweep.selection_runs(variant, task) if not self.done(run))
            point = self.chosen_point(variant, task)
            if point is not None:
                yield from (run for run in self.sweep.final_runs(variant, task, point) if not self.done(run))

    def done(self, run: Run) -> bool:
        """Whether a run has a record."""
        return run in self._read or self.path(run).exists()

    def counts(self, variant: str) -> dict[str, tuple[int, int]]:
        """{stage: (runs done, runs in all)} of a variant."""
        sweep = self.sweep
        selection, final = [], []
        for task in sweep.tasks:
            selection += sweep.selection_runs(variant, task)
            point = self.chosen_point(variant, task)
            final += [] if point is None else sweep.final_runs(variant, task, point)
        return {
            SELECTION: (sum(map(self.done, selection)), len(selection)),
            FINAL: (sum(map(self.done, final)), len(sweep.tasks) * len(sweep.seeds)),
        }
