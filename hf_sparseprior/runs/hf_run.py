"""A run of transformers' Trainer from a configuration to results.json, for every task that trains with it.

OUT/run_config.json            what makes the run this one
OUT/checkpoint-N/              what an interrupted run goes on from
OUT/plan.json                  with `trainer.minutes`: the steps that fit into them (hf_sparseprior/runs/minutes.py)
OUT/model/                     model, image processor and card; model_ema/: with the moving average of the weights;
                               adapter/: what LoRA or DoRA learned, alone
OUT/curves.png, confusion.png  and more pictures of the task
OUT/report.md, errors.png      of a classifier: precision and recall of each class, calibration, the worst errors
OUT/tracking/                  what trackers wrote, if the configuration names some (hf_sparseprior/runs/tracking.py)
OUT/results.json               written last (hf_sparseprior/runs/results.py)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ProgressCallback, TrainerCallback, default_data_collator, get_scheduler

from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import file_sha256, sync, write_text
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.runs.class_report import ClassReport
from hf_sparseprior.runs.command import RunStopped, tell_data
from hf_sparseprior.runs.config import FINAL, LENGTHS, Config, load_sections
from hf_sparseprior.runs.label_reports import REPORTS, Report, SeveralReport, validation_measure
from hf_sparseprior.runs.labels import CLASSES, METRICS, NUMBERS, SEVERAL
from hf_sparseprior.runs.metrics import compute_metrics, confusion_matrix, pack_correct, what_was_not_learned
from hf_sparseprior.runs.minutes import MOST_STEPS, copied, follow_plan, global_batch
from hf_sparseprior.runs.models import about_model, merged, save_adapter, trainable_parameters
from hf_sparseprior.runs.plots import draw_confusion, draw_history
from hf_sparseprior.runs.processes import check_joined, join_on_cpu
from hf_sparseprior.runs.results import (
    Results,
    read_results,
    trainer_history,
    validation_name,
)
from hf_sparseprior.runs.run_folder import (
    ADAPTER,
    AVERAGE,
    MODEL,
    RESULTS,
    default_output_dir,
    finished_results,
    last_whole_checkpoint,
    owned,
)
from hf_sparseprior.runs.tracking import check_installed, tracked, trackers
from hf_sparseprior.saving.card import CARD, model_card
from hf_sparseprior.training import (
    DrawSampler,
    OneLineProgress,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    StopOnSignal,
)

# What a run does unless its configuration says otherwise.
TRAINER_DEFAULTS: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "report_to": "none",
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
}


# What chooses the best epoch on validation, by what an example has.
BEST: dict[str, dict[str, Any]] = {
    CLASSES: {},
    SEVERAL: {"metric_for_best_model": METRICS[SEVERAL]},
    NUMBERS: {"metric_for_best_model": METRICS[NUMBERS], "greater_is_better": False},
}


@dataclass
class Prepared:
    """What a task hands to the Trainer.

    model: the model to train. classes: names in the order of the labels. labels: what an example has, one of the
        classes, "several" of them, or "numbers" (`label_reports.REPORTS`).
    datasets: train, validation and test, for `torch.utils.data.DataLoader`. One that prepares its examples once has
        `fill_cache(show_progress)`, which is called before the first step.
    description: describes the data, for results.json.
    split_names: what the data itself calls a split, or where it comes from, where that is something else.
    save_processor: writes the image processor of evaluation into a folder.
    train_sampler: order of the training examples; None for streams.
    train_collator, eval_collator: make batches; None: the Trainer's own.
    trainer_class: what trains the model. trainer_options: more arguments of it.
    finish: what is done to the model after its last step, before the test.
    kept: what is saved of the trained model, a part of it or a smaller one; the whole by default.
    test: (the Trainer after training) -> what the test found; None: how many examples the classifier gets right.
    callbacks: more callbacks of the Trainer.
    test_views: rows in a row of the test dataset that are views of one example, whose scores are averaged.
    top: numbers k for which top-k accuracies are measured.
    details: called after the test; returns what results.json says in addition to what every task records.
    """

    model: Any
    classes: Sequence[str]
    datasets: Mapping[str, Any]
    description: str
    save_processor: Callable[[Path], Any]
    labels: str = CLASSES
    split_names: Mapping[str, str] = field(default_factory=dict)
    train_sampler: DrawSampler | None = None
    train_collator: Any = None
    eval_collator: Any = default_data_collator
    trainer_class: type[SparsePriorTrainer] = SparsePriorTrainer
    trainer_options: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Any], None] = lambda model: None
    kept: Callable[[Any], Any] = lambda model: model
    test: Callable[[Any], Tested] | None = None
    callbacks: Sequence[TrainerCallback] = ()
    test_views: int = 1
    top: Sequence[int] = ()
    details: Callable[[], dict[str, Any]] = dict


@dataclass
class Tested:
    """What a test found: metrics by their names in results.json, and the labels and predicted classes of its examples,
    both (examples,) int64. Where an example has no single class, labels are None, and the task draws `predicted`.
    report: of a model whose examples have labels.
    """

    metrics: dict[str, float]
    labels: np.ndarray | None
    predicted: Any
    report: Report | None = None


@dataclass
class Split:
    """What a saved model is evaluated on: dataset, classes in the order of the labels, description of the data, views
    of each example as in `Prepared.test_views`, top and labels as there.
    """

    dataset: Any
    classes: Sequence[str]
    description: str
    views: int = 1
    top: Sequence[int] = ()
    details: dict[str, Any] = field(default_factory=dict)
    labels: str = CLASSES


def run_card(model: Any, results: dict[str, Any]) -> str | None:
    """The card of a model of ours; a model of transformers has its own."""
    return None if family_of(model.config) is None else model_card(model.config, results)


def _nothing(*arguments: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HFTask:
    """A task whose models the Trainer trains: what train, evaluate and compare need of it, in one object.

    name: name of the task's folder and of the folder of its configurations.
    module: name of the module that defines it.
    trains: what is trained, for `--help`. examples: what its data consists of, for results.json and output.
    sections: sections of a configuration. check_config: refuses unknown keys and bad values in all of them.
    model_class: Auto class that loads a saved model.
    prepare: (configuration, the Trainer's arguments) -> data and model of a run; the run's folder does not exist yet.
    read_split: (configuration, name of the split, model, its folder) -> the split as a saved model takes it, its cache
        not filled yet.
    extra_metrics: (confusion matrix (true, predicted), classes) -> more metrics, named without the split.
    about_model: what results.json says about a saved model.
    trainer_defaults: what a `trainer` section of this task says unless it says otherwise, over TRAINER_DEFAULTS.
    metric: the one that the confusion matrix is of. also: others that comparisons judge.
    draw_history: draws curves.png from history, path and heading.
    draw: (the run's folder, what was prepared, predicted classes, heading) -> names of more pictures of the test, which
        it draws into the folder.
    eval_batch_size: batch size of `evaluate`.
    measure: (model, split, batch size, picture, heading) -> metrics named without the split, and details of what
        `evaluate` finds, where an example has no single class; it draws predictions into the picture's file.
    card: (a saved model, its results) -> its model card; None leaves the one that saving wrote.
    models_read: folders of the saved models that a run of a configuration reads.
    before: (configuration) -> configuration of a run of this task that a run starts from, done first; None: there is
        none.
    check_start: refuses a `model` section that does not fit the saved model it starts from.
    start_sha256: SHA-256 of the weights that a `model` section starts from, None for a start from scratch.
    """

    name: str
    module: str
    trains: str
    examples: str
    sections: tuple[str, ...]
    check_config: Callable[[Config], Config]
    model_class: Any
    prepare: Callable[[Config, Any], Prepared]
    read_split: Callable[[Config, str, Any, Path], Split]
    extra_metrics: Callable[[np.ndarray, Sequence[str]], dict[str, float]] = _nothing
    about_model: Callable[[Any], dict[str, Any]] = about_model
    trainer_defaults: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "test_accuracy"
    also: Sequence[str] = ()
    draw_history: Callable[[Sequence[dict[str, Any]], Path, str], Any] = draw_history
    draw: Callable[[Path, Prepared, Any, str], Sequence[str]] = lambda *arguments: ()
    eval_batch_size: int = 64
    measure: Callable[[Any, Split, int, Path, str], tuple[dict[str, float], dict[str, Any]]] | None = None
    card: Callable[[Any, dict[str, Any]], str | None] = run_card
    models_read: Callable[[Config], Sequence[str]] = lambda config: ()
    before: Callable[[Config], Config | None] = lambda config: None
    check_start: Callable[[dict[str, Any]], None] = lambda model: None
    start_sha256: Callable[[dict[str, Any]], str | None] = lambda model: None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the name of its module, for other processes."""
        return task_in, (self.module,)

    def load_config(self, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """A configuration file with overrides, checked. If it names no output folder, the run lies in
        outputs/TASK/FILE.

        Raises:
            ValueError: for unknown keys (the message has the nearest known one), bad values, or text that is not YAML.
            OSError: for a missing file.
        """
        config = load_sections(path, overrides, self.sections, self.check_config)
        config["trainer"].setdefault("output_dir", default_output_dir(self.name, path))
        return config

    def data_sha256(self, config: Config) -> str | None:
        """SHA-256 of what `data.path` holds, where comparisons check it; None: they do not."""
        return None

    def run(
        self, config: Config, command: str | None = None, callbacks: Sequence[TrainerCallback] = ()
    ) -> dict[str, Any]:
        """`run` of a configuration of this task."""
        return run(self, config, command=command, callbacks=callbacks)


def task_in(module: str) -> HFTask:
    """The task that a module defines, of this name."""
    return next(value for value in vars(import_module(module)).values() if isinstance(value, HFTask))


def run(
    task: HFTask,
    config: Config,
    command: str | None = None,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train, choose the best epoch on validation, test once, write results, model and pictures.

    An interrupted run goes on from its last checkpoint; a finished one is not done again.

    Args:
        task: what is trained.
        config: as `task.load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.
        callbacks: more callbacks of the Trainer.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and missing files, before anything is written.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    task.check_config(config)
    if not (folder := config["trainer"].get("output_dir")):
        raise ValueError("trainer.output_dir is missing; give a folder for this run")
    out = Path(folder)
    if finished := finished_results(out, config, overwrite, needed=("metrics", "parameters", "data_wait")):
        return finished
    if config["data"].get("stage") == FINAL and (patience := config["trainer"].get("early_stopping")) is not None:
        raise ValueError(
            f"trainer.early_stopping={patience!r} needs a validation split, and data.stage=final has its validation "
            f"{task.examples} among its training {task.examples}"
        )
    check_installed(trackers_named := trackers(config["trainer"].get("report_to")))
    labels = config["data"].get("labels", CLASSES)
    arguments = trainer_arguments(config["trainer"], {**task.trainer_defaults, **BEST[labels]})
    if config["data"].get("stage") == FINAL and arguments.load_best_model_at_end:
        raise ValueError(
            f"data.stage=final has its validation {task.examples} among its training {task.examples} and cannot choose "
            "the best epoch; set trainer.load_best_model_at_end=false"
        )
    if (before := task.before(config)) is not None:
        run(task, before, command, overwrite, callbacks)
    prepared = task.prepare(config, arguments)
    trained = trainable_parameters(prepared.model)  # counted here, because peft freezes what it reads back
    trainer = make_trainer(prepared, arguments)
    for callback in (*prepared.callbacks, *callbacks):
        trainer.add_callback(callback)
    # Nothing was written or thrown away up to here, so a bad value leaves the folder as it was.
    newest = partial(last_whole_checkpoint, out, trainer.checkpoint_files())
    with (
        owned(out, config, newest, overwrite) as checkpoint,
        tracked(trainer, trackers_named, out, config) as tracking,
    ):
        if trainer.is_world_process_zero():
            tell_splits(task, prepared, judged=arguments.eval_strategy != "no")
        if (minutes := config["trainer"].get("minutes")) is not None:
            follow_plan(trainer, minutes, out, partial(make_trial, task, config, prepared))
        train(trainer, checkpoint)
        results, tested = judge(task, config, prepared, trainer)
        results.trainable_parameters, results.command = trained, command or results.command
        results.resumed_from = checkpoint and Path(checkpoint).name
        save(task, out, trainer, prepared, results)
        if trainer.is_world_process_zero():
            draw(task, out, prepared, results, tested)
            tracking.finish(results)
            # This comes last: a run counts as finished only when everything else exists.
            results.write(out / RESULTS)
        trainer.accelerator.wait_for_everyone()
        return read_results(out / RESULTS)


def tell_splits(task: HFTask, prepared: Prepared, judged: bool) -> None:
    """Print what is trained on and what is tested on, and what validates the model unless it is not `judged`."""
    parts = {"trains": "train", **({"validates": "validation"} if judged else {}), "tests": "test"}
    splits = {
        does: (
            _size(prepared.datasets[split], prepared.test_views if split == "test" else 1),
            prepared.split_names.get(split, split),
        )
        for does, split in parts.items()
    }
    tell_data(task.examples, splits, prepared.classes, prepared.labels)


def _size(dataset: Any, views: int) -> int | None:
    try:
        return len(dataset) // views
    except TypeError:  # a stream that does not say it
        return None


def judge(task: HFTask, config: Config, prepared: Prepared, trainer: SparsePriorTrainer) -> tuple[Results, Tested]:
    """Test a trained model. Returns its results, without what only its files hold, and what the test found."""
    arguments = trainer.args
    prepared.finish(trainer.accelerator.unwrap_model(trainer.model))
    test = test_classifier if prepared.labels == CLASSES else test_labels
    tested = prepared.test(trainer) if prepared.test else test(prepared, trainer)
    seconds, steps = trainer.clock.seconds(), trainer.state.global_step
    named, counted = count_classes(task, tested, prepared.classes)
    messages = trainer.learning.messages if trainer.learning is not None else []
    counted["warnings"] = [*messages, *counted.get("warnings", [])]
    results = Results(
        task=task.name,
        metrics={
            **tested.metrics,
            **validation_metrics(trainer.state, arguments.load_best_model_at_end, METRICS[prepared.labels]),
            **named,
        },
        config=config,
        seed=arguments.seed,
        steps=steps,
        seconds=round(seconds, 2),
        seconds_per_step=seconds / max(1, steps),
        processes=arguments.world_size,
        details={
            "data": prepared.description,
            "data_wait": trainer.clock.data_seconds / max(seconds, 1e-9),
            # CPU time of this process, data and evaluation included. On a shared machine it is less than the time that
            # passed.
            "process_cpu_seconds": round(time.process_time(), 1),
            "classes": list(prepared.classes),
            "best_epoch": best_epoch(trainer.state, arguments),
            **counted,
            **prepared.details(),
        },
        history=trainer_history(trainer.state.log_history),
    )
    return results, tested


def count_classes(task: HFTask, tested: Tested, classes: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and details that follow from the class of each example, or from what else its labels are."""
    if tested.labels is None:
        other = tested.report
        return {}, {} if other is None else {**other.details(), "warnings": other.warnings("test")}
    counts = confusion_matrix(tested.labels, tested.predicted, len(classes))
    right = pack_correct(tested.labels, tested.predicted)
    details = {
        "confusion": counts.tolist(),
        "test_correct": right,
        "warnings": what_was_not_learned(counts, classes, "test"),
    }
    report = tested.report if isinstance(tested.report, ClassReport) else None
    return named_metrics(task, "test", counts, classes, report), details


def test_classifier(prepared: Prepared, trainer: SparsePriorTrainer) -> Tested:
    """How many test examples a classifier gets right, and its moving average at the end of training, if it has one."""
    validation = trainer.compute_metrics
    trainer.compute_metrics = partial(compute_metrics, views=prepared.test_views, top=prepared.top)
    try:
        prediction = trainer.predict(prepared.datasets["test"], metric_key_prefix="test")
    finally:
        trainer.compute_metrics = validation
    metrics = {name: value for name, value in prediction.metrics.items() if name.endswith("accuracy")}
    logits, labels = prediction.predictions, prediction.label_ids
    report = ClassReport.of_logits(logits, labels, prepared.classes, prepared.test_views)
    return Tested(metrics, report.labels, report.predicted, report)


def test_labels(prepared: Prepared, trainer: SparsePriorTrainer) -> Tested:
    """How well several labels or numbers are found on the test examples, also by the moving average if there is one."""
    kind = REPORTS[prepared.labels]
    prediction = trainer.predict(prepared.datasets["test"], metric_key_prefix="test")
    report = kind.of_logits(prediction.predictions, prediction.label_ids, prepared.classes)
    if isinstance(report, SeveralReport):
        judged = trainer.predict(prepared.datasets["validation"], metric_key_prefix="validation")
        chosen = SeveralReport.of_logits(judged.predictions, judged.label_ids, prepared.classes)
        report = replace(report, threshold=chosen.best_threshold())
    own = report.metrics()
    averaged = {f"test_ema_{name}": prediction.metrics.get(f"test_ema_{name}") for name in own}
    measured = {f"test_{name}": value for name, value in own.items()}
    return Tested(
        {**measured, **{name: value for name, value in averaged.items() if value is not None}}, None, None, report
    )


def trainer_arguments(
    section: dict[str, Any], task_defaults: Mapping[str, Any] | None = None
) -> SparsePriorTrainingArguments:
    """The arguments of a `trainer` section over a task's defaults and TRAINER_DEFAULTS."""
    # Pinned memory only means something next to an accelerator.
    defaults = {**TRAINER_DEFAULTS, "dataloader_pin_memory": torch.cuda.is_available(), "use_cpu": join_on_cpu()}
    # A copy: transformers writes its own defaults into the dictionaries it is given.
    given = {**defaults, **(task_defaults or {}), **copy.deepcopy(section)}
    given["report_to"] = "none"  # transformers' trackers log some steps twice in a resumed run
    if given.pop("minutes", None) is not None:  # no argument of the Trainer: `minutes.follow_plan` makes steps of it
        given = {key: value for key, value in given.items() if key not in LENGTHS}
    arguments = _trainer_errors(SparsePriorTrainingArguments, **given)
    check_joined()
    return arguments


def _trainer_errors(make: Any, **options: Any) -> Any:
    """Call transformers with the `trainer` section, so that its errors name the section."""
    try:
        return make(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"trainer: {error}") from None


def check_schedule(arguments: Any) -> None:
    """Raise for a schedule of learning rates that cannot be made, which the Trainer finds out when training begins."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(10),
        num_training_steps=10,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


def make_trial(task: HFTask, config: Config, prepared: Prepared, folder: str) -> SparsePriorTrainer:
    """The Trainer of `minutes.follow_plan`."""
    section = {key: value for key, value in config["trainer"].items() if key not in (*LENGTHS, "minutes")}
    section |= {"output_dir": folder, "max_steps": MOST_STEPS, "disable_tqdm": True}
    section |= {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"}
    section |= {"load_best_model_at_end": False, "early_stopping": None}
    return make_trainer(copied(prepared), trainer_arguments(section, task.trainer_defaults))


def draw_sampler(size: int, arguments: Any, repeats: int = 1, labels: np.ndarray | None = None) -> DrawSampler:
    """The order of `size` training examples, with `labels` as many of each class. The sampler does what
    `trainer.dataloader_drop_last` asks for.

    The Trainer would leave out the last, smaller batch of evaluation too, and with it examples from the metrics.
    """
    whole_batches = global_batch(arguments) if arguments.dataloader_drop_last else 1
    arguments.dataloader_drop_last = False
    return DrawSampler(size, arguments.seed, repeats, whole_batches, labels)


def make_collator(
    augmentation: Any,
    num_classes: int,
    arguments: Any,
    grid: tuple[int, int] | None = None,
    class_weights: torch.Tensor | None = None,
) -> SoftTargetCollator:
    """The collator of training batches: mixing, label smoothing and, on the model's patch grid, token targets.

    Args:
        augmentation: has `mixing`, a `Mixing`, and `label_smoothing`.
        num_classes: number of classes.
        arguments: the Trainer's.
        grid: (height, width) of the model's patches.
        class_weights: (num_classes,) float32, factors of an example's loss by its class.
    """
    if augmentation.mixing.enabled and arguments.train_batch_size % 2:
        raise ValueError(
            f"trainer.per_device_train_batch_size={arguments.per_device_train_batch_size} must be even with "
            "augmentation.mixup, cutmix or mixtoken, which mix examples in pairs"
        )
    # With repeated augmentation each process draws its own, as in DeiT, where repetitions go to several processes.
    repeated = getattr(augmentation, "repeats", 1) > 1
    images = arguments.train_batch_size if repeated else global_batch(arguments)
    return SoftTargetCollator(
        num_classes, augmentation.mixing, augmentation.label_smoothing, arguments.seed, images, grid, class_weights
    )


def fill_cache(dataset: Any, show_progress: bool = False) -> None:
    """Let a dataset prepare its examples now, if it prepares them once."""
    if hasattr(dataset, "fill_cache"):
        dataset.fill_cache(show_progress=show_progress)


def measure_of(
    labels: str, classes: Sequence[str], top: Sequence[int] = (), views: int = 1
) -> Callable[[Any], dict[str, float]]:
    """What transformers' Trainer measures of examples that have such labels."""
    if labels == CLASSES:
        return partial(compute_metrics, views=views, top=top)
    return validation_measure(labels, classes)


def make_trainer(prepared: Prepared, arguments: SparsePriorTrainingArguments) -> SparsePriorTrainer:
    """The Trainer of a run. One example of training and of the test is prepared first, so that what cannot be prepared
    shows before the start.
    """
    if prepared.train_sampler is not None:
        for dataset in prepared.datasets.values():
            fill_cache(dataset, show_progress=not arguments.disable_tqdm)
        prepared.datasets["train"][next(iter(prepared.train_sampler))]
        prepared.datasets["test"][0]
    _trainer_errors(check_schedule, arguments=arguments)
    trainer = _trainer_errors(
        prepared.trainer_class,
        model=prepared.model,
        args=arguments,
        train_dataset=prepared.datasets["train"],
        eval_dataset=prepared.datasets["validation"],
        compute_metrics=measure_of(prepared.labels, prepared.classes, prepared.top),
        train_sampler=prepared.train_sampler,
        train_collator=prepared.train_collator,
        data_collator=prepared.eval_collator,
        **prepared.trainer_options,
    )
    if not arguments.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())
    return trainer


def train(trainer: SparsePriorTrainer, checkpoint: str | None) -> None:
    """Train all steps that are left. Raises RunStopped on SIGTERM, after a checkpoint was saved."""
    stop = StopOnSignal()
    trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped:
        raise RunStopped(f"stopped after step {trainer.state.global_step}; the same command goes on from there")


def validation_metrics(state: Any, best: bool, metric: str = "accuracy") -> dict[str, float]:
    """{"validation_accuracy": of the best epoch's weights or else the last step's}; {} if these were not judged."""
    step = state.best_global_step if best else state.global_step
    judged = [entry for entry in state.log_history if f"eval_{metric}" in entry and entry["step"] == step]
    return {f"validation_{metric}": judged[-1][f"eval_{metric}"]} if judged else {}


def best_epoch(state: Any, arguments: Any) -> dict[str, Any] | None:
    """The epoch whose weights are those of the model, chosen on validation; None if nothing was chosen.

    {"epoch": ..., "step": ..., "epochs": of how many, "metric": "validation_accuracy", "value": ...,
    "stopped_epoch": where `early_stopping` ended training, or null}
    """
    if not arguments.load_best_model_at_end or state.best_model_checkpoint is None:
        return None
    epochs = {entry["step"]: entry["epoch"] for entry in state.log_history}
    stopped = arguments.early_stopping is not None and state.global_step < state.max_steps
    return {
        "epoch": epochs[state.best_global_step],
        "step": state.best_global_step,
        "epochs": state.num_train_epochs if arguments.max_steps > 0 else arguments.num_train_epochs,
        "metric": validation_name("eval_" + arguments.metric_for_best_model.removeprefix("eval_")),
        "value": state.best_metric,
        "stopped_epoch": state.epoch if stopped else None,
    }


def named_metrics(
    task: HFTask, split: str, counts: np.ndarray, classes: Sequence[str], report: ClassReport | None
) -> dict[str, float]:
    """The report's metrics and the task's extra ones of a split by their names in results.json."""
    found = {**({} if report is None else report.metrics()), **task.extra_metrics(counts, classes)}
    return {f"{split}_{name}": value for name, value in found.items()}


def save(task: HFTask, out: Path, trainer: SparsePriorTrainer, prepared: Prepared, results: Results) -> None:
    """Write the model, the moving average's model and the adapter. What is known about them goes into `results`."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # by all processes: each may hold a part
    # A compiled model's names start with this.
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    if not trainer.is_world_process_zero():
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    write_model = partial(_write_model, task, prepared, model)
    if trainer.weight_average is not None:
        with trainer.weight_average.swapped_in():
            averaged = "test_ema_"
            metrics = {
                name.replace(averaged, "test_"): value
                for name, value in results.metrics.items()
                if name.startswith(averaged)
            }
            write_model(out / AVERAGE, None, {**results.content(), "metrics": metrics})
    about = write_model(out / MODEL, weights, results.content())
    results.parameters = about.pop("parameters")
    results.details |= about | {"adapter_bytes": save_adapter(out / ADAPTER, model)}
    for name in (MODEL, AVERAGE, ADAPTER):
        if (out / name).exists():
            sync(out / name)  # before the results that say that it is there


def _write_model(
    task: HFTask,
    prepared: Prepared,
    model: Any,
    folder: Path,
    weights: dict[str, Any] | None,
    results: dict[str, Any],
) -> dict[str, Any]:
    """Write model, image processor and card. Returns what results.json says about the model."""
    whole = merged(prepared.kept(model))
    whole.save_pretrained(folder, state_dict=weights if whole is model else None)
    # This says which weights the metrics belong to.
    about = {"model_sha256": file_sha256(folder / "model.safetensors")}
    about |= task.about_model(load_whole_model(folder, task.model_class))
    prepared.save_processor(folder)
    if (card := task.card(whole, results)) is not None:
        write_text(folder / CARD, card)
    return about


def draw(task: HFTask, out: Path, prepared: Prepared, results: Results, tested: Tested) -> None:
    """Curves, the report of the classes, confusion matrix and the task's own pictures."""
    heading = f"{results.details['prior']}, seed {results.seed}"
    task.draw_history(results.history, out / "curves.png", heading)
    pictures = ["curves.png"]
    if tested.report is not None:
        image = getattr(prepared.datasets["test"], "decoded_image", None)
        pictures += tested.report.write(out, f"{heading}: {tested.report.headline()} on test", image=image)
    elif "confusion" in results.details:
        title = f"{heading}: {100 * results.metrics[task.metric]:.2f} % on test"
        draw_confusion(np.array(results.details["confusion"]), prepared.classes, out / "confusion.png", title)
        pictures.append("confusion.png")
    results.details["pictures"] = [*pictures, *task.draw(out, prepared, tested.predicted, heading)]
