"""A batch of images of several sizes, in four ways: python -m tasks.benchmark.mixed_sizes

packed      all of them in one sequence (hf_sparseprior.attention.packing)
by size     a batch for each size that occurs
one by one  each image alone
padded      as many images, all of the largest one's size: what padding costs without the mask that it needs

`--kind shapes`: images have about `--patches` patches and aspect ratios from 1:2 to 2:1. `--kind scales`: square ones
of an eighth of that number of patches up to it. Both are drawn evenly on a logarithmic scale. The ways take turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.attention.packing import read_images
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.models.base_config import as_pair
from tasks.benchmark import commands, report
from tasks.benchmark.model import preset_config
from tasks.benchmark.timing import SetUp, measure
from tasks.common.command import run_command
from tasks.common.results import write_results

PACKED, BY_SIZE, ALONE, PADDED = WAYS = ("packed", "by size", "one by one", "padded")
MOST_ASPECT, MOST_SCALE = 2.0, 8.0
PASSES = {False: "forward", True: "forward and backward"}


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


def set_ups(model: Any, images: list[Tensor], trains: bool) -> dict[str, SetUp]:
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


def measured(prior: str, trains: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """`timing.measure` of a prior and a pass."""
    dtype, device = report.machine_of(arguments)
    torch.manual_seed(0)
    config = preset_config(arguments.preset, 224, prior)
    model = preset_family(arguments.preset).classifier(config).to(device, dtype).train(trains)
    patch, grids = as_pair(config.patch_size), draw_grids(arguments.kind, arguments.images, arguments.patches, 0)
    images = [
        torch.randn(config.num_channels, height * patch[0], width * patch[1], device=device, dtype=dtype)
        for height, width in grids
    ]
    difference = check_equal(model.eval(), images) if dtype == torch.float32 else None
    own = set_ups(model.train(trains), images, trains)
    result = measure(own, device, arguments.budget, arguments.rounds, (ALONE,), {})
    tokens = [height * width for height, width in grids]
    about = {
        "images": len(images),
        "sizes": len(set(grids)),
        "patches": sum(tokens),
        "padded": len(tokens) * max(tokens),
    }
    return {"prior": prior, "pass": PASSES[trains], **about, "difference": difference, **result}


def row(entry: dict[str, Any]) -> list[str]:
    """A line of the table: ms an image, and times over one by one."""
    contenders, cells = entry["contenders"], [entry["prior"], entry["pass"], f"{entry['sizes']} in {entry['images']}"]
    for name in WAYS:
        seconds = contenders.get(name, {}).get("seconds")
        cells.append(report.milliseconds(report.an_image(seconds, entry["images"])) if seconds else "-")
    for name in (PACKED, BY_SIZE, PADDED):
        ratio = contenders.get(name, {}).get(f"times_{ALONE}")
        cells.append(f"{ratio['median']:.2f}" if ratio else "-")
    return cells


def run(arguments: argparse.Namespace) -> None:
    """Measure, print and write."""
    report.check_file(arguments.out)
    counts = {name: getattr(arguments, name) for name in ("images", "patches", "rounds", "budget")}
    report.check_positive(**counts)
    family = preset_family(arguments.preset)
    if family.title != "SparsePriorViT":
        raise ValueError(
            f"--preset {arguments.preset}: {family.title} takes images of one size, SparsePriorViT several"
        )
    for prior in arguments.priors:
        preset_config(arguments.preset, 224, prior)
    report.machine_of(arguments)
    results = report.provenance("mixed_sizes", arguments)
    report.print_provenance(results)
    results["entries"] = [measured(prior, trains, arguments) for prior in arguments.priors for trains in PASSES]
    header = ["prior", "pass", "sizes", *(f"{way}, ms an image" for way in WAYS)]
    header += [f"{way} / alone" for way in (PACKED, BY_SIZE, PADDED)]
    print("\n" + report.text_table(header, [row(entry) for entry in results["entries"]]))
    write_results(arguments.out, results)
    print(f"\n{arguments.out}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.mixed_sizes()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
