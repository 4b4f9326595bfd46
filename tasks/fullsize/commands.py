"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import command_parser

OUT = Path("outputs/fullsize")
ROOT = Path("configs")  # where commands are started
SMALL = 2  # images of a small step: mixing takes pairs, and batch norms more than one


def run() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.fullsize.run`."""
    parser = command_parser("fullsize.run", "Let every configuration make a step at full size.")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="those with such a text in task and name")
    parser.add_argument("--list", action="store_true", help="print what there is and what it needs, and do nothing")
    parser.add_argument("--table", action="store_true", help="write the table of the records that there are, no more")
    parser.add_argument("--small", action="store_true", help=f"only steps of {SMALL} images, none of the own size")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at a time, default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of each of them, default %(default)s")
    parser.add_argument("--memory-gib", type=float, help="of one configuration; default: what is free, by --jobs")
    parser.add_argument("--minutes", type=float, default=10.0, help="of one configuration's step, default %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of runs and fixtures, default %(default)s")
    parser.add_argument("--records", type=Path, help="folder of records, default OUT/records")
    parser.add_argument("--report", type=Path, help="folder of the table and picture, default OUT")
    parser.add_argument("--configs", type=Path, default=ROOT, help="folder of configurations, default: configs")
    return parser
