"""What would show a claim: one class a kind of test, each with its rule.

A difference is significant by `tasks.common.paired.RULE`. Words of a verdict are those of `VERDICTS`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.special import stdtrit
from scipy.stats import permutation_test, rankdata, ttest_ind, zscore

from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.runs.metrics import unpack_correct
from hf_sparseprior.runs.tables import count_of_seeds
from tasks.common.paired import CONFIDENCE, FEWEST, POWER, Difference, detectable, differences, image_scores
from tasks.common.records import RECORDS, read_records

HOLDS, FAILS, OPEN, NOT_YET, UNTRIED = (*("holds", "does not hold", "inconclusive", "not run yet", "not tried"),)
VERDICTS = (HOLDS, FAILS, OPEN, NOT_YET, UNTRIED)
LEVEL = 0.05  # of rank correlations, to one side
FEWEST_RANKED = 4  # three rows in order come out by chance once in six times
PERMUTATIONS = 20_000
CONTRAST = np.array([1.0, -1.0, -1.0, 1.0])  # of the rows above and below of one difference, then of the other

Records = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What came out.

    verdict: one of `VERDICTS`. ours: our number, as text. detectable: the smallest difference that would be found
    significant, as text. mean, half_width: of a difference, in points; without a half_width nothing is significant.
    paper: the paper's difference, in points.
    """

    verdict: str
    ours: str = "-"
    detectable: str = "-"
    mean: float | None = None
    half_width: float | None = None
    paper: float | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of test."""

    name: ClassVar[str]

    @property
    def rows(self) -> tuple[str, ...]:
        """Rows of a comparison that it reads."""
        return ()

    @classmethod
    def read(cls, settings: Any) -> Kind:
        """From what stands in a file.

        Raises:
            ValueError: for unknown, missing and bad settings.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"{settings!r} must be a map")
        known = {own.name for own in fields(cls)}
        needed = {own.name for own in fields(cls) if own.default is MISSING and own.default_factory is MISSING}
        if unknown := sorted(map(str, set(settings) - known)):
            raise ValueError(f"{unknown[0]!r} is not known; known are {', '.join(sorted(known))}")
        if missing := sorted(needed - set(settings)):
            raise ValueError(f"it lacks {', '.join(missing)}")
        made = cls(**settings)
        made.check()
        return made

    def check(self) -> None:
        """Raise ValueError for bad settings."""

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:
        """What came out.

        Args:
            records: of each row, its runs; rows without any are missing.
            metric: a share, higher is better.
            root: what paths of files start from.
        """
        raise NotImplementedError


def _number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} must be a number")


def outcome_of(difference: Difference, counted: str, paper: float | None, margin: float = 0.0) -> Outcome:
    """What came out of a difference that should be above 0, or at most `margin` points below.

    counted: what its interval is over, as text. paper: the paper's, in points.
    """
    mean, least = 100 * difference.mean, detectable([difference])
    if difference.half_width is None or difference.significant is None:
        return Outcome(OPEN, f"{mean:+.2f} ({counted})", least, mean, None, paper)
    half = 100 * difference.half_width
    verdict = HOLDS if mean - half > -margin else FAILS if mean + half < -margin else OPEN
    text = f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}; {counted})"
    return Outcome(verdict, text, least, mean, half, paper)


@dataclass(frozen=True)
class HigherThan(Kind):
    """`higher` is above `lower`, or with a `margin` at most so many points below it. `paper`: its difference."""

    higher: str
    lower: str
    paper: float | None = None
    margin: float = 0.0
    name: ClassVar[str] = "difference"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return (self.higher, self.lower)

    def check(self) -> None:  # noqa: D102
        for name in ("paper", "margin"):
            if (value := getattr(self, name)) is not None:
                _number(value, name)
        if self.margin < 0:
            raise ValueError(f"margin={self.margin} must be 0 or more")
        if self.higher == self.lower:
            raise ValueError(f"{self.higher!r} is compared with itself")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        found = differences(records, self.lower, metric).get(self.higher) if self.lower in records else None
        if found is None:
            return Outcome(NOT_YET, paper=self.paper)
        return outcome_of(found, count_of_seeds(len(found.by_seed)), self.paper, self.margin)


def means(records: Records, rows: Sequence[str], metric: str) -> dict[str, float] | None:
    """Mean of each row in percent, over the seeds that all rows have; None if a row has no run, or they share none.

    Rounded to nine digits, so that equal rows are equal in whatever order their runs are added.
    """
    runs = {row: {run["seed"]: run["metrics"][metric] for run in records.get(row, ())} for row in rows}
    shared = set.intersection(*(set(own) for own in runs.values()))
    if not shared:
        return None
    return {row: float(f"{100 * np.mean([own[seed] for seed in shared]):.9g}") for row, own in runs.items()}


