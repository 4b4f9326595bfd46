"""Several trained models on the same test images: what the commands that change those images have in common."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import Preparation, as_trained, load_split
from hf_sparseprior.images.sections import load_data_section
from hf_sparseprior.images.sources import ImageData, Images
from hf_sparseprior.models.pretrained import check_classes
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.results import read_results, write_results
from hf_sparseprior.saving.processor import PROCESSOR
from tasks.analysis.runs import (
    base_folder,
    check_counts,
    load_classifier,
    load_processor,
    model_folder,
    model_names,
    num_channels,
)

Change = Callable[[Image.Image], Image.Image]
Key = TypeVar("Key")


def trained_main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: list[str] | None = None
) -> int:
    """The command line of one of these commands, which does `run`; a bad value prints one line and returns 2."""
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return run_command(parser.prog, lambda: run(arguments), "where it stopped")


@dataclass
class Trained:
    """One model: its name in tables, its folder and checksum, the network, and how its images are prepared."""

    name: str
    folder: Path
    sha256: str
    network: Any
    processor: Any

    def preparation(self, processor: Any = None) -> Preparation:
        """What makes pixel values of an image, with the model's own image processor or another one."""
        return Preparation(processor or self.processor, num_channels(self.network))

    def about(self) -> dict[str, Any]:
        """What a results file says about it; models of transformers have no prior of ours."""
        prior = getattr(self.network.config, "prior_name", None)
        return {"name": self.name, "folder": str(self.folder), "sha256": self.sha256, "prior": prior}


@dataclass
class SharedImages:
    """The split "test", which all models share. sha256: of its pixels and labels. sizes: each (height, width) in it."""

    data: ImageData
    sha256: str
    sizes: list[tuple[int, int]]

    @property
    def images(self) -> Images:
        """The images and their labels."""
        return self.data.splits["test"]

    def about(self) -> dict[str, Any]:
        """What a results file says about them."""
        return {"images": len(self.images), "images_sha256": self.sha256, "data": self.data.description}


# ---- models and images ----------------------------------------------------------------------------------------------


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a number that is out of range."""
    check_counts(arguments)
    if arguments.workers < 0:
        raise ValueError(f"--workers {arguments.workers} must be 0 or more")


def load_trained(arguments: argparse.Namespace) -> tuple[list[Trained], SharedImages]:
    """The models of a command line, and the test images that they share.

    Raises:
        ValueError, OSError: for a folder without a whole model, and for models with different test images.
    """
    folders = [model_folder(path) for path in arguments.models]
    names = model_names(folders, arguments.names)
    models, shared, shared_config = [], None, None
    for name, folder in zip(names, folders, strict=True):
        network = load_classifier(folder).eval().to(arguments.device)
        config = load_data_section(folder, arguments.config, arguments.set)
        if arguments.limit is not None:
            config["limit_test"] = arguments.limit
        processor = load_processor(folder)
        data_config = as_trained(DataConfig(**config), processor)
        if shared is None or data_config != shared_config:
            shared_config = data_config
            own = survey(load_split(data_config, "test"))
            if shared is not None and own.sha256 != shared.sha256:
                raise ValueError(f"{folder} has other test images than {folders[0]}; models are compared on the same")
            shared = own
        check_classes(network, shared.data.classes)
        models.append(Trained(name, folder, model_sha256(folder), network, processor))
    assert shared is not None
    return models, shared


def model_sha256(folder: Path) -> str:
    """One checksum of everything that decides what a saved model answers: weights, config and image processor.

    The checksum of an adapter includes that of its model.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    files += [path for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME, PROCESSOR) if (path := folder / name).is_file()]
    sums = [file_sha256(path) for path in files]
    if not (folder / CONFIG_NAME).is_file():
        sums.append(model_sha256(base_folder(folder)))
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def survey(data: ImageData) -> SharedImages:
    """Look at every test image once."""
    images = data.splits["test"]
    digest, sizes = hashlib.sha256(np.ascontiguousarray(images.labels).tobytes()), set()
    for index in tqdm(range(len(images)), desc="reading test images", disable=len(images) < 2000):
        pixels = np.asarray(images.read(index))
        digest.update(f"{pixels.shape}".encode() + pixels.tobytes())
        sizes.add(pixels.shape[:2])
    return SharedImages(data, digest.hexdigest(), sorted(sizes))


# ---- right answers --------------------------------------------------------------------------------------------------


