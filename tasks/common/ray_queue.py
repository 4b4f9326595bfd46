"""Runs on the machines of a Ray cluster: each is a Ray task of one CPU, and of one GPU where the cluster has any.

Inside a task a `Queue` of one run does what it does everywhere (tasks/common/queue.py): log, lock, progress, and going
on from the last checkpoint. The machines share a disk on which the checkout, the data and the runs have the same paths.
The task of a worker that dies is given to another. Ray is imported when a queue is made, and not before.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from typing import Any

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.training import StopRequest
from tasks.common.machines import LOCAL
from tasks.common.queue import ATTEMPTS, STATUS, STOPPED, WAKE, AnyQueue, Job, Queue, RunsFailed, duration, makespan

SETTLE = 90.0  # seconds in which a network disk shows what another machine wrote
ANSWER = 10.0  # seconds for a cluster to answer
OURS = "SPARSEPRIOR_"  # variables that begin so hold in the runs too
# Ray sends nobody numbers about a cluster that is started here, unless the user's variable says so.
QUIET = "RAY_USAGE_STATS_ENABLED"
STORE = 100 * 2**20  # bytes of memory for results, which are some words; by default Ray takes a third of all


@dataclass(frozen=True)
class _Outcome:
    """What a task says of its run.

    host: the machine. failure: in words. stopped: whether its worker was asked to end.
    """

    host: str
    seconds: float
    failure: str | None = None
    stopped: bool = False


class RayQueue(AnyQueue):
    """Does runs on a Ray cluster, as many at a time as it has room for.

    Args:
        modules: what the processes of runs import before they are forked.
        address: of the cluster, as `ray.init` takes it; "local" starts one on this machine, for as long as runs last.
            A cluster to which this process is connected already is used, whatever the address.
        seconds: by row, how long finished runs took.

    Raises:
        ImportError: without Ray.
    """

    def __init__(
        self, modules: Sequence[str], address: str, seconds: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        super().__init__(seconds)
        self.ray = import_module("ray")
        self.modules, self.address = list(modules), address
        self.slots = 1  # runs at a time
        self.running: dict[Any, Job] = {}  # by Ray's reference of the task; those that wait for a worker too
        self.unseen: dict[str, tuple[Job, _Outcome, float]] = {}  # done, but not seen on this machine yet, since when

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all of them; errors as in `AnyQueue.run`.

        Raises:
            ConnectionError: if there is no cluster at the address.
        """
        self._begin(jobs)
        if not jobs:
            return
        with self._connected(), StopRequest() as stop:
            resources = self.ray.cluster_resources()
            gpus = int(resources.get("GPU", 0))
            self.slots = max(1, gpus or int(resources.get("CPU", 1)))
            # Ray would end the worker after a task with a GPU, to free its memory. Here that is the run's process's.
            options = {"num_cpus": 1, "num_gpus": 1 if gpus else 0, "max_retries": 0, "max_calls": 0}
            task = self.ray.remote(**options)(_do)
            said = time.monotonic()
            try:
                for job in jobs:
                    self._submit(task, job)
                while self.running or self.unseen:
                    for job in self._listen():
                        self._submit(task, job)
                    if stop.requested:
                        raise RunStopped(STOPPED)
                    if time.monotonic() - said > STATUS:
                        self._say(self._left())
                        said = time.monotonic()
            finally:
                self._cancel()
        self._check_failed()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        if self.ray.is_initialized():
            yield
            return
        local = {"include_dashboard": False, "object_store_memory": STORE} if self.address == LOCAL else {}
        earlier = signal.getsignal(signal.SIGTERM)  # Ray puts its own in this place
        try:
            check_somebody_answers(self.address)
            with variables_set({QUIET: os.environ.get(QUIET, "0")}):
                self.ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConnectionError(f"--ray={self.address}: {first_line(error)}") from error
        try:
            yield
        finally:
            self.ray.shutdown()
            if earlier is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, earlier)

    def _submit(self, task: Any, job: Job) -> None:
        variables = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
        self.running[task.remote(job, self.modules, os.getcwd(), variables)] = job
        self.attempts[job.name] = self.attempts.get(job.name, 0) + 1

    def _listen(self) -> list[Job]:
        """Wait until something happens or a moment is over; take in what ended. Returns what is to be done again."""
        ended: list[Any] = []
        if self.running:
            ended, _ = self.ray.wait(list(self.running), timeout=WAKE)
        else:
            time.sleep(WAKE)
        again = [job for reference in ended if (job := self._ended(reference)) is not None]
        for job, outcome, since in list(self.unseen.values()):
            self._look(job, outcome, since)
        return again

    def _ended(self, reference: Any) -> Job | None:
        """Take in what a task says. Returns its run if that is to be done again."""
        job, errors = self.running.pop(reference), self.ray.exceptions
        try:
            outcome = self.ray.get(reference)
            died = f"{outcome.host} was asked to end it" if outcome.stopped else None
        except errors.RayTaskError as error:  # an error in the task
            self._fail(f"{job.name}: {first_line(error.cause)}")
            return None
        except errors.RayError as error:  # of the worker, its machine, or whoever cancelled the task
            died = f"{type(error).__name__}: {first_line(error)}"
        if died is None and outcome.failure is None:
            self.unseen[job.name] = job, outcome, time.monotonic()
        elif died is None:
            self._fail(outcome.failure)
        elif self.attempts[job.name] < ATTEMPTS:
            self._say(f"{job.name}: its worker died ({died}); it is put back")
            return job
        else:
            self._fail(f"{job.name}: its worker died {ATTEMPTS} times ({died})")
        return None

    def _look(self, job: Job, outcome: _Outcome, since: float) -> None:
        """Whether a run that is done has left here what says so."""
        if job.is_done():
            del self.unseen[job.name]
            self._count()
            if self.attempts[job.name] == 1:
                self.seconds.setdefault(job.row, []).append(outcome.seconds)
            self._say(f"{job.name}: done in {duration(outcome.seconds)} on {outcome.host}; {self._left()}")
        elif time.monotonic() - since > SETTLE:
            del self.unseen[job.name]
            self._fail(f"{job.name}: done on {outcome.host}, but not seen here; --ray needs a disk that all share")

    def _fail(self, text: str) -> None:
        self.failed.append(text)
        self._say(f"{text}; {self._left()}")

    def _cancel(self) -> None:
        """End what runs, which saves checkpoints."""
        for reference in self.running:
            self.ray.cancel(reference)
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running))
        self.running, self.unseen = {}, {}

    def _left(self) -> str:
        """How much is left to do. Runs that are under way count whole, as nobody says here how far they are."""
        known = {row: fmean(values) for row, values in self.seconds.items() if values}
        if not self.running or not known:
            return f"{len(self.running)} to do"
        usual = fmean(known.values())
        left = makespan([0.0] * self.slots, [known.get(job.row, usual) for job in self.running.values()])
        return f"{len(self.running)} to do, about {duration(left)} left"


def check_somebody_answers(address: str) -> None:
    """Raise OSError if nobody does at HOST:PORT. Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=ANSWER).close()


# ---- in a worker of Ray ---------------------------------------------------------------------------------------------


def _do(job: Job, modules: Sequence[str], folder: str, variables: Mapping[str, str]) -> _Outcome:
    """Do a run on this machine, in a process of its own."""
    os.chdir(folder)
    os.environ.update(variables)
    # Ray cancels a task by what Ctrl-C does, which a worker ignores if Ray was started in a shell's background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Or the run's process would first do what is in this worker's main file, and import Ray.
    vars(sys.modules["__main__"]).pop("__file__", None)
    begin, host, queue = time.monotonic(), socket.gethostname(), Queue(modules, 1)
    failure, stopped = None, False
    try:
        queue.run([job])
    except RunsFailed:
        failure = queue.failed[0]
    except RunStopped:
        stopped = True
    return _Outcome(host, time.monotonic() - begin, failure, stopped)
