"""Segmentation data: a folder in ADE20K's layout, annotations that are checked when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmseg.datasets import BaseSegDataset
from mmseg.datasets.transforms import LoadAnnotations
from mmseg.registry import DATASETS, TRANSFORMS

from hf_sparseprior.cli.image_files import PassedOver
from tasks.common.annotated_folders import IGNORED, annotated_images, check_are_there, look_at_masks, read_classes
from tasks.common.mm.pictures import class_colours
from tasks.common.mm.reading import CHECKED, read_image


@DATASETS.register_module()
class FolderSegmentation(BaseSegDataset):
    """`data_root`/images/SPLIT/NAME.png with annotations/SPLIT/NAME.png and the classes' names in classes.txt.

    Annotations are as ADE20K's: 0 is unlabelled, 1 is the first line of classes.txt.

    Args:
        data_root: the folder.
        split: name of the folder in images and annotations.
        img_suffix: how names of images end, in any case.
        options: further options of `BaseSegDataset`.

    Raises:
        OSError: for a split without images, or a missing list of classes.
    """

    def __init__(self, data_root: str, split: str, img_suffix: str = ".png", **options: Any) -> None:
        classes = read_classes(data_root)
        self.split, self.passed_over = split, PassedOver()
        super().__init__(
            data_root=data_root,
            data_prefix={"img_path": f"images/{split}", "seg_map_path": f"annotations/{split}"},
            img_suffix=img_suffix,
            reduce_zero_label=True,
            metainfo={"classes": classes, "palette": class_colours(len(classes)).tolist()},
            **options,
        )

    def load_data_list(self) -> list[dict]:
        """One entry for each image, whose files are there. `passed_over` counts what else lies next to them."""
        if self.ann_file and not Path(self.ann_file).is_dir():
            entries = super().load_data_list()
        else:
            found = annotated_images(self.data_root, self.split, self.passed_over, self.img_suffix, self.seg_map_suffix)
            shared = {"label_map": self.label_map, "reduce_zero_label": self.reduce_zero_label}
            entries = [
                {"img_path": image, "seg_map_path": labels, **shared, "seg_fields": []} for image, labels in found
            ]
        check_are_there(entry["seg_map_path"] for entry in entries)
        return entries


@TRANSFORMS.register_module()
class ReadAnnotation(LoadAnnotations):
    """mm's LoadAnnotations, which names a broken file: uint8 (height, width) class indices, 255 where ignored.

    Args:
        num_classes: larger labels are refused; None: as many classes as the data set has.
        reduce_zero_label: as mm's.
    """

    def __init__(self, num_classes: int | None = None, reduce_zero_label: bool | None = None) -> None:
        super().__init__(reduce_zero_label)
        self.num_classes = num_classes

    def _load_seg_map(self, results: dict[str, Any]) -> None:
        """Read results["seg_map_path"] into results["gt_seg_map"].

        Raises:
            OSError: for a missing or broken file.
            ValueError: for an annotation of another size than the image, or a label that no class has.
        """
        path = results["seg_map_path"]
        labels = read_image(path, "unchanged")
        # "ori_shape" is the image's, before any resizing.
        if labels.shape != tuple(results["ori_shape"]):
            raise ValueError(
                f"{path} of shape {labels.shape} must be one channel of the image's {tuple(results['ori_shape'])}"
            )
        labels = labels.astype(np.int64)
        reduced = bool(results["reduce_zero_label"])
        if self.reduce_zero_label not in (None, reduced):
            raise ValueError(f"reduce_zero_label={self.reduce_zero_label} is {reduced} in the data set")
        if reduced:
            labels = np.where((labels == 0) | (labels == IGNORED), IGNORED, labels - 1)
        known = labels[labels != IGNORED]
        allowed = IGNORED if self.num_classes is None else self.num_classes
        if known.size and known.max() >= allowed:
            raise ValueError(
                f"{path} holds the label {known.max() + reduced}; with {allowed} classes the highest is "
                f"{allowed - 1 + reduced}"
            )
        if results.get("label_map") is not None:
            raise ValueError("a choice of classes (label_map) is not supported; give the data set its own classes.txt")
        results["gt_seg_map"] = labels.astype(np.uint8)
        results["seg_fields"].append("gt_seg_map")


def _read_annotation(step: LoadAnnotations, dataset: Any) -> ReadAnnotation:
    return ReadAnnotation(len(dataset.metainfo["classes"]), step.reduce_zero_label)


def _count_classes(step: ReadAnnotation, dataset: Any) -> ReadAnnotation:
    return step if step.num_classes is not None else _read_annotation(step, dataset)


CHECKED[LoadAnnotations] = _read_annotation
CHECKED[ReadAnnotation] = _count_classes


def look(dataset: Any, training: bool) -> list[str]:
    """What looks wrong with the masks of a built data set, one line each (`look_at_masks`)."""
    steps = getattr(getattr(dataset, "pipeline", None), "transforms", [])
    reading = [step for step in steps if isinstance(step, (LoadImageFromFile, LoadAnnotations))]
    if not isinstance(dataset, BaseSegDataset) or not any(isinstance(step, LoadAnnotations) for step in reading):
        return []

    def read(index: int) -> np.ndarray:
        results = dataset.get_data_info(index)
        for step in reading:
            results = step(results)
        return results["gt_seg_map"]

    where = Path(dataset.data_prefix.get("seg_map_path") or dataset.data_root or type(dataset).__name__)
    first = int(bool(dataset.reduce_zero_label))
    return look_at_masks(read, len(dataset), dataset.metainfo["classes"], str(where), first, training)
