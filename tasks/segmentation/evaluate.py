"""Evaluate a saved segmentation model: python -m tasks.segmentation.evaluate MODEL [--split SPLIT] [key=value ...]"""

from __future__ import annotations

import sys

import tasks.segmentation  # noqa: F401  registers what configs name
from tasks.common.mm.command import evaluate_main
from tasks.segmentation.task import SEGMENTATION

if __name__ == "__main__":
    sys.exit(evaluate_main(SEGMENTATION))
