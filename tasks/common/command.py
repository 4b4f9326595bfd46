"""The commands `train` and `evaluate` of every task that trains with transformers' Trainer."""

from __future__ import annotations

from accelerate import PartialState
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.own_files import import_files
from hf_sparseprior.models.pretrained import check_saved_folder
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.evaluate import evaluate_model, label_of, run_config
from hf_sparseprior.runs.hf_run import HFTask, run
from hf_sparseprior.runs.printed import print_results
from hf_sparseprior.runs.results import metric_text, print_warnings
from hf_sparseprior.runs.run_folder import evaluation_folder, model_folder
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.common.parsers import evaluate_parser, train_parser


def train_main(task: HFTask, argv: list[str] | None = None) -> int:
    """`python -m tasks.TASK.train`; a bad value prints one line and returns 2."""
    parser = train_parser(task.name, task.trains)
    arguments = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()  # bars for reading and writing weights; the training bar stays

    def work() -> None:
        keep_freed_memory()
        import_files(arguments.imports)
        config = task.load_config(arguments.config, arguments.overrides)
        results = run(task, config, overwrite=arguments.overwrite)
        if PartialState().is_main_process:
            print_results(results, config["trainer"]["output_dir"])

    return run_command(parser.prog, work, "from the last checkpoint")


def evaluate_main(task: HFTask, argv: list[str] | None = None) -> int:
    """`python -m tasks.TASK.evaluate`; a bad value prints one line and returns 2."""
    parser = evaluate_parser(task.name, task.trains, task.eval_batch_size)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size} must be 1 or more")
    transformers_logging.disable_progress_bar()

    def work() -> None:
        import_files(arguments.imports)
        folder = model_folder(arguments.model, CONFIG_NAME)
        check_saved_folder(folder)
        config = run_config(task, folder, arguments.config, arguments.overrides)
        out, split = arguments.out or evaluation_folder(folder), arguments.split
        results = evaluate_model(task, folder, config, split, out, arguments.batch_size)
        for name, value in results["metrics"].items():
            print(f"{name}: {metric_text(name, value)} of {results[task.examples]} {task.examples}")
        print_warnings(results)
        label = label_of(folder, config, split, out)
        names = [
            "results_{}.json",
            *(["report_{}.md", "confusion_{}.png"] if task.measure is None else ["predictions_{}.png"]),
        ]
        print("results: " + " ".join(f"{out}/{name.format(label)}" for name in names))

    return run_command(parser.prog, work)
