"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import IMAGE_SPLITS, add_device, command_parser

QUERIES = ("class_token", "mean")
COLUMNS = ("image", "left", "top", "width", "height")
PAPER_IMAGES = 100  # "Results averaged over 100 images", Fibottention section 6.2
# Sides of the square images for a model of 224 pixels; for other models they are in proportion to the model's own size.
# Each is rounded down to a multiple of the model's patch.
IMAGE_SIZES = (224, 384, 512, 768, 1024, 1280, 1536)
PRESET_PRIOR = "fibottention"
MASS = 0.6  # share of the attention that DINO's pictures keep
SEVERITIES = (1, 2, 3, 4, 5)
BENCHMARKS = ("cifar-c", "imagenet-c")
# In the order of the paper's Figure 1; the last four are its extra ones, for validation.
FAMILIES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
CORRUPTIONS = tuple(name for names in FAMILIES.values() for name in names)


def model_parser(command: str) -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.COMMAND`: models, their names, output folder and device."""
    parser = command_parser(f"analysis.{command}")
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="RUN", help="folder of a run, a saved model or an adapter of peft"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="of the models; default: what tells them apart")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/analysis") / command, help="folder (default %(default)s)"
    )
    add_device(parser)
    return parser


def add_data_arguments(
    parser: argparse.ArgumentParser, limit: int | None, batch_size: int | None = None, split: bool = True
) -> None:
    """Which images of which data set, and how many at a time where a command takes several."""
    parser.add_argument("--config", help="YAML file with a data section; default: that of the run that trained it")
    if split:
        parser.add_argument("--split", choices=IMAGE_SPLITS, default="test")
    shown = "all" if limit is None else limit
    parser.add_argument(
        "--limit", type=int, default=limit, help=f"largest number of images, from every class (default {shown})"
    )
    if batch_size is not None:
        parser.add_argument("--batch-size", type=int, default=batch_size, help="default %(default)s")
    parser.add_argument("--set", nargs="+", default=[], metavar="data.key=value", help="changes the data")


def add_map_arguments(parser: argparse.ArgumentParser, layers: str, heads: str) -> None:
    """Images, query patches, layers and heads; `layers` and `heads` name the defaults for `--help`."""
    parser.add_argument("--images", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument(
        "--indices", type=int, nargs="+", metavar="N", help="images of --split of the run's data, from 0"
    )
    parser.add_argument("--queries", type=parse_query, nargs="+", metavar="ROW,COLUMN", help="default the middle patch")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help=f"from 1, default {layers}")
    parser.add_argument("--heads", type=int, nargs="+", metavar="N", help=f"from 1, default {heads}")
    add_data_arguments(parser, limit=None)


def trained_parser(command: str) -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.COMMAND` that `load_trained` and `count_right` need."""
    parser = model_parser(command)
    add_data_arguments(parser, None, 64, split=False)
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare images (default: this one)")
    return parser


def parse_query(text: str) -> tuple[int, int]:
    """(row, column) from 0 of "ROW,COLUMN" from 1."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be ROW,COLUMN of a patch, counted from 1, for example 7,7")
    return int(parts[0]) - 1, int(parts[1]) - 1


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "HEIGHTxWIDTH"."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be HEIGHTxWIDTH in pixels, for example 432x768")
    return int(parts[0]), int(parts[1])


def attention() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.attention`."""
    parser = model_parser("attention")
    parser.add_argument(
        "--source", choices=QUERIES, help="whose attention the first picture shows (default class_token)"
    )
    parser.add_argument("--rollout", action="store_true", help="also the attention rollout up to each layer")
    add_map_arguments(parser, "some, evenly spread", "all, in query pictures the first four")
    return parser


def box_variance() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.box_variance`."""
    parser = model_parser("box_variance")
    add_data_arguments(parser, limit=PAPER_IMAGES)
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="images of your own, with --boxes")
    parser.add_argument("--boxes", type=Path, metavar="FILE", help=f"CSV ({','.join(COLUMNS)}) or JSON; pixels")
    return parser


def decay() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.decay`."""
    return model_parser("decay")


def diversity() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.diversity`."""
    parser = model_parser("diversity")
    add_data_arguments(parser, limit=None, batch_size=64)
    return parser


def flops() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.flops`."""
    parser = command_parser("analysis.flops")
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a preset, as `python -m hf_sparseprior list` names them; a YAML of a classification run; a folder of a "
        "saved model or a run",
    )
    parser.add_argument(
        "--prior",
        nargs="+",
        help="names, names joined by +, or full forms as YAML, each of which is counted "
        f"(default the model's own, {PRESET_PRIOR} for presets)",
    )
    parser.add_argument(
        "--image-sizes",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help=f"default {IMAGE_SIZES}, of a model of other than 224 in proportion",
    )
    parser.add_argument(
        "--convention",
        default="multiply_adds",
        help="how FLOPs are counted: multiply_adds (default), as in the papers; torch, two for a multiply-add, as in "
        "torch.utils.flop_counter; torch_and_softmax, also five a pair for softmax",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/analysis/flops"), help="folder (default %(default)s)")
    return parser


def frames() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.frames`."""
    parser = model_parser("frames")
    parser.add_argument("--clip", type=Path, required=True, metavar="FILE", help="a video file")
    parser.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help="read N frames, spread evenly; default all, of a model of clips as many as its own",
    )
    parser.add_argument("--size", type=parse_size, metavar="HEIGHTxWIDTH", help="of the frames; default the model's")
    parser.add_argument("--layer", type=int, metavar="N", help="from 1, default the last")
    parser.add_argument("--heads", type=int, nargs="+", metavar="N", help="also these heads, from 1, one row for each")
    parser.add_argument("--mass", type=float, default=MASS, help="share of the attention, default %(default)s")
    return parser


def resolution() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.resolution`."""
    parser = trained_parser("resolution")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        metavar="PIXELS",
        help="sides of the square images, multiples of the patch (default: VIOLIN's 144/224 to 512/224 of the first "
        "model's)",
    )
    return parser


def robustness() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.robustness`."""
    parser = trained_parser("robustness")
    parser.add_argument(
        "--benchmark",
        default=BENCHMARKS[0],
        help=f"whose severities: {' or '.join(BENCHMARKS)} (default %(default)s, for 32x32 pixels)",
    )
    parser.add_argument("--corruptions", nargs="+", default=CORRUPTIONS, metavar="NAME", help=", ".join(CORRUPTIONS))
    parser.add_argument("--severities", nargs="+", type=int, default=SEVERITIES, metavar="N", help="1 to 5")
    return parser


def sparsifiner() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.analysis.sparsifiner`."""
    parser = model_parser("sparsifiner")
    parser.add_argument("--others", type=Path, nargs="+", default=[], metavar="RUN", help="models to compare with")
    add_map_arguments(parser, "three, evenly spread", "the first four")
    return parser