def ranked(ours: Sequence[float], expected: Sequence[float]) -> tuple[str, str, float]:
    """Verdict and text of Spearman's rank correlation, by a permutation test, and the smallest significant correlation.

    The last is infinite if not even the largest is significant, as with many ties among ours.
    """
    if len(set(ours)) == 1:
        return OPEN, f"no rank correlation: all are equal ({len(ours)} rows", math.inf
    own, wanted = (zscore(rankdata(values)) for values in (ours, expected))  # of which a permutation changes the order

    def correlation(values: np.ndarray, axis: int = -1) -> np.ndarray:
        return (values * wanted).mean(axis)

    given = {"permutation_type": "pairings", "n_resamples": PERMUTATIONS, "vectorized": True}
    above, below = (
        permutation_test((own,), correlation, alternative=side, rng=np.random.default_rng(0), **given)
        for side in ("greater", "less")
    )
    verdict = HOLDS if above.pvalue <= LEVEL else FAILS if below.pvalue <= LEVEL else OPEN
    null = np.sort(above.null_distribution)
    first = len(null) - math.floor(LEVEL * len(null))
    significant = null[first:][
        null[first:] > null[first - 1] + 1e-9
    ]  # a value that stands below, too, comes out too often
    text = f"rank correlation {above.statistic:+.2f} (p = {above.pvalue:.2g}; {len(ours)} rows"
    return verdict, text, float(significant[0]) if len(significant) else math.inf


def _check_pairs(higher: Any, lower: Any) -> None:
    if not isinstance(higher, list) or not isinstance(lower, list):
        raise ValueError("higher and lower must be lists of rows")
    if len(higher) != len(lower) or len(higher) < FEWEST:
        raise ValueError(f"higher and lower must name as many rows, {FEWEST} or more")


def _pairwise(records: Records, higher: Sequence[str], lower: Sequence[str], metric: str) -> list[Difference] | None:
    """Of each pair the row above minus the one below; None if a pair shares no seed."""
    apart = []
    for row, other in zip(higher, lower, strict=True):
        found = differences({name: records.get(name, []) for name in (other, row)}, other, metric).get(row)
        if found is None:
            return None
        apart.append(found)
    return apart


@dataclass(frozen=True)
class Pairs(Kind):
    """Rows of `higher` are above those of `lower`, each above the one in its place, with which it shares its settings.

    The rule for seeds is applied to pairs: of each, the difference of means over the seeds that both rows have.
    """

    higher: list[str]
    lower: list[str]
    paper: float | None = None
    name: ClassVar[str] = "pairs"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return (*self.higher, *self.lower)

    def check(self) -> None:  # noqa: D102
        _check_pairs(self.higher, self.lower)
        if len(set(self.rows)) < len(self.rows):
            raise ValueError("each row must be in one pair alone, because pairs count as independent")
        if self.paper is not None:
            _number(self.paper, "paper")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        apart = _pairwise(records, self.higher, self.lower, metric)
        if apart is None:
            return Outcome(NOT_YET, paper=self.paper)
        pairs = Difference({number: found.mean for number, found in enumerate(apart)}, {})
        above = sum(difference > 0 for difference in pairs.by_seed.values())
        seeds = count_of_seeds(min(len(found.by_seed) for found in apart))
        return outcome_of(pairs, f"{len(apart)} pairs, {above} above, of {seeds}", self.paper)


@dataclass(frozen=True)
class Contrast(Kind):
    """One difference is larger than another, or with a `margin` at most so many points smaller.

    larger, smaller: of each difference, the row above and the row below. paper: larger minus smaller.
    """

    larger: list[str]
    smaller: list[str]
    paper: float | None = None
    margin: float = 0.0
    name: ClassVar[str] = "contrast"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(dict.fromkeys((*self.larger, *self.smaller)))

    def check(self) -> None:  # noqa: D102
        for name in ("larger", "smaller"):
            if not isinstance(rows := getattr(self, name), list) or len(rows) != 2 or rows[0] == rows[1]:
                raise ValueError(f"{name}={rows!r} must be a list of two rows, the first minus the second")
        if self.larger == self.smaller:
            raise ValueError(f"{self.larger} is compared with itself")
        for name in ("paper", "margin"):
            if (value := getattr(self, name)) is not None:
                _number(value, name)
        if self.margin < 0:
            raise ValueError(f"margin={self.margin} must be 0 or more")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        runs = {row: {run["seed"]: run for run in records.get(row, ())} for row in self.rows}
        shared = sorted(set.intersection(*(set(own) for own in runs.values())))
        if not shared:
            return Outcome(NOT_YET, paper=self.paper)
        by_seed, errors = {}, {}
        for seed in shared:
            four = [runs[row][seed] for row in (*self.larger, *self.smaller)]
            by_seed[seed] = float(np.dot(CONTRAST, [run["metrics"][metric] for run in four]))
            right = [own for run in four if (own := image_scores(run, metric)) is not None]
            if len(right) == len(four) and len({len(own) for own in right}) == 1:
                errors[seed] = float(np.std(CONTRAST @ np.array(right), ddof=1)) / math.sqrt(len(right[0]))
        found = Difference(by_seed, errors)
        return outcome_of(found, count_of_seeds(len(shared)), self.paper, self.margin)


