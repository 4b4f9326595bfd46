"""Train a detector: python -m tasks.detection.train --config FILE [key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.mm.command import train_main
from tasks.detection import load_task

main = partial(train_main, "detection", load_task)

if __name__ == "__main__":
    sys.exit(main())
