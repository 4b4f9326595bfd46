"""One way to register anything by name: supports, decays, predictors, mixers, extras, backends, families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def registering(kind: str, registry: dict[str, Any], name: str) -> Callable[[Any], Any]:
    """A decorator that puts a function or class into a registry. A class gets its name as its attribute `name`."""

    def register(entry: Any) -> Any:
        if name in registry:
            raise ValueError(f"{kind} {name!r} is registered already")
        if isinstance(entry, type):
            entry.name = name  # type: ignore[attr-defined]
        registry[name] = entry
        return entry

    return register
