"""Times of layers and of whole models on this machine, by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

from hf_sparseprior.analysis.predicted_cost import interleaved_rounds


def seconds_of_rounds(
    calls: Mapping[str, Callable[[], object]], device: torch.device, budget: float
) -> dict[str, list[float]]:
    """Seconds of each call in each of several rounds, in which calls take turns.

    Args:
        calls: by name; run without gradients.
        budget: seconds for all rounds together, of which there are three at least.
    """
    with torch.no_grad():
        rounds = interleaved_rounds(list(calls.values()), device, budget)
    return dict(zip(calls, map(list, zip(*rounds, strict=True)), strict=True))


def shares_of(times: Mapping[str, list[float]], whole: str) -> dict[str, float]:
    """The time of each call as a share of that of `whole`: the median of the rounds' shares, so that a machine that is
    busy for a while slows both.
    """
    return {
        name: median(seconds / other for seconds, other in zip(times[name], times[whole], strict=True))
        for name in times
        if name != whole
    }
