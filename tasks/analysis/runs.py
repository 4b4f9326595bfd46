"""What the commands on saved models share: the models, the images they are shown, and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForImageClassification
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, IMAGE_PROCESSOR_NAME

from hf_sparseprior.adapters.saved_adapter import load_adapter
from hf_sparseprior.analysis.layers import AttentionLayers, find_attention
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import ImageDataset, Preparation, as_trained, load_data
from hf_sparseprior.images.sections import load_data_section
from hf_sparseprior.images.sources import balanced_subset, drop_corrupt
from hf_sparseprior.models.pretrained import hub_hint, load_whole_model
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.run_folder import MODEL, RUN_CONFIG
from hf_sparseprior.saving.processor import takes_clips
from hf_sparseprior.saving.saved_config import check_saved_config
from hf_sparseprior.saving.saved_processor import load_image_processor


@dataclass
class SavedModel:
    """A model that a command works on.

    name: short, and different from those of the other models of the command. folder: the model's own. attention: its
    attention layers.
    """

    name: str
    folder: Path
    model: Any
    attention: AttentionLayers

    @cached_property
    def processor(self) -> Any:
        """The image processor, read when the first image is prepared."""
        return load_processor(self.folder)

    def about(self) -> dict[str, Any]:
        """What a results file says about it."""
        return {"name": self.name, "model": str(self.folder), "prior": self.attention.prior_name}


def model_folder(path: Path) -> Path:
    """The folder of a saved model or adapter: that of a run, or the one that is given.

    Raises:
        OSError: if there is none.
    """
    for folder in (path / MODEL, path):
        if any((folder / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            return folder
    if (path / RUN_CONFIG).is_file():
        raise OSError(f"{path} is a run that is not finished, it has no {MODEL}")
    raise OSError(f"{path} is neither the folder of a run nor of a saved model or adapter{hub_hint(path)}")


def model_names(folders: Sequence[Path], given: Sequence[str] | None = None) -> list[str]:
    """The given names or, without any, the part of each path that tells it from the others.

    Raises:
        ValueError: if there are not as many names as folders, or if two are the same.
    """
    paths = [folder.resolve().parts for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a model is given twice: {', '.join(map(str, folders))}")
    if given:
        if len(given) != len(folders) or len(set(given)) < len(given):
            raise ValueError(f"--names {' '.join(given)} must be {len(folders)} different names, one for each model")
        return list(given)
    if len(paths) == 1:
        return ["/".join(part for part in paths[0][-2:] if part != MODEL)]
    for end in (0, -1):
        # A folder and one inside it must each keep a name.
        while min(map(len, paths)) > 1 and len({path[end] for path in paths}) == 1:
            paths = [path[:-1] if end else path[1:] for path in paths]
    return ["/".join(path) for path in paths]


def open_models(arguments: argparse.Namespace) -> Iterator[SavedModel]:
    """The models of a command line, one after the other, so that only one is in memory."""
    folders = [model_folder(path) for path in arguments.models]
    names = model_names(folders, arguments.names)
    for name, folder in zip(names, folders, strict=True):
        model = load_model(folder).eval().to(arguments.device)
        yield SavedModel(name, folder, model, find_attention(model))


def load_model(folder: Path) -> Any:
    """A saved model, ours or a stock transformers one, or an adapter of peft on the model that it was made for."""
    if (folder / CONFIG_NAME).is_file():
        config = check_saved_config(folder)
        classifies = any("ImageClassification" in name for name in config.get("architectures") or [])
        ours = config.get("model_type") in FAMILIES
        # transformers' own attention returns weights only with its eager implementation.
        options = {} if ours else {"attn_implementation": "eager"}
        return load_whole_model(folder, AutoModelForImageClassification if classifies else AutoModel, **options)
    return _with_adapter(folder, load_model)


def load_classifier(folder: Path) -> Any:
    """A saved classifier with the attention that runs fastest, or an adapter of peft on the one it was made for."""
    return load_whole_model(folder) if (folder / CONFIG_NAME).is_file() else _with_adapter(folder, load_classifier)


def _with_adapter(folder: Path, load: Callable[[Path], Any]) -> Any:
    return load_adapter(load(base_folder(folder)), folder)


def base_folder(adapter: Path) -> Path:
    """The folder of the model that an adapter was made for.

    Raises:
        OSError: if it is not here.
    """
    base = read_json_object(adapter / ADAPTER_CONFIG_NAME).get("base_model_name_or_path") or ""
    if not (Path(base) / CONFIG_NAME).is_file():
        raise OSError(
            f"{adapter} is an adapter of the model {base!r}, which is no folder of a saved model here{hub_hint(base)}"
        )
    return Path(base)


def load_processor(folder: Path) -> Any:
    """The image processor of a saved model, or that of the model that an adapter was made for.

    Raises:
        OSError: if there is none. ValueError: for a bad one, and for one that gives patches in place of images.
    """
    if not (folder / IMAGE_PROCESSOR_NAME).is_file() and (folder / ADAPTER_CONFIG_NAME).is_file():
        folder = base_folder(folder)
    if not (folder / IMAGE_PROCESSOR_NAME).is_file():
        raise OSError(f"{folder} has no image processor, {IMAGE_PROCESSOR_NAME} is missing")
    processor = load_image_processor(folder)
    if hasattr(processor, "max_num_patches"):
        raise ValueError(
            f"{folder / IMAGE_PROCESSOR_NAME} is of images of several sizes (max_num_patches), and analyses take "
            "images of one size, whose processor model.save_pretrained writes"
        )
    return processor


def preparation(saved: SavedModel, **options: Any) -> Preparation:
    """What becomes of an image before the model sees it; `options` of the image processor."""
    return Preparation(partial(saved.processor, **options), num_channels(saved.model))


def num_channels(model: Any) -> int:
    """Channels of the images that a model takes; configs of CLIP and SigLIP name them for their vision tower alone."""
    config = getattr(model.config, "vision_config", model.config)
    return getattr(config, "num_channels", 3)


def shown_image(saved: SavedModel, pixel_values: Tensor) -> np.ndarray:
    """An image as the model sees it, cut and scaled, in colours again: (height, width, 3), 0 to 1."""
    mean, std = (np.broadcast_to(value, len(pixel_values)) for value in normalisation(saved.processor))
    pixels = pixel_values.cpu().numpy().transpose(1, 2, 0) * std + mean
    return np.clip(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), 0, 1)


def normalisation(processor: Any) -> tuple[Any, Any]:
    """Mean and standard deviation by which a processor normalises."""
    return (processor.image_mean, processor.image_std) if getattr(processor, "do_normalize", False) else (0.0, 1.0)


def check_takes_images(saved: SavedModel) -> None:
    """Raise ValueError for a model of clips."""
    if takes_clips(saved.model.config):
        raise ValueError(
            f"{saved.folder} is a model of clips, and this is measured on single images; of the analyses "
            "tasks.analysis.frames and tasks.analysis.decay take it"
        )


def open_images(saved: SavedModel, arguments: argparse.Namespace) -> tuple[ImageDataset, str]:
    """The images that `add_data_arguments` asked for, ready for the model, and what they are."""
    check_takes_images(saved)
    config = DataConfig(**load_data_section(saved.folder, arguments.config, arguments.set))
    config = as_trained(config, saved.processor)
    data = load_data(config)
    images = data.splits[arguments.split]
    if arguments.limit is not None and arguments.limit < len(images):
        images = images.subset(balanced_subset(images.labels, arguments.limit, config.split_seed))
    data.splits = {arguments.split: images}
    drop_corrupt(data, config)
    # Every image is read once, so a cache would be of no use.
    dataset = ImageDataset(data.splits[arguments.split], preparation(saved), cache=False)
    return dataset, f"{data.description}, {len(dataset)} {arguments.split} images"


def pixel_batches(dataset: ImageDataset, batch_size: int, device: str, title: str) -> Iterator[Tensor]:
    """Pixel values (B, channels, height, width) of the images in order, with a progress bar on a terminal."""
    starts = range(0, len(dataset), batch_size)
    for start in tqdm(starts, desc=title, disable=None, leave=False):
        chosen = range(start, min(start + batch_size, len(dataset)))
        yield torch.stack([dataset[index]["pixel_values"] for index in chosen]).to(device)


def check_counts(arguments: argparse.Namespace) -> None:
    """Raise ValueError for numbers below 1 and a device that cannot be used."""
    for name in ("limit", "batch_size"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {arguments.device} cannot be used ({first_line(error)})") from None


def write_analysis(path: Path, results: dict[str, Any]) -> None:
    """Write a results file with the command, versions and hardware."""
    write_results(path, {**results, "command": command_line(), **environment()})
