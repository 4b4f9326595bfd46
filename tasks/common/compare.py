"""Compare runs of one task over seeds: python -m tasks.TASK.compare --config FILE [section.key=value ...]

first: [cifar10_pretrain_tiny.yaml]    optional: runs that rows start from, done before them, in this order
base: cifar10_small.yaml#dense         configuration that every run shares
seeds: [0, 1, 2]
reference: dense                       optional: the row that the others are compared with, the first one by default
variants:                              name of a row: what it changes
  dense: {}
  fibottention: {model: {prior: fibottention}}
  lora: {tuning: {method: lora}}
  other: {base: smoke.yaml}            a row with a base of its own

The rest is a run's configuration that every row shares: sections, and a `matrix`, of which FILE#CELL names one cell
(hf_sparseprior/runs/config.py). `variants` may also name a file of rows. Names of files are relative to the file they
are in.

Runs of one seed see the same examples in the same order, augmented alike. With `model.pretrained` they start from one
new classifier and the same adapters, without it from the weights of one dense model, as far as it has them. Seeds take
turns, so that an early stop leaves a fair comparison. Every finished run leaves its results in its folder and a line in
records.jsonl (tasks/common/records.py). The command can be killed at any moment and started again; then it goes on
where it stopped, and does no finished run again. It prints a table of the rows and one of their differences to the
first row, or to `reference`, seed by seed (tasks/common/paired.py), and draws both. With `reference: {a-wide:
dense-wide}` the rows that are named there are compared with rows of their own.

`--jobs N` does N runs at a time, each in a process of one thread (tasks/common/queue.py), and says how long the rest
will take. A run that fails does not stop the others. Such a command can be given twice at once, on one machine or on
several that share a disk: no run is done by both. `--shard K/N` and `--ray ADDRESS` are for several machines
(docs/several-machines.md).

A run of `first` is what the `train` command does with its file: it lies in its own `trainer.output_dir`, has the file's
seed, and serves every comparison that names it. It is done only if a row still to be done reads its model, itself or
through another run of `first`.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.own_files import after_imports, import_files, imported_paths
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import (
    COMPARISON,
    Config,
    apply_overrides,
    check_known,
    check_name,
    config_name,
    merge_bases,
    read_cell,
    read_layers,
)
from hf_sparseprior.runs.environment import command_line
from hf_sparseprior.runs.hf_run import HFTask
from hf_sparseprior.runs.labels import CLASSES
from hf_sparseprior.runs.processes import started
from hf_sparseprior.runs.results import check_results
from hf_sparseprior.runs.run_folder import (
    RESULTS,
    RUN_CONFIG,
    check_place,
    config_differences,
    default_output_dir,
    finished_results,
    folder_differences,
    results_of,
)
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.common.comparison_table import write_comparison
from tasks.common.machines import Shard, check_locks, check_options
from tasks.common.paired import ACCURACY
from tasks.common.parsers import compare_parser
from tasks.common.queue import AnyQueue, Job, Queue, RunsFailed
from tasks.common.ray_queue import RayQueue
from tasks.common.records import RECORDS, add_records, check_no_old, read_records

# What a record keeps of a run's results.json; the rest stays in the run's folder.
RECORDED = (
    *("metrics", "prior", "prior_settings", "pruning_ratio", "max_decay_change", "parameters", "seed", "steps"),
    *("seconds", "seconds_per_step", "data_wait", "data", "versions", "hardware", "config"),
)
SHOWN = ("metrics", "config", "parameters", "pruning_ratio", "seconds", "seconds_per_step")
# The same for what runs before the `tuning` section did not have.
RECORDED_LATER = (
    *("method", "trainable_parameters", "adapter_bytes", "pretrained_sha256", "decay_change_at_start"),
    *("mean_decay_change", "mean_decay_change_at_start", "max_alpha_change", "alpha_change_at_start"),
    *("attention_flops", "results_version", "test_correct", "standard_errors", "k_nn_above", "compression"),
    *("baseline", "classes", "demonstrations_sha256", "test_rewards", "warnings"),
)
# Sections whose overrides reach the runs of `first` too; the others say what the rows are.
SHARED_WITH_FIRST = ("data", "augmentation", "trainer")
_OWNER = "the comparison's to choose"
OWNED = {"trainer.seed": f"{_OWNER}; use `seeds` or --seeds", "trainer.output_dir": f"{_OWNER}; use --out"}


@dataclass
class Comparison:
    """What a comparison file says.

    task: the task of all runs. name: the file's name. configs: by variant, without seed and output folder. seeds: those
    of every variant. first: whole configurations of the runs before the rows, in order. reference: what the rows are
    compared with; by row, where they differ.
    """

    task: HFTask
    name: str
    configs: dict[str, Config]
    seeds: list[int]
    first: list[Config] = field(default_factory=list)
    reference: str | Mapping[str, str] | None = None

    @property
    def main_reference(self) -> str:
        """The row that others are compared with, if they have none of their own."""
        return self.reference if isinstance(self.reference, str) else next(iter(self.configs))

    @property
    def references(self) -> dict[str, str] | None:
        """Of each row the one that it is compared with; None if it is one for all."""
        if self.reference is None or isinstance(self.reference, str):
            return None
        return {row: self.reference.get(row, self.main_reference) for row in self.configs}

    @property
    def metric(self) -> str:
        """What its rows are judged by."""
        return self.task.metric

    def row(self, name: str, seed: int, out: Path, records: Path) -> Row:
        """One run of it; the other arguments as in `run_comparison`."""
        return Row(self, name, seed, out, records)

    def prepare(
        self,
        pending: Sequence[Row],
        records: Sequence[Mapping[str, Any]],
        command: str | None = None,
        queue: AnyQueue | None = None,
    ) -> None:
        """What is done before the first of these rows runs; the arguments as in `do_first`."""
        do_first(self, [row.config for row in pending], records, command, queue)

    def draw(self, out: Path, records: Path) -> None:
        """Pictures besides those of the table: none. The arguments as in `run_comparison`."""


def load_comparison(task: HFTask, path: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read a comparison and check every configuration in it before anything runs.

    Raises:
        ValueError: for unknown keys and bad values; the message names the variant.
        OSError: for a missing file.
    """
    path = Path(path)
    shared = read_layers(path, task.sections, COMPARISON)
    check_present(shared, ("seeds", "variants"), f"{path} is no comparison")
    first, seeds, variants, reference = (shared.pop(key, None) for key in COMPARISON)
    check_seeds(seeds, str(path))
    # Its bases may have both: they are runs of their own.
    refuse_owned([f"trainer.{key}" for key in read_cell(path).get("trainer", ())], OWNED, str(path))
    refuse_owned([override.partition("=")[0] for override in overrides], OWNED, "the command line")
    configs = variant_configs(task, variants, shared, overrides, OWNED, str(path), own_bases=True)
    check_reference(reference, list(configs), str(path))
    firsts = first_configs(task, first, overrides, path)
    return Comparison(task, config_name(path), configs, seeds, firsts, reference)


