"""Learned decays of trained models: python -m tasks.analysis.decay RUN [RUN ...]

It shows gamma of each layer, head and curve, and alpha of each layer and head (VIOLIN Figure 7). It draws the masks
along each curve (Figure 4), for the gammas that were learned (Figure 11), and for every layer and head.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.decays import LearnedDecay, learned_decays
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.runs import SavedModel, check_counts, open_models, write_analysis

QUANTILES = {"min": 0.0, "Q1": 0.25, "median": 0.5, "Q3": 0.75, "max": 1.0}


def measure(saved: SavedModel, decays: list[LearnedDecay]) -> dict[str, Any]:
    """Every scalar, and how far the masks are from none, layer by layer."""
    layers = []
    for decay in decays:
        mean, low = decay.mask_mean_and_min()
        layers.append(
            {
                "layer": decay.layer + 1,
                "grid": list(decay.grid),
                "gamma": decay.gamma.tolist(),
                "beta": decay.beta.tolist(),
                "alpha": None if decay.alpha is None else decay.alpha.tolist(),
                "prefix_gamma": None if decay.prefix_beta is None else torch.sigmoid(decay.prefix_beta).tolist(),
                "mask_mean": mean,
                "mask_min": low,
            }
        )
    gammas = dict(zip(QUANTILES, torch.sigmoid(_quantiles(decays)).tolist(), strict=True))
    return {**saved.about(), "curves": decays[0].curves, "gammas": gammas, "layers": layers}


def table(models: list[dict[str, Any]]) -> str:
    """A row for each layer of each model, as a Markdown table."""
    rows = []
    for found in models:
        for layer in found["layers"]:
            gamma, alpha = np.array(layer["gamma"]), layer["alpha"]
            cells = [found["name"], found["prior"], str(layer["layer"])]
            cells += [f"{value:.5f}" for value in (gamma.min(), np.median(gamma), gamma.max())]
            cells.append("1" if alpha is None else f"{min(alpha):.3f} to {max(alpha):.3f}")
            rows.append([*cells, f"{layer['mask_mean']:.4f}", f"{layer['mask_min']:.4f}"])
    columns = ["model", "prior", "layer", "gamma min", "median", "max", "alpha", "mean M", "smallest M"]
    return markdown_table(columns, rows)


def draw(saved: SavedModel, decays: list[LearnedDecay], out: Path) -> list[Path]:
    """The four pictures of a model; of a model with stages, those of each."""
    alike: dict[Any, list[LearnedDecay]] = {}
    for decay in decays:
        alike.setdefault((decay.grid, decay.beta.shape), []).append(decay)
    stem, drawn = saved.name.replace("/", "_"), []
    if len(alike) == 1:
        return draw_alike(saved.name, decays, out, stem)
    for own in alike.values():
        first, last = own[0].layer + 1, own[-1].layer + 1
        drawn += draw_alike(f"{saved.name}, layers {first} to {last}", own, out, f"{stem}_{first}-{last}")
    return drawn


def draw_alike(name: str, decays: list[LearnedDecay], out: Path, stem: str) -> list[Path]:
    """The four pictures of layers with the same heads, grid and curves, in files that begin with `stem`."""
    grid = decays[0].grid
    gammas = np.stack([decay.gamma.numpy() for decay in decays])
    alphas = None if decays[0].alpha is None else np.stack([decay.alpha.numpy() for decay in decays])  # type: ignore
    numbers = [decay.layer + 1 for decay in decays]
    centre = (grid[0] // 2, grid[1] // 2)
    labels = [f"layer {number}" for number in numbers]
    heads = [f"head {head + 1}" for head in range(gammas.shape[2])]
    # They differ between layers only where positions are learned.
    first = decays[0]
    reaches = gamma_masks(decays, centre, grid)
    medians, references = median_betas(decays), pictures.reference_patches(grid)
    titles = [f"{curve}\n{torch.sigmoid(beta):.5f}" for curve, beta in zip(first.curves, medians, strict=True)]
    return [
        pictures.draw_gammas(gammas, alphas, first.curves, numbers, out / f"{stem}_gamma.png", f"{name}: gamma"),
        pictures.draw_mask_rows(
            reference_masks(decays, medians, list(references.values()), grid), list(references), titles,
            list(references.values()), out / f"{stem}_curves.png", f"{name}: M of each curve at its median gamma",
        ),
        pictures.draw_mask_rows(
            reaches, _quantile_labels(decays), first.curves, [centre] * len(reaches), out / f"{stem}_gammas.png",
            f"{name}: M of the middle patch for the gammas that were learned",
        ),
        pictures.draw_mask_rows(
            head_masks(decays, centre, grid), labels, heads, [centre] * len(labels), out / f"{stem}_heads.png",
            f"{name}: M of the middle patch",
        ),
    ]  # fmt: skip


def median_betas(decays: list[LearnedDecay]) -> Tensor:
    """Median (C,) of the betas that all layers and heads learned for each curve."""
    betas = torch.stack([decay.beta for decay in decays])  # (layers, C, H)
    return betas.transpose(0, 1).flatten(1).quantile(0.5, dim=1)


def reference_masks(
    decays: list[LearnedDecay], betas: Tensor, places: Sequence[tuple[int, int]], grid: tuple[int, int]
) -> np.ndarray:
    """M of some patches along each curve alone, with its beta of (C,), (patches, curves, height, width)."""
    rows = [
        [decays[0].curve_row(curve, beta, row * grid[1] + column).numpy() for curve, beta in enumerate(betas.tolist())]
        for row, column in places
    ]
    return np.reshape(rows, (len(places), len(betas), *grid))


def _quantiles(decays: list[LearnedDecay]) -> Tensor:
    """Quantiles of the betas of all layers, curves and heads."""
    betas = torch.cat([decay.beta.flatten() for decay in decays])
    return betas.quantile(torch.tensor(list(QUANTILES.values()), dtype=betas.dtype))


def _quantile_labels(decays: list[LearnedDecay]) -> list[str]:
    gammas = torch.sigmoid(_quantiles(decays)).tolist()
    return [f"{name}\n{gamma:.5f}" for name, gamma in zip(QUANTILES, gammas, strict=True)]


def gamma_masks(decays: list[LearnedDecay], query: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """M of one patch along each curve for the quantiles of all learned gammas, (quantiles, curves, height, width)."""
    place, curves = query[0] * grid[1] + query[1], range(len(decays[0].curves))
    rows = [[decays[0].curve_row(c, beta, place).numpy() for c in curves] for beta in _quantiles(decays).tolist()]
    return np.reshape(rows, (len(QUANTILES), len(curves), *grid))


def head_masks(decays: list[LearnedDecay], query: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """M of one patch in every layer and head, (layers, heads, height, width)."""
    place = query[0] * grid[1] + query[1]
    return np.stack([decay.mask_row(place).numpy().reshape(-1, *grid) for decay in decays])


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.decay()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_counts(arguments)
        models, drawn = [], []
        for saved in open_models(arguments):
            try:
                decays = learned_decays(saved.model)
            except ValueError as error:
                raise ValueError(f"{saved.folder}: {error}") from None
            models.append(measure(saved, decays))
            drawn += draw(saved, decays, arguments.out)
        write_analysis(arguments.out / "decay.json", {"task": "decay", "models": models})
        print(table(models))
        print("\n".join(f"picture: {path}" for path in drawn))
        print(f"results: {arguments.out / 'decay.json'}")

    return run_command(parser.prog, work, "from the beginning")


if __name__ == "__main__":
    sys.exit(main())
