"""Configurations of image classifiers, as far as more than one task reads them.

hf_sparseprior/classification/config.py says what each section holds, and checks the sections that only its runs need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_sparseprior.images.augmentation import AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.model import check_classifier_init_std, model_keys
from hf_sparseprior.runs.config import (
    Config,
    apply_overrides,
    check_known,
    check_trainer,
    load_sections,
    read_layers,
    trainer_keys,
)
from hf_sparseprior.runs.labels import CLASSES, METRICS
from hf_sparseprior.runs.run_folder import stored_config

SECTIONS = ("data", "augmentation", "model", "tuning", "distillation", "token_labels", "compression", "trainer")


def load_image_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """All sections of a configuration file with `section.key=value` overrides; those of images are checked.

    Raises:
        ValueError: for unknown keys (the message has the nearest known one), bad values, or text that is not YAML.
        OSError: for a missing file.
    """
    return load_sections(path, overrides, SECTIONS, check_image_sections)


def check_image_sections(config: Config) -> Config:
    """Refuse unknown keys and bad values of `data`, `augmentation`, `model` and `trainer`; a missing one is empty.

    The model checks the fields of its own config when it is built.
    """
    known = {
        "data": field_names(DataConfig),
        "augmentation": field_names(AugmentationConfig),
        "model": model_keys(config.get("model") or {}),
        "trainer": trainer_keys(),
    }
    for section, keys in known.items():
        check_known(config.setdefault(section, {}), keys, f"section {section!r}")
    labels = DataConfig(**config["data"]).labels
    AugmentationConfig(**config["augmentation"])
    check_classifier_init_std(config["model"])
    if "label_smoothing_factor" in config["trainer"]:
        raise ValueError("trainer.label_smoothing_factor does not go with mixup; use augmentation.label_smoothing")
    check_trainer(config["trainer"], METRICS[labels])
    return config


def load_data_section(model: Path, file: str | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The `data` section of a configuration file or, without one, of the run that saved a model.

    Args:
        model: folder of the model.
        file: YAML.
        overrides: `data.key=value`.

    Raises:
        ValueError: for unknown keys and bad values.
        OSError: for a missing file, and for a model that is not in a run's folder.
    """
    config = read_layers(Path(file), SECTIONS) if file else stored_config(model)
    own = {"data": dict(config.get("data", {}))}
    apply_overrides(own, overrides, sections=("data",))
    check_known(own["data"], field_names(DataConfig), "section 'data'")
    if (labels := DataConfig(**own["data"]).labels) != CLASSES:
        raise ValueError(f"data.labels={labels!r} is not for analyses, which ask for one class an image")
    return own["data"]


def field_names(kind: type) -> list[str]:
    """The keys of a section that holds the fields of a dataclass."""
    return [field.name for field in fields(kind)]
