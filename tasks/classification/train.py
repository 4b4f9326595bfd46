"""Train a SparsePriorViT classifier: python -m tasks.classification.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs import hf_run
from tasks.common import command

run = partial(hf_run.run, CLASSIFICATION)
main = partial(command.train_main, CLASSIFICATION)

if __name__ == "__main__":
    sys.exit(main())
