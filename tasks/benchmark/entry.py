"""What an entry of the benchmark is: what it measures, how, and what its table says besides.

A case is one contender at one size: a dict of `keys`. Cases that are compared with each other take turns. Its record is
the case with what was found: "seconds" (a list, of all rounds; or one number of "round"), "memory" (bytes beyond inputs
and weights), "ran"; or "failed" (why not).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_sparseprior.training import StopRequest
from tasks.benchmark import lone_process
from tasks.benchmark.report import check_machine, set_cpu
from tasks.benchmark.timing import SetUp, free_memory, measure

Case = dict[str, Any]
Row = Mapping[str, Any]


class WrongOutput(RuntimeError):
    """What is to be timed gives something else than it should: nothing is timed then."""


@dataclass
class Session:
    """What measuring has at hand: the command's arguments, the folder's settings and records, what stops it, and
    multiprocessing's context.
    """

    arguments: argparse.Namespace
    settings: Mapping[str, Any]
    records: list[Case]
    stop: StopRequest
    server: Any = None
    forecasts: dict[Any, Any] = field(default_factory=dict)  # of what contenders would need, as entries name them
    until_the_end: ExitStack = field(default_factory=ExitStack)  # what the command closes

    @property
    def device(self) -> torch.device:
        """Where calls run."""
        return torch.device(self.arguments.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return getattr(torch, self.arguments.dtype)

    @property
    def limit(self) -> int:
        """Bytes that a process may have."""
        share = 0.75 * free_memory(torch.device("cpu")) / 2**30
        return int((self.arguments.memory_gib or share) * 2**30)

    def alone(self, function: Callable[..., Case], case: Case) -> list[Case] | None:
        """`function` of a case and the settings, in a process of its own; None if a stop came first."""
        given = (case, self.settings)
        found = lone_process.measured_alone(self.server, function, given, self.limit, self.arguments.seconds, self.stop)
        return None if found is None else [{**case, **found}]

    def in_turns(
        self,
        cases: Sequence[Case],
        set_ups: Mapping[str, SetUp],
        unable: Mapping[str, str] | None = None,
        forecasts: Mapping[str, Callable[[], str | None]] | None = None,
    ) -> list[Case]:
        """Contenders in this process, which take turns in rounds.

        Args:
            cases: one for each contender, in the order of `set_ups` and `unable`, which have them by name.
            set_ups: as `timing.measure` takes them. unable: why others cannot run. forecasts: as there.
        """
        arguments, failed = self.arguments, {name: {"failed": reason} for name, reason in (unable or {}).items()}
        found = measure(set_ups, self.device, arguments.seconds, arguments.rounds, forecasts or {})
        names = [next(reversed(case.values())) for case in cases]
        return [{**case, **(failed | found)[name]} for case, name in zip(cases, names, strict=True)]


@dataclass
class Target:
    """A limit of rows of the table: their ratio to a base at most; at least how many times faster, if `faster`.

    where: which rows. value: "times" or "memory_times". among: contenders; (): all. fastest: only the best of them.
    says: the limit in words, where it is no ratio.
    """

    where: Mapping[str, Any]
    base: str
    limit: float
    value: str = "times"
    faster: bool = False
    among: tuple[str, ...] = ()
    fastest: bool = False
    says: str = ""

    def reached(self, rows: Sequence[Row]) -> dict[str, float]:
        """What contenders have, by name and size."""
        found: dict[str, float] = {}
        for row in rows:
            *size, name = (row[key] for key in row["keys"])
            ratio = row[self.value].get(self.base)
            if self.where.items() <= row.items() and ratio is not None and (not self.among or name in self.among):
                value = ratio["median"] if self.value == "times" else ratio
                found[" ".join(map(str, (*size, name)))] = 1 / value if self.faster else value
        if self.fastest and found:
            best = (max if self.faster else min)(found, key=lambda name: found[name])
            return {best: found[best]}
        return found

    def is_met(self, value: float) -> bool:
        """Whether a value keeps the limit."""
        return value >= self.limit if self.faster else value <= self.limit


@dataclass
class Benchmark:
    """An entry.

    name: as the command line has it. keys: what makes a case this one; the last one is the contender. same: settings
    that all measurements of a folder share, besides those of the machine. bases: contenders that ratios are to. size:
    the key on the picture's x axis; "" draws a bar for each row. by_base: whether the picture has ratios to the first
    base. one_cpu: whether all measurements of a folder are of one CPU. attempts: how often a cell may begin that never
    ends, because it hangs or takes the process with it; None: any number of times.
    """

    name: str
    keys: tuple[str, ...]
    same: tuple[str, ...] = ()
    machine: tuple[str, ...] = ("dtype", "device", "threads", "keep_memory")
    bases: tuple[str, ...] = ()
    size: str = ""
    by_base: bool = True
    one_cpu: bool = True
    attempts: int | None = None
    columns: dict[str, Callable[[Row], str]] = field(default_factory=dict)
    only_these_columns: bool = False
    bar: tuple[str, Callable[[Row], float | None]] | None = None  # what a bar is, and its length

    def variant(self, arguments: argparse.Namespace) -> Benchmark:
        """The entry that options ask for instead of this one."""
        return self

    def check(self, arguments: argparse.Namespace) -> None:
        """Raise ValueError for options that are not allowed, before anything is measured."""

    def check_records(self, records: Sequence[Case], arguments: argparse.Namespace) -> None:
        """Raise ValueError for measurements of a folder that do not go with the options."""

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Cases that are measured together, in order."""
        raise NotImplementedError

    def measure(self, cases: list[Case], session: Session) -> list[Case] | None:
        """Their records; None if a stop came first."""
        raise NotImplementedError

    def expected_seconds(self, cases: Sequence[Case], records: Sequence[Case]) -> float:
        """What cases will take, from the records so far; they do not begin if less time is left."""
        return 0.0

    def goes_with_size(self, key: str) -> bool:
        """Whether a key says no more than the size does, such as how many images of it there are."""
        return key in ("batch", "images")

    def instead(self, arguments: argparse.Namespace) -> Callable[[], None] | None:
        """What options ask for instead of measurements; None if they do not."""
        return None

    def shown(self, records: Sequence[Case], settings: Mapping[str, Any]) -> Sequence[Case]:
        """The records that the table is made of."""
        return records

    def complete_all(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add to the rows of the table what depends on several."""

    def complete(self, row: dict[str, Any]) -> None:
        """Add to a row of the table."""

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What stands below the table."""
        return ""

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """The project's targets that are for these settings."""
        return ()

    def convert(self, content: dict[str, Any]) -> dict[str, Any]:
        """A records file of an earlier version in today's form."""
        return content

    def check_all(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """All options checked, and the machine set up by them. Returns the settings that all measurements share."""
        check_machine(arguments)
        self.check(arguments)
        set_cpu(arguments.threads, arguments.keep_memory)
        arguments.threads = arguments.threads or torch.get_num_threads()
        return {key: getattr(arguments, key) for key in (*self.machine, *self.same)}


def turned(names: Sequence[str], number: int) -> list[str]:
    """The names in round `number`, which begins with another one than the round before."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order."""
    return list(dict.fromkeys(values))