@dataclass(frozen=True)
class Ranked(Kind):
    """What rank correlations have in common."""

    @property
    def expected(self) -> Mapping[str, float]:
        """A number for each row, whose order ours should have."""
        raise NotImplementedError

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(self.expected)

    def _check_rows(self, rows: Any) -> None:
        if not isinstance(rows, Mapping) or len(rows) < FEWEST_RANKED:
            raise ValueError(f"it needs a number for each of {FEWEST_RANKED} rows or more")
        for row, value in rows.items():
            if not isinstance(row, str):
                raise ValueError(f"row {row!r} must be a text")
            _number(value, row)
        ties = math.prod(math.factorial(count) for count in Counter(rows.values()).values())
        if ties / math.factorial(len(rows)) > LEVEL:
            raise ValueError(f"with so many ties among {len(rows)} rows no order could be significant")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        found = means(records, self.rows, metric)
        if found is None:
            return Outcome(NOT_YET)
        verdict, text, least = ranked(list(found.values()), list(self.expected.values()))
        seeds = set.intersection(*({run["seed"] for run in records[row]} for row in self.rows))
        smallest = "-" if math.isinf(least) else f"{least:.2f} (rank)"
        return Outcome(verdict, f"{text}, {count_of_seeds(len(seeds))})", smallest)


@dataclass(frozen=True)
class SameOrder(Ranked):
    """The rows come in the order of the paper's numbers."""

    paper: Mapping[str, float]
    name: ClassVar[str] = "order"

    @property
    def expected(self) -> Mapping[str, float]:  # noqa: D102
        return self.paper

    def check(self) -> None:  # noqa: D102
        self._check_rows(self.paper)


@dataclass(frozen=True)
class Trend(Ranked):
    """The metric goes `direction` with the number of a row."""

    xs: Mapping[str, float]
    direction: str
    name: ClassVar[str] = "trend"

    @property
    def expected(self) -> Mapping[str, float]:  # noqa: D102
        return self.xs if self.direction == "up" else {row: -value for row, value in self.xs.items()}

    def check(self) -> None:  # noqa: D102
        self._check_rows(self.xs)
        if self.direction not in ("up", "down"):
            raise ValueError(f"direction={self.direction!r} must be up or down")


@dataclass(frozen=True)
class Best(Kind):
    """`row` is the best of the rows."""

    row: str
    among: list[str] = field(default_factory=list)
    name: ClassVar[str] = "best"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(dict.fromkeys((self.row, *self.among)))

    def check(self) -> None:  # noqa: D102
        if not isinstance(self.among, list) or len(self.rows) < 3:
            raise ValueError("among must name two other rows or more")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        found = means(records, self.rows, metric)
        if found is None:
            return Outcome(NOT_YET)
        apart = differences({row: records[row] for row in self.rows}, self.row, metric)
        above = [row for row, other in apart.items() if other.significant and other.mean > 0]
        below = [row for row, other in apart.items() if other.significant and other.mean < 0]
        verdict = FAILS if above else HOLDS if len(below) == len(self.rows) - 1 else OPEN
        place = sorted(found.values(), reverse=True).index(found[self.row]) + 1
        seeds = count_of_seeds(min(len(other.by_seed) for other in apart.values()))
        text = f"rank {place} of {len(found)}, mean {found[self.row]:.2f}; significantly above {len(below)}, below "
        return Outcome(verdict, f"{text}{len(above)} of the others ({seeds})", detectable(list(apart.values())))


