"""Arguments of `python -m tasks.benchmark NAME`, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from pathlib import Path

from tasks.common.parsers import add_device

DENSE, STOCK = "dense", "transformers"
DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("projection", "packed", "contiguous")
KINDS = ("shapes", "scales")  # of mixed_sizes
CHECKPOINTED = "training, checkpointed"
MEMORY_PASSES = ("forward", "training", CHECKPOINTED)
# Of gpu. Images by patches; those that say most about the targets come first.
BATCHES = {4096: 8, 196: 128, 16384: 8, 1024: 32, 65536: 1}
GPU_CONTENDERS = ("triton", "dense_sdpa", "sdpa", "flex_offsets", "reference", "flash_window", "flex_window", "natten")
CARDS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")  # A100; RTX 30, A10; RTX 40, L4; H100, H200; B200; RTX 50
COUNTED = (
    "fibottention",
    "fibottention, w_max N // 3",
    "fibottention, zero fill",
    "fibottention and violin",
    "violin",
    "violin, 8 images",
)
PREDICTED_MODELS = (
    "vit_tiny violin 384x2",
    "vit_small fibottention 512x1",
    "vit_base dense 224x2",
    "swin_tiny fibottention+violin 224x4",
    "convit_tiny bigbird 288x2",
)
# Of gpu, besides: scaled_dot_product_attention by one of its kernels.
SDPA_KERNELS = ("flash", "cudnn")
QUICK_CONTENDERS = ("triton", *SDPA_KERNELS)  # of gpu --quick, next to what the library does
MINUTES, MINUTES_OF_ALL = 4.0, 7.0  # of gpu --quick and --models, and of gpu without them
DEPLOYED = ("torch", "onnx", "openvino", "aoti")
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
CLIP_ROWS = (
    *("divided/dense", "divided/fibottention", f"joint/{STOCK}", "joint/dense", "joint/fibottention+clip"),
    "joint/violin+clip",
)
ATTENTION_SUPPORT = "{name: fibottention, w_min: 5, w_max: 65}"


def add_heads(parser: argparse.ArgumentParser, heads: int) -> None:
    """--heads and --width."""
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--width", type=int, default=64, help="of a head")


def attention(parser: argparse.ArgumentParser) -> None:
    """Options of `attention`."""
    parser.add_argument("--sizes", default="196x8,1024x2,4096x1,16384x1", help="patch tokens x images")
    add_heads(parser, 12)
    parser.add_argument("--support", default=ATTENTION_SUPPORT, help="name, or YAML of a dict")
    parser.add_argument("--decay", default="none", help="name, or YAML of a dict")
    parser.add_argument("--prefix-tokens", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default="projection", help="of q, k, v in memory")
    parser.add_argument("--contenders", help="names with commas between them; default: all")
    parser.add_argument("--growth", action="store_true", help="also one image of 4096 to 65536 tokens")


def model(parser: argparse.ArgumentParser) -> None:
    """Options of `model`."""
    parser.add_argument("--models", default="vit_tiny,vit_small,vit_base", help="presets of any family")
    parser.add_argument(
        "--priors",
        nargs="+",
        default=["dense", "fibottention", "violin"],
        metavar="PRIOR[@BACKEND]",
        help=f"names, or YAML of dicts; {STOCK}: its own class, dense; default: %(default)s",
    )
    parser.add_argument("--sizes", default="224x8,384x4,512x2,768x1,1024x1,1536x1", help="pixels a side x images")


def backbones(parser: argparse.ArgumentParser) -> None:
    """Options of `backbones`."""
    parser.add_argument("--models", nargs="+", default=["vit_small", "vit_base", "swin_tiny"], help="presets")
    priors = [DENSE, "fibottention", "violin", "fibottention+violin"]
    parser.add_argument("--priors", nargs="+", default=priors, help="names; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 1536], help="pixels a side")


def memory(parser: argparse.ArgumentParser) -> None:
    """Options of `memory`."""
    parser.add_argument("--models", nargs="+", default=["vit_tiny"], help="presets; default: %(default)s")
    priors = [DENSE, "fibottention"]
    parser.add_argument("--priors", nargs="+", default=priors, help="names; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048, 4096], help="pixels a side")


def rivals(parser: argparse.ArgumentParser) -> None:
    """Options of `rivals`."""
    parser.epilog = "contenders:\n" + "\n".join(f"  {name}: {about}" for name, about in RIVALS.items())
    parser.add_argument("--models", nargs="+", default=["vit_small", "vit_base"], help="presets; default: %(default)s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 512, 1024, 1536], help="pixels a side")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), help="contenders; default: all")


def video(parser: argparse.ArgumentParser) -> None:
    """Options of `video`."""
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(CLIP_ROWS),
        metavar="ATTENTION/PRIOR",
        help=f"divided, joint or space; a prior's name, YAML, or {STOCK}: its own class; default: %(default)s",
    )
    parser.add_argument("--frames", nargs="+", type=int, default=[8, 16, 32, 96], help="of a clip, more than 4")
    parser.add_argument("--pixels", nargs="+", type=int, default=[224, 448], help="a side of a frame")
    parser.add_argument("--preset", default="vit_tiny", help="width and depth, those of an image model")


def chooser(parser: argparse.ArgumentParser) -> None:
    """Options of `chooser`."""
    parser.add_argument("--settings", type=int, default=30, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")


def predicted(parser: argparse.ArgumentParser) -> None:
    """Options of `predicted`."""
    models = list(PREDICTED_MODELS)
    parser.add_argument("--models", nargs="+", default=models, metavar="'PRESET PRIOR PIXELSxIMAGES'")


# Options of `deployment` without models: defaults, and what they are.
PRESETS_TIMED: dict[str, tuple[list, str]] = {
    "presets": (["vit_tiny", "vit_small"], "names"),
    "priors": (["fibottention", "violin", "fibottention+violin", "sparsifiner"], "names"),
    "sizes": ([224, 512, 1024], "pixels a side"),
    "weights": ([], "besides float32"),
}


def deployment(parser: argparse.ArgumentParser) -> None:
    """Options of `deployment`."""
    text = "saved classifiers or training runs, with --images; without any, presets are timed with their kernels"
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER", help=text)
    files = "a folder for each class, or a .parquet file of fetch_cifar10"
    parser.add_argument("--images", type=Path, help=files)
    parser.add_argument("--limit", type=int, help="so many images of a .parquet file, the first ones; default: all")
    parser.add_argument("--formats", nargs="+", default=list(DEPLOYED), choices=DEPLOYED, help="default: all")
    for name, (default, about) in PRESETS_TIMED.items():
        kind = {"type": int} if name == "sizes" else {"choices": ["bfloat16", "int8"]} if name == "weights" else {}
        text = f"without models: {about}; default: {' '.join(map(str, default)) or 'none'}"
        parser.add_argument(f"--{name}", nargs="+", help=text, **kind)


def overhead(parser: argparse.ArgumentParser) -> None:
    """Options of `overhead`."""
    parser.add_argument("--priors", nargs="+", default=["fibottention", "violin", "fibottention+violin", "bigbird"])
    parser.add_argument("--side", type=int, default=4, help="of the patch grid of a small call")
    add_heads(parser, 6)
    parser.add_argument("--preset", default="vit_tiny")
    parser.add_argument("--pixels", type=int, default=1024, help="the largest new size")
    parser.add_argument("--sizes", type=int, default=5, help="how many new sizes")


def predictor(parser: argparse.ArgumentParser) -> None:
    """Options of `predictor`."""
    parser.add_argument("--sizes", default="14x8,24x2,32x1", help="side of the patch grid x images")
    parser.add_argument("--keep-rates", default="0.25,0.1,0.05,0.01")
    add_heads(parser, 6)


def mixed_sizes(parser: argparse.ArgumentParser) -> None:
    """Options of `mixed_sizes`."""
    parser.add_argument("--preset", default="vit_small")
    parser.add_argument("--priors", nargs="+", default=["dense", "fibottention", "fibottention+violin"])
    parser.add_argument("--kind", choices=KINDS, default="shapes")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--patches", type=int, default=196, help="of an image, at most")


def training_loop(parser: argparse.ArgumentParser) -> None:
    """Options of `training_loop`."""
    parser.add_argument("--config", default="configs/classification/cifar10_small.yaml#dense")
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="in place of the config's")


def gpu(parser: argparse.ArgumentParser) -> None:
    """Options of `gpu`."""
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--quick", action="store_true", help="correctness, same bits, kernels, the host's time of a call"
    )
    modes.add_argument("--models", action="store_true", help="whole models, eager, compiled and in CUDA graphs")
    modes.add_argument("--count", action="store_true", help="count bytes, launches and registers; needs no GPU")
    minutes = f"start nothing after so many; default: {MINUTES:g} with --quick or --models, else {MINUTES_OF_ALL:g}"
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--cases", nargs="+", choices=COUNTED, default=list(COUNTED), help="of --count")
    cards = "compile every kernel for these compute capabilities (default: all; an hour); needs no GPU"
    modes.add_argument("--cards", nargs="*", choices=CARDS, help=cards)
    parser.add_argument("--tokens", type=int, nargs="+", help="patch tokens, square numbers")
    parser.add_argument("--batch", type=int, help=f"default by tokens: {BATCHES}")
    names = (*GPU_CONTENDERS, *SDPA_KERNELS)
    parser.add_argument("--contenders", nargs="+", choices=names, default=list(names))
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="of the copy that times are compared with")


# A line, the options of its own, and defaults of those that all have.
Entry = tuple[str, Callable[[argparse.ArgumentParser], None], dict[str, object]]
ENTRIES: dict[str, Entry] = {
    "attention": (
        "one layer's attention: dense, every backend, FlexAttention, windows",
        attention,
        {"rounds": 30, "seconds": 120.0},
    ),
    "model": ("whole models: forward pass and training step", model, {"rounds": 20, "seconds": 60.0}),
    "backbones": ("backbones of segmentation and detection: one image", backbones, {}),
    "memory": ("peak memory over image sizes, with and without gradient checkpointing", memory, {"seconds": 180.0}),
    "rivals": ("what a user would pick instead: other programs, token merging, windows", rivals, {}),
    "video": ("clips: forward pass of video models", video, {"seconds": 40.0, "memory_gib": 12.0, "threads": 1}),
    "deployment": ("exported models: size, accuracy, time", deployment, {"rounds": 9, "seconds": 60.0}),
    "gpu": (
        "the Triton kernels: checked, tuned, timed; --count and --cards need no GPU",
        gpu,
        {"rounds": 15, "seconds": 5.0, "device": "cuda", "dtype": "bfloat16"},
    ),
    "chooser": ("which backend is chosen, and which is the fastest", chooser, {"rounds": 15, "seconds": 10.0}),
    "predicted": ("what `explain --time` predicts, and what is measured", predicted, {"rounds": 10, "seconds": 10.0}),
    "overhead": ("what attention costs besides its work", overhead, {"rounds": 30, "seconds": 10.0}),
    "predictor": ("Sparsifiner's predictor and its attention", predictor, {"rounds": 20, "seconds": 10.0}),
    "mixed_sizes": ("a batch of images of several sizes, in four ways", mixed_sizes, {"rounds": 10, "seconds": 30.0}),
    "training_loop": ("a step of the Trainer and of a bare loop", training_loop, {"rounds": 6}),
}


def add_shared(parser: argparse.ArgumentParser, name: str) -> None:
    """What all entries have."""
    shared = parser.add_argument_group("of all entries")
    shared.add_argument("--out", type=Path, default=Path("outputs/benchmark") / name, help="folder; it is gone on with")
    shared.add_argument("--report", action="store_true", help="measure nothing: table and picture of what there is")
    shared.add_argument("--rounds", type=int, default=3, help="at most; default: %(default)s")
    shared.add_argument(
        *("--seconds", "--budget"),
        dest="seconds",
        type=float,
        default=600.0,
        help="for the rounds of one size, or of one process at most; default: %(default)s",
    )
    shared.add_argument("--memory-gib", type=float, help="at most; default: most of what is free")
    shared.add_argument("--for-seconds", type=float, help="start no measurement after so many seconds")
    shared.add_argument("--base", metavar="REV", help="compare with this commit: attention and model")
    shared.add_argument("--dtype", default="float32", help=", ".join(DTYPES))
    add_device(parser)
    shared.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    shared.add_argument(
        "--keep-memory",
        action="store_true",
        help="for every contender: freed memory stays with the process, as in training (tasks.classification)",
    )


def benchmark() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.benchmark`."""
    lines = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    about = "Time and memory of attention and of models. NAME --help says what an entry measures."
    parser = argparse.ArgumentParser(prog="python -m tasks.benchmark", description=about, **lines)  # type: ignore[arg-type]
    parser.add_argument("--list", action="store_true", help="the entries, as without NAME")
    entries = parser.add_subparsers(dest="name", metavar="NAME", title="entries")
    for name, (line, options, defaults) in ENTRIES.items():
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        entry = entries.add_parser(name, help=line, description=ast.get_docstring(ast.parse(source)), **lines)  # type: ignore[arg-type]
        options(entry)
        add_shared(entry, name)
        entry.set_defaults(**defaults)
    return parser
