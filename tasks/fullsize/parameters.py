"""How many parameters the models of all configurations have: built on the meta device, which takes no memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_sparseprior.images.model import MODEL_EXTRAS
from hf_sparseprior.images.vtab_tasks import TASKS
from hf_sparseprior.runs.models import section_family
from tasks.fullsize.commands import ROOT
from tasks.fullsize.configs import PaperRun
from tasks.fullsize.fixtures import VTAB_TASK
from tasks.fullsize.starts import model_of

FILE = Path(__file__).with_name("parameters.json")  # by name of a configuration
CLASSES = {"imagenet": 1000, "tiny_imagenet": 200, "cifar10": 10, "cifar100": 100, "vtab": TASKS[VTAB_TASK].classes}
VIDEO = "video"
VIDEO_CLASSES = {"smarthome": 31, "nucla": 10, "ntu": 60}


def parameter_counts(runs: Sequence[PaperRun]) -> dict[str, int]:
    """Parameters of the model that each run trains, without those that its tuning adds, by name of the run."""
    counts: dict[str, int] = {}
    known: dict[str, int] = {}
    for run in runs:
        key = json.dumps([run.task, _described(run, runs)], sort_keys=True, default=str)
        if key not in known:
            with torch.device("meta"):
                known[key] = sum(parameter.numel() for parameter in _built(run, _described(run, runs)).parameters())
        counts[run.name] = known[key]
    return counts


def _described(run: PaperRun, runs: Sequence[PaperRun]) -> dict[str, Any]:
    """All that the number of parameters depends on."""
    if run.task in ("segmentation", "detection"):
        return dict(run.config["model"])
    if run.task == "robotics":
        return {key: run.config[key] for key in ("policy", "encoder")}
    model = dict(run.config["model"])
    if start := model.pop("pretrained", None):
        model = {**model_of(start, runs), **model}
    if run.task == "pretraining":
        return model
    if run.task == VIDEO:
        names = [name for name in VIDEO_CLASSES if name in str(run.config["data"].get("path"))]
        if start := model.pop("image_model", None):
            model["image_model"] = model_of(start, runs)
        return {**model, "classes": VIDEO_CLASSES[names[0]]}
    return {**model, "classes": CLASSES[run.source]}


def _built(run: PaperRun, model: dict[str, Any]) -> nn.Module:
    """The model, on the device of the context."""
    if run.task in ("segmentation", "detection"):
        return _mm(run)
    if run.task == "robotics":
        return _policy(run)
    if run.task == "pretraining":
        return _of_family(model, "base")  # without DINO's heads, which no saved model has
    classes = model.pop("classes")
    if run.task == VIDEO:
        return _video(model, classes)
    return _of_family({**model, "num_labels": classes}, "image_classifier")


def _of_family(model: Mapping[str, Any], kind: str) -> nn.Module:
    options = {key: value for key, value in model.items() if key not in MODEL_EXTRAS}
    family = section_family(model)
    return getattr(family, kind)(family.make_config(model.get("preset"), **options))


def _video(model: dict[str, Any], classes: int) -> nn.Module:
    from hf_sparseprior import SparsePriorTimesformerConfig, SparsePriorTimesformerForVideoClassification

    extras = import_module(f"tasks.{VIDEO}.config").MODEL_EXTRAS
    options = {key: value for key, value in model.items() if key not in extras} | {"num_labels": classes}
    if start := model.get("image_model"):
        image_model = _of_family(start, "image_classifier")
        return SparsePriorTimesformerForVideoClassification.from_image_model(image_model, **options)
    preset = model.get("preset")
    make = partial(SparsePriorTimesformerConfig.from_preset, preset) if preset else SparsePriorTimesformerConfig
    return SparsePriorTimesformerForVideoClassification(make(**options))


def _policy(run: PaperRun) -> nn.Module:
    names = ("config", "policy", "normalizer")
    config, policy, normalizer = (import_module(f"tasks.{run.task}.{name}") for name in names)
    _, settings, _ = config.check_config({key: dict(value) for key, value in run.config.items()})
    return policy.CrosswayPolicy(settings, normalizer.Normalizer({}, {}))


def _mm(run: PaperRun) -> nn.Module:
    from mmengine.registry import MODELS, init_default_scope

    from tasks.common.mm.config import load_config

    config = load_config(run.task, ROOT / run.name)
    init_default_scope(config.default_scope)
    return MODELS.build(config.model)
