"""The dense support and Fibottention's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from hf_sparseprior.base.checks import check_boolean, check_integer, check_keys, split_spec
from hf_sparseprior.base.resolved import ResolvedSequence, Settings
from hf_sparseprior.patterns.pattern import Pattern, register_support
from hf_sparseprior.patterns.sequences import SEQUENCES, SETTING_MINIMUM, head_sequence, sequence_settings


@register_support("dense", ordered=False)
def dense(num_heads: int, num_tokens: int) -> list[list[int]]:
    """Every pair of tokens."""
    return [list(range(num_tokens)) for _ in range(num_heads)]


def resolve_sequence(sequence: str | Settings | ResolvedSequence) -> ResolvedSequence:
    """The full form of a dilation sequence: {"name": ..., every setting}. `modified` is set in the support."""
    name, spec = split_spec(sequence, "sequence", SEQUENCES)
    if "modified" in spec:
        raise ValueError("sequence 'wythoff': `modified` is a setting of the support, next to `sequence`")
    settings = {} if name == "wythoff" else sequence_settings(name)
    check_keys(spec, list(settings), f"sequence {name!r}")
    for key, value in spec.items():
        if isinstance(settings[key], bool):
            settings[key] = check_boolean(f"sequence {name!r}: {key}", value)
        else:
            settings[key] = check_integer(f"sequence {name!r}: {key}", value, SETTING_MINIMUM.get(key, 0))
    if name == "fibonacci" and settings["a"] == settings["b"] == 0:
        raise ValueError("sequence 'fibonacci': a=0 and b=0 give no offset; at least one must be 1 or more")
    return cast("ResolvedSequence", {"name": name, **settings})


def window_sizes(num_heads: int, num_tokens: int, w_min: int | None, w_max: int | None) -> list[int]:
    """Largest offset of each head: w_i = w_min + floor((w_max - w_min)(i - 1) / (h - 1)), h = 1: w_max.

    Fibottention section 3.2, in integers (floats give w_12 = 64 instead of 65). `w_max=None` means N // 3 and
    follows the grid; `w_min=None` means w_max, one window for all heads. Values above N are clipped to N.

    Raises:
        ValueError: for values below 1 or w_min above w_max.
    """
    note = f" (values above the {num_tokens} patch tokens are clipped to them)"
    low = None if w_min is None else check_integer("w_min", w_min, 1, note)
    high = None if w_max is None else check_integer("w_max", w_max, 1, note)
    if low is not None and high is not None and low > high:
        raise ValueError(f"w_min={low} must not be above w_max={high}")
    if high is None:
        high = max(num_tokens // 3, low or 1)
    if low is None:
        low = high
    low, high = min(low, num_tokens), min(high, num_tokens)
    if num_heads == 1:
        return [high]
    return [low + (high - low) * head // (num_heads - 1) for head in range(num_heads)]


def _check(settings: Settings) -> Settings:
    return {**settings, "sequence": resolve_sequence(settings["sequence"])}


def _fibottention_notes(support: Settings, pattern: Pattern, grid: Sequence[int]) -> list[str]:
    num_tokens, size = math.prod(grid), "x".join(map(str, grid))
    return [
        f"{support['name']}: {key}={support[key]} is clipped to the {num_tokens} patch tokens of the {size} grid"
        for key in ("w_min", "w_max")
        if isinstance(support[key], int) and support[key] > num_tokens
    ]


@register_support("fibottention", check=_check, notes=_fibottention_notes)
def fibottention(
    num_heads: int,
    num_tokens: int,
    *,
    w_min: int | None = 5,
    w_max: int | None = None,
    modified: bool = False,
    sequence: str | Settings = "wythoff",
) -> list[list[int]]:
    """Head i attends at distances that are terms of row i of the Wythoff array, 0 < |j - k| <= w_i (Eq. 3).

    `modified` puts two predecessors before each row (section 3.2). `sequence` replaces the Wythoff rows by
    another dilation sequence (Table 8, Figure 5). `w_max=None` is N // 3, the papers' 65 at N = 196.
    """
    windows = window_sizes(num_heads, num_tokens, w_min, w_max)
    spec = resolve_sequence(sequence) if isinstance(sequence, str) else cast("ResolvedSequence", sequence)
    modified = check_boolean("modified", modified)
    if spec["name"] == "wythoff":
        spec = cast("ResolvedSequence", {**spec, "modified": modified})
    elif modified:
        raise ValueError(f"modified=True goes with sequence 'wythoff' only, not {spec['name']!r}")
    return [head_sequence(spec, head, window) for head, window in enumerate(windows, start=1)]