@dataclass(frozen=True)
class Every(Kind):
    """Each row of `higher` is above the one in its place in `lower`.

    It does not hold if one of them is significant the other way, as `Best`; of many rows that comes out by chance more
    often.
    """

    higher: list[str]
    lower: list[str]
    name: ClassVar[str] = "every"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(dict.fromkeys((*self.higher, *self.lower)))

    def check(self) -> None:  # noqa: D102
        _check_pairs(self.higher, self.lower)
        if len(set(zip(self.higher, self.lower, strict=True))) < len(self.higher):
            raise ValueError("each pair must be there once")
        if same := [row for row, other in zip(self.higher, self.lower, strict=True) if row == other]:
            raise ValueError(f"{same[0]!r} is compared with itself")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        apart = _pairwise(records, self.higher, self.lower, metric)
        if apart is None:
            return Outcome(NOT_YET)
        above = [found for found in apart if found.significant and found.mean > 0]
        below = [row for row, found in zip(self.higher, apart, strict=True) if found.significant and found.mean < 0]
        verdict = FAILS if below else HOLDS if len(above) == len(apart) else OPEN
        named = f" ({', '.join(below)})" if below else ""
        seeds = count_of_seeds(min(len(found.by_seed) for found in apart))
        text = f"significantly above {len(above)} of {len(apart)}, below {len(below)}{named} ({seeds})"
        return Outcome(verdict, text, detectable(apart))


@dataclass(frozen=True)
class Oracle(Kind):
    """Rows are complementary: with one model of each, an image is right in one of them more often than with as many
    seeds of one row.

    The first is there for each seed, the second for each row; their means are compared by Welch's interval.
    """

    among: list[str]
    name: ClassVar[str] = "oracle"

    @property
    def rows(self) -> tuple[str, ...]:  # noqa: D102
        return tuple(dict.fromkeys(self.among))

    def check(self) -> None:  # noqa: D102
        if not isinstance(self.among, list) or len(self.rows) < FEWEST or len(self.rows) < len(self.among):
            raise ValueError(f"among must name {FEWEST} rows or more, each once")

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        right = {
            row: {run["seed"]: unpack_correct(run["test_correct"]) for run in records.get(row, ())} for row in self.rows
        }
        shared = sorted(set.intersection(*(set(own) for own in right.values())))[: len(self.rows)]
        if len(shared) < len(self.rows):
            return Outcome(NOT_YET)
        of_rows = [np.any([right[row][seed] for row in self.rows], axis=0).mean() for seed in shared]
        of_seeds = [np.any([right[row][seed] for seed in shared], axis=0).mean() for row in self.rows]
        test = ttest_ind(of_rows, of_seeds, equal_var=False)
        low, high = (100 * float(end) for end in test.confidence_interval(CONFIDENCE))
        mean = 100 * float(np.mean(of_rows) - np.mean(of_seeds))
        text = (
            f"{100 * np.mean(of_rows):.2f} % with {len(self.rows)} rows, {100 * np.mean(of_seeds):.2f} % with as many "
            f"seeds of one: {mean:+.2f} ({low:+.2f} to {high:+.2f})"
        )
        verdict = HOLDS if low > 0 else FAILS if high < 0 else OPEN
        half = (high - low) / 2
        # Welch's interval is t(0.975, df) standard errors wide, so both give what is detectable with `POWER`.
        least = half * (1 + stdtrit(test.df, POWER) / stdtrit(test.df, (1 + CONFIDENCE) / 2))
        return Outcome(verdict, text, f"{least:.2f}", mean, half)


def number_in(root: Path, record: str, key: str) -> float | None:
    """The number under a key such as "rows/dense/mean" in a JSON file; None if there is no such file, or no such run.

    In a file of records a key has row and seed in front: "dense/0/pruning_ratio".

    Names there may have slashes themselves; the longest one that fits is taken. An entry of a list has its place, from
    0, or its own "name"; * is the mean over all entries, as in "layers/*/weight".

    Raises:
        ValueError: if it has no such number.
    """
    path = root / record
    if not path.is_file():
        return None
    if path.name == RECORDS:
        place = re.fullmatch(r"([^/]+)/(\d+)/(.+)", key)
        if place is None:
            raise ValueError(f"{record}: key {key!r} must be ROW/SEED/KEY")
        row, seed, key = place.groups()
        content = read_records(path.parent).get(row, {}).get(int(seed))
        if content is None:
            return None
    else:
        content = read_json(path, RECORD_BYTES, finite=False)
    value = _under(content, key, f"{record} has no {key!r}", f"{record}, {key}")
    _number(value, f"{record}, {key}")
    return float(value)