def check_reference(reference: Any, rows: Sequence[str], path: str) -> None:
    """Refuse what is no row of a comparison, and no map of rows to others.

    Raises:
        ValueError: naming it.
    """
    if reference is None:
        return
    pairs = reference if isinstance(reference, Mapping) else {}
    named = [*pairs, *pairs.values()] if isinstance(reference, Mapping) else [reference]
    if not named or not all(isinstance(row, str) for row in named):
        raise ValueError(
            f"{path}: reference={reference!r} must be a row, or a map of rows to the rows they are compared with; a "
            "name that YAML would read as a number needs quotes"
        )
    check_known(named, list(rows), f"{path}: reference", "row")
    if same := [row for row, other in pairs.items() if row == other]:
        raise ValueError(f"{path}: reference: {same[0]!r} is compared with itself")


def first_configs(task: HFTask, names: Any, overrides: Sequence[str], path: Path) -> list[Config]:
    """The checked configurations of the runs before the rows, with those overrides that reach them.

    Args:
        task: the task of all runs.
        names: names of their files; None: there are no such runs.
        overrides: `section.key=value` of the command line.
        path: the comparison's file.
    """
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: first={names!r} must be a list of names of configuration files")
    shared = [override for override in overrides if override.partition(".")[0] in SHARED_WITH_FIRST]
    configs = []
    for name in names:
        try:
            configs.append(task.load_config(name, shared))
        except ValueError as error:
            raise ValueError(f"{path}, first {name!r}: {error}") from None
    return configs


