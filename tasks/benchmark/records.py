"""A folder of measurements, each of which a process of its own makes (backbones.py, rivals.py).

OUT/records.json holds every measurement as soon as it is done. The same command goes on where it was stopped, and may
ask for more. What failed leaves the reason instead, and is not tried in later rounds, unless it may take more time or
memory now.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.base.files import read_json_object, write_text
from hf_sparseprior.training import StopRequest
from tasks.benchmark import report
from tasks.benchmark.timing import free_memory, ratio_spread, spread
from tasks.common.command import RunStopped
from tasks.common.locks import locked
from tasks.common.results import write_results

RECORDS, TABLE, LOCK = "records.json", "table.md", "run.lock"
ROUND = "round"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    """What a benchmark measures into a folder.

    name: of the benchmark. module: what measuring processes import. keys: what makes a measurement this one, without
    its round. same: settings that all measurements of a folder share.
    plan: all measurements that the arguments ask for, in order.
    measure: (multiprocessing's context, entry, settings, bytes, seconds, stop): a measurement, or {"failed": why not};
    None if `stop` came first.
    say: a measurement in a few words.
    write_report: (arguments, records, provenance): tables and pictures.
    """

    name: str
    module: str
    keys: tuple[str, ...]
    same: tuple[str, ...]
    plan: Callable[[argparse.Namespace], list[Entry]]
    measure: Callable[[Any, Entry, Mapping[str, Any], int, float, StopRequest], Any]
    say: Callable[[Mapping[str, Any]], str]
    write_report: Callable[[argparse.Namespace, Sequence[Mapping[str, Any]], Mapping[str, Any]], None]

    def entry_name(self, entry: Mapping[str, Any]) -> tuple[Any, ...]:
        """What makes a measurement this one, the round included."""
        return (*self.kind(entry), entry[ROUND])

    def kind(self, entry: Mapping[str, Any]) -> tuple[Any, ...]:
        """What makes a measurement this one in every round."""
        return tuple(entry[key] for key in self.keys)

    def todo(self, wanted: Sequence[Entry], records: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """What is wanted and not measured, and did not fail in an earlier round."""
        done = {self.entry_name(record) for record in records}
        failed = {self.kind(record) for record in records if "failed" in record}
        return [own for own in wanted if self.entry_name(own) not in done and self.kind(own) not in failed]


def in_turns(names: Sequence[str], number: int) -> list[str]:
    """The names in round `number`, which begins with another one than the round before."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def read_records(out: Path, settings: Mapping[str, Any]) -> list[Entry]:
    """The measurements of a folder so far, without those for which a package was missing: it may be there by now.

    Raises:
        ValueError: if they were taken with other settings, on another machine or with another version of a package, or
            are damaged.
    """
    path = out / RECORDS
    if not path.exists():
        return []
    content = read_json_object(path)
    stored, records = content.get("settings"), content.get("measured")
    if not isinstance(stored, dict) or not isinstance(records, list):
        raise ValueError(f"{path} is damaged; remove it or choose another --out")
    now = report.environment()
    before = content.get("versions") or {}
    both = {name: version for name, version in now["versions"].items() if name in before}  # of others nothing is said
    there = {**stored, "cpu": (content.get("hardware") or {}).get("cpu"), **before}
    if different := report.differences(there, {**settings, "cpu": now["hardware"]["cpu"], **both}):
        raise ValueError(f"{path} has other measurements ({different}); choose another --out")
    return [record for record in records if not record.get("missing")]


def may_take_more(record: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Whether a measurement that ended at a limit of time or memory has more of it by these arguments."""
    seconds, limit = record.get("limit_seconds"), record.get("limit_bytes")
    if limit is not None and arguments.memory_gib is not None:
        return bool(int(arguments.memory_gib * 2**30) > limit)
    return seconds is not None and bool(arguments.seconds > seconds)


# ---- summary --------------------------------------------------------------------------------------------------------


def rounds_by_kind(
    records: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> dict[tuple[Any, ...], dict[int, Mapping[str, Any]]]:
    """Measurements by what they measured, and by round."""
    groups: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), {})[record[ROUND]] = record
    return groups


def summary_row(rounds: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Spreads of seconds and of the ratio to the base in the same rounds, the largest peak of memory, backend; or why
    it failed.
    """
    row: dict[str, Any] = {}
    good = {number: record for number, record in rounds.items() if "failed" not in record}
    if len(good) < len(rounds):
        row["failed"] = next(record["failed"] for record in rounds.values() if "failed" in record)
    if not good:
        return row
    row["seconds"] = spread([record["seconds"] for record in good.values()])
    row["memory"] = max(record["memory"] for record in good.values())
    row["ran"] = next(iter(good.values()))["ran"]
    both = [number for number in good if number in base and "failed" not in base[number]]
    if both:
        own, other = ([part[number]["seconds"] for number in both] for part in (good, base))
        row["times_dense"] = ratio_spread(own, other)
        row["memory_times_dense"] = row["memory"] / max(base[number]["memory"] for number in both)
    return row


def ratio_text(ratio: Mapping[str, float] | None) -> str:
    """Median and quartiles of a ratio: "0.34 (0.33-0.36)"; "-" if there is none."""
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})" if ratio else "-"


