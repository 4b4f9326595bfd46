"""One measurement of a backbone, in a process of its own (tasks/benchmark/backbones.py)."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.families import preset_family
from hf_sparseprior.training import StopRequest
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark.model import noted_choices, preset_config
from tasks.benchmark.timing import seconds_per_call, synchronize

SHORTEST = 0.5  # seconds for which a process times calls, or one call


def measure(model: str, prior: str, pixels: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a call and bytes of its peak, of one image and one backbone.

    Args:
        model: name of a preset. prior: its name. pixels: side of the image.
        settings: dtype, device, threads and keep_memory.

    Returns:
        seconds, calls, first_call (seconds of the call that makes tables), memory, weights (both bytes), ran (which
        backend did the first layer).
    """
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    torch.set_num_threads(settings["threads"])
    if settings["keep_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    backbone = preset_family(model).backbone(preset_config(model, pixels, prior)).to(device, dtype).eval()
    image = torch.randn(1, 3, pixels, pixels, device=device, dtype=dtype)
    choices: list[str] = []

    def call() -> Any:
        with torch.no_grad():
            return backbone(pixel_values=image).feature_maps

    def all_calls() -> tuple[float, float, int]:
        with noted_choices(choices):
            first = seconds_per_call(call, 1, device)
        calls = max(1, round(SHORTEST / first))
        return first, seconds_per_call(call, calls, device), calls

    (first, seconds, calls), memory = peak_of(all_calls, device)
    weights = sum(parameter.nbytes for parameter in backbone.parameters())
    ran = choices[0].partition(": ")[2].split(" (")[0] if choices else ""
    return {"seconds": seconds, "calls": calls, "first_call": first, "memory": memory, "weights": weights, "ran": ran}


def peak_of(function: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """What a function returns, and the bytes that it had in use at most beyond those before it."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found = function()
        synchronize(device)
        return found, torch.cuda.max_memory_allocated(device) - before
    with suppress(OSError):  # else the peak is that of the whole process, which making the model may have set
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    found = function()
    return found, _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


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
        while not connection.wait([mine, process.sentinel], 0.5):
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
