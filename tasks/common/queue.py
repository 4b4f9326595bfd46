"""Runs on several cores: each in a process of its own with one thread, in order, as many at a time as there are cores.
With GPUs each process sees one of them, in turn.

The processes are forked from a server that has imported what they need (multiprocessing's). A run that fails does not
stop the others. One that is killed is put back, and goes on from its last checkpoint. One that another process does
already is left to it, and done here if that ends without results. On SIGTERM and Ctrl-C the runs save checkpoints and
end; when this process is killed they notice it and do the same.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.runs.command import RunStopped, run_command
from hf_sparseprior.runs.locks import has_begun, holder
from hf_sparseprior.runs.processes import visible_gpus
from hf_sparseprior.runs.run_folder import LOCK, InUse
from hf_sparseprior.training import StopRequest
from hf_sparseprior.training.allocator import keep_freed_memory

ATTEMPTS = 3  # starts of a run whose process is killed
WAKE = 1.0  # seconds between two looks at what other processes do
STATUS = 60.0  # seconds between two lines about the running
STOPPED = "stopped; the same command goes on with what is left"
IN_USE = os.EX_TEMPFAIL  # exit status of a run whose folder another process has
DONE_BEFORE = 3  # exit status of a run that another process had finished when this one came to it
# One thread, for libraries that are imported later too; few lines of progress bars in the logs.
VARIABLES = {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "60"}


class RunsFailed(Exception):
    """Some runs failed; all others are done."""


@dataclass(frozen=True)
class Job:
    """A run to do.

    name: in words. row: runs of one row take equally long. folder: that of the run. call, arguments: what its process
    calls, with `callbacks` for the Trainer in addition; they are pickled. is_done: whether it is done by now, by
    whomever.
    """

    name: str
    row: str
    folder: Path
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    is_done: Callable[[], bool]

    @property
    def log(self) -> Path:
        """What its process prints."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass
class _Running:
    job: Job
    process: Any
    link: Any  # brings (step, of), and tells the process when this one is gone
    core: int = 0
    started: float = field(default_factory=time.monotonic)
    first: tuple[float, float] | None = None  # when progress was heard of, and the share done by then
    share: float = 0.0

    def hear(self) -> None:
        """Take what the process said of its progress."""
        try:
            while self.link.poll():
                step, of = self.link.recv()
                self.share = step / max(1, of)
                self.first = self.first or (time.monotonic(), self.share)
        except (EOFError, OSError):  # it has ended
            self.link.close()

    def seconds_left(self, expected: float | None) -> float | None:
        """By its own speed, else by how long runs like it take; None if neither is known."""
        now = time.monotonic()
        if self.first is not None and self.first[1] < self.share < 1:
            return (1 - self.share) * (now - self.first[0]) / (self.share - self.first[1])
        if expected is None:
            return 0.0 if self.share == 1 else None  # after its last step only the test is left
        return max(0.0, expected - (now - self.started))


