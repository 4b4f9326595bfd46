"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import add_device, command_parser

DENSE, STOCK = "dense", "transformers"
DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("projection", "packed", "contiguous")
PRIORS = (DENSE, "fibottention", "violin", "fibottention+violin")  # of backbones
KINDS = ("shapes", "scales")  # of mixed_sizes
# Of gpu. Images by patches; those that say most about the targets come first.
BATCHES = {4096: 8, 196: 128, 16384: 8, 1024: 32, 65536: 1}
GPU_DTYPES = ("bfloat16", "float16", "float32")
GPU_CONTENDERS = ("triton", "flash", "masked", "flex", "reference", "flash_window", "flex_window", "natten")
COPY_BYTES = 1 << 30
GPU_FOLDER = Path(__file__).parent / "results" / "gpu"
COUNTED = (
    "fibottention",
    "fibottention, w_max N // 3",
    "fibottention, zero fill",
    "fibottention and violin",
    "violin",
    "violin, 8 images",
)
MODELS = (  # of predicted
    "vit_tiny violin 384x2",
    "vit_small fibottention 512x1",
    "vit_base dense 224x2",
    "swin_tiny fibottention+violin 224x4",
    "convit_tiny bigbird 288x2",
)
DEPLOYED = ("torch", "onnx", "openvino")
RIVAL_DTYPES = ("float32", "bfloat16")
RIVALS = {
    "dense": "dense attention",
    "dense_compiled": "dense attention, by torch.compile",
    "onnxruntime": "dense attention in ONNX Runtime",
    "openvino": "dense attention in OpenVINO",
    "tome_90": "token merging that leaves 90 % of the patches after the last layer, eager",
    "tome_50": "token merging that leaves 50 % of the patches after the last layer, eager",
    "window": "a window in one dimension with Fibottention's pruning ratio",
    "window_compiled": "a window in one dimension with Fibottention's pruning ratio, by torch.compile",
    "fibottention": "Fibottention",
    "fibottention_compiled": "Fibottention, by torch.compile",
}
ROWS = (  # of video
    *("divided/dense", "divided/fibottention", f"joint/{STOCK}", "joint/dense", "joint/fibottention+clip"),
    "joint/violin+clip",
)
LONG = 10.0  # seconds; of a longer call on clips there is one


def add_machine_arguments(parser: argparse.ArgumentParser, dtype: bool = True) -> None:
    """--dtype, --device, --threads, --keep-memory; without `dtype`, the command has its own."""
    if dtype:
        parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)}")
    else:
        parser.set_defaults(dtype="float32")
    add_device(parser)
    add_cpu_arguments(parser)


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """--threads and --keep-memory."""
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="for every contender: freed memory stays with the process, as in training (tasks.classification)",
    )


def add_record_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """--rounds, --memory-gib, --seconds, --for-seconds and --out, of a folder of measurements (records.py)."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory-gib", type=float, help="of one process at most; default: three quarters of what is free"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of one process at most; default: %(default)s")
    parser.add_argument("--for-seconds", type=float, help="start no measurement after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark") / name)


def attention() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.attention`."""
    parser = command_parser("benchmark.attention")
    parser.add_argument("--sizes", default="196x8,1024x2,4096x1,16384x1", help="patch tokens x images")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument(
        "--support", default="{name: fibottention, w_min: 5, w_max: 65}", help="name, or YAML of a dict"
    )
    parser.add_argument("--decay", default="none", help="name, or YAML of a dict")
    parser.add_argument("--prefix-tokens", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default="projection", help="of q, k, v in memory")
    parser.add_argument("--contenders", help="names with commas between them; default: all")
    parser.add_argument("--rounds", type=int, default=30, help="of each size and pass, at most")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for the rounds of one size and pass")
    parser.add_argument("--also", type=Path, help="results of an earlier run, whose sizes the picture shows too")
    parser.add_argument("--memory", default="", metavar="SIZES", help="sizes at which only memory is measured")
    parser.add_argument("--growth", action="store_true", help="fit the exponent of time from 4096 to 65536 tokens")
    parser.add_argument("--targets", action="store_true", help="compare with the project's targets")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/benchmark/attention.json"), help="a .png is written next to it"
    )
    add_machine_arguments(parser)
    return parser


def backbones() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.backbones`."""
    parser = command_parser("benchmark.backbones")
    parser.add_argument("--models", nargs="+", default=["vit_small", "vit_base", "swin_tiny"], help="presets")
    parser.add_argument("--priors", nargs="+", default=list(PRIORS), help="names; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 1536], help="pixels a side")
    add_record_arguments(parser, "backbones")
    add_machine_arguments(parser)
    return parser


def chooser() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.chooser`."""
    parser = command_parser("benchmark.chooser")
    parser.add_argument("--settings", type=int, default=30, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rounds", type=int, default=15, help="of each setting, at most")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for the rounds of each")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/chooser"))
    add_machine_arguments(parser, dtype=False)
    return parser


def deployment() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.deployment`."""
    parser = command_parser("benchmark.deployment")
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="saved classifiers or training runs")
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        help="a folder for each class, or a .parquet file of fetch_cifar10",
    )
    parser.add_argument("--limit", type=int, help="so many images of a .parquet file, the first ones; default: all")
    parser.add_argument("--formats", nargs="+", default=list(DEPLOYED), choices=DEPLOYED, help="default: all")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/deployment"))
    add_cpu_arguments(parser)
    return parser


