"""Label maps of training images: python -m tasks.classification.label_maps TEACHER --config FILE --out DIR

TEACHER is the folder of a saved classifier with the classes of the data. It sees every training image as a whole, and a
map holds the most probable classes of each of its patches. The command can be killed at any moment and started again;
then it goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from tqdm.auto import tqdm
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.token_label_config import TokenLabelConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, load_data
from hf_sparseprior.images.processor import make_processor
from hf_sparseprior.images.sources import ImageData, Images, drop_corrupt
from hf_sparseprior.models.pretrained import check_saved_folder, load_whole_model, saved_family
from hf_sparseprior.training import LabelMaps, MapHeader, write_label_maps
from hf_sparseprior.training.token_labels import (
    IMAGES_PER_FILE,
    check_teacher,
    fingerprint,
    patch_probabilities,
    top_classes,
)


def images_fingerprint(images: Images) -> str:
    """A fingerprint by which maps show whether they are of these images."""
    return fingerprint(images.labels, map(images.name, range(len(images))))


def check_token_classifier(config: Any, section: TokenLabelConfig) -> None:
    """Raise ValueError unless the model has a token classifier exactly if there are maps to train it."""
    trained = getattr(config, "token_classifier", None)  # None: a family that has none
    if section.path and trained is None:
        raise ValueError(f"token_labels.path={section.path} is for a token classifier, which this model cannot have")
    if section.path and not trained:
        raise ValueError(f"token_labels.path={section.path} needs model.token_classifier=true")
    if trained and not section.path:
        raise ValueError(
            "the model has a token_classifier, which would stay untrained and yet count in evaluation: give "
            "token_labels.path, or set model.token_classifier=false"
        )


def open_label_maps(section: TokenLabelConfig, data: Any, arguments: Any) -> LabelMaps | None:
    """The maps of a run's training images, checked; a teacher makes those that are missing.

    Raises:
        ValueError: for maps of other images or classes. OSError: for damaged, cut off and missing files.
    """
    if not section.path:
        return None
    images = data.splits["train"]
    if section.teacher:
        make_label_maps(
            section.teacher,
            data,
            Path(section.path),
            batch_size=arguments.eval_batch_size,
            workers=arguments.dataloader_num_workers,
            show_progress=not arguments.disable_tqdm,
        )
    maps = LabelMaps(section.path)
    maps.check(len(images), data.classes, images_fingerprint(images))
    maps.verify()
    return maps


def make_label_maps(
    teacher: str | Path,
    data: ImageData,
    out: Path,
    top_k: int = 5,  # as published
    batch_size: int = 64,
    workers: int = 0,
    show_progress: bool = True,
    images_per_file: int = IMAGES_PER_FILE,
) -> MapHeader:
    """Write the maps of a data set's training images. Maps that exist already stay.

    Raises:
        ValueError: for a teacher with other classes or one that says nothing about single patches, and for a folder
            that holds something else. OSError: for a teacher that cannot be read.
    """
    check_saved_folder(teacher)
    model = load_whole_model(teacher, saved_family(teacher).image_classifier)
    check_teacher(model.config)
    names = [model.config.id2label[index] for index in range(model.config.num_labels)]
    if names != data.classes:
        raise ValueError(f"{teacher}: the teacher's classes {names} are not those of the data, {data.classes}")
    if not 1 <= top_k <= len(names):
        raise ValueError(f"--top-k {top_k} must be between 1 and the {len(names)} classes")
    images = data.splits["train"]
    header = MapHeader(
        images=len(images),
        classes=names,
        grid=list(model.config.output_grid),
        top_k=top_k,
        teacher=file_sha256(Path(teacher) / SAFE_WEIGHTS_NAME),
        data=images_fingerprint(images),
        images_per_file=images_per_file,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.eval().to(device)
    # This processor cuts nothing off, because a map is of the whole image.
    dataset = ImageDataset(images, Preparation(make_processor(model.config), model.config.num_channels), cache=False)
    with tqdm(total=len(images), desc="label maps", unit=" images", disable=not show_progress) as bar:

        @torch.inference_mode()
        def maps_of(indices: range) -> tuple[Tensor, Tensor]:
            parts = []
            for batch in DataLoader(Subset(dataset, indices), batch_size, num_workers=workers):
                probabilities = patch_probabilities(model, batch["pixel_values"].to(device))
                parts.append(top_classes(probabilities.unflatten(1, model.config.output_grid), top_k))
                bar.update(len(probabilities))
            classes, scores = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
            return classes, scores

        write_label_maps(out, header, maps_of, bar)
    return header


def training_images(config_file: str, overrides: Sequence[str], workers: int = 0) -> ImageData:
    """The training images that a configuration's data section names, without those that cannot be read.

    Raises:
        ValueError: for a stream, and as reading the data does.
    """
    config = DataConfig(**load_config(config_file, overrides)["data"])
    if config.streaming:
        raise ValueError("label maps need images in any order, not a stream; set data.streaming=false")
    data = load_data(config)
    data.splits = {"train": data.splits["train"]}
    drop_corrupt(data, config, workers, show_progress=True)
    return data
