"""What a scan for damaged files found, remembered between starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

NAMES_SHOWN = 3


def remembered(key: str, scan: Callable[[], dict[int, str]]) -> dict[int, str]:
    """{index: what is wrong} as `scan` returns it, or as it did at an earlier start.

    Args:
        key: digest of all that decides what it finds: name, size and time of change of every file, versions of readers.
        scan: looks at every file.
    """
    memory = _folder() / f"{key}.json"
    found = _read(memory)
    if found is not None:
        return found
    found = scan()
    scratch = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(found), encoding="utf-8")
        os.replace(scratch, memory)
    except OSError as error:  # on a full or read-only disk the next start scans again, and nothing else is lost
        print(f"what the scan for damaged files found is not remembered: {error}", file=sys.stderr)
    return found


def _read(memory: Path) -> dict[int, str] | None:
    try:
        return {int(index): problem for index, problem in json.loads(memory.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return None  # no earlier scan, or an unreadable one, which is done again


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hf_sparseprior" / "scans"
