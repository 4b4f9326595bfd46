"""Attention inside object boxes: python -m tasks.analysis.box_variance RUN [RUN ...]

The mean and the variance of the weights from the patches of an object's box to the patches of the same box, averaged
over images (Fibottention section 6.2). Boxes come with the images of a table that has a column `boxes`, or with
--images FOLDER --boxes FILE.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.attention_maps import check_pairs
from hf_sparseprior.analysis.boxes import InsideAttention, inside_attention, patch_coverage
from hf_sparseprior.analysis.image_maps import Panel, draw_panels
from hf_sparseprior.analysis.layers import attention_weights
from hf_sparseprior.base.json_files import DATA_BYTES, parse_json, read_limited
from hf_sparseprior.images.config import Decoding
from hf_sparseprior.images.sources import decode
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.commands import COLUMNS
from tasks.analysis.diversity import spread
from tasks.analysis.runs import (
    SavedModel,
    check_counts,
    open_images,
    open_models,
    preparation,
    shown_image,
    write_analysis,
)

EXAMPLES = 6
STORED = Decoding(exif="ignore")  # boxes are in pixels of the stored image
NOTE = (
    "Weights after the softmax, from each patch of a box to each patch of it, of the last layer; a patch is in a box "
    "that covers half of it. Variances: over the pairs, of the mean over the heads; over the pairs of each head, the "
    "mean over heads; over the patches, of what each receives in the mean over heads and patches. A pair outside a "
    "head's support has weight 0. Means over the boxes of an image, then over images."
)


@dataclass(frozen=True)
class BoxedImages:
    """Images with the boxes of their objects.

    read: index -> RGB image. boxes: index -> [left, top, width, height] of each object, in pixels. name: index -> name
    of the image. description: of the whole set.
    """

    count: int
    read: Callable[[int], Image.Image]
    boxes: Callable[[int], Sequence[Sequence[float]]]
    name: Callable[[int], str]
    description: str


def data_images(saved: SavedModel, arguments: argparse.Namespace) -> BoxedImages:
    """The images of a run's data, which must come with boxes."""
    dataset, description = open_images(saved, arguments)
    images = dataset.images
    if images.boxes is None:
        raise ValueError(
            f"{description}: the images have no boxes; give a table with a column 'boxes', as the data sets of "
            "tasks.classification.spatial have it, or --images FOLDER --boxes FILE"
        )
    return BoxedImages(len(images), images.read, images.boxes, images.name, description)


def folder_images(folder: Path, boxes_file: Path, limit: int | None) -> BoxedImages:
    """The images of a folder that a file of boxes names."""
    boxes = read_boxes(boxes_file)
    names = list(boxes)[:limit]
    for name in names:
        if not (folder / name).is_file():
            raise OSError(f"{boxes_file} names {name!r}, which is no file in {folder}")
    return BoxedImages(
        len(names),
        lambda index: decode(str(folder / names[index]), str(folder / names[index]), STORED),
        lambda index: boxes[names[index]],
        lambda index: names[index],
        f"{folder} ({len(names)} images with boxes)",
    )


def read_boxes(path: Path) -> dict[str, list[list[float]]]:
    """Boxes by image name, from a JSON file {"image.png": [[left, top, width, height], ...]} or from a CSV file with
    the columns image,left,top,width,height and a line for each box.

    Raises:
        ValueError, OSError: the message names the file, and the line or image where it is wrong.
    """
    text = read_limited(path, DATA_BYTES).decode("utf-8-sig")  # spreadsheets put a mark in front
    found: dict[str, list[list[float]]] = defaultdict(list)
    if path.suffix == ".json":
        try:
            content = parse_json(text, strict=False)
            rows = [(f"{path}, {name!r}", name, box) for name, boxes in content.items() for box in boxes]
        except (ValueError, AttributeError, TypeError):
            raise ValueError(f"{path} must be JSON like {{NAME: [[left, top, width, height], ...]}}") from None
    else:
        table = csv.DictReader(text.splitlines())
        if missing := [column for column in COLUMNS if column not in (table.fieldnames or ())]:
            raise ValueError(f"{path} has no column {missing[0]!r}; its first line must be {','.join(COLUMNS)}")
        rows = [
            (f"{path} line {number}", row["image"], [row[column] for column in COLUMNS[1:]])
            for number, row in enumerate(table, start=2)
        ]
    for where, name, box in rows:
        found[name].append(_numbers(box, where))
    if not found:
        raise ValueError(f"{path} holds no boxes")
    return dict(found)


