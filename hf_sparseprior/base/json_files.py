"""Reading JSON that others wrote: what is too large, too deep, ambiguous or no file is one line, not a hang."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

MIB = 1 << 20
CONFIG_BYTES = 16 * MIB  # configs, processors, settings; the largest of transformers' have a few hundred KiB
RECORD_BYTES = 256 * MIB  # what runs write: results, states of training, records
DATA_BYTES = 4096 * MIB  # annotations and lists of data sets; COCO's largest file has 450 MiB
LEVELS = 100  # objects and lists within one another; configs and results have fewer than ten


def read_limited(path: str | os.PathLike, largest: int) -> bytes:
    """The bytes of a regular file. A pipe or a device is refused before it is read, and so is a file that is larger.

    Raises:
        OSError: for any other path, with what it is or how large it is.
    """
    # Without O_NONBLOCK opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
            raise OSError(f"{path} must be a regular file; it is {kind}")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(status.st_size + 1) if status.st_size <= largest else b""
    finally:
        os.close(descriptor)
    if max(status.st_size, len(content)) > largest:
        raise OSError(f"{path} has {status.st_size} bytes; files of its kind are read up to {largest} bytes")
    return content


def parse_json(text: str | bytes, finite: bool = True, strict: bool = True) -> Any:
    """What JSON holds.

    Args:
        text: UTF-8.
        finite: refuse NaN and Infinity, which are no JSON but which Python writes.
        strict: refuse a key that is there twice, and more than `LEVELS` levels. Not of large data, for its time.

    Raises:
        ValueError: for anything else than JSON.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    hooks: dict[str, Any] = {}
    if strict:
        hooks["object_pairs_hook"] = _each_key_once
    elif finite:
        hooks["parse_constant"] = _refuse_constant
    try:
        content = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("objects and lists are nested too deep") from None
    if strict and _is_deep(content):
        raise ValueError(f"objects and lists are nested more than {LEVELS} levels deep")
    if strict and finite and (place := _not_finite(content)) is not None:
        raise ValueError(f"{place} must be a finite number")
    return content


def read_json(path: str | os.PathLike, largest: int = CONFIG_BYTES, *, finite: bool = True, strict: bool = True) -> Any:
    """What a file of JSON holds; `finite` and `strict` as of `parse_json`.

    Args:
        largest: bytes that it may have: `CONFIG_BYTES`, `RECORD_BYTES` or `DATA_BYTES`.

    Raises:
        OSError: if it is missing, no regular file or larger; the message names it.
        ValueError: if it is no such JSON; the message does not name it.
    """
    return parse_json(read_limited(path, largest), finite, strict)


def read_json_object(path: str | os.PathLike, largest: int = CONFIG_BYTES, *, finite: bool = True) -> dict[str, Any]:
    """The object in a JSON file; arguments as of `read_json`.

    Raises:
        OSError: for a file that cannot be read, is no JSON, holds something else, or has a key twice.
    """
    try:
        content = read_json(Path(path), largest, finite=finite)
    except ValueError as error:
        raise OSError(f"{path} is not a JSON object ({error})") from None
    if not isinstance(content, dict):
        raise OSError(f"{path} is not a JSON object (it holds {content!r:.40})")
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _not_finite(content: Any, name: str = "the number") -> str | None:
    """Where there is a NaN or an infinite number (1e999 is one), with its value, or None. It is not deep."""
    if isinstance(content, float):
        return None if math.isfinite(content) else f"{name}={content}"
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    places = (_not_finite(part, f"{key}" if name == "the number" else f"{name}.{key}") for key, part in parts)
    return next((place for place in places if place is not None), None)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.80} is there twice")
    return content


def _is_deep(content: Any) -> bool:
    """Whether more than `LEVELS` objects and lists lie within one another. Level by level, without recursion."""
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(LEVELS):
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return False
    return True
