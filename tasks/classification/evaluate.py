"""Evaluate a saved classifier: python -m tasks.classification.evaluate MODEL [--config FILE] [data.key=value ...]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoImageProcessor, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_sparseprior  # noqa: F401  registers the Auto classes
from hf_sparseprior.pretrained import check_classes, load_whole_model
from tasks.classification.config import check_config, load_config
from tasks.common.config import apply_overrides
from tasks.common.environment import command_line, environment
from tasks.common.images.config import DataConfig
from tasks.common.images.data import ImageDataset, Preparation, load_split
from tasks.common.images.sources import SPLITS
from tasks.common.metrics import compute_metrics, confusion_matrix
from tasks.common.plots import draw_confusion
from tasks.common.results import write_results
from tasks.common.run_folder import stored_config


def evaluate_model(
    model_folder: str | Path, config: dict[str, dict[str, Any]], split: str, out: Path, batch_size: int = 64
) -> dict[str, Any]:
    """Accuracy and confusion matrix of a saved model on a split; writes both into `out`."""
    model = load_whole_model(model_folder)
    processor = AutoImageProcessor.from_pretrained(model_folder)
    data_config = DataConfig(**config["data"])
    data = load_split(data_config, split)
    check_classes(model, data.classes)
    dataset = ImageDataset(data.splits[split], Preparation(processor, model.config.num_channels), data_config.cache)
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_eval_batch_size=batch_size,
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    prediction = Trainer(model=model, args=arguments, compute_metrics=compute_metrics).predict(
        dataset, metric_key_prefix=split
    )
    predicted = np.argmax(prediction.predictions, -1)
    counts = confusion_matrix(prediction.label_ids, predicted, len(data.classes))
    results = {
        "task": "classification",
        "model": str(model_folder),
        "metrics": {f"{split}_accuracy": prediction.metrics[f"{split}_accuracy"]},
        "images": len(dataset),
        "data": data.description,
        "command": command_line(),
        "config": config,
        **environment(),
        "classes": data.classes,
        "confusion": counts.tolist(),
    }
    accuracy = 100 * results["metrics"][f"{split}_accuracy"]
    draw_confusion(counts, data.classes, out / f"confusion_{split}.png", f"{split}: {accuracy:.2f} %")
    write_results(out / f"results_{split}.json", results)
    return results


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.classification.evaluate", description="Evaluate a saved classifier."
    )
    parser.add_argument("model", type=Path, help="folder of a saved model")
    parser.add_argument("--config", help="YAML file with a data section; default: that of the run that trained it")
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder for results and picture; default: MODEL/../evaluation/MODEL")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size} must be 1 or more")
    transformers_logging.disable_progress_bar()
    try:
        config = run_config(arguments.model, arguments.config, arguments.overrides)
        out = arguments.out or arguments.model.resolve().parent / "evaluation" / arguments.model.resolve().name
        results = evaluate_model(arguments.model, config, arguments.split, out, arguments.batch_size)
    except (ValueError, OSError, TypeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted, nothing was written", file=sys.stderr)
        return 130
    for name, value in results["metrics"].items():
        print(f"{name}: {100 * value:.2f} % of {results['images']} images")
    print(f"results: {out}/results_{arguments.split}.json, picture: {out}/confusion_{arguments.split}.png")
    return 0


def run_config(model_folder: Path, file: str | None = None, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The configuration of a YAML file, or of the run that saved the model, with overrides of its `data`."""
    if file:
        return load_config(file, overrides)
    config = stored_config(model_folder)
    apply_overrides(config, overrides, sections=("data",))
    return check_config(config)


if __name__ == "__main__":
    sys.exit(main())
