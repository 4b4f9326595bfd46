"""Head diversity over a data set: python -m tasks.analysis.diversity RUN [RUN ...]

For each image it is 2 / (h (h - 1)) sum_{i<j} |Y_i - Y_j|_F / (|Y_i|_F + |Y_j|_F), with the outputs Y_i = softmax(...)
V of the heads of a layer (Fibottention section 6.1). The table has a row for each model, as the paper's Table 7.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.diversity import head_diversity
from hf_sparseprior.analysis.layers import watch_heads
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.runs import (
    SavedModel,
    check_counts,
    open_images,
    open_models,
    pixel_batches,
    write_analysis,
)

STATISTICS = ("min", "q1", "median", "q3", "max")
NOTE = (
    "100 times diversity(X), of the last layer: the formula printed in Fibottention section 6.1 lies between 0 and 1, "
    "the numbers of its Table 7 between 13 and 76. The results file has the formula as printed."
)


def measure(saved: SavedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """The spread over the images of every layer's diversity."""
    for layer in saved.attention.layers:
        if layer.num_heads < 2:
            raise ValueError(f"{saved.folder} has one head a layer; there is no diversity between heads")
    dataset, description = open_images(saved, arguments)
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in saved.attention.layers]

    def see(layer: int, heads: Tensor) -> None:
        diversity = head_diversity(heads)
        found[layer].append((diversity.relative.cpu().numpy(), diversity.distance.cpu().numpy()))

    with torch.no_grad(), watch_heads(saved.attention, see):
        for pixel_values in pixel_batches(dataset, arguments.batch_size, arguments.device, saved.name):
            saved.model(pixel_values=pixel_values)
    layers = [
        {"diversity": spread(np.concatenate(relative)), "distance": spread(np.concatenate(distance))}
        for relative, distance in (zip(*layer, strict=True) for layer in found)
    ]
    return {**saved.about(), "data": description, "images": len(dataset), "last_layer": layers[-1], "layers": layers}


def spread(values: np.ndarray) -> dict[str, float]:
    """Extremes, quartiles and median; between two values quartiles are interpolated."""
    return dict(zip(STATISTICS, np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist(), strict=True))


def table(models: list[dict[str, Any]]) -> str:
    """A row for each model, 100 times the last layer's diversity, as a Markdown table."""
    rows = [
        [
            *(found["name"], found["prior"]),
            *(f"{100 * found['last_layer']['diversity'][key]:.2f}" for key in STATISTICS),
            str(found["images"]),
        ]
        for found in models
    ]
    return markdown_table(["model", "prior", "min", "Q1", "median", "Q3", "max", "images"], rows)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.diversity()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_counts(arguments)
        models = [measure(saved, arguments) for saved in open_models(arguments)]
        picture = pictures.draw_quartiles(
            {m["name"]: {key: 100 * value for key, value in m["last_layer"]["diversity"].items()} for m in models},
            {m["name"]: [100 * layer["diversity"]["median"] for layer in m["layers"]] for m in models},
            arguments.out / "diversity.png",
            "100 x diversity between heads",
            f"head diversity, {models[0]['data']}",
        )
        write_analysis(arguments.out / "diversity.json", {"task": "head_diversity", "note": NOTE, "models": models})
        print(f"{table(models)}\n\n{NOTE}")
        print(f"results: {arguments.out / 'diversity.json'}, picture: {picture}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
