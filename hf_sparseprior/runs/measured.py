"""Names of results: those of one evaluation never replace those of another."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_sparseprior.runs.results import read_results
from hf_sparseprior.runs.run_folder import COSMETIC, evaluation_folder, stored_config

UNMEASURED = (*COSMETIC, "cache")  # settings that change nothing of what is measured
WHICH = ("source", "path", "config_name", "revision", "splits", "task", "lists")  # settings that say which data it is
LONGEST = 40  # characters of the settings' names in a file's name


def settings(config: Any, *sections: str) -> dict[str, Any]:
    """{dotted name: value} of these sections of a configuration; lists of plain values are values. Null is left out."""
    return dict(_settings({name: config.get(name) for name in sections}, ""))


def _settings(value: Any, name: str) -> Any:
    nested = isinstance(value, (list, tuple)) and any(isinstance(part, (Mapping, list, tuple)) for part in value)
    if isinstance(value, Mapping) or nested:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key not in UNMEASURED:
                yield from _settings(part, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, list(value) if isinstance(value, tuple) else value


def own_config(model: Path, out: Path) -> dict[str, Any] | None:
    """The configuration of the run that saved a model, if `out` is its folder of evaluations and it is known."""
    if out.resolve() == evaluation_folder(model).resolve():
        with suppress(OSError):
            return stored_config(model)
    return None


def is_other_data(config: Mapping[str, Any], model: Path) -> bool:
    """Whether the section `data` names other data than the run that saved the model; False if that is unknown."""
    with suppress(OSError):
        own, given = stored_config(model).get("data") or {}, config["data"]
        return any(own.get(name) != given.get(name) for name in WHICH)
    return False


def drop_limits(config: dict[str, Any], model: Path, overrides: Sequence[str]) -> None:
    """Take all examples of other data than the run's that saved the model: its limits are of its own data.

    Args:
        config: with the section `data`, which is changed. overrides: those that made it; their limits stay.
    """
    if is_other_data(config, model):
        given = {override.partition("=")[0] for override in overrides}
        for name in [key for key in config["data"] if key.startswith("limit_") and f"data.{key}" not in given]:
            config["data"][name] = None


def suffix(
    out: Path,
    stem: str,
    config: Mapping[str, Any],
    model: str | None,
    measured: Callable[[Mapping[str, Any]], dict[str, Any]],
    own: Mapping[str, Any] | None,
) -> str:
    """What the name of an evaluation's results and pictures has after `stem`.

    Nothing for a run's own data and settings, and in a folder that is no run's for the first evaluation there; for
    others which settings differ from those, and a digest of all of them.

    Args:
        out: folder of the results.
        stem: results_SPLIT, the name without the suffix.
        config: of the evaluation, as its results have it. model: SHA-256 of the weights.
        measured: (a configuration) -> the settings in it that decide what is measured, by name.
        own: the run's own configuration, if `out` is its folder of evaluations; the plain name is kept for it.
    """
    mine, plain = {**measured(config), "model": model}, out / f"{stem}.json"
    other = mine
    if own is not None:
        other = {**measured(own), "model": model}
    elif plain.exists():
        there = read_results(plain)
        other = {**measured(there.get("config") or {}), "model": there.get("model_sha256")}
    different = [key for key in sorted({*mine, *other}) if mine.get(key) != other.get(key)]
    if not different:
        return ""
    names = dict.fromkeys(re.sub(r"\W", "", key.rpartition(".")[2]) for key in different)
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"_{'-'.join(names)[:LONGEST].rstrip('-')}_{digest}"
