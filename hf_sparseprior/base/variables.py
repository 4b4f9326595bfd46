"""Environment variables for a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables in the block; afterwards they are what they were, and others are untouched: threads may set them.

    A library that reads a variable when it is imported does not see it, but a process that starts in the block does.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
