"""What video adds to a run of the Trainer: clips, a SparsePriorTimesformer, and pictures of clips."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForVideoClassification, set_seed

from hf_sparseprior import SparsePriorTimesformerConfig, SparsePriorTimesformerForVideoClassification
from hf_sparseprior.base.files import write_text
from hf_sparseprior.images.model import from_scratch
from hf_sparseprior.models.pretrained import check_classes, check_saved_folder
from hf_sparseprior.runs.config import Config
from hf_sparseprior.runs.hf_run import HFTask, Prepared, Split, draw_sampler, make_collator
from hf_sparseprior.runs.models import alike_across_priors
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings
from tasks.video.commands import EVAL_BATCH_SIZE, TRAINS
from tasks.video.config import MODEL_EXTRAS, SECTIONS, AugmentationConfig, DataConfig, check_config
from tasks.video.data import check_test_shape, cuts_of, load_data, make_dataset, make_test_dataset
from tasks.video.motion import CLASSES, PLAYS
from tasks.video.pictures import draw_clips
from tasks.video.scan import drop_corrupt

SHOWN = 9  # clips in the picture
TOP = (5,)  # top-5 accuracy, where there are more classes


def build_model(model: dict[str, Any], classes: Sequence[str]) -> SparsePriorTimesformerForVideoClassification:
    """The model of a configuration's `model` section, from scratch or from an image model's folder."""
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    options["id2label"] = dict(enumerate(classes))
    options["label2id"] = {name: index for index, name in enumerate(classes)}
    if folder := model.get("image_model"):
        check_saved_folder(folder, "model.image_model")
        # `num_labels` says that the image model's classifier has other classes.
        options["num_labels"] = len(classes)
        return alike_across_priors(
            lambda changes: SparsePriorTimesformerForVideoClassification.from_image_model(folder, **options | changes),
            lambda model: model.config.prior_name == "dense",
        )
    preset = model.get("preset")
    make_config = partial(SparsePriorTimesformerConfig.from_preset, preset) if preset else SparsePriorTimesformerConfig
    return from_scratch(SparsePriorTimesformerForVideoClassification, make_config, options)


def prepare(config: Config, arguments: Any) -> Prepared:
    """Clips and model of a run."""
    data_config, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    with arguments.main_process_first(desc="reading the data"):
        data = load_data(data_config)
    set_seed(arguments.seed)
    model = build_model(config["model"], data.classes)
    if model.config.num_channels != 3:
        raise ValueError(f"model.num_channels={model.config.num_channels} must be 3, the channels of a frame")
    check_test_shape(model, data_config)
    train_collator = make_collator(augmentation, len(data.classes), arguments)
    # What takes long comes after what may be refused, and draws nothing from the generators of the model.
    with torch.random.fork_rng(devices=[]), arguments.main_process_first(desc="looking for damaged videos"):
        corrupt = drop_corrupt(
            data,
            data_config,
            arguments.dataloader_num_workers,
            not arguments.disable_tqdm,
            cuts_of(data_config, model.config),
        )
    datasets = {
        "train": make_dataset(data.splits["train"], data_config, model.config, augmentation, arguments.seed),
        "validation": make_dataset(data.splits["validation"], data_config, model.config),
        "test": make_test_dataset(data.splits["test"], data_config, model.config),
    }
    return Prepared(
        model=model,
        classes=data.classes,
        datasets=datasets,
        description=data.description,
        split_names=data.origins,
        save_processor=lambda folder: save_processor(folder, model.config, data_config.short_side),
        train_sampler=draw_sampler(len(datasets["train"]), arguments),
        train_collator=train_collator,
        test_views=data_config.test_views,
        top=TOP,
        details=lambda: {"corrupt_videos": corrupt},
    )


def read_split(config: Config, split: str, model: Any, folder: Path) -> Split:
    """A split as the model takes it."""
    data_config = DataConfig(**config["data"])
    data = load_data(data_config)
    check_classes(model, data.classes)  # what takes long comes after what may be refused
    check_test_shape(model, data_config)
    part = replace(data, splits={split: data.splits[split]})
    cuts = {split: cuts_of(data_config, model.config)["test"]}  # each split is looked at as a test does
    workers = config["trainer"].get("dataloader_num_workers", 0)
    corrupt = drop_corrupt(part, data_config, workers, show_progress=True, cuts=cuts)
    data.splits |= part.splits
    dataset = make_test_dataset(data.splits[split], data_config, model.config)
    return Split(dataset, data.classes, data.description, data_config.test_views, TOP, {"corrupt_videos": corrupt})


def factor_accuracies(counts: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Accuracy of each part of class names like "left_forward", whatever the other parts are; {} for other names.

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
        accuracies[f"accuracy_of_{'_'.join(names)}"] = float(counts[same].sum() / counts.sum())
    return accuracies


def direction_accuracy(counts: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Of motion clips that play, forward or backward, and are said to play: the share whose direction is right, with
    chance at 0.5; {} for other classes, and where no clip is said to play.

    Args:
        counts: confusion matrix (true, predicted).
        classes: names.
    """
    if set(classes) != set(CLASSES):
        return {}
    played = np.array([PLAYS[name.partition("_")[2]] for name in classes])
    both = counts[np.ix_(played != 0, played != 0)]
    right = played[played != 0][:, None] == played[played != 0]
    return {"direction_accuracy": float(both[right].sum() / both.sum())} if both.sum() else {}


