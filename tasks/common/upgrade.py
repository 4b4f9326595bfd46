"""Earlier forms of what runs leave behind, brought to today's. Files on disk stay as they are.

Version 1 of results.json has no `results_version`. In it, segmentation and detection have their history as one list for
each name and their configuration as dotted keys; segmentation has metrics in percent; robotics has parameters by part;
the Trainer's history has `eval_` for validation, and video has `val`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RESULTS_VERSION = 2


def upgraded(content: Any) -> Any:
    """The content of a results.json, or a record of one, in the form of RESULTS_VERSION. What is no dict stays."""
    if not isinstance(content, dict) or content.get("results_version", 1) >= RESULTS_VERSION:
        return content
    content = dict(content)
    if isinstance(config := content.get("config"), dict):
        content["config"] = upgraded_config(config)
    if "history" in content:
        content["history"] = _upgraded_history(content["history"])
    if content.get("task") == "segmentation":
        for name in {"metrics", "baseline"} & content.keys():
            content[name] = _as_fractions(content[name])
    if content.get("task") == "video":
        content["metrics"] = {validation_name(key): value for key, value in content.get("metrics", {}).items()}
    if content.get("task") == "robotics":
        if isinstance(episodes := content.get("episodes"), dict) and "valid" in episodes:
            content["episodes"] = {"train": episodes["train"], "validation": episodes["valid"]}
        seed = content.get("config", {}).get("trainer", {}).get("seed", 0)
        content.setdefault("seed", seed if "history" in content else None)
        if isinstance(parts := content.get("parameters"), dict):
            content["parameters"], content["parameters_by_part"] = sum(parts.values()), parts
    if "task" in content:
        content["results_version"] = RESULTS_VERSION
    return content


def upgraded_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration in today's form: nested, with `validation` as the name of that split."""
    config = dict(config)
    if any("." in key for key in config) and not any(isinstance(value, dict) for value in config.values()):
        return nested(config)
    if list(config) == ["config"]:  # run_config.json of segmentation and detection
        return {"config": upgraded_config(config["config"])}
    data = config.get("data")
    if isinstance(data, dict) and isinstance(motion := data.get("motion"), dict) and "val" in motion:
        config["data"] = {**data, "motion": {validation_name(key): value for key, value in motion.items()}}
    return config


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested dicts and, where all keys of a level are numbers, lists: {"a.0.b": 1} -> {"a": [{"b": 1}]}.

    Args:
        flat: values by dotted key; a dict under one key is merged with what other keys put there.
    """
    root: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        both = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = {**node[last], **value} if both else value
    return {key: _lists(value) for key, value in root.items()}


def nested_names(value: Any) -> Any:
    """mm's keys with dots (names of modules, in `custom_keys`) as nested keys.

    Runs of results version 1 kept the whole configuration as dotted keys, in which the two look the same.
    """
    if isinstance(value, dict):
        return nested({key: nested_names(part) for key, part in value.items()})
    return [nested_names(part) for part in value] if isinstance(value, list) else value


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdigit() for key in value):
        return [_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _lists(part) for key, part in value.items()}


def _upgraded_history(history: Any) -> list[dict[str, Any]]:
    if isinstance(history, dict):
        return [dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)]
    return [{validation_name(key): value for key, value in entry.items()} for entry in history]


def validation_name(name: str) -> str:
    """`val`, `val_accuracy` and `eval_accuracy` with `validation` in front instead; other names as they are."""
    return re.sub("^(val|eval)(?=_|$)", "validation", name)


def _as_fractions(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value / 100 if isinstance(value, float) else value for key, value in metrics.items()}
