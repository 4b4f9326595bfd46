"""Runs an entry: every measurement is in OUT/records.json as soon as it is done, and the same command goes on.

What failed leaves the reason instead, and is not tried again, unless it may take more time or memory now or a package
that it lacked is looked for again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.json_files import RECORD_BYTES, read_json_object
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.environment import environment
from hf_sparseprior.runs.locks import locked
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.run_folder import check_place
from hf_sparseprior.training import StopRequest
from tasks.benchmark import report, revision
from tasks.benchmark.entry import Benchmark, Case, Session, WrongOutput

RECORDS, LOCK, ROUND = "records.json", "run.lock", "round"


@contextlib.contextmanager
def sole_use(out: Path) -> Iterator[None]:
    """A folder, made if it is not there, in which no other process measures.

    Raises:
        ValueError: if one does.
    """
    check_place(out, "--out")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK) as mine:
        if not mine:
            raise ValueError(f"--out={out} is in use by another process; wait for its end")
        yield


def load(name: str) -> Benchmark:
    """An entry by its name."""
    return import_module(f"tasks.benchmark.{name}").BENCHMARK


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> bool:
    """Measure what is missing in a folder, then print, write and draw all of it. Returns whether all outputs are right.

    Raises:
        ValueError: for bad options, other measurements in the folder, and a folder in use.
        RunStopped: after SIGTERM.
    """
    transformers_logging.set_verbosity_error()
    benchmark = benchmark.variant(arguments)
    if arguments.base is not None:
        benchmark = revision.compared(benchmark, arguments)
    if arguments.report:
        content = read_content(benchmark, arguments.out)
        if not content.get("measured"):
            raise ValueError(f"--report: {arguments.out / RECORDS} has no measurements")
        report.write_report(benchmark, arguments.out, content)
        return True
    if (work := benchmark.instead(arguments)) is not None:
        with sole_use(arguments.out):
            work()
        return True
    settings = benchmark.check_all(arguments)
    with sole_use(arguments.out):
        return measure_all(benchmark, arguments, settings)


def measure_all(benchmark: Benchmark, arguments: argparse.Namespace, settings: Mapping[str, Any]) -> bool:
    """`run` in a folder that no other process measures in."""
    records = [own for own in read_records(benchmark, arguments.out, settings) if not may_take_more(own, arguments)]
    benchmark.check_records(records, arguments)
    # Cells that never ended, and how often they began.
    begun = read_content(benchmark, arguments.out).get("begun", {}) if benchmark.attempts else {}
    about = report.provenance(benchmark.name)
    report.print_provenance(about)
    content = {**about, "settings": settings, "measured": records, **({"begun": begun} if benchmark.attempts else {})}
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([type(benchmark).__module__])
    plan, end = list(benchmark.plan(arguments)), time.monotonic() + (arguments.for_seconds or float("inf"))
    right, stopped, measured = not any(map(is_wrong, records)), "", 0
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        session = Session(arguments, settings, records, stop, server, until_the_end=stack)
        for number, cases in enumerate(plan, start=1):
            if not is_left(benchmark, cases, records):
                continue
            needed = benchmark.expected_seconds(cases, records) if measured else 0.0  # each command measures something
            if stop.requested or (now := time.monotonic()) >= end or now + needed > end:
                stopped = f"stopped at {number} of {len(plan)}; the same command goes on"
                break
            measured, name, found = measured + 1, name_of(benchmark, cases[0]), None
            if benchmark.attempts is not None:
                if begun.get(name, 0) >= benchmark.attempts:
                    found = [{**case, "failed": f"began {begun[name]} times and never ended"} for case in cases]
                begun[name] = begun.get(name, 0) + 1
                write_results(arguments.out / RECORDS, content)
            try:
                found = found or benchmark.measure(cases, session)
            except WrongOutput as error:
                print(error, file=sys.stderr)
                return False
            begun.pop(name, None)
            if found is None:
                continue
            names = {name_of(benchmark, own) for own in found}
            records[:] = [own for own in records if name_of(benchmark, own) not in names]
            records += [{**own, "load_average": os.getloadavg()[0]} for own in found]
            write_results(arguments.out / RECORDS, content)
            for own in found:
                right &= not is_wrong(own)
                print(f"[{number}/{len(plan)}] {report.said(benchmark, own)}", flush=True)
            if any(own.get("device_lost") for own in found):
                right = False
                stopped = f"the device cannot be used after {number} of {len(plan)}; give the command again"
                break
        stopping = stop.requested
    if records:
        report.write_report(benchmark, arguments.out, content)
    if stopping:
        raise RunStopped(stopped or "stopped")
    print(stopped, end="\n" if stopped else "")
    return right


# ---- what is there --------------------------------------------------------------------------------------------------


def name_of(benchmark: Benchmark, record: Case) -> str:
    """What makes a measurement this one, the round included."""
    return json.dumps([*(record[key] for key in benchmark.keys), record.get(ROUND, 0)], sort_keys=True, default=str)


def is_left(benchmark: Benchmark, cases: Sequence[Case], records: Sequence[Case]) -> bool:
    """Whether one of the cases was not measured, and did not fail in an earlier round."""
    done = {name_of(benchmark, own) for own in records}
    failed = {name_of(benchmark, {**own, ROUND: 0}) for own in records if "failed" in own}
    return any(
        name_of(benchmark, own) not in done and name_of(benchmark, {**own, ROUND: 0}) not in failed for own in cases
    )


def is_wrong(record: Mapping[str, Any]) -> bool:
    """Whether it was not timed because it gives something else than it should."""
    return "wrong: " in record.get("failed", "").lower()


def read_content(benchmark: Benchmark, out: Path) -> dict[str, Any]:
    """records.json of a folder; {} if there is none.

    Raises:
        ValueError: if it is damaged or of another entry.
    """
    path = out / RECORDS
    if not path.exists():
        return {}
    content = benchmark.convert(read_json_object(path, RECORD_BYTES, finite=False))
    if not isinstance(content.get("settings"), dict) or not isinstance(content.get("measured"), list):
        raise ValueError(f"{path} is damaged; remove it or choose another --out")
    if content.get("benchmark", benchmark.name) != benchmark.name:
        raise ValueError(f"{path} is of {content['benchmark']}, not of {benchmark.name}; choose another --out")
    return content


def read_records(benchmark: Benchmark, out: Path, settings: Mapping[str, Any]) -> list[Case]:
    """The measurements of a folder so far, without those for which a package was missing: it may be there by now.

    Raises:
        ValueError: if they were taken with other settings, on another machine or with another version of a package.
    """
    if not (content := read_content(benchmark, out)):
        return []
    now, before, hardware = environment(), content.get("versions") or {}, content.get("hardware") or {}
    both = {name: version for name, version in now["versions"].items() if name in before}  # of others nothing is said
    there = {**content["settings"], "cpu": hardware.get("cpu"), **before}
    there["threads"] = there.get("threads") or hardware.get("cpu_threads")
    here = {**settings, **({"cpu": now["hardware"]["cpu"]} if benchmark.one_cpu else {}), **both}
    if "gpu" in hardware:
        there["gpu"], here["gpu"] = hardware["gpu"], now["hardware"].get("gpu")
    different = [f"{key}: {there.get(key)!r} there, {value!r} here" for key, value in here.items()
                 if there.get(key) != value]  # fmt: skip
    if different:
        raise ValueError(f"{out / RECORDS} has other measurements ({'; '.join(different)}); choose another --out")
    return [record for record in content["measured"] if not record.get("missing")]


def may_take_more(record: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Whether a measurement that ended at a limit of time or memory has more of it by these arguments."""
    seconds, limit = record.get("limit_seconds"), record.get("limit_bytes")
    if limit is not None and arguments.memory_gib is not None:
        return bool(int(arguments.memory_gib * 2**30) > limit)
    return seconds is not None and bool(arguments.seconds > seconds)
