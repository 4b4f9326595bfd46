"""Train a head of transformers on our backbones: python -m tasks.heads.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.runs import hf_run
from tasks.common import command
from tasks.heads.task import HEADS

run = partial(hf_run.run, HEADS)
main = partial(command.train_main, HEADS)

if __name__ == "__main__":
    sys.exit(main())
