"""Evaluate a saved classifier: python -m tasks.classification.evaluate MODEL [--config FILE] [data.key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from tasks.classification.task import CLASSIFICATION
from tasks.common.evaluate import evaluate_main
from tasks.common.evaluate import run_config as run_config_of

run_config = partial(run_config_of, CLASSIFICATION)
main = partial(evaluate_main, CLASSIFICATION)

if __name__ == "__main__":
    sys.exit(main())
