"""Detection data: COCO's layout, checked while it is read, and its metric."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from mmcv.ops import batched_nms
from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.evaluation import CocoMetric
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.registry import DATA_SAMPLERS, DATASETS, METRICS, MODELS, TRANSFORMS
from mmengine.dataset import DefaultSampler
from mmengine.structures import InstanceData
from torch import Tensor

from hf_sparseprior.cli.image_files import PassedOver, count_unlisted
from tasks.common.annotated_folders import check_are_there
from tasks.common.coco import annotation_damage, check_tables, look_at_objects
from tasks.common.mm.hooks import Draw
from tasks.common.mm.reading import ReadImage


class UnfitAnnotations(ValueError):
    """An annotation file whose parts do not fit each other, or the classes that are looked for."""


class CheckedCOCO(COCO):
    """pycocotools' index of an annotation file, which silently drops no annotation.

    One without `iscrowd` is no crowd.
    """

    def createIndex(self) -> None:
        """Index the file that was just read.

        Raises:
            UnfitAnnotations: for an annotation of an image or category that does not exist, and for what `check_tables`
                refuses.
        """
        try:
            check_tables(self.dataset)
        except ValueError as error:
            raise UnfitAnnotations(str(error)) from None
        for key, table in (("image_id", "images"), ("category_id", "categories")):
            known = {entry["id"] for entry in self.dataset[table]}
            for annotation in self.dataset["annotations"]:
                if annotation[key] not in known:
                    raise UnfitAnnotations(
                        f"annotation {annotation.get('id')} has {key} {annotation[key]!r}, which is not among {table}"
                    )
        for annotation in self.dataset["annotations"]:
            annotation.setdefault("iscrowd", 0)  # pycocotools' evaluation asks each for it
        super().createIndex()

    def get_cat_ids(self, cat_names: Sequence[str] = (), sup_names: Any = (), cat_ids: Any = ()) -> list[Any]:
        """Ids of categories, in the order of the file, which is that of `cat_names` too.

        Raises:
            UnfitAnnotations: for names that are not there, twice there or in another order. mm would count a class's
                boxes to another one.
        """
        found = super().get_cat_ids(list(cat_names), list(sup_names), list(cat_ids))
        names, given = [self.cats[key]["name"] for key in found], list(cat_names)
        if given and names != given:
            own = ", ".join(str(category["name"]) for category in self.dataset["categories"][:10])
            if sorted(names) == sorted(given):
                raise UnfitAnnotations(
                    f"has its categories in the order {own}, the classes are {', '.join(given[:10])}"
                )
            raise UnfitAnnotations(
                f"has {len(found)} of the {len(given)} classes {', '.join(given[:10])}; its categories are {own}"
            )
        return found


class NumberedCOCO(CheckedCOCO):
    """`CheckedCOCO` for an evaluation, where an annotation of the id 0 would count as not found."""

    def createIndex(self) -> None:
        """As `CheckedCOCO`."""
        for number, annotation in enumerate(self.dataset["annotations"], start=1):
            annotation["id"] = number
        super().createIndex()


@DATASETS.register_module()
class CheckedCocoDataset(CocoDataset):
    """mmdetection's COCO data set. One line says what is wrong with an annotation file, and names it.

    Raises:
        OSError: for a missing annotation file.
        ValueError: for an annotation file that is no JSON or not in COCO's layout, lacks classes or has them in
            another order, has no image to train on, or holds an annotation of an image or category that does not exist,
            or whose box or mask does not fit its image. Where the pipeline loads no masks, none have to be there.
    """

    COCOAPI = CheckedCOCO

    def load_data_list(self) -> list[dict]:
        """Read and check the annotation file. Returns one entry for each image."""
        self.raw: list[dict] = []
        if not os.path.isfile(self.ann_file):
            raise OSError(f"{self.ann_file} is not there; data_root={self.data_root!r} must hold COCO's layout")
        try:
            with redirect_stdout(io.StringIO()):  # pycocotools prints how long it reads
                entries = super().load_data_list()
        except UnfitAnnotations as error:
            joint = " " if str(error).startswith("has") else ": "
            raise ValueError(f"{self.ann_file}{joint}{error}") from None
        except (KeyError, TypeError, AttributeError, AssertionError, IndexError) as error:
            raise ValueError(f"{self.ann_file} is not COCO's layout ({type(error).__name__}: {error})") from None
        except ValueError as error:
            named = str(error).startswith(self.ann_file)
            raise ValueError(str(error) if named else f"{self.ann_file} is not readable ({error})") from None
        if not entries:
            raise ValueError(f"{self.ann_file} has no images")
        check_are_there(entry["img_path"] for entry in entries)
        self.passed_over = PassedOver()
        if folder := self.data_prefix.get("img"):
            listed = (entry["img_path"] for entry in entries)
            count_unlisted(folder, listed, os.path.basename(self.ann_file), self.passed_over)
        self._metainfo["ann_file"] = self.ann_file  # for the metric
        self.wrong, self.raw = self._look(), []
        return entries

    def _look(self) -> list[str]:
        """What looks wrong, one line each (`look_at_objects`), in images and objects of the classes."""
        names = dict(zip(self.cat_ids, self.metainfo["classes"], strict=True))
        content = {
            "images": [image["raw_img_info"] for image in self.raw],
            "annotations": [
                each for image in self.raw for each in image["raw_ann_info"] if each["category_id"] in names
            ],
            "categories": [{"id": key, "name": name} for key, name in names.items()],
        }
        return look_at_objects(content, self.ann_file, training=not self.test_mode)

    def parse_data_info(self, raw_data_info: dict) -> dict:
        """One image of the file as the pipeline takes it, after a check of its annotations."""
        self.raw.append(raw_data_info)
        image, masks = raw_data_info["raw_img_info"], loads_masks(self.pipeline.transforms)
        for annotation in raw_data_info["raw_ann_info"]:
            if damage := annotation_damage(annotation, image["height"], image["width"], masks):
                raise ValueError(f"{self.ann_file}: annotation {annotation.get('id')} of {image['file_name']} {damage}")
        return super().parse_data_info(raw_data_info)

    def filter_data(self) -> list[dict]:
        """The images that `filter_cfg` leaves; the others are counted."""
        found = super().filter_data()
        if not found:
            raise ValueError(f"{self.ann_file}: filter_cfg={dict(self.filter_cfg)} leaves none of its images")
        kept = {entry["img_path"] for entry in found}
        for path in (entry["img_path"] for entry in self.data_list if entry["img_path"] not in kept):
            self.passed_over.add("dropped by filter_cfg", path)
        return found


def look(dataset: Any, training: bool) -> list[str]:
    """What looks wrong with a built data set, one line each, if it is of the class that looks for it."""
    return list(getattr(dataset, "wrong", []))


def loads_masks(steps: Sequence[Any]) -> bool:
    """Whether a pipeline of mm loads masks."""
    inner = (way.transforms for step in steps for way in getattr(step, "subroutines", []))  # of TestTimeAug
    return any(getattr(step, "with_mask", False) for step in steps) or any(map(loads_masks, inner))


@TRANSFORMS.register_module()
class ReadListedImage(ReadImage):
    """`ReadImage` by the name that configurations of detection have for it."""


@DATA_SAMPLERS.register_module()
class NumberedEpochSampler(DefaultSampler):
    """mmengine's DefaultSampler with the number of each draw, for `SeedAugmentation` in loops over epochs."""

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__()):
            draw = Draw(index)
            draw.number = (self.epoch * self.num_samples + number) * self.world_size + self.rank
            draw.seed = self.seed
            yield draw


