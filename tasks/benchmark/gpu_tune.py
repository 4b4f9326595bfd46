"""Which sizes of a block are the fastest on this GPU, for `hf_sparseprior.kernels.triton_sizes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_sparseprior.kernels import triton_sizes

# What is tried: rows and warps, over all pairs rows, keys, warps and stages. What the compiler refuses, or what spills
# so much that it is slow, loses.
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "diagonal_forward": [(16, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8), (128, 16)],
    "diagonal_backward": [(16, 4), (16, 8), (32, 4), (32, 8), (64, 8), (64, 16)],
    "decayed_forward": [
        (64, 32, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    ],
    "decayed_backward": [(32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 2), (64, 128, 8, 1)],
    "decayed_gradients": [(64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3), (128, 64, 8, 2)],
}
BETTER = 0.97  # of the default's time, or the default stays


@contextmanager
def trying(key: str, sizes: triton_sizes.Sizes) -> Iterator[None]:
    """A call within uses these sizes, whatever the table says."""
    triton_sizes.TRIED[key] = sizes
    try:
        yield
    finally:
        del triton_sizes.TRIED[key]


def fastest(
    kernel: str, q: torch.Tensor, run: Callable[[], Any], seconds: Callable[[dict[str, Callable]], dict[str, dict]]
) -> dict[str, Any]:
    """Try all candidates on one call.

    Args:
        kernel: one of `triton_sizes.KERNELS`.
        q: as the call has it; its dtype and width are what the result is for.
        run: the call.
        seconds: times set-ups that take turns, as `gpu.tune_blocks` does.

    Returns:
        {"key", "tried": {"64 x 8": seconds or why not}, "chosen": sizes, or None for the default}.
    """
    columns = triton_sizes.block_sizes(kernel, q)["COLUMNS"]
    default = triton_sizes.default_sizes(kernel, q.element_size(), columns, triton_sizes.card_row(q.device))
    key = triton_sizes.entry_key(kernel, q.element_size(), columns)

    def set_up(sizes: triton_sizes.Sizes) -> Callable[[], Callable[[], Any]]:
        def call() -> Any:
            with trying(key, sizes):
                return run()

        return lambda: call

    rows = dict.fromkeys([tuple(default.values()), *CANDIDATES[kernel]])
    names = {" x ".join(map(str, row)): dict(zip(default, row, strict=True)) for row in rows}
    found = seconds({name: set_up(sizes) for name, sizes in names.items()})
    tried = {name: result.get("median", result.get("failed")) for name, result in found.items()}
    timed = {name: value for name, value in tried.items() if isinstance(value, float)}
    best, first = min(timed, key=lambda name: timed[name], default=None), next(iter(names))
    better = best is not None and timed[best] < BETTER * timed.get(first, float("inf"))
    return {"key": key, "tried": tried, "chosen": names[best] if best is not None and better else None}
