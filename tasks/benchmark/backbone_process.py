"""One measurement of a backbone, in a process of its own (tasks/benchmark/backbones.py)."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from multiprocessing import connection
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.families import preset_family
from hf_sparseprior.training import StopRequest
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark.model import noted_choices, preset_config
from tasks.benchmark.timing import measure_memory, seconds_per_call

SHORTEST = 0.5  # seconds for which a process times calls, or one call


def measure(model: str, prior: str, pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a call and bytes of its peak, of one image and one backbone.

    Args:
        model: name of a preset. prior: its name. pixels: side of the image.
        settings: dtype, device, threads and keep_memory.

    Returns:
        seconds, calls, first_call (seconds of the call that makes tables), ran (which backend did the first layer), and
        bytes: memory (tables that stay and the peak of a call beyond them), set_up (the peak of the first call),
        weights.
    """
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    torch.set_num_threads(settings["threads"])
    if settings["keep_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    backbone = preset_family(model).backbone(preset_config(model, pixels, prior)).to(device, dtype).eval()
    image = torch.randn(1, 3, pixels, pixels, device=device, dtype=dtype)
    choices: list[str] = []
    timed: list[float] = []

    def call() -> None:
        with torch.no_grad():
            timed.append(seconds_per_call(lambda: backbone(pixel_values=image), 1, device))

    with noted_choices(choices):
        _, memory = measure_memory(lambda: call, device)
    first, seconds = timed  # the profiler of the second call costs it some microseconds an operator
    calls = max(1, round(SHORTEST / seconds))
    if calls > 1:
        with torch.no_grad():
            seconds = seconds_per_call(lambda: backbone(pixel_values=image), calls, device)
    weights = sum(parameter.nbytes for parameter in backbone.parameters())
    ran = choices[0].partition(": ")[2].split(" (")[0] if choices else ""
    return {
        "seconds": seconds,
        "calls": calls,
        "first_call": first,
        "memory": memory.kept + memory.call,
        "set_up": memory.set_up,
        "weights": weights,
        "ran": ran,
    }


def _work(link: Any, limit: int, arguments: tuple[Any, ...]) -> None:
    """The process of a measurement: sends what was measured, or why not."""
    transformers_logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        link.send(measure(*arguments))
    except (MemoryError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
        link.send({"failed": _too_much(limit) if memory else f"{type(error).__name__}: {said[0] if said else ''}"})


def _too_much(limit: int) -> str:
    return f"more than {limit / 2**30:.2g} GiB"


def measured_alone(server: Any, arguments: tuple[Any, ...], limit: int, seconds: float, stop: StopRequest) -> Any:
    """`measure` in a process of its own: what it found, or {"failed": why not}; None if `stop` came first.

    Args:
        server: multiprocessing's context. arguments: those of `measure`. limit: bytes of the process at most.
        seconds: for the whole process at most.
    """
    mine, theirs = server.Pipe(duplex=False)
    process = server.Process(target=_work, args=(theirs, limit, arguments), daemon=True)
    end = time.monotonic() + seconds
    process.start()
    theirs.close()
    try:
        while not connection.wait([mine, process.sentinel], max(0.0, min(0.5, end - time.monotonic()))):
            if stop.requested:
                return None
            if time.monotonic() > end:
                return {"failed": f"more than {seconds:g} s"}
        try:
            return mine.recv()
        except EOFError:
            process.join()
            return {"failed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        mine.close()
