"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import command_parser

SCALES = ("cpu", "gpu", "smoke")
RESULTS = "tasks/canvases/results"
ROUNDS = 7


def run() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.canvases.run`."""
    parser = command_parser("canvases.run")
    _add_scale(parser)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: outputs/canvases/SCALE")
    _add_records(parser)
    parser.add_argument("--list", action="store_true", help="print the runs with their minutes, and do nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these contenders, and their starts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="only these seeds")
    parser.add_argument(
        "--sides", nargs="+", type=int, default=[], metavar="PIXELS", help="only canvases of these sizes"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time, each a process of one thread; default: one, in this one"
    )
    parser.add_argument("--times", action="store_true", help="measure inference after the last run, as `times` does")
    _add_data(parser)
    return parser


def times() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.canvases.times`."""
    parser = command_parser("canvases.times")
    _add_scale(parser)
    _add_records(parser)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="turns of each contender; their median counts (default %(default)s)"
    )
    _add_data(parser)
    return parser


def report() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.canvases.report`."""
    parser = command_parser("canvases.report")
    _add_scale(parser)
    _add_records(parser)
    return parser


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SCALES, required=True, help="size of the experiment")


def _add_records(parser: argparse.ArgumentParser) -> None:
    text = f"folder of the records, the table and the figure; default: {RESULTS}/SCALE, of smoke: its runs' folder"
    parser.add_argument("--records", type=Path, help=text)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fashion-mnist", help="folder of the four idx files; default: that of Debian's package dataset-fashion-mnist"
    )
