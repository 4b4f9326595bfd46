"""One measurement of a contender, in a process of its own (tasks/benchmark/rivals.py)."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.benchmark import lone_process
from tasks.benchmark.contenders_of_rivals import RIVALS, Prepared, Problem, Rival, as_tokens
from tasks.benchmark.timing import Call, Memory, SetUp, measure_memory

CPU = torch.device("cpu")


def measure(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a call, seconds before the first one, and bytes, of one image.

    Args:
        entry: model, rival, dtype, pixels and round. In round 0 the output is checked.
        settings: threads and keep_memory.

    Returns:
        What `lone_process.measured_call` returns; counted ("torch" or "resident"); prepared, seconds by what was done
        before the first call; difference from the plain form, in round 0; weights, bytes, if they are no part of
        memory.

    Raises:
        RuntimeError: for a wrong output, and for whatever a program of others raises.
    """
    torch.set_num_threads(settings["threads"])
    if settings["keep_memory"]:
        keep_freed_memory()
    rival = RIVALS[entry["rival"]]
    problem = Problem(entry["model"], entry["pixels"], entry["dtype"], settings["threads"])
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        # What an earlier process compiled would make this one's compilation look short.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that would stay while calls are timed
        try:
            return _measured(rival, problem, check=entry["round"] == 0)
        except MemoryError:
            raise
        except Exception as error:  # each program has errors of its own
            raise error if isinstance(error, RuntimeError) else RuntimeError(str(error)) from error


def _measured(rival: Rival, problem: Problem, check: bool) -> dict[str, Any]:
    prepared = rival.prepare(problem)
    differences: list[float] = []
    outputs: list[Any] = []

    def set_up() -> Call:
        call = prepared.set_up()
        outputs.append(call)
        return call

    def compare() -> None:
        differences.append(difference(rival, problem, outputs[0]()))

    memory_of = measure_memory if rival.in_torch else measure_resident
    found = lone_process.measured_call(set_up, CPU, memory_of, compare if check else None)
    return {**found, **_about(rival, prepared), **({"difference": differences[0]} if check else {})}


def _about(rival: Rival, prepared: Prepared) -> dict[str, Any]:
    about: dict[str, Any] = {"prepared": prepared.seconds, "counted": "torch" if rival.in_torch else "resident"}
    if prepared.runs_on:
        about["ran"] = prepared.runs_on
    return about if prepared.weights is None else {**about, "weights": prepared.weights}


def difference(rival: Rival, problem: Problem, output: Any) -> float:
    """The largest difference of a contender's tokens from its plain form.

    Raises:
        RuntimeError: if it is more than the dtype allows.
    """
    tokens, plain = as_tokens(output), rival.plain(problem)
    if tokens.shape != plain.shape:
        raise RuntimeError(f"wrong: tokens {tuple(tokens.shape)}, plainly computed {tuple(plain.shape)}")
    found = float((tokens - plain)[:, : rival.compared].abs().max())
    if not found <= (allowed := rival.tolerances[problem.dtype]):
        raise RuntimeError(f"wrong: {found:.2g} from what is plainly computed, {allowed:g} allowed")
    return found


# ---- memory of programs that allocate their own ---------------------------------------------------------------------


def measure_resident(set_up: SetUp, device: torch.device) -> tuple[Call, Memory]:
    """As `timing.measure_memory`, by what the process has in memory: the weights of the program count, too.

    What was freed before is given back to the system first, so that it does not hide what the program takes.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes("VmRSS")
    forget_peak()
    call = set_up()
    call()
    set_up_peak, kept = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    forget_peak()
    call()
    return call, Memory(set_up_peak, kept, resident_bytes("VmHWM") - before - kept)


def resident_bytes(name: str) -> int:
    """VmRSS, what this process has in memory, or VmHWM, its peak so far.

    Raises:
        RuntimeError: where the system does not say it.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        raise RuntimeError("this system does not say what a process has in memory") from None


def forget_peak() -> None:
    """Have VmHWM start anew. Where that is not allowed it stays the peak of the whole process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
