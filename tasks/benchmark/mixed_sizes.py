"""A batch of images of several sizes, in four ways.

packed      all of them in one sequence (hf_sparseprior.attention.packing)
by size     a batch for each size that occurs
one by one  each image alone
padded      as many images, all of the largest one's size: what padding costs without the mask that it needs

`--kind shapes`: images have about `--patches` patches and aspect ratios from 1:2 to 2:1. `--kind scales`: square ones
of an eighth of that number of patches up to it. Both are drawn evenly on a logarithmic scale. The ways take turns. In
float32 the packed logits are first compared with those of each image alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.attention.packing import read_images
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.models.base_config import as_pair
from tasks.benchmark import report
from tasks.benchmark.entry import Benchmark, Case, Session
from tasks.benchmark.model_contenders import preset_config
from tasks.benchmark.timing import SetUp

PACKED, BY_SIZE, ALONE, PADDED = WAYS = ("packed", "by size", "one by one", "padded")
MOST_ASPECT, MOST_SCALE = 2.0, 8.0
PASSES = {"forward": False, "forward and backward": True}


def draw_grids(kind: str, images: int, patches: int, seed: int) -> list[tuple[int, int]]:
    """(height, width) in patches of the images of a batch."""
    generator = torch.Generator().manual_seed(seed)
    grids = []
    for drawn in torch.rand(images, generator=generator, dtype=torch.float64).tolist():
        if kind == "shapes":
            ratio = MOST_ASPECT ** (2 * drawn - 1)
            grids.append((max(1, int(math.sqrt(patches * ratio))), max(1, int(math.sqrt(patches / ratio)))))
        else:
            side = max(1, round(math.sqrt(patches * MOST_SCALE**-drawn)))
            grids.append((side, side))
    return grids


def ways_of(model: Any, images: list[Tensor], trains: bool) -> dict[str, SetUp]:
    """What is timed, by name. A training pass sums the logits and has gradients for the weights."""
    groups, _ = read_images(images, model.config.num_channels, as_pair(model.config.patch_size))
    largest = max(images, key=lambda image: image.shape[1] * image.shape[2])
    batches: dict[str, list[Any]] = {
        PACKED: [images],
        BY_SIZE: groups,
        ALONE: [image[None] for image in images],
        PADDED: [largest[None].repeat(len(images), 1, 1, 1)],
    }

    def passes(own: list[Any]) -> SetUp:
        def call() -> None:
            with torch.set_grad_enabled(trains):
                for batch in own:
                    logits = model(batch).logits
                    if trains:
                        logits.sum().backward()
            model.zero_grad()

        return lambda: call

    return {name: passes(own) for name, own in batches.items()}


def check_equal(model: Any, images: list[Tensor]) -> float:
    """The largest difference of the packed logits from those of each image alone; ValueError above 1e-3."""
    with torch.no_grad():
        alone = torch.cat([model(image[None]).logits for image in images])
        difference = float((model(images).logits - alone).abs().max())
    if difference > 1e-3:
        raise ValueError(f"packed images differ by {difference:.2g} from the same images alone")
    return difference


class MixedSizes(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """The preset and the priors."""
        report.check_positive(**{name: getattr(arguments, name) for name in ("images", "patches", "rounds")})
        family = preset_family(arguments.preset)
        if family.title != "SparsePriorViT":
            one = f"{family.title} takes images of one size, SparsePriorViT several"
            raise ValueError(f"--preset {arguments.preset}: {one}")
        for prior in arguments.priors:
            preset_config(arguments.preset, 224, prior)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """All ways of each prior and pass."""
        for prior in arguments.priors:
            for key in PASSES:
                yield [{"prior": prior, "pass": key, "way": way} for way in WAYS]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """All ways in turns."""
        arguments, prior, trains = session.arguments, cases[0]["prior"], PASSES[cases[0]["pass"]]
        dtype = session.dtype
        torch.manual_seed(0)
        config = preset_config(arguments.preset, 224, prior)
        model = preset_family(arguments.preset).classifier(config).to(session.device, dtype)
        patch, grids = as_pair(config.patch_size), draw_grids(arguments.kind, arguments.images, arguments.patches, 0)
        images = [
            torch.randn(config.num_channels, height * patch[0], width * patch[1], device=session.device, dtype=dtype)
            for height, width in grids
        ]
        difference = check_equal(model.eval(), images) if dtype == torch.float32 else None
        found = session.in_turns(cases, ways_of(model.train(trains), images, trains))
        tokens = [height * width for height, width in grids]
        about = {"sizes": len(set(grids)), "patches": sum(tokens), "padded": len(tokens) * max(tokens)}
        return [{**own, **about, "difference": difference} for own in found]


BENCHMARK = MixedSizes(
    name="mixed_sizes",
    keys=("prior", "pass", "way"),
    same=("preset", "kind", "images", "patches"),
    bases=(ALONE,),
    columns={"sizes": lambda row: str(row["records"][0].get("sizes", "-"))},
)