def _numbers(box: Any, where: str) -> list[float]:
    try:
        left, top, width, height = (float(value) for value in box)
    except (ValueError, TypeError):
        raise ValueError(f"{where}: box {box!r} must be the numbers left, top, width, height in pixels") from None
    if not all(map(math.isfinite, (left, top, width, height))) or min(left, top) < 0 or min(width, height) <= 0:
        raise ValueError(f"{where}: box {box!r} must have left and top of 0 or more, width and height above 0")
    return [left, top, width, height]


def patches_inside(box: Sequence[float], image: Image.Image, saved: SavedModel, where: str) -> Tensor:
    """Bool (rows, columns): the patches that a box of the image covers by half or more.

    The box goes through the model's image processor as the image does, so it is cut and scaled with it.
    """
    # Edges, not sides, are rounded: both halves of a side could go up.
    left, top, right, bottom = (round(edge) for edge in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    if right > image.width or bottom > image.height:
        raise ValueError(f"{where}: box {list(box)} leaves the image of {image.width}x{image.height} pixels")
    pixels = np.zeros((image.height, image.width, 3), dtype=np.uint8)
    pixels[top:bottom, left:right] = 255
    mask = preparation(saved, do_normalize=False, do_rescale=True, rescale_factor=1 / 255)(Image.fromarray(pixels))
    # Bicubic scaling leaves values between 0 and 1 near the edges, and rounding must not decide about exactly a half.
    return patch_coverage(mask[0].clamp(0, 1), saved.attention.grid) >= 0.5 - 1e-6


def measure(
    saved: SavedModel, images: BoxedImages, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Panel]]:
    """Means and variances of every layer, and panels of the first images by their names."""
    prepare, grid, prefix = preparation(saved), saved.attention.grid, saved.attention.num_prefix_tokens
    found: list[np.ndarray] = []  # for each image: (layers, fields of InsideAttention)
    panels: dict[str, Panel] = {}
    left_out = boxes_used = 0
    for index in tqdm(range(images.count), desc=saved.name, disable=None, leave=False):
        image, name = images.read(index), images.name(index)
        inside = [patches_inside(box, image, saved, name) for box in images.boxes(index)]
        used = [patches for patches in inside if patches.sum() >= 2]
        left_out += len(inside) - len(used)
        boxes_used += len(used)
        if not used:
            continue
        pixel_values = prepare(image)
        weights = attention_weights(saved.model, pixel_values[None].to(arguments.device))
        check_pairs(weights[0], grid, prefix)
        found.append(np.array([_mean_over_boxes(layer[0], used, prefix) for layer in weights]))
        if len(panels) < EXAMPLES:
            panels[name] = _example(saved, pixel_values, weights[-1][0].cpu(), used[0])
    if not found:
        raise ValueError(
            f"{images.description}: no box holds two patches of the {grid[0]}x{grid[1]} grid of {saved.name}"
        )
    values = np.stack(found)  # (images, layers, 4)
    layers = [dict(zip(InsideAttention._fields, layer, strict=True)) for layer in values.mean(0).tolist()]
    about = {
        **saved.about(),
        "data": images.description,
        "images": len(found),
        "boxes": boxes_used,
        "boxes_of_less_than_two_patches": left_out,
        "tokens": prefix + grid[0] * grid[1],
        "last_layer": layers[-1],
        "last_layer_variance_of_images": spread(values[:, -1, 1]),
        "all_layers": dict(zip(InsideAttention._fields, values.mean((0, 1)).tolist(), strict=True)),
        "layers": layers,
        "layer_variance_medians": np.median(values[:, :, 1], axis=0).tolist(),
    }
    return about, panels


