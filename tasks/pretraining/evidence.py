"""Whether pretraining helps k-NN: python -m tasks.pretraining.evidence RUN [RUN ...]

RUN is the folder of a finished run, or RECORDS/ROW, all runs of a row that `compare` has recorded in
RECORDS/records.jsonl. They differ in their seed.
It prints, for each, the k-NN accuracy of the teacher, of the model before its first step and of the pixels, and by how
much the first is above the others: on the same test images, with the standard error of the difference over them.
"above" is a difference of more than two standard errors in every run and, with two runs or more, of more than two
standard errors over the seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import RESULTS
from hf_sparseprior.runs.tables import markdown_table
from tasks.common.records import RECORDS, read_records
from tasks.pretraining import commands

ERRORS = 2  # standard errors that a difference has to be above
AGAINST = {"at_start": "before training", "of_pixels": "pixels"}


def read_runs(places: Sequence[Path]) -> list[dict[str, Any]]:
    """Results of runs, by seed.

    Args:
        places: folders of runs, or RECORDS/ROW.

    Raises:
        OSError: for a run that is not finished. ValueError: for one of another task, and for equal seeds.
    """
    runs = []
    for place in places:
        row = list(read_records(place.parent).get(place.name, {}).values())
        if not row and not (place / RESULTS).is_file():
            raise OSError(f"{place} has no {RESULTS} and is no row of {place.parent / RECORDS}; it is no finished run")
        for results in row or [read_results(place / RESULTS)]:
            if "k_nn_above" not in results:
                raise ValueError(f"{place} is no run of pretraining, its results have no k_nn_above")
            runs.append(results)
    seeds = [results["seed"] for results in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"the runs must differ in their seed, not {', '.join(map(str, seeds))}")
    return sorted(runs, key=lambda results: results["seed"])


def is_above(runs: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether the teacher is above the features of this name in every run and over the seeds."""
    found = [run["k_nn_above"][name] for run in runs]
    each = all(one["difference"] > ERRORS * one["standard_error"] for one in found)
    mean, error = over_seeds([one["difference"] for one in found])
    return each and (len(runs) == 1 or mean > ERRORS * error)


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of one value is NaN."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread / math.sqrt(len(values))


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each run and one for all, in percent and points."""
    names = ("test_knn_accuracy", *(f"test_knn_accuracy_{name}" for name in AGAINST))
    rows = []
    for run in runs:
        accuracies = [_pair(run["metrics"][name], run["standard_errors"][name]) for name in names]
        above = [
            _pair(run["k_nn_above"][name]["difference"], run["k_nn_above"][name]["standard_error"]) for name in AGAINST
        ]
        rows.append([str(run["seed"]), *accuracies, *above, f"{run['seconds'] / 60:.1f}"])
    if len(runs) > 1:
        accuracies = [_pair(*over_seeds([run["metrics"][name] for run in runs])) for name in names]
        above = [_pair(*over_seeds([run["k_nn_above"][name]["difference"] for run in runs])) for name in AGAINST]
        rows.append(["all", *accuracies, *above, f"{np.mean([run['seconds'] for run in runs]) / 60:.1f}"])
    heads = [
        "k-NN, %",
        *(f"{label}, %" for label in AGAINST.values()),
        *(f"above {label}" for label in AGAINST.values()),
    ]
    return markdown_table(["seed", *heads, "minutes"], rows)


def _pair(value: float, error: float) -> str:
    return f"{100 * value:.2f} ± {100 * error:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if pretraining is not above both."""
    parser = commands.evidence()
    arguments = parser.parse_args(argv)
    verdicts: list[bool] = []

    def work() -> None:
        runs = read_runs(arguments.runs)
        print(table(runs))
        print("\n± is one standard error: over the test images, in the last row over the seeds.")
        for name, label in AGAINST.items():
            verdicts.append(is_above(runs, name))
            print(f"{label}: {'above' if verdicts[-1] else 'not above'} by {ERRORS} standard errors")

    return run_command(parser.prog, work) or int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
