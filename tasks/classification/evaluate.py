"""Evaluate a saved classifier: python -m tasks.classification.evaluate MODEL [--config FILE] [data.key=value ...]"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs.evaluate import run_config as run_config_of
from tasks.common.command import evaluate_main

run_config = partial(run_config_of, CLASSIFICATION)
main = partial(evaluate_main, CLASSIFICATION)

if __name__ == "__main__":
    sys.exit(main())
