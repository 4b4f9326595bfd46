"""What detection adds to a run of mmengine: the constant predictor it is compared with, and its picture."""

from __future__ import annotations

import io
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
from tasks.common.mm.pictures import draw_instances
from tasks.common.mm.reading import read_image
from tasks.common.mm.task import Task
from tasks.detection import registered  # noqa: F401
from tasks.detection.data import CheckedCOCO

SHOWN = 6  # images of the picture
MIN_SCORE = 0.3  # objects with lower scores are not drawn


def constant_metrics(config: Config) -> dict[str, Any]:
    """Metrics of the constant predictor of the training set on the test set, by the test evaluator itself."""
    train = DATASETS.build(config.train_dataloader.dataset)
    test = DATASETS.build(config.test_dataloader.dataset)
    with redirect_stdout(io.StringIO()):
        predictor = fit_constant(CheckedCOCO(train.ann_file), train.cat_ids)
    metric = METRICS.build(config.test_evaluator)
    metric.dataset_meta = test.metainfo
    for index in range(len(test)):
        image = test.get_data_info(index)
        shape = (image["height"], image["width"])
        instances = {name: torch.from_numpy(value) for name, value in predictor.predict(*shape).items()}
        metric.process({}, [{"img_id": image["img_id"], "ori_shape": shape, "pred_instances": instances}])
    return {f"test_{name}": float(value) for name, value in metric.evaluate(len(test)).items()}


@torch.no_grad()
def draw_predictions(model: Any, dataset: Any, path: Path) -> Path:
    """The first images of a data set with the true boxes and masks, and below them the predicted ones with scores."""
    model.eval()
    shown, classes = min(SHOWN, len(dataset)), dataset.metainfo["classes"]
    figure, axes = pyplot().subplots(2, shown, figsize=(2.6 * shown, 5.6), layout="constrained", squeeze=False)
    for column, index in zip(axes.T, range(shown), strict=True):
        sample = model.test_step(pseudo_collate([dataset[index]]))[0]
        image = read_image(sample.img_path)[..., ::-1]  # mm reads BGR
        truth, found = sample.gt_instances, sample.pred_instances
        found = found[found.scores >= MIN_SCORE].cpu().numpy()
        masks = truth.masks.masks if "masks" in truth else no_masks(truth, image)
        draw_instances(column[0], image, masks.astype(bool), np.asarray(truth.bboxes), truth.labels.numpy(), classes)
        masks = found.masks if "masks" in found else no_masks(found, image)
        draw_instances(column[1], image, masks, found.bboxes, found.labels, classes, found.scores)
    for axis, heading in zip(axes[:, 0], ("truth", f"predictions with scores of {MIN_SCORE} and more"), strict=True):
        axis.set_title(heading, fontsize=10, loc="left")
    return save(figure, path)


def no_masks(instances: Any, image: np.ndarray) -> np.ndarray:
    """An empty mask for each object of an image (height, width, 3): bool (objects, height, width)."""
    return np.zeros((len(instances), *image.shape[:2]), dtype=bool)


DETECTION = Task("detection", draw_predictions, constant_metrics, "test_coco/bbox_mAP", ("test_coco/segm_mAP",))
