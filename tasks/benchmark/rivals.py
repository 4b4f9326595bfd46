"""What a user would pick instead of sparse attention, side by side on CPU.

One image through a ViT with random weights, without gradients, at several sizes and in float32 and bfloat16: dense
attention eager, compiled, in ONNX Runtime and in OpenVINO; token merging; windows; Fibottention. Every measurement is a
process of its own. Rounds go through all sizes, models, dtypes and contenders and then start again; ratios to dense
eager attention are taken in the same dtype, round by round. In the first round each contender's tokens are compared
with what is plainly computed in float32 (with token merging, the class token), and a wrong one is not timed.
A contender that does not run in a dtype, whose package is missing, or that needs more memory or time than allowed
leaves the reason as its result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tasks.benchmark import lone_process, report
from tasks.benchmark.commands import DENSE
from tasks.benchmark.contenders_of_rivals import BFLOAT16, RIVALS, Prepared, Problem, Rival, as_tokens, check_problem
from tasks.benchmark.entry import Benchmark, Case, Row, Session, turned, unique
from tasks.benchmark.timing import Call, Memory, SetUp, measure_memory

DTYPES = ("float32", BFLOAT16)
CPU = torch.device("cpu")


# ---- one measurement, in a process of its own -----------------------------------------------------------------------


def measure_rival(case: Mapping[str, Any], settings: Mapping[str, Any]) -> Case:
    """Seconds a call, seconds before the first one, and bytes, of one image.

    Args:
        case: model, rival, dtype, pixels and round. In round 0 the output is checked.
        settings: threads and keep_memory.

    Returns:
        What `lone_process.measured_call` returns; counted ("torch" or "resident"); prepared, seconds by what was done
        before the first call; difference from the plain form, in round 0; weights, bytes, if they are no part of
        memory.

    Raises:
        RuntimeError: for a wrong output, and for whatever a program of others raises.
    """
    report.set_cpu(settings["threads"], settings["keep_memory"])
    rival = RIVALS[case["rival"]]
    problem = Problem(case["model"], case["pixels"], case["dtype"], settings["threads"])
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        # What an earlier process compiled would make this one's compilation look short.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that would stay while calls are timed
        try:
            return _measured(rival, problem, check=case["round"] == 0)
        except MemoryError:
            raise
        except Exception as error:  # each program has errors of its own
            raise error if isinstance(error, RuntimeError) else RuntimeError(str(error)) from error


def _measured(rival: Rival, problem: Problem, check: bool) -> Case:
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


def _about(rival: Rival, prepared: Prepared) -> Case:
    about: Case = {"prepared": prepared.seconds, "counted": "torch" if rival.in_torch else "resident"}
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


# ---- the entry ------------------------------------------------------------------------------------------------------

NOTES = """\
First call: seconds until it has returned, with export and compilation. MiB: what torch allocates beyond model and
image; with * what the process has in memory more than before the program was loaded, its weights included. Difference:
the largest one of the tokens, which have variance 1, from what is plainly computed in float32; with token merging, of
the class token. A contender whose difference is too large is not timed."""


def before_calls(record: Mapping[str, Any]) -> float:
    """Seconds until a first call has returned: export, compilation, and the call."""
    return sum(record["prepared"].values()) + record["first_call"]


class Rivals(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """A bad name or size ends the command before the first measurement."""
        for flag, known in (("dtypes", DTYPES), ("rivals", RIVALS)):
            for name in getattr(arguments, flag):
                if name not in known:
                    raise ValueError(f"--{flag} {name!r} must be one of {', '.join(known)}")
        for model in arguments.models:
            for pixels in arguments.sizes:
                report.check_positive(sizes=pixels)
                check_problem(model, pixels, arguments.rivals)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Rounds, in each of them sizes, models, dtypes and contenders, these in turns."""
        chosen = (sorted(arguments.sizes), arguments.models, arguments.dtypes, arguments.rivals)
        sizes, models, dtypes, rivals = map(unique, chosen)
        for number in range(arguments.rounds):
            for pixels in sizes:
                for model in models:
                    for dtype in dtypes:
                        for rival in turned(rivals, number):
                            case = {"model": model, "pixels": pixels, "dtype": dtype, "rival": rival}
                            yield [{**case, "round": number}]

    def measure(self, cases: list[Case], session: Session) -> list[Case] | None:
        """In a process of its own; a refusal needs none."""
        (case,) = cases
        if (refused := RIVALS[case["rival"]].why_not(case["dtype"])) is not None:
            return [{**case, **refused}]
        return session.alone(measure_rival, case)

    def complete(self, row: Case) -> None:
        """What happened before the first call, how memory is counted, and the difference."""
        good = [record for record in row["records"] if "failed" not in record]
        if good:
            row["before"] = max(map(before_calls, good))
            row["counted"] = good[0]["counted"]
            if row["counted"] == "resident":  # not to be compared with what torch allocates
                row["memory_times"] = {}
            row["difference"] = next((record["difference"] for record in good if "difference" in record), None)

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What the columns are."""
        return NOTES


BENCHMARK = Rivals(
    name="rivals",
    keys=("model", "pixels", "dtype", "rival"),
    machine=("threads", "keep_memory"),
    bases=(DENSE,),
    size="pixels",
    columns={
        "first call, s": lambda row: f"{row['before']:.1f}",
        "MiB": lambda row: f"{row['memory'] / 2**20:.0f}{'*' * (row['counted'] == 'resident')}",
        "difference": lambda row: "-" if row["difference"] is None else f"{row['difference']:.1e}",
    },
)
