"""Time and memory of attention.

Dense attention, every backend of the library, FlexAttention and sliding windows take turns in one process, together
with the copy bound: reading q, k, v and writing the output once. Every output and gradient is compared with attention
in float64 before it is timed; a wrong contender is not timed, and the command ends with status 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.patterns.supports import resolve_support
from tasks.benchmark import report
from tasks.benchmark.commands import ATTENTION_SUPPORT
from tasks.benchmark.contenders import (
    COPY,
    DENSE,
    FRESH_COPY,
    Setting,
    Size,
    chosen_backend,
    contenders,
    copy_bound,
    make_problem,
    nearly_square,
    timed_call,
)
from tasks.benchmark.entry import Benchmark, Case, Row, Session, Target
from tasks.benchmark.timing import Forecast, SetUp, free_memory

COPIES = (COPY, FRESH_COPY)
FORWARD, BOTH = PASSES = ("forward", "forward and backward")
GROWTH_SIZES = [Size(4096 << doubling, 1) for doubling in range(5)]
# Tokens of the small calls from which time and memory of a large one are predicted.
PROBES = (512, 1024, 2048)
INPUTS = "q, k, v and the output"
# The most memory that a call with gradients may take, in sizes of q, k, v and the output together.
MEMORY_TARGET = 3.0
# By device and dtype, for (tokens, batch): times faster than dense, forward, forward and backward; forward time in copy
# bounds. They are for the default attention.
TARGETS: dict[tuple[str, str], dict[Size, tuple[float | None, float | None, float | None]]] = {
    ("cpu", "float32"): {
        Size(196, 8): (15, 10, None),
        Size(1024, 2): (60, 40, 4),
        Size(4096, 1): (200, 120, 4),
        Size(16384, 1): (500, 300, 4),
    },
    ("cuda", "bfloat16"): {Size(4096, 1): (None, None, 3), Size(16384, 8): (15, 10, 3)},
}
DEFAULT = {
    **{"heads": 12, "width": 64, "support": ATTENTION_SUPPORT, "decay": "none"},
    **{"prefix_tokens": 0, "layout": "projection"},
}


def setting_of(settings: Mapping[str, Any]) -> Setting:
    """What is computed."""
    return Setting(
        heads=settings["heads"],
        width=settings["width"],
        support=report.from_yaml("--support", settings["support"]),
        decay=report.from_yaml("--decay", settings["decay"]),
        prefix=settings["prefix_tokens"],
        dtype=getattr(torch, settings["dtype"]),
        layout=settings["layout"],
        device=torch.device(settings["device"]),
    )


def sizes_of(arguments: argparse.Namespace) -> list[Size]:
    """What --sizes and --growth ask for."""
    asked = [Size(*pair) for pair in report.parse_sizes("--sizes", arguments.sizes)]
    return [*asked, *(size for size in GROWTH_SIZES if arguments.growth and size not in asked)]


class Attention(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """--sizes, --contenders and what is computed."""
        report.check_positive(heads=arguments.heads, width=arguments.width)
        if arguments.prefix_tokens < 0:
            raise ValueError(f"--prefix-tokens {arguments.prefix_tokens} must be 0 or more")
        setting, known = setting_of(vars(arguments)), (*contenders(), *COPIES)
        for name in (arguments.contenders or "").split(",") if arguments.contenders else ():
            if name not in known:
                raise ValueError(f"--contenders: {name!r} must be one of {', '.join(known)}")
        for size in sizes_of(arguments):
            resolve_support(setting.support, setting.heads, size.tokens, nearly_square(size.tokens))
            make_problem(setting, Size(4, 1), False)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Both passes of each size, all contenders together."""
        names = arguments.contenders.split(",") if arguments.contenders else [*contenders(), *COPIES]
        for tokens, batch in sizes_of(arguments):
            for key in PASSES:
                yield [{"tokens": tokens, "batch": batch, "pass": key, "contender": name} for name in names]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """All contenders in turns; the output of each is checked first."""
        size, trains = Size(cases[0]["tokens"], cases[0]["batch"]), cases[0]["pass"] == BOTH
        known, names = contenders(), [case["contender"] for case in cases]
        setting = setting_of(vars(session.arguments))
        problem = make_problem(setting, size, trains)
        unable = {name: reason for name in names if name in known and (reason := known[name].can_run(problem, trains))}
        able = [name for name in names if name not in unable]
        set_ups: dict[str, SetUp] = {
            name: partial(copy_bound, problem, trains, fresh=name == FRESH_COPY)
            if name in COPIES
            else partial(timed_call, problem, known[name], trains)
            for name in able
        }

        def too_much(name: str) -> str | None:
            def set_up_at(tokens: int) -> SetUp:
                small = make_problem(setting, Size(tokens, 1), trains)
                return lambda: timed_call(small, known[name], trains)

            if (name, trains) not in session.forecasts:
                session.forecasts[name, trains] = Forecast.of(set_up_at, PROBES, session.device)
            free = free_memory(session.device)
            return session.forecasts[name, trains].too_much(*size, session.arguments.seconds, free)

        large = size.tokens * size.batch > PROBES[-1]
        forecasts = {name: partial(too_much, name) for name in able if large and name not in COPIES}
        found = session.in_turns(cases, set_ups, unable, forecasts)
        inputs, chosen = 4 * problem.q.numel() * problem.q.element_size(), chosen_backend(problem, trains)
        return [{**own, "inputs": inputs, **({"chosen": True} if own["contender"] == chosen else {})} for own in found]

    def complete(self, row: dict[str, Any]) -> None:
        """Memory in sizes of q, k, v and the output."""
        if "memory" in row and row["contender"] not in COPIES:
            row["memory_times"][INPUTS] = row["memory"] / row["records"][-1]["inputs"]

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """Of speed for the fastest backend, if the attention is the default one; of memory for every backend."""
        backends = tuple(BACKENDS)
        if all(settings[name] == value for name, value in DEFAULT.items()):
            for size, limits in TARGETS.get((settings["device"], settings["dtype"]), {}).items():
                rows = zip((FORWARD, BOTH, FORWARD), (DENSE, DENSE, COPY), limits, strict=True)
                for key, base, limit in (row for row in rows if row[2] is not None):
                    where = {**size._asdict(), "pass": key}
                    yield Target(where, base, float(limit or 0), faster=base == DENSE, among=backends, fastest=True)
        yield Target({"pass": BOTH}, INPUTS, MEMORY_TARGET, value="memory_times", among=backends)

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """Exponents of the growth of time, where enough large sizes were measured."""
        lines = []
        for fit in growth_fits(rows):
            first, last = fit["tokens"][0], fit["tokens"][-1]
            growth = f"time grows as N^{fit['exponent']:.2f} from {first} to {last} tokens"
            lines.append(f"{fit['contender']}, {fit['pass']}: {growth} (N log N: {fit['n_log_n']:.2f})")
        return "\n".join(f"- {line}" for line in lines)


def growth_fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Exponent of time against N, least squares in log-log, and that of N log N over the same sizes: of one image from
    4096 tokens on.
    """
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if "seconds" in row and row["batch"] == 1 and row["tokens"] >= GROWTH_SIZES[0].tokens:
            points.setdefault((row["contender"], row["pass"]), []).append((row["tokens"], row["seconds"]["median"]))
    fits = []
    for (name, key), own in points.items():
        if len(own) >= 3:
            tokens, seconds = np.log(np.array(sorted(own))).T
            exponent = float(np.polyfit(tokens, seconds, 1)[0])
            limit = float(np.polyfit(tokens, tokens + np.log(tokens), 1)[0])
            sizes = sorted(size for size, _ in own)
            fits.append({"contender": name, "pass": key, "exponent": exponent, "n_log_n": limit, "tokens": sizes})
    return fits


BENCHMARK = Attention(
    name="attention",
    keys=("tokens", "batch", "pass", "contender"),
    same=tuple(DEFAULT),
    bases=(DENSE, COPY),
    size="tokens",
    columns={
        "of qkvo": lambda row: report.ratio_cell(row["memory_times"].get(INPUTS)),
        "chosen": lambda row: "chosen" if row["records"][-1].get("chosen") else "",
    },
)
