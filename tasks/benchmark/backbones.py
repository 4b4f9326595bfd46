"""Time and memory of backbones at the sizes of dense prediction: python -m tasks.benchmark.backbones

A forward pass of one image without gradients, as `backbone` of mmsegmentation and mmdetection runs it. Every
measurement is a process of its own: it makes the model and the image, calls once to make tables, and then times calls.
Memory is what torch allocates beyond model and image: tables that stay, and the peak of a call. Rounds go through all
sizes, models and priors and then start again, so that an early end leaves a fair comparison, and ratios to dense are
taken round by round.

OUT/records.json holds every measurement as soon as it is done, OUT/table.md the medians, OUT/backbones.png a picture.
The same command goes on where it was stopped; more models, priors, sizes or rounds may be asked for then. A measurement
that needs more memory or time than allowed leaves the reason instead, and is not tried in later rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.families import preset_family
from hf_sparseprior.files import read_json_object, write_text
from hf_sparseprior.training import StopRequest
from tasks.benchmark import backbone_process, report
from tasks.benchmark.model import DENSE, preset_config
from tasks.benchmark.timing import free_memory, ratio_spread, spread
from tasks.common.command import RunStopped, run_command
from tasks.common.locks import locked
from tasks.common.results import write_results
from tasks.common.tables import markdown_table

PRIORS = (DENSE, "fibottention", "violin", "fibottention+violin")
RECORDS, TABLE, PICTURE, LOCK = "records.json", "table.md", "backbones.png", "run.lock"
SAME = ("dtype", "device", "threads", "keep_memory")  # settings that all measurements of a folder share
KEYS = ("model", "prior", "pixels", "round")  # what makes a measurement this one


# ---- a folder of measurements ---------------------------------------------------------------------------------------


def read_records(out: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measurements of a folder so far.

    Raises:
        ValueError: if they were taken with other settings or on another machine, or are damaged.
    """
    path = out / RECORDS
    if not path.exists():
        return []
    content = read_json_object(path)
    stored, records = content.get("settings"), content.get("measured")
    if not isinstance(stored, dict) or not isinstance(records, list):
        raise ValueError(f"{path} is damaged; remove it or choose another --out")
    cpu = report.environment()["hardware"]["cpu"]
    pairs = [(key, stored.get(key), value) for key, value in settings.items()]
    pairs.append(("cpu", content.get("hardware", {}).get("cpu"), cpu))
    different = [f"{key}: {there!r} there, {here!r} here" for key, there, here in pairs if there != here]
    if different:
        raise ValueError(f"{path} has other measurements ({'; '.join(different)}); choose another --out")
    return records


