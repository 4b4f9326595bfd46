"""Time and memory of video models a clip: python -m tasks.benchmark.video [--rows ATTENTION/PRIOR ...]

Forward passes of one clip, without gradients, over frames and pixels. Each measurement is done in a process of its
own, which may have --memory-gib and no more. The rows take turns, and there are --rounds rounds. What a measurement
would need is predicted from the row's shorter clips at the same size; if that is too much, it is not begun, and the
table says what it would need. Each finished measurement is a record in OUT/records.json, so the command can be killed
at any moment and started again, and then it goes on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.files import write_text
from tasks.benchmark import commands, report
from tasks.benchmark.clip_model import LONG, Clips, work
from tasks.benchmark.clip_report import draw_clip_costs, table
from tasks.benchmark.timing import MEMORY_TOLERANCE, growth_law, turn_order
from tasks.common.command import run_command
from tasks.common.environment import command_line, environment
from tasks.common.locks import locked
from tasks.common.processes import variables_set
from tasks.common.results import read_results, write_results

RECORDS = "records.json"

PROBES = (1, 2, 4)  # frames that a prediction begins with
POINTS = 3  # sizes that a prediction is made from
GIB = 2**30
TIME_TOLERANCE = 0.03  # a term may be left out of a law of time if this is the largest difference


@dataclass(frozen=True)
class Settings:
    """records: their file. rows: name to (attention, prior). frames, pixels: what is measured. preset, dtype,
    threads: of all measurements. memory_gib, seconds: limits of one. rounds: of all.
    """

    records: Path
    rows: Mapping[str, tuple[str, Any]]
    frames: Sequence[int]
    pixels: Sequence[int]
    preset: str
    dtype: str
    threads: int
    memory_gib: float
    seconds: float
    rounds: int

    @property
    def counts(self) -> list[int]:
        """Frames that a row is measured with, those that predictions begin with included, in ascending order."""
        return sorted({*PROBES, *self.frames})

    def clips(self, row: str, frames: int, pixels: int) -> Clips:
        """What a measurement measures."""
        return Clips(*self.rows[row], frames, pixels, self.preset, self.dtype)

    def kept(self) -> dict[str, dict[str, Any]]:
        """All records, by row and size."""
        return read_results(self.records) if self.records.is_file() else {}

    def write(self, row: str, frames: int, pixels: int, record: Mapping[str, Any]) -> None:
        """Keep a record, in place of an earlier one."""
        kept = {**self.kept(), place_of(row, frames, pixels): record}
        write_results(self.records, dict(sorted(kept.items())))

    def record(self, row: str, frames: int, pixels: int) -> dict[str, Any] | None:
        """The record, None if there is none.

        Raises:
            ValueError: for one that was measured otherwise.
        """
        found, wanted = self.kept().get(place_of(row, frames, pixels)), self.told(row, frames, pixels)
        if found is None:
            return None
        different = [
            f"{key}: {found.get(key)} there, {wanted[key]} here" for key in wanted if found.get(key) != wanted[key]
        ]
        if different:
            place = f"{self.records}, {place_of(row, frames, pixels)},"
            raise ValueError(f"{place} was measured otherwise ({'; '.join(different)}); choose another --out")
        return found

    def told(self, row: str, frames: int, pixels: int) -> dict[str, Any]:
        """What a record says of what it measured."""
        return {**asdict(self.clips(row, frames, pixels)), "threads": self.threads}


def place_of(row: str, frames: int, pixels: int) -> str:
    """What a record is called."""
    return f"{row}, {frames}x{pixels}"


def parse_rows(texts: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Rows by name, from ATTENTION/PRIOR.

    Raises:
        ValueError: for anything else.
    """
    found = {}
    for text in texts:
        attention, slash, prior = text.partition("/")
        if not slash:
            raise ValueError(f"--rows {text!r} must be ATTENTION/PRIOR, like joint/dense")
        found[text] = (attention, report.from_yaml("--rows", prior))
    return found


