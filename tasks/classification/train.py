"""Train a SparsePriorViT classifier: python -m tasks.classification.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BitImageProcessorPil, ProgressCallback, ViTImageProcessorPil, set_seed
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.decays import learned_decay_masks
from hf_sparseprior.hub import CARD, file_sha256, image_processor_settings, made_up_keys, model_card, write_text
from hf_sparseprior.training import (
    DrawSampler,
    OneLineProgress,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
)
from tasks.classification.augmentation import Augmentation, AugmentationConfig
from tasks.classification.config import DataConfig, check_config, load_config
from tasks.classification.data import ImageData, ImageDataset, load_data
from tasks.classification.metrics import compute_metrics, confusion_matrix
from tasks.classification.report import (
    command_line,
    draw_confusion,
    draw_history,
    environment,
    write_results,
)
from tasks.classification.run_folder import MODEL, RESULTS, claim, finished_results, last_whole_checkpoint

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
        return _load_pretrained(pretrained, options)
    if preset:
        return SparsePriorViTForImageClassification(SparsePriorViTConfig.from_preset(preset, **options))
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(**options))


def _load_pretrained(folder: str, options: dict[str, Any]) -> SparsePriorViTForImageClassification:
    """A saved model with changed options: only classifier and decay may start anew, positions are interpolated."""
    if not Path(folder).is_dir():
        raise OSError(f"model.pretrained={folder} is not a folder of a saved model")
    model, info = SparsePriorViTForImageClassification.from_pretrained(
        folder, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    fresh = [key for key in made_up_keys(info) if not _may_start_anew(key)]
    positions = "vit.embeddings.position_embeddings"
    if positions in fresh and positions not in info["missing_keys"] and _copy_positions(folder, model):
        fresh.remove(positions)
    if fresh:
        more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
        raise ValueError(
            f"model.pretrained={folder} does not fit this model: {', '.join(fresh[:3])}{more} would start at random"
        )
    return model


def _may_start_anew(key: str) -> bool:
    return "classifier" in key or "decay_bias" in key.split(".")


@torch.no_grad()
def _copy_positions(folder: str, model: SparsePriorViTForImageClassification) -> bool:
    """Interpolate a saved model's position embedding to the model's grid; False if it does not fit otherwise."""
    source = SparsePriorViTForImageClassification.from_pretrained(folder).vit.embeddings
    resized = source.resized_positions(model.config.grid)
    target = model.vit.embeddings.position_embeddings
    if resized.shape != target.shape:
        return False
    target.copy_(resized)
    return True


def make_processor(model_config: SparsePriorViTConfig, eval_crop_ratio: float | None) -> Any:
    """The image processor of evaluation, saved with the model: resize, or resize and cut out the centre."""
    settings = image_processor_settings(model_config)
    if eval_crop_ratio is None:
        return ViTImageProcessorPil(**settings)
    height, width = settings["size"]["height"], settings["size"]["width"]
    if height != width:
        raise ValueError(
            f"augmentation.eval_crop_ratio={eval_crop_ratio} needs a square model.image_size, not {height}x{width}"
        )
    settings.update(image_processor_type="BitImageProcessor", crop_size=settings["size"], do_center_crop=True)
    settings["size"] = {"shortest_edge": round(height / eval_crop_ratio)}
    return BitImageProcessorPil(**settings)


def make_datasets(
    data: ImageData,
    config: DataConfig,
    model_config: SparsePriorViTConfig,
    augmentation: AugmentationConfig | None = None,
    seed: int = 0,
) -> tuple[dict[str, ImageDataset], Any]:
    """The three splits as torch datasets, and the image processor they use; training images augmented by `seed`."""
    if model_config.num_channels not in (1, 3):
        raise ValueError(f"model.num_channels={model_config.num_channels} must be 3 (colour) or 1 (grey) for images")
    augmentation = augmentation or AugmentationConfig()
    processor = make_processor(model_config, augmentation.eval_crop_ratio)
    size = processor.crop_size if augmentation.eval_crop_ratio is not None else processor.size
    augment = None
    if augmentation.changes_images:
        augment = Augmentation(
            augmentation,
            (size["height"], size["width"]),
            model_config.image_mean,
            model_config.image_std,
            model_config.num_channels,
        )
    datasets = {
        split: ImageDataset(
            images, processor, model_config.num_channels, config.cache, augment if split == "train" else None, seed
        )
        for split, images in data.splits.items()
    }
    return datasets, processor


def make_collator(augmentation: AugmentationConfig, num_classes: int, arguments: Any) -> SoftTargetCollator:
    """Makes training batches, with mixing and label smoothing."""
    if augmentation.mixing.enabled and arguments.train_batch_size % 2:
        raise ValueError(
            f"trainer.per_device_train_batch_size={arguments.per_device_train_batch_size} must be even with "
            "augmentation.mixup or cutmix, which mix images in pairs"
        )
    global_batch = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    return SoftTargetCollator(
        num_classes, augmentation.mixing, augmentation.label_smoothing, arguments.seed, global_batch
    )


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
    if finished := finished_results(out, config, overwrite):
        return finished
    # Pinned memory only means something beside an accelerator.
    defaults = {**TRAINER_DEFAULTS, "dataloader_pin_memory": torch.cuda.is_available()}
    arguments = _trainer_errors(SparsePriorTrainingArguments, **{**defaults, **config["trainer"]})
    data_config, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    data = load_data(data_config)
    set_seed(arguments.seed)
    model = build_model(config["model"], data.classes)
    datasets, processor = make_datasets(data, data_config, model.config, augmentation, arguments.seed)
    sampler = DrawSampler(len(datasets["train"]), arguments.seed, augmentation.repeats)
    trainer = _trainer_errors(
        SparsePriorTrainer,
        model=model,
        args=arguments,
        train_dataset=datasets["train"],
        eval_dataset=datasets["validation"],
        processing_class=processor,
        compute_metrics=compute_metrics,
        train_sampler=sampler,
        train_collator=make_collator(augmentation, len(data.classes), arguments),
    )
    for dataset in datasets.values():
        dataset.fill_cache(show_progress=not arguments.disable_tqdm)
    datasets["train"][next(iter(sampler))]
    # Until here nothing was written or thrown away: a bad value leaves the folder as it was.
    claim(out, config)
    if not arguments.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())
    checkpoint = last_whole_checkpoint(out)
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
            # The weights' moving average at the end of training.
            **{key: value for key, value in prediction.metrics.items() if key == "test_ema_accuracy"},
        },
        "data": data.description + _sizes(datasets),
        "prior": model.config.prior_name,
        "prior_settings": model.config.prior,
        "max_decay_change": max_decay_change(model),
        "pruning_ratio": model.config.pruning_ratio,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": arguments.seed,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "seconds_per_step": seconds / max(1, steps_here),
        "data_wait": trainer.data_seconds / max(trainer.train_seconds, 1e-9),
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


def _trainer_errors(make: Any, **options: Any) -> Any:
    """Call transformers with the `trainer` section; its complaints name the section."""
    try:
        return make(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"trainer: {error}") from None


def max_decay_change(model: SparsePriorViTForImageClassification) -> float | None:
    """max |M - 1| over layers, heads and pairs: how far the learned decay is from none; None without a decay."""
    masks = learned_decay_masks(model.vit.layers, model.config)
    return max(((mask - 1).abs().max().item() for mask in masks), default=None)


def _write_outputs(out: Path, results: dict[str, Any], trainer: Any, processor: Any) -> None:
    trainer.model.save_pretrained(out / MODEL)
    # Says which weights the metrics are of.
    results["model_sha256"] = file_sha256(out / MODEL / "model.safetensors")
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
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    out = config["trainer"]["output_dir"]
    for name, value in results["metrics"].items():
        print(f"{name}: {100 * value:.2f} %")
    if results["max_decay_change"] is not None:
        print(f"max |M - 1| of the learned decay: {results['max_decay_change']:.4f}")
    print(f"results: {out}/{RESULTS}, pictures: {out}/curves.png {out}/confusion.png, model: {out}/{MODEL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
