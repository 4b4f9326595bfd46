"""How good the choice of the backend is: python -m tasks.benchmark.chooser

It draws settings of attention (support, decay, patches, images, heads, width, dtype, with and without gradients), times
every backend of the library that can run them, all in turns, and says how much slower than the fastest the chosen one
is. An output that is wrong ends the comparison of that backend, as in `tasks.benchmark.attention`.

OUT/records.json holds every setting as soon as it is done, OUT/table.md all of them, OUT/chooser.png a picture. The
same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.analysis import pictures
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.base.files import write_text
from tasks.benchmark import commands, report
from tasks.benchmark.contenders import Problem, Setting, Size, chosen_backend, contenders, make_problem, timed_call
from tasks.benchmark.records import TABLE, kept_of, measure_left, read_records, sole_use
from tasks.benchmark.timing import measure
from tasks.common.command import RunStopped, run_command
from tasks.common.tables import markdown_table

PICTURE = "chooser.png"
SAME = ("device", "threads", "keep_memory", "seed")
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


def draw(count: int, seed: int) -> list[dict[str, Any]]:
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


def measured(setting: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is chosen, milliseconds of every backend, and how much longer than the fastest the chosen one takes."""
    device, trains = torch.device(arguments.device), setting["trains"]
    problem, known = problem_of(setting, device), contenders()
    able = [name for name in BACKENDS if known[name].can_run(problem, trains) is None]
    set_ups = {name: partial(timed_call, problem, known[name], trains) for name in able}
    chosen = chosen_backend(problem, trains)
    found = measure(set_ups, device, arguments.budget, arguments.rounds, (chosen,), {})
    own = {name: entry for name, entry in found["contenders"].items() if "seconds" in entry}
    if chosen not in own:
        return {"chosen": chosen, "failed": found["left_out"].get(chosen, "was not timed")}
    best = min(own, key=lambda name: own[name][f"times_{chosen}"]["median"])
    return {
        "chosen": chosen,
        "best": best,
        "slower": 1 / own[best][f"times_{chosen}"]["median"],
        "rounds": own[chosen]["seconds"]["rounds"],
        "milliseconds": {name: 1e3 * entry["seconds"]["median"] for name, entry in own.items()},
        "left_out": found["left_out"],
        "load_average": os.getloadavg()[0],
    }


def name_of(setting: Mapping[str, Any]) -> str:
    """A setting in a cell of the table."""
    support = setting["support"]
    parts = [support if isinstance(support, str) else " ".join(str(value) for value in support.values())]
    parts += [setting["decay"]] if setting["decay"] else []
    return f"{'+'.join(parts)}, {setting['tokens']}+{setting['prefix']} x {setting['batch']}, " + (
        f"{setting['heads']} x {setting['width']}, {setting['dtype']}, {'training' if setting['trains'] else 'forward'}"
    )


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each setting, the worst choice first."""
    rows = []
    for record in sorted(records, key=lambda record: -record.get("slower", float("inf"))):
        name = name_of(record["setting"])
        if "failed" in record:
            rows.append([name, record["chosen"], record["failed"], "", ""])
            continue
        times = record["milliseconds"]
        rows.append(
            [
                name,
                record["chosen"],
                record["best"],
                f"{record['slower']:.2f}",
                ", ".join(f"{key} {times[key]:.3g}" for key in sorted(times, key=lambda key: times[key])),
            ]
        )
    return markdown_table(["setting", "chosen", "fastest", "times the fastest", "ms"], rows)


def draw_picture(records: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Times the fastest of every setting, in order."""
    figure, axes = pictures.pyplot().subplots(figsize=(7, 0.6 + 0.22 * len(records)))
    ordered = sorted((record for record in records if "slower" in record), key=lambda record: record["slower"])
    colors = ["#3182bd" if record["slower"] <= ALLOWED else "#e6550d" for record in ordered]
    slower = [record["slower"] for record in ordered]
    axes.barh([name_of(record["setting"]) for record in ordered], slower, color=colors)
    axes.axvline(ALLOWED, color="0.4", linewidth=0.8)
    axes.set_xlim(left=0.9)
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("time of the chosen backend, times that of the fastest")
    axes.set_title(heading, fontsize=8)
    return pictures.save(figure, path)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is left, and write table and picture."""
    report.check_positive(settings=arguments.settings, rounds=arguments.rounds, budget=arguments.budget)
    if arguments.seed < 0:
        raise ValueError(f"--seed={arguments.seed} must be 0 or more")
    report.machine_of(arguments)
    with sole_use(arguments.out):
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """`run` in a folder that no other process measures in."""
    settings = {key: getattr(arguments, key) for key in SAME}
    records = read_records(arguments.out, settings)
    done = {json.dumps(record["setting"], sort_keys=True) for record in records}
    wanted = draw(arguments.settings, arguments.seed)
    left = [setting for setting in wanted if json.dumps(setting, sort_keys=True) not in done]
    about = report.provenance("chooser", arguments)
    report.print_provenance(about)

    def measure(setting: dict[str, Any]) -> dict[str, Any]:
        return {"setting": setting, **measured(setting, arguments)}

    def say(setting: dict[str, Any], record: dict[str, Any]) -> str:
        said = record.get("failed") or f"{record['chosen']}, {record['slower']:.2f} of {record['best']}"
        return f"{name_of(setting)}: {said}"

    content = {**kept_of(about), "settings": settings}
    stopped = measure_left(arguments.out, content, records, left, measure, say)
    if records:
        write_report(arguments, records, about)
    if stopped:
        raise RunStopped("stopped; the same command goes on")


def write_report(arguments: argparse.Namespace, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Table and picture of the settings, and the table printed."""
    within = sum(record.get("slower", float("inf")) <= ALLOWED for record in records)
    line = f"{within} of {len(records)} choices take at most {ALLOWED} times the time of the fastest backend."
    machine, text = report.machine(about, arguments.device), table(records)
    write_text(arguments.out / TABLE, f"{machine}. {line}\n\n{text}\n")
    picture = draw_picture(records, arguments.out / PICTURE, f"{line}\n{machine}")
    print(f"\n{text}\n\n{line}\n{arguments.out / TABLE}, {picture}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.chooser()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
