"""Scans for damaged files before a run: what they find, remembered between starts, and what is then done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.runs.command import short

NAMES_SHOWN = 3


class Splittable(Protocol):
    """Examples of a split."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of an example."""

    def subset(self, indices: np.ndarray) -> Any:
        """The examples with these numbers."""


class _Problems(Dataset):
    """index -> (index, what is wrong with the example or None)."""

    def __init__(self, read: Callable[[int], Any], length: int, errors: tuple[type[Exception], ...]) -> None:
        self.read, self.length, self.errors = read, length, errors

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, str | None]:
        try:
            self.read(index)
        except self.errors as error:
            return index, str(error)
        return index, None


def find_problems(
    read: Callable[[int], Any],
    length: int,
    examples: str,
    errors: tuple[type[Exception], ...] = (OSError,),
    batch_size: int = 8,
    workers: int = 0,
    show_progress: bool = False,
) -> dict[int, str]:
    """Read every example.

    Args:
        read: reads the example of an index, or raises one of `errors` with one line that names it.
        length: number of examples. examples: what they are called in the plural.
        batch_size: examples that a worker reads at a time. workers: processes that read; 0: this one.

    Returns:
        {index: the line} for examples that cannot be read.
    """
    loader = DataLoader(_Problems(read, length, errors), batch_size, num_workers=workers, collate_fn=list)
    found = {}
    with tqdm(
        total=length, desc=f"looking for damaged {examples}", unit=f" {examples}", disable=not show_progress
    ) as bar:
        for batch in loader:
            found.update({index: problem for index, problem in batch if problem is not None})
            bar.update(len(batch))
    return found


def refuse_found(found: Mapping[str, dict[int, str]], ending: str, error: type[Exception], examples: str) -> None:
    """Raise `error` with the first problem whose line has this ending, and how many there are: examples that are not
    damaged, which `data.corrupt` says nothing about.
    """
    these = [line for problems in found.values() for line in problems.values() if line.endswith(ending)]
    if these:
        raise error(f"{these[0]} ({len(these)} such {examples})")


def drop_found(
    splits: dict[str, Any], found: Mapping[str, dict[int, str]], corrupt: str, examples: str
) -> dict[str, list[str]]:
    """Do with damaged examples what `data.corrupt` says.

    "fatal" raises, "skip" removes them from `splits` and prints a line for every split that has some.

    Args:
        splits: `Splittable` objects by their names. found: {split: {index: what is wrong}}, of splits that have some.
        corrupt: "fatal" or "skip". examples: what they are called in the plural.

    Returns:
        {split: the names of the examples that were removed}.

    Raises:
        ValueError: "fatal": count and first names of each split; "skip": if no example of a split is left.
    """
    if found and corrupt == "fatal":
        lines = "; ".join(
            f"{split}: {len(problems)} of {len(splits[split])}, {', '.join(list(problems.values())[:NAMES_SHOWN])}"
            for split, problems in found.items()
        )
        raise ValueError(f"damaged {examples} ({lines}); data.corrupt=skip leaves them out")
    removed = {}
    for split, problems in found.items():
        data: Splittable = splits[split]
        removed[split] = [data.name(index) for index in problems]
        if len(problems) == len(data):
            raise ValueError(
                f"{split}: none of the {len(data)} {examples} is readable, {next(iter(problems.values()))}"
            )
        splits[split] = data.subset(np.setdiff1d(np.arange(len(data)), list(problems)))
        print(
            f"{split}: {len(problems)} of {len(data)} {examples} are damaged and left out, "
            f"{short(removed[split], NAMES_SHOWN)}",
            file=sys.stderr,
        )
    return removed


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
        return {int(index): problem for index, problem in read_json(memory, RECORD_BYTES).items()}
    except (OSError, ValueError, AttributeError):
        return None  # no earlier scan, or an unreadable one, which is done again


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hf_sparseprior" / "scans"
