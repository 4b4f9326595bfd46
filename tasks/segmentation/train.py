"""Train a segmentation model: python -m tasks.segmentation.train --config FILE [key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys

import tasks.segmentation  # noqa: F401  registers what configs name
from tasks.common.mm.command import train_main
from tasks.segmentation.task import SEGMENTATION

if __name__ == "__main__":
    sys.exit(train_main(SEGMENTATION))
