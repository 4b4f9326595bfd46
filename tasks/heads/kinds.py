"""What differs between heads: the image processor, what they learn from, what they find, and how that is measured."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from hf_sparseprior.base.files import write_text
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings
from tasks.common.annotated_folders import IGNORED
from tasks.common.coco import CocoFile

FEWEST = 0.05  # score from which a mask is a finding; COCO's average precision weighs the rest by their scores


@dataclass(frozen=True)
class Kind:
    """A head that this task trains.

    processor: its image processor in transformers. finds: "classes" of pixels, "masks" of objects, or their "boxes".
    """

    processor: str
    finds: Literal["classes", "masks", "boxes"]

    @property
    def metric(self) -> str:
        """The metric of its pictures and tables."""
        return {"classes": "mIoU", "masks": "mask_mAP", "boxes": "box_mAP"}[self.finds]


KINDS: dict[str, Kind] = {
    "upernet": Kind("SegformerImageProcessor", "classes"),
    "mask2former": Kind("Mask2FormerImageProcessor", "masks"),
    "maskformer": Kind("MaskFormerImageProcessor", "masks"),
    "detr": Kind("DetrImageProcessor", "boxes"),
    "conditional_detr": Kind("ConditionalDetrImageProcessor", "boxes"),
    "dab_detr": Kind("ConditionalDetrImageProcessor", "boxes"),
    "deformable_detr": Kind("DeformableDetrImageProcessor", "boxes"),
    "rt_detr": Kind("RTDetrImageProcessor", "boxes"),
    "rt_detr_v2": Kind("RTDetrImageProcessor", "boxes"),
    "d_fine": Kind("RTDetrImageProcessor", "boxes"),
}


def processor_settings(kind: Kind, backbone: Any) -> dict[str, Any]:
    """preprocessor_config.json: images are resized to the size of the backbone's config and normalised as it says."""
    settings = {**image_processor_settings(backbone), "image_processor_type": kind.processor, "resample": 2}
    settings.pop("do_convert_rgb")
    if kind.finds == "classes":
        return {**settings, "do_reduce_labels": False}
    if kind.finds == "masks":
        return {**settings, "do_reduce_labels": False, "ignore_index": IGNORED}
    return {**settings, "do_pad": False, "do_convert_annotations": True, "format": "coco_detection"}


def save_processor(kind: Kind, backbone: Any, folder: Path) -> None:
    """Write preprocessor_config.json."""
    write_text(folder / PROCESSOR, json.dumps(processor_settings(kind, backbone), indent=2) + "\n")


def make_processor(kind: Kind, backbone: Any) -> Any:
    """The image processor as AutoImageProcessor and pipelines read it from the saved folder."""
    with tempfile.TemporaryDirectory() as folder:
        save_processor(kind, backbone, Path(folder))
        return AutoImageProcessor.from_pretrained(folder)


# ---- what a head learns from -----------------------------------------------------------------------------------------


def targets(kind: Kind, annotation: Any, size: tuple[int, int], mirrored: bool) -> dict[str, Any]:
    """What a head learns from, for an image of any size that is resized to `size` and, if `mirrored`, then mirrored.

    Args:
        kind: of the head.
        annotation: classes of pixels, uint8 (height, width), or masks, bool (objects, height, width), with the boxes
            (objects, 4) left, top, width, height in pixels, and the classes (objects,) of objects.
        size: (height, width) in pixels.
        mirrored: whether left and right are swapped.
    """
    if kind.finds == "classes":
        labels = resized(torch.from_numpy(annotation)[None], size)[0].long()
        return {"labels": labels.flip(-1) if mirrored else labels}
    masks, boxes, classes = annotation
    names = torch.as_tensor(classes, dtype=torch.long)
    if kind.finds == "masks":
        found = resized(torch.from_numpy(masks), size).float()
        return {"mask_labels": found.flip(-1) if mirrored else found, "class_labels": names}
    height, width = masks.shape[1:]
    left, top, across, down = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4).unbind(1)
    centre = (left + across / 2) / width
    places = torch.stack([1 - centre if mirrored else centre, (top + down / 2) / height, across / width, down / height])
    return {"labels": {"class_labels": names, "boxes": places.T.clamp(0, 1)}}


def resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (n, height, width) at another size; each pixel is that at its centre."""
    if not len(maps):
        return maps.new_zeros((0, *size))
    return torch.nn.functional.interpolate(maps[None].float(), size=size, mode="nearest-exact")[0].to(maps.dtype)


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch: images stacked, labels of pixels too, those of objects as lists."""
    batch: dict[str, Any] = {"pixel_values": torch.stack([sample["pixel_values"] for sample in samples])}
    for key in ("labels", "mask_labels", "class_labels"):
        values = [sample[key] for sample in samples if key in sample]
        if values:
            stacked = key == "labels" and torch.is_tensor(values[0])
            batch[key] = torch.stack(values) if stacked else values
    return batch


# ---- what it finds ---------------------------------------------------------------------------------------------------


