"""How much a config may ask for, checked before memory is taken. An environment variable raises each limit."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from hf_sparseprior.base.checks import check_integer

# Above what has been published: 48 layers, 48 heads, MLPs of 24,576 and 22 billion weights (ViT-22B, Dehghani et al.
# 2023). Images of 4096 x 4096 pixels have 65,536 patches of 16 x 16, and 96 frames of 448 x 448 have 75,264.
LIMITS = {
    "layers": 1024,
    "heads": 256,
    "width": 1 << 17,
    "tokens": 1 << 17,
    "labels": 1 << 20,
    "weights": 32 * 10**9,
    "table_bytes": 1 << 30,  # of a layer's lists or mask of pairs over a clip; a model of 12 layers keeps 12 of them
}


def limit_of(setting: str, default: int) -> int:
    """A limit: the number in its environment variable, or the default."""
    given = os.environ.get(setting, str(default))
    if not (given.isascii() and given.isdecimal()):
        raise ValueError(f"{setting}={given!r} must be a whole number")
    return int(given)


def check_limit(kind: str, size: int, what: str) -> None:
    """Raise ValueError if a size is above the limit of its kind.

    Args:
        kind: one of `LIMITS`.
        size: how many are asked for.
        what: the fields that ask for them, with their values, and a verb: "num_frames=8 must be".
    """
    setting = f"SPARSEPRIOR_MAX_{kind.upper()}"
    largest = limit_of(setting, LIMITS[kind])
    if size > largest:
        raise ValueError(f"{what} at most {largest}; the environment variable {setting} raises this limit")


def check_size(name: str, value: Any, minimum: int, kind: str, note: str = "") -> int:
    """`check_integer` of a number that decides how large a model is, at most the limit of its kind."""
    integer = check_integer(name, value, minimum, note)
    check_limit(kind, integer, f"{name}={integer} must be")
    return integer


def check_sides(name: str, sides: Any, grid: Sequence[int] | None) -> list[int]:
    """The grid [height, width] that the weights of `name` are made for: its setting, or the grid of the model.

    If the model's is (frames, height, width), it is that of a clip; if there is none, it may be.

    Raises:
        ValueError: unless it is a pair of integers of 1 or more, or three of a clip, with no more patches than the
            limit.
    """
    sides = grid if sides is None else sides
    allowed: tuple[int, ...] = (2,)
    words = "(height, width)"
    if grid is not None and len(grid) == 3:
        allowed, words = (3,), "(frames, height, width)"
    elif grid is None:
        allowed = (2, 3)
    if isinstance(sides, str) or not isinstance(sides, Sequence) or len(sides) not in allowed:
        raise ValueError(f"{name}: grid={sides!r} must be {words} in patches")
    sides = [check_integer(f"{name}: grid", side, 1) for side in sides]
    patches = math.prod(sides)
    check_limit("tokens", patches, f"{name}: grid={sides} has {patches} patches, which must be")
    return sides
