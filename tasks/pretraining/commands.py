"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tasks.common.parsers import add_device, add_import, command_parser, compare_parser, train_parser

TRAINS = "student and teacher with DINO, on images without their labels"

train = partial(train_parser, "pretraining", TRAINS)
compare = partial(compare_parser, "pretraining")


def evaluate() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.pretraining.evaluate`."""
    parser = command_parser(
        "pretraining.evaluate", "Judge the features of a saved model by k-NN and a linear classifier."
    )
    parser.add_argument("model", type=Path, help="folder of a saved model or of a run")
    parser.add_argument("--config", help="YAML file with a data section; default: that of the run that trained it")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--linear", action="store_true", help="also train a linear classifier on the frozen features")
    parser.add_argument("--batch-size", type=int, default=64, help="images at a time, default %(default)s")
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare images, default %(default)s")
    add_device(parser)
    add_import(parser)
    parser.add_argument("--out", type=Path, help="folder for the results; default: RUN/evaluation")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value", help="also evaluation.key=value")
    return parser


def evidence() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.pretraining.evidence`."""
    parser = command_parser("pretraining.evidence")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run, or RECORDS/ROW")
    return parser