def findings(kind: Kind, processor: Any, outputs: Any, sizes: Sequence[tuple[int, int]]) -> list[Any]:
    """What a head finds in each image, at the images' own sizes, as its image processor and so `pipeline` says it.

    Returns:
        Classes of pixels, int64 (height, width); or scores, classes and masks (objects, height, width) or boxes
        (objects, 4) left, top, right, bottom of the objects, as numpy arrays.
    """
    if kind.finds == "classes":
        maps = processor.post_process_semantic_segmentation(outputs, target_sizes=list(sizes))
        return [map_.cpu().numpy().astype(np.int64) for map_ in maps]
    if kind.finds == "masks":
        # A threshold of 0 would count every query, also those that find nothing.
        found = processor.post_process_instance_segmentation(
            outputs, threshold=FEWEST, target_sizes=list(sizes), return_binary_maps=True
        )
        return [_objects_of_maps(each, size) for each, size in zip(found, sizes, strict=True)]
    boxes = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=torch.tensor(sizes))
    return [tuple(each[key].cpu().numpy() for key in ("scores", "labels", "boxes")) for each in boxes]


def _objects_of_maps(found: dict[str, Any], size: tuple[int, int]) -> tuple[np.ndarray, ...]:
    about = found["segments_info"]
    masks = np.zeros((0, *size), dtype=bool)
    if about:
        masks = found["segmentation"].cpu().numpy().reshape(-1, *size)[: len(about)].astype(bool)
    scores = np.array([segment["score"] for segment in about], dtype=np.float32)
    return scores, np.array([segment["label_id"] for segment in about], dtype=np.int64), masks


class PixelScore:
    """Intersection over union of classes of pixels, over all images.

    Args:
        num_classes: how many there are.
    """

    def __init__(self, num_classes: int) -> None:
        self.counts = np.zeros((num_classes, num_classes), dtype=np.int64)

    def add(self, labels: np.ndarray, found: np.ndarray) -> None:
        """Count an image's pixels, (true class, found class); those without a label are left out."""
        classes = len(self.counts)
        labelled = labels != IGNORED
        pairs = labels[labelled].astype(np.int64) * classes + found[labelled]
        self.counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    def metrics(self) -> dict[str, float]:
        """mIoU over the classes that occur, in labels or findings, and the share of pixels that are right."""
        union = self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()
        shares = self.counts.diagonal()[union > 0] / union[union > 0]
        right = self.counts.diagonal().sum() / max(1, self.counts.sum())
        return {"mIoU": float(shares.mean()) if len(shares) else 0.0, "pixel_accuracy": float(right)}

    def by_class(self, classes: Sequence[str]) -> dict[str, float]:
        """IoU of each class; not a number for one that does not occur."""
        union = self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()
        with np.errstate(invalid="ignore", divide="ignore"):
            return dict(zip(classes, (self.counts.diagonal() / union).tolist(), strict=True))


class ObjectScore:
    """COCO's average precision, by pycocotools.

    Args:
        kind: of the head. coco: the annotations.
    """

    def __init__(self, kind: Kind, coco: CocoFile) -> None:
        self.kind, self.coco = kind, coco
        self.ids = list(coco.categories)
        self.found: list[dict[str, Any]] = []

    def add(self, image: dict[str, Any], scores: np.ndarray, labels: np.ndarray, places: np.ndarray) -> None:
        """Take what was found in an image."""
        from pycocotools import mask as coco_mask

        for score, label, place in zip(scores, labels, places, strict=True):
            if not 0 <= label < len(self.ids):
                continue
            entry = {"image_id": image["id"], "category_id": self.ids[int(label)], "score": float(score)}
            if self.kind.finds == "masks":
                entry["segmentation"] = coco_mask.encode(np.asfortranarray(place.astype(np.uint8)))
            else:
                left, top, right, bottom = map(float, place)
                entry["bbox"] = [left, top, right - left, bottom - top]
            self.found.append(entry)

    def metrics(self) -> dict[str, float]:
        """AP over thresholds from 0.5 to 0.95, and at 0.5; 0 where nothing was found."""
        from pycocotools.cocoeval import COCOeval

        word, kind = ("mask", "segm") if self.kind.finds == "masks" else ("box", "bbox")
        if not self.found:
            return {f"{word}_mAP": 0.0, f"{word}_mAP_50": 0.0}
        with redirect_stdout(io.StringIO()):
            truth = indexed(self.coco)
            evaluation = COCOeval(truth, truth.loadRes(self.found), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return {f"{word}_mAP": float(evaluation.stats[0]), f"{word}_mAP_50": float(evaluation.stats[1])}


def indexed(coco: CocoFile) -> Any:
    """pycocotools' COCO of an annotation file that was read."""
    from pycocotools.coco import COCO

    made = COCO()
    made.dataset = json.loads(json.dumps(coco.content))
    for number, annotation in enumerate(made.dataset["annotations"], start=1):
        annotation["id"] = number  # 0 would mean unmatched
        annotation.setdefault("iscrowd", 0)
        # Many files lack it. The metric asks for it, and uses it for objects of a size alone.
        annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
    with redirect_stdout(io.StringIO()):
        made.createIndex()
    return made
