"""Train a segmentation model: python -m tasks.segmentation.train --config FILE [key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys

from tasks.common.mm.command import train_main
from tasks.segmentation import load_task


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return train_main("segmentation", load_task, argv)


if __name__ == "__main__":
    sys.exit(main())
