"""Evaluate a saved detector: python -m tasks.detection.evaluate MODEL [--split SPLIT] [key=value ...]"""

from __future__ import annotations

import sys

from tasks.common.mm.command import evaluate_main
from tasks.detection import load_task


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return evaluate_main("detection", load_task, argv)


if __name__ == "__main__":
    sys.exit(main())
