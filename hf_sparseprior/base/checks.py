"""Checks of single values. Each error names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" with the known name that is nearest to a wrong one; "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


def check_keys(given: Iterable[str], allowed: Sequence[str], where: str) -> None:
    """Raise for the first key that is not allowed, with the nearest one that is."""
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no setting {key!r}; {hint}Settings: {', '.join(allowed)}")


def split_spec(spec: Any, slot: str, registry: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Name and settings of "name" or {"name": ..., settings}; the name must be registered."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = settings.pop("name", None)
    if isinstance(spec, Mapping) and "name" not in spec:
        raise ValueError(f"{slot} needs a 'name', one of {', '.join(registry)}; got {spec!r}")
    if not isinstance(name, str) or name not in registry:
        shown = name if isinstance(spec, Mapping) else spec
        raise ValueError(f"{slot}={shown!r} must be one of {', '.join(registry)}{did_you_mean(name, registry)}")
    return name, settings


def python_value(value: Any) -> Any:
    """A numpy scalar as the Python value that json can write; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_integer(name: str, value: Any, minimum: int, note: str = "") -> int:
    """`value` as a Python int of at least `minimum`; numpy integers pass, booleans and floats do not."""
    try:
        integer = operator.index(value)
    except TypeError:
        integer = None
    if integer is None or isinstance(value, (bool, np.bool_)) or integer < minimum:
        raise ValueError(f"{name}={value!r} must be an integer of {minimum} or more{note}")
    return integer


def check_percentage(name: str, value: Any) -> float:
    """`value` as it is if it is a number from 0 to 100."""
    return check_within(name, value, 0, 100, "a percentage from 0 to 100")


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python's; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_within(name: str, value: Any, low: float, high: float, allowed: str) -> float:
    """`value` as it is if it is a number from `low` to `high`; `allowed` says so in words."""
    if not is_number(value) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return value


def check_finite(name: str, value: Any, zero: bool = True, note: str = "") -> float:
    """`value` as it is if it is a finite number above 0, or 0 where that is allowed."""
    low, allowed = (0.0, "a number of 0 or more") if zero else (math.ulp(0.0), "a number above 0")
    return check_within(name, value, low, sys.float_info.max, allowed + note)


def check_boolean(name: str, value: Any) -> bool:
    """`value` as a Python bool. Only True and False pass."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def check_not_both(name: str, value: Any, pruning_ratio: float | None) -> None:
    """Raise if both a number and the pruning ratio that decides it are given."""
    if value is not None and pruning_ratio is not None:
        raise ValueError(f"{name}={value!r} and pruning_ratio={pruning_ratio!r} cannot both be given")
