"""Measures contenders by turns: rounds in which every contender runs once, their spread, and memory peaks.

A contender is measured through a `SetUp`: a function that prepares everything that is prepared once (tables, compiled
code, a check of the output) and returns the call to be timed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.analysis.costs_measured import Call, seconds_per_call, traced_bytes
from hf_sparseprior.base.checks import first_line

SetUp = Callable[[], Call]

# A turn repeats short calls until it takes about this long; in shorter turns the clock and a cold cache show. Next to
# slow contenders, which allow few rounds, a turn takes this share of the slowest one's call.
TURN_SECONDS = 0.005
TURN_SHARE = 0.05
MAX_CALLS = 1000
MIN_ROUNDS = 3
# Share of the free memory that a contender may be expected to take.
MEMORY_SHARE = 0.8
PROBE_CALLS = 3


# ---- time -----------------------------------------------------------------------------------------------------------


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """Order of round `number`: rotated by one each time, and backwards in every second round.

    With rotation alone each contender would always run after the same other one, and find the caches as that one
    leaves them.
    """
    start = (number // 2) % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def interleave(
    calls: Mapping[str, Call],
    device: torch.device,
    budget: float,
    rounds: int,
    timer: Callable[[Call, int, torch.device], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds a call, round by round.

    After a warm-up call of each, rounds go on until the next one would exceed the budget or all are done,
    but at least `MIN_ROUNDS` (`rounds` if that is smaller).

    Args:
        calls: what to time, by name.
        device: where they run.
        budget: seconds for all rounds together.
        rounds: rounds at most.
        timer: mean seconds of so many calls in a row; by default `seconds_per_call`.
    """
    timer = timer or seconds_per_call
    once = {name: timer(call, 1, device) for name, call in calls.items()}
    turn = max(TURN_SECONDS, TURN_SHARE * max(once.values(), default=0.0))
    repeats = {name: min(MAX_CALLS, max(1, round(turn / own))) for name, own in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for number in range(rounds if calls else 0):
        expected = (time.perf_counter() - start) * (number + 1) / max(1, number)
        if number >= MIN_ROUNDS and expected > budget:
            break
        for name in turn_order(list(calls), number):
            seconds[name].append(timer(calls[name], repeats[name], device))
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles: {"median", "lower", "upper", "rounds"}."""
    lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "lower": float(lower), "upper": float(upper), "rounds": len(values)}


def ratio_spread(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Spread of values / base, round by round: what slows a whole round down does not count."""
    return spread([own / other for own, other in zip(values, base, strict=True)])


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes beyond what was in use before.

    set_up: peak while the contender prepared itself and was checked. kept: tables and state that stay. call: peak of
    one call beyond those, results included.
    """

    set_up: int
    kept: int
    call: int

    @property
    def needed(self) -> int:
        """What must be free for the contender to run."""
        return max(self.set_up, self.kept + self.call)


def measure_memory(set_up: SetUp, device: torch.device) -> tuple[Call, Memory]:
    """Set a contender up and run it twice: its call, and the memory it takes.

    The first call belongs to the set-up, because tables and state are made in it.
    """
    calls: list[Call] = []

    def prepare() -> None:
        calls.append(set_up())
        calls[0]()

    set_up_peak, kept = traced_bytes(prepare, device)
    call_peak, _ = traced_bytes(calls[0], device)
    return calls[0], Memory(set_up_peak, kept, call_peak)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- what will be too much ------------------------------------------------------------------------------------------


# How far a law with fewer terms may be from the probes: times are noisy, bytes are not.
TIME_TOLERANCE = 0.15
MEMORY_TOLERANCE = 0.01


@dataclass(frozen=True)
class Forecast:
    """Seconds and bytes a call as c + B (a T + b T^2), each with its (c, a, b), from what small probes of one image
    took.
    """

    seconds: tuple[float, float, float]
    needed: tuple[float, float, float]

    @classmethod
    def of(cls, set_up_at: Callable[[int], SetUp], tokens: Sequence[int], device: torch.device) -> Forecast:
        """Probe with three numbers of tokens."""
        seconds, needed = [], []
        for count in tokens:
            call, memory = measure_memory(set_up_at(count), device)
            seconds.append(min(seconds_per_call(call, 1, device) for _ in range(PROBE_CALLS)))
            needed.append(memory.needed)
        return cls(growth_law(tokens, seconds, TIME_TOLERANCE), growth_law(tokens, needed, MEMORY_TOLERANCE))

    def too_much(self, tokens: int, batch: int, budget: float, free: float) -> str | None:
        """Why the contender is left out at this size, or None."""
        seconds, needed = (c + batch * (a * tokens + b * tokens**2) for c, a, b in (self.seconds, self.needed))
        if needed > MEMORY_SHARE * free:
            return f"would need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        if MIN_ROUNDS * seconds > budget:
            return f"{MIN_ROUNDS} calls would take about {MIN_ROUNDS * seconds:.0f} s, the budget is {budget:.0f} s"
        return None


def growth_law(tokens: Sequence[int], values: Sequence[float], tolerance: float) -> tuple[float, float, float]:
    """c, a and b of c + a T + b T^2 through positive values, none of them negative: the fewest terms that fit.

    Args:
        tokens: T of each value.
        values: what is fitted, in relative terms.
        tolerance: largest relative difference with which fewer terms count as a fit; if none fit, the best one is
            taken.
    """
    relative = np.array(tokens, dtype=float)[:, None] ** np.arange(3) / np.maximum(values, 1e-12)[:, None]
    best, smallest = np.zeros(3), math.inf
    for terms in (list(own) for count in (1, 2, 3) for own in combinations(range(3), count)):
        solution = np.linalg.lstsq(relative[:, terms], np.ones(len(values)), rcond=None)[0]
        difference = float(np.abs(relative[:, terms] @ solution - 1).max())
        if (solution >= 0).all() and difference < smallest:
            best, smallest = np.zeros(3), difference
            best[terms] = solution
            if smallest <= tolerance:
                break
    return tuple(float(value) for value in best)  # type: ignore[return-value]


# ---- one size -------------------------------------------------------------------------------------------------------


def measure(
    set_ups: Mapping[str, SetUp],
    device: torch.device,
    budget: float,
    rounds: int,
    forecasts: Mapping[str, Callable[[], str | None]],
) -> dict[str, dict[str, Any]]:
    """Time and memory of contenders at one size, which take turns.

    Args:
        set_ups: contenders by name.
        device: where they run.
        budget: seconds for the rounds.
        rounds: rounds at most; 0 measures memory only.
        forecasts: by name, a function that says why a contender would need too much, or None. A contender may have
            none.

    Returns:
        {name: {"seconds": [of each round], "memory": what stays and the peak of a call, "kept": what stays, bytes}}, or
        {name: {"failed": why not}}.
    """
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, set_up in set_ups.items():
        try:
            reason = forecasts[name]() if name in forecasts else None
            if reason is None:
                calls[name], memory = measure_memory(set_up, device)
                found[name] = {"memory": memory.kept + memory.call, "kept": memory.kept}
        except (RuntimeError, MemoryError) as error:  # no memory, not on this device, a wrong output
            reason = first_line(error)
        if reason is not None:
            found[name] = {"failed": reason}
    for name, values in interleave(calls, device, budget, rounds).items():
        if values:
            found[name]["seconds"] = values
    return found
