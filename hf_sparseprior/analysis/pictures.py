"""Pictures of supports, curves, decays and attention. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis.flops import ModelFlops
from hf_sparseprior.patterns.curves import curve_rank

INK = "#1b3a4b"
ACCENT = "#c8553d"
PAPER = "#f4f1ea"
# Styles of models side by side, which are few; further models repeat them.
COLOURS = (INK, ACCENT, "#7a9e48", "#8a6fae", "#e0a030", "#4f97a3", "#9c6b4e", "#c76b98")
MARKERS = "os^DvPX*"
DPI = 110
SUPPORT_PIXELS = 300  # about the side of a panel
FLAT = 1e-3  # a mask that is nearer to 1 than this everywhere has one colour


def pyplot() -> Any:
    """matplotlib.pyplot on a backend that needs no screen.

    Raises:
        ImportError: without matplotlib; the message has the line that installs it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf_sparseprior[classification]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: str | os.PathLike, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a figure and free it. metadata: texts that the file holds besides, as "Description" of a PNG."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata=metadata)
    pyplot().close(figure)
    return path


def wide_enough(width: float, heading: str, size: float) -> float:
    """Inches that hold both panels of this width and a heading of this font size in points."""
    # A letter is about 0.6 of its size wide, a point 1/72 inch.
    return max(width, 0.6 / 72 * size * max(map(len, heading.split("\n"))) + 0.2)


