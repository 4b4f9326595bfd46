"""results.json, what a run or an evaluation leaves behind: one form for every task."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.runs.environment import command_line, environment

RESULTS_VERSION = 2  # 1 was of before the first release, and is read no more


@dataclass
class Results:
    """What every task records. What only one task records goes into `details`.

    task: name of the task's folder.
    metrics: by name, SPLIT_METRIC; accuracy, IoU, precision and success are fractions, not percent.
    config: the whole configuration, nested.
    seed: the run's. parameters, trainable_parameters: numbers of the model's parameters.
    steps, seconds: those of training, including those before an interruption. seconds_per_step: for training alone.
    processes: how many trained. resumed_from: name of the checkpoint that the run went on from.
    command: as a user types it; None: the command of this process.
    history: {"step": ..., "epoch": ..., name: value} in order, `validation_` before a name of that split.
    details: more keys, which stand next to these in the file.
    versions, hardware: of the packages and of the machine.

    What an evaluation does not have is None.
    """

    task: str
    metrics: dict[str, Any]
    config: dict[str, Any]
    seed: int | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    steps: int | None = None
    seconds: float | None = None
    seconds_per_step: float | None = None
    processes: int | None = None
    resumed_from: str | None = None
    command: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    results_version: int = RESULTS_VERSION

    def __post_init__(self) -> None:
        """Fill in what follows from this process, and refuse details that would hide a field."""
        self.command = self.command or command_line()
        if not self.versions:
            self.versions, self.hardware = environment().values()
        if hidden := sorted({*self.details} & {item.name for item in fields(self)}):
            raise ValueError(f"details of results must not be named {', '.join(hidden)}")

    def content(self) -> dict[str, Any]:
        """The keys of results.json: the fields, with `details` spread out among them."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        details, history = own.pop("details"), own.pop("history")
        return {**own, **details, "history": history}

    def write(self, path: Path) -> dict[str, Any]:
        """Write the file, whole or not at all. Returns its content."""
        return write_results(path, self.content())


def write_results(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write JSON whole or not at all, in a folder that is made if it is missing. Returns what was written.

    JSON has no infinity and no NaN. A number that is not finite, such as the IoU of a class that does not occur,
    becomes null.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = finite_or_null(content)
    write_text(path, json.dumps(written, indent=1, allow_nan=False) + "\n")
    return written


def finite_or_null(value: Any) -> Any:
    """A copy of nested values in which numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """Read a results.json, or another file of JSON that holds a map.

    Raises:
        ValueError: for a file that is cut off or holds something else.
    """
    try:
        content = read_json(path, RECORD_BYTES, finite=False)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds {content!r:.40}); remove it")
    return content


def check_results(path: str | os.PathLike, content: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raise ValueError unless results have these parts, and every part that `FORMS` knows has its form.

    Args:
        path: of the file, for errors.
        content: as `read_results` returns it.
        needed: keys that must be there and not be null.
    """
    for key in needed:
        if content.get(key) is None:
            raise ValueError(f"{path} is damaged (it has no {key!r}); remove it")
    for key, (allowed, is_good) in FORMS.items():
        value = content.get(key)
        if value is not None and not is_good(value):
            raise ValueError(f"{path} is damaged ({key}={value!r:.60} must be {allowed}); remove it")


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(part is None or is_number(part) for part in value.values())


_METRICS = ("a map of names to numbers or null", _are_metrics)
_MAP = ("a map", lambda value: isinstance(value, dict))
_COUNT = ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
_NUMBER = ("a number", is_number)
# What is allowed, in words, and whether a value is that.
FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "metrics": _METRICS,
    "config": _MAP,
    "baseline": _MAP,
    "best_epoch": _MAP,
    "history": ("a list of maps", lambda value: isinstance(value, list) and all(isinstance(e, dict) for e in value)),
    **dict.fromkeys(("parameters", "trainable_parameters", "seed", "steps", "processes", "adapter_bytes"), _COUNT),
    **dict.fromkeys(("seconds", "seconds_per_step", "data_wait", "pruning_ratio", "max_decay_change"), _NUMBER),
    "attention_flops": _NUMBER,
    "warnings": ("a list of lines", lambda value: isinstance(value, list) and all(isinstance(e, str) for e in value)),
    "pictures": ("a list of names", lambda value: isinstance(value, list) and all(isinstance(e, str) for e in value)),
}


# Metrics that are no shares, by the end of their names.
PLAIN = ("loss", "mean_absolute_error", "root_mean_squared_error", "r2")


def metric_text(name: str, value: float | None) -> str:
    """A metric for people: shares in percent."""
    if value is None:
        return "not a number"
    return f"{value:.4g}" if name.endswith(PLAIN) else f"{100 * value:.2f} %"


def print_warnings(results: Mapping[str, Any]) -> None:
    """What results say of a run that learned nothing, a line each."""
    for message in results.get("warnings", ()):
        print(f"warning: {message}")


def validation_name(name: str) -> str:
    """`val`, `val_accuracy` and `eval_accuracy` with `validation` in front instead; other names as they are."""
    return re.sub("^(val|eval)(?=_|$)", "validation", name)


def trainer_history(log: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The log of transformers' Trainer as `Results.history`: `eval_` becomes `validation_`.

    The Trainer's own summary at the end is left out: it belongs to no step, and in a resumed run it covers only a part.
    """
    entries = (entry for entry in log if "train_runtime" not in entry)
    return [{validation_name(key): value for key, value in entry.items()} for entry in entries]
