"""Pictures of maps over images: attention, which patches a query sees, boxes. Needs matplotlib.

Nothing here depends on a model: a map is an array over the patches, whatever computed it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.pictures import add_share_bar, pyplot, save, wide_enough

FRAME = "#2fd3ff"  # colour of queries and boxes, which neither heat maps nor most photos have
HEAT = 0.8  # share of the heat map in the colour; the rest is the grey image
# Brightness of patches that are not seen and of those that are. They differ also where the image is black or white.
UNSEEN, SEEN = (0.0, 0.18), (0.35, 1.0)


@dataclass(frozen=True)
class Panel:
    """An image with a map over it.

    image: (height, width, 3), 0 to 1. heat: (rows, columns) of the grid, drawn over the image; light is high. seen:
    bool (rows, columns); patches that are not seen are darkened. query: (row, column) on `grid` of a patch that gets a
    frame.
    box: (left, top, width, height) in pixels of the image. title: drawn above the image.
    """

    image: np.ndarray
    heat: np.ndarray | None = None
    seen: np.ndarray | None = None
    query: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None
    box: Sequence[float] | None = None
    title: str = ""

    def pixels(self) -> np.ndarray:
        """What is drawn, (height, width, 3), 0 to 1."""
        pixels = self.image
        if self.heat is not None:
            pixels = with_heat(pixels, self.heat)
        if self.seen is not None:
            pixels = darkened(pixels, self.seen)
        return pixels


def over_pixels(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Values over the patches (rows, columns) as values over the pixels (height, width), constant in each patch."""
    rows = np.arange(height) * values.shape[0] // height
    columns = np.arange(width) * values.shape[1] // width
    return values[rows[:, None], columns[None, :]]


def with_heat(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """A grey version of an image (height, width, 3) under the colours of a heat map. The largest value is the lightest.

    Args:
        image: (height, width, 3), 0 to 1.
        heat: (rows, columns); below 0 counts as 0.
    """
    heat = np.maximum(heat, 0)
    highest = heat.max()
    colours = pyplot().get_cmap("inferno")(over_pixels(heat / highest if highest > 0 else heat, *image.shape[:2]))
    grey = image.mean(-1, keepdims=True)
    return HEAT * colours[..., :3] + (1 - HEAT) * grey


def darkened(image: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """An image (height, width, 3) with the brightness SEEN where bool `seen` (rows, columns) is True, else UNSEEN."""
    light = over_pixels(seen, *image.shape[:2])[..., None]
    low, high = (np.where(light, SEEN[end], UNSEEN[end]) for end in (0, 1))
    return low + (high - low) * image


def draw_panels(
    panels: Sequence[Sequence[Panel]], row_labels: Sequence[str], path: str | os.PathLike, heading: str
) -> Path:
    """Rows of panels; rows may differ in length.

    Args:
        panels: the panels of each row.
        row_labels: text at the left of each row.
        path: where the PNG is written.
        heading: text above all panels.
    """
    columns = max(map(len, panels))
    width = 1.6 if columns <= 9 else 1.15
    height, across = panels[0][0].image.shape[:2]
    lines = 1 + max(panel.title.count("\n") for row in panels for panel in row)
    row = width * height / across + 0.12 * lines
    size = (wide_enough(width * columns + 1.1, heading, 10), row * len(panels) + 0.4)
    figure, axes = pyplot().subplots(len(panels), columns, figsize=size, squeeze=False, layout="constrained")
    for line, row_panels, label in zip(axes, panels, row_labels, strict=True):
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        for axis, panel in zip(line, row_panels, strict=False):
            _draw_panel(axis, panel)
        line[0].set_ylabel(label, fontsize=8)
    if any(panel.heat is not None for row_panels in panels for panel in row_panels):
        add_share_bar(figure, axes, "inferno")
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    height, width = panel.image.shape[:2]
    # Pixel edges lie at whole numbers, as for boxes.
    axis.imshow(panel.pixels(), extent=(0, width, height, 0), interpolation="nearest", vmin=0, vmax=1)
    axis.set_title(panel.title, fontsize=7, pad=2)
    if panel.query is not None and panel.grid is not None:
        high, wide = height / panel.grid[0], width / panel.grid[1]
        corner = (panel.query[1] * wide, panel.query[0] * high)
        axis.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor=FRAME, linewidth=1.6))
    if panel.box is not None:
        left, top, box_width, box_height = panel.box
        axis.add_patch(Rectangle((left, top), box_width, box_height, fill=False, edgecolor=FRAME, linewidth=1.6))
