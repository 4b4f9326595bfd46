"""Frozen features judged as in DINO: weighted k-NN, and a linear classifier (Caron et al. 2021, Section 4)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_sparseprior.base.files import replace_durably
from hf_sparseprior.images.augmentation import Augmentation, AugmentationConfig
from hf_sparseprior.images.data import ImageDataset, Preparation
from hf_sparseprior.saving.processor import image_processor_settings
from hf_sparseprior.training import Draw, DrawSampler
from tasks.pretraining.config import EvaluationConfig

LINEAR_FILE = "linear.safetensors"
Encode = Callable[[Tensor], Tensor]  # pixel values (B, channels, height, width) -> (B, features)
QUERIES_AT_ONCE = 1024


def pooled(backbone: Any) -> Encode:
    """The features of k-NN: `pooler_output`, of DINO's models the class token after the last norm."""
    return lambda pixels: backbone(pixel_values=pixels).pooler_output


def pixels_as_features(pixels: Tensor) -> Tensor:
    """Normalised pixels themselves."""
    return pixels.flatten(1)


@torch.no_grad()
def features(encode: Encode, dataset: ImageDataset, batch_size: int, device: Any, title: str | None = None) -> Tensor:
    """Features (images, C) of unit length, on the device, in the order of the dataset.

    Joined processes encode a share each and get all of them.

    Args:
        encode: of a model in evaluation mode on `device`. dataset: images as the model takes them.
        batch_size: images at a time. title: of a progress bar; None: there is none.
    """
    joined = distributed.is_available() and distributed.is_initialized()
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)
    dataset.fill_cache()
    # Padded to equal shares; the padding comes last and is cut off.
    share = -(-len(dataset) // processes)
    own = [min(index, len(dataset) - 1) for index in range(rank, share * processes, processes)]
    found = []
    for start in tqdm(range(0, share, batch_size), desc=title, disable=title is None or rank > 0, leave=False):
        pixels = torch.stack([dataset[index]["pixel_values"] for index in own[start : start + batch_size]])
        found.append(F.normalize(encode(pixels.to(device)).float(), dim=-1))
    every = torch.cat(found)
    if joined and processes > 1:
        parts = [torch.empty_like(every) for _ in range(processes)]
        distributed.all_gather(parts, every)
        every = torch.stack(parts, 1).flatten(0, 1)
    return every[: len(dataset)]


def knn_predict(
    bank: Tensor, labels: Tensor, queries: Tensor, neighbours: int, temperature: float, num_classes: int
) -> Tensor:
    """The class with the most votes among each query's nearest neighbours, (Q,) int64.

    Args:
        bank, queries: features (N, C) and (Q, C) of unit length. labels: classes of the bank, (N,) int64.
        neighbours: k, at most N. temperature: a neighbour of similarity s votes with exp(s / temperature).
    """
    predicted = []
    for chunk in queries.split(QUERIES_AT_ONCE):
        similarity, nearest = (chunk @ bank.T).topk(min(neighbours, len(bank)), dim=-1)
        votes = torch.zeros(len(chunk), num_classes, dtype=bank.dtype, device=bank.device)
        # Relative to the nearest, which changes no order and cannot overflow.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        predicted.append(votes.scatter_add_(1, labels[nearest], weights).argmax(-1))
    return torch.cat(predicted)


class Knn:
    """k-NN with one bank of images and labels, for several ways to encode them.

    Args:
        bank: images with labels. config: k and temperature. num_classes: of the labels.
        batch_size: images at a time. device: of the model. progress: whether to show it.
    """

    def __init__(
        self,
        bank: ImageDataset,
        config: EvaluationConfig,
        num_classes: int,
        batch_size: int,
        device: Any,
        progress: bool = False,
    ) -> None:
        if config.neighbours > len(bank):
            raise ValueError(f"evaluation.neighbours={config.neighbours} must be at most the {len(bank)} images")
        self.bank, self.config, self.num_classes = bank, config, num_classes
        self.batch_size, self.device, self.progress = batch_size, device, progress

    def predict(self, encode: Encode, dataset: ImageDataset) -> np.ndarray:
        """Predicted classes of a dataset, (images,) int64."""
        encoded = [
            features(encode, images, self.batch_size, self.device, "k-NN" if self.progress else None)
            for images in (self.bank, dataset)
        ]
        labels = torch.as_tensor(self.bank.images.labels, device=self.device)
        found = knn_predict(
            encoded[0], labels, encoded[1], self.config.neighbours, self.config.temperature, self.num_classes
        )
        return found.cpu().numpy()

    def accuracy(self, encode: Encode, dataset: ImageDataset) -> float:
        """Share of right predictions."""
        return float((self.predict(encode, dataset) == dataset.images.labels).mean())


def standard_error(right: np.ndarray) -> float:
    """Standard error of the mean of values, one for each image."""
    return float(right.std() / math.sqrt(len(right)))


# ---- linear classifier ----------------------------------------------------------------------------------------------


def last_layers(backbone: Any, config: EvaluationConfig) -> Encode:
    """The features of the linear classifier: what the model pools, of each of the last layers after the last norm.

    That is what DINO trains: the class token, the mean of the patch tokens or both, as the config's `pooling` says.
    Layers of a ConViT that come before its class token have the mean in its place.

    Raises:
        ValueError: if the model has fewer layers, if these have several widths, or for `linear_average` of a model that
            pools the mean already.
    """
    own = backbone.config
    prefix, count = own.num_prefix_tokens, config.linear_layers
    same = len(set(own.widths)) == 1
    depth = sum(stage.num_layers for stage in own.stages) if same else 1
    if count > depth:
        raise ValueError(
            f"evaluation.linear_layers={count} must be at most {depth}, the last layers of equal width of this model"
        )

    pooling = getattr(own, "pooling", "mean")
    if config.linear_average and (not same or pooling != "class_token"):
        raise ValueError("evaluation.linear_average=true would give the mean twice: this model pools it already")

    prefixes = [own.prefix_tokens(stage) for stage in own.stages for _ in range(stage.num_layers)]

    def pool(tokens: Tensor, prefix: int) -> Tensor:
        class_token, mean = tokens[:, 0], tokens[:, prefix:].mean(1)
        if pooling == "class_token_and_mean":
            return torch.cat([class_token, mean], -1)
        return class_token if pooling == "class_token" and prefix else mean

    def encode(pixels: Tensor) -> Tensor:
        if not same:
            return backbone(pixel_values=pixels).pooler_output
        states = backbone(pixel_values=pixels, output_hidden_states=True).hidden_states[-count:]
        tokens = [backbone.layernorm(state) for state in states]
        parts = [pool(*pair) for pair in zip(tokens, prefixes[-count:], strict=True)]
        return torch.cat([*parts, *([tokens[-1][:, prefix:].mean(1)] if config.linear_average else [])], -1)

    return encode


def train_linear(
    encode: Encode,
    train: ImageDataset,
    num_classes: int,
    config: EvaluationConfig,
    device: Any,
    seed: int = 0,
    workers: int = 0,
    progress: bool = False,
    kept: LinearState | None = None,
) -> nn.Linear:
    """A linear classifier on frozen features, trained with SGD on augmented images.

    Args:
        encode: of a model in evaluation mode on `device`. train: as `linear_images` makes it.
        config: epochs, rate and batch size. seed: of order and weights. workers: that prepare images.
        kept: where each epoch is kept, and from where a training that was killed goes on to the same bits.
    """
    sampler = DrawSampler(len(train), seed)
    loader: DataLoader = DataLoader(
        train,
        config.linear_batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_pixels_and_labels,
        generator=torch.Generator(),  # torch's own would depend on what was drawn before
    )
    with torch.no_grad():
        width = encode(train[Draw(0, 0, 0)]["pixel_values"][None].to(device)).shape[-1]
    classifier = new_classifier(width, num_classes, seed).to(device)
    optimizer = torch.optim.SGD(classifier.parameters(), momentum=0.9)
    first = 0 if kept is None else kept.load(classifier, optimizer)
    bar = tqdm(total=config.linear_epochs, initial=first, desc="linear classifier", disable=not progress, leave=False)
    for epoch in range(first, config.linear_epochs):
        rate = (1 + math.cos(math.pi * epoch / config.linear_epochs)) / 2
        optimizer.param_groups[0]["lr"] = config.linear_learning_rate * config.linear_batch_size / 256 * rate
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            with torch.no_grad():
                inputs = encode(pixels.to(device)).float()
            loss = F.cross_entropy(classifier(inputs), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if kept is not None:
            kept.save(classifier, optimizer, epoch + 1)
        bar.update()
    bar.close()
    return classifier


class LinearState:
    """A file with a linear classifier in training, for one model and one configuration alone.

    Args:
        path: a .safetensors file.
        backbone: whose features it is trained on. config: of its training. about: what else it depends on.
    """

    def __init__(self, path: Path, backbone: nn.Module, config: EvaluationConfig, about: Any) -> None:
        self.path = path
        pooling = getattr(backbone.config, "pooling", None)
        digest = hashlib.sha256(repr((asdict(config), about, pooling)).encode())
        for name, value in backbone.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self.key = digest.hexdigest()

    def load(self, classifier: nn.Linear, optimizer: torch.optim.Optimizer) -> int:
        """Fill classifier and momentum. Returns the epochs that are done, 0 if there is no such file or another's."""
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        except (OSError, SafetensorError):
            return 0
        parameters = dict(classifier.named_parameters())
        names = {*parameters, *(f"momentum.{name}" for name in parameters)}
        if about.get("key") != self.key or set(tensors) != names:
            return 0
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
                momentum = tensors[f"momentum.{name}"].to(parameter.device)
                optimizer.state[parameter]["momentum_buffer"] = momentum
        return int(about["epochs"])

    def save(self, classifier: nn.Linear, optimizer: torch.optim.Optimizer, epochs: int) -> None:
        """Write what `load` reads, in the first process alone, without ever leaving half a file."""
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
            return
        tensors = {}
        for name, parameter in classifier.named_parameters():
            tensors[name] = parameter.detach()
            tensors[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Its own for each process: two evaluations of a model may run at once.
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            save_file(tensors, scratch, {"key": self.key, "epochs": str(epochs)})
            replace_durably(scratch, self.path)
        finally:
            scratch.unlink(missing_ok=True)


def _pixels_and_labels(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    labels = torch.tensor([sample["labels"] for sample in samples])
    return torch.stack([sample["pixel_values"] for sample in samples]), labels


def new_classifier(width: int, num_classes: int, seed: int) -> nn.Linear:
    """Weights from N(0, 0.01), biases 0."""
    classifier = nn.Linear(width, num_classes)
    nn.init.normal_(classifier.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(classifier.bias)
    return classifier


def linear_images(images: Any, model_config: Any, config: EvaluationConfig, seed: int) -> ImageDataset:
    """Training images of the linear classifier: boxes of random size, mirrored half of the time."""
    size = image_processor_settings(model_config)["size"]
    augmentation = Augmentation(
        AugmentationConfig(crop="resized", scale=config.linear_scale, flip=0.5, interpolation="bilinear"),
        (size["height"], size["width"]),
        model_config.image_mean,
        model_config.image_std,
        model_config.num_channels,
    )
    return ImageDataset(images, Preparation(None, model_config.num_channels, augmentation, seed))


@torch.no_grad()
def linear_predict(encode: Encode, classifier: nn.Linear, dataset: ImageDataset, batch_size: int) -> np.ndarray:
    """Predicted classes of a dataset, (images,) int64."""
    device, found = classifier.weight.device, []
    for start in range(0, len(dataset), batch_size):
        chosen = range(start, min(start + batch_size, len(dataset)))
        pixels = torch.stack([dataset[index]["pixel_values"] for index in chosen])
        found.append(classifier(encode(pixels.to(device)).float()).argmax(-1).cpu())
    return torch.cat(found).numpy()