def predicted(settings: Settings, row: str, frames: int, pixels: int) -> dict[str, float] | None:
    """Seconds and GiB of a call, by the row's shorter clips; None where fewer than three were measured."""
    found = {count: settings.record(row, count, pixels) for count in settings.counts if count < frames}
    done = [(count, record) for count, record in found.items() if record is not None][-POINTS:]
    if len(done) < POINTS:
        return None
    shorter = [count for count, _ in done]
    seconds = growth_law(shorter, [seconds_of(record) for _, record in done], TIME_TOLERANCE)
    needed = growth_law(shorter, [needed_bytes(record) for _, record in done], MEMORY_TOLERANCE)
    powers = np.array([1, frames, frames**2])
    return {"seconds": float(powers @ seconds), "gib": float(powers @ needed) / GIB}


def too_much(settings: Settings, prediction: Mapping[str, float] | None) -> str | None:
    """Why a measurement is not begun, or None."""
    if prediction is not None and prediction["gib"] > settings.memory_gib:
        return f"does not run: needs {prediction['gib']:.1f} GiB, {settings.memory_gib:g} are allowed"
    if prediction is not None and prediction["seconds"] > settings.seconds:
        return f"not run: would take {prediction['seconds']:.0f} s, {settings.seconds:g} are allowed"
    return None


def measure(settings: Settings, server: Any, row: str, frames: int, pixels: int, number: int) -> str | None:
    """Do a measurement of round `number`, if it is to be done, and write its record. Returns why it was not done."""
    record = settings.record(row, frames, pixels)
    if record is not None and (len(record["seconds"]) > number or record["seconds"][0] > LONG):
        return None
    if number and (record is None or frames not in settings.frames):
        return None  # it failed, or it is a probe
    prediction = predicted(settings, row, frames, pixels)
    if record is None and (reason := too_much(settings, prediction)):
        return reason
    long = prediction is not None and prediction["seconds"] > LONG
    arguments = {"threads": settings.threads, "memory_gib": settings.memory_gib, "first": record is None, "long": long}
    print(f"round {number + 1}: {row}, {frames} frames of {pixels} px", file=sys.stderr, flush=True)
    answer = in_process(server, settings.clips(row, frames, pixels), arguments)
    if "error" in answer:
        return f"failed: {answer['error']}"
    if record is None:
        record = {**settings.told(row, frames, pixels), **answer, "seconds": [], **environment()}
    record["seconds"].append(float(np.median(answer["seconds"])))
    settings.write(row, frames, pixels, {**record, "command": command_line()})
    return None


