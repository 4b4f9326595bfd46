"""Evaluate a saved segmentation model: python -m tasks.segmentation.evaluate MODEL [--split SPLIT] [key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.mm.command import evaluate_main
from tasks.segmentation import load_task

main = partial(evaluate_main, "segmentation", load_task)

if __name__ == "__main__":
    sys.exit(main())