def _panels(count: int, width: float, height: float, heading: float) -> tuple[Any, Any]:
    """A figure of up to four panels a row, with sizes in inches. Every axis is hidden until it is drawn on."""
    columns = min(4, count)
    rows = math.ceil(count / columns)
    figure, axes = pyplot().subplots(rows, columns, figsize=(width * columns, height * rows + heading), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    return figure, axes


def draw_support(
    masks: np.ndarray, titles: Sequence[str], path: str | os.PathLike, heading: str, num_prefix_tokens: int = 0
) -> Path:
    """One panel a head: which keys (columns) each query (row) attends to.

    Args:
        masks: bool (heads, T, T).
        titles: title of each panel.
        path: where the PNG is written.
        heading: text above all panels.
        num_prefix_tokens: these are drawn in another colour.
    """
    tokens = masks.shape[-1]
    # Up to some hundred tokens a pair is a whole number of pixels, so that no diagonal is lost between two of them.
    side = tokens * max(2, SUPPORT_PIXELS // tokens) if tokens <= 1.5 * SUPPORT_PIXELS else SUPPORT_PIXELS
    figure, axes = _pixel_panels(len(masks), (side, side), heading)
    from matplotlib.colors import ListedColormap

    for axis, mask, title in zip(axes, masks, titles, strict=True):
        image = mask.astype(np.uint8)
        if num_prefix_tokens:
            image[:num_prefix_tokens] *= 2
            image[num_prefix_tokens:, :num_prefix_tokens] *= 2
        axis.imshow(image, cmap=ListedColormap([PAPER, INK, ACCENT]), vmin=0, vmax=2, interpolation="nearest")
        axis.set_title(title, fontsize=9)
    return save(figure, path)


def draw_seen(
    rows: np.ndarray, titles: Sequence[str], query: tuple[int, int], path: str | os.PathLike, heading: str
) -> Path:
    """One panel a head: which patches of the grid one patch attends to.

    Args:
        rows: bool (heads, height, width).
        titles: title of each panel.
        query: (row, column) of the patch, which is drawn in another colour if it sees itself, and has a frame.
        path, heading: as in `draw_support`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    height, width = rows.shape[1:]
    cell = max(3, SUPPORT_PIXELS // max(height, width))
    figure, axes = _pixel_panels(len(rows), (cell * height, cell * width), heading)
    for axis, seen, title in zip(axes, rows, titles, strict=True):
        image = seen.astype(np.uint8)
        image[query] *= 2
        axis.imshow(image, cmap=ListedColormap([PAPER, INK, ACCENT]), vmin=0, vmax=2, interpolation="nearest")
        axis.add_patch(
            Rectangle((query[1] - 0.5, query[0] - 0.5), 1, 1, fill=False, edgecolor=ACCENT, linewidth=2, zorder=3)
        )
        if cell >= 8:
            axis.hlines(np.arange(1, height) - 0.5, -0.5, width - 0.5, color="white", linewidth=0.8)
            axis.vlines(np.arange(1, width) - 0.5, -0.5, height - 0.5, color="white", linewidth=0.8)
        axis.set_title(title, fontsize=9)
    return save(figure, path)


def _pixel_panels(count: int, size: tuple[int, int], heading: str) -> tuple[Any, list[Any]]:
    """A figure of up to four panels a row, each of a size (height, width) in pixels, with a title above each."""
    gap, title, top = 18, 26, 48
    columns = min(4, count)
    rows = math.ceil(count / columns)
    wide = max(columns * (size[1] + gap) + gap, math.ceil(DPI * wide_enough(0, heading, 12)))
    high = top + rows * (size[0] + title) + gap
    figure = pyplot().figure(figsize=(wide / DPI, high / DPI))
    left = (wide - columns * (size[1] + gap) + gap) // 2
    axes = []
    for number in range(count):
        row, column = divmod(number, columns)
        x, y = left + column * (size[1] + gap), high - top - row * (size[0] + title) - size[0]
        axis = figure.add_axes((x / wide, y / high, size[1] / wide, size[0] / high))
        axis.set(xticks=[], yticks=[])
        axes.append(axis)
    figure.suptitle(heading, fontsize=12, y=1 - 6 / high, va="top")
    return figure, axes


def add_share_bar(figure: Any, axes: Any, cmap: str, label: str = "value / largest") -> None:
    """A colour bar from 0 to 1 for panels that are each drawn in a scale of their own."""
    from matplotlib.cm import ScalarMappable

    figure.colorbar(ScalarMappable(cmap=cmap), ax=axes, shrink=0.8, label=label, pad=0.01, ticks=[0, 0.5, 1])


def draw_curves(curves: Sequence[str], grid: Sequence[int], path: str | os.PathLike) -> Path:
    """One panel a curve: its path over the patches, from dark (first) to light (last).

    The frames of a clip (frames, height, width) lie side by side, and steps between frames are dotted.
    """
    heading = f"curves on a {'x'.join(map(str, grid))} grid, dot = start"
    frames, height, width = (1, *grid)[-3:]
    columns = min(4, len(curves)) if frames == 1 else 1
    if frames > 1:
        return _draw_clip_curves(curves, (frames, height, width), path, heading)
    figure, axes = _panels(len(curves), wide_enough(2.8 * columns, heading, 12) / columns, 3.0, 0.4)
    from matplotlib.collections import LineCollection

    for axis, curve in zip(axes.flat, curves, strict=False):
        order = np.argsort(curve_rank(curve, grid).ravel())
        points = np.stack([order % grid[1], order // grid[1]], 1).astype(float)
        segments = np.stack([points[:-1], points[1:]], 1)
        lines = LineCollection(list(segments), cmap="viridis", linewidths=1.8)
        lines.set_array(np.arange(len(segments)))
        axis.add_collection(lines)
        axis.plot(*points[0], "o", color=ACCENT, markersize=5)
        axis.set_xlim(-0.7, grid[1] - 0.3)
        axis.set_ylim(grid[0] - 0.3, -0.7)
        axis.set_aspect("equal")
        axis.set_title(curve, fontsize=10)
    figure.suptitle(heading, fontsize=12)
    figure.tight_layout()
    return save(figure, path)


def _draw_clip_curves(curves: Sequence[str], grid: tuple[int, int, int], path: str | os.PathLike, heading: str) -> Path:
    frames, height, width = grid
    wide = frames * (width + 1)
    figure, axes = pyplot().subplots(
        len(curves),
        1,
        figsize=(wide_enough(min(16.0, 0.22 * wide), heading, 12), 2.0 * len(curves) + 0.5),
        squeeze=False,
    )
    from matplotlib.collections import LineCollection

    for axis, curve in zip(axes.flat, curves, strict=True):
        times, rows, columns = np.unravel_index(np.argsort(curve_rank(curve, grid).ravel()), grid)
        points = np.stack([columns + times * (width + 1), rows], 1).astype(float)
        segments, within = np.stack([points[:-1], points[1:]], 1), np.diff(times) == 0
        for chosen, style in ((within, "solid"), (~within, "dotted")):
            lines = LineCollection(list(segments[chosen]), cmap="viridis", linewidths=1.5, linestyles=style)
            lines.set_array(np.arange(len(segments))[chosen])
            lines.set_clim(0, len(segments))
            axis.add_collection(lines)
        axis.plot(*points[0], "o", color=ACCENT, markersize=5)
        axis.set(xlim=(-0.7, wide - 1.3), ylim=(height - 0.3, -0.7), aspect="equal")
        axis.axis("off")
        axis.set_title(curve, fontsize=10)
    figure.suptitle(heading, fontsize=12)
    figure.tight_layout()
    return save(figure, path)


def side_by_side(clip: np.ndarray) -> np.ndarray:
    """Values (..., frames, height, width) as (..., height, frames (width + 1) - 1), with gaps of NaN between frames."""
    gap = np.full((*clip.shape[:-1], 1), np.nan)
    joined = np.concatenate([clip.astype(float), gap], -1).swapaxes(-3, -2)
    return joined.reshape(*clip.shape[:-3], clip.shape[-2], -1)[..., :-1]


def draw_clip_rows(rows: np.ndarray, titles: Sequence[str], query: int, path: str | os.PathLike, heading: str) -> Path:
    """One line a head: which patches of a clip one patch attends to, the frames side by side.

    Args:
        rows: bool (heads, frames, height, width).
        titles: of the heads.
        query: number of the patch, which is marked.
        path, heading: as in `draw_support`.
    """
    from matplotlib.colors import ListedColormap

    heads, frames, height, width = rows.shape
    time, row, column = np.unravel_index(query, (frames, height, width))
    wide = min(16.0, 0.16 * frames * (width + 1))
    lines = 0.3 + wide * height / (frames * (width + 1))
    figure, axes = pyplot().subplots(
        heads, 1, figsize=(wide_enough(wide + 1.0, heading, 11), lines * heads + 0.8), squeeze=False
    )
    for axis, values, title in zip(axes.flat, side_by_side(rows), titles, strict=True):
        axis.imshow(values, cmap=ListedColormap([PAPER, INK]), vmin=0, vmax=1, interpolation="nearest")
        axis.plot(column + time * (width + 1), row, "o", color=ACCENT, markersize=3)
        axis.set_title(title, fontsize=8)
        axis.axis("off")
    figure.suptitle(heading, fontsize=11)
    figure.tight_layout()
    return save(figure, path)


def draw_decay(masks: Mapping[str, np.ndarray], grid: Sequence[int], path: str | os.PathLike, heading: str) -> Path:
    """Rows: three reference patches; columns: decay masks (N, N) by name (VIOLIN Figure 4).

    Of a clip (frames, height, width) it is the patch in the middle, and the frames lie side by side.
    """
    if len(grid) == 3:
        return _draw_clip_decay(masks, grid, path, heading)
    grid = (grid[0], grid[1])
    references = reference_patches(grid)
    rows = [[mask[row * grid[1] + column] for mask in masks.values()] for row, column in references.values()]
    panels = np.reshape(rows, (len(rows), len(masks), *grid))
    return draw_mask_rows(panels, list(references), list(masks), list(references.values()), path, heading)


def _draw_clip_decay(
    masks: Mapping[str, np.ndarray], grid: Sequence[int], path: str | os.PathLike, heading: str
) -> Path:
    frames, height, width = grid
    row, column = reference_patches((height, width))["centre"]
    patch, mark = (frames // 2 * height + row) * width + column, frames // 2 * (width + 1) + column
    lines = [side_by_side(mask[patch].reshape(frames, height, width)) for mask in masks.values()]
    wide = min(16.0, 0.16 * frames * (width + 1))
    tall = 0.35 + wide * height / (frames * (width + 1))
    figure, axes = pyplot().subplots(
        len(lines),
        1,
        figsize=(wide_enough(wide + 1.0, heading, 11), tall * len(lines) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    low = min(float(np.nanmin(lines)), 1 - FLAT)
    for axis, values, name in zip(axes.flat, lines, masks, strict=True):
        image = axis.imshow(values, vmin=low, vmax=1.0, cmap="viridis")
        axis.plot(mark, row, "o", color=ACCENT, markersize=3)
        axis.set_title(name, fontsize=8)
        axis.axis("off")
    figure.colorbar(image, ax=list(axes.flat), shrink=0.6, label="M", pad=0.01)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def reference_patches(grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """(row, column) of the patches of VIOLIN Figure 4 by name."""
    height, width = grid
    return {"top left": (0, 0), "centre": (height // 2, width // 2), "bottom right": (height - 1, width - 1)}


def draw_attention(
    image: np.ndarray,
    attentions: Mapping[str, np.ndarray],
    grid: tuple[int, int],
    num_prefix_tokens: int,
    query: tuple[int, int],
    path: str | os.PathLike,
    heading: str,
) -> Path:
    """Attention over an image: a row for each model, columns for the class token and the heads of one patch.

    Args:
        image: (height, width) or (height, width, 3), drawn as it is.
        attentions: weights (heads, T, T) of one layer by model name.
        grid: (height, width) in patches.
        num_prefix_tokens: tokens in front of the patches; the first is drawn as "class token".
        query: (row, column) of the patch whose heads are drawn.
        path: of the PNG.
        heading: above all panels.
    """
    plt = pyplot()
    heads = min(6, next(iter(attentions.values())).shape[0])
    columns = ["image"] + (["class token, mean"] if num_prefix_tokens else []) + [f"head {n + 1}" for n in range(heads)]
    figure, axes = plt.subplots(
        len(attentions),
        len(columns),
        figsize=(1.75 * len(columns) + 0.9, 1.9 * len(attentions) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    position = num_prefix_tokens + query[0] * grid[1] + query[1]
    for row, (line, (name, weights)) in enumerate(zip(axes, attentions.items(), strict=True)):
        maps = [image]
        if num_prefix_tokens:
            maps.append(weights[:, 0, num_prefix_tokens:].mean(0).reshape(grid))
        maps += [weights[head, position, num_prefix_tokens:].reshape(grid) for head in range(heads)]
        for column, (axis, values) in enumerate(zip(line, maps, strict=True)):
            if column == 0:
                axis.imshow(values, cmap="gray")
            else:
                axis.imshow(values, cmap="viridis", vmin=0, vmax=max(float(values.max()), 1e-12))
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(columns[column], fontsize=9)
            if column and columns[column].startswith("head"):
                axis.plot(query[1], query[0], "o", color=ACCENT, markersize=4)
        line[0].set_ylabel(name, fontsize=9)
    add_share_bar(figure, axes, "viridis", "attention / largest")
    figure.suptitle(heading, fontsize=12)
    return save(figure, path)


def draw_flops(curves: Mapping[str, Mapping[str, Sequence[ModelFlops]]], path: str | os.PathLike, heading: str) -> Path:
    """Whole model and attention alone over the image size, log-log (Fibottention Figure 3).

    Args:
        curves: by model, then by prior: counts of square images. "dense" is drawn with dashes, the first other prior
            with a whole line.
        path: of the PNG.
        heading: above both panels.
    """
    figure, axes = pyplot().subplots(1, 2, figsize=(wide_enough(11.5, heading, 11), 4.8), layout="constrained")
    ticks = _apart(
        {flops.image_size[0] for priors in curves.values() for counts in priors.values() for flops in counts}
    )
    for axis, part, title in zip(axes, ("total", "attention"), ("whole model", "attention alone"), strict=True):
        for number, (model, priors) in enumerate(curves.items()):
            styles = itertools.cycle(["-", ":", "-."])
            for prior, counts in priors.items():
                sizes = [flops.image_size[0] for flops in counts]
                axis.plot(
                    sizes,
                    [getattr(flops, part) / 1e9 for flops in counts],
                    color=f"C{number}",
                    marker="os^Dv"[number % 5],
                    markersize=4,
                    # Models of one width have nearly the same dense cost, so the later, thinner line lies on the first.
                    linewidth=max(1.2, 3.2 - number),
                    linestyle="--" if prior == "dense" else next(styles),
                    label=f"{model}, {prior}",
                )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(ticks, [str(size) for size in ticks])
        axis.xaxis.minorticks_off()
        axis.set_xlabel("image height and width, pixels")
        axis.set_ylabel("GFLOPs an image")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def _apart(sizes: Iterable[int]) -> list[int]:
    """The sizes whose labels do not touch each other on a logarithmic axis."""
    ordered = sorted(sizes)
    gap = 0.09 * math.log(ordered[-1] / ordered[0])
    chosen = ordered[:1]
    for size in ordered[1:]:
        if math.log(size / chosen[-1]) >= gap:
            chosen.append(size)
    return chosen


def draw_quartiles(
    spreads: Mapping[str, Mapping[str, float]],
    lines: Mapping[str, Sequence[float]],
    path: str | os.PathLike,
    label: str,
    heading: str,
    log: bool = False,
) -> Path:
    """Left: a box for each name, with whiskers to the extremes. Right: a line over the layers, in the same colours.

    Args:
        spreads: {"min", "q1", "median", "q3", "max"} by name.
        lines: a value for each layer by the same names.
        path: of the PNG.
        label: label of the values.
        heading: above both panels.
        log: draw the values on a logarithmic axis, if none of them is 0.
    """
    height = 2.0 + 0.45 * max(4, len(spreads))
    width = wide_enough(11.0, heading, 11)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(width, height), layout="constrained")
    # Not `bxp`: its argument for horizontal boxes changed with matplotlib 3.10.
    for number, spread in enumerate(spreads.values()):
        left.plot([spread["min"], spread["max"]], [number, number], "|-", color=INK, markersize=12)
        box = spread["q3"] - spread["q1"]
        left.barh(number, box, left=spread["q1"], height=0.55, color=f"C{number}", edgecolor=INK, zorder=3)
        left.vlines(spread["median"], number - 0.275, number + 0.275, color="white", linewidth=2.5, zorder=4)
    left.set_yticks(range(len(spreads)), list(spreads))
    left.invert_yaxis()
    left.set_xlabel(f"{label}, last layer")
    for number, name in enumerate(spreads):
        right.plot(range(1, len(lines[name]) + 1), lines[name], color=f"C{number}", marker="o", markersize=4)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel("layer")
    right.set_ylabel(f"{label}, median")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if log and min(spread["min"] for spread in spreads.values()) > 0 and min(map(min, lines.values())) > 0:
        left.set_xscale("log")
        right.set_yscale("log")
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def draw_gammas(
    gammas: np.ndarray,
    alphas: np.ndarray | None,
    curves: Sequence[str],
    layers: Sequence[int],
    path: str | os.PathLike,
    heading: str,
) -> Path:
    """A panel for each curve, layers down and heads across, coloured by 1 - gamma, and one for alpha (VIOLIN Figure 7).

    Most gammas are just below 1, where only the logarithm of 1 - gamma tells them apart.

    Args:
        gammas: (layers, curves, heads), each above 0 and below 1.
        alphas: (layers, heads), None for no such panel.
        curves: names.
        layers: their numbers as drawn.
        path: of the PNG.
        heading: above all panels.
    """
    from matplotlib.colors import LogNorm

    count = len(curves) + (alphas is not None)
    columns = min(5, count)
    rows = math.ceil(count / columns)
    heads = gammas.shape[2]
    size = (1.0 + 0.16 * max(8, heads), 0.75 + 0.16 * max(6, len(layers)))
    # The label of the colours is 2.5 inches long.
    high, wide = max(2.8, size[1] * rows + 0.5), wide_enough(size[0] * columns + 2.4, heading, 11)
    figure, axes = pyplot().subplots(rows, columns, figsize=(wide, high), squeeze=False, layout="constrained")
    # A gamma that float64 rounds to 1 is drawn as the float before 1.
    missing = np.maximum(1.0 - gammas, np.finfo(np.float64).epsneg)
    # The scale has at least one decade, so that equal gammas do not look different.
    norm = LogNorm(missing.min(), max(missing.max(), 10 * missing.min()))
    extent = (0.5, heads + 0.5, len(layers) + 0.5, 0.5)
    image = None
    for axis, name, values in zip(axes.flat, curves, missing.swapaxes(0, 1), strict=False):
        image = axis.imshow(values, norm=norm, cmap="viridis_r", extent=extent, aspect="auto", interpolation="nearest")
        axis.set_title(name, fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.8, label="1 - gamma (light: reaches far)", pad=0.01)
    if alphas is not None:
        axis = axes.flat[len(curves)]
        reach = max(float(np.abs(alphas - 1).max()), 1e-3)
        image = axis.imshow(
            alphas, vmin=1 - reach, vmax=1 + reach, cmap="RdBu_r", extent=extent, aspect="auto", interpolation="nearest"
        )
        axis.set_title("alpha", fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.8, label="alpha", pad=0.01)
    for number, axis in enumerate(axes.flat):
        axis.set_visible(number < count)
        axis.set_yticks(range(1, len(layers) + 1), [str(layer) for layer in layers], fontsize=7)
        axis.set_xticks(range(1, heads + 1), [str(head) for head in range(1, heads + 1)], fontsize=7)
        if number % columns == 0:
            axis.set_ylabel("layer", fontsize=8)
        if number + columns >= count:
            axis.set_xlabel("head", fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def draw_mask_rows(
    masks: np.ndarray,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    queries: Sequence[tuple[int, int]],
    path: str | os.PathLike,
    heading: str,
) -> Path:
    """Panels of decay masks as one patch sees them, all in one scale (VIOLIN Figures 4 and 11).

    Args:
        masks: (rows, columns, height, width): the row of M that belongs to the patch, on the grid.
        row_labels, column_labels: labels of the panels.
        queries: (row, column) of each row's patch, which is marked.
        path: of the PNG.
        heading: above all panels.
    """
    rows, columns = masks.shape[:2]
    side = 1.5 if columns <= 8 else 1.1
    width = wide_enough(side * columns + 1.6, heading, 11)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(width, side * rows + 0.9), squeeze=False, layout="constrained"
    )
    image, low = None, min(float(masks.min()), 1 - FLAT)
    for line, label, query, row_masks in zip(axes, row_labels, queries, masks, strict=True):
        for axis, values in zip(line, row_masks, strict=True):
            image = axis.imshow(values, vmin=low, vmax=1.0, cmap="viridis")
            axis.plot(query[1], query[0], "o", color=ACCENT, markersize=3)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, fontsize=8)
    for axis, label in zip(axes[0], column_labels, strict=True):
        axis.set_title(label, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="M", pad=0.01)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def draw_matrices(
    rows: Sequence[Sequence[np.ndarray]],
    row_labels: Sequence[str],
    path: str | os.PathLike,
    heading: str,
    titles: Sequence[str] = (),
) -> Path:
    """Rows of matrices, dark for 0 and light for the largest value of each.

    Args:
        rows: rows of arrays (height, width), none below 0.
        row_labels: text at the left of each row.
        path: where the PNG is written.
        heading: text above all of them.
        titles: text above the columns.
    """
    columns = max(map(len, rows))
    height, width = rows[0][0].shape
    size = max(0.45, min(1.6, 14 / columns))
    figure, axes = pyplot().subplots(
        len(rows),
        columns,
        figsize=(
            wide_enough(size * columns + 1.2, heading, 10),
            max(1.9, (size * height / width + 0.06) * len(rows) + 0.6),
        ),
        squeeze=False,
        layout="constrained",
    )
    for line, matrices, label in zip(axes, rows, row_labels, strict=True):
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        for axis, matrix in zip(line, matrices, strict=False):
            axis.imshow(matrix, vmin=0, vmax=max(float(matrix.max()), 1e-12), cmap="viridis", interpolation="nearest")
        line[0].set_ylabel(label, fontsize=8)
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title, fontsize=7, pad=2)
    add_share_bar(figure, axes, "viridis")
    figure.suptitle(heading, fontsize=10)
    return save(figure, path)


def plain_numbers(axis: Any) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
