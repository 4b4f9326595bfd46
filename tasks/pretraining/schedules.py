"""DINO's schedules, by step from 0 (Caron et al. 2021, Section 3 and Appendix). Those after the last step are its."""

from __future__ import annotations

import math


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """end + (start - end) (1 + cos(pi step / steps)) / 2: from `start` at step 0 towards `end` at `steps`."""
    share = min(step, steps) / max(1, steps)
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def linear(start: float, end: float, step: int, steps: int) -> float:
    """From `start` at step 0 to `end` at the last one of `steps`, and `end` after them."""
    if step >= steps:
        return end
    return start + (end - start) * step / max(1, steps - 1)


def warmed_up_cosine(highest: float, lowest: float, step: int, steps: int, warmup_steps: int) -> float:
    """Linear from 0 to `highest` over the first steps, then a cosine towards `lowest`."""
    warmup_steps = min(warmup_steps, steps)
    if step < warmup_steps:
        return linear(0.0, highest, step, warmup_steps)
    return cosine(highest, lowest, step - warmup_steps, steps - warmup_steps)
