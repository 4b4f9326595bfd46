"""Paired differences against scipy's paired t-test, McNemar's counts and numbers worked out by hand."""

import json
import math

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from hf_sparseprior.analysis import pictures
from hf_sparseprior.runs.metrics import pack_correct, unpack_correct
from tasks.common.comparison_table import draw_results, write_comparison
from tasks.common.paired import Difference, detectable, difference_table, differences, image_error, verdict
from tests.each import each


def record(seed, accuracy, right=None):
    packed = {} if right is None else {"test_correct": pack_correct(np.ones(len(right)), np.array(right))}
    cost = {"pruning_ratio": 0.0, "parameters": 1, "seconds_per_step": 1.0, "seconds": 1.0, "data": "images"}
    return {"seed": seed, "metrics": {"test_accuracy": accuracy}, **packed, **cost}


def rows(**accuracies):
    return {name: [record(seed, value) for seed, value in enumerate(values)] for name, values in accuracies.items()}


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made and not written, which takes longer than all else."""
    monkeypatch.setattr(pictures, "save", lambda figure, path: pictures.pyplot().close(figure) or path)


def test_a_difference_worked_out_by_hand():
    """3, 2 and -2 points: mean 1, deviation sqrt((4 + 1 + 9) / 2) = 2.646, / sqrt(3) = 1.528, times 4.303 = 6.573."""
    found = differences(rows(dense=[0.43, 0.45, 0.48], other=[0.46, 0.47, 0.46]), "dense")
    assert list(found) == ["other"]
    one = found["other"]
    assert [round(100 * value, 6) for value in one.by_seed.values()] == [3, 2, -2]
    assert (100 * one.mean, 100 * one.error) == pytest.approx((1, math.sqrt(7) / math.sqrt(3)))
    assert 100 * one.half_width == pytest.approx(4.302653 * math.sqrt(7 / 3), rel=1e-6)
    assert one.significant is False and verdict(one) == "not significant"
    line = difference_table(found, "dense").split("\n")[2]
    # With 2 degrees of freedom: (4.303 + 1.061) * 1.528.
    assert line == "| other | +3.00, +2.00, -2.00 | +1.00 ± 1.53 | -5.57 to +7.57 | 8.19 | - | not significant |"


def test_a_difference_is_significant_when_the_paired_t_test_says_so():
    random, significant = np.random.default_rng(0), []
    for case in range(200):
        seeds = 3 + case % 5
        first, other = random.normal(0.5, 0.02, (2, seeds))
        other += random.choice([0, 0.01, -0.03])
        one = differences(rows(a=first, b=other), "a")["b"]
        test = stats.ttest_rel(other, first)
        assert one.significant == (test.pvalue < 0.05)
        low, high = test.confidence_interval(0.95)
        assert (one.mean - one.half_width, one.mean + one.half_width) == pytest.approx((low, high))
        if one.significant:
            assert verdict(one) == ("significantly above" if test.statistic > 0 else "significantly below")
        significant.append(one.significant)
    assert 20 < sum(significant) < 180


def test_two_seeds_tell_nothing():
    found = differences(rows(a=[0.1, 0.1], b=[0.9, 0.9], c=[0.2]), "a")
    assert [one.significant for one in found.values()] == [None, None]
    assert found["b"].half_width == 0 and found["c"].half_width is found["c"].error is None
    assert verdict(found["b"]) == "fewer than 3 seeds"
    assert "| c | +10.00 | +10.00 | - | - | - | fewer than 3 seeds |" in difference_table(found, "a")


@pytest.mark.parametrize(("by", "significant"), [(0.0, False), (0.01, True)])
def test_the_same_difference_in_every_seed(by, significant):
    assert Difference({0: by, 1: by, 2: by}, {}).significant is significant


def test_only_seeds_that_both_rows_have_are_compared():
    results = {"a": [record(0, 0.5), record(2, 0.6)], "b": [record(1, 0.1), record(2, 0.7)], "c": [record(1, 0.1)]}
    found = differences(results, "a")
    assert {name: list(one.by_seed) for name, one in found.items()} == {"b": [2]}
    assert differences(results, "missing") == {}


def test_the_error_over_images_is_mcnemars():
    """With b images that only one run gets right and c that only the other does: the variance of (b - c) / n."""
    random = np.random.default_rng(1)
    right, reference = random.random((2, 1000)) < [[0.7], [0.6]]
    b, c, n = (right & ~reference).sum(), (~right & reference).sum(), 1000
    expected = math.sqrt((b + c - (b - c) ** 2 / n) / (n * (n - 1)))
    one, other = record(0, right.mean(), right), record(0, reference.mean(), reference)
    assert image_error(one, other) == pytest.approx(expected)
    draws = [right[index].mean() - reference[index].mean() for index in random.integers(0, n, (2000, n))]
    assert image_error(one, other) == pytest.approx(np.std(draws), rel=0.1)
    found = differences({"a": [other], "b": [one]}, "a")["b"]
    assert found.image_errors == {0: pytest.approx(expected)}
    assert f"| {100 * expected:.2f} | fewer" in difference_table({"b": found}, "a")


def test_the_error_over_images_needs_the_same_images():
    one, short = record(0, 1.0, [1, 0, 1]), record(0, 1.0, [1, 0])
    assert image_error(one, short) is image_error(one, record(0, 1.0)) is image_error(record(0, 1.0), one) is None


def test_the_error_over_episodes_is_of_their_rewards():
    """The metric says whether it is the mean of what was solved or of rewards, which may lie close together."""
    rewards = np.random.default_rng(2).random((2, 50))
    solved = rewards > [[0.51], [0.5]]  # shares of solved episodes within half an episode of the mean reward
    runs = [
        record(0, float(right.mean()), right) | {"test_rewards": own.tolist()}
        for right, own in zip(solved, rewards, strict=True)
    ]
    for run, own in zip(runs, rewards, strict=True):
        run["metrics"]["test_max_reward"] = float(own.mean())
    expected = {"test_accuracy": np.subtract(*solved.astype(float)), "test_max_reward": np.subtract(*rewards)}
    for metric, apart in expected.items():
        assert image_error(*runs, metric) == pytest.approx(np.std(apart, ddof=1) / math.sqrt(50)), metric
        found = differences({"a": runs[1:], "b": runs[:1]}, "a", metric)["b"]
        assert detectable([found]) == f"at least {100 * 2.801585 * np.std(apart, ddof=1) / math.sqrt(50):.2f}"
    del runs[0]["test_rewards"]
    assert image_error(*runs, "test_max_reward") is None


@each("count", [0, 1, 7, 8, 1001])
def test_what_is_right_is_packed_in_order(count):
    labels, predicted = np.random.default_rng(count).integers(0, 3, (2, count))
    packed = json.loads(json.dumps(pack_correct(labels, predicted)))
    assert np.array_equal(unpack_correct(packed), labels == predicted)
    labels = np.append(labels, -100)  # a damaged image is none of them
    assert pack_correct(labels, np.append(predicted, -100)) == packed


def test_a_comparison_is_written_with_its_differences_and_their_picture(tmp_path, capsys):
    results = rows(a=[0.50, 0.51, 0.52], b=[0.60, 0.61, 0.621], c=[0.50, 0.52, 0.51])
    write_comparison(results, tmp_path, "a")
    text = (tmp_path / "table.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "significantly above" in text and "not significant" in text and "A difference is significant if" in text
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "results.png"}
    alone = draw_results({"a": results["a"]}, tmp_path / "alone.png", "a").stat().st_size
    assert (tmp_path / "results.png").stat().st_size > alone


def test_rows_are_compared_with_their_own_references(tmp_path, undrawn):
    results = rows(a=[0.50, 0.51, 0.52], b=[0.60, 0.61, 0.621], wide=[0.7, 0.7, 0.7], other=[0.71, 0.72, 0.705])
    references = {"a": "a", "b": "a", "wide": "a", "other": "wide"}
    write_comparison(results, tmp_path, "a", references=references)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert any(line.startswith("| other (minus wide) | +1.00, +2.00, +0.50 |") for line in lines)
    assert any(line.startswith("| b | +10.00, +10.00, +10.10 |") for line in lines)
    del results["wide"]
    write_comparison(results, tmp_path, "a", references=references)  # its reference is not run yet
    assert not any(line.startswith("| other (minus") for line in (tmp_path / "table.md").read_text().splitlines())


def test_another_metric_is_compared_alike(tmp_path, undrawn):
    results = rows(a=[0.50, 0.51, 0.52], b=[0.60, 0.61, 0.621])
    write_comparison(results, tmp_path / "accuracy", "a")
    for run in (run for runs in results.values() for run in runs):
        run["metrics"] = {"test_knn_accuracy": run["metrics"]["test_accuracy"], "test_accuracy": 0.0}
    write_comparison(results, tmp_path / "knn", "a", "test_knn_accuracy")
    first, second = ((tmp_path / name / "table.md").read_text() for name in ("accuracy", "knn"))
    assert second == first.replace("test accuracy, %", "k-NN test accuracy, %") != first


def test_other_metrics_are_compared_if_every_record_has_them(tmp_path):
    results = rows(a=[0.50, 0.51, 0.52], b=[0.60, 0.61, 0.621])
    for run in (run for runs in results.values() for run in runs):
        run["metrics"]["test_linear_accuracy"] = run["metrics"]["test_accuracy"] - 0.1
    write_comparison(results, tmp_path / "all", "a", also=("test_linear_accuracy",))
    table = (tmp_path / "all" / "table.md").read_text()
    assert "| a | 51.00 ± 1.00 | 41.00 ± 1.00 |" in table and table.count("| b | +10.00, +10.00, +10.10 |") == 2
    del results["b"][1]["metrics"]["test_linear_accuracy"]
    write_comparison(results, tmp_path / "some", "a", also=("test_linear_accuracy",))
    assert "linear" not in (tmp_path / "some" / "table.md").read_text()
    heights = [Image.open(tmp_path / name / "results.png").size[1] for name in ("all", "some")]
    assert heights[0] > 1.8 * heights[1]  # below each other


def test_without_a_run_of_the_first_row_there_is_nothing_to_compare_with(tmp_path, undrawn):
    write_comparison(rows(b=[0.6]), tmp_path, "a")
    assert "minus" not in (tmp_path / "table.md").read_text()
