"""A model with what it needs to look at images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from hf_sparseprior.cli.labelled_images import pixel_values

Kind = Literal["classes", "numbers", "pixels", "objects", "features"]


@dataclass
class Predictor:
    """A model with what it needs to look at images.

    title: for messages. digest: of its weights. kind: what it finds. labels: names of classes; None if they have none.
    call: from pixels (B, C, height, width) to tensors by name. processor: of transformers. one_class: whether an image
    has one class; with several each has a probability of its own. per_image: bytes that a call needs for an image,
    about. device: where it runs. num_frames: of a clip, for models of clips.
    """

    title: str
    digest: str
    kind: Kind
    labels: list[str] | None
    call: Callable[[Tensor], dict[str, Tensor]]
    processor: Any
    num_channels: int
    one_class: bool = True
    per_image: int = 0
    device: str = "cpu"
    num_frames: int | None = None

    @property
    def examples(self) -> str:
        """What it looks at, in messages."""
        return "images" if self.num_frames is None else "videos"

    def prepare(self, images: Sequence[Any]) -> Tensor:
        """Pillow's images as the model takes them, float32 (B, C, height, width), or clips (B, F, C, height, width)."""
        return pixel_values(images, self.processor, self.num_channels)

    def found(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """What a call gives for Pillow's images."""
        return self.call(self.prepare(images))

    def masks(self, images: Sequence[Any]) -> list[np.ndarray]:
        """The class of each pixel of Pillow's images: uint16 (height, width), one array an image."""
        outputs, sizes = self.found(images), [(image.height, image.width) for image in images]
        process = getattr(self.processor, "post_process_semantic_segmentation", None)
        if process is not None:
            found = process(SimpleNamespace(**outputs), target_sizes=sizes)
        else:
            resize, maps = nn.functional.interpolate, zip(outputs["logits"], sizes, strict=True)
            found = [resize(own[None], size=size, mode="bilinear")[0].argmax(0) for own, size in maps]
        return [own.numpy().astype(np.uint16) for own in found]

    def objects(self, images: Sequence[Any], threshold: float) -> list[list[dict[str, Any]]]:
        """Of each image its objects: category (number), score, bbox (left, top, width, height) in pixels.

        Raises:
            ValueError: if the image processor cannot make boxes of outputs.
        """
        process = getattr(self.processor, "post_process_object_detection", None)
        if process is None:
            raise ValueError(f"{self.title}: its image processor cannot turn outputs into boxes")
        sizes = [(image.height, image.width) for image in images]
        found = process(SimpleNamespace(**self.found(images)), threshold=threshold, target_sizes=sizes)
        return [
            [
                {"category": int(label), "score": float(score), "bbox": corner_and_sides(box.tolist())}
                for score, label, box in zip(one["scores"], one["labels"], one["boxes"], strict=True)
            ]
            for one in found
        ]


def corner_and_sides(box: Sequence[float]) -> list[float]:
    """(left, top, width, height) of a box (left, top, right, bottom), to hundredths of a pixel."""
    left, top, right, bottom = box
    return [round(value, 2) for value in (left, top, right - left, bottom - top)]
