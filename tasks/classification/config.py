"""Configuration of a classification run: YAML, `base:` inheritance and key=value overrides.

base: digits_vit_dense.yaml      another file that this one changes, relative to it; or a list of files, later ones win
data: {...}                      fields of DataConfig
augmentation: {...}              fields of AugmentationConfig, what happens to training images
model: {...}                     fields of SparsePriorViTConfig, plus `preset`, `pretrained` and `classifier_init_std`
tuning: {...}                    fields of TuningConfig, how much of the model is trained
token_labels: {...}              fields of TokenLabelConfig, label maps for the patch tokens
distillation: {...}              fields of DistillationConfig, a teacher and its losses
trainer: {...}                   fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from tasks.classification.augmentation import AugmentationConfig
from tasks.classification.distillation import DistillationConfig, check_distillation
from tasks.classification.token_label_config import TokenLabelConfig
from tasks.classification.tuning import TuningConfig, check_tuning
from tasks.classification.vtab.tasks import STAGES, TASKS

SECTIONS = ("data", "augmentation", "model", "tuning", "distillation", "token_labels", "trainer")
MODEL_EXTRAS = ("preset", "pretrained", "classifier_init_std")


SOURCES = (
    "digits",
    "imagefolder",
    "parquet",
    "arrow",
    "hub",
    "csv",
    "cifar10",
    "cifar100",
    "tiny_imagenet",
    "imagenet",
    "fashion_mnist",
    "mnist",
    "vtab",
)
SPLITS = ("train", "validation", "test")
TABLES = ("parquet", "arrow", "hub")
# Fields that mean nothing to other sources than these.
SOURCES_OF = {
    "config_name": ("hub",),
    "revision": ("hub",),
    "splits": ("imagefolder", "csv", *TABLES),
    "image_column": ("csv", *TABLES),
    "label_column": ("csv", "cifar100", *TABLES),
    "classes": ("csv", *TABLES),
    "streaming": TABLES,
    "task": ("vtab",),
    "stage": ("vtab",),
}


@dataclass
class DataConfig:
    """Where images come from. Which files each source reads is in tasks/classification/README.md.

    source: one of `SOURCES`.
    path: folder, file or (hub) name of the data set; digits needs none, fashion_mnist takes Debian's package without.
    config_name, revision: of a hub data set: its configuration, and a branch, tag or commit.
    splits: {train: NAME, validation: NAME, test: NAME}, the source's own names (folders, beginnings of files) where
        they are not the usual ones or not all wanted; null: the usual ones.
    image_column, label_column: of tables and CSV files; null: the only one that can be meant. cifar100: label_column
        fine (null) or coarse.
    classes: file of class names, one a line, in the order of the labels, for tables that do not say them.
    task, stage: of vtab: one of its 19 tasks, and "selection" (train on train800, judge on val200) or "final" (train on
        train800val200, test on test). In "selection" val200 is both validation and test, so a test accuracy is
        optimistic where validation chose the epoch; in "final" nothing may be chosen.
    published_validation: "test" or "validation": what the published val of tiny_imagenet and imagenet is. Papers report
        accuracy on it, so it is our test, looked at once, and our validation is cut from the training images.
    validation_fraction, test_fraction: cut, stratified, from the training images where the source has no such split.
    split_seed: of that cut and of the limits; runs of different `trainer.seed` share the split.
    limit_train, limit_validation, limit_test: use this many images, of every class as many, drawn by split_seed after
        the cut; a smaller limit is part of a larger one. null: all.
    corrupt: "fatal", "skip" or "unchecked": images that cannot be read end the run before it begins, are left out, or
        are not looked for, so that the first one ends the run when it is met.
    streaming: read images as they are needed, for sets too large for a disk, shuffled in training within shards and a
        buffer; all splits must be there.
    cache: keep images in memory, ready for the model or, where they are augmented, decoded; null: below 1 GiB.
    """

    source: str = "digits"
    path: str | None = None
    config_name: str | None = None
    revision: str | None = None
    splits: dict[str, str] | None = None
    image_column: str | None = None
    label_column: str | None = None
    classes: str | None = None
    task: str | None = None
    stage: str | None = None
    published_validation: str = "test"
    validation_fraction: float = 0.2
    test_fraction: float = 0.2
    split_seed: int = 0
    limit_train: int | None = None
    limit_validation: int | None = None
    limit_test: int | None = None
    corrupt: str = "fatal"
    streaming: bool = False
    cache: bool | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        self._check_source()
        self._check_splits()
        choices: dict[str, tuple] = {
            "published_validation": ("test", "validation"),
            "corrupt": ("fatal", "skip", "unchecked"),
            "task": (*TASKS, None),
            "stage": (*STAGES, None),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"data.{name}={getattr(self, name)!r} must be one of {', '.join(filter(None, allowed))}"
                )
        if not isinstance(self.streaming, bool):
            raise ValueError(f"data.streaming={self.streaming!r} must be true or false")
        if self.cache not in (None, True, False):
            raise ValueError(f"data.cache={self.cache!r} must be true, false or null")

    def _check_source(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source!r} must be one of {', '.join(SOURCES)}")
        if self.source not in ("digits", "fashion_mnist") and not self.path:
            raise ValueError(f"data.source={self.source!r} needs data.path")
        for name in ("path", "config_name", "revision", "image_column", "label_column", "classes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"data.{name}={value!r} must be text")
        for name, sources in SOURCES_OF.items():
            if getattr(self, name) and self.source not in sources:
                raise ValueError(
                    f"data.{name}={getattr(self, name)!r} is for data.source {', '.join(sources)}, not {self.source}"
                )

    def _check_splits(self) -> None:
        names = self.splits
        if names is not None and not (
            isinstance(names, dict)
            and "train" in names
            and set(names) <= set(SPLITS)
            and all(isinstance(name, str) and name for name in names.values())
        ):
            raise ValueError(f"data.splits={names!r} must be like {{train: NAME, validation: NAME, test: NAME}}")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
                raise ValueError(f"data.{name}={value!r} must be a number between 0 and 1")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} and data.test_fraction={self.test_fraction} "
                "leave no training images"
            )
        if isinstance(self.split_seed, bool) or not isinstance(self.split_seed, int) or self.split_seed < 0:
            raise ValueError(f"data.split_seed={self.split_seed!r} must be an integer of 0 or more")
        for split in SPLITS:
            limit = getattr(self, f"limit_{split}")
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ValueError(f"data.limit_{split}={limit!r} must be an integer of 1 or more, or null")
            if limit is not None and self.streaming:
                raise ValueError(f"data.limit_{split}={limit} cannot be balanced in a stream; set data.streaming=false")


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads 1e-3 as a number (YAML 1.1 wants 1.0e-3)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_value(text: str) -> Any:
    """A value of a key=value override, read as YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not a YAML value: {str(error).splitlines()[0]}") from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read a configuration file, apply `section.key=value` overrides, check every key.

    Returns:
        One dict for each of SECTIONS, plain values.

    Raises:
        ValueError: for unknown keys, with the nearest known one, or text that is not YAML.
        OSError: for a missing file.
    """
    config = read_layers(Path(path))
    apply_overrides(config, overrides)
    return check_config(config)


def apply_overrides(
    config: dict[str, dict[str, Any]], overrides: Sequence[str], sections: Sequence[str] = SECTIONS
) -> None:
    """Write `section.key=value` overrides into a configuration; only these sections may be changed."""
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"override {override!r} must be SECTION.KEY=VALUE, for example model.prior=violin")
        check_known([section], sections, "the configuration")
        config[section][name] = parse_value(text)


def check_config(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
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
    std = config["model"].get("classifier_init_std")
    if std is not None and (isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < math.inf):
        raise ValueError(f"model.classifier_init_std={std!r} must be a number of 0 or more")
    if "label_smoothing_factor" in config["trainer"]:
        raise ValueError("trainer.label_smoothing_factor does not go with mixup; use augmentation.label_smoothing")
    check_trainer(config["trainer"])
    return config


def check_trainer(trainer: dict[str, Any]) -> None:
    """Refuse values of a `trainer` section that transformers would fail over much later, and mend its strategies."""
    for key, value in trainer.items():
        if key.endswith("_strategy") and value is False:
            trainer[key] = "no"  # YAML reads a bare no as False
    _check_numbers(trainer)
    averaged = trainer.get("ema_decay") is not None
    judged = ["accuracy", "loss", *(["ema_accuracy", "ema_loss"] if averaged else [])]
    metric = trainer.get("metric_for_best_model")
    if metric is not None and str(metric).removeprefix("eval_") not in judged:
        raise ValueError(f"trainer.metric_for_best_model={metric!r} must be one of {', '.join(judged)}")


def _check_numbers(trainer: dict[str, Any]) -> None:
    """transformers takes text for a number and fails over it much later."""
    from hf_sparseprior.training import SparsePriorTrainingArguments

    for field in fields(SparsePriorTrainingArguments):
        value = trainer.get(field.name)
        number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
        if number and value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"trainer.{field.name}={value!r} must be a number")
        counted = field.name.startswith("per_device_") or field.name == "gradient_accumulation_steps"
        if counted and value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"trainer.{field.name}={value} must be an integer of 1 or more")


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


def trainer_keys() -> list[str]:
    """Every key of a `trainer` section."""
    from hf_sparseprior.training import SparsePriorTrainingArguments

    return [field.name for field in fields(SparsePriorTrainingArguments) if field.init]


def check_known(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise for the first unknown key, naming the nearest known one."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{where} has no key {key!r}; {hint}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values."""
    with open(path, encoding="utf-8") as file:
        try:
            content = yaml.load(file, Loader=_Loader) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, got {content!r}")
    return content


def read_layers(
    path: Path, others: Sequence[str] = (), seen: tuple[Path, ...] = (), sections: Sequence[str] = SECTIONS
) -> dict[str, Any]:
    """The content of a file over that of the files that its `base` names.

    Args:
        path: the file.
        others: names of top-level keys besides the sections; a file's value replaces that of its bases as a whole.
        seen: the files that led here.
        sections: names of what holds keys and values.

    Returns:
        A dict for each section, and the other keys that some file has.
    """
    if path.resolve() in seen:
        raise ValueError(f"{path}: `base` leads back to this file")
    content = read_yaml(path)
    bases = content.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ValueError(f"{path}: base={bases!r} must be the name of a file, or a list of names")
    check_known(content, (*sections, *others), str(path))
    layers = [read_layers(path.parent / base, others, (*seen, path.resolve()), sections) for base in bases]
    config: dict[str, Any] = {section: {} for section in sections}
    for key, values in (pair for layer in (*layers, content) for pair in layer.items()):
        if key in others:
            config[key] = values
        elif isinstance(values, dict):
            config[key].update(values)
        else:
            raise ValueError(f"{path}: section {key!r} must hold keys and values, got {values!r}")
    return config
