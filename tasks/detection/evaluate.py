"""Evaluate a saved detector: python -m tasks.detection.evaluate MODEL [--split SPLIT] [key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.mm.command import evaluate_main
from tasks.detection import load_task

main = partial(evaluate_main, "detection", load_task)

if __name__ == "__main__":
    sys.exit(main())