def extra_metrics(counts: np.ndarray, classes: Sequence[str]) -> dict[str, float]:
    """Mean of the accuracies of the classes that occur, with which Toyota Smarthome is measured, `factor_accuracies`
    and `direction_accuracy`.
    """
    occur = counts.sum(1) > 0
    mean = float((counts.diagonal()[occur] / counts.sum(1)[occur]).mean()) if occur.any() else 0.0
    return {"mean_class_accuracy": mean, **factor_accuracies(counts, classes), **direction_accuracy(counts, classes)}


def processor_settings(model_config: Any, short_side: int | None) -> dict[str, Any]:
    """preprocessor_config.json for clips as evaluation prepares them: short side scaled, centre cut out."""
    settings = image_processor_settings(model_config)
    crop = {"do_center_crop": True, "crop_size": settings["size"], "resample": 2}
    if short_side is None:
        return {**settings, **crop, "do_resize": False}
    return {**settings, **crop, "size": {"shortest_edge": short_side}}


def save_processor(folder: Path, model_config: Any, short_side: int | None) -> None:
    """Write preprocessor_config.json."""
    write_text(folder / PROCESSOR, json.dumps(processor_settings(model_config, short_side), indent=2) + "\n")


def draw_test_clips(out: Path, prepared: Prepared, predicted: np.ndarray, heading: str) -> list[str]:
    """clips.png: a test clip of each class, with what it is and what the model says."""
    test, classes = prepared.datasets["test"], prepared.classes
    order = np.random.default_rng(0).permutation(len(test.videos.paths))
    firsts = {int(test.videos.labels[index]): int(index) for index in reversed(order)}  # of the classes in the split
    shown = [firsts[label] for label in sorted(firsts)[:SHOWN]]
    draw_clips(
        [test.frames(index) for index in shown],
        [classes[test.videos.labels[index]] for index in shown],
        [classes[predicted[index]] for index in shown],
        out / "clips.png",
        heading,
    )
    return ["clips.png"]


VIDEO = HFTask(
    name="video",
    module=__name__,
    trains=TRAINS,
    examples="clips",
    sections=SECTIONS,
    check_config=check_config,
    model_class=AutoModelForVideoClassification,
    prepare=prepare,
    read_split=read_split,
    extra_metrics=extra_metrics,
    draw=draw_test_clips,
    eval_batch_size=EVAL_BATCH_SIZE,
    models_read=lambda config: [folder for folder in [config["model"].get("image_model")] if folder],
)
