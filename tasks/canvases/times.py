"""Time of inference of each contender that has a record: python -m tasks.canvases.times --scale cpu

For a quiet machine, after the runs. Contenders of one size take turns in rounds, and every round begins with another
one; what counts is the median of the rounds. Counted is the whole model on canvases that are made already: processor
time of one thread, on a GPU wall time in bfloat16. Weights are drawn by chance; only Sparsifiner's time may depend on
them. Writes times.json into the folder of records.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.checks import check_integer, first_line
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.environment import environment
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.canvases import commands
from tasks.canvases.contenders import CONTENDERS, SCALES, VARIANTS, Scale
from tasks.canvases.data import TEST_SEED, as_input
from tasks.canvases.loop import autocast, check_device, clock_of, evaluating
from tasks.canvases.report import TIMES, groups_of, records_folder
from tasks.common.records import read_records

CALL_SECONDS = 0.2  # a turn repeats shorter calls for as long


def measure_all(scale: Scale, records: Path, rounds: int = commands.ROUNDS, data: str | None = None) -> dict[str, Any]:
    """Measure every group of records, print a line for each contender and write times.json.

    Args:
        scale: whose model and patches. records: folder of the records. rounds: turns of each contender.
        data: folder of Fashion-MNIST.

    Raises:
        ValueError: without records.
    """
    check_device(scale.device)
    measured: dict[str, Any] = {}
    for group in groups_of(scale, records):
        variant = VARIANTS[group.variant]
        pool = variant.pools(scale.device, data)["test"]
        images, _ = variant.images(pool, group.side, TEST_SEED).batch(0, scale.inference_batch)
        rows = read_records(records / group.folder)
        priors = {row: next(iter(runs.values()))["prior_settings"] for row, runs in rows.items()}
        models = {row: _model(scale, group.side, row, prior, variant.classes) for row, prior in priors.items()}
        measured[group.folder] = _measure(scale, models, images, rounds)
        for row, one in measured[group.folder].items():
            print(f"{group.folder}/{row}: {one['ms']:.2f} ms an image", flush=True)
    if not measured:
        raise ValueError(f"--records {records} has no records of scale {scale.name}; `run` makes them")
    return write_results(records / TIMES, {"times": measured, "images_a_call": scale.inference_batch, **environment()})


def _model(scale: Scale, side: int, row: str, prior: Any, labels: int) -> Any:
    contender = CONTENDERS[row]
    sizes = {"image_size": side // contender.shrink, "patch_size": scale.patch * contender.patch}
    config = SparsePriorViTConfig(**scale.model, **sizes, num_labels=labels, prior=prior)
    return SparsePriorViTForImageClassification(config).to(scale.device)


def _measure(scale: Scale, models: dict[str, Any], images: Any, rounds: int) -> dict[str, Any]:
    clock = clock_of(scale.device)
    seconds: dict[str, list[float]] = {}

    def turn(row: str) -> float:
        model, shrink = models[row], CONTENDERS[row].shrink
        with evaluating(model), autocast(scale.device):
            started, calls = clock(), 0
            while (spent := clock() - started) < CALL_SECONDS or not calls:
                model(pixel_values=as_input(images, shrink))
                calls += 1
        return spent / calls / len(images)

    for row in models:
        try:
            turn(row)  # the first call may compile kernels
        except Exception as error:  # of CUDA and of its compilers too: the others are measured
            print(f"{row}: not measured, {first_line(error)}", file=sys.stderr, flush=True)
        else:
            seconds[row] = []
    names = list(seconds)
    for number in range(rounds):
        start = number % max(1, len(names))
        for row in (*names[start:], *names[:start]):
            seconds[row].append(turn(row))
    return {
        row: {
            "ms": 1000 * float(np.median(turns)),
            "quartiles": [1000 * float(part) for part in np.quantile(turns, (0.25, 0.75))],
            "rounds": rounds,
        }
        for row, turns in seconds.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.times()
    arguments = parser.parse_args(argv)

    def work() -> None:
        check_integer("--rounds", arguments.rounds, 1)
        keep_freed_memory()
        scale = SCALES[arguments.scale]
        records = records_folder(scale, arguments.records)
        measure_all(scale, records, arguments.rounds, arguments.fashion_mnist)
        print(f"times: {records / TIMES}; `report` shows them")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
