"""Processes for tests that start at once: forked from a server that has imported torch and this package.

A process of its own takes ten seconds to import what training needs; a test of several processes starts four to eight.
Here a clean server (multiprocessing's) imports it once, and every process is forked from that, with arguments,
environment, folder and log of its own. What a user types as a whole, `python -m ...`, is tested where that matters.
With `here`, it is forked from the test's own process, which has imported the frameworks of its task.
`run_script` does the same for scripts of which some must not find this package: their server has not imported it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BACKEND = "SPARSEPRIOR_BACKEND"
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
        here: fork from this process if it computes in one thread; a pool of threads does not survive that.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        *arguments: Any,
        folder: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        here: bool = False,
    ) -> None:
        import torch  # not by a script's server

        context = multiprocessing.get_context("fork" if here and torch.get_num_threads() == 1 else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(IMPORTED)
            start_server()
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
        """End it and the processes that it started, if there are any left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def start_server() -> None:
    """Start multiprocessing's server, if none runs, without a backend that the test forces: it would be forced on all
    processes that later tests start from it.
    """
    before = os.environ.pop(BACKEND, None)
    try:
        forkserver.ensure_running()
    finally:
        if before is not None:
            os.environ[BACKEND] = before


def module(name: str, *arguments: str, processes: int = 1, **place: Any) -> Started:
    """`python -m NAME ARGUMENTS`, or torchrun's `-m NAME ARGUMENTS` with so many processes."""
    if processes == 1:
        return Started(run_module, name, arguments, **place)
    return launched(processes, run_module, name, arguments, **place)


def launched(processes: int, call: Callable[..., Any], *arguments: Any, **place: Any) -> Started:
    """`call(*arguments)` in so many processes of torchrun's own launcher, which it forks."""
    return Started(_launch, processes, call, arguments, **place)


def script(text: str, *arguments: str, **place: Any) -> Started:
    """`python -c TEXT ARGUMENTS`; what it prints and its errors are in the log."""
    return Started(_script, text, arguments, **place)


def wait_until(happened: Callable[[], Any], process: Started | None = None, seconds: float = 300) -> None:
    """Until a condition holds; fails when the process ends before, or after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        over = time.monotonic() > end or (process is not None and process.poll() is not None)
        assert not over or happened(), "what was waited for did not happen"  # it may have, just before the end
        time.sleep(0.01)


HUB = {"HF_HUB_OFFLINE": "1", "HF_HOME": "home", "HF_MODULES_CACHE": "modules"}


def run_script(
    script: str,
    *arguments: str,
    folder: Path,
    package: bool = False,
    environment: dict[str, str] | None = None,
    seconds: int = 300,
) -> subprocess.CompletedProcess[str]:
    """What `python -c SCRIPT ARGUMENTS` does, in a process that has imported torch and transformers already.

    It fails when the script does.

    Args:
        folder: the process's working folder, in which `home` and `modules` are those of Hugging Face.
        package: whether the script can import this package. If it can, it still has to.
        environment: what is added to this process's.
        seconds: after so many the script is ended.
    """
    variables = {**os.environ, **HUB, **(environment or {})}
    with tempfile.TemporaryDirectory() as logs:
        output = [Path(logs, name) for name in ("stdout", "stderr")]
        for path in output:
            path.touch()
        request = {
            "script": script, "arguments": arguments, "folder": str(folder), "package": package,
            "path": [str(ROOT)] * package, "environment": variables, "output": [*map(str, output)], "seconds": seconds,
        }  # fmt: skip
        server = _script_server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        done = subprocess.CompletedProcess(script, status, *(path.read_text() for path in output))
    assert status == 0, done.stderr
    return done


@cache
def _script_server() -> subprocess.Popen[str]:
    """It ends when its input does. It imports transformers, which then looks for HUB, with the scripts' environment."""
    environment = {**os.environ, **HUB, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "4242"}
    for name in ("PYTHONPATH", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, "-P", str(ROOT / "tests" / "script_server.py")]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _run(
    folder: str, log: str, variables: dict[str, str], call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # what the server has imported
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)  # a test before the fork was alone
    os.setsid()  # a group of its own, as a shell makes one
    multiprocessing.set_start_method(None, force=True)  # its own processes start as those of any other process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    call(*arguments)


def run_module(name: str, arguments: tuple[str, ...]) -> None:
    """`python -m NAME ARGUMENTS`, in this process."""
    sys.argv = [name, *arguments]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import", RuntimeWarning)  # by the server
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(text: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


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
