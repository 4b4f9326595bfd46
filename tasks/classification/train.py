"""Train a SparsePriorViT classifier: python -m tasks.classification.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ProgressCallback, TrainingArguments, ViTImageProcessorPil, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.hub import CARD, image_processor_settings, model_card, write_text
from hf_sparseprior.training import OneLineProgress, SparsePriorTrainer
from tasks.classification.config import DataConfig, check_config, load_config
from tasks.classification.data import ImageData, ImageDataset, load_data
from tasks.classification.metrics import compute_metrics, confusion_matrix
from tasks.classification.report import (
    command_line,
    draw_confusion,
    draw_history,
    environment,
    read_results,
    write_results,
)

RUN_CONFIG = "run_config.json"
RESULTS = "results.json"
MODEL = "model"

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
}


def build_model(model: dict[str, Any], classes: list[str]) -> SparsePriorViTForImageClassification:
    """The model of a configuration's `model` section, from scratch or from a saved folder."""
    options = dict(model)
    preset, pretrained = options.pop("preset", None), options.pop("pretrained", None)
    if preset and pretrained:
        raise ValueError(f"model.preset={preset!r} and model.pretrained={pretrained!r} exclude each other")
    options["id2label"] = dict(enumerate(classes))
    options["label2id"] = {name: index for index, name in enumerate(classes)}
    if pretrained:
        # Another number of classes gives a fresh classifier; transformers prints what it made anew.
        return SparsePriorViTForImageClassification.from_pretrained(pretrained, ignore_mismatched_sizes=True, **options)
    if preset:
        return SparsePriorViTForImageClassification(SparsePriorViTConfig.from_preset(preset, **options))
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(**options))


def make_datasets(
    data: ImageData, config: DataConfig, model_config: SparsePriorViTConfig
) -> tuple[dict[str, ImageDataset], Any]:
    """The three splits as torch datasets, and the image processor they use."""
    processor = ViTImageProcessorPil(**image_processor_settings(model_config))
    datasets = {
        split: ImageDataset(images, processor, model_config.num_channels, config.cache)
        for split, images in data.splits.items()
    }
    return datasets, processor


def run(config: dict[str, dict[str, Any]], command: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Train, choose the best epoch on validation, test once, write results, model and pictures.

    Args:
        config: as `load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.

    Returns:
        The content of results.json.
    """
    check_config(config)
    out = Path(config["trainer"].get("output_dir") or "")
    if out == Path(""):
        raise ValueError("trainer.output_dir is missing; give a folder for this run")
    if finished := _claim_folder(out, config, overwrite):
        return finished
    # Pinned memory only means something beside an accelerator.
    defaults = {**TRAINER_DEFAULTS, "dataloader_pin_memory": torch.cuda.is_available()}
    arguments = TrainingArguments(**{**defaults, **config["trainer"]})
    data_config = DataConfig(**config["data"])
    data = load_data(data_config)
    set_seed(arguments.seed)
    model = build_model(config["model"], data.classes)
    datasets, processor = make_datasets(data, data_config, model.config)
    _write_run_config(out, config)
    trainer = SparsePriorTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets["train"],
        eval_dataset=datasets["validation"],
        processing_class=processor,
        compute_metrics=compute_metrics,
    )
    if not arguments.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())
    checkpoint = get_last_checkpoint(str(out))
    if checkpoint:
        print(f"going on from {checkpoint}", file=sys.stderr)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - start
    prediction = trainer.predict(datasets["test"], metric_key_prefix="test")
    steps_here = trainer.state.global_step - (int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0)
    predicted = np.argmax(prediction.predictions, -1)
    counts = confusion_matrix(prediction.label_ids, predicted, len(data.classes))
    results = {
        "task": "classification",
        "metrics": {
            "test_accuracy": prediction.metrics["test_accuracy"],
            "validation_accuracy": trainer.state.best_metric,
        },
        "data": data.description + _sizes(datasets),
        "prior": model.config.prior_name,
        "pruning_ratio": model.config.pruning_ratio,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": arguments.seed,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "seconds_per_step": seconds / max(1, steps_here),
        "resumed_from": checkpoint and Path(checkpoint).name,
        "command": command or command_line(),
        "config": config,
        **environment(),
        "classes": data.classes,
        "confusion": counts.tolist(),
        "history": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        _write_outputs(out, results, trainer, processor)
    return results


def _sizes(datasets: dict[str, ImageDataset]) -> str:
    return " (" + ", ".join(f"{len(dataset)} {split}" for split, dataset in datasets.items()) + ")"


def _claim_folder(out: Path, config: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The results of this very run if it is done already; an error if another run has the folder."""
    stored = out / RUN_CONFIG
    if not stored.exists():
        if out.exists() and any(out.iterdir()) and not overwrite:
            raise ValueError(f"trainer.output_dir={out} is not empty and not of this program; choose another folder")
        return None
    earlier = json.loads(stored.read_text(encoding="utf-8"))
    differences = [
        f"{section}.{key}: {earlier.get(section, {}).get(key)!r} there, {config[section].get(key)!r} here"
        for section in config
        for key in sorted({*config[section], *earlier.get(section, {})})
        if config[section].get(key) != earlier.get(section, {}).get(key)
    ]
    if differences and not overwrite:
        raise ValueError(
            f"trainer.output_dir={out} belongs to another run ({'; '.join(differences)}); "
            "choose another folder or give --overwrite"
        )
    if differences:
        shutil.rmtree(out)
        return None
    return read_results(out / RESULTS) if (out / RESULTS).exists() else None


def _write_run_config(out: Path, config: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RUN_CONFIG, json.dumps(config, indent=1) + "\n")


def _write_outputs(out: Path, results: dict[str, Any], trainer: Any, processor: Any) -> None:
    trainer.model.save_pretrained(out / MODEL)
    processor.save_pretrained(out / MODEL)
    write_text(out / MODEL / CARD, model_card(trainer.model.config, results))
    heading = f"{results['prior']}, seed {results['seed']}"
    draw_history(results["history"], out / "curves.png", heading)
    accuracy = 100 * results["metrics"]["test_accuracy"]
    draw_confusion(
        np.array(results["confusion"]),
        results["classes"],
        out / "confusion.png",
        f"{heading}: {accuracy:.2f} % on test",
    )
    # Last of all: a run counts as finished only when everything else is there.
    write_results(out / RESULTS, results)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.classification.train",
        description="Train a SparsePriorViT classifier. Goes on where an interrupted run stopped.",
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/classification")
    parser.add_argument("--overwrite", action="store_true", help="replace a run with another configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. model.prior=violin")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()  # bars for reading and writing weights; the training bar stays
    try:
        config = load_config(arguments.config, arguments.overrides)
        config["trainer"].setdefault("output_dir", f"outputs/{Path(arguments.config).stem}")
        results = run(config, overwrite=arguments.overwrite)
    except (ValueError, OSError, TypeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    out = config["trainer"]["output_dir"]
    for name, value in results["metrics"].items():
        print(f"{name}: {100 * value:.2f} %")
    print(f"results: {out}/{RESULTS}, pictures: {out}/curves.png {out}/confusion.png, model: {out}/{MODEL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
