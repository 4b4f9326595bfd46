"""Compare video models over seeds: python -m tasks.video.compare --config FILE [section.key=value ...]

What FILE holds, and what happens after a kill: tasks/common/compare.py.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common import compare
from tasks.video.task import VIDEO

load_comparison = partial(compare.load_comparison, VIDEO)
main = partial(compare.compare_main, VIDEO)

if __name__ == "__main__":
    sys.exit(main())
