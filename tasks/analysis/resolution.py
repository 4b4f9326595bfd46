"""Accuracy over the input resolution (VIOLIN Figure 8): python -m tasks.analysis.resolution RUN [RUN ...] --sizes 24 28

The test images are resized (bicubic) to each size, and cut as the model's own image processor cuts them. The positions
are interpolated, support and decay are those of the new grid. Each accuracy is kept as soon as it is known. The command
can be stopped at any moment and started again; then it goes on. It writes resolution.md, .json and a picture.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from hf_sparseprior.analysis.pictures import COLOURS, MARKERS, pyplot, save
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import write_text
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.results import write_results
from hf_sparseprior.runs.tables import markdown_table
from tasks.analysis import commands
from tasks.analysis.trained import (
    Trained,
    accuracies,
    check_arguments,
    fill_cells,
    load_trained,
    open_cells,
    trained_main,
)

# VIOLIN Figure 8 goes from 144 to 512 with models trained at 224; the steps between are ours.
FIGURE_8 = (144, 192, 224, 256, 320, 384, 448, 512)
FIGURE_8_TRAINED = 224


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    return trained_main(commands.resolution(), run, argv)


def run(arguments: argparse.Namespace) -> None:
    """Count what is not known yet, print the table, write it and the picture."""
    check_arguments(arguments)
    models, shared = load_trained(arguments)
    for model in models:
        _check_model(model)
    sizes = check_sizes(arguments.sizes or default_sizes(models), models)
    cells = open_cells(arguments.out, models, shared)
    work = {
        _cell(size): (None, [model.preparation(resized_processor(model.processor, size)) for model in models])
        for size in sizes
    }
    fill_cells(models, cells, shared.images, work, arguments.batch_size, arguments.workers)
    names = {size: _cell(size) for size in sizes}
    accuracy = {model.name: accuracies(model, own, names) for model, own in zip(models, cells, strict=True)}
    data = f"{len(shared.images)} test images of {shared.data.description}"
    text = f"Accuracy, %, on {data}; * the size trained at.\n\n{table(models, accuracy)}"
    write_results(
        arguments.out / "resolution.json",
        {
            "task": "resolution",
            **shared.about(),
            "models": [
                {**model.about(), "trained_at": trained_at(model), "accuracy": accuracy[model.name]} for model in models
            ],
            "command": command_line(),
            **environment(),
        },
    )
    write_text(arguments.out / "resolution.md", text + "\n")
    picture = draw(models, accuracy, arguments.out / "resolution.png", data)
    print(f"{text}\n\n{arguments.out / 'resolution.json'}, picture: {picture}")


def _check_model(model: Trained) -> None:
    if family_of(model.network.config) is None:
        kind = model.network.config.model_type
        raise ValueError(
            f"{model.folder} holds a {kind!r} model; make it ours first: python -m hf_sparseprior convert "
            f"{model.folder} OUT"
        )


def trained_at(model: Trained) -> tuple[int, int]:
    """(height, width) in pixels that a model was made for."""
    return as_pair(model.network.config.image_size)


def default_sizes(models: Sequence[Trained]) -> list[int]:
    """VIOLIN Figure 8's sizes for the first model's image height, rounded to whole patches of all models."""
    patch = _common_patch(models)
    trained = trained_at(models[0])[0]
    return [patch * max(1, round(size * trained / FIGURE_8_TRAINED / patch)) for size in FIGURE_8]


def check_sizes(sizes: Sequence[int], models: Sequence[Trained]) -> list[int]:
    """The sizes, each once, ascending.

    Raises:
        ValueError: for one that is not a multiple of every model's patch.
    """
    patch = _common_patch(models)
    for size in sizes:
        if size < 1 or size % patch:
            below = size - size % patch
            near = f"{below} or {below + patch}" if below > 0 else f"{patch}"
            raise ValueError(f"--sizes {size} must be a multiple of the models' patch of {patch} pixels, as {near}")
    return sorted(set(sizes))


def _common_patch(models: Sequence[Trained]) -> int:
    return math.lcm(*(side for model in models for side in as_pair(model.network.config.patch_size)))


def resized_processor(processor: Any, size: int) -> Any:
    """The image processor for square images of this many pixels, bicubic.

    What it cuts off stays the same share: resizing to 32 to keep the middle 28 becomes, for 56, resizing to 64.
    """
    settings = processor.to_dict()
    settings.update(do_resize=True, resample=Image.Resampling.BICUBIC)
    square = {"height": size, "width": size}
    if settings.get("do_center_crop"):
        cut, whole = settings["crop_size"], settings["size"]
        # Most scale the shorter side; those of DeiT scale both, to a square.
        scaled = {side: round(size * pixels / cut.get(side, cut["height"])) for side, pixels in whole.items() if pixels}
        settings.update(crop_size=square, size=scaled)
    else:
        settings["size"] = square
    return type(processor).from_dict(settings)


def _cell(size: int) -> str:
    return f"size_{size}"


def table(models: Sequence[Trained], accuracy: Mapping[str, Mapping[int, float]]) -> str:
    """A line for each size as a Markdown table, percent; a star where a model was trained."""
    rows = []
    for size in next(iter(accuracy.values())):
        cells = [f"{100 * accuracy[model.name][size]:.2f}{'*' * _is_trained(model, size)}" for model in models]
        rows.append([str(size), *cells])
    return markdown_table(["pixels", *accuracy], rows)


def _is_trained(model: Trained, size: int) -> bool:
    return trained_at(model) == (size, size)


def draw(models: Sequence[Trained], accuracy: Mapping[str, Mapping[int, float]], path: Path, heading: str) -> Path:
    """Accuracy over the size, the size trained at ringed in red (VIOLIN Figure 8)."""
    figure, axis = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    for place, model in enumerate(models):
        sizes, shares = list(accuracy[model.name]), [100 * share for share in accuracy[model.name].values()]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axis.plot(sizes, shares, color=colour, marker=marker, markersize=5, label=model.name)
        for size, share in zip(sizes, shares, strict=True):
            if _is_trained(model, size):
                axis.plot(size, share, "o", color="red", fillstyle="none", markersize=13)
    axis.set_xticks(sizes, map(str, sizes))
    axis.set_xlabel("image height and width, pixels (ringed: trained at)")
    axis.set_ylabel("test accuracy, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(heading, fontsize=10)
    return save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