@MODELS.register_module()
class InstanceTTAModel(DetTTAModel):
    """mmdetection's DetTTAModel, which merges boxes alone and refuses detectors that find masks too.

    Here an object that is kept has the mask that was found with its box, mirrored back.
    """

    tta_cfg: Any

    def _merge_single_sample(self, data_samples: list[Any]) -> Any:
        """One prediction for an image, of those for its views."""
        found = [sample.pred_instances for sample in data_samples]
        boxes, scores = self.merge_aug_bboxes(
            [each.bboxes for each in found],
            [each.scores for each in found],
            [sample.metainfo for sample in data_samples],
        )
        if not len(boxes):
            return data_samples[0]
        labels = torch.cat([each.labels for each in found])
        scored, kept = batched_nms(boxes, scores, labels, self.tta_cfg.nms)
        scored, kept = scored[: self.tta_cfg.max_per_img], kept[: self.tta_cfg.max_per_img]
        merged = InstanceData(bboxes=scored[:, :-1], scores=scored[:, -1], labels=labels[kept])
        if "masks" in found[0]:
            masks = [(sample, mask) for sample, each in zip(data_samples, found, strict=True) for mask in each.masks]
            merged.masks = torch.stack([mirrored_back(*masks[index]) for index in kept.tolist()])
        data_samples[0].pred_instances = merged
        return data_samples[0]


def mirrored_back(sample: Any, mask: Tensor) -> Tensor:
    """A mask (height, width) that was found in a view, as it is in the image."""
    axes = {"horizontal": (-1,), "vertical": (-2,), "diagonal": (-1, -2)}
    return mask.flip(axes[sample.flip_direction]) if sample.flip else mask


@METRICS.register_module()
class QuietCocoMetric(CocoMetric):
    """mmdetection's COCO metric on the data set's own annotation file, without tables on the terminal.

    A model that detects nothing has AP 0. `by_class` has, after each evaluation, the AP of every class by kind
    (bbox_AP, segm_AP); None where the data has no object of the class.
    """

    _coco_api: Any
    metrics: list[str]
    by_class: dict[str, dict[str, float | None]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.metric_items is not None and "mAP" not in self.metric_items:
            raise ValueError(f"metric_items={self.metric_items!r} must hold mAP, by which runs are compared")

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Take the predictions of a batch."""
        if self._coco_api is None:
            file = self.dataset_meta["ann_file"]
            with redirect_stdout(io.StringIO()):
                self._coco_api = NumberedCOCO(file)
            unmasked = [one for one in self._coco_api.dataset["annotations"] if not one.get("segmentation")]
            if "segm" in self.metrics and unmasked:
                raise ValueError(f"{file}: {len(unmasked)} annotations have no segmentation, which metric='segm' needs")
        super().process(data_batch, data_samples)

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Metrics of all images, by name."""
        kinds, metrics, self.classwise = self.metrics, {}, True
        names = self.dataset_meta["classes"]
        self.by_class = {name: {} for name in names}
        try:
            for kind in kinds:  # alone, because mm calls a class's AP the same for boxes and masks
                self.metrics = [kind]
                with redirect_stdout(io.StringIO()):
                    found = super().compute_metrics(results)
                for name in names if kind in ("bbox", "segm") else ():
                    value = float(found.pop(f"{name}_precision", 0.0))
                    self.by_class[name][f"{kind}_AP"] = None if math.isnan(value) else value
                metrics.update(found)
        finally:
            self.metrics = kinds
        return {**{f"{name}_mAP": 0.0 for name in kinds if name in ("bbox", "segm")}, **metrics}