def plan(models: Sequence[str], priors: Sequence[str], sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """All measurements in order: rounds, in each of them sizes, models and priors, the priors in turns."""
    wanted = []
    for number in range(rounds):
        turned = [*priors[number % len(priors) :], *priors[: number % len(priors)]]
        for pixels in sizes:
            for model in models:
                wanted += [{"model": model, "prior": p, "pixels": pixels, "round": number} for p in turned]
    return wanted


def todo(wanted: Sequence[dict[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is wanted and not measured, and did not fail in an earlier round."""
    done = {tuple(record[key] for key in KEYS) for record in records}
    failed = {tuple(record[key] for key in KEYS[:-1]) for record in records if "failed" in record}
    return [
        entry
        for entry in wanted
        if tuple(entry[key] for key in KEYS) not in done and tuple(entry[key] for key in KEYS[:-1]) not in failed
    ]


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, size and prior: spreads of seconds and of the ratio to dense in the same rounds, the
    largest peak of memory, backend; or why it failed.
    """
    groups: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["model"], record["pixels"], record["prior"]), {})[record["round"]] = record
    rows = []
    for (model, pixels, prior), rounds in groups.items():
        row: dict[str, Any] = {"model": model, "pixels": pixels, "prior": prior}
        good = {number: record for number, record in rounds.items() if "failed" not in record}
        if len(good) < len(rounds):
            row["failed"] = next(record["failed"] for record in rounds.values() if "failed" in record)
        if good:
            row["seconds"] = spread([record["seconds"] for record in good.values()])
            row["memory"] = max(record["memory"] for record in good.values())
            row["ran"] = next(iter(good.values()))["ran"]
            base = groups.get((model, pixels, DENSE), {})
            both = [number for number in good if number in base and "failed" not in base[number]]
            if both:
                own, other = ([part[number]["seconds"] for number in both] for part in (good, base))
                row["times_dense"] = ratio_spread(own, other)
                row["memory_times_dense"] = row["memory"] / max(base[number]["memory"] for number in both)
        rows.append(row)
    order = {name: number for number, name in enumerate(dict.fromkeys(row["model"] for row in rows))}
    return sorted(rows, key=lambda row: (order[row["model"]], row["pixels"]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    cells = []
    for row in rows:
        line = [row["model"], str(row["pixels"]), row["prior"]]
        if "seconds" not in row:
            cells.append([*line, *["-"] * 4, row["failed"]])
            continue
        ratio = row.get("times_dense")
        line += [report.milliseconds(row["seconds"]), str(row["seconds"]["rounds"])]
        line += [f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})" if ratio else "-"]
        cells.append([*line, f"{row['memory'] / 2**20:.0f}", row.get("failed", row["ran"])])
    columns = ("backbone", "px", "prior", "ms (quartiles)", "rounds", "times dense", "MiB", "attention ran on")
    return markdown_table(columns, cells)


def draw(rows: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Time and memory over the size of the image, a column for each backbone."""
    plt = pictures.pyplot()
    models, priors = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "prior"))
    sizes = sorted({row["pixels"] for row in rows})
    figure, axes = plt.subplots(
        2, len(models), figsize=(3.6 * len(models) + 0.6, 6.6), layout="constrained", squeeze=False, sharex=True
    )
    colours = dict(zip(priors, [pictures.INK, pictures.ACCENT, *report.COLOURS], strict=False))
    for column, model in zip(axes.T, models, strict=True):
        for prior in priors:
            own = [r for r in rows if (r["model"], r["prior"]) == (model, prior) and "seconds" in r]
            style = {"color": colours[prior], "marker": "o", "markersize": 4, "label": prior}
            style |= {"linestyle": "--"} if "violin" in prior else {}
            column[0].plot([r["pixels"] for r in own], [r["seconds"]["median"] for r in own], **style)
            column[1].plot([r["pixels"] for r in own], [r["memory"] / 2**20 for r in own], **style)
        column[0].set_title(model, fontsize=10)
        column[1].set_xlabel("pixels a side")
        for axis in column:
            axis.set_xscale("log")
            if any(len(line.get_xdata()) for line in axis.lines):
                axis.set_yscale("log")
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.xaxis.set_minor_locator(plt.NullLocator())
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("seconds an image")
    axes[1, 0].set_ylabel("memory of a call, MiB")
    figure.suptitle(heading, fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return pictures.save(figure, path)


# ---- command --------------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.benchmark.backbones",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["vit_small", "vit_base", "swin_tiny"], help="presets")
    parser.add_argument("--priors", nargs="+", default=list(PRIORS), help="names; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 1536], help="pixels a side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory-gib", type=float, help="of one process at most; default: three quarters of what is free"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of one process at most; default: %(default)s")
    parser.add_argument("--for-seconds", type=float, help="start no measurement after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/backbones"))
    report.add_machine_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, then print, write and draw all of it."""
    report.check_positive(rounds=arguments.rounds, seconds=arguments.seconds)
    for name in ("memory_gib", "for_seconds"):
        if getattr(arguments, name) is not None:
            report.check_positive(**{name: getattr(arguments, name)})
    report.machine_of(arguments)
    arguments.threads = arguments.threads or torch.get_num_threads()
    for model in arguments.models:  # a bad name or size ends the command before the first measurement
        if preset_family(model).backbone is None:
            raise ValueError(f"--models {model}: {preset_family(model).title} has no backbone")
        for pixels in arguments.sizes:
            report.check_positive(sizes=pixels)
            for prior in arguments.priors:
                preset_config(model, pixels, prior)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with locked(arguments.out / LOCK) as mine:
        if not mine:
            raise ValueError(f"--out={arguments.out} is in use by another process; wait for its end")
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """`run` in a folder that no other process measures in."""
    settings = {key: getattr(arguments, key) for key in SAME}
    records = read_records(arguments.out, settings)
    models, priors, sizes = (list(dict.fromkeys(values)) for values in _chosen(arguments))
    left = todo(plan(models, priors, sizes, arguments.rounds), records)
    about = report.provenance("backbones", arguments)
    kept = {key: about[key] for key in ("task", "benchmark", "command", "environment", "versions", "hardware")}
    report.print_provenance(about)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([backbone_process.__name__])
    end = time.monotonic() + (arguments.for_seconds or float("inf"))
    stopped = None
    with StopRequest() as stop:
        for number, entry in enumerate(left, start=1):
            if not todo([entry], records):  # it failed in an earlier round of this command
                continue
            if stop.requested or time.monotonic() > end:
                stopped = f"stopped with {len(left) - number + 1} of {len(left)} to do; the same command goes on"
                break
            limit = int((arguments.memory_gib or 0.75 * free_memory(torch.device("cpu")) / 2**30) * 2**30)
            given = (entry["model"], entry["prior"], entry["pixels"], settings)
            found = backbone_process.measured_alone(server, given, limit, arguments.seconds, stop)
            if found is None:
                continue
            records.append({**entry, **found, "load_average": os.getloadavg()[0]})
            write_results(arguments.out / RECORDS, {**kept, "settings": settings, "measured": records})
            said = found.get("failed") or f"{found['seconds']:.3f} s, {found['memory'] / 2**20:.0f} MiB, {found['ran']}"
            print(f"[{number}/{len(left)}] {' '.join(str(entry[key]) for key in KEYS)}: {said}", flush=True)
        stopping = stop.requested
    if records:
        write_report(arguments, records, about)
    if stopping:
        raise RunStopped(stopped or "stopped")
    if stopped:
        print(stopped)


def _chosen(arguments: argparse.Namespace) -> tuple[Sequence[Any], ...]:
    return arguments.models, arguments.priors, sorted(arguments.sizes)


def write_report(arguments: argparse.Namespace, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Table and picture of the measurements, and the table printed."""
    rows = summary(records)
    hardware = {**about["hardware"], "cpu_threads": arguments.threads}
    machine = report.machine({**about, "hardware": hardware}, arguments.device)
    text = table(rows)
    write_text(arguments.out / TABLE, f"{machine}, {arguments.dtype}, one image, no gradients\n\n{text}\n")
    picture = draw(rows, arguments.out / PICTURE, f"Forward pass of one image, {arguments.dtype}, {machine}")
    print(f"\n{text}\n\n{arguments.out / TABLE}, {picture}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