def variant_configs(
    task: HFTask,
    variants: Any,
    shared: Config,
    overrides: Sequence[str],
    owned: Mapping[str, str],
    path: str,
    own_bases: bool = False,
) -> dict[str, Config]:
    """The checked configuration of each variant.

    Args:
        task: the task of all runs.
        variants: {name: {section: {key: value}}}, what each changes. A variant with `base`, a list of files, changes
            these instead of `shared`.
        shared: the sections that they change, which need not be a whole configuration.
        overrides: `section.key=value` of the command line, which win.
        owned: keys that no variant may set, and who sets them.
        path: the file, for errors.
        own_bases: whether variants may have a `base`.
    """
    if not isinstance(variants, dict) or not variants:
        raise ValueError(f"{path}: variants={variants!r} must hold a name and changes for each row")
    configs = {}
    for name, changes in variants.items():
        check_name(str(name), f"{path}: variant")
        where, changes = f"{path}, variant {name!r}", changes or {}
        if not isinstance(changes, dict):
            raise ValueError(f"{where} must hold sections, got {changes!r}")
        config, changes = copy.deepcopy(shared), dict(changes)
        if own_bases and (base := changes.pop("base", None)):
            config = merge_bases({"base": base}, where, task.sections)
        check_known(changes, task.sections, where)
        for section, values in changes.items():
            if not isinstance(values, dict):
                raise ValueError(f"{where}: {section} must hold keys and values, got {values!r}")
            refuse_owned([f"{section}.{key}" for key in values], owned, where)
            config[section].update(values)
        try:
            apply_overrides(config, overrides, task.sections)
            configs[str(name)] = task.check_config(config)
            if (labels := config.get("data", {}).get("labels", CLASSES)) != CLASSES:
                raise ValueError(f"data.labels={labels!r} cannot be compared; rows are judged by {task.metric}")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return configs


def check_present(content: Mapping[str, Any], keys: Sequence[str], what: str) -> None:
    """Raise ValueError unless a file has all of these keys; `what`: what it is not without them."""
    if missing := [f"`{key}`" for key in keys if key not in content]:
        raise ValueError(f"{what}, it lacks {', '.join(missing)}")


def check_seeds(seeds: Any, where: str) -> list[int]:
    """Return the seeds, or raise ValueError if two are the same or one is no seed."""
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{where}: seeds={seeds!r} must be a list of different integers of 0 or more")
    return seeds


def refuse_owned(keys: Sequence[str], owned: Mapping[str, str], where: str) -> None:
    """Raise ValueError for a key that is not the user's to set."""
    for key, owner in owned.items():
        if key in keys:
            raise ValueError(f"{where}: {key} is {owner}")


