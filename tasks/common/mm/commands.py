"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import command_parser


def photographs() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.common.mm.photographs`."""
    parser = command_parser("common.mm.photographs")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--size", type=int, default=128, help="side of a tile in pixels")
    return parser


def scenes() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.common.mm.scenes`."""
    parser = command_parser("common.mm.scenes")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--train", dest="training", type=int, default=1200, help="number of scenes")
    parser.add_argument("--validation", type=int, default=100)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--size", type=int, default=128, help="side of a scene in pixels")
    parser.add_argument("--seed", type=int, default=0)
    return parser
