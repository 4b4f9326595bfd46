"""Accuracy on corrupted test images: python -m tasks.analysis.robustness RUN [RUN ...]

Every corruption of CIFAR-10-C or ImageNet-C at every severity is made on the fly from the test images at their own
size, once for all models. What is random in a corrupted image follows from the image, the corruption and the severity:
every model, batch size and subset sees the same. Each accuracy is kept as soon as it is known. The command can be
stopped at any moment and started again; then it goes on, and a model that has changed starts anew. It writes
robustness.md, .json and four pictures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.config import check_known
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis import robustness_pictures as pictures
from tasks.analysis.commands import BENCHMARKS, CORRUPTIONS, SEVERITIES
from tasks.analysis.corruptions import BENCHMARK_CORRUPTIONS, check_size, corrupt, versions
from tasks.analysis.trained import (
    Cells,
    Change,
    SharedImages,
    Trained,
    accuracies,
    check_arguments,
    fill_cells,
    load_trained,
    open_cells,
    trained_main,
)

CLEAN = "clean"


@dataclass
class Robustness:
    """Accuracy of one model, as fractions of the test images.

    name: the model's name.
    clean: on the images as they are.
    accuracy: {corruption: {severity: accuracy}}.
    """

    name: str
    clean: float
    accuracy: dict[str, dict[int, float]]

    def of_corruption(self, corruption: str) -> float:
        """Mean over severities (Fibottention Figure 6)."""
        return statistics.fmean(self.accuracy[corruption].values())

    def of_severity(self, severity: int) -> float:
        """Mean over corruptions (Fibottention Figure 4)."""
        return statistics.fmean(severities[severity] for severities in self.accuracy.values())

    @property
    def mean(self) -> float:
        """Mean over corruptions and severities."""
        return statistics.fmean(map(self.of_corruption, self.accuracy))


def corruption_errors(model: Robustness, baseline: Robustness) -> dict[str, float | None]:
    """Corruption error CE of each corruption: the model's errors over the baseline's, each summed over severities
    (Hendrycks & Dietterich 2019, Section 4; their baseline is AlexNet). None where the baseline makes no error.
    """
    errors: dict[str, float | None] = {}
    for corruption, own in model.accuracy.items():
        of_baseline = sum(1 - share for share in baseline.accuracy[corruption].values())
        errors[corruption] = sum(1 - share for share in own.values()) / of_baseline if of_baseline else None
    return errors


def mean_corruption_error(errors: Mapping[str, float | None], corruptions: Sequence[str]) -> float | None:
    """mCE, the mean of CE over these corruptions; None if one of them has no CE."""
    values = [error for corruption in corruptions if (error := errors[corruption]) is not None]
    return statistics.fmean(values) if len(values) == len(corruptions) else None


# ---- tables ---------------------------------------------------------------------------------------------------------


def corruption_table(models: Sequence[Robustness]) -> str:
    """A line for each corruption, mean over severities, then the means and mCE, as a Markdown table in percent."""
    corruptions = list(models[0].accuracy)
    rows = [[name, *(_percent(model.of_corruption(name)) for model in models)] for name in corruptions]
    rows.append([f"mean of {len(corruptions)}", *(_percent(model.mean) for model in models)])
    rows.append([CLEAN, *(_percent(model.clean) for model in models)])
    errors = [corruption_errors(model, models[0]) for model in models]
    for title, names in _error_groups(corruptions).items():
        values = (mean_corruption_error(own, names) for own in errors)
        rows.append([f"{title}, % of {models[0].name}", *(_percent(value) for value in values)])
    return markdown_table(["corruption", *(model.name for model in models)], rows)


def _error_groups(corruptions: Sequence[str]) -> dict[str, Sequence[str]]:
    """The groups of corruptions that mCE is taken over: all of them and, if that is more than the paper's 15, those."""
    groups = {f"mCE of {len(corruptions)}": corruptions}
    if set(BENCHMARK_CORRUPTIONS) < set(corruptions):
        groups[f"mCE of the benchmark's {len(BENCHMARK_CORRUPTIONS)}"] = BENCHMARK_CORRUPTIONS
    return groups


