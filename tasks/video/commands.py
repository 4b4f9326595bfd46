"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tasks.common.parsers import command_parser, compare_parser, evaluate_parser, train_parser

TRAINS = "a SparsePriorTimesformer on clips"
EVAL_BATCH_SIZE = 32
# Of motion: the settings of its clips, see MotionConfig.
CLIPS: dict[str, int | str] = {
    "size": 72,
    "frames": 9,
    "pan": 3,
    "pace": 1,
    "height": 108,
    "train": 32,
    "validation": 6,
    "test": 12,
    "seed": 0,
    "videos": "real",
    "draws": 4,
}

train = partial(train_parser, "video", TRAINS)
evaluate = partial(evaluate_parser, "video", TRAINS, EVAL_BATCH_SIZE)
compare = partial(compare_parser, "video")


def evidence() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.video.evidence`."""
    parser = command_parser("video.evidence")
    parser.add_argument("records", type=Path, help="folder of records, as `tasks.video.compare --records` leaves it")
    return parser


def motion() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.video.motion`."""
    parser = command_parser("video.motion")
    parser.add_argument("out", type=Path, help="new folder")
    for name, value in CLIPS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--within_shots", action="store_true", help="no clip spans a cut")
    return parser
