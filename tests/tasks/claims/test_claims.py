"""Claims of the papers: verdicts against SciPy and simulation, files, and the page in docs/."""

import copy
import dataclasses
import itertools
import json
import math
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from hf_sparseprior.analysis import pictures
from hf_sparseprior.runs.hf_run import task_in
from hf_sparseprior.runs.metrics import pack_correct
from hf_sparseprior.runs.tables import count_of_seeds
from tasks.claims import page, todo
from tasks.claims.claim import TIERS, read_paper, read_papers
from tasks.claims.kinds import FAILS, HOLDS, KINDS, NOT_YET, OPEN, UNTRIED, Bound, number_in
from tasks.common.compare import all_records
from tasks.common.compare import load_comparison as load_task_comparison
from tasks.common.paired import Difference, smallest_detectable
from tasks.common.records import add_records
from tests.each import each

METRIC = "test_accuracy"


def runs(*shares: float) -> list[dict]:
    """Records of one row, a seed each."""
    return [{"seed": seed, "metrics": {METRIC: share}} for seed, share in enumerate(shares)]


def keep(folder: Path, rows: dict[str, list[float]], **more: object) -> None:
    """Add records of rows to those in a folder, a share for each seed."""
    add_records(folder / "r", [(row, {**run, **more}) for row, shares in rows.items() for run in runs(*shares)])


def claim_in(paper: object, name: str) -> object:
    [claim] = [claim for claim in paper.claims if claim.name == name]
    return claim


def judged(kind: str, settings: object, records: dict) -> object:
    return KINDS[kind].read(settings).judge(records, METRIC, page.ROOT)


# ---- differences ----------------------------------------------------------------------------------------------------

PAIR = {"higher": "a", "lower": "b"}


@each("seed, shift", itertools.product(range(20), [-0.03, 0.0, 0.004, 0.03]))
def test_verdict_on_difference_is_that_of_paired_t_test(seed: int, shift: float) -> None:
    random = np.random.default_rng(seed)
    lower = 0.5 + 0.02 * random.standard_normal(5)
    higher = lower + shift + 0.006 * random.standard_normal(5)
    found = judged("difference", PAIR, {"a": runs(*higher), "b": runs(*lower)})
    low, high = stats.ttest_rel(higher, lower).confidence_interval(0.95)
    assert found.verdict == (HOLDS if low > 0 else FAILS if high < 0 else OPEN)
    assert found.mean - found.half_width == pytest.approx(100 * low)
    assert found.mean + found.half_width == pytest.approx(100 * high)
    assert f"{100 * low:+.2f} to {100 * high:+.2f}; 5 seeds" in found.ours


def test_margin_moves_what_has_to_be_told() -> None:
    lower, spread = np.full(5, 0.5), np.array([-1, -0.5, 0, 0.5, 1]) * 0.004
    records = {"a": runs(*(lower - 0.005 + spread)), "b": runs(*lower)}
    assert [judged("difference", {**PAIR, "margin": points}, records).verdict for points in (0, 0.5, 2.0)] == [
        *(FAILS, OPEN, HOLDS)
    ]


@each("records", [{}, {"a": runs(0.5)}, {"b": runs(0.5)}, {"a": runs(0.5), "b": [{**runs(0.5)[0], "seed": 7}]}])
def test_difference_without_shared_seeds_is_not_run_yet(records: dict) -> None:
    assert judged("difference", PAIR, records).verdict == NOT_YET


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_seeds_tell_nothing(count: int) -> None:
    found = judged("difference", PAIR, {"a": runs(*[0.9] * count), "b": runs(*[0.1, 0.1001][:count])})
    assert (found.verdict, found.detectable, found.half_width) == (OPEN, "-", None)
    assert found.mean == pytest.approx(80, abs=0.1) and found.ours == f"{found.mean:+.2f} ({count_of_seeds(count)})"


@pytest.mark.parametrize("count", [1, 2])
def test_few_seeds_could_tell_at_best_what_their_images_allow(count: int) -> None:
    """By simulation: both rows are right with the same chances, on images of their own draws."""
    images, random = 4000, np.random.default_rng(1)
    records = {
        row: [
            {"seed": seed, "metrics": {METRIC: right.mean()}, "test_correct": pack_correct(np.ones(images, int), right)}
            for seed in range(count)
            for right in [(random.random(images) < 0.5).astype(int)]
        ]
        for row in "abcd"
    }
    word, least = judged("difference", PAIR, records).detectable.rsplit(maxsplit=1)
    assert word == "at least"
    apart = random.binomial(images, 0.5 + float(least) / 200, 4000) - random.binomial(
        images, 0.5 - float(least) / 200, 4000
    )
    error = math.sqrt(images / 2)
    assert np.mean(apart > stats.norm.ppf(0.975) * error) == pytest.approx(0.8, abs=0.03)
    # Of four rows that are right independently of each other, the error is root 2 times as large.
    contrast = judged("contrast", {"larger": ["a", "b"], "smaller": ["c", "d"]}, records).detectable
    assert contrast.startswith("at least ")
    assert float(contrast.rpartition(" ")[2]) == pytest.approx(math.sqrt(2) * float(least), rel=0.05)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_smallest_detectable_difference_is_significant_four_times_in_five(count: int) -> None:
    """By simulation with a known spread: what the formula gives of that spread."""
    random, spread, significant, repeats = np.random.default_rng(0), 0.01, 0, 4000
    base = Difference(dict(enumerate(spread * np.sqrt((count - 1) / count) * np.resize([1, -1], count))), {})
    least = smallest_detectable(base) * spread / (base.error * math.sqrt(count)) / 100
    for _ in range(repeats):
        sample = least + spread * random.standard_normal(count)
        significant += bool(Difference(dict(enumerate(sample)), {}).significant and sample.mean() > 0)
    assert 0.74 < significant / repeats < 0.9


def test_rows_are_paired_by_seed() -> None:
    """Equal within each seed: nothing to tell, whatever the seeds do."""
    records = {"a": runs(0.1, 0.5, 0.9), "b": list(reversed(runs(0.1, 0.5, 0.9)))}
    found = judged("difference", PAIR, records)
    assert (found.mean, found.half_width) == (0, 0)
    assert found.verdict == OPEN


