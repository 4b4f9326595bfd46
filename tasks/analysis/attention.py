"""Attention maps over images: python -m tasks.analysis.attention RUN [RUN ...] --images FILE ... or --indices N ...

It draws two kinds of pictures for each model and image. One shows the attention of the class token (or the mean of all
patches') in each layer and head. The other shows, for chosen query patches, which patches each head sees, next to its
attention to them (as in Sparsifiner Figures 3 and 5). Layers, heads, rows and columns count from 1, as in the pictures,
and images of a split from 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis.attention_maps import (
    attention_distance,
    attention_entropy,
    check_pairs,
    class_token_map,
    mean_query_map,
    query_map,
    rollouts,
)
from hf_sparseprior.analysis.image_maps import Panel, draw_panels
from hf_sparseprior.analysis.layers import AttentionLayers, attention_weights, connectivity
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.commands import QUERIES
from tasks.analysis.maps import (
    check_map_arguments,
    chosen,
    chosen_images,
    chosen_queries,
    report_maps,
)
from tasks.analysis.runs import (
    SavedModel,
    open_models,
    preparation,
    shown_image,
)

LAYERS, QUERY_LAYERS, QUERY_HEADS = 6, 3, 4  # as many as fit, unless --layers and --heads say more
NOTE = (
    "pairs seen: share of all pairs of tokens, prefix included; entropy in nats, mean over queries (uniform attention: "
    "log of the number of tokens); distance: of the patches attended to, in patches. Means over heads and images."
)


def attention_rows(
    image: np.ndarray,
    weights: Sequence[Tensor],
    attention: AttentionLayers,
    layers: Sequence[int],
    heads: Sequence[int],
    source: str,
    rollout: bool,
) -> list[list[Panel]]:
    """Panels of each layer: the image with the attention of the class token, or of all patches, over it.

    Args:
        image: (height, width, 3).
        weights: (H, T, T) for every layer.
        attention: the model's attention layers.
        layers, heads: numbers from 0.
        source: one of QUERIES.
        rollout: whether to add the rollout up to each layer.
    """
    look = class_token_map if source == "class_token" else mean_query_map
    where = (attention.grid, attention.num_prefix_tokens)
    rolled = list(rollouts(layer[None] for layer in weights)) if rollout else []
    rows = []
    for number in layers:
        maps = look(weights[number], *where)
        panels = [_heat_panel(image, maps.mean(0), "mean")]
        if rollout:
            panels.append(_heat_panel(image, look(rolled[number][0], *where), "rollout"))
        rows.append(panels + [_heat_panel(image, maps[head], f"head {head + 1}") for head in heads])
    rows[0].insert(0, Panel(image, title="image"))
    for row in rows[1:]:
        row.insert(0, Panel(np.ones_like(image)))
    return rows


def _heat_panel(image: np.ndarray, heat: Tensor, title: str) -> Panel:
    values = heat.numpy()
    return Panel(image, heat=values, title=f"{title}, max {values.max():.2g}")


def query_rows(
    image: np.ndarray,
    weights: Sequence[Tensor],
    seen: Sequence[Tensor],
    attention: AttentionLayers,
    layers: Sequence[int],
    heads: Sequence[int],
    query: tuple[int, int],
) -> list[list[Panel]]:
    """Panels of each layer: the patches that each head sees from a query patch, then its attention to them.

    Args:
        image: (height, width, 3).
        weights, seen: (H, T, T) for every layer, attention and connectivity.
        attention: the model's attention layers.
        layers, heads: numbers from 0.
        query: (row, column), from 0.
    """
    grid, prefix = attention.grid, attention.num_prefix_tokens
    rows = []
    for number in layers:
        visible = query_map(seen[number], query, grid, prefix).numpy()
        heat = query_map(weights[number], query, grid, prefix).numpy()
        where: dict[str, Any] = {"query": query, "grid": grid}
        row = [
            Panel(image, seen=visible[head], title=f"head {head + 1} sees {visible[head].sum()}", **where)
            for head in heads
        ]
        row += [
            Panel(image, heat=heat[head], title=f"head {head + 1}, max {heat[head].max():.2g}", **where)
            for head in heads
        ]
        rows.append([Panel(image, title="image" if number == layers[0] else "", **where), *row])
    return rows


def work_on(saved: SavedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw the pictures of one model and return the numbers of every layer."""
    attention, out = saved.attention, arguments.out
    source = arguments.source or QUERIES[0 if attention.has_class_token else 1]
    if source == QUERIES[0] and not attention.has_class_token:
        raise ValueError(f"--source {source}: {saved.name} has no class token; take {QUERIES[1]}")
    count, num_heads = len(attention.layers), min(layer.num_heads for layer in attention.layers)
    queries = chosen_queries(arguments.queries, attention.grid)
    layers = chosen(arguments.layers, count, LAYERS, "--layers")
    query_layers = chosen(arguments.layers, count, QUERY_LAYERS, "--layers")
    heads = chosen(arguments.heads, num_heads, num_heads, "--heads")
    query_heads = heads if arguments.heads else heads[:QUERY_HEADS]
    prepare, numbers, pictures = preparation(saved), [], []
    for name, picture in chosen_images(saved, arguments).items():
        pixel_values = prepare(picture)
        given = attention_weights(saved.model, pixel_values[None].to(arguments.device))
        check_pairs(given[0], attention.grid, attention.num_prefix_tokens)
        seen = [
            connectivity(layer, own, attention)[0].cpu() for layer, own in zip(attention.layers, given, strict=True)
        ]
        weights = [layer[0].float().cpu() for layer in given]
        numbers.append([_numbers(own, visible, attention) for own, visible in zip(weights, seen, strict=True)])
        image, stem = shown_image(saved, pixel_values), f"{saved.name.replace('/', '_')}_{name}"
        rows = attention_rows(image, weights, attention, layers, heads, source, arguments.rollout)
        heading = f"{saved.name}, {name}: attention of {'the class token' if source == QUERIES[0] else 'all patches'}"
        labels = [f"layer {number + 1}" for number in layers]
        pictures.append(draw_panels(rows, labels, out / f"{stem}.png", heading))
        for row, column in queries:
            panels = query_rows(image, weights, seen, attention, query_layers, query_heads, (row, column))
            heading = f"{saved.name}, {name}: what the framed patch sees, and its attention"
            labels = [f"layer {number + 1}" for number in query_layers]
            path = out / f"{stem}_query_{row + 1}_{column + 1}.png"
            pictures.append(draw_panels(panels, labels, path, heading))
    means = np.mean(numbers, axis=0).tolist()
    return {
        **saved.about(),
        "images": len(numbers),
        "queries_of": source,
        "layers": [dict(zip(("pairs_seen", "entropy", "distance"), layer, strict=True)) for layer in means],
        "pictures": [str(path) for path in pictures],
    }


def _numbers(weights: Tensor, seen: Tensor, attention: AttentionLayers) -> tuple[float, float, float]:
    """Share of the pairs that are seen, entropy and distance of one image in one layer."""
    distance = attention_distance(weights, attention.grid, attention.num_prefix_tokens)
    return seen.float().mean().item(), attention_entropy(weights).mean().item(), distance.mean().item()


def table(models: list[dict[str, Any]]) -> str:
    """A row for each layer of each model, as a Markdown table."""
    rows = [
        [
            *(found["name"], found["prior"], str(number)),
            *(f"{100 * layer['pairs_seen']:.1f}", f"{layer['entropy']:.3f}", f"{layer['distance']:.2f}"),
        ]
        for found in models
        for number, layer in enumerate(found["layers"], start=1)
    ]
    return markdown_table(["model", "prior", "layer", "pairs seen, %", "entropy", "distance"], rows)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.attention()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_map_arguments(arguments)
        models = [work_on(saved, arguments) for saved in open_models(arguments)]
        report_maps("attention", models, NOTE, table(models), arguments.out)

    return run_command(parser.prog, work, "from the beginning")


if __name__ == "__main__":
    sys.exit(main())
