"""What segmentation adds to a run of mmengine: the constant predictor it is compared with, and its picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmseg.registry import DATASETS, METRICS

from hf_sparseprior.analysis.pictures import pyplot, save
from tasks.common.annotated_folders import IGNORED
from tasks.common.mm.config import compared_metric
from tasks.common.mm.task import Task
from tasks.segmentation import registered  # noqa: F401
from tasks.segmentation.data import look

SHOWN = 6  # images of the picture


def class_areas(dataset: Any) -> np.ndarray:
    """Labelled pixels of each class over a data set, int64 (classes,)."""
    counts = np.zeros(len(dataset.metainfo["classes"]), dtype=np.int64)
    for index in range(len(dataset)):
        labels = dataset[index]["data_samples"].gt_sem_seg.data.flatten()
        counts += torch.bincount(labels[labels != IGNORED], minlength=len(counts)).numpy()
    return counts


def constant_predictor(config: Config) -> dict[str, Any]:
    """The class that, predicted everywhere, has the highest mIoU on the test set, by the test evaluator itself.

    Returns:
        test_mIoU, a fraction, and the class.

    Raises:
        ValueError: if the test evaluator does not measure mIoU.
    """
    dataset = DATASETS.build(config.test_dataloader.dataset)
    metric = compared_metric(config, METRICS, "mIoU")
    metric.dataset_meta = dataset.metainfo
    areas = torch.from_numpy(class_areas(dataset)).float()
    best: dict[str, Any] = {"test_mIoU": -1.0}
    for index, name in enumerate(dataset.metainfo["classes"]):
        predicted = torch.zeros_like(areas)
        predicted[index] = areas.sum()
        hit = torch.zeros_like(areas)
        hit[index] = areas[index]
        score = float(metric.compute_metrics([(hit, predicted + areas - hit, predicted, areas)])["mIoU"]) / 100
        if score > best["test_mIoU"]:
            best = {"test_mIoU": score, "class": name}
    return best


@torch.no_grad()
def draw_predictions(models: Mapping[str, Any], dataset: Any, path: Path) -> Path:
    """The first images of a data set: as they are, with the true classes, and with those that each model predicts."""
    plt, shown = pyplot(), min(SHOWN, len(dataset))
    classes, palette = dataset.metainfo["classes"], np.array(dataset.metainfo["palette"], dtype=np.uint8)
    columns = 2 + len(models)
    figure, axes = plt.subplots(
        shown, columns, figsize=(2.5 * columns, 2.35 * shown), layout="constrained", squeeze=False
    )
    seen: set[int] = set()
    for row, index in zip(axes, range(shown), strict=True):
        item = dataset[index]
        samples = [model.eval().test_step(pseudo_collate([item]))[0] for model in models.values()]
        image = item["inputs"].permute(1, 2, 0).numpy()[..., ::-1]  # mm reads BGR
        maps = [samples[0].gt_sem_seg, *(sample.pred_sem_seg for sample in samples)]
        row[0].imshow(image)
        for axis, part in zip(row[1:], maps, strict=True):
            labels = part.data.squeeze(0).cpu().numpy().astype(np.int64)  # floats of a head with one output
            colours = np.full((*labels.shape, 3), 255, dtype=np.uint8)
            known = labels != IGNORED
            colours[known] = palette[labels[known]]
            axis.imshow(colours, interpolation="nearest")
            seen.update(np.unique(labels[known]).tolist())
        for axis in row:
            axis.set_axis_off()
    for axis, heading in zip(axes[0], ("image", "truth", *models), strict=True):
        axis.set_title(heading, fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, color=palette[index] / 255, label=classes[index]) for index in sorted(seen)]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return save(figure, path)


SEGMENTATION = Task("segmentation", draw_predictions, constant_predictor, "test_mIoU", look=look, in_percent=True)
