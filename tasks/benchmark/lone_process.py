"""A measurement in a process of its own, with no more memory and time than it may have."""

from __future__ import annotations

import errno
import resource
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.training import StopRequest
from tasks.benchmark.model_contenders import first_choice, noted_choices
from tasks.benchmark.timing import Memory, SetUp, measure_memory, seconds_per_call

SHORTEST = 0.5  # seconds for which a process times calls, or one call
Measure = Callable[..., dict[str, Any]]


def measured_call(
    set_up: SetUp,
    device: torch.device,
    memory_of: Callable[[SetUp, torch.device], tuple[Any, Memory]] = measure_memory,
    check: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Seconds a call, and bytes.

    Args:
        set_up: prepares everything that is prepared once, and returns the call.
        device: where it runs.
        memory_of: sets the call up, runs it twice and says what memory that took.
        check: what is done before calls are timed by themselves.

    Returns:
        seconds, calls, first_call (seconds of the set-up and of the call that makes tables), ran (which backend did the
        first layer; "" if none of ours), and bytes: memory (what stays and the peak of a call beyond it), set_up (the
        peak of the first call).
    """
    timed: list[float] = []

    def timed_set_up() -> Callable[[], None]:
        start = time.perf_counter()
        call = set_up()
        before.append(time.perf_counter() - start)
        return lambda: timed.append(seconds_per_call(call, 1, device))

    before: list[float] = []
    choices: list[str] = []
    with noted_choices(choices):
        call, memory = memory_of(timed_set_up, device)
    first, seconds = timed  # the profiler of the second call costs it some microseconds an operator
    if check is not None:
        check()
    if (calls := max(1, round(SHORTEST / seconds))) > 1:
        del timed[:]
        for _ in range(calls):
            call()
        seconds = sum(timed) / calls
    return {
        "seconds": seconds,
        "calls": calls,
        "first_call": before[0] + first,
        "memory": memory.kept + memory.call,
        "set_up": memory.set_up,
        "ran": first_choice(choices),
    }


def measured_alone(
    server: Any, measure: Measure, arguments: tuple[Any, ...], limit: int, seconds: float, stop: StopRequest
) -> Any:
    """`measure` in a process of its own: what it found, or {"failed": why not} with the limit if it was one; None if
    `stop` came first.

    Args:
        server: multiprocessing's context. measure: a function of a module. arguments: those of `measure`.
        limit: bytes of the process at most. seconds: for the whole process at most.
    """
    mine, theirs = server.Pipe(duplex=False)
    process = server.Process(target=_work, args=(theirs, limit, measure, arguments), daemon=True)
    end = time.monotonic() + seconds
    process.start()
    theirs.close()
    try:
        while not connection.wait([mine, process.sentinel], max(0.0, min(0.5, end - time.monotonic()))):
            if stop.requested:
                return None
            if time.monotonic() > end:
                return {"failed": f"more than {seconds:g} s", "limit_seconds": seconds}
        try:
            return mine.recv()
        except EOFError:
            process.join()
            # A stop is sent to all processes of a command by some who send it.
            return None if stop.requested else {"failed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        mine.close()


def _work(link: Any, limit: int, measure: Measure, arguments: tuple[Any, ...]) -> None:
    """The process of a measurement: sends what was measured, or why not."""
    transformers_logging.set_verbosity_error()
    before = limit_memory(limit)
    try:
        found = measure(*arguments)
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        resource.setrlimit(resource.RLIMIT_DATA, before)  # to say it takes memory, too
        if _is_memory(error):
            found = {"failed": _too_much(limit), "limit_bytes": limit}
        elif isinstance(error, RuntimeError):
            found = {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        else:
            raise
    link.send(found)


def limit_memory(limit: int) -> tuple[int, int]:
    """Let this process have no more bytes: beyond them, torch raises RuntimeError and numpy MemoryError.

    Returns:
        The limits of before, as `resource.setrlimit` takes them.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = before[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    return before


def _is_memory(error: Exception) -> bool:
    said = str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # Of a library that is loaded late, "failed to map segment from shared object" and the like.
    return any(words in said for words in ("allocate memory", "bad_alloc", "failed to map segment", "start new thread"))


def _too_much(limit: int) -> str:
    return f"more than {limit / 2**30:.2g} GiB"
