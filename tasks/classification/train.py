"""Train a SparsePriorViT classifier: python -m tasks.classification.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.classification.task import CLASSIFICATION
from tasks.common import hf_run

run = partial(hf_run.run, CLASSIFICATION)
main = partial(hf_run.train_main, CLASSIFICATION)

if __name__ == "__main__":
    sys.exit(main())
