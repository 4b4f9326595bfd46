"""Train a detector: python -m tasks.detection.train --config FILE [key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys

import tasks.detection  # noqa: F401  registers what configs name
from tasks.common.mm.command import train_main
from tasks.detection.task import DETECTION

if __name__ == "__main__":
    sys.exit(train_main(DETECTION))
