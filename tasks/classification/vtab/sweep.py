"""Fine-tune on all of VTAB-1K: python -m tasks.classification.vtab.sweep --config FILE [section.key=value ...]

For each task and variant every grid point is trained on train800 and judged on val200; the best one is trained on
train800val200 and judged on test. The command can be killed at any moment and started again; then it goes on where it
stopped. It may be started several times at once, also on several machines with one folder of records: no run is done
twice. `--shard K/N` and `--ray ADDRESS` are for several machines (docs/several-machines.md). The file's keys are in
`tasks.classification.vtab.plan`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.images.sources.vtab import task_folder
from hf_sparseprior.images.vtab_tasks import TASKS
from hf_sparseprior.runs.command import RunStopped, run_command
from hf_sparseprior.runs.environment import command_line
from hf_sparseprior.runs.locks import locked
from hf_sparseprior.runs.processes import visible_gpus
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.run_folder import RESULTS, InUse, default_output_dir
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification.train import run as train
from tasks.classification.vtab import commands
from tasks.classification.vtab.plan import Records, Run, Sweep, choose, load_sweep
from tasks.classification.vtab.report import write_report
from tasks.common import queue as queue_jobs
from tasks.common.compare import check_seeds, record_of
from tasks.common.machines import Shard, check_options
from tasks.common.queue import RunsFailed
from tasks.common.ray_queue import RayQueue

WAIT_SECONDS = 2.0  # before looking again for a run that another process may have given up


@dataclass
class Job:
    """What a process of a sweep needs to know: the command line, and where runs and records lie.

    tasks, variants, seeds: do only these; None: all. keep: keep a finished run's folder, with its model.
    shard: which of several commands this is, whose own runs come first.
    """

    config: str
    overrides: list[str]
    out: Path
    records: Path
    tasks: list[str] | None = None
    variants: list[str] | None = None
    seeds: list[int] | None = None
    keep: bool = False
    shard: Shard | None = None
    command: str = field(default_factory=command_line)

    def sweep(self) -> Sweep:
        """The part of the sweep that is to be done."""
        sweep = load_sweep(self.config, self.overrides)
        if self.seeds is not None:
            check_seeds(self.seeds, "--seeds")
        names = choose("variants", self.variants, list(sweep.configs))
        return replace(
            sweep,
            configs={name: sweep.configs[name] for name in names},
            tasks=choose("tasks", self.tasks, sweep.tasks),
            seeds=choose("seeds", self.seeds, sweep.seeds),
        )


# ---- claims ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(record: Path) -> Iterator[bool]:
    """Whether this process may do the run of a record. The claim holds until the block ends or the process dies.

    It is the lock of a file next to the record (`hf_sparseprior.runs.locks`).
    """
    with locked(record.with_suffix(".lock")) as mine:
        yield mine


def remove_empty_folders(root: Path, names: Iterable[str]) -> None:
    """Remove those of these folders in `root` that are empty, and `root` if nothing is left in it."""
    folders = [root, *(root / name for name in names)]
    folders += [path for folder in folders[1:] for path in sorted(folder.rglob("*")) if path.is_dir()]
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


# ---- one process ----------------------------------------------------------------------------------------------------


def work(job: Job) -> None:
    """Do runs until none is left, here or in another process."""
    sweep = job.sweep()
    records = Records(sweep, job.records)
    _tidy(sweep, job)
    while True:
        if _do_one(sweep, records, job):
            continue
        if _done(records) == sweep.size:
            return
        time.sleep(WAIT_SECONDS)


def _tidy(sweep: Sweep, job: Job) -> None:
    """Remove what is left of processes that were killed between a run's record and its end."""
    for lock in [path for variant in sweep.configs for path in (job.records / variant).rglob("seed*.lock")]:
        record = lock.with_suffix(".json")
        if record.exists():
            with claim(record) as mine:
                if mine and not job.keep:
                    shutil.rmtree(job.out / record.relative_to(job.records).with_suffix(""), ignore_errors=True)


def _do_one(sweep: Sweep, records: Records, job: Job) -> bool:
    """Do the first run that is missing and that no other process does; False if there is none. A shard's own runs are
    first, as far as they can be done yet.
    """
    shard = job.shard
    missing = records.missing()
    for run in missing if shard is None else sorted(missing, key=lambda run: shard.distance(sweep.number(run))):
        with claim(records.path(run)) as mine:
            if mine and not records.path(run).exists():
                _do(run, sweep, records, job)
                return True
    return False


def _done(records: Records) -> int:
    return sum(done for variant in records.sweep.configs for done, _ in records.counts(variant).values())


