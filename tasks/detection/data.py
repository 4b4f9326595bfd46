"""Detection data: COCO's layout, checked while it is read, and its metric."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.evaluation import CocoMetric
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.registry import DATA_SAMPLERS, DATASETS, METRICS, MODELS, TRANSFORMS
from mmengine.dataset import DefaultSampler

from tasks.common.coco import annotation_damage
from tasks.common.mm.hooks import Draw
from tasks.common.mm.reading import ReadImage


class DanglingReference(ValueError):
    """An annotation names an image or a category that is not in the file."""


class CheckedCOCO(COCO):
    """pycocotools' index of an annotation file, which silently drops no annotation."""

    def createIndex(self) -> None:
        """Index the file that was just read.

        Raises:
            DanglingReference: for an annotation of an image or category that does not exist.
        """
        for key, table in (("image_id", "images"), ("category_id", "categories")):
            known = {entry["id"] for entry in self.dataset[table]}
            for annotation in self.dataset["annotations"]:
                if annotation[key] not in known:
                    raise DanglingReference(
                        f"annotation {annotation.get('id')} has {key} {annotation[key]!r}, which is not among {table}"
                    )
        super().createIndex()


@DATASETS.register_module()
class CheckedCocoDataset(CocoDataset):
    """mmdetection's COCO data set. One line says what is wrong with an annotation file, and names it.

    Raises:
        OSError: for a missing annotation file.
        ValueError: for an annotation file that is no JSON or not in COCO's layout, lacks classes, or holds an
            annotation of an image or category that does not exist, or whose box or mask does not fit its image.
    """

    COCOAPI = CheckedCOCO

    def load_data_list(self) -> list[dict]:
        """Read and check the annotation file. Returns one entry for each image."""
        if not os.path.isfile(self.ann_file):
            raise OSError(f"{self.ann_file} is not there; data_root={self.data_root!r} must hold COCO's layout")
        try:
            with redirect_stdout(io.StringIO()):  # pycocotools prints how long it reads
                entries = super().load_data_list()
        except DanglingReference as error:
            raise ValueError(f"{self.ann_file}: {error}") from None
        except (KeyError, TypeError, AttributeError, AssertionError, IndexError) as error:
            raise ValueError(f"{self.ann_file} is not COCO's layout ({type(error).__name__}: {error})") from None
        except ValueError as error:
            named = str(error).startswith(self.ann_file)
            raise ValueError(str(error) if named else f"{self.ann_file} is not readable ({error})") from None
        if len(self.cat_ids) != len(self.metainfo["classes"]):
            raise ValueError(
                f"{self.ann_file} has {len(self.cat_ids)} of the {len(self.metainfo['classes'])} classes "
                f"{', '.join(self.metainfo['classes'][:10])}"
            )
        if not entries:
            raise ValueError(f"{self.ann_file} has no images")
        self._metainfo["ann_file"] = self.ann_file  # for the metric
        return entries

    def parse_data_info(self, raw_data_info: dict) -> dict:
        """One image of the file as the pipeline takes it, after a check of its annotations."""
        image = raw_data_info["raw_img_info"]
        for annotation in raw_data_info["raw_ann_info"]:
            if damage := annotation_damage(annotation, image["height"], image["width"]):
                raise ValueError(f"{self.ann_file}: annotation {annotation.get('id')} of {image['file_name']} {damage}")
        return super().parse_data_info(raw_data_info)


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
class BoxTTAModel(DetTTAModel):
    """mmdetection's DetTTAModel, which refuses detectors that find masks too: here the boxes alone are merged."""

    def merge_preds(self, data_samples_list: list[list[Any]]) -> list[Any]:
        """One prediction for each image, of the predictions for its views."""
        for sample in (sample for views in data_samples_list for sample in views):
            if "masks" in sample.pred_instances:
                del sample.pred_instances.masks
        return super().merge_preds(data_samples_list)


@METRICS.register_module()
class QuietCocoMetric(CocoMetric):
    """mmdetection's COCO metric on the data set's own annotation file, without tables on the terminal.

    A model that detects nothing has AP 0. `by_class` has, after each evaluation, the AP of every class by kind
    (bbox_AP, segm_AP); None where the data has no object of the class.
    """

    _coco_api: Any
    metrics: list[str]
    by_class: dict[str, dict[str, float | None]]

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Take the predictions of a batch."""
        if self._coco_api is None:
            with redirect_stdout(io.StringIO()):
                self._coco_api = COCO(self.dataset_meta["ann_file"])
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
        return {**{f"{name}_mAP": 0.0 for name in kinds}, **metrics}
