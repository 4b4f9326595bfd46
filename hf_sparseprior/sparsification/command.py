"""`sparseprior sparsify MODEL OUT --data FOLDER`. See docs/how-to/sparsify.md."""

from __future__ import annotations

import argparse
import sys

from hf_sparseprior.cli.deployment import parse_size
from hf_sparseprior.sparsification.sparsify import sparsify

OPTIONS = (
    *("batch", "device", "seed", "candidates", "calibration", "test"),
    *("minutes", "tuning", "learning_rate", "recover_all", "micro_batch"),
)


def run(arguments: argparse.Namespace) -> list[str]:
    """What `sparseprior sparsify` does with the arguments of its parser; lines for the user.

    Raises:
        OSError, ValueError: as `sparsify`.
    """
    settings = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.image_size is not None:
        settings["image_size"] = parse_size(arguments.image_size, "--image-size")
    result = sparsify(
        arguments.model,
        arguments.data,
        arguments.budget,
        processor=arguments.processor,
        out=arguments.out,
        settings=settings,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report = result.report
    rows = [
        f"{row.name}: {report.measure} {row.value:.4f} at {row.share:.3f} of the time"
        for row in report.rows
        if row.value is not None and row.share is not None
    ]
    return [*report.summary(), *rows, f"{arguments.out}: the model, report.md, report.json and frontier.png"]
