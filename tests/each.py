"""One test for many values, where a test for each would be thousands: all are tried, and all that fail are named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

MOST_SHOWN = 20


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test. The fixtures are the same for all values."""
    split, entries = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_of_them(**fixtures: Any) -> None:
            failures = []
            for entry in entries:
                given = dict(zip(split, entry, strict=True)) if len(split) > 1 else {split[0]: entry}
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    failures.append(f"{', '.join(map(str, given.values()))}: {type(error).__name__}: {error}")
            assert entries, "nothing to try"
            shown = "\n".join(failures[:MOST_SHOWN])
            assert not failures, f"{len(failures)} of {len(entries)} fail:\n{shown}"

        kept = [parameter for name, parameter in signature.parameters.items() if name not in split]
        all_of_them.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_of_them

    return decorate
