"""Radial attention: a baseline for clips, in which attention thins out with the distance in time (Li et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import check_boolean, check_within
from hf_sparseprior.patterns.masks import check_listed
from hf_sparseprior.patterns.pattern import Pattern, register_support


def _radial_notes(support: Mapping[str, Any], pattern: Pattern, grid: Sequence[int]) -> list[str]:
    if len(grid) == 3:
        return []
    size = "x".join(map(str, grid))
    return [f"{support['name']}: the {size} grid is a single frame, in which all pairs are kept; it acts over clips"]


@register_support("radial", notes=_radial_notes)
def radial(num_heads: int, clip: Sequence[int], *, decay_factor: float = 1.0, first_frame: bool = True) -> Pattern:
    """Pairs (patch k of frame i, patch l of frame j) in a band around k = l, half as wide each time |i - j| doubles.

    From Radial Attention (arXiv 2506.19852), whose mask this is: with s patches in a frame and d = max(|i - j|, 1), a
    band has the width w = s / 2^floor(log2 d) and keeps the pairs with |k - l| + 1 <= w, patches in raster order.
    Where w is below 1, it keeps k = l, and these only if |i - j| is a multiple of ceil(1 / w). Frames that are
    neighbours are thus dense, and a patch sees O(s log F) others in F frames. All heads have the same pairs.

    `first_frame`: every patch sees the first frame, the paper's attention sink. `decay_factor`: as in the published
    code w is multiplied by it, here in all frames but the patch's own, and it is at most 1.

    Not here: the paper rounds the mask to blocks of 128 x 128 tokens for its kernel, and its models keep their first
    layers and denoising steps dense. Pairs are listed, since no diagonal of a clip but the first has all of them.
    """
    check_boolean("first_frame", first_frame)
    check_within("decay_factor", decay_factor, 0.0, 1.0, "above 0 and at most 1")
    if not decay_factor:
        raise ValueError(f"decay_factor={decay_factor!r} must be above 0 and at most 1")
    frames, patches = clip[0], math.prod(clip[1:])
    listed = radial_count(frames, patches, decay_factor, first_frame)
    check_listed([listed], num_heads, f"support 'radial' over {'x'.join(map(str, clip))} patches")

    def pairs(layer: int) -> list[np.ndarray]:
        all_pairs = radial_pairs(frames, patches, decay_factor, first_frame)
        return [all_pairs[all_pairs[:, 0] != all_pairs[:, 1]]] * num_heads

    return Pattern(offsets=[[0] for _ in range(num_heads)], pairs=pairs)


def radial_count(frames: int, num_tokens: int, decay_factor: float, first_frame: bool) -> int:
    """How many pairs `radial_pairs` lists."""
    counts = [len(_band(distance, num_tokens, decay_factor)) for distance in range(frames)]
    whole = counts[0]
    banded = frames * whole + 2 * sum((frames - distance) * counts[distance] for distance in range(1, frames))
    return banded + first_frame * sum(whole - count for count in counts[1:])


def radial_pairs(frames: int, num_tokens: int, decay_factor: float, first_frame: bool) -> np.ndarray:
    """The pairs of a clip with `num_tokens` patches in a frame, sorted, int64 (n, 2)."""
    banded = {distance: _band(distance, num_tokens, decay_factor) for distance in range(frames)}
    whole, numbers = banded[0], []
    for query in range(frames):
        for key in range(frames):
            band = whole if first_frame and key == 0 else banded[abs(query - key)]
            numbers.append((band[:, 0] + query * num_tokens) * (frames * num_tokens) + band[:, 1] + key * num_tokens)
    places = np.sort(np.concatenate(numbers))
    return np.stack(np.divmod(places, frames * num_tokens), 1)


def _band(distance: int, num_tokens: int, decay_factor: float) -> np.ndarray:
    """Pairs (k, l) of patches of two frames at a distance, int64 (n, 2)."""
    width = num_tokens / 2 ** (max(distance, 1).bit_length() - 1)
    if distance:
        width *= decay_factor
    reach = math.floor(width) - 1  # the largest |k - l|
    if reach < 0:
        reach = 0 if distance % math.ceil(1 / width) == 0 else -1
    patches = np.arange(num_tokens)
    keys = patches[:, None] + np.arange(-reach, reach + 1)
    rows, places = np.nonzero((keys >= 0) & (keys < num_tokens))
    return np.stack([rows, keys[rows, places]], 1)
