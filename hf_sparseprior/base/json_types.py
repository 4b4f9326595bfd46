"""Whether a value of a JSON file fits the annotation of a field of another library, and how errors show it."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def fits(value: Any, hint: Any, integers_are_floats: bool = True) -> bool:
    """Whether a value that json read fits an annotation.

    Lists stand for tuples and sets, and objects for classes that json does not have.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is Annotated:
        return fits(value, parts[0], integers_are_floats)
    if origin in (Union, types.UnionType):
        return any(fits(value, part, integers_are_floats) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    kind = origin or hint
    if not isinstance(kind, type):  # a name that is resolved nowhere
        return True
    if issubclass(kind, enum.Enum):
        return value in [member.value for member in kind]
    if issubclass(kind, Mapping):
        return isinstance(value, dict) and all(fits(part, parts[1]) for part in value.values() if parts)
    if issubclass(kind, (list, tuple, set)):
        fixed = kind is tuple and parts and parts[-1] is not Ellipsis
        hints = parts if fixed else [*parts[:1]] * len(value) if isinstance(value, list) else []
        right_length = isinstance(value, list) and (not fixed or len(value) == len(parts))
        return right_length and all(map(fits, value, hints))
    if kind is float:
        return isinstance(value, (int, float) if integers_are_floats else float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict) and set(value) <= {field.name for field in dataclasses.fields(kind)}
    return isinstance(value, kind if kind in (bool, str) else dict)


def hint_name(hint: Any) -> str:
    """An annotation as text: "int | None"."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
