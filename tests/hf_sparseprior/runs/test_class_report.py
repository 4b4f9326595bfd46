"""The report of a classifier against scikit-learn and sums written out."""

import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, precision_recall_fscore_support

from hf_sparseprior.runs.class_report import BINS, ClassReport
from hf_sparseprior.runs.metrics import IGNORED

CLASSES = ["cat", "dog", "a|b", "never"]


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    """They are looked at here."""


@pytest.fixture
def report():
    """Two hundred examples of three of four classes; two are no examples."""
    generator = np.random.default_rng(0)
    labels = generator.choice(3, 200, p=[0.8, 0.15, 0.05])
    logits = generator.normal(size=(200, 4))
    logits[:, 3] = -9
    logits[np.arange(200), labels] += 1.0
    labels[[5, 70]] = IGNORED
    return ClassReport.of_logits(logits, labels, CLASSES)


def known(report):
    return report.labels != IGNORED


def test_precision_recall_and_f1_are_scikit_learns(report):
    labels, predicted = report.labels[known(report)], report.predicted[known(report)]
    expected = precision_recall_fscore_support(labels, predicted, labels=range(4), zero_division=np.nan)
    for own, theirs in zip(report.per_class(), expected[:3], strict=True):
        np.testing.assert_allclose(own[:3], theirs[:3], atol=1e-12)
        assert np.isnan(own[3])
    assert report.metrics()["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))


def test_the_calibration_error_is_its_sum(report):
    confidence = report.probabilities.max(1)
    error = 0.0
    for number in range(BINS):
        inside = [
            place for place in np.flatnonzero(known(report)) if number / BINS < confidence[place] <= (number + 1) / BINS
        ]
        if inside:
            right = np.mean([report.predicted[place] == report.labels[place] for place in inside])
            error += len(inside) * abs(right - np.mean(confidence[inside])) / known(report).sum()
    bins, found = report.calibration()
    assert found == pytest.approx(error) and 0.02 < found < 0.5
    assert bins[:, 0].sum() == 198 and report.metrics()["calibration_error"] == found


def test_a_model_that_is_surely_right_has_no_error():
    report = ClassReport(np.eye(4)[[0, 1, 2, 0]], np.array([0, 1, 2, 0]), CLASSES)
    assert report.metrics() == {"balanced_accuracy": 1.0, "calibration_error": 0.0} and report.worst() == []


def test_views_of_an_example_are_averaged():
    logits = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]))
    report = ClassReport.of_logits(logits, np.array([0, 0, 1, 1]), ["a", "b"], views=2)
    np.testing.assert_allclose(report.probabilities, [[0.7, 0.3], [0.3, 0.7]])
    assert report.labels.tolist() == [0, 1]


def test_files(report, tmp_path):
    shown = []

    def image(place):
        shown.append(place)
        return Image.new("RGB", (30 + place, 20), (place, 100, 0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.write(tmp_path, "dense: 60 % on test", "_test", image) == [
            "confusion_test.png",
            "errors_test.png",
        ]
    shares = [report.probabilities[place].max() for place in shown]
    assert shares == sorted(shares, reverse=True) and len(shown) == 24
    assert all(report.predicted[place] != report.labels[place] for place in shown)
    wrong = np.flatnonzero((report.predicted != report.labels) & known(report))
    assert max(report.probabilities[wrong].max(1)) == shares[0]
    text = (tmp_path / "report_test.md").read_text()
    precision, recall, f1 = (100 * own for own in report.per_class())
    row = f"| cat | {(report.labels == 0).sum()} | {precision[0]:.1f} | {recall[0]:.1f} | {f1[0]:.1f} |"
    assert row in text and "| a\\|b | " in text and "| never | 0 |  |  |  |" in text
    with Image.open(tmp_path / "confusion_test.png") as drawn:
        assert drawn.width > drawn.height  # the calibration beside the matrix
    with Image.open(tmp_path / "errors_test.png") as drawn:
        assert np.asarray(drawn).std() > 20
    assert report.write(tmp_path, "of a stream") == ["confusion.png"] and not (tmp_path / "errors.png").exists()
