"""What came out of a search, as JSON, Markdown, a picture, and lines of a model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.tables import markdown_table

JSON, MARKDOWN, PICTURE = "report.json", "report.md", "frontier.png"
OFF = 0.1  # of the budget, from which on a report says so


@dataclass(frozen=True)
class Row:
    """A model on the test images.

    share: of the dense model's time, measured by turns with it. value, low, high: what `Report.measure` names, with its
    95 % interval; None: not measured, and `note` says why. changes: of the config, which make the model from the
    dense one: a prior, or an image size (height, width). difference: (difference, low, high) of accuracy to the dense
    model, image by image, with its 95 % interval. recovers, steps: the name of the row that this one is after recovery,
    and its steps: a faster model makes more in the same minutes.
    """

    name: str
    share: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    difference: tuple[float, float, float] | None = None
    recovers: str | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Report:
    """The result of `sparsify`.

    model: its class and prior before. image_size: (height, width). machine: where it was timed, with `batch` images at
    once. budget, least: shares of the dense model's time, asked for and of the fastest choice. dense_seconds: of a call
    of the dense model.
    predicted, measured: the share of the choice, by the times of its layers alone and of the whole model, which is
    measured once more after the choice. rounds:
    (predicted, measured) of each choice that was tried, predicted by what was measured before.
    loss_name: what losses are. layers: the candidate of each layer. loss, loss_sum: of the choice on the calibration
    images, and the sum over layers by which it was chosen. frontier: (share, loss_sum) of all choices, their shares
    corrected by what was measured.
    measure: what `rows` have. images: how many in each part. left_out: candidates that no layer could have or that
    save nothing, and why. seed, minutes: of the search; of recovery.
    """

    model: str
    image_size: tuple[int, int]
    machine: str
    batch: int
    budget: float
    least: float
    dense_seconds: float
    predicted: float
    measured: float
    rounds: list[tuple[float, float]]
    loss_name: str
    layers: list[str]
    loss: float
    loss_sum: float
    frontier: list[tuple[float, float]]
    measure: str
    rows: list[Row]
    images: dict[str, int]
    left_out: dict[str, str]
    seed: int
    minutes: float

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        """A page of it."""
        size = "x".join(map(str, self.image_size))
        lines = [
            f"# {self.model}, {self.budget:g} of its time at {size} pixels",
            "",
            *self.summary(),
            "",
            self._table(),
            "",
            f"Times are medians of calls with {self.batch} {'images' if self.batch > 1 else 'image'} in turns with the "
            f"dense model, which takes {1000 * self.dense_seconds:.1f} ms, in float32 on {self.machine}. Intervals are "
            f"of 95 %, over {self.images['test']} test images, which the search has not seen.",
            "",
            f"![loss over time]({PICTURE})",
            "",
            "## Layers",
            "",
            markdown_table(("layer", "pairs"), [(str(n), name) for n, name in enumerate(self.layers, 1)]),
            "",
            f"Loss: {self.loss_name}, on {self.images['calibration']} images. Of the choice {self.loss:.4g}; the sum "
            f"of its layers changed one by one, by which it was chosen, {self.loss_sum:.4g}.",
            "",
        ]
        if self.left_out:
            lines += ["## Left out", "", markdown_table(("candidate", "why"), list(self.left_out.items())), ""]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """What came out, in a few lines."""
        lines = [
            f"The choice takes {self.measured:.3f} of the dense model's time, measured; the times of its layers alone "
            f"give {self.predicted:.3f}. The budget is {self.budget:g}, the fastest choice takes {self.least:.3f}."
        ]
        if abs(self.measured - self.budget) > OFF * self.budget:
            lines.append(
                "That is more than 10 % off the budget: "
                + (
                    "measured once more, the choice takes longer than when it was made."
                    if self.measured > self.budget
                    else f"in {len(self.rounds)} rounds no choice was measured that meets it more closely."
                )
            )
        return lines

    def _table(self) -> str:
        names = ["model", "share of the time", self.measure]
        rows = [[row.name, "" if row.share is None else f"{row.share:.3f}", _value(row)] for row in self.rows]
        if any(row.difference is not None for row in self.rows):
            names.append("points against dense")
            for cells, row in zip(rows, self.rows, strict=True):
                cells.append(points(row.difference) if row.changes else "")
        return markdown_table(names, rows)

    def card_lines(self) -> list[str]:
        """A section of a model card."""
        return ["", "## Sparsified", "", *self.summary(), "", self._table(), "", f"Details: {MARKDOWN}", ""]

    def write(self, folder: Path) -> None:
        """Write page and picture, and the JSON last."""
        self.draw(folder / PICTURE)
        write_text(folder / MARKDOWN, self.to_markdown())
        write_text(folder / JSON, self.to_json())

    def draw(self, path: Path) -> None:
        """Draw the frontier with the choice."""
        figure, axis = pyplot().subplots(figsize=(6, 4), layout="constrained")
        shares, losses = zip(*self.frontier, strict=True)
        axis.plot(shares, losses, color=INK, marker=".", markersize=3, linewidth=1, label="least loss for a time")
        axis.axvline(self.budget, color="0.7", linewidth=1, linestyle="--", label=f"budget {self.budget:g}")
        axis.plot([self.measured], [self.loss_sum], "o", color=ACCENT, label="choice, time measured")
        axis.set_xlabel("share of the dense model's time")
        axis.set_ylabel("sum of the layers' losses")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
        save(figure, path)


def points(difference: tuple[float, float, float] | None) -> str:
    """A difference of accuracy in points, with its interval."""
    if difference is None:
        return ""
    value, low, high = (100 * each for each in difference)
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def _value(row: Row) -> str:
    if row.value is None:
        return row.note
    interval = "" if row.low is None else f" ({row.low:.4f} to {row.high:.4f})"
    return f"{row.value:.4f}{interval}{'; ' + row.note if row.note else ''}"
