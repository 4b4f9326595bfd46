"""Configurations in YAML: `base:` inheritance, section.key=value overrides, checks of what every run has.

Each task says which sections its files have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml


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


def apply_overrides(config: dict[str, dict[str, Any]], overrides: Sequence[str], sections: Sequence[str]) -> None:
    """Write `section.key=value` overrides into a configuration; only these sections may be changed."""
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"override {override!r} must be SECTION.KEY=VALUE, for example model.prior=violin")
        check_known([section], sections, "the configuration")
        config[section][name] = parse_value(text)


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
    path: Path, sections: Sequence[str], others: Sequence[str] = (), seen: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """The content of a file over that of the files that its `base` names.

    Args:
        path: the file.
        sections: names of what holds keys and values.
        others: names of top-level keys besides the sections; a file's value replaces that of its bases as a whole.
        seen: the files that led here.

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
    layers = [read_layers(path.parent / base, sections, others, (*seen, path.resolve())) for base in bases]
    config: dict[str, Any] = {section: {} for section in sections}
    for key, values in (pair for layer in (*layers, content) for pair in layer.items()):
        if key in others:
            config[key] = values
        elif isinstance(values, dict):
            config[key].update(values)
        else:
            raise ValueError(f"{path}: section {key!r} must hold keys and values, got {values!r}")
    return config
