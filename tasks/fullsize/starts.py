"""Models that runs start from, with random weights: what a configuration names as trained or converted elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.base.families import preset_family
from hf_sparseprior.base.files import whole_folder
from hf_sparseprior.images.model import build_model
from hf_sparseprior.images.processor import make_processor
from tasks.fullsize.configs import PaperRun

# Sections and keys that name a saved model.
PLACES = (
    *(("model", "pretrained"), ("model", "image_model"), ("encoder", "pretrained")),
    *(("distillation", "teacher"), ("token_labels", "teacher")),
)
MAPS_TEACHER = "models/lvvit_small"
SELF = "self"  # a teacher that is what the run starts from
# What folders of models are called, where that is not the name of a preset.
CALLED = {"vit_tiny": "deit_tiny", "vit_small": "deit_small", "vit_base": "deit_base"}


def named_models(config: Mapping[str, Any]) -> dict[str, str]:
    """{key of an override: folder} of the saved models that a configuration reads."""
    if "train_dataloader" in config:
        folder = config["model"]["backbone"].get("pretrained")
        return {"model.backbone.pretrained": folder} if folder else {}
    named = {f"{section}.{key}": config.get(section, {}).get(key) for section, key in PLACES}
    if config.get("token_labels", {}).get("path") and not named["token_labels.teacher"]:
        named["token_labels.teacher"] = MAPS_TEACHER  # or the maps would have to be there
    return {key: folder for key, folder in named.items() if folder and folder != SELF}


def model_of(folder: str, runs: Sequence[PaperRun]) -> dict[str, Any]:
    """The `model` section of what lies in a folder: of the run that writes it, else of the preset in its name.

    Raises:
        ValueError: if neither is known.
    """
    path = Path(folder)
    for run in runs:
        if path.name == "model" and run.config.get("trainer", {}).get("output_dir") == str(path.parent):
            model = dict(run.config["model"])
            start = model.pop("pretrained", None)
            return {**(model_of(start, runs) if start else {}), **model}
    name = path.parent.name if path.name == "model" else path.name
    if found := re.search(r"(deit3?|dino|lvvit|vit|swin|convit|iformer)_(tiny|small|medium|base|large|huge)", name):
        preset = CALLED.get(found[0], found[0])
        try:
            preset_family(preset)
        except ValueError:
            pass
        else:
            return {"preset": preset, "prior": "violin" if "violin" in name else "dense"}
    raise ValueError(f"{folder} is written by no configuration and has no preset in its name")


def make_start(folder: str, runs: Sequence[PaperRun], root: Path, classes: Sequence[str]) -> Path:
    """A saved classifier of the kind that `folder` holds, below `root`; made if it is not there."""
    place = root / folder.replace("/", "_")
    if not place.is_dir():
        torch.manual_seed(0)
        model = build_model(model_of(folder, runs), classes)
        with whole_folder(place) as scratch:
            model.save_pretrained(scratch)
            make_processor(model.config).save_pretrained(scratch)
    return place
