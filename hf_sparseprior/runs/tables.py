"""Numbers as text: Markdown tables, means with their spread, shares with their interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scipy.stats import binomtest


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of these cells."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def plus_minus(mean: float, deviation: float | None, sign: str = "") -> str:
    """ "70.35 ± 0.12", or the mean alone without a deviation. With sign="+" a number of 0 or more has a plus."""
    return f"{mean:{sign}.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` trials (Wilson 1927)."""
    interval = binomtest(right, count).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def paired_interval(won: int, lost: int, count: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of the same `count` trials (Agresti and Min 2005, adjusted Wald).

    won, lost: trials that only the first, or only the second, got right.
    """
    first, second, total = (won + 0.5) / (count + 2), (lost + 0.5) / (count + 2), count + 2
    half = 1.959964 * math.sqrt((first + second - (first - second) ** 2) / total)
    return max(-1.0, first - second - half), min(1.0, first - second + half)


def count_of_seeds(count: int) -> str:
    """ "3 seeds" or "1 seed"."""
    return f"{count} seeds" if count > 1 else "1 seed"
