"""A file with a support and a decay of a user, as `--import` takes it."""

OWN = '''"""A cross of patches, and a decay along columns."""
import numpy as np

import hf_sparseprior as sp
from hf_sparseprior.patterns.masks import (
    Pairs,
)


@sp.register_support("cross")
def cross(num_heads, grid, *, reach=3):
    """Patches in the same row or column, up to `reach` patches away."""
    from hf_sparseprior import Pattern  # within a function, too

    if not isinstance(reach, int) or reach < 1:
        raise ValueError(f"reach={reach!r} must be an integer of 1 or more")
    places, pairs = np.arange(grid[0] * grid[1]).reshape(grid), [np.empty((0, 2), dtype=int)]
    for step in range(1, min(reach, max(grid)) + 1):
        for a, b in ((places[:, step:], places[:, :-step]), (places[step:], places[:-step])):
            pairs += [np.stack([a.ravel(), b.ravel()], 1), np.stack([b.ravel(), a.ravel()], 1)]
    found = np.unique(np.concatenate(pairs), axis=0)
    return Pattern([[0]] * num_heads, lambda layer: [found] * num_heads)


@sp.register_decay("columns")
class ColumnsDecay(sp.Decay):
    """Distance of two patches = difference of their columns."""

    @classmethod
    def positions(cls, settings, grid):
        return np.indices(grid)[1].reshape(1, 1, -1)
'''
PRIOR = {"support": {"name": "cross", "reach": 2}, "decay": "columns"}
