"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse

from tasks.common.parsers import command_parser


def page() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.claims.page`."""
    parser = command_parser("claims.page")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/claims.md is another")
    return parser


def history() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.claims.history`."""
    parser = command_parser("claims.history")
    parser.add_argument("--check", action="store_true", help="print nothing; fail if claims say otherwise")
    return parser


def todo() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.claims.todo`."""
    parser = command_parser("claims.todo")
    parser.add_argument("--tier", choices=("A", "B"), help="only what claims of this tier need")
    return parser


def results() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.claims.results`."""
    parser = command_parser("claims.results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/results.md is another")
    return parser