# ---- ranks ----------------------------------------------------------------------------------------------------------


@each("seed", range(5))
def test_order_is_spearmans(seed: int) -> None:
    random = np.random.default_rng(seed)
    paper = {name: float(value) for name, value in zip("abcdefgh", random.permutation(8), strict=True)}
    ours = {name: value + 2 * random.standard_normal() for name, value in paper.items()}
    found = judged("order", {"paper": paper}, {name: runs(value / 100) for name, value in ours.items()})
    expected = stats.spearmanr(list(ours.values()), list(paper.values()), alternative="greater")
    assert f"rank correlation {expected.statistic:+.2f}" in found.ours
    assert float(found.ours.partition("p = ")[2].partition(";")[0]) == pytest.approx(expected.pvalue, abs=0.02)


@each(
    "rows, least",
    # Critical values of Spearman's rank correlation to one side at 5 %, as tables of it have them.
    [(4, 1.0), (5, 0.9), (6, 0.829), (7, 0.714), (9, 0.6)],
)
def test_orders_could_tell_the_critical_value_of_the_tables(rows: int, least: float) -> None:
    paper = {f"r{n}": float(n) for n in range(rows)}
    found = judged("order", {"paper": paper}, {name: runs(value / 100) for name, value in paper.items()})
    assert found.detectable.endswith(" (rank)")
    assert float(found.detectable.split()[0]) == pytest.approx(least, abs=0.006 if rows < 8 else 0.02)


@each("values", [(1, 1, 2, 3), (0, 0, 0, 1), (1, 1, 1, 1, 2)])
def test_an_order_that_its_ties_leave_untold_is_refused(values: tuple[int, ...]) -> None:
    rows = {f"r{n}": value for n, value in enumerate(values)}
    orders = list(itertools.permutations(values))
    assert orders.count(values) / len(orders) > 0.05
    with pytest.raises(ValueError, match="ties"):
        KINDS["order"].read({"paper": rows})
    KINDS["order"].read({"paper": {**rows, "x": 7, "y": 8}})


def test_ties_among_our_own_rows_tell_nothing() -> None:
    paper = {name: float(n) for n, name in enumerate("abcd")}
    found = judged("order", {"paper": paper}, {name: runs(0.5 + 0.1 * (name == "d")) for name in paper})
    assert (found.verdict, found.detectable) == (OPEN, "-")


@each("kind, extra, value", [("order", {}, 0.0), ("order", {}, 0.5), ("trend", {"direction": "up"}, 0.5)])
def test_rows_that_are_all_equal_have_no_order(kind: str, extra: dict[str, str], value: float) -> None:
    numbers = {name: float(n) for n, name in enumerate("abcdefghi")}
    settings = {"paper" if kind == "order" else "xs": numbers, **extra}
    found = judged(kind, settings, {name: runs(value) for name in numbers})
    assert (found.verdict, found.detectable) == (OPEN, "-") and "all are equal" in found.ours


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_tie_is_one_in_whatever_order_the_seeds_are_added(first: str) -> None:
    """(0.1 + 0.2) + 0.3 is not (0.3 + 0.2) + 0.1 in floating point."""
    other = "b" if first == "a" else "a"
    paper = {first: 1.0, other: 2.0, "c": 3.0, "d": 4.0}
    records = {"a": runs(0.1, 0.2, 0.3), "b": runs(0.3, 0.2, 0.1), "c": runs(0.5, 0.5, 0.5), "d": runs(0.6, 0.6, 0.6)}
    expected = stats.spearmanr([1.5, 1.5, 3, 4], [1, 2, 3, 4]).statistic
    found = judged("order", {"paper": paper}, records)
    assert f"rank correlation {expected:+.2f}" in found.ours and found.verdict == OPEN


# ---- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-0.02, 0.0, 0.02])
def test_pairs_are_a_paired_t_test_over_settings(shift: float) -> None:
    random, rows = np.random.default_rng(3), "abcdef"
    lower = 0.5 + 0.1 * random.standard_normal((6, 2))
    higher = lower + shift + 0.005 * random.standard_normal((6, 2))
    records = {f"{row}{side}": runs(*of[n]) for n, row in enumerate(rows) for side, of in (("1", higher), ("0", lower))}
    settings = {"higher": [f"{row}1" for row in rows], "lower": [f"{row}0" for row in rows]}
    found = judged("pairs", settings, records)
    low, high = stats.ttest_rel(higher.mean(1), lower.mean(1)).confidence_interval(0.95)
    assert found.verdict == (HOLDS if low > 0 else FAILS if high < 0 else OPEN)
    assert found.mean - found.half_width == pytest.approx(100 * low)
    assert f"{100 * low:+.2f} to {100 * high:+.2f}; 6 pairs" in found.ours and "2 seeds" in found.ours
    assert float(found.detectable) > 0
    del records["a0"]
    assert judged("pairs", settings, records).verdict == NOT_YET


@pytest.mark.parametrize(("shift", "verdict"), [(-0.02, FAILS), (0.0, OPEN), (0.02, HOLDS)])
def test_contrast_is_a_t_test_of_one_difference_against_another(shift: float, verdict: str) -> None:
    random = np.random.default_rng(5)
    of = {row: 0.5 + 0.05 * random.standard_normal(5) for row in "bd"}
    of["a"], of["c"] = (of[low] + 0.01 + 0.003 * random.standard_normal(5) for low in "bd")
    of["a"] = of["a"] + shift
    records = {row: runs(*shares) for row, shares in of.items()}
    found = judged("contrast", {"larger": ["a", "b"], "smaller": ["c", "d"]}, records)
    low, high = stats.ttest_1samp(of["a"] - of["b"] - of["c"] + of["d"], 0).confidence_interval(0.95)
    assert found.verdict == verdict == (HOLDS if low > 0 else FAILS if high < 0 else OPEN)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((100 * low, 100 * high))
    shared = judged("contrast", {"larger": ["a", "b"], "smaller": ["a", "d"]}, records)  # a row may be in both
    assert shared.mean == pytest.approx(100 * np.mean(of["d"] - of["b"]))
    del records["d"]
    assert judged("contrast", {"larger": ["a", "b"], "smaller": ["c", "d"]}, records).verdict == NOT_YET


