"""Compare heads, or priors under one head, over seeds: python -m tasks.heads.compare --config FILE [section.key=value]

What FILE holds, and what happens after a kill: tasks/common/compare.py. All rows are judged by the metric of their
heads: test_mIoU (upernet), test_mask_mAP (mask2former, maskformer) or test_box_mAP (DETR and its relatives).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hf_sparseprior.runs.hf_run import HFTask
from tasks.common import compare
from tasks.heads.kinds import KINDS
from tasks.heads.task import HEADS


class HeadComparison(compare.Comparison):
    """A comparison whose rows have heads of one metric."""

    @property
    def metric(self) -> str:
        """That of the heads."""
        return f"test_{KINDS[next(iter(self.configs.values()))['head']['name']].metric}"


def load(task: HFTask, path: str | Path, overrides: Sequence[str] = ()) -> HeadComparison:
    """Read a comparison; ValueError too if its heads have several metrics."""
    found = HeadComparison(**vars(compare.load_comparison(task, path, overrides)))
    rows: dict[str, list[str]] = {}
    for name, config in found.configs.items():
        rows.setdefault(KINDS[config["head"]["name"]].metric, []).append(name)
    if len(rows) > 1:
        metrics = "; ".join(f"{metric}: {', '.join(names)}" for metric, names in rows.items())
        raise ValueError(f"{path}: rows must have heads of one metric, not of {len(rows)} ({metrics})")
    return found


load_comparison = partial(load, HEADS)
main = partial(compare.compare_main, HEADS, load=load)

if __name__ == "__main__":
    sys.exit(main())
