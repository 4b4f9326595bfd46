"""Configuration of a classification run: YAML, `base:` inheritance and key=value overrides.

base: digits.yaml#dense          another file or cell that this one changes, relative to it; or a list, later ones win
data: {...}                      fields of DataConfig
augmentation: {...}              fields of AugmentationConfig, what happens to training images
model: {...}                     fields of the family's config (SparsePriorViTConfig), plus `family`, `preset`,
                                 `pretrained` and `classifier_init_std`
tuning: {...}                    fields of TuningConfig, how much of the model is trained
token_labels: {...}              fields of TokenLabelConfig, label maps for the patch tokens
distillation: {...}              fields of DistillationConfig, a teacher and its losses
compression: {...}               fields of CompressionConfig, a search for a smaller model and its retraining
trainer: {...}                   fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_sparseprior.classification.compression import CompressionConfig, check_compression
from hf_sparseprior.classification.distillation import DistillationConfig, check_distillation
from hf_sparseprior.classification.token_label_config import TokenLabelConfig
from hf_sparseprior.classification.tuning import TuningConfig, check_tuning
from hf_sparseprior.images.augmentation import LOSS, AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.model import check_model
from hf_sparseprior.images.sections import SECTIONS, check_image_sections, field_names
from hf_sparseprior.runs.config import Config, check_known, load_sections
from hf_sparseprior.runs.labels import CLASSES, NUMBERS


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration file with `section.key=value` overrides, every key checked."""
    return load_sections(path, overrides, SECTIONS, check_config)


def check_config(config: Config) -> Config:
    """Refuse unknown keys of every section and bad values; a missing section is empty."""
    for section, kind in (
        ("tuning", TuningConfig),
        ("token_labels", TokenLabelConfig),
        ("distillation", DistillationConfig),
        ("compression", CompressionConfig),
    ):
        check_known(config.setdefault(section, {}), field_names(kind), f"section {section!r}")
    check_image_sections(config)
    check_tuning(config)
    if TokenLabelConfig(**config["token_labels"]).path and DataConfig(**config["data"]).streaming:
        raise ValueError("token_labels.path needs images in any order, not a stream; set data.streaming=false")
    balance, distilled = config["augmentation"].get("balance"), DistillationConfig(**config["distillation"]).teacher
    if balance == LOSS and (distilled or TokenLabelConfig(**config["token_labels"]).path):
        raise ValueError("augmentation.balance=loss weighs the labels' loss alone, not a teacher's; use sampling")
    _check_labels(config)
    _check_sizes(config)
    check_distillation(config)
    check_compression(config)
    check_model(config["model"])
    return config


def _check_sizes(config: Config) -> None:
    """Refuse targets of single patches where the grid of patches grows."""
    sizes = config["trainer"].get("progressive_sizes")
    asked = {
        "augmentation.mixtoken": AugmentationConfig(**config["augmentation"]).mixtoken,
        "token_labels.path": TokenLabelConfig(**config["token_labels"]).path,
    }
    for name, value in asked.items():
        if sizes is not None and value:
            raise ValueError(f"trainer.progressive_sizes={sizes} does not go with {name}={value}, which is of patches")


def _check_labels(config: Config) -> None:
    """Refuse what asks for one class an image where images have several labels, or numbers."""
    data, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    if data.labels == CLASSES:
        return
    asked = {
        "distillation.teacher": DistillationConfig(**config["distillation"]).teacher,
        "token_labels.path": TokenLabelConfig(**config["token_labels"]).path,
        "compression.method": config["compression"].get("method"),
        "augmentation.balance": augmentation.balance,
        "augmentation.label_smoothing": augmentation.label_smoothing,
    }
    if data.labels == NUMBERS:
        asked |= {f"augmentation.{name}": getattr(augmentation, name) for name in ("mixup", "cutmix", "mixtoken")}
    for name, value in asked.items():
        if value:
            raise ValueError(f"{name}={value} asks for one class an image, and data.labels is {data.labels}")
