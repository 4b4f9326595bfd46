"""`trainer.minutes`: how many steps a run can do in a time, measured on this machine before its first step.

The time counts from there to the end of the test, evaluations and checkpoints included; reading data and model, and the
pictures at the end, come on top. The learning rate follows the steps, so that its schedule is whole. Measured once a
run: one that was interrupted goes on with the same number of steps (OUT/plan.json).
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.utils.data import IterableDataset, Subset
from transformers import PrinterCallback, TrainerCallback, set_seed

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import read_json_object

PLAN = "plan.json"
TRIAL_SHARE, TRIAL_SECONDS = 0.05, 20.0  # of the time, and at most
FEWEST_STEPS, MOST_STEPS = 4, 40  # of the trial; the first two are slower and do not count
MOST_EVALUATIONS = 20  # of small data, which would spend its time on them


@dataclass(frozen=True)
class Plan:
    """What fits into a time.

    minutes: the time. steps: of training. eval_steps: steps from one evaluation to the next; None: one an epoch.
    seconds_per_step, seconds_per_evaluation, seconds_of_test: as measured; an evaluation with its checkpoint.
    """

    minutes: float
    steps: int
    eval_steps: int | None
    seconds_per_step: float
    seconds_per_evaluation: float
    seconds_of_test: float

    def line(self) -> str:
        """For the terminal."""
        every = "each epoch" if self.eval_steps is None else f"every {self.eval_steps} steps"
        return (
            f"{self.steps} steps in {self.minutes:g} minutes: {self.seconds_per_step:.3g} s a step, evaluation {every} "
            f"in {self.seconds_per_evaluation:.3g} s"
        )


class _Stopwatch(TrainerCallback):
    """When steps end; stops after enough of them."""

    def __init__(self, seconds: float) -> None:
        self.limit, self.ends = seconds, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())
        long = self.ends[-1] - self.ends[0] >= self.limit and len(self.ends) > FEWEST_STEPS
        control.should_training_stop = control.should_training_stop or long

    def seconds(self) -> float:
        """Of a step."""
        spans = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        return statistics.median(spans[1:] or spans)


def follow_plan(trainer: Any, minutes: float, out: Path, make_trial: Callable[[str], Any]) -> None:
    """Give a Trainer the number of steps that fit, and print it; called by every process of a run.

    Args:
        trainer: of the run, before `train`.
        minutes: the time.
        out: the run's folder.
        make_trial: (a folder) -> a Trainer of a copy of the run's model with the run's data, which does MOST_STEPS
            steps and saves and evaluates nothing.

    Raises:
        ValueError: for a time in which not a single step can be done, and for a stream.
    """
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ValueError(
            f"trainer.minutes={minutes:g} needs examples in any order, not a stream; set trainer.max_steps instead"
        )
    plan = None
    if trainer.is_world_process_zero() and (out / PLAN).is_file():
        plan = Plan(**read_json_object(out / PLAN))
    plan = broadcast_object_list([plan])[0]
    if plan is None:
        plan = broadcast_object_list([_measured(trainer, minutes, make_trial)])[0]
        set_seed(trainer.args.seed)  # the trial drew random numbers, more of them on a faster machine
        if trainer.is_world_process_zero():
            write_text(out / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
    trainer.args.max_steps = plan.steps
    if plan.eval_steps is not None:
        trainer.args.eval_strategy = trainer.args.save_strategy = trainer.args.logging_strategy = "steps"
        trainer.args.eval_steps = trainer.args.save_steps = trainer.args.logging_steps = plan.eval_steps
    if trainer.is_world_process_zero():
        print(plan.line(), flush=True)


def _measured(trainer: Any, minutes: float, make_trial: Callable[[str], Any]) -> Plan:
    """Train a copy of the model for a moment."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trial, step = _trial_steps(trainer, min(TRIAL_SECONDS, TRIAL_SHARE * 60 * minutes), partial(make_trial, folder))
        judged = trainer.args.eval_strategy != "no"
        validation, test = (_seconds_of(trial, data) for data in (trainer.eval_dataset, trial.eval_dataset))
        saved = time.perf_counter()
        trial.save_model(folder)
        saving = 3 * (time.perf_counter() - saved) if trainer.args.save_strategy != "no" else 0.0  # two moments, too
    evaluation = (validation if judged else 0.0) + saving
    left = 60 * minutes - (time.perf_counter() - began) - test
    interval, every = _steps_between_evaluations(trainer), None
    steps = int(left / (step + evaluation / interval))
    if trainer.args.eval_strategy == trainer.args.save_strategy == "epoch" and steps > MOST_EVALUATIONS * interval:
        steps = int((left - MOST_EVALUATIONS * evaluation) / step)
        every = math.ceil(steps / MOST_EVALUATIONS)
    elif steps < interval:  # one evaluation, at the end
        steps = int((left - evaluation) / step)
    if steps < 1:
        least = math.ceil((60 * minutes - left + evaluation + step) / 6) / 10
        raise ValueError(f"trainer.minutes={minutes:g} is too short for a step and the test; give {least:g} or more")
    return Plan(minutes, steps, every, step, evaluation, test)


def _trial_steps(trainer: Any, seconds: float, make_trial: Callable[[], Any]) -> tuple[Any, float]:
    """A Trainer that has trained for a moment, and the mean seconds of a step: of each size that images have in turn
    with `progressive_sizes`, which have equally many steps.
    """
    sizes = [None] if trainer.progressive is None else trainer.progressive.sizes
    measured: dict[Any, float] = {}
    for size in dict.fromkeys(sizes):  # the last one is that of evaluation, which the caller measures
        trial = make_trial()
        trial.compute_metrics = None  # of some images they mean nothing
        trial.remove_callback(PrinterCallback)
        if size is not None:
            trial.progressive.sizes = [size]
        watch = _Stopwatch(seconds / len(set(sizes)))
        trial.add_callback(watch)
        trial.train()
        measured[size] = watch.seconds()
    return trial, statistics.mean(measured[size] for size in sizes)


def _steps_between_evaluations(trainer: Any) -> int:
    """Of an epoch, unless `trainer.eval_steps` says otherwise."""
    args = trainer.args
    if args.eval_strategy == "steps" and args.eval_steps >= 1:
        return int(args.eval_steps)
    return max(1, math.ceil(len(trainer.train_dataset) / global_batch(args)))


def global_batch(arguments: Any) -> int:
    """Examples in a step, over all processes and accumulation."""
    return arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps


def _seconds_of(trial: Any, data: Any) -> float:
    """Of an evaluation on all of a data set, from one and from four batches of it: its start, and what each takes."""
    batch = trial.args.eval_batch_size * trial.args.world_size
    sizes = sorted({min(len(data), batch), min(len(data), 4 * batch)})
    seconds = []
    for size in sizes:
        start = time.perf_counter()
        trial.evaluate(Subset(data, range(size)))
        seconds.append(time.perf_counter() - start)
    if len(sizes) == 1:
        return seconds[0]
    each = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return seconds[0] + each * (len(data) - sizes[0])


def copied(prepared: Any) -> Any:
    """What a trial takes of what a run prepared: a copy of its model and order, no callbacks."""
    data = {**prepared.datasets, "validation": prepared.datasets["test"]}
    fields = {**vars(prepared), "datasets": data, "callbacks": ()}
    fields |= {name: copy.deepcopy(getattr(prepared, name)) for name in ("model", "train_sampler")}
    fields["trainer_options"] = {**prepared.trainer_options, "also_saved": {}}
    return type(prepared)(**fields)
