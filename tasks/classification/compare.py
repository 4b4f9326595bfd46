"""Compare priors over seeds: python -m tasks.classification.compare --config FILE [section.key=value ...]

What FILE holds, and what happens after a kill: tasks/common/compare.py.
"""

from __future__ import annotations

import sys
from functools import partial

from hf_sparseprior.classification.task import CLASSIFICATION
from tasks.common import compare

load_comparison = partial(compare.load_comparison, CLASSIFICATION)
main = partial(compare.compare_main, CLASSIFICATION)

if __name__ == "__main__":
    sys.exit(main())