def _under(value: Any, rest: str, missing: str, place: str) -> Any:
    while rest:
        if isinstance(value, list) and value and f"{rest}/".startswith("*/"):
            numbers = [_under(entry, rest[2:], missing, place) for entry in value]
            for number in numbers:
                _number(number, place)
            return math.fsum(numbers) / len(numbers)
        if isinstance(value, list):
            places = {str(place): own for place, own in enumerate(value)}
            value = places | {own["name"]: own for own in value if isinstance(own, dict) and "name" in own}
        fitting = [name for name in value if f"{rest}/".startswith(f"{name}/")] if isinstance(value, dict) else []
        if not fitting:
            raise ValueError(missing)
        name = max(fitting, key=len)
        value, rest = value[name], rest[len(name) + 1 :]
    return value


@dataclass(frozen=True)
class OfRecord(Kind):
    """What numbers that stand in a record have in common.

    key: parts with slashes between them. unit: of ours, as text. less: what is taken from the number, as a dense
    model's parameters. over: key of a number that it is divided by, as a dense model's memory. saved_of: key of a
    number; ours is by how many percent the first is less. low, high: keys of the ends of its interval, by which the
    claim is judged then, as the quartiles of a measured time.
    """

    record: str
    key: str
    unit: str = ""
    less: float = 0.0
    over: str | None = None
    saved_of: str | None = None
    low: str | None = None
    high: str | None = None

    def check(self) -> None:  # noqa: D102
        _number(self.less, "less")
        if (self.low is None) != (self.high is None):
            raise ValueError("it needs both of low and high, or neither")
        if self.low is not None and isinstance(self, Value):
            raise ValueError("low and high are of a bound")
        if sum((self.less != 0, self.over is not None, self.saved_of is not None)) > 1:
            raise ValueError("it takes one of less, over and saved_of")

    def good(self, value: float) -> bool:
        """Whether the number is what the claim says."""
        raise NotImplementedError

    def _ours(self, root: Path, key: str) -> float | None:
        value, divisor = number_in(root, self.record, key), self.over or self.saved_of
        if value is None or divisor is None:
            return None if value is None else value - self.less
        whole = number_in(root, self.record, divisor)
        if not whole:
            raise ValueError(f"{self.record}, {divisor}: {whole} is nothing to divide by")
        share = value / whole
        return share if self.over is not None else 100 * (1 - share)

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        value = self._ours(root, self.key)
        if value is None:
            return Outcome(NOT_YET)
        ends = [self._ours(root, key) for key in (self.low, self.high) if key is not None]
        good = [self.good(end) for end in ends if end is not None] or [self.good(value)]
        verdict = HOLDS if all(good) else OPEN if any(good) else FAILS
        text = f"{as_text(value)} {self.unit}".strip()
        if ends:
            text += f" ({' to '.join(as_text(end) for end in ends if end is not None)})"
        return Outcome(verdict, text)


def as_text(value: float) -> str:
    """A number with five digits, or a large one without a fraction."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


@dataclass(frozen=True)
class Value(OfRecord):
    """A number in a record is `expected`, up to `tolerance`."""

    expected: float = field(kw_only=True)
    tolerance: float = field(kw_only=True)
    name: ClassVar[str] = "value"

    def check(self) -> None:  # noqa: D102
        super().check()
        _number(self.expected, "expected")
        _number(self.tolerance, "tolerance")

    def good(self, value: float) -> bool:  # noqa: D102
        # A number that is half of the last printed digit away is as near.
        return abs(value - self.expected) <= self.tolerance * (1 + 1e-9)


@dataclass(frozen=True)
class Bound(OfRecord):
    """A number in a record is at least or at most so large."""

    at_least: float | None = field(default=None, kw_only=True)
    at_most: float | None = field(default=None, kw_only=True)
    name: ClassVar[str] = "bound"

    def check(self) -> None:  # noqa: D102
        super().check()
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("it needs one of at_least and at_most")
        _number(self.at_most if self.at_least is None else self.at_least, "the bound")

    def good(self, value: float) -> bool:  # noqa: D102
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class Untried(Kind):
    """Not tried, and why."""

    why: str
    name: ClassVar[str] = "untried"

    @classmethod
    def read(cls, settings: Any) -> Kind:  # noqa: D102
        if not isinstance(settings, str) or not settings.strip():
            raise ValueError(f"{settings!r} must say why")
        return cls(" ".join(settings.split()))

    def judge(self, records: Records, metric: str, root: Path) -> Outcome:  # noqa: D102
        return Outcome(UNTRIED, self.why)


KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (HigherThan, Pairs, Every, Contrast, SameOrder, Trend, Best, Oracle, Value, Bound, Untried)
}
