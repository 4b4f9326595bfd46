"""Graphs for other programs: within `plain_operations`, and for a tracer, models compute with PyTorch's own operations
alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Plain:
    """What holds within `plain_operations`.

    backends: of attention; the first that can run a request runs it. ran: how often each did. refused: why a backend
    before it could not, by its name. noticed: there is no block, but a tracer that writes graphs for other programs.
    """

    backends: tuple[str, ...]
    ran: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    noticed: bool = False


_plain: ContextVar[Plain | None] = ContextVar("plain_operations", default=None)
_kept: ContextVar[bool] = ContextVar("operators_in_traces", default=False)
_open: list[Plain] = []  # the blocks of all threads


def plain() -> Plain | None:
    """What holds in a block of `plain_operations` of this thread, or for a tracer that is noticed; otherwise None."""
    # TorchDynamo cannot trace `ContextVar.get`, and no graph of its own is made within a block.
    block = _plain.get() if _open else None
    return Plain(("sdpa", "reference"), noticed=True) if block is None and writes_foreign_graph() else block


def writes_foreign_graph() -> bool:
    """Whether `torch.jit.trace` (as in `openvino.convert_model`) or `torch.onnx.export` is recording this call.

    Their graphs run in other programs. Those of `torch.export` and `torch.compile` run here and keep the kernels.
    """
    if torch.jit.is_tracing():
        return not _kept.get()
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


@contextmanager
def operators_in_traces() -> Iterator[None]:
    """Within the block `torch.jit.trace` records the compiled operators, for a graph that is only looked at."""
    before = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(before)


@contextmanager
def outside_trace() -> Iterator[None]:
    """What is computed in the block is a constant for `torch.jit.trace`, as if it had been there before the trace.

    Two traces of a model have to be alike, and `torch.jit.trace` makes two: what the first one makes and a layer keeps
    must not be a part of its graph.
    """
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def whole_number(size: Any) -> int:
    """A size as an integer, for what a graph has as a constant: sizes are tensors while `torch.jit.trace` runs."""
    if not torch.jit.is_tracing():
        return operator.index(size)
    with outside_trace():
        return operator.index(size)


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
