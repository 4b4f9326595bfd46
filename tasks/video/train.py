"""Train a SparsePriorTimesformer on clips: python -m tasks.video.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import ProgressCallback, default_data_collator, set_seed
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorTimesformerConfig, SparsePriorTimesformerForVideoClassification
from hf_sparseprior.files import file_sha256, write_text
from hf_sparseprior.image_processor import PROCESSOR, image_processor_settings
from hf_sparseprior.model_card import CARD, model_card
from hf_sparseprior.pretrained import check_saved_folder
from hf_sparseprior.training import (
    DrawSampler,
    OneLineProgress,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
    StopOnSignal,
)
from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification.inputs import global_batch
from tasks.classification.train import (
    TRAINER_DEFAULTS,
    decay_change,
    trainer_errors,
    validation_metrics,
)
from tasks.common.command import RunStopped, run_command, train_parser
from tasks.common.environment import command_line, environment
from tasks.common.metrics import compute_metrics, confusion_matrix
from tasks.common.plots import draw_confusion, draw_history
from tasks.common.results import read_results, write_results
from tasks.common.run_folder import MODEL, RESULTS, claim_with, finished_results
from tasks.video.config import MODEL_EXTRAS, AugmentationConfig, DataConfig, check_config, load_config
from tasks.video.data import ClipDataset, VideoData, load_data, make_dataset
from tasks.video.pictures import draw_clips

SHOWN = 9  # clips in the picture


def build_model(model: dict[str, Any], classes: Sequence[str]) -> SparsePriorTimesformerForVideoClassification:
    """The model of a configuration's `model` section, from scratch or from an image model's folder."""
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    options["id2label"] = dict(enumerate(classes))
    options["label2id"] = {name: index for index, name in enumerate(classes)}
    if folder := model.get("image_model"):
        check_saved_folder(folder, "model.image_model")
        # `num_labels` says that the image model's classifier is of other classes.
        options["num_labels"] = len(classes)
        return SparsePriorTimesformerForVideoClassification.from_image_model(folder, **options)
    preset = model.get("preset")
    config = SparsePriorTimesformerConfig.from_preset(preset, **options) if preset else None
    return SparsePriorTimesformerForVideoClassification(config or SparsePriorTimesformerConfig(**options))


def make_datasets(
    data: VideoData, config: DataConfig, augmentation: AugmentationConfig, model_config: Any, seed: int
) -> dict[str, ClipDataset]:
    """The splits as torch datasets, training clips augmented by `seed`."""
    return {
        split: make_dataset(videos, config, model_config, augmentation if split == "train" else None, seed)
        for split, videos in data.splits.items()
    }


def run(config: dict[str, dict[str, Any]], command: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Train, choose the best epoch on val, test once, write results, model and pictures.

    Args:
        config: as `load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values, missing files and videos that cannot be decoded.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    check_config(config)
    out = Path(config["trainer"]["output_dir"])
    if finished := finished_results(out, config, overwrite):
        return finished
    defaults = {**TRAINER_DEFAULTS, "dataloader_pin_memory": torch.cuda.is_available()}
    # A copy: transformers writes its own defaults into the dictionaries it is given.
    trainer_section = copy.deepcopy(config["trainer"])
    arguments = trainer_errors(SparsePriorTrainingArguments, **{**defaults, **trainer_section})
    data_config = DataConfig(**config["data"])
    with arguments.main_process_first(desc="reading the data"):
        data = load_data(data_config)
    set_seed(arguments.seed)
    model = build_model(config["model"], data.classes)
    augmentation = AugmentationConfig(**config["augmentation"])
    datasets = make_datasets(data, data_config, augmentation, model.config, arguments.seed)
    for dataset in datasets.values():
        dataset.fill_cache(show_progress=not arguments.disable_tqdm)
    whole_batches = global_batch(arguments) if arguments.dataloader_drop_last else 1
    arguments.dataloader_drop_last = False  # else evaluation would leave clips out too
    sampler = DrawSampler(len(datasets["train"]), arguments.seed, multiple_of=whole_batches)
    datasets["train"][next(iter(sampler))]  # what cannot be prepared shows before anything is written
    trainer = trainer_errors(
        SparsePriorTrainer,
        model=model,
        args=arguments,
        train_dataset=datasets["train"],
        eval_dataset=datasets["val"],
        compute_metrics=compute_metrics,
        train_sampler=sampler,
        data_collator=default_data_collator,
    )
    checkpoint = claim_with(trainer.accelerator, out, config, trainer.checkpoint_files())
    if not arguments.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OneLineProgress())
    stop = StopOnSignal()
    trainer.add_callback(stop)
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped:
        raise RunStopped(f"stopped behind step {trainer.state.global_step}; the same command goes on from there")
    prediction = trainer.predict(datasets["test"], metric_key_prefix="test")
    seconds = trainer.clock.seconds()
    predicted = np.argmax(prediction.predictions, -1)
    counts = confusion_matrix(prediction.label_ids, predicted, len(data.classes))
    results = {
        "task": "video",
        "metrics": {
            "test_accuracy": prediction.metrics["test_accuracy"],
            **validation_metrics(trainer.state, arguments.load_best_model_at_end),
            **factor_accuracies(counts, data.classes),
            **{key: value for key, value in prediction.metrics.items() if key == "test_ema_accuracy"},
        },
        "data": data.description,
        "seed": arguments.seed,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "seconds_per_step": seconds / max(1, trainer.state.global_step),
        "data_wait": trainer.clock.data_seconds / max(seconds, 1e-9),
        # Of this process, data and evaluation included: on a shared machine less than the time that passed.
        "process_cpu_seconds": round(time.process_time(), 1),
        "processes": arguments.world_size,
        "resumed_from": checkpoint and Path(checkpoint).name,
        "command": command or command_line(),
        "config": config,
        **environment(),
        "classes": data.classes,
        "confusion": counts.tolist(),
        "history": trainer.state.log_history,
    }
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # by all processes: each may hold a part
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        _write_outputs(out, results, model, weights, datasets["test"], predicted)
    trainer.accelerator.wait_for_everyone()
    return results if trainer.is_world_process_zero() else read_results(out / RESULTS)


def factor_accuracies(counts: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Accuracy of each part of class names like "left_forward", whatever the other parts; {} for other names.

    Args:
        counts: confusion matrix (true, predicted).
        classes: names.
    """
    parts = [name.split("_") for name in classes]
    values = [sorted({name[place] for name in parts}) for place in range(min(map(len, parts)))]
    if len(set(map(len, parts))) > 1 or len(values) < 2 or np.prod([len(value) for value in values]) != len(classes):
        return {}
    accuracies = {}
    for place, names in enumerate(values):
        same = np.array([[true[place] == guess[place] for guess in parts] for true in parts])
        accuracies[f"test_accuracy_of_{'_'.join(names)}"] = float(counts[same].sum() / counts.sum())
    return accuracies


