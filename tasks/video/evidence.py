"""What models of motion clips get right: python -m tasks.video.evidence RECORDS

RECORDS is the folder of records of a comparison of motion clips. Accuracies, mean and deviation over seeds: of all nine
classes, of panning, of playing (backward, paused, forward), and of the direction, in clips that play and are said to
play; the last two are compared with the first row, seed by seed. Then of all nine classes in the clips of each video.
MOTION.md and motion.png are written into RECORDS.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.tables import markdown_table, plus_minus
from tasks.common import records
from tasks.common.comparison_table import spread
from tasks.common.paired import RULE, Difference, differences, verdict
from tasks.video import commands
from tasks.video.motion import CLASSES, KINDS, MotionConfig

PLAYING, DIRECTION = "test_accuracy_of_backward_forward_paused", "test_direction_accuracy"
# Metrics, what they are called, and chance.
SHOWN = {
    "test_accuracy": ("nine classes", 1 / 9),
    "test_accuracy_of_left_right_still": ("panning", 1 / 3),
    PLAYING: ("playing", 1 / 3),
    DIRECTION: ("direction", 1 / 2),
}
COMPARED = (PLAYING, DIRECTION)
Records = Mapping[str, Sequence[Mapping[str, Any]]]


def read_records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by row, in the order of the comparison, seeds in order.

    Raises:
        OSError: for a folder without records. ValueError: for records of something else than motion clips.
    """
    if not (folder / records.RECORDS).is_file():
        raise OSError(f"{folder} has no {records.RECORDS}; it is not the --records of a comparison")
    if not (kept := records.read_records(folder)):
        raise ValueError(f"{folder / records.RECORDS} has no runs")
    found = {row: list(runs.values()) for row, runs in kept.items()}
    for row, runs in found.items():
        if any(PLAYING not in record["metrics"] for record in runs):
            raise ValueError(f"{folder / records.RECORDS}: {row} has records of something else than motion clips")
    return found


def compared(records: Records, metric: str) -> dict[str, Difference]:
    """Each row's difference to the first one, of the rows that have this metric."""
    # Which clips are right is recorded for the nine classes alone.
    having = {
        row: [{"seed": own["seed"], "metrics": own["metrics"]} for own in runs if metric in own["metrics"]]
        for row, runs in records.items()
    }
    return differences(having, next(iter(records)), metric)


def table(records: Records) -> str:
    """Accuracies in percent, the differences to the first row in points, and the rule."""
    first = next(iter(records))
    found = {metric: compared(records, metric) for metric in COMPARED}
    columns = [f"{name}, % (chance {100 * chance:.1f})" for name, chance in SHOWN.values()]
    for metric in COMPARED:
        columns += [f"{SHOWN[metric][0]} minus {first}, points, mean ± standard error", "verdict"]
    rows = []
    for row, runs in records.items():
        cells = [spread([own["metrics"][metric] for own in runs if metric in own["metrics"]]) for metric in SHOWN]
        for metric in COMPARED:
            difference = found[metric].get(row)
            cells += ["-", "-"] if difference is None else [points(difference), verdict(difference)]
        rows.append([row, *cells])
    parts = {row: [by_video(own) for own in runs] for row, runs in records.items()}
    videos = list(next(iter(parts.values()))[0])
    shares = [[row, *(spread([own[video] for own in runs]) for video in videos)] for row, runs in parts.items()]
    by_videos = markdown_table(["nine classes, %, in clips of", *videos], shares)
    return f"{markdown_table(['row', *columns], rows)}\n\n{RULE}\n\n{by_videos}"


def by_video(record: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of the nine classes in the test clips of each video.

    Raises:
        ValueError: for a record that does not tell which of its clips are right, or has others than its config says.
    """
    config = MotionConfig(**record["config"]["data"]["motion"])
    videos = sorted(KINDS[config.videos])
    right = unpack_correct(record["test_correct"])
    if len(right) != len(CLASSES) * len(videos) * config.test:
        raise ValueError(f"a record of {len(right)} test clips must have {config.test} of each class and video")
    shares = right.reshape(len(CLASSES), len(videos), config.test).mean((0, 2))  # clips are sorted by class and name
    return dict(zip(videos, map(float, shares), strict=True))


def points(difference: Difference) -> str:
    """Mean and standard error in percentage points."""
    error = difference.error
    return plus_minus(100 * difference.mean, None if error is None else 100 * error, "+")


def draw(records: Records, path: Path) -> Path:
    """Panning, playing and direction of every seed, and their means; chance is dotted."""
    plt = pictures.pyplot()
    shown = {metric: entry for metric, entry in SHOWN.items() if metric != "test_accuracy"}
    size = (1.6 + 3.4 * len(shown), 1.3 + 0.36 * len(records))
    figure, axes = plt.subplots(1, len(shown), figsize=size, sharey=True, layout="constrained")
    for axis, (metric, (name, chance)) in zip(axes, shown.items(), strict=True):
        for number, runs in enumerate(records.values()):
            values = [100 * own["metrics"][metric] for own in runs if metric in own["metrics"]]
            axis.plot(values, [number] * len(values), "o", color=pictures.INK, alpha=0.6, markersize=5)
            if values:
                axis.plot([np.mean(values)], [number], "|", color=pictures.ACCENT, markersize=18, markeredgewidth=2.5)
        axis.axvline(100 * chance, color=pictures.INK, linestyle=":", linewidth=1)
        axis.set_xlabel(f"{name}, % (dotted: chance)")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(records)), list(records))
    axes[0].set_ylim(len(records) - 0.5, -0.5)
    return pictures.save(figure, path)


def write_evidence(folder: Path) -> str:
    """Write MOTION.md and motion.png into a folder of records. Returns what is in the first."""
    records = read_records(folder)
    text = table(records)
    write_text(folder / "MOTION.md", text + "\n")
    return f"{text}\n\npicture: {draw(records, folder / 'motion.png')}, table: {folder / 'MOTION.md'}"


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.evidence()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: print(write_evidence(arguments.records)))


if __name__ == "__main__":
    sys.exit(main())
