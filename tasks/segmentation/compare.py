"""Compare priors in segmentation over seeds: python -m tasks.segmentation.compare --config FILE [key=value ...]

What FILE holds, and what happens after a kill: tasks/common/mm/compare.py.
"""

from __future__ import annotations

import sys

from tasks.common.mm.command import compare_main
from tasks.segmentation import load_task


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return compare_main("segmentation", load_task, argv)


if __name__ == "__main__":
    sys.exit(main())
