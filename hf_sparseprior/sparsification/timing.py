"""Seconds of layers and of whole models on this machine, by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

from hf_sparseprior.analysis.predicted_cost import interleaved_rounds


def median_seconds(calls: Mapping[str, Callable[[], object]], device: torch.device, budget: float) -> dict[str, float]:
    """Median seconds of each call, which take turns.

    Args:
        calls: by name; run without gradients.
        budget: seconds for all rounds together, of which there are three at least.
    """
    with torch.no_grad():
        rounds = interleaved_rounds(list(calls.values()), device, budget)
    return dict(zip(calls, map(median, zip(*rounds, strict=True)), strict=True))
