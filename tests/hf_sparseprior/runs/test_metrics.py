"""Metrics of classification against scikit-learn's and SciPy's."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("evaluate", reason="needs the extra classification")

from scipy.special import softmax
from sklearn.metrics import top_k_accuracy_score

from hf_sparseprior.runs.metrics import average_views, compute_metrics, what_was_not_learned
from tests.each import each


def prediction(examples=50, views=1, classes=9, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, examples).repeat(views)
    return SimpleNamespace(predictions=random.normal(0, 3, (examples * views, classes)).astype("f4"), label_ids=labels)


@pytest.mark.parametrize("views", [1, 6])
def test_accuracies_of_averaged_views(views):
    made = prediction(views=views)
    scores = softmax(made.predictions.astype("f8"), -1).reshape(50, views, 9).mean(1)
    metrics = compute_metrics(made, views=views, top=(3, 5))
    for count, name in ((1, "accuracy"), (3, "top3_accuracy"), (5, "top5_accuracy")):
        expected = top_k_accuracy_score(made.label_ids[::views], scores, k=count, labels=range(9))
        assert metrics[name] == pytest.approx(expected)
    averaged, labels = average_views(made.predictions, made.label_ids, views)
    assert len(averaged) == len(labels) == 50
    if views > 1:
        np.testing.assert_allclose(averaged, scores, rtol=1e-12)


def test_what_is_ignored_counts_nowhere():
    made = prediction(views=2)
    made.label_ids[:20] = -100
    rest = SimpleNamespace(predictions=made.predictions[20:], label_ids=made.label_ids[20:])
    assert compute_metrics(made, 2, (5,)) == compute_metrics(rest, 2, (5,))


def test_top_5_needs_more_than_five_classes_and_views_a_whole_number():
    assert set(compute_metrics(prediction(classes=5), top=(5,))) == {"accuracy"}
    assert set(compute_metrics(prediction(classes=6), top=(5,))) == {"accuracy", "top5_accuracy"}
    with pytest.raises(ValueError, match="50 predictions must be a multiple of the 3 views"):
        compute_metrics(prediction(), views=3)


ONE = "predicts one class, b, for all 10 examples"
CHANCE = r"is with {} % no better than always answering the most frequent class, {}"


@each(
    "counts, expected",
    [
        ([[0, 6], [0, 4]], f"on test the model {ONE} and {CHANCE.format('40.00', 'a (60.00 %)')}"),
        ([[0, 4], [0, 6]], f"on test the model {ONE} and {CHANCE.format('60.00', 'b (60.00 %)')}"),
        ([[3, 3], [1, 3]], f"on test the model {CHANCE.format('60.00', 'a (60.00 %)')}"),
        ([[4, 2], [1, 3]], None),
        ([[0, 0], [1, 9]], None),  # of one class nothing can be told
        ([[0, 0], [0, 0]], None),
    ],
)
def test_a_classifier_that_tells_nothing_apart_is_said(counts, expected):
    assert what_was_not_learned(np.array(counts), ["a", "b"], "test") == ([expected] if expected else [])
