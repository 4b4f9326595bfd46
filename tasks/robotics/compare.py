"""Compare priors of policies over seeds: python -m tasks.robotics.compare --config FILE [section.key=value ...]

What FILE holds, and what happens after a kill: tasks/common/compare.py. A run trains a policy, then plays the held-out
episodes of `trainer.test_episodes`; each episode is kept when it is over. Rows are compared by the episodes they solve.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, cast

from tasks.common import compare
from tasks.robotics.task import ROBOTICS

load_comparison = partial(compare.load_comparison, cast(Any, ROBOTICS))
main = partial(compare.compare_main, cast(Any, ROBOTICS))

if __name__ == "__main__":
    sys.exit(main())
