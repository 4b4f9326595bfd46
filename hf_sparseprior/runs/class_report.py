"""What a classifier gets right and wrong, class by class: report.md, confusion.png and its worst errors, errors.png."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from hf_sparseprior.base.files import write_text
from hf_sparseprior.prediction.pictures import Tile, draw_tiles
from hf_sparseprior.runs.metrics import IGNORED, average_views, confusion_matrix, what_was_not_learned
from hf_sparseprior.runs.plots import draw_confusion
from hf_sparseprior.runs.tables import markdown_table

BINS = 15  # of confidence, as in Guo et al. 2017
SHOWN = 24  # worst errors


@dataclass(frozen=True)
class ClassReport:
    """The classes of a split's examples, and the probabilities that a model gives them.

    probabilities: (examples, classes) float64. labels: (examples,) int64, `IGNORED` for what is no example.
    classes: names.
    """

    probabilities: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]

    @classmethod
    def of_logits(cls, logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], views: int = 1) -> ClassReport:
        """From logits (examples * views, classes), an example's views next to each other."""
        if views == 1:
            return cls(softmax(logits.astype(np.float64), -1), labels, classes)
        return cls(*average_views(logits, labels, views), classes)

    @property
    def predicted(self) -> np.ndarray:
        """(examples,) int64: the most probable class."""
        return np.argmax(self.probabilities, -1)

    @property
    def counts(self) -> np.ndarray:
        """The confusion matrix (true, predicted)."""
        return confusion_matrix(self.labels, self.predicted, len(self.classes))

    def metrics(self) -> dict[str, float]:
        """balanced_accuracy: mean recall of the classes that occur. calibration_error: see `calibration`."""
        recalls = self.per_class()[1]
        return {
            "balanced_accuracy": float(np.nanmean(recalls)) if np.isfinite(recalls).any() else 0.0,
            "calibration_error": self.calibration()[1],
        }

    def per_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Precision, recall and F1 of each class; NaN where a class is never predicted, or does not occur."""
        counts = self.counts.astype(np.float64)
        right, predicted, true = counts.diagonal(), counts.sum(0), counts.sum(1)
        with np.errstate(invalid="ignore"):
            return right / predicted, right / true, 2 * right / (predicted + true)

    def calibration(self) -> tuple[np.ndarray, float]:
        """Bins (bins, 3): examples, their mean confidence and the share of them that is right; and the expected
        calibration error, the mean distance of the last two over examples (Guo et al. 2017, Eq. 3).

        A confidence is the largest probability. A bin has confidences above its lower end, up to its upper end.
        """
        known = self.labels != IGNORED
        return calibration_bins(self.probabilities.max(-1)[known], (self.predicted == self.labels)[known])

    def worst(self, number: int = SHOWN) -> list[int]:
        """The examples with the largest probability of a wrong class, the worst first."""
        wrong = np.flatnonzero((self.predicted != self.labels) & (self.labels != IGNORED))
        order = np.argsort(-self.probabilities.max(-1)[wrong], kind="stable")
        return wrong[order][:number].tolist()

    def headline(self) -> str:
        """The metric that it is judged by."""
        return f"{100 * self.counts.diagonal().sum() / max(self.counts.sum(), 1):.2f} %"

    def details(self) -> dict[str, Any]:
        """What results say besides metrics."""
        return {"confusion": self.counts.tolist()}

    def warnings(self, split: str) -> list[str]:
        """See `what_was_not_learned`."""
        return what_was_not_learned(self.counts, self.classes, split)

    # ---- files ------------------------------------------------------------------------------------------------------

    def write(
        self, folder: Path, heading: str, label: str = "", image: Callable[[int], Any] | None = None
    ) -> list[str]:
        """Write report.md, confusion.png and, if images can be shown and some are wrong, errors.png.

        Args:
            folder: for the files.
            heading: says which model and split.
            label: goes between a file's name and its ending.
            image: example -> Pillow's image.

        Returns:
            Names of the pictures.
        """
        pictures = [f"confusion{label}.png"]
        bins, error = self.calibration()
        draw_confusion(self.counts, self.classes, folder / pictures[0], heading, bins)
        tiles = [] if image is None else [self._tile(place, image) for place in self.worst()]
        pictures += draw_errors(folder / f"errors{label}.png", f"{heading}: worst errors", tiles)
        said, table = self.text(error)
        write_report(folder / f"report{label}.md", heading, said, table, pictures)
        return pictures

    def _tile(self, place: int, image: Callable[[int], Any]) -> Tile:
        found, true = self.predicted[place], self.labels[place]
        share = 100 * self.probabilities[place, found]
        return Tile(image(place), f"{self.classes[found]} ({share:.0f} %)", f"is {self.classes[true]}")

    def text(self, error: float) -> tuple[str, str]:
        """A paragraph, and the table of the classes."""
        counts, rows = self.counts, []
        columns = (counts.sum(1), *self.per_class())
        for name, images, *shares in zip(self.classes, *columns, strict=True):
            rows.append([cell(name), str(images), *map(percent, shares)])
        means = [np.nanmean(own) if np.isfinite(own).any() else np.nan for own in columns[1:]]
        rows.append(["mean of the classes", str(counts.sum()), *map(percent, means)])
        table = markdown_table(("class", "examples", "precision, %", "recall, %", "F1, %"), rows)
        right = counts.diagonal().sum() / max(counts.sum(), 1)
        said = (
            f"{100 * right:.2f} % of {counts.sum()} examples are right. A class that is never predicted has no "
            f"precision. Expected calibration error: {100 * error:.2f} % ({BINS} bins)."
        )
        return said, table


def write_report(path: Path, heading: str, said: str, table: str, pictures: Sequence[str]) -> None:
    """Write a report as Markdown."""
    shown = "\n".join(f"![{name.partition('.')[0]}]({name})" for name in pictures)
    write_text(path, f"# {heading}\n\n{said}\n\n{table}\n\n{shown}\n")


def draw_errors(path: Path, title: str, tiles: Sequence[Tile]) -> list[str]:
    """Draw a sheet in the place of an earlier one, if there are tiles; the names of what was drawn."""
    path.unlink(missing_ok=True)
    if tiles:
        draw_tiles({title: tiles}, path)
    return [path.name] if tiles else []


def calibration_bins(confidence: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, float]:
    """What `ClassReport.calibration` returns, of confidences and whether they were right, both (examples,)."""
    places = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    sizes, sums, hits = (np.bincount(places, own, BINS) for own in (None, confidence, right))
    whole = np.maximum(sizes, 1)
    error = float(np.abs(sums - hits).sum() / max(len(places), 1))
    return np.stack([sizes, sums / whole, hits / whole], -1), error


def percent(share: float) -> str:
    """A share for a table; nothing for one that is not known."""
    return "" if np.isnan(share) else f"{100 * share:.1f}"


def cell(name: str) -> str:
    """A name in a table of Markdown."""
    return name.replace("|", "\\|")
