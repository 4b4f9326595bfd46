"""Time and memory of attention: python -m tasks.benchmark.attention

Dense attention, every backend of the library and FlexAttention take turns in one process, together with the copy bound:
reading q, k, v and writing the output once. Every output is checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.patterns.supports import resolve_support
from tasks.benchmark import commands, report
from tasks.benchmark.contenders import (
    COPY,
    DENSE,
    FRESH_COPY,
    PASSES,
    Problem,
    Setting,
    Size,
    chosen_backend,
    contenders,
    copy_bound,
    make_problem,
    nearly_square,
    timed_call,
)
from tasks.benchmark.timing import Forecast, SetUp, free_memory, measure
from tasks.common.command import run_command
from tasks.common.results import write_results

COPIES = {
    COPY: "q, k, v read and the output written once, into allocated memory; with gradients, once more with theirs",
    FRESH_COPY: "the same into memory that each call allocates, as attention does",
}
GROWTH_SIZES = [Size(4096 << doubling, 1) for doubling in range(5)]
# The most memory that a call with gradients may take, in sizes of q, k, v and the output together.
MEMORY_TARGET = 3.0
# By device and dtype, for (tokens, batch): times faster than dense, forward and forward + backward; forward time in
# copy bounds. They are for the attention that the command measures by default.
TARGETS: dict[tuple[str, str], dict[Size, tuple[float | None, float | None, float | None]]] = {
    ("cpu", "float32"): {
        Size(196, 8): (15, 10, None),
        Size(1024, 2): (60, 40, 4),
        Size(4096, 1): (200, 120, 4),
        Size(16384, 1): (500, 300, 4),
    },
    ("cuda", "bfloat16"): {Size(4096, 1): (None, None, 3), Size(16384, 8): (15, 10, 3)},
}
# Settings that say which attention is measured.
ATTENTION = ("heads", "width", "support", "decay", "prefix_tokens", "layout")
# Tokens of the small calls from which time and memory of a large one are predicted.
PROBES = (512, 1024, 2048)


class Benchmark:
    """Measures contenders at sizes.

    Args:
        setting: what is computed.
        names: contenders; None means all.
        budget: seconds for the rounds of one size and pass.
        rounds: rounds at most.
    """

    def __init__(self, setting: Setting, names: Sequence[str] | None, budget: float, rounds: int) -> None:
        self.setting, self.budget, self.rounds = setting, budget, rounds
        known = contenders()
        for name in names or ():
            if name not in (*known, *COPIES):
                raise ValueError(f"--contenders: {name!r} must be one of {', '.join((*known, *COPIES))}")
        self.contenders = {name: known[name] for name in known if names is None or name in names}
        self.copies = [name for name in COPIES if names is None or name in names]
        self.forecasts: dict[tuple[str, bool], Forecast] = {}

    def at(self, size: Size, trains: bool, rounds: int | None = None, largest: Size | None = None) -> dict[str, Any]:
        """`timing.measure` of one size and pass, and the backend that the library chooses.

        Args:
            size: tokens and images.
            trains: forward and backward.
            rounds: 0 measures memory only; default: those of the benchmark.
            largest: leave out contenders that would need too much at this size.
        """
        problem = make_problem(self.setting, size, trains)
        set_ups: dict[str, SetUp] = {}
        unable: dict[str, str] = {}
        for name, contender in self.contenders.items():
            if reason := contender.can_run(problem, trains):
                unable[name] = reason
            else:
                set_ups[name] = partial(timed_call, problem, contender, trains)
        free = free_memory(self.setting.device)
        forecasts = {
            name: partial(self.too_much, name, largest or size, trains, free)
            for name in set_ups
            if max(size.tokens * size.batch, (largest or size).tokens) > PROBES[-1]
        }
        for name in self.copies:
            set_ups[name] = partial(copy_bound, problem, trains, fresh=name == FRESH_COPY)
        rounds = self.rounds if rounds is None else rounds
        measured = measure(set_ups, self.setting.device, self.budget, rounds, (DENSE, COPY), forecasts)
        measured["left_out"] = {**unable, **measured["left_out"]}
        return {"chooser_takes": chosen_backend(problem, trains), "input_bytes": input_bytes(problem), **measured}

    def too_much(self, name: str, size: Size, trains: bool, free: float) -> str | None:
        """Why a contender is left out at a size, or None."""

        def set_up_at(tokens: int) -> SetUp:
            problem = make_problem(self.setting, Size(tokens, 1), trains)
            return lambda: timed_call(problem, self.contenders[name], trains)

        if (name, trains) not in self.forecasts:
            self.forecasts[name, trains] = Forecast.of(set_up_at, PROBES, self.setting.device)
        return self.forecasts[name, trains].too_much(*size, self.budget, free)


def input_bytes(problem: Problem) -> int:
    """Size of q, k, v and the output together."""
    return 4 * problem.q.numel() * problem.q.element_size()


# ---- results --------------------------------------------------------------------------------------------------------


def fastest_backend(measured: Mapping[str, Any]) -> str | None:
    """The fastest of the registry's backends that was timed."""
    seconds = {
        name: entry["seconds"]["median"]
        for name, entry in measured["contenders"].items()
        if name in BACKENDS and "seconds" in entry
    }
    return min(seconds, key=lambda name: seconds[name]) if seconds else None


