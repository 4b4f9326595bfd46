"""Processes for tests that start at once: forked from a server that has imported torch and this package.

A process of its own takes ten seconds to import what training needs; a test of several processes starts four to eight.
Here a clean server (multiprocessing's) imports it once, and every process is forked from that, with arguments,
environment, folder and log of its own. What a user types as a whole, `python -m ...`, is tested where that matters.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = [
    *("hf_sparseprior.training", "tasks.classification.train", "torch.distributed.launcher.api"),
    *("matplotlib.pyplot", "sklearn.datasets", "datasets"),
]


class Started:
    """One process that runs `call(*arguments)`; the interface is that of subprocess.Popen.

    Args:
        call: a function of a module.
        folder: the process's working folder.
        log: file that gets what it prints.
        environment: what is added to this process's.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        *arguments: Any,
        folder: Path,
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
        self._process = context.Process(target=_run, args=(str(folder), str(log), variables, call, arguments))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int:
        """The exit status; TimeoutError if there is none in so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"the process still ran after {timeout} s")
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To this process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and the processes that it started."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def module(name: str, *arguments: str, processes: int = 1, **place: Any) -> Started:
    """`python -m NAME ARGUMENTS`, or torchrun's `-m NAME ARGUMENTS` with so many processes."""
    if processes == 1:
        return Started(_module, name, arguments, **place)
    return launched(processes, _module, name, arguments, **place)


def launched(processes: int, call: Callable[..., Any], *arguments: Any, **place: Any) -> Started:
    """`call(*arguments)` in so many processes of torchrun's own launcher, which it forks."""
    return Started(_launch, processes, call, arguments, **place)


def wait_for(path: Path, process: Started, seconds: float = 200) -> None:
    """Until a file is there; fails when the process ends before."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)


def _run(
    folder: str, log: str, variables: dict[str, str], call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the server has imported
    os.setsid()  # a group of its own, as a shell makes one
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    call(*arguments)


def _module(name: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _launch(processes: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="fork", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, call)(*arguments)
    except ChildFailedError:
        traceback.print_exc()
        sys.exit(1)
