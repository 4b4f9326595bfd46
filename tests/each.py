"""One test for many values, where a test for each would be thousands: all are tried, and all that fail are named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test, of which each value is a subtest. They share its fixtures."""
    split, entries = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_of_them(subtests: Any, **fixtures: Any) -> None:
            assert entries, "nothing to try"
            for entry in entries:
                given = dict(zip(split, entry if len(split) > 1 else [entry], strict=True))
                with subtests.test(", ".join(map(str, given.values()))):
                    test(**fixtures, **given)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in split]
        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        all_of_them.__signature__ = signature.replace(parameters=[subtests, *kept])  # type: ignore[attr-defined]
        return all_of_them

    return decorate
