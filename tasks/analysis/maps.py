"""What the commands that draw maps over single images share: which images, patches, layers and heads they show."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_sparseprior.images.sources import decode
from tasks.analysis.runs import (
    SavedModel,
    check_counts,
    check_takes_images,
    open_images,
    write_analysis,
)


def check_map_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError if no image is given, and where `check_counts` does."""
    check_counts(arguments)
    if not arguments.images and not arguments.indices:
        raise ValueError("no image is given; give --images FILE ... or --indices N ...")


def chosen_images(saved: SavedModel, arguments: argparse.Namespace) -> dict[str, Image.Image]:
    """The images of --images and --indices by a name for files."""
    check_takes_images(saved)
    images = {Path(file).stem: decode(str(file), str(file)) for file in arguments.images}
    if len(images) < len(arguments.images):
        raise ValueError("--images: two files of the same name would give the same picture")
    if arguments.indices:
        dataset, description = open_images(saved, arguments)
        for index in arguments.indices:
            if not 0 <= index < len(dataset):
                raise ValueError(
                    f"--indices {index} must be between 0 and {len(dataset) - 1}, the last of {description}"
                )
            images[f"{arguments.split}{index}"] = dataset.images.read(index)
    return images


def chosen(numbers: Sequence[int] | None, count: int, default: int, option: str) -> list[int]:
    """Numbers from 1 as positions from 0, each once. Without numbers: `default` positions, spread evenly up to the
    last.
    """
    if not numbers:
        return sorted({round(position) for position in np.linspace(0, count - 1, min(default, count))})
    for number in numbers:
        if not 1 <= number <= count:
            raise ValueError(f"{option} {number} must be between 1 and {count}")
    return [number - 1 for number in dict.fromkeys(numbers)]


def chosen_queries(queries: Sequence[tuple[int, int]] | None, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """(row, column) from 0 of the patches of --queries, each once; without any the middle one."""
    for row, column in queries or ():
        if row >= grid[0] or column >= grid[1]:
            raise ValueError(f"--queries {row + 1},{column + 1} must be from 1,1 to {grid[0]},{grid[1]}, the grid")
    return list(dict.fromkeys(queries or [(grid[0] // 2, grid[1] // 2)]))


def report_maps(task: str, models: Sequence[dict[str, Any]], note: str, table: str, out: Path) -> None:
    """Write TASK.json, print the table and name every file."""
    path = out / f"{task}.json"
    write_analysis(path, {"task": task, "note": note, "models": models})
    print(f"{table}\n\n{note}")
    for found in models:
        print("\n".join(f"picture: {picture}" for picture in found["pictures"]))
    print(f"results: {path}")
