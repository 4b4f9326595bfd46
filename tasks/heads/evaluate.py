"""Evaluate a saved model with a head: python -m tasks.heads.evaluate MODEL [--config FILE] [data.key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.command import evaluate_main
from tasks.heads.task import HEADS

main = partial(evaluate_main, HEADS)

if __name__ == "__main__":
    sys.exit(main())
