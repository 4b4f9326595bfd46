"""Graphs for other programs: within `plain_operations` models compute with PyTorch's own operations alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plain:
    """What holds within `plain_operations`.

    backends: of attention; the first that can run a request runs it. ran: how often each did. refused: why a backend
    before it could not, by its name.
    """

    backends: tuple[str, ...]
    ran: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)


_stack: list[Plain] = []


def plain() -> Plain | None:
    """What holds in a block of `plain_operations`; None outside."""
    return _stack[-1] if _stack else None


@contextmanager
def plain_operations(*backends: str) -> Iterator[Plain]:
    """Within the block no compiled kernel is called, no batch size is decided on, and these backends run attention.

    It is for tracing in one thread: other threads that call a model meanwhile take the same backends.

    Args:
        backends: by name, "reference" last, which runs everything. The environment does not change them.
    """
    _stack.append(Plain(backends))
    try:
        yield _stack[-1]
    finally:
        _stack.pop()
