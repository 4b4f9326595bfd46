"""Images with classes of pixels or with objects, read from a folder in ADE20K's and COCO's layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from hf_sparseprior.cli.image_files import PassedOver, count_unlisted, decode_image, why_unreadable
from hf_sparseprior.runs.command import short
from hf_sparseprior.training.sampling import Draw
from tasks.common.annotated_folders import annotated_images, check_are_there, look_at_masks, read_classes
from tasks.common.coco import CocoFile, look_at_objects, read_coco
from tasks.common.mm.scenes import write_scenes
from tasks.heads.config import DataConfig
from tasks.heads.kinds import IGNORED, Kind, targets

SPLITS = {"train": "training", "validation": "validation", "test": "test"}


def prepare_folder(config: DataConfig) -> Path:
    """The folder of the data; scenes are drawn if it is missing.

    Raises:
        OSError: if it is missing and there are no settings of scenes. ValueError: if it holds other scenes.
    """
    folder = Path(str(config.path))
    if config.scenes is not None:
        write_scenes(folder, config.scene_settings())
    if not (folder / "images").is_dir():
        raise OSError(f"data.path={folder} has no folder images; see DataConfig in tasks/heads/config.py")
    return folder


class PixelClasses(Dataset):
    """Images with a class for each pixel.

    Args:
        folder: of the data. split: train, validation or test.

    `passed_over` counts what was left out.

    Raises:
        OSError: for a missing list of classes, a split without images, or an image without annotations.
        ValueError: for a list of classes that cannot be learned.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.classes = list(read_classes(folder))
        self.split, self.passed_over = split, PassedOver()
        self.folder = folder / "annotations" / SPLITS[split]
        found = annotated_images(folder, SPLITS[split], self.passed_over)
        self.files, self.annotations = [Path(file) for file, _ in found], [Path(labels) for _, labels in found]
        check_are_there(self.annotations)

    def __len__(self) -> int:
        return len(self.files)

    def look(self) -> list[str]:
        """What looks wrong, one line each (`look_at_masks`)."""
        lines = look_at_masks(self.annotation, len(self), self.classes, str(self.folder), 1, self.split == "train")
        if twice := [stem for stem, times in Counter(file.stem for file in self.files).items() if times > 1]:
            lines.append(f"{self.folder}: {len(twice)} masks are of several images: {short(twice, 3)}")
        return lines

    def image(self, index: int) -> np.ndarray:
        """uint8 RGB (height, width, 3)."""
        return read_rgb(self.files[index])

    def annotation(self, index: int) -> np.ndarray:
        """Classes of pixels, uint8 (height, width), 255 where there is no label.

        Raises:
            OSError: for a missing or broken file. ValueError: for another size than the image's, or an unknown label.
        """
        path = self.annotations[index]
        labels = np.asarray(open_labels(path))
        if labels.shape != (size := self.image(index).shape[:2]):
            raise ValueError(f"{path} of shape {labels.shape} must be one channel of the image's {size}")
        known = labels[labels != IGNORED]
        if known.size and known.max() > len(self.classes):
            raise ValueError(f"{path} holds the label {known.max()}; the highest is {len(self.classes)}")
        return np.where((labels == 0) | (labels == IGNORED), IGNORED, labels.astype(np.int64) - 1).astype(np.uint8)


