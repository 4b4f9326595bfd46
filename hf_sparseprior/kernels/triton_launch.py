"""Launches of Triton kernels whose compiled form is looked up by what it was compiled for.

`kernel[grid](...)` looks at each argument anew to find what Triton compiled for arguments of this kind, and binds them
by name: tens of microseconds a launch, more than a small kernel runs. Here the first launch goes that way and gives the
compiled kernel; all later ones with arguments of the same kind hand theirs to its launcher.

What Triton compiles anew for: types, addresses that are multiples of 16 bytes, integers that are 1, multiples of 16 or
need 64 bits, arguments that are None, and all constants.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], **constants: Any) -> None:
    """Run `programs` programs of a kernel, on the current device.

    Args:
        kernel: a function of `triton.jit`.
        arguments: tensors, numbers, None and tuples of integers, in the order of the kernel's parameters.
        constants: all its other parameters, and `num_warps` and the like.
    """
    key = (id(kernel), arguments[0].get_device(), *map(_kind, arguments), *constants.values())
    known = _compiled.get(key)
    if known is not None:
        known(programs, arguments, constants)
        return
    made = kernel[(programs,)](*arguments, **constants)
    if arguments[0].is_cuda and (bound := _bound(kernel, made, len(arguments))) is not None:
        _compiled[key] = bound


def _kind(argument: Any) -> Any:
    """What of an argument Triton compiles for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) in (int, tuple):
        return _kind_of_integers(argument)
    return type(argument)


@functools.lru_cache(maxsize=4096)
def _kind_of_integers(number: int | tuple[int, ...]) -> Any:
    if isinstance(number, tuple):
        return tuple(map(_kind_of_integers, number))
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31


def _bound(kernel: Any, compiled: Any, given: int) -> Callable[..., Any] | None:
    """A function that launches what the public launch returned; None where this release of Triton has another way."""
    names = getattr(kernel, "arg_names", None)
    if type(compiled).__name__ != "CompiledKernel" or names is None or getattr(kernel, "pre_run_hooks", None):
        _say_public(type(compiled).__name__)
        return None
    rest = names[given:]

    def run(programs: int, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
        compiled[(programs, 1, 1)](*arguments, *[constants[name] for name in rest])

    return run


@functools.cache
def _say_public(found: str) -> None:
    logger.debug("Triton's launch returns %s, so each launch takes its public way", found)


# Triton's own functions of these names take twelve microseconds where Python calls them.


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least this number, of 1 or more."""
    return 1 << (number - 1).bit_length()
