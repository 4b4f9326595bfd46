"""Compare priors in segmentation over seeds: python -m tasks.segmentation.compare --config FILE [key=value ...]

What FILE holds, and what happens after a kill: tasks/common/mm/compare.py.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common.mm.command import compare_main
from tasks.segmentation import load_task

main = partial(compare_main, "segmentation", load_task)

if __name__ == "__main__":
    sys.exit(main())
