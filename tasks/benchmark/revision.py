"""Another commit's code next to today's: --base REV.

Both are measured through the library's public names, in processes of their own that take turns: the same file
(revision_worker.py) runs with the library of a git worktree of REV, and with this one. So REV may be any commit that
has these names, however its modules are arranged. Outputs of both are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.benchmark.entry import Benchmark, Case, Row, Session
from tasks.benchmark.timing import turn_order
from tasks.common.git import git

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("revision_worker.py")
AFTER = "this code"
NOT_ALL = ("attention", "model")
TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}  # of the largest value


def compared(benchmark: Benchmark, arguments: argparse.Namespace) -> Benchmark:
    """The entry whose contenders are the code of --base and this one.

    Raises:
        ValueError: for an entry that is not compared, and for an unknown commit.
    """
    if benchmark.name not in NOT_ALL:
        raise ValueError(f"--base {arguments.base}: only {' and '.join(NOT_ALL)} are compared with another commit")
    try:
        arguments.commit = git(ROOT, "rev-parse", "--verify", "--short=8", f"{arguments.base}^{{commit}}").strip()
    except ValueError as error:
        raise ValueError(f"--base {arguments.base}: {error}") from None
    keys = (*benchmark.keys[:-1], "what", "code")
    fields = {name: getattr(benchmark, name) for name in ("name", "size")}
    own = Revisions(**fields, keys=keys, same=(*benchmark.same, "commit"), bases=(arguments.commit,))
    own.of = benchmark
    return own


class Revisions(Benchmark):
    """An entry with two contenders, of each contender that both can run: the code of a commit, and this one."""

    of: Benchmark
    before: Path | None = None  # the worktree

    def check(self, arguments: argparse.Namespace) -> None:
        """As the entry."""
        self.of.check(arguments)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """What the library chooses at each size and pass of the entry; of `model`, of each prior."""
        name = self.of.keys[-1]
        for cases in self.of.plan(arguments):
            asked = {"auto"} if self.of.name == "attention" else {case[name] for case in cases}
            for what in sorted(asked - {"copy_attention", "transformers"}):
                size = {key: cases[0][key] for key in self.of.keys[:-1]}
                yield [{**size, "what": what, "code": code} for code in (arguments.commit, AFTER)]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """Both in turns, each in a process that stays for all rounds."""
        arguments = session.arguments
        request = {"entry": self.of.name, "case": cases[0], **session.settings}
        if self.before is None:
            self.before = session.until_the_end.enter_context(worktree(arguments.commit))
        with contextlib.ExitStack() as stack:
            workers: dict[str, Worker] = {}
            try:
                for case in cases:
                    place = self.before if case["code"] == arguments.commit else ROOT
                    workers[case["code"]] = stack.enter_context(Worker(place, request))
                return measured_turns(cases, workers, arguments, TOLERANCES[session.settings["dtype"]])
            except WorkerError as error:
                return [{**case, "failed": f"{error}"} for case in cases]

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What is compared."""
        return f"Times of {settings['commit']} and of this code, each in a process of its own, in turns."


def measured_turns(
    cases: list[Case], workers: Mapping[str, Worker], arguments: argparse.Namespace, tolerance: float
) -> list[Case]:
    """The records of cases whose workers are ready."""
    outputs = [worker.about["output"] for worker in workers.values()]
    largest = max(1e-3, *(abs(value) for value in outputs[0]))
    difference = max(abs(a - b) for a, b in zip(*outputs, strict=True))
    if not difference <= tolerance * largest:
        said = f"wrong: the outputs of both differ by {difference:.2g}, allowed {tolerance * largest:.2g}"
        return [{**case, "failed": said} for case in cases]
    slowest = max(worker.about["seconds"] for worker in workers.values())
    rounds = max(min(3, arguments.rounds), min(arguments.rounds, int(arguments.seconds / (2 * slowest))))
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in turn_order(list(workers), number):
            seconds[name].append(workers[name].ask({"calls": max(1, round(0.05 / slowest))})["seconds"])
    about = {name: {key: worker.about[key] for key in ("memory", "ran")} for name, worker in workers.items()}
    return [{**case, "seconds": seconds[case["code"]], **about[case["code"]]} for case in cases]


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, which goes at the end."""
    git(ROOT, "worktree", "prune")  # those of commands that were killed
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / commit
        git(ROOT, "worktree", "add", "--detach", str(place), commit)
        try:
            yield place
        finally:
            git(ROOT, "worktree", "remove", "--force", str(place))


class WorkerError(RuntimeError):
    """A worker that cannot do what it is asked."""


class Worker:
    """A process that has set a call up with the library of a folder, and times it when it is asked.

    about: what it said when it was ready: seconds of a call, memory, some of the output, the backend that ran.
    """

    def __init__(self, library: Path, request: Mapping[str, Any]) -> None:
        paths = os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": paths}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        run = "import runpy, sys; runpy.run_path(sys.argv.pop(1))['main']()"
        command = [sys.executable, "-P", "-c", run, str(WORKER), str(library)]
        self.process = subprocess.Popen(command, text=True, cwd=library, env=environment, **pipes)
        self.request = dict(request)

    def __enter__(self) -> Worker:
        self.about = self.ask(self.request)
        return self

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
            WorkerError: if it ended instead.
        """
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            lines = self.process.stderr.read().strip().splitlines()
            raise WorkerError(lines[-1] if lines else f"its process ended with {self.process.wait()}")
        return json.loads(line)

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
