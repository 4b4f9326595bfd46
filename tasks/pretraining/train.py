"""Pretrain with DINO: python -m tasks.pretraining.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.runs import hf_run
from tasks.common import command
from tasks.pretraining.task import PRETRAINING

run = partial(hf_run.run, PRETRAINING)
main = partial(command.train_main, PRETRAINING)

if __name__ == "__main__":
    sys.exit(main())
