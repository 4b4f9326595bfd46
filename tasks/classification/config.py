"""Configuration of a classification run: YAML, `base:` inheritance and key=value overrides.

base: digits.yaml#dense          another file or cell that this one changes, relative to it; or a list, later ones win
data: {...}                      fields of DataConfig
augmentation: {...}              fields of AugmentationConfig, what happens to training images
model: {...}                     fields of SparsePriorViTConfig, plus `preset`, `pretrained` and `classifier_init_std`
tuning: {...}                    fields of TuningConfig, how much of the model is trained
token_labels: {...}              fields of TokenLabelConfig, label maps for the patch tokens
distillation: {...}              fields of DistillationConfig, a teacher and its losses
trainer: {...}                   fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tasks.classification.distillation import DistillationConfig, check_distillation
from tasks.classification.token_label_config import TokenLabelConfig
from tasks.classification.tuning import TuningConfig, check_tuning
from tasks.common.config import Config, check_known, check_trainer, load_sections, trainer_keys
from tasks.common.images.augmentation import AugmentationConfig
from tasks.common.images.config import DataConfig
from tasks.common.images.model import MODEL_EXTRAS, check_classifier_init_std, check_model

SECTIONS = ("data", "augmentation", "model", "tuning", "distillation", "token_labels", "trainer")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration file with `section.key=value` overrides, every key checked."""
    return load_sections(path, overrides, SECTIONS, check_config)


def check_config(config: Config) -> Config:
    """Refuse unknown keys of every section and bad values; the model checks its own. A missing section is empty."""
    known = known_keys()
    for section in SECTIONS:
        check_known(config.setdefault(section, {}), known[section], f"section {section!r}")
    data = DataConfig(**config["data"])
    AugmentationConfig(**config["augmentation"])
    check_tuning(config)
    if TokenLabelConfig(**config["token_labels"]).path and data.streaming:
        raise ValueError("token_labels.path needs images in any order, not a stream; set data.streaming=false")
    check_distillation(config)
    check_classifier_init_std(config["model"])
    if "label_smoothing_factor" in config["trainer"]:
        raise ValueError("trainer.label_smoothing_factor does not go with mixup; use augmentation.label_smoothing")
    check_trainer(config["trainer"])
    check_model(config["model"])
    return config


def known_keys() -> dict[str, list[str]]:
    """Every key of every section."""
    from hf_sparseprior import SparsePriorViTConfig

    own = SparsePriorViTConfig.__annotations__
    return {
        "data": [field.name for field in fields(DataConfig)],
        "augmentation": [field.name for field in fields(AugmentationConfig)],
        "model": [*own, "out_features", "out_indices", *MODEL_EXTRAS],
        "tuning": [field.name for field in fields(TuningConfig)],
        "token_labels": [field.name for field in fields(TokenLabelConfig)],
        "distillation": [field.name for field in fields(DistillationConfig)],
        "trainer": trainer_keys(),
    }
