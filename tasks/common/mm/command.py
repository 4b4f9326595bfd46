"""The command lines of segmentation and detection. `--help` needs no extra; the work needs `dense`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.results import print_warnings
from hf_sparseprior.runs.run_folder import MODEL, RESULTS
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.common.compare import do_comparison
from tasks.common.mm.task import PICTURE, Task
from tasks.common.parsers import mm_compare_parser, mm_evaluate_parser, mm_train_parser


def train_main(name: str, load_task: Callable[[], Task], argv: list[str] | None = None) -> int:
    """`python -m tasks.NAME.train`; a bad value prints one line and returns 2. `load_task` needs the extra `dense`."""
    parser = mm_train_parser(name)
    arguments = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        task = load_task()
        from mmengine.dist import is_main_process

        from tasks.common.mm.config import load_config
        from tasks.common.mm.train import run

        keep_freed_memory()
        config = load_config(name, arguments.config, arguments.overrides)
        results = run(task, config, arguments.overwrite)
        if not is_main_process():
            return
        print_metrics(results["metrics"])
        print_classes(results.get("classes", {}))
        print_metrics({f"constant predictor, {metric}": value for metric, value in results["baseline"].items()})
        print_warnings(results)
        out = Path(config.work_dir)
        print(f"results: {out / RESULTS}, picture: {out / PICTURE}, model: {out / MODEL}")

    return run_command(parser.prog, work, "from the last checkpoint")


def compare_main(name: str, load_task: Callable[[], Task], argv: list[str] | None = None) -> int:
    """`python -m tasks.NAME.compare`, as `train_main`."""
    parser = mm_compare_parser(name)
    arguments = parser.parse_intermixed_args(argv)

    def load(path: str, overrides: Sequence[str]) -> Any:
        task = load_task()
        from tasks.common.mm.compare import load_comparison

        return load_comparison(task, path, overrides)

    return do_comparison(parser.prog, name, arguments, load)


def print_metrics(metrics: Mapping[str, Any]) -> None:
    """One line for each."""
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")


def print_classes(classes: Mapping[str, Mapping[str, float | None]]) -> None:
    """One line for each class."""
    for name, values in classes.items():
        shown = (f"{metric} {'-' if value is None else format(value, '.4f')}" for metric, value in values.items())
        print(f"{name}: {', '.join(shown)}")


def evaluate_main(name: str, load_task: Callable[[], Task], argv: list[str] | None = None) -> int:
    """`python -m tasks.NAME.evaluate`, as `train_main`."""
    parser = mm_evaluate_parser(name)
    arguments = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        task = load_task()
        from tasks.common.mm.evaluate import evaluate

        results = evaluate(task, arguments.model, arguments.split, arguments.overrides, arguments.out, arguments.tta)
        print_metrics(results["metrics"])
        print_classes(results["classes"])

    return run_command(parser.prog, work)
