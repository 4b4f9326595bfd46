"""What a model finds of labels of each kind: metrics, warnings, report.md and its pictures.

Several labels an image have a probability each, numbers have none; classes are in class_report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, r2_score

from hf_sparseprior.prediction.pictures import Tile
from hf_sparseprior.runs.class_report import (
    SHOWN,
    ClassReport,
    calibration_bins,
    cell,
    draw_errors,
    percent,
    write_report,
)
from hf_sparseprior.runs.plots import draw_fit, draw_pairs
from hf_sparseprior.runs.tables import markdown_table

THRESHOLD = 0.5  # before validation has chosen one
ERRORS = ("mean_absolute_error", "root_mean_squared_error", "r2")  # of numbers


@dataclass(frozen=True)
class SeveralReport:
    """Several labels an image.

    probabilities: (examples, classes) float64. labels: (examples, classes) bool. classes: names. threshold: labels of
    this probability or more are given.
    """

    probabilities: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]
    threshold: float = THRESHOLD

    @classmethod
    def of_logits(cls, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], views: int = 1) -> SeveralReport:
        """From logits and labels of 0 or 1, both (examples, classes)."""
        return cls(expit(logits.astype(np.float64)), labels > 0.5, classes)

    def best_threshold(self) -> float:
        """The threshold with the largest F1 over all labels of all examples; `THRESHOLD` where no label is given."""
        if not self.labels.any():
            return THRESHOLD
        precision, recall, thresholds = precision_recall_curve(self.labels.ravel(), self.probabilities.ravel())
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        return float(thresholds[f1[:-1].argmax()])

    @property
    def given(self) -> np.ndarray:
        """(examples, classes) bool: the labels that the model gives."""
        return self.probabilities >= self.threshold

    @property
    def counts(self) -> np.ndarray:
        """(classes, 2, 2): of each class, examples by whether they have the label and whether it is given."""
        cases = 2 * self.labels + self.given
        return np.stack([np.bincount(own, minlength=4).reshape(2, 2) for own in cases.T])

    def average_precisions(self) -> np.ndarray:
        """(classes,): of each class that occurs its average precision, NaN of others."""
        pairs = zip(self.labels.T, self.probabilities.T, strict=True)
        return np.array([average_precision_score(*pair) if pair[0].any() else np.nan for pair in pairs])

    def metrics(self) -> dict[str, float]:
        """mean_average_precision: of the classes that occur. f1: of all labels together at the threshold."""
        found = self.average_precisions()
        return {
            "mean_average_precision": float(np.nanmean(found)) if np.isfinite(found).any() else 0.0,
            "f1": float(f1_score(self.labels.ravel(), self.given.ravel(), zero_division=0.0)),
        }

    def headline(self) -> str:
        """The metric that it is judged by."""
        return f"mean average precision {100 * self.metrics()['mean_average_precision']:.2f} %"

    def details(self) -> dict[str, Any]:
        """What results say besides metrics."""
        return {"threshold": self.threshold, "label_counts": self.counts.tolist()}

    def warnings(self, split: str) -> list[str]:
        """A line for a model that ranks no better than chance, or gives no label."""
        said, occur = [], self.labels.any(0)
        found, chance = (
            self.metrics()["mean_average_precision"],
            float(self.labels[:, occur].mean()) if occur.any() else 0,
        )
        if occur.any() and not self.labels.all() and found <= chance:
            said.append(f"on {split} the model's mean average precision, {100 * found:.2f} %, is that of chance")
        if self.labels.any() and not self.given.any():
            said.append(f"on {split} the model gives no example any label")
        return said

    def worst(self, number: int = SHOWN) -> list[tuple[int, int]]:
        """(example, class) of the examples whose probabilities are furthest from their labels, the worst first."""
        wrong = np.where(self.given != self.labels, np.abs(self.probabilities - self.labels), 0.0)
        order = np.argsort(-wrong.max(1), kind="stable")[:number]
        return [(int(place), int(wrong[place].argmax())) for place in order if wrong[place].max() > 0]

    def write(
        self, folder: Path, heading: str, label: str = "", image: Callable[[int], Any] | None = None
    ) -> list[str]:
        """As `ClassReport.write`."""
        bins, error = calibration_bins(self.probabilities.ravel(), self.labels.ravel())
        pictures = [f"confusion{label}.png"]
        draw_pairs(self.counts, self.classes, folder / pictures[0], heading, bins)
        tiles = [] if image is None else [self._tile(place, number, image) for place, number in self.worst()]
        pictures += draw_errors(folder / f"errors{label}.png", f"{heading}: worst errors", tiles)
        rows = []
        for name, found, average in zip(self.classes, self.counts, self.average_precisions(), strict=True):
            (absent, extra), (missed, right) = found.tolist()
            with np.errstate(invalid="ignore"):
                shares = np.divide(
                    [right, right, 2 * right], [right + extra, right + missed, 2 * right + extra + missed]
                )
            numbers = map(str, (right + missed, right, missed, extra, absent))
            rows.append([cell(name), *numbers, percent(average), *map(percent, shares)])
        columns = ("class", "have it", "found", "missed", "given wrongly", "rightly not given", "average precision, %")
        table = markdown_table((*columns, "precision, %", "recall, %", "F1, %"), rows)
        said = (
            f"A label is given from a probability of {self.threshold:.3f} on, which was chosen on validation examples "
            f"where there are some. F1 of all labels: {100 * self.metrics()['f1']:.2f} %. Expected calibration error: "
            f"{100 * error:.2f} %."
        )
        write_report(folder / f"report{label}.md", heading, said, table, pictures)
        return pictures

    def _tile(self, place: int, number: int, image: Callable[[int], Any]) -> Tile:
        name, share = self.classes[number], 100 * self.probabilities[place, number]
        return Tile(
            image(place), f"{name} ({share:.0f} %)", f"{'has' if self.labels[place, number] else 'has no'} {name}"
        )


@dataclass(frozen=True)
class NumbersReport:
    """Numbers of an image. found, labels: (examples, numbers) float64. classes: their names."""

    found: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]

    @classmethod
    def of_logits(cls, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], views: int = 1) -> NumbersReport:
        """From what the model gives and the labels, both (examples, numbers), or (examples,) of one number."""
        shape = (len(labels), len(classes))
        return cls(logits.astype(np.float64).reshape(shape), labels.astype(np.float64).reshape(shape), classes)

    def per_number(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(numbers,) each: mean absolute error, root mean squared error, R2, NaN of what is always the same."""
        errors = self.found - self.labels
        r2 = np.full(len(self.classes), np.nan)
        if (varied := np.ptp(self.labels, 0) > 0).any():
            r2[varied] = r2_score(self.labels[:, varied], self.found[:, varied], multioutput="raw_values")
        return np.abs(errors).mean(0), np.sqrt((errors**2).mean(0)), r2

    def metrics(self) -> dict[str, float]:
        """mean_absolute_error, root_mean_squared_error, r2: means over the numbers."""
        means = (float(np.nanmean(own)) if np.isfinite(own).any() else 0.0 for own in self.per_number())
        return dict(zip(ERRORS, means, strict=True))

    def headline(self) -> str:
        """The metric that it is judged by."""
        return f"mean absolute error {self.metrics()['mean_absolute_error']:.4g}"

    def details(self) -> dict[str, Any]:
        """What results say besides metrics."""
        return {"numbers": {name: own.tolist() for name, own in zip(ERRORS, self.per_number(), strict=True)}}

    def warnings(self, split: str) -> list[str]:
        """A line for each number that the model predicts no better than its mean does."""
        found = zip(self.classes, self.per_number()[2], strict=True)
        return [
            f"on {split} the model is no better than always answering the mean of {name} (R2 {r2:.3f})"
            for name, r2 in found
            if r2 <= 0
        ]

    def worst(self, number: int = SHOWN) -> list[tuple[int, int]]:
        """(example, number) of the examples with the largest errors in spreads of that number, the worst first."""
        errors = np.abs(self.found - self.labels) / np.maximum(self.labels.std(0), 1e-12)
        order = np.argsort(-errors.max(1), kind="stable")[:number]
        return [(int(place), int(errors[place].argmax())) for place in order]

    def write(
        self, folder: Path, heading: str, label: str = "", image: Callable[[int], Any] | None = None
    ) -> list[str]:
        """Write report.md, numbers.png and, if images can be shown, errors.png; as `ClassReport.write`."""
        pictures = [f"numbers{label}.png"]
        draw_fit(self.labels, self.found, self.classes, folder / pictures[0], heading)
        tiles = [] if image is None else [self._tile(place, number, image) for place, number in self.worst()]
        pictures += draw_errors(folder / f"errors{label}.png", f"{heading}: largest errors", tiles)
        means, spreads = self.labels.mean(0), self.labels.std(0)
        rows = [
            [cell(name), *(f"{value:.4g}" for value in values)]
            for name, *values in zip(self.classes, means, spreads, *self.per_number(), strict=True)
        ]
        columns = ("number", "mean", "spread", "mean absolute error", "root mean squared error", "R2")
        said = f"{len(self.labels)} examples. R2 is 0 for a model that always answers the mean, and 1 without an error."
        write_report(folder / f"report{label}.md", heading, said, markdown_table(columns, rows), pictures)
        return pictures

    def _tile(self, place: int, number: int, image: Callable[[int], Any]) -> Tile:
        name = self.classes[number]
        return Tile(image(place), f"{name} {self.found[place, number]:.4g}", f"is {self.labels[place, number]:.4g}")


Report = ClassReport | SeveralReport | NumbersReport
REPORTS: dict[str, type[Report]] = {"classes": ClassReport, "several": SeveralReport, "numbers": NumbersReport}


def validation_measure(kind: str, classes: Sequence[str]) -> Callable[[Any], dict[str, float]]:
    """(transformers' EvalPrediction) -> metrics of labels of a kind other than classes."""
    return partial(_measure, REPORTS[kind], classes)


def _measure(report: type[Report], classes: Sequence[str], prediction: Any) -> dict[str, float]:
    return report.of_logits(prediction.predictions, prediction.label_ids, classes).metrics()