def _mean_over_boxes(weights: Tensor, inside: Sequence[Tensor], prefix: int) -> np.ndarray:
    return np.mean([inside_attention(weights, patches, prefix) for patches in inside], axis=0)


def _example(saved: SavedModel, pixel_values: Tensor, weights: Tensor, inside: Tensor) -> Panel:
    """What the patches of a box attend to, as the mean over them and the heads, with the box in patches."""
    grid, prefix = saved.attention.grid, saved.attention.num_prefix_tokens
    chosen = prefix + inside.flatten().nonzero()[:, 0]
    heat = weights[:, chosen, prefix:].mean((0, 1)).reshape(grid).numpy()
    image = shown_image(saved, pixel_values)
    high, wide = image.shape[0] / grid[0], image.shape[1] / grid[1]
    rows, columns = (axis.nonzero()[:, 0] for axis in (inside.any(1), inside.any(0)))
    box = (columns[0] * wide, rows[0] * high, len(columns) * wide, len(rows) * high)
    return Panel(image, heat=heat, box=[float(side) for side in box], title=f"max {heat.max():.2g}")


def table(models: list[dict[str, Any]]) -> str:
    """A row for each model, as a Markdown table; variances in units of 1e-5, as in the paper's text."""
    columns = ["model", "prior", "tokens", "mean weight", "variance over pairs, 1e-5", "of each head", "over patches"]
    columns += ["over pairs, all layers", "images", "boxes"]
    rows = []
    for found in models:
        last = found["last_layer"]
        variances = [last[key] for key in ("variance", "head_variance", "patch_variance")]
        variances.append(found["all_layers"]["variance"])
        cells = [found["name"], found["prior"], str(found["tokens"]), f"{last['mean']:.5f}"]
        rows.append(cells + [f"{1e5 * value:.3f}" for value in variances] + [str(found["images"]), str(found["boxes"])])
    return markdown_table(columns, rows)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.box_variance()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_counts(arguments)
        if (arguments.images is None) != (arguments.boxes is None):
            raise ValueError("--images FOLDER and --boxes FILE go together")
        models, panels = [], []
        own = folder_images(arguments.images, arguments.boxes, arguments.limit) if arguments.boxes else None
        for saved in open_models(arguments):
            about, examples = measure(saved, own or data_images(saved, arguments), arguments)
            models.append(about)
            panels.append(examples)
        drawn = _draw(models, panels, arguments.out)
        results = {"task": "box_variance", "note": NOTE, "models": models}
        write_analysis(arguments.out / "box_variance.json", results)
        print(f"{table(models)}\n\n{NOTE}")
        print(f"results: {arguments.out / 'box_variance.json'}, pictures: {' '.join(map(str, drawn))}")

    return run_command(parser.prog, work)


def _draw(models: list[dict[str, Any]], panels: list[dict[str, Panel]], out: Path) -> list[Path]:
    names = [found["name"] for found in models]
    spreads = [found["last_layer_variance_of_images"] for found in models]
    # A box may be too small for the patches of one model.
    shared = [name for name in panels[0] if all(name in own for own in panels)]
    examples = [[own[name] for name in shared] for own in panels]
    drawn = [
        pictures.draw_quartiles(
            {name: {key: 1e5 * value for key, value in own.items()} for name, own in zip(names, spreads, strict=True)},
            {found["name"]: [1e5 * value for value in found["layer_variance_medians"]] for found in models},
            out / "box_variance.png",
            "variance inside boxes, 1e-5",
            f"variance of the attention inside object boxes, {models[0]['data']}",
            log=True,
        )
    ]
    if shared:
        rows = [[replace(panel, heat=None, title="") for panel in examples[0]], *examples]
        heading = "what the patches of a box attend to: last layer, mean of heads and patches; each map has its scale"
        drawn.append(draw_panels(rows, ["image", *names], out / "box_examples.png", heading))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
