"""How good the choice of the backend is.

It draws settings of attention (support, decay, patches, images, heads, width, dtype, with and without gradients), times
every backend of the library that can run them, all in turns, and says how much slower than the fastest the chosen one
is. An output that is wrong ends the comparison of that backend, as in `attention`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hf_sparseprior.attention.choice import BACKENDS
from tasks.benchmark import report
from tasks.benchmark.contenders import Problem, Setting, Size, chosen_backend, contenders, make_problem, timed_call
from tasks.benchmark.entry import Benchmark, Case, Row, Session
from tasks.benchmark.timing import ratio_spread, spread

ALLOWED = 1.1  # times the fastest
SUPPORTS: tuple[Any, ...] = (
    "fibottention",
    {"name": "fibottention", "w_min": 5, "w_max": 65},
    {"name": "fibottention", "modified": True},
    "bigbird",
    "window",
    "strided",
    "dense",
)
TOKENS = (9, 16, 36, 49, 100, 196, 400, 576, 1024)
ROWS = 4096  # patches of all images of a setting, at most
MOST_PAIRS = 2**24  # of all images and heads, so that the dense backends end in seconds


def draw_settings(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` settings, always the same for a seed; the first of more are those of fewer."""
    own = random.Random(seed)
    drawn: list[dict[str, Any]] = []
    while len(drawn) < count:
        support = own.choice(SUPPORTS)
        setting = {
            "support": support,
            "decay": "violin" if support == "dense" else own.choice((None, "violin")),
            "tokens": own.choice(TOKENS),
            "batch": own.choice((1, 2, 4, 8)),
            "heads": own.choice((3, 6, 12)),
            "width": own.choice((32, 64)),
            "prefix": own.choice((0, 1)),
            "dtype": own.choice(("float32", "bfloat16")),
            "trains": own.choice((False, True)),
        }
        pairs = setting["batch"] * setting["heads"] * setting["tokens"] ** 2
        if setting["tokens"] * setting["batch"] <= ROWS and pairs <= MOST_PAIRS and setting not in drawn:
            drawn.append(setting)
    return drawn


def problem_of(setting: Mapping[str, Any], device: torch.device) -> Problem:
    """The inputs of a setting."""
    own = {key: setting[key] for key in ("support", "decay", "heads", "width", "prefix")}
    dtype = getattr(torch, setting["dtype"])
    size = Size(setting["tokens"], setting["batch"])
    return make_problem(Setting(dtype=dtype, device=device, **own), size, setting["trains"])


class Chooser(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """How many settings, and the seed."""
        report.check_positive(settings=arguments.settings, rounds=arguments.rounds)
        if arguments.seed < 0:
            raise ValueError(f"--seed={arguments.seed} must be 0 or more")

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """A case for each setting."""
        return [[{"setting": setting}] for setting in draw_settings(arguments.settings, arguments.seed)]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """What is chosen, milliseconds of every backend, and how much longer than the fastest the chosen one takes."""
        setting, known = cases[0]["setting"], contenders()
        trains, problem = setting["trains"], problem_of(setting, session.device)
        able = [name for name in BACKENDS if known[name].can_run(problem, trains) is None]
        set_ups = {name: partial(timed_call, problem, known[name], trains) for name in able}
        found = {own["backend"]: own for own in session.in_turns([{"backend": name} for name in able], set_ups)}
        chosen, timed = (
            chosen_backend(problem, trains),
            {n: own["seconds"] for n, own in found.items() if "seconds" in own},
        )
        left_out = {name: own["failed"] for name, own in found.items() if "failed" in own}
        if chosen not in timed:
            return [{**cases[0], "chosen": chosen, "failed": left_out.get(chosen, "was not timed")}]
        ratios = {name: ratio_spread(values, timed[chosen])["median"] for name, values in timed.items()}
        best = min(ratios, key=lambda name: ratios[name])
        milliseconds = {name: 1e3 * spread(values)["median"] for name, values in timed.items()}
        own = {"chosen": chosen, "best": best, "slower": 1 / ratios[best], "rounds": len(timed[chosen])}
        return [{**cases[0], **own, "milliseconds": milliseconds, "left_out": left_out}]

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """How many choices are good."""
        within = sum(record.get("slower", float("inf")) <= ALLOWED for record in records)
        return f"{within} of {len(records)} choices take at most {ALLOWED} times the time of the fastest backend."


def times_of(row: Row) -> str:
    """Milliseconds of all backends, the fastest first."""
    times = row["records"][0]["milliseconds"]
    return ", ".join(f"{key} {times[key]:.3g}" for key in sorted(times, key=lambda key: times[key]))


BENCHMARK = Chooser(
    name="chooser",
    keys=("setting",),
    machine=("device", "threads", "keep_memory"),
    same=("seed",),
    only_these_columns=True,
    columns={
        "chosen": lambda row: row["records"][0]["chosen"],
        "fastest": lambda row: row["records"][0]["best"],
        "times the fastest": lambda row: f"{row['records'][0]['slower']:.2f}",
        "ms": times_of,
    },
    bar=("time of the chosen backend, times that of the fastest", lambda row: row["records"][0]["slower"]),
)
