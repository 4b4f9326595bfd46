"""Integer sequences whose terms are the offsets |j - k| along which a head attends.

A sequence is a function of the head number and the head's window. `register_sequence` makes it a value of the
`sequence` setting of the fibottention support, and so of every config, test and picture.

Papers: Fibottention, sections 3.1, 3.2 and 6.5 to 6.8.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hf_sparseprior.base.resolved import ResolvedSequence, own_settings

SEQUENCES: dict[str, Callable[..., Iterable[int]]] = {}


def register_sequence(name: str) -> Callable[[Callable], Callable]:
    """Register `function(head, window, **settings) -> iterable of offsets` under `name`.

    `head` counts from 1. Keyword-only arguments of the function are the sequence's settings, with their defaults.
    The caller drops terms outside 1..window and repeated terms (Fibottention Eq. 3).
    """

    def register(function: Callable) -> Callable:
        if name in SEQUENCES:
            raise ValueError(f"sequence {name!r} is registered already")
        SEQUENCES[name] = function
        return function

    return register


def sequence_settings(name: str) -> dict[str, Any]:
    """Settings of a sequence with their default values."""
    parameters = inspect.signature(SEQUENCES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def floor_times_phi(n: int) -> int:
    """floor(n * phi), phi = (1 + sqrt 5) / 2, exact for any non-negative integer."""
    return (n + math.isqrt(5 * n * n)) // 2


def wythoff_start(row: int, modified: bool = False) -> tuple[int, int]:
    """First two terms of a row of the Wythoff array (rows count from 1).

    By default they are a = floor(floor(i phi) phi) and b = a + floor(i phi) (Fibottention section 3.2). Modified: the
    two predecessors b' = b - a and a' = a - b' = i - 1 come first (Fibottention Table 1).
    """
    if row < 1:
        raise ValueError(f"row={row} of the Wythoff array must be 1 or more")
    m = floor_times_phi(row)
    if modified:
        return row - 1, m
    a = floor_times_phi(m)
    return a, a + m


def fibonacci_terms(a: int, b: int, limit: int) -> Iterator[int]:
    """Terms of Fib(a, b): a, b, a + b, ... up to `limit` (Fibottention Eq. 2)."""
    if a < 0 or b < 0 or a == b == 0:
        raise ValueError(f"Fib(a={a}, b={b}) needs two non-negative terms, not both zero")
    # The first two terms may have any order, so an `a` above the limit says nothing about the terms after it.
    if a <= limit:
        yield a
    while b <= limit:
        yield b
        a, b = b, a + b


def head_sequence(spec: ResolvedSequence, head: int, window: int) -> list[int]:
    """Sorted offsets of `head` in 1..window; `spec` is a sequence's name and settings in one dict."""
    terms = SEQUENCES[spec["name"]](head, window, **own_settings(spec))
    return sorted({term for term in terms if 1 <= term <= window})


@register_sequence("wythoff")
def wythoff(head: int, window: int, *, modified: bool = False) -> Iterator[int]:
    """Row `head` of the Wythoff array (Fibottention Eq. 3), with its two predecessors if `modified`."""
    return fibonacci_terms(*wythoff_start(head, modified), window)


@register_sequence("fibonacci")
def fibonacci(head: int, window: int, *, a: int = 1, b: int = 1) -> Iterator[int]:
    """Fib(a, b) for all heads: Fib(1, 1) in Fibottention Table 8, Fib(w_min, 2 w_min) in Figure 5b."""
    return fibonacci_terms(a, b, window)


@register_sequence("fibonacci_per_head")
def fibonacci_per_head(head: int, window: int, *, delta: int = 0) -> Iterator[int]:
    """Fib(i + delta, i + delta) for head i (Fibottention Figure 5c)."""
    return fibonacci_terms(head + delta, head + delta, window)


@register_sequence("multiples")
def multiples(head: int, window: int, *, c: int = 2, shifted: bool = False) -> range:
    """c, 2c, 3c, ... (Fibottention Figure 5a, fixed).

    `shifted` adds the numbers that are (i - 1) mod c above a multiple, from 0 on. It is what earlier models have;
    `shifted_multiples` gives the figure's ratio.
    """
    shift = (head - 1) % c if shifted else 0
    return range(shift, window + 1, c)


@register_sequence("shifted_multiples")
def shifted_multiples(head: int, window: int, *, c: int = 2) -> range:
    """c n + (i mod c), n >= 1, for head i (Fibottention Figure 5a, variable): 85.5 % pruned for c = 2 and w_i = 5i."""
    return range(c + head % c, window + 1, c)


@register_sequence("powers")
def powers(head: int, window: int, *, base: int = 2, first: int = 1) -> Iterator[int]:
    """base^first, base^(first + 1), ... (Fibottention Table 8: base 2 and 3; it does not say whether from 0 or 1)."""
    term = base ** min(first, window.bit_length())  # a higher power is above the window all the more, and long
    while term <= window:
        yield term
        term *= base


@register_sequence("monomials")
def monomials(head: int, window: int, *, degree: int = 2) -> Iterator[int]:
    """1, 2^degree, 3^degree, ... (Fibottention Table 8: degree 2 and 3)."""
    degree = min(degree, window.bit_length())  # 2 to a higher power is above the window all the more, and long
    n = 1
    while n**degree <= window:
        yield n**degree
        n += 1


# Smallest allowed value of each integer setting; `fibottention.resolve_sequence` checks it.
SETTING_MINIMUM = {"a": 0, "b": 0, "delta": 0, "c": 1, "base": 2, "degree": 1, "first": 0}
