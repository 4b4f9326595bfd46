"""What the command lines have in common. Importing this imports nothing but Python's own modules.

The file `commands.py` of a folder has one function for each command in it, with the command's name, that makes the
parser of its arguments. `tasks/__init__.py` asks it before the command's own module is imported, so that `--help` and
wrong arguments are answered at once, without torch.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

TASKS = Path(__file__).parents[1]
IMAGE_SPLITS = ("train", "validation", "test")


def command_parser(command: str, description: str | None = None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser for `python -m tasks.COMMAND`.

    Args:
        command: such as "benchmark.model".
        description: default: the docstring of the command's module, line by line.
        epilog: what stands below the arguments, line by line.
    """
    if description is None:
        source = TASKS.joinpath(*command.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        description = ast.get_docstring(ast.parse(source))
    return argparse.ArgumentParser(
        prog=f"python -m tasks.{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    """--import."""
    text = "Python file that registers a support, a decay ...; imported first, and saved with models"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE", help=text)


def train_parser(
    task: str,
    trains: str,
    example: str = "model.prior=fibottention",
    config: str = "YAML file",
    keys: str = "section.key=value",
    imports: bool = True,
) -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.TASK.train`: `config`, `overwrite` and `overrides`.

    Args:
        task: name of the task's folder, which is also that of the folder of its configurations.
        trains: what is trained.
        example: an override, as an example.
        config: what kind of file a configuration is.
        keys: how overrides are written.
        imports: whether it has --import.
    """
    parser = command_parser(f"{task}.train", f"Train {trains}. Goes on where an interrupted run stopped.")
    parser.add_argument("--config", required=True, help=f"{config}, or FILE#CELL for a cell of its matrix, see configs")
    parser.add_argument("--overwrite", action="store_true", help="replace a run with another configuration")
    if imports:
        add_import(parser)
    parser.add_argument("overrides", nargs="*", metavar=keys, help=f"e.g. {example}")
    return parser


def evaluate_parser(task: str, trains: str, batch_size: int = 64) -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.TASK.evaluate`; `trains` as in `train_parser`."""
    parser = command_parser(f"{task}.evaluate", f"Evaluate {trains} that was saved.")
    parser.add_argument("model", type=Path, help="folder of a saved model or of a run")
    parser.add_argument("--config", help="YAML file with a data section; default: that of the run that trained it")
    add_import(parser)
    parser.add_argument("--split", choices=IMAGE_SPLITS, default="test")
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--out", type=Path, help="folder for results and picture; default: RUN/evaluation")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    return parser


def compare_parser(
    task: str,
    config: str = "YAML file with base, seeds, variants and first",
    keys: str = "section.key=value",
    overrides: str = "for every row; data, augmentation and trainer also for the runs of `first`",
    imports: bool = True,
) -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.TASK.compare`; what it says of a comparison's file, and of overrides and their
    form. imports: as in `train_parser`.
    """
    parser = command_parser(
        f"{task}.compare", "Train a list of variants over seeds. Goes on where it was stopped, and does no run twice."
    )
    parser.add_argument("--config", required=True, help=config)
    parser.add_argument("--out", type=Path, help="folder of the runs; default: outputs/TASK/NAME")
    parser.add_argument("--records", type=Path, help="folder of records.jsonl, table and picture; default: --out")
    if imports:
        add_import(parser)
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these seeds, or others than the file's")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at a time, each a process of one thread; default: one, in this process",
    )
    add_machines(parser)
    parser.add_argument("overrides", nargs="*", metavar=keys, help=overrides)
    return parser


def add_machines(parser: argparse.ArgumentParser) -> None:
    """--shard and --ray."""
    parser.add_argument(
        "--shard",
        metavar="K/N",
        help="do every Nth run from the Kth on first, then what other shards left; for N commands on machines that "
        "share a disk with locks, as of a job array; with --jobs, by default 1",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="do the runs on the machines of a Ray cluster, which share a disk; local: start Ray here",
    )


def _mm_imports(parser: argparse.ArgumentParser, task: str) -> argparse.ArgumentParser:
    """What takes the place of --import where a config is an mm config file."""
    parser.epilog = (
        "A support or decay of yours, say in cross.py in the folder where you are: the config imports it by\n"
        f"custom_imports = dict(imports=['tasks.{task}', 'cross'])."
    )
    return parser


def mm_train_parser(task: str) -> argparse.ArgumentParser:
    """`train_parser` for segmentation and detection."""
    trains, example = f"a model for {task}", "model.backbone.prior=violin"
    return _mm_imports(train_parser(task, trains, example, "mm config file", "key=value", imports=False), task)


def mm_evaluate_parser(task: str) -> argparse.ArgumentParser:
    """Arguments of `evaluate` of segmentation and detection."""
    parser = command_parser(f"{task}.evaluate", f"Evaluate a saved model for {task}.")
    parser.add_argument("model", type=Path, help="folder of a run or of its model, whose config.py is run: trust it")
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--tta", action="store_true", help="several sizes of each image, each mirrored too, merged")
    parser.add_argument("--out", type=Path, help="folder for results and picture; default: RUN/evaluation")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. test_dataloader.dataset.data_root=DIR")
    return _mm_imports(parser, task)


def mm_compare_parser(task: str) -> argparse.ArgumentParser:
    """`compare_parser` for segmentation and detection."""
    file = "mm config file with `cells`, one for each row, and `seeds`"
    overrides = "for every row, e.g. train_cfg.max_iters=100"
    return _mm_imports(compare_parser(task, file, "key=value", overrides, imports=False), task)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device; the default is asked of torch when the arguments are read, not for `--help`."""
    parser.add_argument("--device", type=_device, default="auto", help="default: cuda if there is one, else cpu")


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