class AnyQueue:
    """What queues have in common: how far they are, and what they say of it.

    Args:
        seconds: by row, how long finished runs took.
    """

    def __init__(self, seconds: Mapping[str, Sequence[float]] | None = None) -> None:
        self.seconds = {row: list(values) for row, values in (seconds or {}).items()}
        self.attempts: dict[str, int] = {}
        self.failed: list[str] = []
        self.total = self.done = 0
        self.when_done: Callable[[], None] = lambda: None  # called after every run that is done

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them.

        Raises:
            RunsFailed: when all others are done; its text names those that failed.
            RunStopped: on SIGTERM, after the runs saved checkpoints. KeyboardInterrupt does the same.
        """
        raise NotImplementedError

    def _begin(self, jobs: Sequence[Job]) -> None:
        self.total, self.done, self.failed = len(jobs), 0, []

    def _count(self) -> None:
        self.done += 1
        self.when_done()

    def _say(self, text: str) -> None:
        print(f"[{self.done}/{self.total}] {text}", file=sys.stderr, flush=True)

    def _check_failed(self) -> None:
        if self.failed:
            raise RunsFailed("\n".join([f"{len(self.failed)} of {self.total} runs failed:", *self.failed]))


class Queue(AnyQueue):
    """Does runs in processes of this machine, so many at a time.

    Args:
        modules: what the processes import before they are forked.
        cores: how many runs at a time.
        seconds: by row, how long finished runs took.
    """

    def __init__(
        self, modules: Sequence[str], cores: int, seconds: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        super().__init__(seconds)
        self.cores = cores
        self.gpus = visible_gpus()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(modules))
        self.waiting: list[Job] = []
        self.running: list[_Running] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them; errors as in `AnyQueue.run`."""
        self._begin(jobs)
        self.waiting, said = list(jobs), time.monotonic()
        with StopRequest() as stop:
            try:
                while self.waiting or self.running:
                    self._start()
                    self._listen()
                    if stop.requested:
                        raise RunStopped(STOPPED)
                    if time.monotonic() - said > STATUS:
                        self._say(self._status())
                        said = time.monotonic()
            finally:
                self._end_all()
        self._check_failed()

    def _start(self) -> None:
        """Start the next runs, as many as there are free cores. Those that others do stay in the queue."""
        for job in list(self.waiting):
            if len(self.running) == self.cores:
                return
            if job.is_done():
                self.waiting.remove(job)
                self._done_by_another(job)
            elif holder(job.folder / LOCK) is None:
                self.waiting.remove(job)
                self._fork(job)

    def _done_by_another(self, job: Job) -> None:
        self._count()
        self._say(f"{job.name}: done by another process")

    def _fork(self, job: Job) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        mine, theirs = self.context.Pipe()
        core = min(set(range(self.cores)) - {running.core for running in self.running})
        gpu = self.gpus[core % len(self.gpus)] if self.gpus else None
        arguments = (theirs, str(job.log), gpu, job.name, job.call, job.arguments)
        process = self.context.Process(target=_work, args=arguments)
        with variables_set(VARIABLES):
            forkserver.ensure_running()  # which keeps these variables for as long as it lives
            process.start()
        theirs.close()
        self.running.append(_Running(job, process, mine, core))
        self.attempts[job.name] = self.attempts.get(job.name, 0) + 1
        self._say(f"{job.name}: started as process {process.pid}")

    def _listen(self) -> None:
        """Wait until something happens or a moment is over; take in what ended."""
        if not self.running:
            if self.waiting:  # for other processes
                time.sleep(WAKE)
            return
        links = [running.link for running in self.running if not running.link.closed]
        connection.wait([*links, *(running.process.sentinel for running in self.running)], WAKE)
        for running in list(self.running):
            if not running.link.closed:
                running.hear()
            if running.process.exitcode is not None:
                self.running.remove(running)
                running.link.close()
                self._ended(running)

    def _ended(self, running: _Running) -> None:
        job, status, seconds = running.job, running.process.exitcode, time.monotonic() - running.started
        if status == 0:
            self._count()
            if self.attempts[job.name] == 1:
                self.seconds.setdefault(job.row, []).append(seconds)
            self._say(f"{job.name}: done in {duration(seconds)}; {self._left()}")
        elif status == DONE_BEFORE:
            self._done_by_another(job)
        elif status == IN_USE:
            self.attempts[job.name] -= 1
            self.waiting.append(job)
        elif (status < 0 or status in (128 + signal.SIGTERM, 255)) and self.attempts[job.name] < ATTEMPTS:
            # 255 says that the server was killed; its processes live on, and stop because their links are closed.
            self.waiting.append(job)
            self._say(f"{job.name}: killed ({_reason(status)}); it is put back")
        else:
            lines = job.log.read_text(encoding="utf-8", errors="replace").split("\n") if job.log.exists() else []
            last = next((line.strip() for line in reversed(lines) if line.strip()), "") if status > 0 else ""
            self.failed.append(f"{job.name}: {last or _reason(status)} ({job.log})")
            self._say(f"{self.failed[-1]}; {self._left()}")

    def _end_all(self) -> None:
        for running in self.running:
            running.process.terminate()
        for running in self.running:
            running.process.join()
            running.link.close()
        self.running = []

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _status(self) -> str:
        shares = ", ".join(f"{running.job.name} {100 * running.share:.0f} %" for running in self.running)
        return f"running: {shares or 'nothing here, other processes do what is left'}; {self._left()}"

    def _left(self) -> str:
        left = self._seconds_left()
        todo = len(self.waiting) + len(self.running)
        return f"{todo} to do" + (f", about {duration(left)} left" if todo and left is not None else "")

    def _seconds_left(self) -> float | None:
        """Seconds until all is done, as if nobody else did any of it; None if no run has shown its speed yet."""
        known = {row: fmean(values) for row, values in self.seconds.items() if values}
        now, busy = time.monotonic(), []
        for running in self.running:
            left = running.seconds_left(known.get(running.job.row))
            busy.append((running, left))
            if left is not None:
                known.setdefault(running.job.row, now - running.started + left)
        if not known:
            return None
        usual = fmean(known.values())
        free = [usual if left is None else left for _, left in busy] + [0.0] * (self.cores - len(busy))
        return makespan(free, [known.get(job.row, usual) for job in self.waiting])


def makespan(free: Sequence[float], seconds: Sequence[float]) -> float:
    """When the last run ends, if each goes in turn to the core that is free first.

    Args:
        free: for each core, seconds until it is free.
        seconds: how long each run takes, in order.
    """
    cores = list(free)
    heapq.heapify(cores)
    for one in seconds:
        heapq.heappush(cores, heapq.heappop(cores) + one)
    return max(cores)


def duration(seconds: float) -> str:
    """ "1:02:05" or "2:05", hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _reason(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


# ---- in a run's process ---------------------------------------------------------------------------------------------


def _work(
    link: Any, log: str, gpu: str | None, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    # Or every worker of a data loader would start from a server too, and import torch again in every epoch.
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the queue sends SIGTERM
    threading.Thread(target=_end_with_queue, args=(link,), daemon=True).start()
    os.environ.update(VARIABLES if gpu is None else {**VARIABLES, "CUDA_VISIBLE_DEVICES": gpu})
    torch.set_num_threads(1)
    keep_freed_memory()
    transformers_logging.disable_progress_bar()

    def work() -> None:
        try:
            call(*arguments, callbacks=[_Progress(link)])
        except InUse as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(IN_USE)
        if not has_begun():  # two may start a run before either has its lock
            sys.exit(DONE_BEFORE)

    sys.exit(run_command(name, work))


def _end_with_queue(link: Any) -> None:
    """SIGTERM to this process when the queue is gone; where it trains it saves a checkpoint first."""
    try:
        link.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


class _Progress(TrainerCallback):
    """Says at most once a second which step is done."""

    def __init__(self, link: Any) -> None:
        self.link, self.said = link, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() - self.said > 1:
            self.said = time.monotonic()
            with suppress(OSError):  # the queue is gone; the other thread sees it too
                self.link.send((state.global_step, state.max_steps))
