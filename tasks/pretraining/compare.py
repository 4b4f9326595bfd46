"""Compare priors in pretraining over seeds: python -m tasks.pretraining.compare --config FILE [section.key=value ...]

What FILE holds, and what happens after a kill: tasks/common/compare.py. Rows are compared by their k-NN accuracy.
"""

from __future__ import annotations

import sys
from functools import partial

from tasks.common import compare
from tasks.pretraining.task import PRETRAINING

load_comparison = partial(compare.load_comparison, PRETRAINING)
main = partial(compare.compare_main, PRETRAINING)

if __name__ == "__main__":
    sys.exit(main())