def _do(run: Run, sweep: Sweep, records: Records, job: Job) -> None:
    """Train one run and write its record; its folder is removed unless it is kept."""
    config, folder = sweep.config(run), job.out / run.name
    config["trainer"]["output_dir"] = str(folder)
    with _quiet_transformers():
        results = train(config, command=job.command)
    test_images = sum(map(sum, results["confusion"]))
    record = {"task": run.task, "stage": run.stage, "point": sweep.points[run.point], "images_judged": test_images}
    write_results(records.path(run), {**record, **record_of(results, folder / RESULTS)})
    if not job.keep:
        shutil.rmtree(folder, ignore_errors=True)
    accuracy, seconds = records.accuracy(run), results["seconds"]
    progress = f"[{_done(records)}/{sweep.size}]"
    print(f"{progress} {run.name}: {accuracy:.2f} % in {seconds:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep progress lines readable: no log of every epoch, which no record keeps, and no list of new weights, which
    `build_model` checks itself.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
            yield
    finally:
        transformers_logging.set_verbosity(level)


# ---- several processes ----------------------------------------------------------------------------------------------


def run_jobs(job: Job, count: int) -> None:
    """Let `count` processes do the runs, each with one GPU if there are any.

    Raises:
        OSError: if one of them failed; the others are stopped with a checkpoint.
        RunStopped: on SIGTERM, after all of them saved a checkpoint.
    """
    gpus = visible_gpus()
    if count == 1 and len(gpus) <= 1:  # with several visible, transformers would spread a batch over them
        return work(job)
    threads = str(max(1, torch.get_num_threads() // count))
    processes = []
    earlier = signal.signal(signal.SIGTERM, _stop)
    try:
        for number in range(count):
            settings = {"OMP_NUM_THREADS": threads}
            if gpus:
                settings["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
            process = multiprocessing.get_context("spawn").Process(target=_process, args=(job, os.getpid()))
            with variables_set(settings):
                process.start()
            processes.append(process)
        _wait(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()
        signal.signal(signal.SIGTERM, earlier)


def _stop(signum: int, frame: Any) -> None:
    raise RunStopped("stopped; the same command goes on from the checkpoints")


def _wait(processes: Sequence[Any]) -> None:
    """Wait until all have ended, or until one has failed."""
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                how = f"status {process.exitcode}" if process.exitcode > 0 else f"signal {-process.exitcode}"
                raise OSError(f"a job ended with {how}; the same command goes on where it stopped")


def _process(job: Job, parent: int) -> None:
    """Work of one of several processes; it stops with a checkpoint when the process that started it is gone."""
    transformers_logging.disable_progress_bar()
    keep_freed_memory()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    sys.exit(run_command("python -m tasks.classification.vtab.sweep", lambda: work(job), "where it stopped"))


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


# ---- a Ray cluster --------------------------------------------------------------------------------------------------


def run_on_ray(job: Job, address: str) -> None:
    """Let a Ray cluster do the runs: first all of selection, then those of the chosen points.

    Raises:
        RunsFailed: if runs failed; all others that could be done without them are done.
        RunStopped: on SIGTERM, after all of them saved a checkpoint.
    """
    sweep = job.sweep()
    records, queue, tried, failed = Records(sweep, job.records), RayQueue([__name__], address), set[str](), list[str]()
    _tidy(sweep, job)
    while runs := [run for run in records.missing() if run.name not in tried]:
        tried.update(run.name for run in runs)
        jobs = [_job_of_queue(run, records, job) for run in runs]
        try:
            queue.run(jobs)
        except RunsFailed:
            failed += queue.failed
        for one in jobs:
            if one.is_done() and not job.keep:
                one.log.unlink(missing_ok=True)
    if failed:
        raise RunsFailed("\n".join([f"{len(failed)} of {sweep.size} runs failed:", *failed]))


def _job_of_queue(run: Run, records: Records, job: Job) -> queue_jobs.Job:
    row, folder = f"{run.variant}/{run.task}/{run.stage}", job.out / run.name
    return queue_jobs.Job(run.name, row, folder, do_run, (job, run), records.path(run).exists)


def do_run(job: Job, run: Run, callbacks: Sequence[Any] = ()) -> None:
    """Do one run in this process. The callbacks of a queue, which asks how far it is, are left out.

    Raises:
        InUse: if another process does it or has done it.
    """
    sweep = job.sweep()
    records = Records(sweep, job.records)
    path = records.path(run)
    with claim(path) as mine:
        if not mine or path.exists():  # a queue looks again
            raise InUse(f"{path} is {'done' if mine else 'claimed'} by another process")
        _do(run, sweep, records, job)


# ---- command --------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.sweep()
    arguments = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()

    def run() -> None:
        keep_freed_memory()
        shard = None if arguments.shard is None else Shard.parse(arguments.shard)
        check_options(arguments.jobs, shard, arguments.ray)
        out = arguments.out or Path(default_output_dir("classification", arguments.config))
        job = Job(
            arguments.config,
            arguments.overrides,
            out,
            arguments.records or out,
            *(arguments.tasks, arguments.variants, arguments.seeds, arguments.keep, shard),
        )
        sweep = job.sweep()
        if arguments.dry_run:
            return print_counts(Records(sweep, job.records))
        check_data(sweep)
        Records(sweep, job.records).check_start()
        try:
            if arguments.ray is not None:
                run_on_ray(job, arguments.ray)
            else:
                run_jobs(job, 1 if arguments.jobs is None else arguments.jobs)
        finally:
            for folder in (job.out, job.records):
                remove_empty_folders(folder, sweep.configs)
        # The table is of the whole sweep, whatever part of it ran last.
        whole = load_sweep(job.config, job.overrides)
        print(write_report(Records(whole, job.records), job.records))

    try:
        return run_command(parser.prog, run, "where it stopped")
    except RunsFailed as failed:
        print(f"{parser.prog}: {failed}", file=sys.stderr)
        return 1


def check_data(sweep: Sweep) -> None:
    """Raise OSError if a task's folder or list is missing, before other tasks train for hours."""
    for path in {config["data"].get("path") for config in sweep.configs.values()}:
        for task in sweep.tasks:
            task_folder(Path(path or ""), TASKS[task])


def print_counts(records: Records) -> None:
    """How many runs of each variant and stage are done and still to do."""
    for variant in records.sweep.configs:
        counts = records.counts(variant)
        print(f"{variant}: " + ", ".join(f"{stage} {done} of {count}" for stage, (done, count) in counts.items()))
    done, size = _done(records), records.sweep.size
    print(f"{done} of {size} runs done, {size - done} to do")


if __name__ == "__main__":
    # Under its own name: what is sent to other machines must be found there by it.
    from tasks.classification.vtab import sweep

    sys.exit(sweep.main())