def size_table(measured: Mapping[str, Any]) -> str:
    """One row for each contender, the fastest first, then those left out."""
    rows = []
    entries = measured["contenders"]
    for name in sorted(entries, key=lambda name: entries[name].get("seconds", {}).get("median", 0.0)):
        entry, memory = entries[name], entries[name]["memory"]
        faster = 1 / entry[f"times_{DENSE}"]["median"] if f"times_{DENSE}" in entry else None
        bounds = entry[f"times_{COPY}"]["median"] if f"times_{COPY}" in entry else None
        timed = (
            [report.milliseconds(entry["seconds"]), str(entry["seconds"]["rounds"])] if "seconds" in entry else ["", ""]
        )
        rows.append(
            [
                name,
                *timed,
                "" if faster is None else f"{faster:.3g}",
                "" if bounds is None else f"{bounds:.3g}",
                *(["", "", ""] if name in COPIES else memory_cells(memory, measured["input_bytes"])),
            ]
        )
    header = [
        "",
        "ms (quartiles)",
        "rounds",
        "times faster than dense",
        "copy bounds",
        "MB a call",
        "MB kept",
        "of qkvo",
    ]
    lines = [report.text_table(header, rows)]
    lines += [f"left out: {name}, {reason}" for name, reason in measured["left_out"].items()]
    return "\n".join(lines)


def memory_cells(memory: Mapping[str, int], inputs: int) -> list[str]:
    """Peak of a call, what stays, and both in sizes of q, k, v and the output."""
    share = (memory["call"] + memory["kept"]) / inputs
    return [report.megabytes(memory["call"]), report.megabytes(memory["kept"]), f"{share:.2f}"]


