"""Train a segmentation model: python -m tasks.segmentation.train --config FILE [key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.mm.command import train_main
from tasks.segmentation import load_task

main = partial(train_main, "segmentation", load_task)

if __name__ == "__main__":
    sys.exit(main())