def severity_table(models: Sequence[Robustness]) -> str:
    """A line for each severity, mean over corruptions, as a Markdown table in percent."""
    severities = next(iter(models[0].accuracy.values()))
    rows = [[str(severity), *(_percent(model.of_severity(severity)) for model in models)] for severity in severities]
    return markdown_table(["severity", *(model.name for model in models)], rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


# ---- command --------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return trained_main(commands.robustness(), run, argv)


def run(arguments: argparse.Namespace) -> None:
    """Count what is not known yet, print the tables, write them and the pictures."""
    check_arguments(arguments)
    corruptions, severities = chosen(arguments)
    made_with = versions()
    models, shared = load_trained(arguments)
    for height, width in shared.sizes:
        check_size(height, width, arguments.benchmark)
    cells = open_cells(arguments.out, models, shared, benchmark=arguments.benchmark, versions=made_with)
    changes: dict[str, Change | None] = {CLEAN: None}
    for corruption in corruptions:
        for severity in severities:
            changes[_cell(corruption, severity)] = partial(
                corrupted, name=corruption, severity=severity, benchmark=arguments.benchmark
            )
    preparations = [model.preparation() for model in models]
    work = {cell: (change, preparations) for cell, change in changes.items()}
    fill_cells(models, cells, shared.images, work, arguments.batch_size, arguments.workers)
    results = [_from_cells(model, own, corruptions, severities) for model, own in zip(models, cells, strict=True)]
    _write(arguments, models, results, shared, made_with)


def chosen(arguments: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Corruptions and severities of the command line, each once, in the benchmark's order.

    Raises:
        ValueError: for an unknown name (the message has the nearest known one) and for a severity that does not exist.
    """
    check_known([arguments.benchmark], BENCHMARKS, "--benchmark")
    check_known(arguments.corruptions, CORRUPTIONS, "--corruptions")
    for severity in arguments.severities:
        if severity not in SEVERITIES:
            raise ValueError(f"--severities {severity} must be from {SEVERITIES[0]} to {SEVERITIES[-1]}")
    corruptions = [name for name in CORRUPTIONS if name in arguments.corruptions]
    return corruptions, sorted(set(arguments.severities))


def corrupted(image: Image.Image, name: str, severity: int, benchmark: str) -> Image.Image:
    """`corrupt` for PIL images."""
    return Image.fromarray(corrupt(np.asarray(image), name, severity, benchmark))


def _cell(corruption: str, severity: int) -> str:
    return f"{corruption}_{severity}"


def _from_cells(model: Trained, cells: Cells, corruptions: Sequence[str], severities: Sequence[int]) -> Robustness:
    accuracy = {
        corruption: accuracies(model, cells, {severity: _cell(corruption, severity) for severity in severities})
        for corruption in corruptions
    }
    return Robustness(model.name, accuracies(model, cells, {CLEAN: CLEAN})[CLEAN], accuracy)


def _write(
    arguments: argparse.Namespace,
    models: Sequence[Trained],
    results: Sequence[Robustness],
    shared: SharedImages,
    made_with: Mapping[str, str],
) -> None:
    out, benchmark = arguments.out, arguments.benchmark
    first = results[0]
    severities = list(next(iter(first.accuracy.values())))
    text = "\n\n".join(
        [
            f"Accuracy, %, on {len(shared.images)} test images of {shared.data.description}, corrupted as in "
            f"{benchmark}, severities {', '.join(map(str, severities))}.",
            corruption_table(results),
            "Mean over corruptions:",
            severity_table(results),
        ]
    )
    write_results(
        out / "robustness.json",
        {
            "task": "robustness",
            "benchmark": benchmark,
            "baseline": first.name,
            **shared.about(),
            "models": [_record(*pair, first) for pair in zip(models, results, strict=True)],
            "corruption_versions": made_with,
            "command": command_line(),
            **environment(),
        },
    )
    write_text(out / "robustness.md", text + "\n")
    heading = f"{benchmark}, {len(shared.images)} test images"
    image = np.asarray(shared.images.read(0))
    drawn = [
        pictures.draw_severities(results, out / "by_severity.png", heading),
        pictures.draw_corruptions(results, out / "by_corruption.png", heading),
        pictures.draw_four(results, out / "four_corruptions.png", heading),
        pictures.draw_image(image, list(first.accuracy), severities, benchmark, out / "corruptions.png"),
    ]
    print(f"{text}\n\n{out / 'robustness.json'}, pictures: {', '.join(map(str, drawn))}")


def _record(model: Trained, result: Robustness, baseline: Robustness) -> dict[str, Any]:
    errors = corruption_errors(result, baseline)
    return {
        **model.about(),
        "clean_accuracy": result.clean,
        "accuracy": result.accuracy,
        "accuracy_of_severity": {
            severity: result.of_severity(severity) for severity in next(iter(result.accuracy.values()))
        },
        "mean_accuracy": result.mean,
        "corruption_errors": errors,
        "mean_corruption_error": {
            title: mean_corruption_error(errors, names) for title, names in _error_groups(list(errors)).items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
