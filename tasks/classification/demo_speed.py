"""What one image costs on this machine: a ViT-S over image sizes, dense and with Fibottention.

Every size is measured, on a slow machine in fewer rounds. Two cores take half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.costs_measured import seconds_per_call
from hf_sparseprior.runs.tables import markdown_table

PRESET = "vit_small"
SIZES = (224, 512, 1024)  # pixels a side
PRIORS = ("dense", "fibottention")
MOST_ROUNDS = 10
SECONDS = 5.0  # of a size, after which no further round begins; one is always done

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Seconds an image at one size, by prior: the median of the rounds."""

    pixels: int
    tokens: int
    seconds: Mapping[str, float]


@torch.no_grad()
def forward_of(pixels: int, prior: str) -> tuple[Call, int]:
    """A forward pass of one image through a model with random weights, and its number of patches."""
    config = SparsePriorViTConfig.from_preset(PRESET, image_size=pixels, prior=prior)
    torch.manual_seed(0)
    model = SparsePriorViTForImageClassification(config).eval()
    image = torch.randn(1, config.num_channels, pixels, pixels)

    def forward() -> object:
        with torch.no_grad():
            return model(pixel_values=image).logits

    return forward, config.grid[0] * config.grid[1]


def measured(
    make: Callable[[int, str], tuple[Call, int]] = forward_of,
    sizes: Sequence[int] = SIZES,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Row]:
    """The rows, each when it is measured. All contenders of a size take turns; their first call is not counted.

    Args:
        make: (pixels, prior) -> what is timed, and its number of patches.
        sizes: pixels, ascending.
        clock: seconds.
        say: called with a line before each size.
    """
    device = torch.device("cpu")
    for pixels in sizes:
        say(f"{pixels} x {pixels} pixels")
        calls = {prior: make(pixels, prior) for prior in PRIORS}
        tokens = next(iter(calls.values()))[1]
        for call, _ in calls.values():
            call()  # makes tables
        rounds: list[dict[str, float]] = []
        began = clock()
        while not rounds or (len(rounds) < MOST_ROUNDS and clock() - began < SECONDS):
            order = list(calls)[:: 1 if len(rounds) % 2 else -1]
            rounds.append({prior: seconds_per_call(calls[prior][0], 1, device) for prior in order})
        seconds = {prior: median(one[prior] for one in rounds) for prior in PRIORS}
        yield Row(pixels, tokens, seconds)


def table(rows: Sequence[Row]) -> str:
    """Seconds an image and how many times faster than dense."""
    cells = []
    for row in rows:
        times = row.seconds["dense"] / row.seconds["fibottention"]
        numbers = [*(f"{row.seconds[prior]:.3f}" for prior in PRIORS), f"{times:.2f}"]
        cells.append([str(row.pixels), str(row.tokens), *numbers])
    return markdown_table(["pixels a side", "patches", *(f"{prior}, s" for prior in PRIORS), "times faster"], cells)
