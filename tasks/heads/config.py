"""Configuration of a run with a head of transformers: YAML, `base:` inheritance and key=value overrides.

data: {...}      fields of DataConfig
model: {...}     fields of the backbone's config (SparsePriorViTConfig), plus `family`, `preset` and `pretrained`
head: {...}      `name`, one of tasks.heads.kinds.KINDS, and fields of its config in transformers (UperNetConfig, ...)
trainer: {...}   fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hf_sparseprior.base.checks import check_within
from hf_sparseprior.images.sections import field_names
from hf_sparseprior.models import heads
from hf_sparseprior.models.pretrained import check_saved_folder
from hf_sparseprior.runs.config import Config, check_known, check_trainer, trainer_keys
from hf_sparseprior.runs.models import FAMILY_KEYS, section_family
from tasks.common.mm.scenes import SceneSettings
from tasks.heads.kinds import IGNORED, KINDS

SECTIONS = ("data", "model", "head", "trainer")
# Keys of the Trainer that would do nothing here, or something else than their name says.
TAKEN = {
    "layer_decay": "nothing: a head has layers of its own",
    "label_smoothing_factor": "nothing: heads of transformers have losses of their own",
    "progressive_sizes": "nothing: annotations are of the pixels of whole images",
}


@dataclass
class DataConfig:
    """Where images and annotations come from.

    path: a folder with images/SPLIT/*, for segmentation annotations/SPLIT/*.png and classes.txt (ADE20K's layout: 0 is
        unlabelled, 1 the first line of classes.txt), for objects annotations/instances_SPLIT.json (COCO's layout);
        SPLIT is training, validation and test.
    scenes: settings of `tasks.common.mm.scenes` (training, validation, test, size, seed), by which the folder is made
        if it is missing; null: it is there.
    horizontal_flip: probability with which a training image is mirrored.
    """

    path: str | None = None
    scenes: dict[str, int] | None = None
    horizontal_flip: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"data.path={self.path!r} must be the folder of the images and annotations")
        check_within("data.horizontal_flip", self.horizontal_flip, 0, 1, "a probability from 0 to 1")
        if self.scenes is not None:
            if not isinstance(self.scenes, dict):
                raise ValueError(f"data.scenes={self.scenes!r} must hold keys and values, or be null")
            check_known(self.scenes, [field.name for field in fields(SceneSettings)], "data.scenes")
            self.scene_settings()

    def scene_settings(self) -> SceneSettings:
        """How the scenes are made."""
        return SceneSettings(**(self.scenes or {}))


def check_config(config: Config) -> Config:
    """Refuse unknown keys of every section and bad values; a missing section is empty."""
    for section in SECTIONS:
        config.setdefault(section, {})
    head = config["head"]
    if head.get("name") not in KINDS:
        raise ValueError(f"head.name={head.get('name')!r} must be one of {', '.join(KINDS)}")
    known = {
        "data": field_names(DataConfig),
        "model": [*section_family(config["model"]).config_fields, "out_features", "out_indices", *FAMILY_KEYS],
        "head": ["name", *(field.name for field in fields(heads.HEADS[head["name"]].config_class))],
        "trainer": trainer_keys(),
    }
    for section, keys in known.items():
        check_known(config[section], keys, f"section {section!r}")
    DataConfig(**config["data"])
    trainer = config["trainer"]
    check_trainer(trainer)
    for key, instead in TAKEN.items():
        if trainer.get(key) not in (None, 0, 0.0, 1.0):
            raise ValueError(f"trainer.{key}={trainer[key]!r} is not for heads; use {instead}")
    if trainer.get("metric_for_best_model") not in (None, "loss", "eval_loss"):
        raise ValueError(f"trainer.metric_for_best_model={trainer['metric_for_best_model']!r} must be loss")
    if (ignored := head.get("loss_ignore_index", IGNORED)) != IGNORED:
        raise ValueError(f"head.loss_ignore_index={ignored!r} must be {IGNORED}, the label of pixels without a class")
    if not config["model"].get("pretrained"):
        head_config(config, ["a", "b"])
    return config


def backbone_config(model: dict[str, Any]) -> Any:
    """The config of the backbone that a `model` section describes, from scratch or of a saved folder."""
    options = {key: value for key, value in model.items() if key not in FAMILY_KEYS}
    preset, pretrained = model.get("preset"), model.get("pretrained")
    family = section_family(model)
    if preset and pretrained:
        raise ValueError(f"model.preset={preset!r} and model.pretrained={pretrained!r} exclude each other")
    if not pretrained:
        return family.make_config(preset, **options)
    check_saved_folder(pretrained, "model.pretrained")
    config_class: Any = family.config_class
    saved, _ = config_class.get_config_dict(pretrained)
    maps = {"out_features": None, "out_indices": None}
    if "map_scales" in saved:
        maps["map_scales"] = None
    return config_class.from_dict({**saved, **maps, **options})


def head_config(config: Config, classes: Sequence[str]) -> Any:
    """The head's config of a run whose classes are these."""
    options = {key: value for key, value in config["head"].items() if key != "name"}
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
    try:
        return heads.head_config(config["head"]["name"], backbone_config(config["model"]), **names, **options)
    except TypeError as error:
        raise ValueError(f"head: {error}") from None
