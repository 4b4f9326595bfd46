"""Seconds of a call, and the bytes that torch allocates in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Call, calls: int, device: torch.device) -> float:
    """Mean seconds of `calls` calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def traced_bytes(function: Call, device: torch.device) -> tuple[int, int]:
    """(peak, what stays): bytes that torch allocates while `function` runs, beyond those at its start.

    CUDA: the allocator's own counters. CPU: torch's allocator keeps none, but reports each allocation to the profiler,
    those inside operators and compiled kernels too, so the running sum is exact to the byte. The resident size of the
    process, the other way to ask, depends on pages that earlier calls left to malloc. Not seen: what libraries take
    from malloc themselves (packed matrices of a matrix product, some MB at most).
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each of its steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak, total
