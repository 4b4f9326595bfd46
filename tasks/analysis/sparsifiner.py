"""What Sparsifiner predicts: python -m tasks.analysis.sparsifiner RUN --images FILE ... or --indices N ...

It draws four kinds of pictures. For each image and query patch: the patches that each head sees, with its attention to
them and to all patches (Sparsifiner Figure 3); and the means of these over the heads, with --others next to the
attention of other models, for example dense and linformer (Figure 5). Once for a model: the sparse basis W_up (Figure
6). For each image: the coefficients A_down (Figure 7). Layers, heads, rows and columns count from 1, images of a split
from 0.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis.attention_maps import query_map
from hf_sparseprior.analysis.image_maps import Panel, draw_panels
from hf_sparseprior.analysis.layers import attention_weights
from hf_sparseprior.analysis.pictures import draw_matrices
from hf_sparseprior.analysis.sparsifiner import Prediction, attention_distance, masked_attention, watch_predictions
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.maps import (
    check_map_arguments,
    chosen,
    chosen_images,
    chosen_queries,
    report_maps,
)
from tasks.analysis.runs import (
    SavedModel,
    load_model,
    model_folder,
    model_names,
    open_models,
    preparation,
    shown_image,
)

# As many as the paper's figures show, unless --layers and --heads say more.
QUERY_LAYERS, QUERY_HEADS, BASIS_LAYERS, BASIS_ROWS, COEFFICIENT_HEAD = 3, 4, 6, 24, 5
LONG_TITLE = 20
NOTE = (
    "patches kept: by each patch, in the mean. The others are percentages: of all pairs, prefix included; of the "
    "values of A_down, above tau; of the values of W_up, not 0; of the multiply-adds of A_down W_up, without a zero; "
    "of full attention, the weight on what is kept, and on as many of its highest values; of these, those that are "
    "kept. Means over heads and images."
)
COLUMNS = {
    "patches_kept": "patches kept",
    "pairs_seen": "pairs seen, %",
    "coefficients_kept": "A_down kept, %",
    "basis_kept": "W_up kept, %",
    "up_share": "A_down W_up, %",
    "attention_kept": "attention kept, %",
    "attention_best": "of the highest, %",
    "highest_kept": "highest kept, %",
}


@torch.no_grad()
def predictions_of(saved: SavedModel, pixel_values: Tensor) -> list[Prediction]:
    """The predictions of every layer for one image (channels, height, width)."""
    with watch_predictions(saved.model) as found:
        saved.model(pixel_values=pixel_values[None])
    return found


def query_rows(
    image: np.ndarray,
    layers: dict[int, Prediction],
    heads: Sequence[int],
    query: tuple[int, int],
    grid: tuple[int, int],
    prefix: int,
) -> list[list[Panel]]:
    """Panels of each layer (Figure 3): the image, what each head sees, its attention to that, and to everything.

    Args:
        image: (height, width, 3).
        layers: predictions for one image by number of the layer, from 0.
        heads: numbers from 0.
        query: (row, column), from 0.
        grid: (height, width) in patches.
        prefix: number of prefix tokens.
    """
    where: dict[str, Any] = {"query": query, "grid": grid}
    rows = []
    for prediction in layers.values():
        visible, sparse, full = (
            query_map(pairs[0].cpu(), query, grid, prefix).numpy()
            for pairs in (prediction.connectivity, masked_attention(prediction), prediction.full_attention)
        )
        row = [Panel(image, **where)]
        row += [Panel(image, seen=visible[h], title=f"head {h + 1} sees {visible[h].sum()}", **where) for h in heads]
        row += [
            Panel(image, heat=sparse[h], title=_with_max(f"head {h + 1}, sparse", sparse[h]), **where) for h in heads
        ]
        row += [Panel(image, heat=full[h], title=_with_max(f"head {h + 1}, full", full[h]), **where) for h in heads]
        rows.append(row)
    return rows


def comparison_rows(
    image: np.ndarray,
    layers: dict[int, Prediction],
    others: Mapping[str, Sequence[Tensor]],
    query: tuple[int, int],
    grid: tuple[int, int],
    prefix: int,
) -> list[list[Panel]]:
    """Panels of each layer (Figure 5): full attention, other models' and sparse attention, each as the mean over heads.

    Args:
        others: for each model by name, weights (1, H, T, T) of every layer.
        image, layers, query, grid, prefix: as in `query_rows`.
    """
    rows = []
    for number, prediction in layers.items():
        means = {"full": prediction.full_attention, **{name: weights[number] for name, weights in others.items()}}
        means["sparse"] = masked_attention(prediction)
        row = [Panel(image, query=query, grid=grid)]
        for title, pairs in means.items():
            heat = query_map(pairs[0].mean(0).cpu(), query, grid, prefix).numpy()
            row.append(Panel(image, heat=heat, title=_with_max(title, heat), query=query, grid=grid))
        rows.append(row)
    return rows


def _with_max(title: str, heat: np.ndarray) -> str:
    """A title that gives the largest value, because every map has its own scale; long names in lines."""
    lines = title if len(title) < LONG_TITLE else title.replace("/", "/\n")
    return f"{lines}\nmax {heat.max():.2g}"


def draw_basis(saved: SavedModel, predictions: Sequence[Prediction], path: Path) -> Path:
    """Rows of W_up of the first layers as maps over the patches (Figure 6); weights below 0 are drawn as 0."""
    rows = [
        [own.clamp_min(0).reshape(saved.attention.grid).cpu().numpy() for own in prediction.basis[:BASIS_ROWS]]
        for prediction in predictions[:BASIS_LAYERS]
    ]
    labels = [f"layer {number + 1}" for number in range(len(rows))]
    return draw_matrices(rows, labels, path, f"{saved.name}: the sparse basis, rows of W_up")


def draw_coefficients(saved: SavedModel, predictions: Sequence[Prediction], head: int, path: Path) -> Path:
    """A_down of one head in every layer, (patches, rows of W_up); what the threshold drops is 0 (Figure 7)."""
    kept = [(own.coefficients * (own.coefficients > own.threshold))[0, head].cpu().numpy() for own in predictions]
    titles = [f"layer {number + 1}" for number in range(len(kept))]
    heading = f"{saved.name}: A_down of head {head + 1}, {kept[0].shape[0]} patches x {kept[0].shape[1]}"
    return draw_matrices([kept], [""], path, heading, titles)


def distances(predictions: Sequence[Prediction], others: Mapping[str, Sequence[Tensor]], prefix: int) -> dict[str, Any]:
    """How far sparse and full attention and those of other models lie apart (Figure 5), each pair once, by the names of
    `comparison_rows`; the mean over layers of `attention_distance`.
    """
    of = {"full": [own.full_attention for own in predictions], **others}
    of["sparse"] = [masked_attention(own) for own in predictions]
    found: dict[str, Any] = {}
    for (one, own), (other, others_own) in itertools.combinations(of.items(), 2):
        layers = [attention_distance(*pair, prefix) for pair in zip(own, others_own, strict=True)]
        found.setdefault(other, {})[one] = float(np.mean(layers))
    return found


def work_on(saved: SavedModel, others: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw the pictures of one model and return the numbers of every layer."""
    attention, out = saved.attention, arguments.out
    grid, prefix, count = attention.grid, attention.num_prefix_tokens, len(attention.layers)
    num_heads = attention.layers[0].num_heads
    queries = chosen_queries(arguments.queries, grid)
    numbers = chosen(arguments.layers, count, QUERY_LAYERS, "--layers")
    heads = chosen(arguments.heads, num_heads, num_heads, "--heads")
    heads = heads if arguments.heads else heads[:QUERY_HEADS]
    prepare, found = preparation(saved), []
    apart: list[dict[str, Any]] = []
    pictures: list[Path] = []
    name_of_file = saved.name.replace("/", "_")
    for name, picture in chosen_images(saved, arguments).items():
        pixel_values = prepare(picture).to(arguments.device)
        predictions = predictions_of(saved, pixel_values)
        found.append([own.numbers(prefix) for own in predictions])
        image, stem = shown_image(saved, pixel_values), out / f"{name_of_file}_{name}"
        layers, labels = {n: predictions[n] for n in numbers}, [f"layer {n + 1}" for n in numbers]
        weights = {other: attention_weights(model, pixel_values[None]) for other, model in others.items()}
        apart.append(distances(predictions, weights, prefix))
        if not pictures:
            pictures.append(draw_basis(saved, predictions, out / f"{name_of_file}_basis.png"))
        head = min(COEFFICIENT_HEAD, num_heads) - 1
        pictures.append(draw_coefficients(saved, predictions, head, stem.with_name(f"{stem.name}_coefficients.png")))
        for row, column in queries:
            end = f"_query_{row + 1}_{column + 1}.png"
            rows = query_rows(image, layers, heads, (row, column), grid, prefix)
            heading = f"{saved.name}, {name}: what the framed patch sees, its attention to that, and to all patches"
            pictures.append(draw_panels(rows, labels, stem.with_name(stem.name + end), heading))
            rows = comparison_rows(image, layers, weights, (row, column), grid, prefix)
            heading = f"{saved.name}, {name}: attention of the framed patch, mean of the heads"
            pictures.append(draw_panels(rows, labels, stem.with_name(f"{stem.name}_compared{end}"), heading))
    means = np.mean([[[layer[name] for name in COLUMNS] for layer in image] for image in found], axis=0).tolist()
    return {
        **saved.about(),
        "images": len(found),
        "layers": [dict(zip(COLUMNS, layer, strict=True)) for layer in means],
        "distances": {
            one: {other: float(np.mean([image[one][other] for image in apart])) for other in own}
            for one, own in apart[0].items()
        },
        "pictures": [str(path) for path in pictures],
    }