class Objects(Dataset):
    """Images with objects.

    Args:
        folder: of the data. split: train, validation or test.
        with_objects: leave images without objects out, as detectors do in training.
        with_mask: whether every object has to have a mask; without one it is that of the box.

    `passed_over` counts what was left out, images that the file does not list among them.

    Raises:
        OSError: for a missing image. ValueError: for a bad annotation file, or one without objects.
    """

    def __init__(self, folder: Path, split: str, with_objects: bool = False, with_mask: bool = True) -> None:
        self.split, self.folder = split, folder / "images" / SPLITS[split]
        self.coco: CocoFile = read_coco(folder / "annotations" / f"instances_{SPLITS[split]}.json", with_mask)
        self.classes = list(self.coco.categories.values())
        self.numbers = {key: number for number, key in enumerate(self.coco.categories)}
        self.passed_over = PassedOver()
        listed = (str(self.folder / entry["file_name"]) for entry in self.coco.images)
        count_unlisted(self.folder, listed, self.coco.path.name, self.passed_over)
        self.images = []
        for entry in self.coco.images:
            if self.coco.annotations[entry["id"]] or not with_objects:
                self.images.append(entry)
            else:
                self.passed_over.add("without objects", str(self.folder / entry["file_name"]))
        found = (annotation for own in self.coco.annotations.values() for annotation in own)
        if all(annotation.get("iscrowd") for annotation in found):
            raise ValueError(f"{self.coco.path} has no image with objects, crowds aside; nothing could be measured")
        check_are_there(self.folder / entry["file_name"] for entry in self.images)

    def __len__(self) -> int:
        return len(self.images)

    def look(self) -> list[str]:
        """What looks wrong, one line each (`look_at_objects`)."""
        return look_at_objects(self.coco.content, self.coco.path, self.split == "train")

    def image(self, index: int) -> np.ndarray:
        """uint8 RGB (height, width, 3).

        Raises:
            OSError: for a missing or broken file. ValueError: for another size than the annotation file says.
        """
        entry = self.images[index]
        pixels = read_rgb(self.folder / entry["file_name"])
        if pixels.shape[:2] != (entry["height"], entry["width"]):
            found = "x".join(map(str, pixels.shape[:2]))
            raise ValueError(
                f"{self.folder / entry['file_name']} is of {found} pixels, the annotation file says "
                f"{entry['height']}x{entry['width']}"
            )
        return pixels

    def annotation(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Masks bool (objects, height, width), boxes (objects, 4) left, top, width, height, and classes (objects,)."""
        entry = self.images[index]
        own = self.coco.annotations[entry["id"]]
        boxes = np.array([annotation["bbox"] for annotation in own], dtype=np.float32).reshape(-1, 4)
        classes = np.array([self.numbers[annotation["category_id"]] for annotation in own], dtype=np.int64)
        return self.coco.masks(entry), boxes, classes


class Prepared(Dataset):
    """Samples as a head takes them: `pixel_values` (3, height, width) and what it learns from.

    Args:
        source: images and annotations. kind: of the head. processor: its image processor.
        mirrored: probability with which an image that is indexed by a `Draw` is mirrored. seed: the run's.
    """

    def __init__(self, source: Any, kind: Kind, processor: Any, mirrored: float = 0.0, seed: int = 0) -> None:
        self.source, self.kind, self.processor = source, kind, processor
        self.mirrored, self.seed = mirrored, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: int | Draw) -> dict[str, Any]:
        index = item.index if isinstance(item, Draw) else int(item)
        mirrored = isinstance(item, Draw) and bool(item.random(self.seed).random() < self.mirrored)
        pixels = self.processor(images=self.source.image(index), return_tensors="pt")["pixel_values"][0]
        size = (pixels.shape[1], pixels.shape[2])
        pixels = pixels.flip(-1) if mirrored else pixels
        return {
            "pixel_values": pixels.to(torch.float32),
            **targets(self.kind, self.source.annotation(index), size, mirrored),
        }


def read_source(kind: Kind, folder: Path, split: str) -> Any:
    """The images and annotations of a split as a kind of head learns from them."""
    return (
        PixelClasses(folder, split)
        if kind.finds == "classes"
        else Objects(folder, split, split == "train", kind.finds == "masks")
    )


def same_classes(sources: Sequence[Any]) -> list[str]:
    """The classes of all splits.

    Raises:
        ValueError: if they differ.
    """
    for source in sources[1:]:
        if source.classes != sources[0].classes:
            raise ValueError(
                f"{source.coco.path} has the categories {source.classes}, training has {sources[0].classes}"
            )
    return list(sources[0].classes)


def open_labels(path: Path) -> Image.Image:
    """A whole image of labels as it is stored, which is read.

    Raises:
        OSError: for a missing or broken file; the message names it.
    """
    try:
        image = Image.open(path)
        image.load()
        return image
    except FileNotFoundError:
        raise OSError(f"{path} is missing") from None
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's plugins raise all of them for broken files
        raise OSError(f"{path} is not a readable image ({why_unreadable(error)})") from None


def read_rgb(path: Path) -> np.ndarray:
    """An image, uint8 RGB (height, width, 3), turned as its EXIF orientation says, as pipelines do (`decode_image`)."""
    return np.asarray(decode_image(path, str(path)))
