"""Train a SparsePriorTimesformer on clips: python -m tasks.video.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.runs import hf_run
from tasks.common import command
from tasks.video.task import VIDEO

run = partial(hf_run.run, VIDEO)
main = partial(command.train_main, VIDEO)

if __name__ == "__main__":
    sys.exit(main())
