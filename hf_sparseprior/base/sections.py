"""Names of functions in files that `saving.code` joined from several modules."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any


def name_sections(names: dict[str, Any], sections: Sequence[tuple[int, str]]) -> None:
    """Make tracebacks say which module of the package a function in a joined file comes from.

    A frame is then shown as `File ".../patterns.py", line 812, in curve_rank of patterns/curves.py`. Functions and
    classes keep their `__name__` and `__qualname__`.

    Args:
        names: the globals of the file.
        sections: first line and module of each section, in order.
    """
    starts = [start for start, _ in sections]

    def renamed(code: CodeType) -> CodeType:
        constants = tuple(renamed(each) if isinstance(each, CodeType) else each for each in code.co_consts)
        # torch.compile knows lambdas and comprehensions by their names.
        if code.co_name.startswith("<"):
            return code.replace(co_consts=constants)
        module = sections[bisect_right(starts, code.co_firstlineno) - 1][1]
        return code.replace(co_consts=constants, co_name=f"{code.co_name} of {module}")

    done: set[int] = set()
    for value in list(names.values()):
        if getattr(value, "__module__", None) != names["__name__"]:
            continue
        for function in _functions(value):
            if id(function) not in done and function.__code__.co_filename == names["__file__"]:
                done.add(id(function))
                function.__code__ = renamed(function.__code__)


def _functions(value: Any) -> Iterator[FunctionType]:
    """A function with those that it wraps, or the functions of a class."""
    if isinstance(value, FunctionType):
        yield value
        yield from _functions(getattr(value, "__wrapped__", None))
    elif isinstance(value, type):
        for entry in list(vars(value).values()):
            yield from _functions(None if isinstance(entry, type) else entry)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _functions(accessor)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)
