"""Graphs for other programs: within `plain_operations` models compute with PyTorch's own operations alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


_plain: ContextVar[Plain | None] = ContextVar("plain_operations", default=None)
_open: list[Plain] = []  # the blocks of all threads


def plain() -> Plain | None:
    """What holds in a block of `plain_operations`; None outside, and in other threads."""
    # TorchDynamo cannot trace `ContextVar.get`, and no graph of its own is made within a block.
    return _plain.get() if _open else None


@contextmanager
def plain_operations(*backends: str) -> Iterator[Plain]:
    """Within the block no compiled kernel is called, no batch size is decided on, and these backends run attention.

    Args:
        backends: by name, "reference" last, which runs everything. The environment does not change them.
    """
    block = Plain(backends)
    before = _plain.set(block)
    _open.append(block)
    try:
        yield block
    finally:
        _open.remove(block)
        _plain.reset(before)
