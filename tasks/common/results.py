"""results.json, what a run leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hf_sparseprior.files import write_text


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results.json whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(results, indent=1) + "\n")


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """Read a results.json."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)