class _Prepared(Dataset):
    """index -> (the changed image as each model wants it, label). An image is changed once, for all models."""

    def __init__(self, images: Images, change: Change | None, preparations: Sequence[Preparation]) -> None:
        self.images = images
        self.change = change
        self.preparations = preparations

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        image = self.images.read(index)
        if self.change is not None:
            image = self.change(image)
        return [prepare(image) for prepare in self.preparations], int(self.images.labels[index])


@torch.inference_mode()
def count_right(
    networks: Sequence[Any],
    preparations: Sequence[Preparation],
    images: Images,
    change: Change | None = None,
    batch_size: int = 64,
    workers: int = 0,
    progress: tqdm | None = None,
) -> list[int]:
    """How many images each model classifies correctly.

    Args:
        networks: classifiers, in evaluation mode.
        preparations: what each network does to an image first, one for each network.
        images: images with labels.
        change: what is done to each image first; picklable if there are workers.
        batch_size: images of a forward pass.
        workers: processes that change and prepare images; 0: this one.
        progress: progress bar, one unit an image.
    """
    dataset = _Prepared(images, change, preparations)
    right = [0] * len(networks)
    for batch in DataLoader(dataset, batch_size, num_workers=workers, collate_fn=list):
        labels = torch.tensor([label for _, label in batch])
        for index, network in enumerate(networks):
            pixels = torch.stack([prepared[index] for prepared, _ in batch]).to(network.device)
            right[index] += int((network(pixel_values=pixels).logits.argmax(-1).cpu() == labels).sum())
        if progress is not None:
            progress.update(len(batch))
    return right


# ---- cells ----------------------------------------------------------------------------------------------------------


class Cells:
    """One model's counts of right answers, each in a file, so that a command goes on where it was stopped.

    Args:
        folder: holds all models' cells.
        owner: what the answers depend on; cells of another owner are not seen.
        images: number of test images.
    """

    def __init__(self, folder: Path, owner: Mapping[str, Any], images: int) -> None:
        self.owner = dict(owner)
        self.images = images
        self.folder = folder / hashlib.sha256(json.dumps(self.owner, sort_keys=True).encode()).hexdigest()[:16]

    def accuracy(self, cell: str) -> float | None:
        """Share of right answers, None if it is not known yet."""
        path = self.folder / f"{cell}.json"
        if not path.exists():
            return None
        try:
            return read_results(path)["right"] / self.images
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not a whole record; remove it") from None

    def write(self, cell: str, right: int, model: Path) -> None:
        """Keep a count."""
        found = {"model": str(model), "cell": cell, "right": right, "images": self.images, "owner": self.owner}
        write_results(self.folder / f"{cell}.json", found)


def open_cells(out: Path, models: Sequence[Trained], shared: SharedImages, **owner: Any) -> list[Cells]:
    """The cells of each model in the folder of a command; `owner`: what else the answers depend on."""
    return [
        Cells(
            out / "cells",
            {"model_sha256": model.sha256, "images_sha256": shared.sha256, **owner},
            len(shared.images),
        )
        for model in models
    ]


def accuracies(model: Trained, cells: Cells, names: Mapping[Key, str]) -> dict[Key, float]:
    """Share of right answers of a model whose cells are filled, by the keys of `names`.

    Raises:
        ValueError: if one of these cells is not filled.
    """
    found = {key: cells.accuracy(name) for key, name in names.items()}
    known = {key: share for key, share in found.items() if share is not None}
    if missing := [names[key] for key in names if key not in known]:
        raise ValueError(f"{cells.folder} lacks the cell {missing[0]!r} of {model.name}")
    return known


def fill_cells(
    models: Sequence[Trained],
    cells: Sequence[Cells],
    images: Images,
    work: Mapping[str, tuple[Change | None, Sequence[Preparation]]],
    batch_size: int,
    workers: int,
) -> None:
    """Count what no cell holds yet, and keep each count as soon as it is known.

    Args:
        models: all of them.
        cells: one for each model.
        images: images with labels.
        work: for each cell, what is done to the images, and how each model has them prepared.
        batch_size, workers: as in `count_right`.
    """
    missing = {cell: [index for index, own in enumerate(cells) if own.accuracy(cell) is None] for cell in work}
    missing = {cell: lacking for cell, lacking in missing.items() if lacking}
    with tqdm(total=len(missing) * len(images), unit=" images", disable=not missing) as bar:
        for cell, lacking in missing.items():
            bar.set_description(cell)
            change, preparations = work[cell]
            right = count_right(
                [models[index].network for index in lacking],
                [preparations[index] for index in lacking],
                images, change, batch_size, workers, bar,
            )  # fmt: skip
            for index, count in zip(lacking, right, strict=True):
                cells[index].write(cell, count, models[index].folder)
