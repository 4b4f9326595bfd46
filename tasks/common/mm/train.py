"""A run of mmengine from a config file to results.json, as segmentation and detection share it.

OUT/run_config.json       what makes the run this one
OUT/iter_N.pth            checkpoints
OUT/TIME/                 mmengine's log
OUT/model/                config.py and model.safetensors of the whole model, what `evaluate` reads,
                          and backbone/, a SparsePriorViT that every other task loads
OUT/predictions.png       truth and predictions side by side
OUT/results.json          written last
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import Runner

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.runs.models import about_model
from hf_sparseprior.runs.results import Results
from hf_sparseprior.runs.run_folder import MODEL, RESULTS, cut_off, finished_results, newest_whole, owned
from tasks.common.mm.config import OUTPUT_DIR, as_json, check_data, check_tested, run_identity
from tasks.common.mm.hooks import LookAtData
from tasks.common.mm.runner import (
    build_runner,
    classes_of,
    errors_in_one_line,
    has_trained,
    join_processes,
    released,
    told_of_learning,
    whole_model,
)
from tasks.common.mm.saving import WEIGHTS, save_model
from tasks.common.mm.task import PICTURE, Task

CHECKPOINTS = ("iter_*.pth", "epoch_*.pth")


def run(
    task: Task, config: Config, overwrite: bool = False, command: str | None = None, hooks: Sequence[Hook] = ()
) -> dict[str, Any]:
    """Train, test once, write model, picture and results. An interrupted run goes on; a finished one is not done again.

    Args:
        task: what is trained.
        config: as `load_config` returns it.
        overwrite: throw away what a run of another configuration left in `config.work_dir`.
        command: for results.json.
        hooks: more hooks of the training.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and files.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    out, identity = Path(config.work_dir), run_identity(config)
    if finished := finished_results(out, identity, overwrite, OUTPUT_DIR, needed=("metrics", "baseline")):
        return finished
    check_data(config)
    check_tested(config)
    join_processes(config)
    newest = partial(newest_whole, out, CHECKPOINTS, cut_off)
    with owned(out, identity, newest, overwrite, OUTPUT_DIR) as checkpoint:
        return _train(task, config, checkpoint, command, hooks)


def _train(
    task: Task, config: Config, checkpoint: str | None, command: str | None, hooks: Sequence[Hook]
) -> dict[str, Any]:
    """`run` in a folder that is this run's."""
    out, started = Path(config.work_dir), copy.deepcopy(config)
    if checkpoint:
        started.load_from, started.resume = checkpoint, True
    runner = build_runner(started)
    # Before training, because it finds out what is wrong with test data and evaluator.
    with errors_in_one_line():
        baseline = task.baseline(config)
    for hook in (LookAtData(task.look), *hooks):
        runner.register_hook(hook)
    # Errors of parts that do not fit each other come before the first step is done.
    with released(runner), errors_in_one_line(lambda: not has_trained(runner)):
        runner.train()
    results = results_of(task, config, runner, baseline)
    results.resumed_from, results.command = checkpoint and Path(checkpoint).name, command or results.command
    if not is_main_process():
        return results.content()
    save_model(out / MODEL, config, whole_model(runner), runner.test_dataloader.dataset.metainfo)
    results.details["model_sha256"] = file_sha256(out / MODEL / WEIGHTS)
    task.draw({"prediction": whole_model(runner)}, runner.test_dataloader.dataset, out / PICTURE)
    return results.write(out / RESULTS)


def results_of(task: Task, config: Config, runner: Runner, baseline: dict[str, Any]) -> Results:
    """Test a trained model and return its results. `baseline`: those of the best constant predictor."""
    seconds, waiting = training_seconds(runner)
    parameters = list(runner.model.parameters())
    backbone = about_model(whole_model(runner).backbone)
    del backbone["parameters"]  # those of the whole model are recorded
    return Results(
        task=task.name,
        metrics=task.metrics("test", runner.test()),
        config=as_json(config.to_dict()),
        seed=runner.seed,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        steps=runner.iter,
        seconds=round(seconds, 2),
        seconds_per_step=seconds / max(runner.iter, 1),
        processes=get_world_size(),
        history=loss_history(runner),
        details={
            "baseline": baseline,
            "classes": classes_of(runner),
            **backbone,
            "data": describe_data(runner),
            "data_wait": waiting / max(seconds, 1e-9),
            "warnings": told_of_learning(runner),
        },
    )


def describe_data(runner: Runner) -> str:
    """What was trained on and tested on, in one line."""
    train, test = runner.train_dataloader.dataset, runner.test_dataloader.dataset
    images = f"{len(train)} images of {len(train.metainfo['classes'])} classes, tests on {len(test)}"
    return f"{getattr(train, 'data_root', None) or type(train).__name__}: trains on {images}"


def training_seconds(runner: Runner) -> tuple[float, float]:
    """Seconds of training, including those before an interruption, and how many of these waited for data."""
    scalars = runner.message_hub.log_scalars
    seconds, waiting = (
        float(scalars[name].data[0].sum()) if name in scalars else 0.0 for name in ("train/time", "train/data_time")
    )
    return seconds, waiting


def loss_history(runner: Runner, points: int = 200) -> list[dict[str, Any]]:
    """Training loss at the end of up to `points` equal stretches of steps, averaged over each."""
    history = runner.message_hub.log_scalars.get("train/loss")
    losses = np.empty(0) if history is None else history.data[0]
    length = max(1, -(-len(losses) // points))
    stretches = [losses[start : start + length] for start in range(0, len(losses), length)]
    ends = [min(start + length, len(losses)) for start in range(0, len(losses), length)]
    return [{"step": end, "loss": float(stretch.mean())} for end, stretch in zip(ends, stretches, strict=True)]
