"""Differences between the rows of a comparison, seed by seed, and when one is significant.

Runs of one seed are paired: they see the same examples in the same order, augmented alike, and are tested on the same
images. From scratch they start with the same weights, as far as a dense model has them. So a row is compared with the
first row, or its own reference, within each seed, and what both rows owe to the seed cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.tables import markdown_table, plus_minus

ACCURACY = "test_accuracy"
FEWEST = 3  # seeds, for a difference to be significant
CONFIDENCE = 0.95
POWER = 0.8
AT_LEAST = "at least"
RULE = (
    f"A difference is significant if 0 is outside its {100 * CONFIDENCE:.0f} % interval, which is the mean ± "
    f"t(0.975, n - 1) standard errors over n seeds, with n of {FEWEST} or more. If no row differed, expect one false "
    "positive in 20. Intervals are of one row each, and of this data, model and schedule."
)

DETECTABLE = (
    f'"Detectable" is the smallest difference that {100 * POWER:.0f} of 100 repetitions would find significant (the '
    f'power), with the spread that was found; with fewer than {FEWEST} seeds it is "{AT_LEAST}" what the test images '
    "alone allow, to which seeds add."
)


@dataclass(frozen=True)
class Difference:
    """A row's accuracy minus the first row's, by seed, as fractions.

    by_seed: of the seeds that both rows have.
    image_errors: standard error of a seed's difference over the test images or episodes, where both runs recorded
    what they did in each of them. minus: the row that was taken from it.
    """

    by_seed: Mapping[int, float]
    image_errors: Mapping[int, float]
    minus: str = ""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(list(self.by_seed.values())))

    @property
    def error(self) -> float | None:
        """Standard error of the mean, from the spread over seeds; None of a single seed."""
        count = len(self.by_seed)
        return float(np.std(list(self.by_seed.values()), ddof=1)) / math.sqrt(count) if count > 1 else None

    @property
    def half_width(self) -> float | None:
        """Half of the confidence interval; None of a single seed."""
        if self.error is None:
            return None
        return float(stdtrit(len(self.by_seed) - 1, (1 + CONFIDENCE) / 2)) * self.error

    @property
    def significant(self) -> bool | None:
        """Whether it is, by `RULE`; None with too few seeds."""
        if len(self.by_seed) < FEWEST or self.half_width is None:
            return None
        return abs(self.mean) > self.half_width


def differences(
    results: Mapping[str, Sequence[Mapping[str, Any]]], first: str | Mapping[str, str], metric: str = ACCURACY
) -> dict[str, Difference]:
    """Each row's difference to the first one, or to its own reference. Rows that share no seed with it are left out.

    Args:
        results: records by row, one a seed.
        first: name of the row that the others are compared with, or for each row the name of its reference.
        metric: what is compared, a share of the test images or the mean of their rewards; where it is the mean of what
            a record has of each image (`image_scores`), the error over them is known.
    """
    runs = {name: {record["seed"]: record for record in records} for name, records in results.items()}
    found = {}
    for name, own in runs.items():
        minus = first if isinstance(first, str) else first[name]
        pairs = {seed: (own[seed], runs[minus][seed]) for seed in own if seed in runs.get(minus, {})}
        if name == minus or not pairs:
            continue
        errors = {seed: image_error(*pair, metric) for seed, pair in pairs.items()}
        found[name] = Difference(
            {seed: one["metrics"][metric] - other["metrics"][metric] for seed, (one, other) in pairs.items()},
            {seed: error for seed, error in errors.items() if error is not None},
            minus,
        )
    return found


def image_error(one: Mapping[str, Any], other: Mapping[str, Any], metric: str = ACCURACY) -> float | None:
    """Standard error over test images, or episodes, of the difference of two runs; None if it is not known.

    It is what another draw of as many test images would change, with the same two models.
    """
    scores, reference = image_scores(one, metric), image_scores(other, metric)
    if scores is None or reference is None or len(scores) != len(reference) or len(scores) < 2:
        return None
    return float(np.std(scores - reference, ddof=1)) / math.sqrt(len(scores))


def image_scores(record: Mapping[str, Any], metric: str) -> np.ndarray | None:
    """What the metric is the mean of: of each test image 1 if it is right, else 0, or of each episode its reward.

    None if a record does not have it of this metric.
    """
    right = unpack_correct(record["test_correct"]).astype(float) if record.get("test_correct") else None
    rewards = np.array(record["test_rewards"]) if record.get("test_rewards") else None
    for scores in (right, rewards):
        if scores is not None and math.isclose(scores.mean(), record["metrics"][metric], abs_tol=1e-9):
            return scores
    return None


def smallest_detectable(difference: Difference) -> float | None:
    """The difference in points that is significant with a probability of `POWER`, with the spread that was found; None
    with fewer seeds than the rule asks for.
    """
    count = len(difference.by_seed)
    if difference.error is None or count < FEWEST:
        return None
    return 100 * float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) + stdtrit(count - 1, POWER)) * difference.error


def detectable(found: Sequence[Difference]) -> str:
    """The smallest detectable difference, as text, in points; of several, that where it is largest.

    With too few seeds for the rule: the least that the test images alone allow, to which seeds add; "-" if it is not
    known which images were right.
    """
    least = [smallest_detectable(one) for one in found]
    if None not in least:
        return f"{max(one for one in least if one is not None):.2f}"
    errors = [max(one.image_errors.values(), default=None) for one in found]
    if None in errors or not errors:
        return "-"
    by_images = 100 * float(ndtri((1 + CONFIDENCE) / 2) + ndtri(POWER)) * max(e for e in errors if e is not None)
    return f"{AT_LEAST} {by_images:.2f}"


def verdict(difference: Difference) -> str:
    """What `RULE` says, in words."""
    if difference.significant is None:
        return f"fewer than {FEWEST} seeds"
    if not difference.significant:
        return "not significant"
    return "significantly above" if difference.mean > 0 else "significantly below"


def difference_table(found: Mapping[str, Difference], first: str, rule: bool = True) -> str:
    """The differences as a Markdown table, in percentage points, and the rule below it if it is wanted.

    A row whose reference is not `first` says so.
    """
    columns = (
        *("row", f"minus {first}, points, by seed", "mean ± standard error", "95 % interval"),
        *("detectable", "standard error of one seed, by its test images", "verdict"),
    )
    rows = []
    for name, difference in found.items():
        mean, half = 100 * difference.mean, difference.half_width
        errors = list(difference.image_errors.values())
        rows.append(
            [
                name if difference.minus in ("", first) else f"{name} (minus {difference.minus})",
                ", ".join(f"{100 * value:+.2f}" for value in difference.by_seed.values()),
                plus_minus(mean, None if difference.error is None else 100 * difference.error, "+"),
                "-" if half is None else f"{mean - 100 * half:+.2f} to {mean + 100 * half:+.2f}",
                detectable([difference]),
                f"{100 * float(np.mean(errors)):.2f}" if errors else "-",
                verdict(difference),
            ]
        )
    return markdown_table(columns, rows) + (f"\n\n{RULE} {DETECTABLE}" if rule else "")
