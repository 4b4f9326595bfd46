"""Reports of several labels an image and of numbers, against scikit-learn."""

import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from hf_sparseprior.runs.label_reports import NumbersReport, SeveralReport, validation_measure

CLASSES = ["cat", "dog", "bird", "never"]


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    """They are looked at here."""


GENERATOR = np.random.default_rng(1)
LABELS = (GENERATOR.random((120, 4)) < [0.5, 0.2, 0.1, 0.0]).astype(np.float32)
LOGITS = GENERATOR.normal(size=(120, 4)) + 1.5 * LABELS - 0.5
NUMBERS = GENERATOR.normal(size=(80, 2)) * [1, 5] + [0, 3]
FOUND = NUMBERS + GENERATOR.normal(size=(80, 2))


def picture(place):
    return Image.new("RGB", (20, 30), (2 * place % 255, 90, 0))


def test_metrics_of_several_labels_are_scikit_learns():
    report = SeveralReport.of_logits(LOGITS, LABELS, CLASSES)
    found = report.metrics()
    expected = metrics.average_precision_score(LABELS[:, :3], LOGITS[:, :3], average="macro")
    assert found["mean_average_precision"] == pytest.approx(expected) and np.isnan(report.average_precisions()[3])
    assert found["f1"] == pytest.approx(metrics.f1_score(LABELS.ravel(), LOGITS.ravel() >= 0))
    np.testing.assert_array_equal(report.counts, metrics.multilabel_confusion_matrix(LABELS, LOGITS >= 0))

    class Prediction:
        predictions, label_ids = LOGITS, LABELS

    assert validation_measure("several", CLASSES)(Prediction) == found


def test_the_best_threshold_has_the_largest_f1():
    report = SeveralReport.of_logits(LOGITS, LABELS, CLASSES)
    tried = {
        float(threshold): metrics.f1_score(LABELS.ravel(), report.probabilities.ravel() >= threshold)
        for threshold in np.unique(report.probabilities)
    }
    assert tried[report.best_threshold()] == max(tried.values()) > report.metrics()["f1"]
    assert SeveralReport.of_logits(LOGITS, 0 * LABELS, CLASSES).best_threshold() == 0.5


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros((120, 4)), "is that of chance"),
        (LOGITS - 20, "gives no example any label"),
    ],
)
def test_a_model_that_learned_nothing_is_named(logits, message):
    said = SeveralReport.of_logits(logits, LABELS, CLASSES).warnings("test")
    assert any(message in line for line in said)
    assert SeveralReport.of_logits(LOGITS, LABELS, CLASSES).warnings("test") == []


def test_files_of_several_labels(tmp_path):
    report = SeveralReport.of_logits(LOGITS, LABELS, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.write(tmp_path, "test", "", picture) == ["confusion.png", "errors.png"]
    text = (tmp_path / "report.md").read_text()
    (negative, extra), (missed, right) = report.counts[0]
    assert f"| cat | {right + missed} | {right} | {missed} | {extra} | {negative} | " in text
    assert "| never | 0 | 0 | 0 | " in text
    places = report.worst()
    wrong = [abs(report.probabilities[place] - LABELS[place])[number] for place, number in places]
    assert wrong == sorted(wrong, reverse=True) and len(wrong) == 24
    assert all(report.given[place] != report.labels[place] for place in places)
    with Image.open(tmp_path / "confusion.png") as drawn:
        assert np.asarray(drawn).std() > 20


def test_metrics_of_numbers_are_scikit_learns():
    report = NumbersReport.of_logits(FOUND, NUMBERS, ["x", "y"])
    expected = {
        "mean_absolute_error": metrics.mean_absolute_error(NUMBERS, FOUND),
        "root_mean_squared_error": metrics.root_mean_squared_error(NUMBERS, FOUND),
        "r2": metrics.r2_score(NUMBERS, FOUND),
    }
    assert report.metrics() == pytest.approx(expected)
    one = NumbersReport.of_logits(FOUND[:, :1], NUMBERS[:, 0], ["x"])  # as the Trainer gives one number
    assert one.metrics()["r2"] == pytest.approx(metrics.r2_score(NUMBERS[:, 0], FOUND[:, 0]))


def test_a_number_of_which_the_mean_is_all_that_is_known_is_named():
    mean = np.broadcast_to(NUMBERS.mean(0), NUMBERS.shape)
    (line,) = NumbersReport.of_logits(np.stack([FOUND[:, 0], mean[:, 1]], 1), NUMBERS, ["x", "y"]).warnings("test")
    assert "no better than always answering the mean of y" in line
    same = NumbersReport.of_logits(FOUND, np.ones_like(NUMBERS), ["x", "y"])
    assert same.warnings("test") == [] and same.metrics()["r2"] == 0.0


def test_files_of_numbers(tmp_path):
    report = NumbersReport.of_logits(FOUND, NUMBERS, ["x", "y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.write(tmp_path, "test", "_test", picture) == ["numbers_test.png", "errors_test.png"]
    text = (tmp_path / "report_test.md").read_text()
    assert f"| y | {NUMBERS[:, 1].mean():.4g} | {NUMBERS[:, 1].std():.4g} | " in text
    errors = np.abs(FOUND - NUMBERS) / NUMBERS.std(0)
    assert report.worst(1) == [tuple(map(int, np.unravel_index(errors.argmax(), errors.shape)))]
    with Image.open(tmp_path / "numbers_test.png") as drawn:
        assert drawn.width > 1.5 * drawn.height
