"""Settings that differ between things which are numbered from 0: the layers of a model, the heads of a layer.

They are a list with one for each, or a map of numbers to what those have: {"0-3": ..., "4": ...}.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def numbered(given: Any, count: int, what: str) -> list[tuple[range, Any]]:
    """What consecutive numbers have, in order; together they are all numbers from 0, each once.

    Args:
        given: a list with one for each number, of which equal neighbours are joined; or a map of "0-3" or "4" (or 4).
        count: how many there are.
        what: name of the things in messages, "layers" or "prior: layers".

    Raises:
        ValueError: for a list of another length, keys that are no numbers, and numbers that are missing, given twice
            or too large; the message names them.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != count:
            raise ValueError(f"{what}: a list of {len(given)} must have one for each of {count}")
        return [(range(ends[0], ends[1]), value) for ends, value in _neighbours(given)]
    if not isinstance(given, Mapping):
        raise ValueError(f"{what}={given!r} must be a list of priors, or an object of numbers like '0-3'")
    parts = sorted(((_numbers(key, what), value) for key, value in given.items()), key=lambda part: part[0].start)
    named = [number for numbers, _ in parts for number in (numbers if numbers.stop <= count else ())]
    if large := next((numbers for numbers, _ in parts if numbers.stop > count), None):
        raise ValueError(f"{what}: {key_of(large)!r} is too large, the numbers are 0 to {count - 1}")
    if twice := {number for number in named if named.count(number) > 1}:
        raise ValueError(f"{what}: {in_words(twice)} must be given once, not twice")
    if missing := set(range(count)) - set(named):
        raise ValueError(
            f"{what}: {in_words(missing)} {'is' if len(missing) == 1 else 'are'} missing; each of "
            f"{count}, numbered from 0, needs a prior"
        )
    return parts


def _neighbours(values: Sequence[Any]) -> Iterable[tuple[tuple[int, int], Any]]:
    """First number, the number after the last, and the value of equal neighbours."""
    first = 0
    for value, group in itertools.groupby(values):
        after = first + len(list(group))
        yield (first, after), value
        first = after


def _numbers(key: Any, what: str) -> range:
    """The numbers of a key."""
    text = str(key) if isinstance(key, (int, str)) and not isinstance(key, bool) else ""
    ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text)
    if ends is None or (ends[2] is not None and int(ends[2]) < int(ends[1])):
        raise ValueError(f"{what}: {key!r} must be a number from 0, or two like '0-3'")
    first = int(ends[1])
    return range(first, int(ends[2] or first) + 1)


def key_of(numbers: range) -> str:
    """The key of consecutive numbers: "0-3" or "4"."""
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def counted(thing: str, numbers: range) -> str:
    """Consecutive numbers with what they are of: "layer 3", "layers 3-5"."""
    return f"{thing}{'s' if len(numbers) > 1 else ''} {key_of(numbers)}"


def keyed(values: Sequence[Any]) -> dict[str, Any]:
    """The map of a list, with equal neighbours joined."""
    return {key_of(range(*ends)): value for ends, value in _neighbours(values)}


def with_text_keys(value: Any) -> Any:
    """A value of YAML with its numbers as keys written as text, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key) if type(key) is int else key: with_text_keys(part) for key, part in value.items()}
    return [with_text_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def in_words(numbers: Iterable[int]) -> str:
    """Numbers as text, with runs joined: "3, 5-7"."""
    ordered = sorted(numbers)
    runs = itertools.groupby(ordered, lambda number: number - ordered.index(number))
    return ", ".join(key_of(range(run[0], run[-1] + 1)) for run in (list(group) for _, group in runs))