@pytest.mark.parametrize(("direction", "verdict"), [("up", HOLDS), ("down", FAILS)])
def test_trend_has_a_direction(direction: str, verdict: str) -> None:
    xs = {f"w{x}": x for x in (2, 3, 5, 8, 13)}
    records = {name: runs(0.3 + 0.01 * x) for name, x in xs.items()}
    assert judged("trend", {"xs": xs, "direction": direction}, records).verdict == verdict


def test_best_of_rows() -> None:
    spread = np.array([0, 0.001, -0.001, 0.002, -0.002])
    records = {
        name: runs(*(level + spread * scale)) for name, level, scale in (("a", 0.7, 1), ("b", 0.6, 2), ("c", 0.5, 3))
    }
    assert judged("best", {"row": "a", "among": ["b", "c"]}, records).verdict == HOLDS
    assert judged("best", {"row": "b", "among": ["a", "c"]}, records).verdict == FAILS
    pairs = [judged("difference", {"higher": "a", "lower": other}, records).detectable for other in "bc"]
    assert judged("best", {"row": "a", "among": ["b", "c"]}, records).detectable == max(pairs, key=float) != min(pairs)
    noisy = {**records, "b": runs(0.8, 0.5, 0.75, 0.55, 0.76)}
    assert judged("best", {"row": "a", "among": ["b", "c"]}, noisy).verdict == OPEN
    assert judged("best", {"row": "a", "among": ["b", "d"]}, records).verdict == NOT_YET


SPREAD = np.array([0, 0.001, -0.001, 0.002, -0.002])


@each(
    "levels, verdict, counts",
    [
        ({"a": 0.6, "b": 0.61, "c": 0.65}, HOLDS, "significantly above 3 of 3, below 0 (5 seeds)"),
        ({"a": 0.6, "b": 0.5, "c": 0.65}, OPEN, "significantly above 2 of 3, below 0 (5 seeds)"),
        ({"a": 0.6, "b": 0.4, "c": 0.65}, FAILS, "significantly above 2 of 3, below 1 (b) (5 seeds)"),
    ],
)
def test_every_row_is_above(levels: dict, verdict: str, counts: str) -> None:
    """Each difference by itself as `difference` judges it, against one row or against rows of their own."""
    noise = np.random.default_rng(0).permutation(SPREAD)
    records = {row: runs(*(level + SPREAD)) for row, level in levels.items()}
    records |= {"d": runs(*(0.5 + noise)), "e": runs(*(0.5 + noise))}
    for lower in (["d", "d", "d"], ["d", "e", "d"]):
        found = judged("every", {"higher": ["a", "b", "c"], "lower": lower}, records)
        assert (found.verdict, found.ours, found.mean) == (verdict, counts, None)
        alone = [
            judged("difference", {"higher": row, "lower": other}, records)
            for row, other in zip("abc", lower, strict=True)
        ]
        assert [one.verdict for one in alone].count(HOLDS) == int(counts.split("above ")[1][0])
        assert found.detectable == max((one.detectable for one in alone), key=float)
    del records["c"]
    assert judged("every", {"higher": ["a", "b", "c"], "lower": ["d", "d", "d"]}, records).verdict == NOT_YET


@pytest.mark.parametrize(("apart", "verdict"), [(True, HOLDS), (False, OPEN)])
def test_oracle_of_rows_is_compared_with_that_of_as_many_seeds(apart: bool, verdict: str) -> None:
    """Rows that are right on parts of their own, or seeds that differ as much as rows do."""
    generator, rows, images = np.random.default_rng(0), ["a", "b", "c", "d"], 4000
    records, right = {}, {}
    for number, row in enumerate(rows):
        hard = np.arange(images) % len(rows) == number if apart else np.zeros(images, bool)
        records[row] = []
        for seed in range(5):
            right[row, seed] = (generator.random(images) < 0.5) & ~hard
            packed = pack_correct(np.ones(images, int), right[row, seed].astype(int))
            records[row].append({"seed": seed, "metrics": {METRIC: right[row, seed].mean()}, "test_correct": packed})
    found = judged("oracle", {"among": rows}, records)
    own = [100 * np.mean([any(right[row, seed][i] for row in rows) for i in range(images)]) for seed in range(4)]
    alone = [100 * np.mean([any(right[row, seed][i] for seed in range(4)) for i in range(images)]) for row in rows]
    assert found.verdict == verdict and found.mean == pytest.approx(np.mean(own) - np.mean(alone))
    assert f"{np.mean(own):.2f} % with 4 rows, {np.mean(alone):.2f} % with as many" in found.ours
    variances = [np.var(values, ddof=1) / 4 for values in (own, alone)]
    freedom = sum(variances) ** 2 / sum(variance**2 / 3 for variance in variances)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(sum(variances)))
    error = found.half_width / stats.t.ppf(0.975, freedom)
    least = error * (stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom))
    assert float(found.detectable) == pytest.approx(least, abs=0.006)
    del records["b"][1:]
    assert judged("oracle", {"among": rows}, records).verdict == NOT_YET