def open_others(arguments: argparse.Namespace) -> dict[str, Any]:
    """The models of --others by name."""
    folders = [model_folder(path) for path in arguments.others]
    if not folders:
        return {}
    names = model_names(folders)
    loaded = [load_model(folder).eval().to(arguments.device) for folder in folders]
    return dict(zip(names, loaded, strict=True))


def check_others(saved: SavedModel, others: dict[str, Any]) -> None:
    """Raise ValueError unless the other models have the layers and tokens of this one."""
    own = saved.model.config
    for name, model in others.items():
        for field in ("num_hidden_layers", "grid", "num_prefix_tokens"):
            other = getattr(model.config, field, None)
            if other != getattr(own, field):
                raise ValueError(f"--others {name}: {field}={other} must be {getattr(own, field)}, as in {saved.name}")


def table(models: list[dict[str, Any]]) -> str:
    """A row for each layer of each model, as a Markdown table."""
    rows = [
        [
            *(found["name"], str(number), f"{layer['patches_kept']:.1f}"),
            *(f"{100 * layer[key]:.1f}" for key in list(COLUMNS)[1:]),
        ]
        for found in models
        for number, layer in enumerate(found["layers"], start=1)
    ]
    return markdown_table(["model", "layer", *COLUMNS.values()], rows)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.sparsifiner()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_map_arguments(arguments)
        others, models = open_others(arguments), []
        for saved in open_models(arguments):
            check_others(saved, others)
            models.append(work_on(saved, others, arguments))
        report_maps("sparsifiner", models, NOTE, table(models), arguments.out)

    return run_command(parser.prog, work, "from the beginning")


if __name__ == "__main__":
    sys.exit(main())
