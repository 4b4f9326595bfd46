import ctypes
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_sparseprior.analysis import costs_measured
from hf_sparseprior.attention import functional as ops
from tasks.benchmark import timing
from tests.processes import Started

CPU = torch.device("cpu")
MEGA = 1_000_000


class Clock:
    """Stands for the module `time`: what else runs on the machine does not move it."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def sleeper(monkeypatch):
    """Makes calls that take so many seconds of the clock."""
    clock = Clock()
    for module in (timing, costs_measured):
        monkeypatch.setattr(module, "time", clock)

    def make(log, name, seconds=0.006):
        def call():
            clock.now += seconds
            log.append(name)

        return call

    return make


def test_the_clock_is_that_of_the_machine():
    assert timing.seconds_per_call(lambda: time.sleep(0.02), 2, CPU) >= 0.02


def test_every_contender_runs_once_a_round_in_changing_order(sleeper):
    log = []
    seconds = timing.interleave({name: sleeper(log, name) for name in "abc"}, CPU, budget=60, rounds=6)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 6, "b": 6, "c": 6}
    rounds = ["".join(log[start : start + 3]) for start in range(3, len(log), 3)]  # the first three are the warm-up
    assert len(rounds) == 6 and all(Counter(own) == Counter("abc") for own in rounds)
    assert Counter(own[0] for own in rounds) == {"a": 2, "b": 2, "c": 2}
    # Nobody always follows the same other one.
    assert {own[own.index("b") - 1] for own in rounds if own[0] != "b"} == {"a", "c"}


def test_rounds_end_with_the_budget_and_never_below_the_least(sleeper):
    log = []
    seconds = timing.interleave({"a": sleeper(log, "a", 0.05)}, CPU, budget=0.01, rounds=100)
    assert len(seconds["a"]) == timing.MIN_ROUNDS
    seconds = timing.interleave({"a": sleeper(log, "a", 0.05)}, CPU, budget=0.51, rounds=100)
    assert len(seconds["a"]) == 10
    assert seconds["a"] == pytest.approx([0.05] * 10)
    assert timing.interleave({}, CPU, 1.0, 5) == {}


def test_short_calls_are_repeated_and_timed_each(sleeper):
    log = []
    calls = {"short": sleeper(log, "short", 0.001), "long": sleeper(log, "long", 0.1)}
    seconds = timing.interleave(calls, CPU, budget=60, rounds=2)
    assert Counter(log)["long"] == 3 and Counter(log)["short"] >= 5
    assert seconds["short"] == pytest.approx([0.001] * 2) and seconds["long"] == pytest.approx([0.1] * 2)


def test_spread_and_ratios():
    assert timing.spread([5, 1, 3, 2, 4]) == {"median": 3.0, "lower": 2.0, "upper": 4.0, "rounds": 5}
    # A round in which the machine is ten times slower changes no ratio.
    assert timing.ratio_spread([2, 20, 2], [1, 10, 1]) == {"median": 2.0, "lower": 2.0, "upper": 2.0, "rounds": 3}


def test_traced_bytes_are_exact():
    kept = []

    def work():
        first = torch.empty(MEGA)
        second = torch.empty(2 * MEGA)
        del first
        kept.append(torch.empty(MEGA // 2))
        del second

    assert timing.traced_bytes(work, CPU) == (12 * MEGA, 2 * MEGA)
    assert timing.traced_bytes(kept.clear, CPU) == (0, -2 * MEGA)


def test_memory_tells_what_stays_from_what_a_call_takes():
    tables = []

    def set_up():
        torch.empty(4 * MEGA)  # gone again
        return call

    def call():
        if not tables:
            tables.append(torch.empty(MEGA))
        return torch.empty(2 * MEGA)

    _, memory = timing.measure_memory(set_up, CPU)
    assert memory == timing.Memory(set_up=16 * MEGA, kept=4 * MEGA, call=8 * MEGA)
    assert memory.needed == 16 * MEGA


M_MMAP_THRESHOLD = -3  # malloc.h


def attend(tokens):
    q, k, v = (torch.ones(1, 8, tokens, 32, requires_grad=True) for _ in range(3))
    ops.attention(q, k, v, "fibottention", backend="reference").sum().backward()


def grow(out):
    """Write how many bytes more this process has at most while it attends."""

    def resident(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    # What is freed goes back to the system: at once from now on, and what was freed before. Otherwise malloc keeps some
    # of it, and gives it out again while the process does not grow.
    malloc = ctypes.CDLL(None)
    malloc.mallopt(M_MMAP_THRESHOLD, 65536)
    attend(64)
    malloc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, files = resident("VmRSS:"), resident("RssFile:")
    attend(1024)
    # The system takes pages of libraries away and brings them back when it likes.
    out.write_text(str(resident("VmHWM:") - before - (resident("RssFile:") - files)))


@pytest.mark.slow
def test_traced_memory_is_what_the_process_grows_by(tmp_path):
    """Against the kernel's own count of resident pages in another process; gradients and operators' scratch too."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs")
    out, log = tmp_path / "bytes", tmp_path / "log"
    grown = []
    for _ in range(3):
        assert Started(grow, out, folder=tmp_path, log=log).wait(300) == 0, log.read_text()
        grown.append(int(out.read_text()))
    resident = statistics.median(grown)
    attend(64)
    traced, _ = timing.traced_bytes(lambda: attend(1024), CPU)
    assert traced > 80 * MEGA  # two (8, 1024, 1024) in float32 and a mask
    assert abs(traced - resident) < 0.15 * traced, (traced, grown)


def test_growth_law_finds_the_terms():
    tokens = (512, 1024, 2048)
    law = [3.0 + 0.5 * t + 0.002 * t**2 for t in tokens]
    np.testing.assert_allclose(timing.growth_law(tokens, law, 1e-6), (3.0, 0.5, 0.002), rtol=1e-6)
    # Noise on a linear law does not become a quadratic term, which would weigh a thousand times more at 65536.
    assert timing.growth_law(tokens, [5.0, 10.4, 20.8], 0.15)[::2] == (0.0, 0.0)
    assert timing.growth_law(tokens, [2.0, 8.1, 31.9], 0.15)[:2] == (0.0, 0.0)


def test_too_much_says_what_is_short():
    forecast = timing.Forecast(seconds=(0.0, 0.0, 1e-6), needed=(0.0, 0.0, 4.0))
    assert forecast.too_much(1024, 1, budget=60, free=1e9) is None
    assert forecast.too_much(32768, 1, 60, 1e9) == "would need about 4.0 GiB, 0.9 GiB are free"
    assert forecast.too_much(10000, 2, 60, 1e12) == "3 calls would take about 600 s, the budget is 60 s"


def test_what_cannot_run_is_left_out_with_its_reason():
    def broken():
        raise RuntimeError("first line\nsecond line")

    set_ups = {"good": lambda: lambda: None, "broken": broken, "large": lambda: lambda: None}
    result = timing.measure(set_ups, CPU, 1.0, 3, {"large": lambda: "too large"})
    assert result["broken"] == {"failed": "first line"} and result["large"] == {"failed": "too large"}
    assert len(result["good"].pop("seconds")) == 3 and result["good"] == {"memory": 0, "kept": 0}
    assert timing.measure(set_ups, CPU, 1.0, 0, {})["good"] == {"memory": 0, "kept": 0}