@each(
    "kind, settings, message",
    [
        ("pairs", {"higher": ["a", "b"], "lower": ["c", "d"]}, "3 or more"),
        ("pairs", {"higher": ["a", "b", "c"], "lower": ["d", "e"]}, "as many rows"),
        ("pairs", {"higher": ["a", "b", "c"], "lower": ["d", "d", "d"]}, "one pair alone"),
        ("pairs", {"higher": "a", "lower": ["d"]}, "lists of rows"),
        ("contrast", {"larger": ["a"], "smaller": ["c", "d"]}, "larger=.* two rows"),
        ("contrast", {"larger": ["a", "a"], "smaller": ["c", "d"]}, "larger=.* two rows"),
        ("contrast", {"larger": ["a", "b"], "smaller": "cd"}, "smaller=.* two rows"),
        ("contrast", {"larger": ["a", "b"], "smaller": ["a", "b"]}, "compared with itself"),
        ("contrast", {"larger": ["a", "b"], "smaller": ["c", "d"], "margin": -1}, "margin=-1"),
        ("every", {"higher": ["a", "b"], "lower": ["c", "d"]}, "3 or more"),
        ("every", {"higher": ["a", "b", "c"], "lower": ["d", "d"]}, "as many rows"),
        ("every", {"higher": "abc", "lower": ["d", "d", "d"]}, "lists of rows"),
        ("every", {"higher": ["a", "a", "c"], "lower": ["d", "d", "d"]}, "once"),
        ("every", {"higher": ["a", "b", "d"], "lower": ["d", "d", "d"]}, "'d' is compared with itself"),
    ],
)
def test_bad_settings_are_refused(kind: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KINDS[kind].read(settings)


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_names_in_a_record_may_have_slashes(tmp_path) -> None:
    content = {"a/b": {"c": 1, "c/d": 2}, "a": [{"e": 3, "name": "0.5"}, 4, {"name": "x/y", "e": 6}], "": 5}
    (tmp_path / "r.json").write_text(json.dumps(content), encoding="utf-8")
    found = {
        key: number_in(tmp_path, "r.json", key) for key in ("a/b/c", "a/b/c/d", "a/0/e", "a/1", "a/0.5/e", "a/x/y/e")
    }
    assert list(found.values()) == [1, 2, 3, 4, 3, 6]
    for key in ("a/b/d", "a/3", "a/0.6/e", "a/-1", "a/0/e/f", "b", "/a"):
        with pytest.raises(ValueError, match="has no"):
            number_in(tmp_path, "r.json", key)
    with pytest.raises(ValueError, match="must be a number"):
        number_in(tmp_path, "r.json", "a/b")


def test_value_and_bound_read_a_record(tmp_path) -> None:
    (tmp_path / "flops.json").write_text(json.dumps({"rows": [{"gflops": 4.25}, {"gflops": 10}]}), encoding="utf-8")
    given = {"record": "flops.json", "key": "rows/0/gflops"}

    def verdict(kind: str, **settings: object) -> str:
        return KINDS[kind].read({**given, **settings}).judge({}, METRIC, tmp_path).verdict

    assert verdict("value", expected=4.2, tolerance=0.05) == HOLDS
    assert verdict("value", expected=4.3, tolerance=0.04) == FAILS
    assert verdict("value", expected=57.5, tolerance=0.001, saved_of="rows/1/gflops") == HOLDS
    assert verdict("value", expected=42.5, tolerance=0.001, saved_of="rows/1/gflops") == FAILS
    assert verdict("bound", at_most=4.25) == verdict("bound", at_least=4.25) == HOLDS
    assert verdict("bound", at_most=4.2) == verdict("bound", at_least=4.3) == FAILS
    assert verdict("value", expected=1, tolerance=0, record="none.json") == NOT_YET
    assert verdict("value", expected=0.25, tolerance=0.001, less=4.0) == HOLDS
    assert verdict("bound", at_most=0.425, over="rows/1/gflops") == HOLDS
    assert verdict("bound", at_most=0.42, over="rows/1/gflops") == FAILS
    ends = {"low": "rows/0/gflops", "high": "rows/1/gflops"}
    assert [verdict("bound", at_most=most, **ends) for most in (10, 7, 4)] == [HOLDS, OPEN, FAILS]
    found = KINDS["bound"].read({**given, "at_most": 7, "unit": "G", **ends}).judge({}, METRIC, tmp_path)
    assert found.ours == "4.25 G (4.25 to 10)"
    with pytest.raises(ValueError, match="low and high are of a bound"):
        verdict("value", expected=7, tolerance=1, **ends)
    (tmp_path / "nothing.json").write_text('{"a": 1, "b": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"nothing.json, b: 0.0 is nothing to divide by"):
        verdict("bound", record="nothing.json", key="a", over="b", at_most=1)
    with pytest.raises(ValueError, match="both of low and high"):
        verdict("bound", at_most=7, low="rows/0/gflops")
    with pytest.raises(ValueError, match="one of less, over and saved_of"):
        verdict("bound", at_most=7, less=1, over="rows/1/gflops")
    with pytest.raises(ValueError, match=r"flops.json has no 'rows/2/gflops'"):
        Bound("flops.json", "rows/2/gflops", at_most=1).judge({}, METRIC, tmp_path)


# ---- files ----------------------------------------------------------------------------------------------------------

GOOD = {
    "title": "A",
    "source": "A paper",
    "claims": {
        "table1-a": {
            **{"where": "Table 1", "claim": "a is above b.", "paper": "+1", "tier": "A", "test": {"difference": PAIR}},
            **{"config": "a.yaml", "task": "classification", "records": "r", "reduced": "all of it"},
        },
        "table3-c": {
            **{"where": "Table 3", "claim": "a is wider.", "paper": "+2", "tier": "B", "test": {"difference": PAIR}},
            **{"config": "tasks.own --out w", "records": "w/wide.json", "reduced": "all of it"},
            "keys": {"a": ["models/0/width", "models/2/width"], "b": ["models/1/width", "models/3/width"]},
        },
        "table2-b": {"where": "Table 2", "claim": "c.", "paper": "3", "test": {"untried": "needs a GPU"}},
    },
}


def read(tmp_path, content: object) -> object:
    (tmp_path / "paper.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return read_paper(tmp_path / "paper.yaml")


@each(
    "path, value, message",
    [
        (("title",), None, "lacks title"),
        (("more",), 1, "'more' is not known"),
        (("claims",), {}, "claims must hold"),
        (("claims", "Table 1"), {}, "the name must be"),
        (("central",), "table1-a", "central='table1-a' must be a list"),
        (("central",), ["table1-a", "table1-a"], "each once"),
        (("central",), ["table9-z"], "'table9-z' is not one of its claims"),
        (("older",), ["r"], "older=\\['r'\\] must have what changed"),
        (("older",), {"it is another": "r"}, "with a list of folders"),
        (("older",), {"it is another": ["q"]}, "older: no claim reads q"),
        (("claims", "table1-a", "tier"), "C", "tier=C must be one of A, B"),
        (("claims", "table1-a", "test"), {"guess": 1}, "must be one of difference"),
        (("claims", "table1-a", "test"), {"difference": {"higher": "a"}}, "difference: it lacks lower"),
        (("claims", "table1-a", "test"), {"difference": {**PAIR, "lower": "a"}}, "compared with itself"),
        (("claims", "table1-a", "test"), {"difference": {**PAIR, "margin": -1}}, "margin=-1 must be 0 or more"),
        (("claims", "table1-a", "test"), {"trend": {"xs": {"a": 1}, "direction": "up"}}, "4 rows or more"),
        (("claims", "table1-a", "test"), {"oracle": {"among": ["a", "b", "b"]}}, "3 rows or more, each once"),
        (("claims", "table1-a", "records"), None, "difference needs records"),
        (("claims", "table1-a", "claim"), "", "claim='' must be a text"),
        (("claims", "table1-a", "keys"), {"a": ["x"], "b": ["y"]}, "difference has no task with keys"),
        (("claims", "table3-c", "keys"), {"a": ["x"]}, "keys must name the rows a, b, and no others"),
        (("claims", "table3-c", "keys"), {"a": ["x"], "b": "y"}, "keys of 'b' must be a list of texts"),
        (("claims", "table3-c", "keys"), {"a": ["x"], "b": ["y", "z"]}, "the same number of seeds"),
        (("claims", "table3-c", "records"), "w/{seed}.json", "{seed} must be in config and records, of rows with one"),
        (("claims", "table3-c", "tier"), None, "without a tier each row must have one key"),
        (("claims", "table1-a", "fitted"), "a share", "difference has no fitted"),
        (("claims", "table2-b", "fitted"), "a share", "untried has no fitted"),
        (("claims", "table3-c", "config"), "tasks.own --out w/{seed}", "{seed} must be in config and records"),
        (("claims", "table1-a", "records"), "r/{seed}", "{seed} must be in config and records"),
        (("claims", "table2-b", "keys"), {}, "untried has no keys"),
        (("claims", "table1-a", "relative_to"), "models/0", "difference has no relative_to"),
        (("claims", "table2-b", "tier"), "A", "untried has no tier"),
        (("claims", "table2-b", "test"), {"untried": ""}, "must say why"),
        (("claims", "table2-b", "test"), {"value": {"record": "a", "key": "b", "expected": 1}}, "lacks tolerance"),
        (("claims", "table2-b", "test"), {"bound": {"record": "a", "key": "b"}}, "one of at_least and at_most"),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path, path: tuple, value: object, message: str) -> None:
    content = copy.deepcopy(GOOD)
    place = content
    for part in path[:-1]:
        place = place[part]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=message) as found:
        read(tmp_path, content)
    assert "paper.yaml" in str(found.value) and "\n" not in str(found.value)


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path) -> None:
    (tmp_path / "paper.yaml").write_text("claims: a: b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"paper\.yaml is not YAML: mapping values are not allowed .*line 1") as found:
        read_paper(tmp_path / "paper.yaml")
    assert "\n" not in str(found.value)


def test_missing_runs_are_listed_until_there_are_records(tmp_path) -> None:
    paper = read(tmp_path, GOOD)
    place = ("classification", "a.yaml", "r")
    assert todo.missing([paper], tmp_path) == {place: {"a": {0, 1, 2, 3, 4}, "b": {0, 1, 2, 3, 4}}}
    assert todo.missing([paper], tmp_path, "B") == {}
    for row in "ba":
        for seed in range(TIERS["A"]):
            cost = {"seconds": 1, "hardware": {"cpu_threads": 1}}
            record = {"seed": seed, "metrics": {METRIC: 0.5 + 0.01 * seed + 0.02 * (row == "a")}, **cost}
            add_records(tmp_path / "r", [(row, record)])
            if row == "a" and seed == 3:  # a number, but no verdict before all runs are there
                (half,) = [claim for claim in paper.claims if claim.name == "table1-a"]
                assert todo.missing([paper], tmp_path) == {place: {"a": {4}}}
                found = page.outcome(half, tmp_path)
                assert (found.verdict, found.ours) == (NOT_YET, "+2.00 (+2.00 to +2.00; 4 seeds)")
    assert todo.missing([paper], tmp_path) == {}
    outcomes = {(paper.name, claim.name): page.outcome(claim, tmp_path) for claim in paper.claims}
    assert [found.verdict for found in outcomes.values()] == [HOLDS, UNTRIED, NOT_YET]  # by name
    text = page.paper_text(paper, outcomes)
    ours = "+2.00 (+2.00 to +2.00; 5 seeds)"
    assert f"| Table 1 | a is above b. | +1 | {ours} | 0.00 | A | **holds** | [1](#paper-1) |" in text
    [line] = [line for line in text.splitlines() if line.startswith('1. <a id="paper-1"></a>Table 1: all of it.')]
    assert "--config a.yaml --records r --seeds 0 1 2 3 4 --variants a b`" in line
    assert "needs a GPU | - | - | **not tried** | - |" in text
    for judged_by, numbers in (
        ("accuracy of trained models", "1 | 1 | 0 | 0 | 0 | 0"),
        ("rows of an analysis", "1 | 0 | 0 | 0 | 1 | 0"),
    ):
        assert f"| A | {judged_by} | {numbers} |" in page.judging([paper], outcomes)
    assert "| A | not tried | 1 | 0 | 0 | 0 | 0 | 1 |" in page.judging([paper], outcomes)
    assert page.OLDER not in text
    older = page.paper_text(read(tmp_path, {**GOOD, "older": {"the average is another": ["r"]}}), outcomes)
    assert f"{ours} | 0.00 | A | **holds** {page.OLDER} |" in older and older.count(page.OLDER) == 1
    assert "Table 1: all of it. Since these runs the average is another. `python" in older
    assert page.draw(paper, outcomes, tmp_path / "claims.png").is_file()
    leading = "| Table 1 | a is above b. | +1 | +2.00 (+2.00 to +2.00; 5 seeds) | **holds** |"
    assert leading not in page.headlines([paper], outcomes)
    first = page.headlines([dataclasses.replace(paper, central=["table1-a"])], outcomes)
    assert leading in first and "[All 3 claims](claims/paper.md): 1 holds, 1 not run yet, 1 not tried." in first


def test_hours_of_missing_runs_are_those_of_the_runs_next_to_them(tmp_path) -> None:
    place = ("classification", "a.yaml", "r")
    asked = {place: {"a": {1, 2}, "b": {0}}, ("classification", "b.yaml", "elsewhere"): {"a": {0, 1}}}
    assert todo.hours(asked, tmp_path) == (0, 5)
    for row, seed, seconds, threads in (("a", 0, 1800, 2), ("a", 7, 7200, 1), ("c", 0, 1800, 1)):
        record = {"seed": seed, "seconds": seconds, "hardware": {"cpu_threads": threads}}
        add_records(tmp_path / "r", [(row, record)])
    assert todo.hours(asked, tmp_path) == (pytest.approx(2 * 1.5 + (1.5 + 0.5) / 2), 2)


def test_commands_have_the_seeds_of_each_row() -> None:
    first, second = page.compare_commands("t", "c.yaml", "r", {"a": [1, 0], "b": {2}, "c": range(2)})
    assert first == "python -m tasks.t.compare --jobs 2 --config c.yaml --records r --seeds 0 1 --variants a c"
    assert second == "python -m tasks.t.compare --jobs 2 --config c.yaml --records r --seeds 2 --variants b"


def test_costs_count_each_run_once(tmp_path) -> None:
    content = copy.deepcopy(GOOD)
    first = content["claims"]["table1-a"]
    content["claims"]["table1-b"] = {**first, "test": {"difference": {"higher": "b", "lower": "c"}}}
    content["claims"]["table1-c"] = {**first, "tier": "B", "test": {"difference": {"higher": "a", "lower": "d"}}}
    for row, seed, seconds in (("a", 0, 1800), ("d", 0, 900), ("d", 1, 900)):
        record = {"seed": seed, "seconds": seconds, "hardware": {"cpu_threads": 2}}
        add_records(tmp_path / "r", [(row, record)])
    lines = page.costs([read(tmp_path, content)], tmp_path).splitlines()
    assert lines[2:] == ["| A | 5 | 30 | 15 | 1 | 1.0 |", "| B | 1 | 15 | 1 | 1 | 1.0 |"]


def test_a_run_of_which_one_number_is_read_may_be_missing_among_others(tmp_path) -> None:
    value = {"record": "r/records.jsonl", "key": "a/0/parameters", "expected": 7, "tolerance": 0}
    entry = {"where": "Table 4", "claim": "It has 7.", "paper": "7", "config": "tasks.own", "test": {"value": value}}
    paper = read(tmp_path, {**GOOD, "claims": {"table4-a": entry}, "central": []})
    add_records(tmp_path / "r", [("b", {"seed": 0, "parameters": 7})])
    assert todo.missing_analyses([paper], tmp_path) == ["python -m tasks.own"]
    assert page.outcome(paper.claims[0], tmp_path).verdict == NOT_YET
    add_records(tmp_path / "r", [("a", {"seed": 0, "parameters": 7})])
    assert todo.missing_analyses([paper], tmp_path) == []
    assert page.outcome(paper.claims[0], tmp_path).verdict == HOLDS
    with pytest.raises(ValueError, match=r"r/records\.jsonl: key 'a/0' must be ROW/SEED/KEY"):
        number_in(tmp_path, "r/records.jsonl", "a/0")


def test_rows_may_be_numbers_of_one_file(tmp_path) -> None:
    paper = read(tmp_path, GOOD)
    claim = claim_in(paper, "table3-c")
    assert todo.missing_analyses([paper], tmp_path) == ["python -m tasks.own --out w"]
    assert page.outcome(claim, tmp_path).verdict == NOT_YET
    (tmp_path / "w").mkdir()
    widths = [{"width": number} for number in (0.5, 0.375, 0.75, 0.5)]
    (tmp_path / "w" / "wide.json").write_text(json.dumps({"models": widths}), encoding="utf-8")
    assert todo.missing_analyses([paper], tmp_path) == []
    found = page.outcome(claim, tmp_path)
    assert found.verdict == OPEN and found.mean == pytest.approx(100 * (0.125 + 0.25) / 2)
    relative = page.outcome(dataclasses.replace(claim, relative_to="models/0/width"), tmp_path)
    assert relative.mean == pytest.approx(found.mean / 0.5)
    assert "`python -m tasks.own --out w`" in page.paper_text(
        paper, {(paper.name, c.name): found for c in paper.claims}
    )
    del widths[3]
    (tmp_path / "w" / "wide.json").write_text(json.dumps({"models": widths}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wide\.json has no 'models/3/width'"):
        page.outcome(claim, tmp_path)


def test_rows_may_be_numbers_of_a_file_for_each_seed(tmp_path) -> None:
    content = copy.deepcopy(GOOD)
    own = content["claims"]["table3-c"]
    own |= {"config": "tasks.own seed{seed} --out w/{seed}", "records": "w/{seed}/wide.json", "tier": "A"}
    with pytest.raises(ValueError, match="of rows with one key each"):
        read(tmp_path, content)
    own["keys"] = {"a": ["models/a/width"], "b": ["models/b/width"]}
    paper = read(tmp_path, content)
    claim = claim_in(paper, "table3-c")
    commands = [f"python -m tasks.own seed{seed} --out w/{seed}" for seed in range(5)]
    assert todo.missing_analyses([paper], tmp_path) == commands
    assert page.outcome(claim, tmp_path).verdict == NOT_YET
    gains = (0.25, 0.125, 0.1875, 0.25, 0.3125)
    for seed, gain in enumerate(gains):
        (tmp_path / "w" / str(seed)).mkdir(parents=True)
        models = [{"name": "a", "width": 0.5 + gain}, {"name": "b", "width": 0.5 + seed}]
        models[0]["width"] += seed
        (tmp_path / "w" / str(seed) / "wide.json").write_text(json.dumps({"models": models}), encoding="utf-8")
        assert todo.missing_analyses([paper], tmp_path) == commands[seed + 1 :]
        found = page.outcome(claim, tmp_path)
        assert found.verdict == (HOLDS if seed == 4 else NOT_YET)
        assert found.mean == pytest.approx(100 * np.mean(gains[: seed + 1]))
    relative = page.outcome(dataclasses.replace(claim, relative_to="models/b/width"), tmp_path)
    assert relative.mean == pytest.approx(100 * np.mean([gain / (0.5 + n) for n, gain in enumerate(gains)]))
    text = page.paper_text(paper, {(paper.name, c.name): found for c in paper.claims})
    assert "`python -m tasks.own seed{seed} --out w/{seed}` for each seed of 0 to 4." in text


@pytest.mark.parametrize("seeds", [1, 2, 3])
@pytest.mark.parametrize(
    "test",
    [
        {"trend": {"xs": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}, "direction": "up"}},
        {"trend": {"xs": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}, "direction": "down"}},
        {"pairs": {"higher": ["d", "e", "f"], "lower": ["a", "b", "c"]}},
    ],
    ids=["order", "opposite order", "pairs"],
)
def test_trained_rows_tell_nothing_with_fewer_seeds_than_the_rule_asks_for(tmp_path, test: dict, seeds: int) -> None:
    content = copy.deepcopy(GOOD)
    content["claims"]["table1-a"] |= {"test": test, "tier": "B"}
    claim = claim_in(read(tmp_path, content), "table1-a")
    keep(tmp_path, {row: [0.1 * place + 0.01 * seed for seed in range(seeds)] for place, row in enumerate("abcdef")})
    found = page.outcome(claim, tmp_path)
    expected = FAILS if test.get("trend", {}).get("direction") == "down" else HOLDS
    assert found.verdict == (expected if seeds == 3 else OPEN)
    assert "rank correlation" in found.ours or found.mean == pytest.approx(30)
    assert (found.half_width is not None) == ("pairs" in test and seeds == 3)
    assert (found.detectable == "-") == (seeds < 3)


def test_a_row_that_is_told_the_other_way_counts_though_another_has_one_seed(tmp_path) -> None:
    content = copy.deepcopy(GOOD)
    every = {"every": {"higher": ["a", "c", "d"], "lower": ["b", "b", "b"]}}
    content["claims"]["table1-a"] |= {"test": every, "tier": "B"}
    claim = claim_in(read(tmp_path, content), "table1-a")
    keep(tmp_path, {"a": [0.4] * 5, "b": [0.5] * 5, "c": [0.6], "d": [0.6]})
    assert page.outcome(claim, tmp_path).verdict == FAILS


@pytest.mark.parametrize(("far", "scale"), [(-14.0, "symlog"), (-1.4, "linear")])
def test_a_row_that_reaches_far_does_not_hide_the_others(far: float, scale: str) -> None:
    _, axis = pictures.pyplot().subplots()
    page._widen(axis, [0.2, 0.1, 0.3, 0.5, abs(far)])
    assert axis.get_xscale() == scale and ("logarithmic" in axis.get_xlabel()) == (scale == "symlog")


def test_counted_rows_have_no_seeds(tmp_path) -> None:
    content = copy.deepcopy(GOOD)
    rows = {row: [f"{row}/gflops"] for row in "abcd"}
    own = content["claims"]["table3-c"]
    own |= {"test": {"trend": {"xs": {"a": 1, "b": 2, "c": 3, "d": 4}, "direction": "up"}}, "keys": rows}
    del own["tier"]
    paper = read(tmp_path, content)
    claim = claim_in(paper, "table3-c")
    (tmp_path / "w").mkdir()
    counts = {row: {"gflops": place / 10} for place, row in enumerate(rows)}
    (tmp_path / "w" / "wide.json").write_text(json.dumps(counts), encoding="utf-8")
    found = page.outcome(claim, tmp_path)
    assert (found.verdict, found.ours) == (HOLDS, "rank correlation +1.00 (p = 0.042; 4 rows, counted)")


@pytest.mark.parametrize("other", ["AMD EPYC", "Intel Xeon"])
def test_rows_of_two_processors_are_marked(tmp_path, other: str) -> None:
    claim = claim_in(read(tmp_path, GOOD), "table1-a")
    for row, first in (("a", other), ("b", "AMD EPYC")):
        for seed in range(5):
            hardware = {"cpu": first if seed == 3 else "AMD EPYC"}
            record = {"seed": seed, "metrics": {METRIC: 0.5 + 0.02 * (row == "a")}, "hardware": hardware}
            add_records(tmp_path / "r", [(row, record)])
    marked = page.outcome(claim, tmp_path).ours.endswith(f"seeds) {page.MIXED}")
    assert marked == (other != "AMD EPYC") and page.MIXED in page.INTRODUCTION


def test_numbers_with_a_fitted_setting_are_counted_apart(tmp_path) -> None:
    content = copy.deepcopy(GOOD)
    value = {"where": "Table 4", "claim": "d.", "paper": "4", "test": {"bound": {"record": "n.json", "key": "n"}}}
    value["test"]["bound"]["at_most"] = 4
    content["claims"] = {"table4-d": value, "table4-e": value | {"fitted": "the share"}}
    (tmp_path / "n.json").write_text('{"n": 4}', encoding="utf-8")
    paper = read(tmp_path, content)
    outcomes = {(paper.name, claim.name): page.outcome(claim, tmp_path) for claim in paper.claims}
    lines = page.overview([paper], outcomes).splitlines()[2:]
    assert lines == [
        "| A | one number, counted, timed or measured | 1 | 1 | 0 | 0 | 0 | 0 |",
        "| A | one number, with a setting fitted to such numbers | 1 | 1 | 0 | 0 | 0 | 0 |",
    ]
    assert "With the share fitted." in page.paper_text(paper, outcomes)


def test_a_star_in_a_key_is_the_mean_over_a_list(tmp_path) -> None:
    layers = [{"weight": number, "name": "*"} for number in (1.0, 2.0, 6.0)]
    content = {"models": [{"name": "m", "layers": layers, "none": [], "words": [{"weight": "x"}]}]}
    (tmp_path / "r.json").write_text(json.dumps(content), encoding="utf-8")
    assert number_in(tmp_path, "r.json", "models/m/layers/*/weight") == 3.0
    assert number_in(tmp_path, "r.json", "models/*/layers/*/weight") == 3.0
    for key in ("models/m/layers/*/height", "models/m/none/*/weight", "models/m/*/weight"):
        with pytest.raises(ValueError, match=rf"^r\.json has no '{re.escape(key)}'$"):
            number_in(tmp_path, "r.json", key)
    with pytest.raises(ValueError, match=r"^r\.json, models/m/words/\*/weight='x' must be a number$"):
        number_in(tmp_path, "r.json", "models/m/words/*/weight")


# ---- the repository's own -------------------------------------------------------------------------------------------

PAPERS = read_papers(page.ROOT / page.CLAIMS)
COMPARED = {
    (claim.task, claim.config, claim.records): claim
    for paper in PAPERS
    for claim in paper.claims
    if claim.test.rows and claim.keys is None
}


def test_models_that_an_analysis_reads_are_of_runs_that_claims_ask_for() -> None:
    claims = [claim for paper in PAPERS for claim in paper.claims]
    asked = set()
    for claim in claims:
        if claim.task is not None:
            file, _, cell = claim.config.partition("#")
            name = "_".join(part for part in (Path(file).stem, cell) if part)  # of the folder in outputs
            asked |= {(name, row, seed) for _, row, seed in claim.runs()}
    read = set()
    for claim in claims:
        for command, _ in claim.files():
            found = re.findall(r"outputs/\w+/([^ /]+)/([^ /]+)/seed(\d+)", command or "")
            read |= {(name, row, int(seed)) for name, row, seed in found}
    assert len(read) > 50 and read - asked == set()


def test_page_is_what_the_records_say(capsys: pytest.CaptureFixture) -> None:
    assert page.main(["--check"]) == 0, capsys.readouterr().err


def test_a_test_that_was_changed_stands_on_the_page_with_what_changed() -> None:
    text = (page.ROOT / page.JUDGING).read_text(encoding="utf-8")
    listed = text.partition("\n## Tests that were changed when their number was known\n")[2]
    changed = [claim for paper in PAPERS for claim in paper.claims if claim.changed is not None]
    assert len(changed) > 20
    for claim in changed:
        assert f"| {claim.claim} | {claim.changed} | **" in listed


@pytest.fixture
def repository(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the claims of one paper."""
    (tmp_path / "docs").mkdir()
    (tmp_path / page.CLAIMS).mkdir(parents=True)
    read(tmp_path / page.CLAIMS, GOOD)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    return tmp_path


def test_page_check_notices_another_number(repository, capsys) -> None:
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0
    for name, old, new in (("claims/paper.md", "not run yet**", "holds**"), ("claims.md", "not run yet", "hold")):
        kept = (repository / "docs" / name).read_text(encoding="utf-8")
        assert old in kept
        (repository / "docs" / name).write_text(kept.replace(old, new, 1), encoding="utf-8")
        assert page.main(["--check"]) == 2
        assert f"docs/{name} is not what the records say" in capsys.readouterr().err
        (repository / "docs" / name).write_text(kept, encoding="utf-8")


def test_page_check_notices_a_picture_of_other_numbers(repository, capsys) -> None:
    cost = {"seconds": 1, "hardware": {"cpu_threads": 1}}
    picture, records = repository / "docs" / "claims" / "paper.png", repository / "r" / "records.jsonl"
    keep(repository, {"a": [0.6], "b": [0.5]}, **cost)
    assert page.main([]) == page.main(["--check"]) == 0
    old = picture.read_bytes()
    records.unlink()
    keep(repository, {"b": [0.5], "a": [0.7]}, **cost)
    assert page.main([]) == page.main(["--check"]) == 0
    picture.write_bytes(old)
    assert page.main(["--check"]) == 2
    assert "docs/claims/paper.png is not of the records" in capsys.readouterr().err
    picture.unlink()
    assert page.main(["--check"]) == 2
    records.unlink()
    picture.write_bytes(old)
    assert page.main([]) == page.main(["--check"]) == 0  # nothing to draw, so no picture
    assert not picture.exists()


def load(task: str, path: str) -> object:
    """A comparison of any task."""
    module = import_module(f"tasks.{task}.compare")
    if hasattr(module, "load_comparison"):
        return module.load_comparison(path)
    if hasattr(module, "load_task"):  # of mmengine
        pytest.importorskip("mmengine", reason="mmengine is not installed: make dense")
        return import_module("tasks.common.mm.compare").load_comparison(module.load_task(), path)
    return load_task_comparison(task_in(f"tasks.{task}.task"), path)


@each("task, config, records", COMPARED)
def test_rows_of_claims_are_rows_of_their_comparison_and_records_are_of_it(
    task: str, config: str, records: str
) -> None:
    """Row names, seeds, and that each record is of today's configuration."""
    place = task, config, records
    comparison = load(task, str(page.ROOT / config))
    own = [claim for paper in PAPERS for claim in paper.claims if (claim.task, claim.config, claim.records) == place]
    rows = {row for claim in own for row in claim.test.rows}
    assert rows <= set(comparison.configs), rows - set(comparison.configs)
    assert max(claim.seeds for claim in own) <= len(comparison.seeds)
    found = all_records(comparison, page.ROOT / records)
    for claim in own:
        read = page.records_of(claim, page.ROOT)
        assert {row: len(runs) for row, runs in read.items()} == {
            row: len(found[row]) for row in claim.test.rows if row in found
        }


def test_labels_of_a_picture_are_unique_and_name_what_is_compared() -> None:
    for paper in PAPERS:
        drawn = [one for one in paper.claims if one.test.name in ("difference", "pairs", "contrast", "oracle")]
        claims = [claim for claim in drawn if claim.keys is None]
        labels = page._labels(claims)
        assert len(set(labels)) == len(labels) == len(claims) > 0, paper.name
        for claim, label in zip(claims, labels, strict=True):
            assert label.startswith(claim.where)
            assert all(row in label for row in claim.test.rows) or claim.test.name in ("pairs", "contrast", "oracle")
