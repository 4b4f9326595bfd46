"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import command_parser


def config() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.common.config`."""
    parser = command_parser("common.config", "List the cells of a file.")
    parser.add_argument("file", type=Path, help="YAML file, or Python file of mmengine")
    return parser


def records() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.common.records`."""
    parser = command_parser("common.records")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of records of one comparison")
    return parser