def growth_fits(growth: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exponent of time against N, least squares in log-log, and that of N log N over the same sizes."""
    fits = []
    for key in PASSES:
        points: dict[str, list[tuple[int, float]]] = {}
        for entry in growth:
            for name, own in entry["passes"][key]["contenders"].items():
                points.setdefault(name, []).append((entry["tokens"], own["seconds"]["median"]))
        for name, own_points in points.items():
            if len(own_points) < 3:
                continue
            tokens, seconds = np.log(np.array(own_points)).T
            exponent = float(np.polyfit(tokens, seconds, 1)[0])
            limit = float(np.polyfit(tokens, tokens + np.log(tokens), 1)[0])
            sizes = [size for size, _ in own_points]
            fits.append({"contender": name, "pass": key, "exponent": exponent, "n_log_n": limit, "tokens": sizes})
    return fits


def compare_with_targets(results: Mapping[str, Any], device: str, dtype: str) -> list[dict[str, Any]]:
    """Every target for this attention, device and dtype, and what was reached ("value"; None if it was not measured).

    Speed is that of the fastest backend; memory and growth are looked at for every backend that was measured.
    """
    speed = [] if without_speed_targets(results["settings"]) else _speed_targets(results["sizes"], device, dtype)
    return [*speed, *_memory_targets(results), *_growth_targets(results)]


def without_speed_targets(settings: Mapping[str, Any]) -> str:
    """Why no target of speed is for this attention, in words; "" if they are."""
    wanted = vars(commands.attention().parse_args([]))
    other = [name for name in ATTENTION if settings[name] != wanted[name]]
    flags = [f"--{name.replace('_', '-')} {wanted[name]}, not {settings[name]}" for name in other]
    return f"targets of speed are for {'; '.join(flags)}" if flags else ""


def _target(at: str, key: str, what: str, limit: str, target: float, value: float | None, backend: str | None) -> dict:
    met = None if value is None else value <= target if limit == "at most" else value >= target
    row = {"at": at, "pass": key, "what": what, "limit": limit, "target": target}
    return {**row, "value": value, "backend": backend, "met": met}


def _speed_targets(sizes: Sequence[Mapping[str, Any]], device: str, dtype: str) -> list[dict[str, Any]]:
    measured = {Size(entry["tokens"], entry["batch"]): entry["passes"] for entry in sizes}
    rows = []
    for size, (forward, both, bounds) in TARGETS.get((device, dtype), {}).items():
        wanted = (("forward", DENSE, forward), ("forward_backward", DENSE, both), ("forward", COPY, bounds))
        for key, base, target in wanted:
            if target is None:
                continue
            backend = fastest_backend(measured[size][key]) if size in measured else None
            ratio = measured[size][key]["contenders"][backend].get(f"times_{base}") if backend else None
            value = None if ratio is None else ratio["median"] if base == COPY else 1 / ratio["median"]
            what = ("copy bounds", "at most") if base == COPY else ("times faster than dense", "at least")
            rows.append(_target(f"{size.tokens} x {size.batch}", key, *what, target, value, backend))
    return rows


def _memory_targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        _target(
            f"{entry['tokens']} x {entry['batch']}",
            "forward_backward",
            "memory in sizes of q, k, v, out",
            "at most",
            MEMORY_TARGET,
            (own["memory"]["call"] + own["memory"]["kept"]) / entry["passes"]["forward_backward"]["input_bytes"],
            name,
        )
        for entry in results["memory"]
        for name, own in entry["passes"]["forward_backward"]["contenders"].items()
        if name in BACKENDS
    ]


def _growth_targets(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        _target(
            f"{fit['tokens'][0]} to {fit['tokens'][-1]}",
            fit["pass"],
            "exponent of N, that of N log N",
            "at most",
            fit["n_log_n"],
            fit["exponent"],
            fit["contender"],
        )
        for fit in results["growth_fits"]
        if fit["contender"] in BACKENDS
    ]


def targets_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets as text."""
    verdict = {None: "", True: "met", False: "MISSED"}
    cells = [
        [
            row["at"],
            PASSES[row["pass"]],
            row["what"],
            f"{row['limit']} {row['target']:.3g}",
            "not measured" if row["value"] is None else f"{row['value']:.3g}",
            row["backend"] or "",
            verdict[row["met"]],
        ]
        for row in rows
    ]
    return report.text_table(["N x batch", "pass", "what", "target", "measured", "backend", ""], cells)


def panels(sizes: Sequence[Mapping[str, Any]]) -> dict[str, report.Panel]:
    """Time an image over N, one panel a pass."""
    drawn = {}
    for key, title in PASSES.items():
        lines: dict[str, report.Line] = {}
        for entry in sizes:
            for name, own in entry["passes"][key]["contenders"].items():
                if name == FRESH_COPY:
                    continue
                lines.setdefault(name, []).append((entry["tokens"], report.an_image(own["seconds"], entry["batch"])))
        best = fastest_backend(sizes[-1]["passes"][key])
        remark = report.crossover_text(best, lines[best], lines[DENSE], "tokens") if best and DENSE in lines else ""
        drawn[key] = report.Panel(title, lines, DENSE, COPY, best, remark)
    return drawn


# ---- command --------------------------------------------------------------------------------------------------------


def setting_of(arguments: argparse.Namespace) -> Setting:
    """What is computed, checked.

    Raises:
        ValueError: for values that do not fit.
    """
    report.check_positive(
        heads=arguments.heads, width=arguments.width, rounds=arguments.rounds, budget=arguments.budget
    )
    if arguments.prefix_tokens < 0:
        raise ValueError(f"--prefix-tokens {arguments.prefix_tokens} must be 0 or more")
    dtype, device = report.machine_of(arguments)
    return Setting(
        heads=arguments.heads,
        width=arguments.width,
        support=report.from_yaml("--support", arguments.support),
        decay=report.from_yaml("--decay", arguments.decay),
        prefix=arguments.prefix_tokens,
        dtype=dtype,
        layout=arguments.layout,
        device=device,
    )


def run(arguments: argparse.Namespace) -> bool:
    """Measure, print, write and draw. Returns whether every output was right."""
    report.check_file(arguments.out)
    setting = setting_of(arguments)
    names = None if arguments.contenders is None else arguments.contenders.split(",")
    benchmark = Benchmark(setting, names, arguments.budget, arguments.rounds)
    sizes = [Size(*pair) for pair in report.parse_sizes("--sizes", arguments.sizes)]
    memory_sizes = [Size(*pair) for pair in report.parse_sizes("--memory", arguments.memory)]
    growth_sizes = GROWTH_SIZES if arguments.growth else []
    for size in (*sizes, *memory_sizes, *growth_sizes):
        resolve_support(setting.support, setting.heads, size.tokens, nearly_square(size.tokens))
    results = report.provenance("attention", arguments)
    earlier = [] if arguments.also is None else earlier_sizes(arguments.also, results)
    report.print_provenance(results)
    print_contenders(benchmark)
    results["sizes"] = [measure_size(benchmark, size) for size in sizes]
    results["memory"] = [measure_size(benchmark, size, rounds=0) for size in memory_sizes]
    results["growth"] = [measure_size(benchmark, size, largest=growth_sizes[-1]) for size in growth_sizes]
    results["growth_fits"] = growth_fits(results["growth"])
    drawn = panels(sorted([*earlier, *results["sizes"]], key=lambda entry: entry["tokens"])) if sizes else {}
    results["crossovers"] = {
        key: {name: place[0] for name, place in panel.crossovers().items()} for key, panel in drawn.items()
    }
    results["targets"] = []
    if arguments.targets:
        results["targets"] = compare_with_targets(results, setting.device.type, arguments.dtype)
    print_conclusions(results)
    write_results(arguments.out, results)
    print(f"\n{arguments.out}")
    if sizes:
        of = f"{arguments.heads} heads x {arguments.width}, {arguments.dtype}"
        heading = f"attention, {of}, {report.machine(results, setting.device.type)}"
        print(report.draw_times([list(drawn.values())], arguments.out.with_suffix(".png"), heading, "patch tokens N"))
    return not any_wrong(results)


ALIKE = (*ATTENTION, "dtype", "device", "threads", "keep_memory", "cpu")


def earlier_sizes(path: Path, now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run measured, of the same attention on the same processor as this run (`now`, its provenance).

    Raises:
        ValueError: if the file is not one of this command's, or of another attention.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--also {path} is not JSON: {error}") from None
    if not isinstance(results, dict) or results.get("benchmark") != "attention":
        raise ValueError(f"--also {path} must be a results file of tasks.benchmark.attention")
    there, here = ({**one["settings"], "cpu": one["hardware"].get("cpu")} for one in (results, now))
    if different := report.differences(there, {key: here.get(key) for key in ALIKE}):
        raise ValueError(f"--also {path} is of another attention ({different})")
    return results["sizes"]


def print_conclusions(results: Mapping[str, Any]) -> None:
    """Exponents and targets, where they were asked for."""
    for fit in results["growth_fits"]:
        first, last = fit["tokens"][0], fit["tokens"][-1]
        growth = f"time grows as N^{fit['exponent']:.2f} from {first} to {last} tokens"
        print(f"{fit['contender']}, {PASSES[fit['pass']]}: {growth} (N log N: {fit['n_log_n']:.2f})")
    if results["targets"]:
        print("\n" + targets_table(results["targets"]))
    if results["settings"]["targets"]:
        if why := without_speed_targets(results["settings"]):
            print(f"\n{why}")
        elif not results["targets"]:
            print(f"\nno targets for {results['settings']['dtype']} on {results['settings']['device']}")


def print_contenders(benchmark: Benchmark) -> None:
    """What each name stands for."""
    for name, contender in benchmark.contenders.items():
        print(f"  {name}: {contender.about}")
    for name in benchmark.copies:
        print(f"  {name}: {COPIES[name]}")


def measure_size(benchmark: Benchmark, size: Size, **options: Any) -> dict[str, Any]:
    """Both passes of one size, printed."""
    passes = {}
    for key, title in PASSES.items():
        passes[key] = benchmark.at(size, key == "forward_backward", **options)
        choice = f"the chooser takes {passes[key]['chooser_takes']}"
        if (fastest := fastest_backend(passes[key])) is not None:
            choice += f", the fastest backend is {fastest}"
        print(f"\n{size.tokens} tokens x {size.batch}, {title}; {choice}\n{size_table(passes[key])}", flush=True)
    return {"tokens": size.tokens, "batch": size.batch, "passes": passes}


def any_wrong(results: Mapping[str, Any]) -> bool:
    """Whether a contender was left out because its output was wrong."""
    entries = (*results["sizes"], *results["memory"], *results["growth"])
    reasons = (reason for entry in entries for own in entry["passes"].values() for reason in own["left_out"].values())
    return any(reason.startswith("WRONG") for reason in reasons)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2, a wrong output returns 1."""
    parser = commands.attention()
    arguments = parser.parse_args(argv)
    right: list[bool] = []
    status = run_command(parser.prog, lambda: right.append(run(arguments)))
    return status or int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