def gpu() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.gpu`."""
    parser = command_parser("benchmark.gpu")
    parser.add_argument("--count", action="store_true", help="count bytes, launches and registers; needs no GPU")
    parser.add_argument("--cases", nargs="+", choices=COUNTED, default=list(COUNTED), help="of --count")
    parser.add_argument("--tokens", type=int, nargs="+", help="patch tokens, square numbers")
    parser.add_argument("--batch", type=int, help=f"default by tokens: {BATCHES}")
    parser.add_argument("--dtype", choices=GPU_DTYPES, default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=GPU_CONTENDERS, default=list(GPU_CONTENDERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no step begins")
    parser.add_argument("--no-models", dest="models", action="store_false", help="operators only")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--out", type=Path, default=GPU_FOLDER, help="folder of the results; it is gone on with")
    return parser


def mixed_sizes() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.mixed_sizes`."""
    parser = command_parser("benchmark.mixed_sizes")
    parser.add_argument("--preset", default="vit_small")
    parser.add_argument("--priors", nargs="+", default=["dense", "fibottention", "fibottention+violin"])
    parser.add_argument("--kind", choices=KINDS, default="shapes")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--patches", type=int, default=196, help="of an image, at most")
    parser.add_argument("--rounds", type=int, default=10, help="of each prior and pass, at most")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for the rounds of each")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/mixed_sizes.json"))
    add_machine_arguments(parser)
    return parser


def model() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.model`."""
    parser = command_parser("benchmark.model")
    parser.add_argument("--models", default="vit_tiny,vit_small,vit_base", help="presets of any family")
    parser.add_argument(
        "--priors",
        nargs="+",
        default=["dense", "fibottention", "violin"],
        metavar="PRIOR[@BACKEND]",
        help=f"names, or YAML of dicts; {STOCK}: its own class, dense; default: %(default)s",
    )
    parser.add_argument("--sizes", default="224x8,384x4,512x2,768x1,1024x1,1536x1", help="pixels a side x images")
    parser.add_argument("--rounds", type=int, default=20, help="of each size and pass, at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the rounds of one size and pass")
    parser.add_argument("--targets", action="store_true", help="compare with the project's targets")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/benchmark/model.json"), help="a .png is written next to it"
    )
    add_machine_arguments(parser)
    return parser


def overhead() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.overhead`."""
    parser = command_parser("benchmark.overhead")
    parser.add_argument("--priors", nargs="+", default=["fibottention", "violin", "fibottention+violin", "bigbird"])
    parser.add_argument("--side", type=int, default=4, help="of the patch grid of a small call")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--preset", default="vit_tiny")
    parser.add_argument("--pixels", type=int, default=1024, help="the largest new size")
    parser.add_argument("--sizes", type=int, default=5, help="how many new sizes")
    parser.add_argument("--rounds", type=int, default=30, help="of small calls, at most")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for these rounds")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/overhead.json"))
    add_machine_arguments(parser)
    return parser


def predicted() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.predicted`."""
    parser = command_parser("benchmark.predicted")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="'PRESET PRIOR PIXELSxIMAGES'")
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement, at most")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the rounds of each")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/predicted"))
    add_machine_arguments(parser)
    return parser


def predictor() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.predictor`."""
    parser = command_parser("benchmark.predictor")
    parser.add_argument("--sizes", default="14x8,24x2,32x1", help="side of the patch grid x images")
    parser.add_argument("--keep-rates", default="0.25,0.1,0.05,0.01")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=20, help="of each size, keep rate and pass, at most")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the rounds of each")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/predictor.json"))
    add_machine_arguments(parser)
    return parser


def rivals() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.rivals`."""
    parser = command_parser(
        "benchmark.rivals", epilog="contenders:\n" + "\n".join(f"  {name}: {about}" for name, about in RIVALS.items())
    )
    parser.add_argument("--models", nargs="+", default=["vit_small", "vit_base"], help="presets; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 512, 1024, 1536], help="pixels a side")
    parser.add_argument("--dtypes", nargs="+", default=list(RIVAL_DTYPES), help="default: %(default)s")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), help="contenders; default: all")
    add_record_arguments(parser, "rivals")
    add_cpu_arguments(parser)
    return parser


def training_loop() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.training_loop`."""
    parser = command_parser("benchmark.training_loop")
    parser.add_argument("--config", default="configs/classification/cifar10_small.yaml#dense")
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/training_loop.json"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def video() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark.video`."""
    parser = command_parser("benchmark.video")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(ROWS),
        metavar="ATTENTION/PRIOR",
        help=f"divided, joint or space; a prior's name, YAML, or {STOCK}: its own class; default: %(default)s",
    )
    parser.add_argument("--frames", default="8,16,32,96", help="of a clip, more than 4; default: %(default)s")
    parser.add_argument("--pixels", default="224,448", help="a side of a frame; default: %(default)s")
    parser.add_argument("--preset", default="vit_tiny", help="width and depth, those of an image model")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1, help="of each process; default: %(default)s")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="of each process; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a call, at most; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="measure nothing: table and picture of what there is")
    parser.add_argument("--rounds", type=int, default=3, help=f"one where a call takes over {LONG:g} s")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/benchmark/video"), help="folder of records and tables"
    )
    return parser