def in_process(server: Any, clips: Clips, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a new process; {"error": ...} if it had too little memory or was killed."""
    mine, theirs = server.Pipe()
    process = server.Process(target=work, args=(theirs, asdict(clips), dict(arguments)), daemon=True)
    process.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        process.join()
        return {"error": f"its process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        mine.close()


def measure_all(settings: Settings) -> dict[tuple[str, int, int], str]:
    """Every measurement that has no record yet. Returns why some were not done, by row, frames and pixels."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([work.__module__])
    with variables_set({"OMP_NUM_THREADS": str(settings.threads)}):
        forkserver.ensure_running()
    reasons = {}
    for number in range(settings.rounds):
        for pixels in settings.pixels:
            for frames in settings.counts:
                for row in turn_order(list(settings.rows), number):
                    if reason := measure(settings, server, row, frames, pixels, number):
                        reasons[row, frames, pixels] = reason
                        print(f"{row}, {frames} frames of {pixels} px: {reason}", file=sys.stderr, flush=True)
    return reasons


def collect(settings: Settings, reasons: Mapping[tuple[str, int, int], str]) -> list[dict[str, Any]]:
    """An entry for each size and row that was asked for: what was measured, or why not and what was predicted."""
    entries = []
    for pixels in settings.pixels:
        for frames in settings.frames:
            for row in settings.rows:
                entry: dict[str, Any] = {"row": row, "frames": frames, "pixels": pixels}
                if (record := settings.record(row, frames, pixels)) is not None:
                    entry |= {"seconds": seconds_of(record), "gib": needed_bytes(record) / GIB, "ran": record["ran"]}
                    entry |= {"rounds": len(record["seconds"]), "resident": record["memory"]["resident"]}
                else:
                    prediction = predicted(settings, row, frames, pixels)
                    reason = reasons.get((row, frames, pixels)) or too_much(settings, prediction)
                    entry |= {"left_out": reason or not_measured(prediction), "predicted": prediction}
                entry["tokens"] = frames * patches(settings, pixels)
                entries.append(entry)
    return entries


def not_measured(prediction: Mapping[str, float] | None) -> str:
    """What a table says of a measurement that was not done yet."""
    if prediction is None:
        return "not measured"
    return f"not measured: would take {prediction['seconds']:.2g} s and {prediction['gib']:.2g} GiB"


def patches(settings: Settings, pixels: int) -> int:
    """Patches of a frame."""
    height, width = Clips("divided", "dense", 1, pixels, settings.preset).config().grid
    return height * width


def seconds_of(record: Mapping[str, Any]) -> float:
    """Median of the rounds."""
    return float(np.median(record["seconds"]))


def needed_bytes(record: Mapping[str, Any]) -> int:
    """Weights, clip, and the tables and the peak of a call."""
    memory = record["memory"]
    return memory["weights"] + memory["input"] + max(memory["set_up"], memory["kept"] + memory["call"])


# ---- command --------------------------------------------------------------------------------------------------------


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings, checked before anything is measured.

    Raises:
        ValueError: for a value that is not allowed.
    """
    given = vars(arguments)
    report.check_positive(**{key: given[key] for key in ("threads", "memory_gib", "seconds", "rounds")})
    frames, pixels = (parse_numbers(f"--{key}", given[key]) for key in ("frames", "pixels"))
    if frames[0] <= PROBES[-1]:
        raise ValueError(
            f"--frames {arguments.frames!r}: {frames[0]} must be above {PROBES[-1]}; 1, 2, 4 are measured too"
        )
    same = {key: given[key] for key in ("preset", "dtype", "threads", "memory_gib", "seconds", "rounds")}
    settings = Settings(arguments.out / RECORDS, parse_rows(arguments.rows), frames, pixels, **same)
    for row in settings.rows:
        for size in pixels:
            for count in settings.counts:
                settings.clips(row, count, size).config()
                settings.record(row, count, size)
    return settings


def parse_numbers(flag: str, text: str) -> list[int]:
    """ "8,16" as positive integers in ascending order.

    Raises:
        ValueError: for anything else.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{flag} {text!r} must be positive numbers, like 8,16")
    return sorted({int(part) for part in parts})


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not measured yet, write and draw."""
    settings = settings_of(arguments)
    with locked(arguments.out / "lock") as mine:
        if not mine:
            raise ValueError(f"another process measures in {arguments.out}; two at a time would disturb each other")
        entries = collect(settings, {} if arguments.report else measure_all(settings))
        if arguments.report and not any("seconds" in entry or entry["predicted"] for entry in entries):
            raise ValueError(
                f"--report: {settings.records} has nothing of these --rows, --frames and --pixels; give those of the "
                "command that measured"
            )
        threads = f"{settings.threads} thread{'s' * (settings.threads > 1)}"
        heading = f"{settings.preset}, {settings.dtype}, {threads}"
        limits = f"{heading}. A process was allowed {settings.memory_gib:g} GiB, a call {settings.seconds:g} s."
        text = table(entries, limits, command_line(), environment())
        write_text(arguments.out / "table.md", text + "\n")
        picture = draw_clip_costs(entries, arguments.out / "clips.png", heading, settings.memory_gib)
    print(f"{text}\n\npicture: {picture}, table: {arguments.out / 'table.md'}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.video()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments), goes_on="after the last finished measurement")


if __name__ == "__main__":
    sys.exit(main())
