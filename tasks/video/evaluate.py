"""Evaluate a saved video classifier: python -m tasks.video.evaluate MODEL [--config FILE] [data.key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.command import evaluate_main
from tasks.video.task import VIDEO

main = partial(evaluate_main, VIDEO)

if __name__ == "__main__":
    sys.exit(main())
