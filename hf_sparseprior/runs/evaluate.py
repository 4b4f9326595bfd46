"""Evaluation of a saved model, for every task that trains with transformers' Trainer.

It writes results_SPLIT.json, report_SPLIT.md and its pictures into one folder: RUN/evaluation for RUN/model,
RUN/evaluation/NAME for another model of the run. Those of other data and settings have a name of their own
(hf_sparseprior/runs/measured.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_sparseprior.models.pretrained import check_classes, load_whole_model, weights_sha256
from hf_sparseprior.runs.class_report import ClassReport
from hf_sparseprior.runs.config import Config, apply_overrides
from hf_sparseprior.runs.hf_run import HFTask, Split, fill_cache, measure_of, named_metrics
from hf_sparseprior.runs.label_reports import REPORTS, THRESHOLD, SeveralReport
from hf_sparseprior.runs.labels import CLASSES, PROBLEMS
from hf_sparseprior.runs.measured import drop_limits, own_config, settings, suffix
from hf_sparseprior.runs.processes import check_alone
from hf_sparseprior.runs.results import Results, read_results
from hf_sparseprior.runs.run_folder import RESULTS, check_place, stored_config


def run_config(task: HFTask, model: Path, file: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file, or of the run that saved the model, with overrides of its `data`.

    A run's limits are of its own data, not of other data that the overrides name.
    """
    if file:
        return task.load_config(file, overrides)
    config = {**{section: {} for section in task.sections}, **stored_config(model)}
    apply_overrides(config, overrides, sections=("data",))
    drop_limits(config, model, overrides)
    return task.check_config(config)


def evaluate_model(
    task: HFTask, folder: Path, config: Config, split: str, out: Path, batch_size: int | None = None
) -> dict[str, Any]:
    """Accuracy and confusion matrix of a saved model on a split; writes both and a report of the classes into `out`.

    Returns:
        The content of the results.

    Raises:
        ValueError: for a model of other classes, or in one of several processes. OSError: for missing or damaged files.
    """
    check_alone("evaluate")
    check_place(out, "--out")
    label = label_of(folder, config, split, out)
    model = load_whole_model(folder, task.model_class)
    data = task.read_split(config, split, model, folder)
    check_classes(model, data.classes)
    check_problem(model, data.labels)
    fill_cache(data.dataset)  # what takes long comes after what may be refused
    size = batch_size or task.eval_batch_size
    if task.measure is not None:
        heading = f"{folder.name}, {split}"
        found, details = task.measure(model, data, size, out / f"predictions_{label}.png", heading)
        metrics = {f"{split}_{name}": value for name, value in found.items()}
        results = _results(task, folder, config, split, data, model, metrics, details)
        return results.write(out / f"results_{label}.json")
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_eval_batch_size=size,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=config.get("trainer", {}).get("dataloader_num_workers", 0),
    )
    measure = measure_of(data.labels, data.classes, data.top, data.views)
    trainer = Trainer(model=model, args=arguments, compute_metrics=measure)
    prediction = trainer.predict(data.dataset, metric_key_prefix=split)
    report = REPORTS[data.labels].of_logits(prediction.predictions, prediction.label_ids, data.classes, data.views)
    if isinstance(report, ClassReport):
        metrics = {name: value for name, value in prediction.metrics.items() if name.endswith("accuracy")}
        metrics |= named_metrics(task, split, report.counts, data.classes, report)
    else:
        if isinstance(report, SeveralReport):
            report = replace(report, threshold=chosen_threshold(folder))
        metrics = {f"{split}_{name}": value for name, value in report.metrics().items()}
    details = {**report.details(), "warnings": report.warnings(split)}
    results = _results(task, folder, config, split, data, model, metrics, details)
    shown = getattr(data.dataset, "decoded_image", None)
    report.write(out, f"{folder.name}, {split}: {report.headline()}", f"_{label}", shown)
    return results.write(out / f"results_{label}.json")


def check_problem(model: Any, labels: str) -> None:
    """Refuse labels of another kind than those that a model learned."""
    known = {problem: kind for kind, problem in PROBLEMS.items() if problem is not None}
    learned = known.get(str(getattr(model.config, "problem_type", None)), CLASSES)
    if learned != labels:
        raise ValueError(f"data.labels={labels!r} must be {learned}, which the model learned")


def chosen_threshold(folder: Path) -> float:
    """The threshold that a run chose on validation for its model; `THRESHOLD` of a model without its run."""
    path = folder.parent / RESULTS
    value = read_results(path).get("threshold") if path.is_file() else None
    return float(value) if isinstance(value, (int, float)) else THRESHOLD


def label_of(folder: Path, config: Config, split: str, out: Path) -> str:
    """What the names of an evaluation's files have: the split, and more where it is not the run's own data."""

    def measured(of: Any) -> dict[str, Any]:
        return settings(of, "data")

    own = own_config(folder, out)
    return split + suffix(out, f"results_{split}", config, weights_sha256(folder), measured, own)


def _results(
    task: HFTask,
    folder: Path,
    config: Config,
    split: str,
    data: Split,
    model: Any,
    metrics: dict[str, float],
    details: dict[str, Any],
) -> Results:
    return Results(
        task=task.name,
        metrics=metrics,
        config=config,
        parameters=model.num_parameters(),
        details={
            "model": str(folder),
            "model_sha256": weights_sha256(folder),
            "split": split,
            task.examples: len(data.dataset) // data.views,
            "data": data.description,
            "classes": list(data.classes),
            **details,
            **data.details,
        },
    )
