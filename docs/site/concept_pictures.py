"""Pictures of docs/concepts.md: a photo as tokens and pairs, and what each part of a prior does to the pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_photo import (
    HEADS,
    PATCH,
    PHOTOS,
    PIXELS,
    SIDE,
    clean,
    decay_masks,
    few_colours,
    heat_bar,
    photo,
    row_of,
    show_heat,
    show_seen,
)

import hf_sparseprior as sp
from hf_sparseprior.analysis.image_maps import FRAME
from hf_sparseprior.analysis.pictures import ACCENT, INK, PAPER, pyplot, save
from hf_sparseprior.attention.key_selection import largest

FEW = 7  # patches on a side where tokens are drawn one by one
KEYS = 12  # of a predictor, for each query


def draw_pairs(path: Path) -> Path:
    """A photo in patches, the sequence of its tokens, and the pairs of tokens without and with a support."""
    figure = pyplot().figure(figsize=(9.4, 2.55))
    step, query = PIXELS // FEW, (3, 4)
    axis = figure.add_axes((0.01, 0.07, 0.23, 0.83))
    axis.imshow(photo(), vmin=0, vmax=1)
    for place in range(1, FEW):
        axis.axhline(place * step - 0.5, color="white", linewidth=1)
        axis.axvline(place * step - 0.5, color="white", linewidth=1)
    corner = (query[1] * step - 0.5, query[0] * step - 0.5)
    axis.add_patch(pyplot().Rectangle(corner, step, step, fill=False, edgecolor=FRAME, linewidth=2))
    axis.set_title(f"an image of {FEW}x{FEW} patches", fontsize=9)
    clean(axis)
    _draw_sequence(figure.add_axes((0.265, 0.07, 0.2, 0.83)), query)
    number = 1 + query[0] * FEW + query[1]
    sizes: Any = {"num_heads": HEADS, "num_tokens": FEW**2, "num_prefix_tokens": 1}
    for place, name in ((0.49, "dense"), (0.75, "fibottention")):
        mask = sp.supports.build_mask(name, **sizes)[0]
        _draw_matrix(figure.add_axes((place, 0.07, 0.24, 0.83)), mask, number)
        figure.axes[-1].set_title(f"{'dense attention' if name == 'dense' else name}: {mask.sum():,} pairs", fontsize=9)
    return few_colours(save(figure, path), passes=2)


def _draw_sequence(axis: Any, query: tuple[int, int]) -> None:
    """The class token and the patches in raster order, line by line."""
    step, gap = PIXELS // FEW, 5
    side = step + gap
    canvas = np.ones(((FEW + 1) * side, FEW * side, 3))
    for row in range(FEW):
        for column in range(FEW):
            top, left = (row + 1) * side, column * side
            patch = photo()[row * step : (row + 1) * step, column * step : (column + 1) * step]
            canvas[top : top + step, left : left + step] = patch
    axis.imshow(canvas, vmin=0, vmax=1)
    axis.add_patch(pyplot().Rectangle((0, 0), step, step, color=ACCENT))
    axis.text(side + 2, step / 2, "class token", fontsize=8, va="center")
    corner = (query[1] * side - 0.5, (query[0] + 1) * side - 0.5)
    axis.add_patch(pyplot().Rectangle(corner, step, step, fill=False, edgecolor=FRAME, linewidth=2))
    axis.set_title(f"{FEW**2 + 1} tokens, line by line", fontsize=9)
    clean(axis)


def _draw_matrix(axis: Any, mask: np.ndarray, query: int) -> None:
    """Pairs (queries down, keys across): those of the prefix token and those of patches, and the row of one query."""
    from matplotlib.colors import ListedColormap

    values = mask.astype(int)
    values[0] *= 2
    values[1:, 0] *= 2
    axis.imshow(values, cmap=ListedColormap([PAPER, INK, ACCENT]), vmin=0, vmax=2, interpolation="nearest")
    corner = (-0.5, query - 0.5)
    axis.add_patch(pyplot().Rectangle(corner, len(mask), 1, fill=False, edgecolor=FRAME, linewidth=1.6))
    axis.set_xlabel("keys", fontsize=8, labelpad=2)
    axis.set_ylabel("queries", fontsize=8, labelpad=2)
    clean(axis)


def chosen_keys(image: np.ndarray) -> np.ndarray:
    """The KEYS patches whose colours are most like those of PATCH, as `topk` chooses them, bool (SIDE, SIDE).

    Queries and keys are the colours of the patches, less the mean of the image; a model learns them instead.
    """
    step = PIXELS // SIDE
    patches = image.reshape(SIDE, step, SIDE, step, 3).transpose(0, 2, 1, 3, 4).reshape(SIDE**2, -1)
    tokens = torch.from_numpy(patches - patches.mean(0))
    tokens = tokens / tokens.norm(dim=1, keepdim=True)
    scores = tokens @ tokens.T
    return largest(scores, KEYS).numpy()[PATCH[0] * SIDE + PATCH[1]].reshape(SIDE, SIDE)


def mixtures() -> np.ndarray:
    """The first weights of three keys of `linformer`, each a mixture of all patches, (3, SIDE, SIDE)."""
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig.from_preset("vit_small", prior="linformer", num_hidden_layers=1)
    weights = sp.SparsePriorViTModel(config).state_dict()
    (name,) = (name for name in weights if name.endswith("mix_keys"))
    return weights[name][:3].reshape(3, SIDE, SIDE).numpy()


def draw_parts(path: Path) -> Path:
    """A row for each part of a prior: what it does with the pairs of one patch."""
    rows = (
        ("support", "which pairs are used:\nbright. The same for\nevery image"),
        ("decay", "how much a pair counts:\nfactor of its score,\nlearned"),
        ("predictor", f"which {KEYS} keys are used:\nchosen for each image"),
        ("mixer", "what is computed:\nhere over a few mixtures\nof all patches"),
    )
    figure, axes = pyplot().subplots(len(rows), 4, figsize=(6.6, 7.2), width_ratios=(1.15, 1, 1, 1))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.96, wspace=0.04, hspace=0.16)
    for line, (name, what) in zip(axes, rows, strict=True):
        for axis in line:
            clean(axis)
        line[0].text(0, 0.62, name, fontsize=12, fontweight="bold", transform=line[0].transAxes)
        line[0].text(0, 0.56, what, fontsize=8.5, va="top", linespacing=1.4, transform=line[0].transAxes)
    for axis, name in zip(axes[0, 1:], ("fibottention", "window", "neighborhood"), strict=True):
        mask = sp.supports.build_mask(name, num_heads=HEADS, num_tokens=SIDE**2, grid=(SIDE, SIDE))
        show_seen(axis, photo(), row_of(mask)[0])
        axis.set_title(f"{name}, head 1", fontsize=8.5, pad=3)
    views = {"violin": (0, 3), "manhattan": (4,)}
    for axis, (name, head) in zip(axes[1, 1:], [(n, h) for n, heads in views.items() for h in heads], strict=True):
        view = row_of(decay_masks(name))[head]
        show_heat(axis, photo(), view, (float(view.min()), 1.0))
        axis.set_title(f"{name}, head {head + 1}: {view.min():.2f} to 1", fontsize=7.5, pad=3)
    for axis, name in zip(axes[2, 1:], PHOTOS, strict=True):
        show_seen(axis, photo(name), chosen_keys(photo(name)))
        axis.set_title("topk", fontsize=8.5, pad=3)
    parts = mixtures()
    ends = (-float(np.abs(parts).max()), float(np.abs(parts).max()))
    for number, (axis, part) in enumerate(zip(axes[3, 1:], parts, strict=True), start=1):
        show_heat(axis, photo(), part, ends, None)
        axis.set_title(f"linformer, mixture {number}", fontsize=8.5, pad=3)
    heat_bar(figure, (0, 1), axes[1, 0].inset_axes((0.05, 0.02, 0.7, 0.05)))
    axes[1, 0].child_axes[0].set_xticklabels(["lowest", "1"], ha="left")
    return few_colours(save(figure, path), passes=2)
