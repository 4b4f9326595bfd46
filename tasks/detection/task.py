"""What detection adds to a run of mmengine: the constant predictor it is compared with, and its picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.registry import DATASETS, METRICS
from mmengine.config import Config
from mmengine.dataset import pseudo_collate

from hf_sparseprior.analysis.pictures import pyplot, save
from tasks.common.coco_baseline import fit_constant
from tasks.common.mm.config import compared_metric
from tasks.common.mm.pictures import draw_instances
from tasks.common.mm.reading import read_image
from tasks.common.mm.task import Task
from tasks.detection import registered  # noqa: F401
from tasks.detection.data import CheckedCOCO, look

SHOWN = 6  # images of the picture
MIN_SCORE = 0.3  # objects with lower scores are not drawn


def constant_metrics(config: Config) -> dict[str, Any]:
    """Metrics of the constant predictor of the training set on the test set, by the test evaluator itself."""
    train = DATASETS.build(config.train_dataloader.dataset)
    test = DATASETS.build(config.test_dataloader.dataset)
    with redirect_stdout(io.StringIO()):
        predictor = fit_constant(CheckedCOCO(train.ann_file), train.cat_ids)
    metric = compared_metric(config, METRICS, "bbox")
    metric.dataset_meta = test.metainfo
    for index in range(len(test)):
        image = test.get_data_info(index)
        shape = (image["height"], image["width"])
        instances = {name: torch.from_numpy(value) for name, value in predictor.predict(*shape).items()}
        metric.process({}, [{"img_id": image["img_id"], "ori_shape": shape, "pred_instances": instances}])
    return {f"test_{name}": float(value) for name, value in metric.evaluate(len(test)).items()}


@torch.no_grad()
def draw_predictions(models: Mapping[str, Any], dataset: Any, path: Path) -> Path:
    """The first images of a data set with the true boxes and masks, and below them those that each model predicts, with
    scores.
    """
    shown, classes = min(SHOWN, len(dataset)), dataset.metainfo["classes"]
    rows = 1 + len(models)
    figure, axes = pyplot().subplots(
        rows, shown, figsize=(2.6 * shown, 2.8 * rows), layout="constrained", squeeze=False
    )
    for column, index in zip(axes.T, range(shown), strict=True):
        samples = [model.eval().test_step(pseudo_collate([dataset[index]]))[0] for model in models.values()]
        image = read_image(samples[0].img_path)[..., ::-1]  # mm reads BGR
        truth = samples[0].gt_instances
        masks = truth.masks.masks if "masks" in truth else no_masks(truth, image)
        draw_instances(column[0], image, masks.astype(bool), np.asarray(truth.bboxes), truth.labels.numpy(), classes)
        for axis, sample in zip(column[1:], samples, strict=True):
            found = sample.pred_instances[sample.pred_instances.scores >= MIN_SCORE].cpu().numpy()
            masks = found.masks if "masks" in found else no_masks(found, image)
            draw_instances(axis, image, masks, found.bboxes, found.labels, classes, found.scores)
    headings = ("truth", *(f"{heading}, scores of {MIN_SCORE} and more" for heading in models))
    for axis, heading in zip(axes[:, 0], headings, strict=True):
        axis.set_title(heading, fontsize=10, loc="left")
    return save(figure, path)


def no_masks(instances: Any, image: np.ndarray) -> np.ndarray:
    """An empty mask for each object of an image (height, width, 3): bool (objects, height, width)."""
    return np.zeros((len(instances), *image.shape[:2]), dtype=bool)


DETECTION = Task("detection", draw_predictions, constant_metrics, "test_coco/bbox_mAP", ("test_coco/segm_mAP",), look)
