"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import command_parser

OUT = Path("outputs/fullsize")
ROOT = Path("configs")  # where commands are started


def run() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.fullsize.run`."""
    parser = command_parser("fullsize.run", "Let configurations of the papers make a step at full size.")
    parser.add_argument("names", nargs="*", metavar="FILE#CELL", help="as --list shows them; default: ten, by kind")
    parser.add_argument("--list", action="store_true", help="print what there is, with parameters, and do nothing")
    parser.add_argument("--count", action="store_true", help="write parameters.json anew, and print it")
    parser.add_argument("--threads", type=int, default=1, help="of the computation, default %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of runs, fixtures, logs; default %(default)s")
    return parser
