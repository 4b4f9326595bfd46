"""Evaluate a saved segmentation model: python -m tasks.segmentation.evaluate MODEL [--split SPLIT] [key=value ...]"""

from __future__ import annotations

import sys

import tasks.segmentation  # noqa: F401  registers what configs name
from tasks.common.mm.command import evaluate_main
from tasks.segmentation.task import SEGMENTATION


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return evaluate_main(SEGMENTATION, argv)


if __name__ == "__main__":
    sys.exit(main())
