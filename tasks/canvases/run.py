"""Accuracy over minutes of training and over ms of inference: python -m tasks.canvases.run --scale cpu --jobs 2

Does every run of a scale that has no record yet: dense starts, then all contenders from them. It can be stopped or
killed at any moment and goes on where it was; a run loses at most a minute. Each run leaves a record in RECORDS, from
which `report` makes the table and the figure; they are also made at the end of this command. What each contender is,
and all sizes, minutes, seeds and rates: tasks/canvases/contenders.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.checks import check_integer, first_line
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.sources.arrays import read_fashion_mnist
from hf_sparseprior.models.pretrained import weights_sha256
from hf_sparseprior.runs.command import RunStopped, run_command
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import (
    MODEL,
    RESULTS,
    InUse,
    check_place,
    config_differences,
    finished_results,
    results_of,
)
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.canvases import commands, report, times
from tasks.canvases.contenders import CONTENDERS, SCALES, VARIANTS, Run, Scale, runs_of, start_name
from tasks.canvases.loop import check_device, do_run, run_folder, start_folder
from tasks.canvases.report import learns_nothing, records_folder
from tasks.common.queue import Job, Queue, RunsFailed
from tasks.common.records import add_records, read_records

OUT = Path("outputs/canvases")


def list_runs(runs: Sequence[Run]) -> str:
    """A line for each run, what is left out and why, and the time of all."""
    doing = possible(runs)
    lines = [f"{run.minutes:6.2f} minutes  {run.name}" for run in doing]
    skipped = {run.row: run.contender.missing() for run in runs}
    skipped |= {run.variant: VARIANTS[run.variant].missing() for run in runs}
    lines += [f"skipped: {name}, {why}" for name, why in skipped.items() if why is not None]
    dropped = sum(run.can_be_dropped for run in doing)
    lines.append(
        f"{len(doing)} runs, {sum(run.minutes for run in doing):.1f} minutes of training; evaluations come on top, and "
        f"{dropped} dense runs are left out if the first of their size stays below twice chance"
    )
    return "\n".join(lines)


def possible(runs: Sequence[Run]) -> list[Run]:
    """Without those that the library or this machine cannot do, and without starts that then nothing needs."""
    done = [run for run in runs if run.contender.missing() is None and VARIANTS[run.variant].missing() is None]
    starts = {start_name(run.variant) for run in done if not run.is_start}
    return [run for run in done if not run.is_start or run.group in starts]


class Experiment:
    """The runs of a command, their folders and their records.

    Args:
        scale: which. runs: in order, without those that the library cannot do.
        out: folder of the runs. records: folder of the records. data: folder of Fashion-MNIST.
    """

    def __init__(self, scale: Scale, runs: Sequence[Run], out: Path, records: Path, data: str | None = None) -> None:
        self.scale, self.runs, self.out, self.records, self.data = scale, list(runs), out, records, data

    def folder(self, run: Run) -> Path:
        """Of a run."""
        return run_folder(self.out, run.group, run.row, run.seed)

    def has_record(self, run: Run) -> bool:
        """Whether a run is recorded."""
        return run.seed in read_records(self.records / run.group).get(run.row, {})

    def is_done(self, run: Run) -> bool:
        """Whether nothing is left to do. A start must have left its model if a run that is not done needs it."""
        if run.is_start and any(self._waits_for(other, run) for other in self.runs):
            return (self.folder(run) / MODEL).is_dir() and self._results(run) is not None
        return self.has_record(run) or self._results(run) is not None

    def _waits_for(self, other: Run, start: Run) -> bool:
        """Whether a run that is still to be done begins with this start."""
        return other.start == (start.group, start.row) and not self.is_done(other) and not self.dropped(other)

    def _results(self, run: Run) -> dict[str, Any] | None:
        return results_of(self.folder(run), run.config(self.scale))

    def check(self) -> None:
        """Refuse folders and records of other runs, and a mixture of starts, before anything runs.

        Raises:
            ValueError, OSError: the message has the folder.
        """
        check_place(self.out, "--out")
        check_place(self.records, "--records")
        for run in self.runs:
            self._check_record(run)
            if self.is_done(run) or self.dropped(run):
                continue
            with suppress(InUse):  # the queue waits for what another command does
                finished_results(self.folder(run), run.config(self.scale), overwrite=False, field="--out")
            if not run.is_start and (starts := self._recorded_starts(run)) - {self._start(run)}:
                raise ValueError(
                    f"--records {self.records} has runs of {run.group} seed {run.seed} from a start "
                    f"({min(starts)[:8]}) that is not in --out {self.out}; runs of one seed have one start: give the "
                    "folder of those runs, other --seeds, or another folder of records"
                )

    def _check_record(self, run: Run) -> None:
        """Refuse the record of a run of this name that was done otherwise."""
        recorded = read_records(self.records / run.group).get(run.row, {}).get(run.seed)
        if recorded is None:
            return
        if changes := config_differences(recorded["config"], json.loads(json.dumps(run.config(self.scale)))):
            raise ValueError(
                f"--records {self.records} has {run.name} of another configuration ({'; '.join(changes)}); remove that "
                "record, or give another folder"
            )

    def _recorded_starts(self, run: Run) -> set[str]:
        """SHA-256 of the models that the recorded runs of this group and seed began with."""
        recorded = read_records(self.records / run.group).values()
        return {by_seed[run.seed]["start_sha256"] for by_seed in recorded if run.seed in by_seed}

    def _start(self, run: Run) -> str | None:
        """SHA-256 of the model that a run would begin with; None if it is still to be made."""
        folder = start_folder(self.out, run)
        return weights_sha256(folder) if folder is not None and folder.is_dir() else None

    def collect(self) -> None:
        """Bring what is finished into the records."""
        for group in dict.fromkeys(run.group for run in self.runs):
            new = [run for run in self.runs if run.group == group and not self.has_record(run)]
            done = [(run.row, self.folder(run) / RESULTS) for run in new if self._results(run) is not None]
            add_records(self.records / group, [(row, read_results(path)) for row, path in done], list(CONTENDERS))

    def dropped(self, run: Run) -> bool:
        """Whether the dense pilot of its size says that a run is not worth its time."""
        pilots = read_records(self.records / run.group).get(run.row, {})
        return run.can_be_dropped and 0 in pilots and learns_nothing(pilots[0])

    def do(self, jobs: int | None) -> None:
        """All runs that are left, in order; starts stage by stage, those last that may turn out not to be worth it.

        Args:
            jobs: processes at a time; None: one run after another in this process.

        Raises:
            RunsFailed: if a start failed, or other runs did, when all else is done.
        """
        self.check()
        self.collect()
        for stage in self.scale.start:
            starts = [run for run in self.runs if run.is_start and run.side == stage.side]
            self._do_all([run for run in starts if not self.is_done(run)], jobs)
        others = [run for run in self.runs if not run.is_start]
        failed = self._do_left([run for run in others if not run.can_be_dropped], jobs)
        failed += self._do_left([run for run in others if run.can_be_dropped], jobs)
        if failed:
            raise RunsFailed("\n".join(failed))

    def _do_left(self, runs: Sequence[Run], jobs: int | None) -> list[str]:
        """Those of these runs that are left; what failed."""
        left = []
        for run in (run for run in runs if not self.is_done(run)):
            if self.dropped(run):
                print(f"{run.name}: dropped, seed 0 stayed below twice chance", file=sys.stderr)
            else:
                left.append(run)
        try:
            self._do_all(left, jobs)
        except RunsFailed as error:
            return [str(error)]
        return []

    def _do_all(self, runs: Sequence[Run], jobs: int | None) -> None:
        if jobs is None:
            failed: list[str] = []
            for number, run in enumerate(runs):
                print(f"[{number}/{len(runs)}] {run.name}, {run.minutes:g} minutes", file=sys.stderr, flush=True)
                try:
                    if not self.is_done(run):
                        do_run(run, self.scale, self.out, self.data)
                except RunStopped:
                    raise
                except Exception as error:  # of CUDA and of its compilers too: the others go on
                    failed.append(f"{run.name}: {first_line(error)}")
                torch.cuda.empty_cache()
                self.collect()
            if failed:
                raise RunsFailed("\n".join([f"{len(failed)} of {len(runs)} runs failed:", *failed]))
        elif runs:
            queue = Queue(["tasks.canvases.loop"], jobs)
            queue.when_done = self.collect
            queue.run([self._job(run) for run in runs])

    def _job(self, run: Run) -> Job:
        arguments = (run, self.scale, self.out, self.data)
        return Job(run.name, run.group + run.row, self.folder(run), do_run, arguments, partial(self.is_done, run))


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.run()
    arguments = parser.parse_args(argv)

    def work() -> None:
        scale = SCALES[arguments.scale]
        runs = runs_of(scale, arguments.only, arguments.seeds, arguments.sides)
        print(list_runs(runs), flush=True)
        if arguments.list:
            return
        if arguments.jobs is not None:
            check_integer("--jobs", arguments.jobs, 1)
            if scale.device == "cuda":
                raise ValueError(
                    f"--jobs {arguments.jobs}: runs of scale {scale.name} take turns, as their minutes are wall time"
                )
        read_fashion_mnist(DataConfig(source="fashion_mnist", path=arguments.fashion_mnist))
        check_device(scale.device)
        keep_freed_memory()
        transformers_logging.disable_progress_bar()
        out, records = arguments.out or OUT / scale.name, records_folder(scale, arguments.records)
        failed = None
        try:
            Experiment(scale, possible(runs), out, records, arguments.fashion_mnist).do(arguments.jobs)
        except RunsFailed as error:
            failed = error
        if failed is None or report.groups_of(scale, records):
            if arguments.times:
                times.measure_all(scale, records, data=arguments.fashion_mnist)
            report.write_report(scale, records)
        if failed is not None:
            raise failed

    try:
        return run_command(parser.prog, work, "from the last minute")
    except RunsFailed as failed:
        print(f"{parser.prog}: {failed}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
