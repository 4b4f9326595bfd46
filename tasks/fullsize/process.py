"""A command of a task in a process of its own, which is watched: its memory, its first checkpoint, its end.

Processes are forked from a server that has imported what most of them need (multiprocessing's). Each ends when the
process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.base.variables import variables_set

LOOK = 0.1  # seconds between two looks at a process
SETTLED = 0.7  # seconds in which nothing of a checkpoint changed, after which it is whole
PRELOADED = ("hf_sparseprior.classification.task", "tasks.classification.train", "tasks.classification.evaluate")
LAST_FILE = "trainer_state.json"  # of a checkpoint that is a folder


@dataclass
class Ended:
    """How a process ended: exit status, None where it was killed at its first checkpoint; seconds; the most memory that
    it had, GiB; the last line that it printed.
    """

    status: int | None
    seconds: float
    peak_gib: float
    said: str


def context(threads: int) -> Any:
    """Where processes come from: a server that has imported the tasks, with so many threads for each of them."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(PRELOADED))
    with variables_set({"OMP_NUM_THREADS": str(threads)}):
        forkserver.ensure_running()
    return made


def run_command(
    server: Any,
    module: str,
    arguments: Sequence[str],
    log: Path,
    threads: int = 1,
    until: Callable[[], Path | None] = lambda: None,
    seconds: float | None = None,
) -> Ended:
    """`python -m MODULE ARGUMENTS` until it ends, or until a checkpoint is whole, at which it is killed.

    Args:
        server: as `context` gives it.
        module: has a `main`.
        arguments: of the command line.
        log: file to which it prints.
        threads: of its computation.
        until: returns the checkpoint if it is there.
        seconds: after so many it is killed too, with the status of a timeout, 124.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = log.stat().st_size if log.exists() else 0
    mine, theirs = server.Pipe()
    process = server.Process(target=_work, args=(theirs, str(log), module, list(arguments), threads))
    started, peak, status = time.monotonic(), 0.0, None
    process.start()
    theirs.close()
    try:
        while not connection.wait([process.sentinel], LOOK):
            peak = max(peak, peak_gib(process.pid))
            if is_whole(until()):
                process.kill()
                process.join()
                break
            if seconds is not None and time.monotonic() - started > seconds:
                process.kill()
                process.join()
                status = 124
                break
        else:
            process.join()
            status = process.exitcode
    finally:
        process.kill()
        process.join()
        mine.close()
    with open(log, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        lines = [line.strip() for line in file if line.strip()]
    return Ended(status, time.monotonic() - started, peak, lines[-1] if lines else "")


def is_whole(checkpoint: Path | None) -> bool:
    """Whether nothing of a checkpoint is written any more. A file has its name when it is whole."""
    if checkpoint is None or not checkpoint.is_dir():
        return checkpoint is not None
    try:
        newest = max(file.stat().st_mtime for file in (checkpoint, *checkpoint.iterdir()))
        return (checkpoint / LAST_FILE).is_file() and time.time() - newest > SETTLED
    except OSError:  # its files are given their names at this moment
        return False


def peak_gib(pid: int | None) -> float:
    """The most memory that a process had so far, GiB; 0 where the system does not say it."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return 0.0


def _work(link: Any, log: str, module: str, arguments: list[str], threads: int) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
    torch.set_num_threads(threads)
    sys.argv = [module, *arguments]
    print(f"$ python -m {module} {' '.join(arguments)}", flush=True)
    sys.exit(import_module(module).main(arguments))


def _end_with_parent(link: Any) -> None:
    """The end of this process when the one that started it is gone."""
    with suppress(EOFError, OSError):
        link.recv()
    os._exit(1)