def label_sizes(axis: Any, sizes: Sequence[int]) -> None:
    """A logarithmic axis of image sides, and plain numbers on the other one, which is logarithmic if it has lines."""
    axis.set_xscale("log")
    if any(len(line.get_xdata()) for line in axis.lines):
        axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(report.pyplot().NullLocator())
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def write_table(out: Path, heading: str, text: str) -> Path:
    """OUT/table.md."""
    write_text(out / TABLE, f"{heading}\n\n{text}\n")
    return out / TABLE


# ---- command --------------------------------------------------------------------------------------------------------


def check_arguments(arguments: argparse.Namespace) -> None:
    """What `add_arguments` asked for, checked, with --sizes.

    Raises:
        ValueError: for a value that is not allowed.
    """
    report.check_positive(rounds=arguments.rounds, seconds=arguments.seconds)
    for name in ("memory_gib", "for_seconds"):
        if getattr(arguments, name) is not None:
            report.check_positive(**{name: getattr(arguments, name)})
    for pixels in arguments.sizes:
        report.check_positive(sizes=pixels)


@contextlib.contextmanager
def sole_use(out: Path) -> Iterator[None]:
    """A folder, made if it is not there, in which no other process measures.

    Raises:
        ValueError: if one does.
    """
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK) as mine:
        if not mine:
            raise ValueError(f"--out={out} is in use by another process; wait for its end")
        yield


def kept_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """What records.json keeps of a benchmark's provenance."""
    return {key: about[key] for key in ("task", "benchmark", "command", "environment", "versions", "hardware")}


def measure_left(
    out: Path,
    content: Mapping[str, Any],
    records: list[Entry],
    left: Sequence[Any],
    measure: Callable[[Any], Entry],
    say: Callable[[Any, Entry], str],
) -> bool:
    """Measure what is left in this process, one after another, and keep each as soon as it is done.

    Args:
        content: of records.json besides the measurements. records: measurements so far, to which new ones are added.
        say: of an entry of `left` and its measurement, a line.

    Returns:
        Whether a signal stopped it before the end.
    """
    with StopRequest() as stop:
        for number, entry in enumerate(left, start=1):
            if stop.requested:
                break
            records.append(measure(entry))
            write_results(out / RECORDS, {**content, "measured": records})
            print(f"[{number}/{len(left)}] {say(entry, records[-1])}", flush=True)
        return stop.requested


def measure_into(arguments: argparse.Namespace, measurements: Measurements) -> None:
    """Measure what is missing in a folder that no other process measures in; then print, write and draw all of it.

    Raises:
        ValueError: if another process measures there.
        RunStopped: after SIGTERM.
    """
    with sole_use(arguments.out):
        _measure_all(arguments, measurements)


def _measure_all(arguments: argparse.Namespace, measurements: Measurements) -> None:
    settings = {key: getattr(arguments, key) for key in measurements.same}
    records = [own for own in read_records(arguments.out, settings) if not may_take_more(own, arguments)]
    left = measurements.todo(measurements.plan(arguments), records)
    about = report.provenance(measurements.name, arguments)
    kept = kept_of(about)
    report.print_provenance(about)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([measurements.module])
    end = time.monotonic() + (arguments.for_seconds or float("inf"))
    stopped = None
    with StopRequest() as stop:
        for number, entry in enumerate(left, start=1):
            if not measurements.todo([entry], records):  # it failed in an earlier round of this command
                continue
            if stop.requested or time.monotonic() > end:
                stopped = f"stopped with {len(left) - number + 1} of {len(left)} to do; the same command goes on"
                break
            limit = int((arguments.memory_gib or 0.75 * free_memory(torch.device("cpu")) / 2**30) * 2**30)
            found = measurements.measure(server, entry, settings, limit, arguments.seconds, stop)
            if found is None:
                continue
            records.append({**entry, **found, "load_average": os.getloadavg()[0]})
            write_results(arguments.out / RECORDS, {**kept, "settings": settings, "measured": records})
            said = found.get("failed") or measurements.say(found)
            name = " ".join(str(part) for part in measurements.entry_name(entry))
            print(f"[{number}/{len(left)}] {name}: {said}", flush=True)
        stopping = stop.requested
    if records:
        measurements.write_report(arguments, records, about)
    if stopping:
        raise RunStopped(stopped or "stopped")
    if stopped:
        print(stopped)