def about_model(model: SparsePriorTimesformerForVideoClassification) -> dict[str, Any]:
    """What results.json says of a model."""
    return {
        "prior": model.config.prior_name,
        "prior_settings": model.config.prior,
        **decay_change(model),
        "pruning_ratio": model.config.pruning_ratio,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def processor_settings(model_config: Any, short_side: int | None) -> dict[str, Any]:
    """preprocessor_config.json for clips as evaluation prepares them: the short side scaled, the centre cut out."""
    settings = image_processor_settings(model_config)
    crop = {"do_center_crop": True, "crop_size": settings["size"], "resample": 2}
    if short_side is None:
        return {**settings, **crop, "do_resize": False}
    return {**settings, **crop, "size": {"shortest_edge": short_side}}


def _write_outputs(
    out: Path, results: dict[str, Any], model: Any, weights: dict[str, Any], test: ClipDataset, predicted: np.ndarray
) -> None:
    folder = out / MODEL
    folder.mkdir(exist_ok=True)
    settings = processor_settings(model.config, test.config.short_side)
    write_text(folder / PROCESSOR, json.dumps(settings, indent=2) + "\n")
    model.save_pretrained(folder, state_dict=weights)
    results["model_sha256"] = file_sha256(folder / "model.safetensors")
    results.update(about_model(model))
    write_text(folder / CARD, model_card(model.config, results))
    heading = f"{results['prior']}, {model.config.num_frames} frames, seed {results['seed']}"
    draw_history(results["history"], out / "curves.png", heading)
    accuracy = 100 * results["metrics"]["test_accuracy"]
    classes = results["classes"]
    counts = np.array(results["confusion"])
    draw_confusion(counts, classes, out / "confusion.png", f"{heading}: {accuracy:.2f} % on test")
    order = np.random.default_rng(0).permutation(len(test))
    firsts = {int(test.videos.labels[index]): int(index) for index in reversed(order)}  # of the classes in the split
    shown = [firsts[label] for label in sorted(firsts)[:SHOWN]]
    draw_clips(
        [test.frames(index) for index in shown],
        [classes[test.videos.labels[index]] for index in shown],
        [classes[predicted[index]] for index in shown],
        out / "clips.png",
        heading,
    )
    # Last of all: a run counts as finished only when everything else is there.
    write_results(out / RESULTS, results)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = train_parser("video", "Train a SparsePriorTimesformer on clips.", "model.prior=fibottention")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        keep_freed_memory()
        config = load_config(arguments.config, arguments.overrides)
        results = run(config, overwrite=arguments.overwrite)
        if PartialState().is_main_process:
            _print_results(results, config["trainer"]["output_dir"])

    return run_command(parser.prog, work, "from the last checkpoint")


def _print_results(results: dict[str, Any], out: str) -> None:
    for name, value in results["metrics"].items():
        print(f"{name}: {100 * value:.2f} %")
    pictures = " ".join(f"{out}/{name}.png" for name in ("curves", "confusion", "clips"))
    print(f"results: {out}/{RESULTS}, pictures: {pictures}, model: {out}/{MODEL}")


if __name__ == "__main__":
    sys.exit(main())
