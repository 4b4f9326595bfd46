"""What a search has measured, in a file, so that one that was killed goes on and measures nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json_object

PLAN = "plan.json"
T = TypeVar("T")


class Plan:
    """Measured values by name.

    Args:
        folder: has the file or gets it; None: values are kept in memory.
        key: what the values depend on.

    Raises:
        OSError: for a damaged file. ValueError: for one with another key; the message has what differs.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        self.path = None if folder is None else folder / PLAN
        self.key, self.values = json.loads(json.dumps(key)), {}
        if self.path is not None and self.path.is_file():
            content = read_json_object(self.path, RECORD_BYTES)
            before = content.get("key")
            if before != self.key:
                known = before if isinstance(before, dict) else {}
                names = [name for name in self.key if known.get(name) != self.key[name]]
                raise ValueError(
                    f"{self.path} is of another {' and '.join(names)}; remove it, or choose another folder"
                )
            if not isinstance(values := content.get("values"), dict):
                raise OSError(f"{self.path} is damaged: it has no values; remove it")
            self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def value(self, name: str, make: Callable[[], T]) -> T:
        """A value of JSON by its name; what is not there is made and written."""
        if name not in self.values:
            self.add(name, make())
        return self.values[name]

    def add(self, name: str, value: Any) -> None:
        """Write a value."""
        self.values[name] = value
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"key": self.key, "values": self.values}, indent=1) + "\n")
