"""Test-time augmentation by the frameworks' own models: images of several sizes, mirrored, and what is found merged."""

from __future__ import annotations

import copy
from typing import Any

from mmengine.config import Config, ConfigDict

RATIOS = (0.75, 1.0, 1.25)  # sides of the images
MODELS = {"mmseg": "SegTTAModel", "mmdet": "InstanceTTAModel"}  # by default_scope


def with_tta(config: Config) -> Config:
    """A copy of a config whose test looks at each image several times, as mm's `tools/test.py --tta` does.

    `tta_model` and `tta_pipeline` are the config's or, where it has none, three sizes, each mirrored too.

    Raises:
        ValueError: for a framework that cannot.
    """
    scope = config.get("default_scope")
    if scope not in MODELS:
        raise ValueError(f"--tta is for default_scope {' or '.join(MODELS)}, not {scope!r}")
    config = copy.deepcopy(config)
    merged = {"type": MODELS[scope], **({"tta_cfg": merging(config.model)} if scope == "mmdet" else {})}
    dataset = config.test_dataloader.dataset
    dataset.pipeline = config.get("tta_pipeline") or views(dataset.pipeline)
    config.model = {**(config.get("tta_model") or merged), "module": config.model}
    return config


def views(pipeline: list[Any]) -> list[Any]:
    """A test pipeline that gives RATIOS of each image, each as it is and mirrored. Annotations stay as they are.

    Raises:
        ValueError: for a pipeline that resizes by other means than one Resize to a scale.
    """
    steps = [ConfigDict(copy.deepcopy(step)) for step in pipeline]
    resizes = [step for step in steps if step.type.endswith("Resize")]
    if len(resizes) > 1 or any(step.type != "Resize" or "scale" not in step for step in resizes):
        raise ValueError("--tta needs a tta_pipeline in the config, whose test pipeline has another step than Resize")
    sizes = [_resize(resizes[0] if resizes else None, ratio) for ratio in RATIOS]
    read, packed = steps[0], steps[-1]
    annotations = [step for step in steps[1:-1] if step not in resizes]
    if "meta_keys" in packed:
        packed.meta_keys = tuple(dict.fromkeys([*packed.meta_keys, "flip", "flip_direction"]))
    mirrored = [{"type": "RandomFlip", "prob": share} for share in (0.0, 1.0)]
    transforms = [sizes, mirrored, *([step] for step in annotations), [packed]]
    return [read, ConfigDict(type="TestTimeAug", transforms=transforms)]


def _resize(step: Any, ratio: float) -> dict[str, Any]:
    if step is None:
        return {"type": "Resize", "scale_factor": ratio, "keep_ratio": True}
    sides = step.scale if isinstance(step.scale, (list, tuple)) else (step.scale, step.scale)
    return {**step, "scale": tuple(max(1, round(side * ratio)) for side in sides)}


def merging(model: Any) -> dict[str, Any]:
    """How boxes of several views are merged: as the detector itself does it."""
    given = model.get("test_cfg") or {}
    given = given.get("rcnn") or given
    nms = dict(given.get("nms") or {"type": "nms", "iou_threshold": 0.5})
    return {"nms": nms, "max_per_img": given.get("max_per_img", 100)}