def run_comparison(
    comparison: Comparison,
    out: Path,
    records: Path,
    variants: Sequence[str] | None = None,
    command: str | None = None,
    jobs: int | None = None,
    shard: Shard | None = None,
    ray: str | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Do every run that has no record yet. Returns the records by variant, seeds in order.

    Args:
        comparison: what to run.
        out: folder of the runs, with their checkpoints and models.
        records: folder of records.jsonl. A run that has a record there is done, and one whose folder has its results,
            which become its record.
        variants: only these.
        command: for results.json.
        jobs: how many runs at a time, each in a process of one thread; None: one after another in this process.
        shard: which of several commands this is, whose own runs come first; then `jobs` is 1 by default.
        ray: address of a Ray cluster that does the runs (tasks/common/ray_queue.py), without `jobs` and `shard`.

    Raises:
        RunsFailed: with `jobs`, `shard` or `ray`, if runs failed; all others are done then.
        ValueError: for options, folders and records that do not fit.
    """
    check_options(jobs, shard, ray)
    check_no_old(records)
    names = list(dict.fromkeys(variants or comparison.configs))
    rows = [comparison.row(name, seed, out, records) for seed in comparison.seeds for name in names]
    found = []
    for row in rows:  # all of them before anything runs
        found.append(row.record())
        if found[-1] is None:
            row.check_folder()
    pending = [row for row, record in zip(rows, found, strict=True) if record is None]
    if pending:
        check_place(out, "--out")
        check_place(records, "--records")

    order = list(comparison.configs)
    every = [comparison.row(name, seed, out, records) for seed in comparison.seeds for name in order]

    def collect() -> None:
        """Bring what finished runs left in their folders into the records, if it is not there yet."""
        kept = read_records(records)
        missing = [row for row in every if row.seed not in kept.get(row.name, {})]
        add_records(records, [(row.name, record) for row in missing if (record := row.folder_record())], order)

    queue = make_queue(comparison.task, 1 if jobs is None and shard is not None else jobs, ray, rows, found, collect)
    if pending and shard is not None:
        check_locks(out)
        check_locks(records)
    collect()  # by every process: to ask accelerate which one this is would settle how all of them are joined
    comparison.prepare(pending, [record for record in found if record is not None], command, queue)
    if queue is not None:
        numbers = range(len(rows)) if shard is None else shard.order(len(rows))
        try:
            queue.run([rows[number].job(command) for number in numbers if found[number] is None])
        finally:
            collect()  # what others did meanwhile, too
        found = [row.record() for row in rows]
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number, (row, record) in enumerate(zip(rows, found, strict=True), start=1):
        if record is None and queue is None:
            print(f"[{number}/{len(rows)}] {row}", file=sys.stderr, flush=True)
            record = row.run(command)
            if PartialState().is_main_process:
                add_records(records, [(row.name, record)], order)
        if record is not None:
            done[row.name].append(record)
    return done


class Row:
    """One run of a comparison: a row of its table with one seed.

    config: its whole configuration. folder: the run's. records: the folder of its record.
    """

    def __init__(self, comparison: Comparison, name: str, seed: int, out: Path, records: Path) -> None:
        self.task, self.metric, self.name, self.seed = comparison.task, comparison.metric, name, seed
        self.folder, self.records = out / name / f"seed{seed}", records
        self.config = self.make_config(comparison.configs[name])

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"

    def make_config(self, shared: Config) -> Config:
        """The configuration of its row, with seed and folder."""
        config = copy.deepcopy(shared)
        config["trainer"].update(seed=self.seed, output_dir=str(self.folder))
        return config

    @property
    def identity(self) -> Config:
        """What makes it this run and no other."""
        return self.config

    def stored_identity(self, config: Config) -> Config:
        """`identity` of a configuration as results and records have it."""
        return config

    def record(self) -> dict[str, Any] | None:
        """Its record, None if it is not done; an error if that is of another configuration."""
        record = read_records(self.records).get(self.name, {}).get(self.seed)
        if record is None:
            return self.folder_record()
        path = f"{self.records / RECORDS}: the record of {self}"
        check_record(path, record, self.metric)
        if differences := config_differences(self.stored_identity(record["config"]), self.identity):
            raise ValueError(
                f"{path} is of another configuration ({'; '.join(differences)}); remove it or choose another --records"
            )
        return record

    def folder_record(self) -> dict[str, Any] | None:
        """What its folder's results become in the records; None if it is not done, or the folder is another run's.

        Results that are damaged or lack something are none: the run finds them itself, fails, and stops no other.
        """
        with suppress(ValueError, OSError):
            if results := results_of(self.folder, self.identity):
                return record_of(results, self.folder / RESULTS, self.metric)
        return None

    def check_folder(self) -> None:
        """Raise ValueError if its folder belongs to another run."""
        check_owner(self.folder, self.identity)

    @property
    def does(self) -> Callable[..., dict[str, Any]]:
        """What does it."""
        return do_run

    def run(self, command: str | None) -> dict[str, Any]:
        """Do it in this process. Returns its record."""
        return self.does(self.task, self.config, command, self.metric)

    def job(self, command: str | None) -> Job:
        """What a queue does for it."""
        arguments = (self.task, self.config, command or command_line(), self.metric)
        does = partial(after_imports, imported_paths(), self.does)
        return Job(str(self), self.name, self.folder, does, arguments, lambda: self.record() is not None)


def do_run(
    task: HFTask,
    config: Config,
    command: str | None,
    metric: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Do a run. Returns its record, which has the metric, by default the task's."""
    results = run(task, config, command=command, callbacks=callbacks)
    return record_of(results, Path(config["trainer"]["output_dir"]) / RESULTS, metric or task.metric)


def run(
    task: HFTask, config: Config, command: str | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """A run as its task does it. Returns the content of results.json."""
    return task.run(config, command=command, callbacks=callbacks)


def make_queue(
    task: Any,
    jobs: int | None,
    ray: str | None,
    rows: Sequence[Row],
    records: Sequence[Mapping[str, Any] | None],
    when_done: Callable[[], None],
) -> AnyQueue | None:
    """A queue that does `jobs` runs at a time, or that of a Ray cluster; None without both. The records, None for runs
    still to do, say how long runs take. `when_done` is called after every run.
    """
    if (jobs is not None or ray is not None) and (processes := started()) > 1:
        option = f"--ray={ray}" if jobs is None else f"--jobs={jobs}"
        raise ValueError(f"{option} starts processes itself; give it without torchrun (WORLD_SIZE={processes})")
    modules, seconds = [task.module, __name__], dict[str, list[float]]()
    for row, record in zip(rows, records, strict=True):
        if record is not None:
            seconds.setdefault(row.name, []).append(record["seconds"])
    if jobs is None and ray is None:
        return None
    queue = Queue(modules, jobs, seconds) if jobs is not None else RayQueue(modules, str(ray), seconds)
    queue.when_done = when_done
    return queue


def all_records(comparison: Comparison, records: Path) -> dict[str, list[dict[str, Any]]]:
    """Every record of the comparison's variants, whatever part of it ran last, seeds in order. Variants without a
    record are left out.

    Raises:
        ValueError: for a record that is damaged or of another configuration, and for weights of `model.pretrained` that
            changed between runs.
    """
    kept, found = read_records(records), dict[str, list[dict[str, Any]]]()
    for name in comparison.configs:
        for seed in sorted(kept.get(name, {})):
            record = comparison.row(name, seed, records, records).record()
            assert record is not None
            found.setdefault(name, []).append(record)
    check_one_checkpoint(record for runs in found.values() for record in runs)
    check_one_file(record for runs in found.values() for record in runs)
    return found


def check_one_checkpoint(records: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if runs from one `model.pretrained` started from different weights."""
    found: dict[str | None, set[str]] = {}
    for record in records:
        model = record["config"].get("model", {})
        folder = model.get("pretrained") or model.get("backbone", {}).get("pretrained")
        # Runs with UPop from scratch had the checksum of what the search of each left.
        if folder is not None or not record["config"].get("compression"):
            found.setdefault(folder, set()).add(record.get("pretrained_sha256") or "unknown")
    for folder, checksums in found.items():
        if len(checksums) > 1:
            raise ValueError(
                f"runs with model.pretrained={folder} started from {len(checksums)} checkpoints "
                f"({', '.join(sorted(checksums))}), not from one; remove the records and "
                "folders of the others, or choose another --records and --out"
            )


def check_one_file(records: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if runs with one `data.path` learned from different demonstrations."""
    found: dict[str, set[str]] = {}
    for record in records:
        if (checksum := record.get("demonstrations_sha256")) is not None:
            found.setdefault(record["config"]["data"]["path"], set()).add(checksum)
    for path, checksums in found.items():
        if len(checksums) > 1:
            raise ValueError(
                f"runs with data.path={path} learned from {len(checksums)} files ({', '.join(sorted(checksums))}), not "
                "from one; remove the records and folders of the others, or choose another --records and --out"
            )


def do_first(
    comparison: Comparison,
    pending: Sequence[Config],
    records: Sequence[Mapping[str, Any]],
    command: str | None = None,
    queue: AnyQueue | None = None,
) -> None:
    """Do the runs before the rows that are needed and not finished, and check that the rows can start.

    Rows that do not start from such a run are checked before any of these runs.

    Args:
        comparison: has the runs before the rows.
        pending: configurations of the rows still to do.
        records: records of the rows that are done.
        command: for results.json.
        queue: does these runs; None: this process does.
    """
    task, todo = comparison.task, []
    for config in needed_first(task, comparison.first, pending):
        check_folder(config, "remove it, or name another trainer.output_dir in its file")
        # A queue waits for another process that does it.
        if not _is_finished(config, mine=queue is not None):
            todo.append(config)

    def waits(config: Config) -> bool:
        return any(builds_on(task, config, earlier) for earlier in todo)

    check_start(task, [config for config in (*todo, *pending) if not waits(config)], records)
    for number, config in enumerate(todo, start=1):
        name = f"first [{number}/{len(todo)}] {config['trainer']['output_dir']}"
        if queue is None:
            print(name, file=sys.stderr, flush=True)
            do_run(task, config, command, comparison.metric)
            continue
        arguments = (task, config, command or command_line(), comparison.metric)
        does = partial(after_imports, imported_paths(), do_run)
        folder = Path(config["trainer"]["output_dir"])
        queue.run([Job(name, name, folder, does, arguments, partial(_is_finished, config, mine=True))])
    check_start(task, [config for config in pending if waits(config)], records)


def _is_finished(config: Config, mine: bool) -> bool:
    folder = Path(config["trainer"]["output_dir"])
    return finished_results(folder, config, overwrite=False, mine=mine) is not None


def needed_first(task: HFTask, first: Sequence[Config], pending: Sequence[Config]) -> list[Config]:
    """The runs before the rows that a pending row builds on, itself or through a later one of these runs."""
    needed: list[Config] = []
    for config in reversed(first):
        if any(builds_on(task, other, config) for other in (*pending, *needed)):
            needed.insert(0, config)
    return needed


def builds_on(task: HFTask, config: Config, earlier: Config) -> bool:
    """Whether a run reads a model in the folder of an earlier one."""
    folder = Path(earlier["trainer"]["output_dir"])
    return any(folder in Path(model).parents for model in task.models_read(config))


def check_start(task: HFTask, pending: Sequence[Config], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError or OSError if a run cannot start from its `model.pretrained`, or if its weights or
    demonstrations are not those of the records.

    Args:
        task: the task of all runs.
        pending: configurations of the runs still to do.
        records: records of the runs that are done.
    """
    for config in pending:
        task.check_start(config.get("model", {}))
    starts = {config.get("model", {}).get("pretrained"): config for config in pending}
    check_one_checkpoint(
        [
            *records,
            *({"config": c, "pretrained_sha256": task.start_sha256(c.get("model", {}))} for c in starts.values()),
        ]
    )
    files = {config["data"].get("path"): config for config in pending}
    pending_files = ({"config": c, "demonstrations_sha256": task.data_sha256(c)} for c in files.values())
    check_one_file([*records, *pending_files])


def check_folder(config: Config, way_out: str = "remove it or choose another --out") -> None:
    """Raise ValueError if the folder of a run belongs to another one. `way_out`: what the user can do then."""
    check_owner(Path(config["trainer"]["output_dir"]), config, way_out)


def check_owner(out: Path, config: Config, way_out: str = "remove it or choose another --out") -> None:
    """`check_folder` of a configuration that does not say where its run lies."""
    if (out / RUN_CONFIG).exists() and (differences := folder_differences(out, config)):
        different = "; ".join(differences)
        raise ValueError(f"{out} is of another configuration ({different}); {way_out}")


def record_of(results: Mapping[str, Any], path: Path, metric: str = ACCURACY) -> dict[str, Any]:
    """What a record keeps of a run's results; ValueError if they lack it. `path`: of the results, for errors.

    metric: the task's.
    """
    check_record(path, results, metric)
    return {key: results[key] for key in (*RECORDED, *RECORDED_LATER) if key in RECORDED or key in results}


def check_record(place: str | Path, content: Mapping[str, Any], metric: str = ACCURACY) -> None:
    """Raise ValueError unless this is all that a table shows. `place`: where it is, for errors."""
    if missing := [key for key in RECORDED if key not in content]:
        raise ValueError(f"{place} is not whole, it lacks {', '.join(missing)}; remove it")
    check_results(place, content, SHOWN)
    if content["metrics"].get(metric) is None:
        raise ValueError(f"{place} is not whole, it lacks metrics.{metric}; remove it")


def compare_main(
    task: HFTask,
    argv: list[str] | None = None,
    load: Callable[[HFTask, str, Sequence[str]], Comparison] = load_comparison,
) -> int:
    """`python -m tasks.TASK.compare`; a bad value prints one line and returns 2. `load` reads the comparison."""
    parser = compare_parser(task.name)
    arguments = parser.parse_intermixed_args(argv)
    return do_comparison(parser.prog, task.name, arguments, partial(load, task))


def do_comparison(
    program: str, task: str, arguments: argparse.Namespace, load: Callable[[str, Sequence[str]], Comparison]
) -> int:
    """The work of a `compare` command. Returns the exit status.

    Args:
        program: its name. task: that of the task. arguments: those of `compare_parser`.
        load: (the comparison's file, overrides) -> the comparison.
    """
    transformers_logging.disable_progress_bar()

    def work() -> None:
        keep_freed_memory()
        import_files(getattr(arguments, "imports", []))
        shard = None if arguments.shard is None else Shard.parse(arguments.shard)
        check_options(arguments.jobs, shard, arguments.ray)
        comparison = load(arguments.config, arguments.overrides)
        if arguments.variants:
            check_known(arguments.variants, list(comparison.configs), arguments.config)
        if arguments.seeds:
            check_seeds(arguments.seeds, "--seeds")
            comparison.seeds = arguments.seeds
        out = arguments.out or Path(default_output_dir(task, arguments.config))
        records = arguments.records or out
        failed = None
        try:
            run_comparison(comparison, out, records, arguments.variants, None, arguments.jobs, shard, arguments.ray)
        except RunsFailed as error:
            failed = error
        if PartialState().is_main_process and (found := all_records(comparison, records)):
            given = (comparison.metric, comparison.task.also, comparison.references)
            write_comparison(found, records, comparison.main_reference, *given)
            comparison.draw(out, records)
        if failed is not None:
            raise failed

    try:
        return run_command(program, work, "where it stopped")
    except RunsFailed as failed:
        print(f"{program}: {failed}", file=sys.stderr)
        return 1
