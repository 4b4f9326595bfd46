"""What one patch of a photo sees under a prior: for the pictures of README, of docs/concepts.md and of the gallery."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage import data
from skimage.transform import resize

import hf_sparseprior as sp
from hf_sparseprior.analysis.decays import learned_decay_masks
from hf_sparseprior.analysis.image_maps import FRAME, over_pixels
from hf_sparseprior.analysis.pictures import pyplot

SIDE, PIXELS, HEADS = 14, 224, 6  # a ViT-S at 224 pixels
PATCH = (6, 8)  # row and column, between the eyes
DARKEST = 0.15  # brightness of a patch that is not seen
HEAT = "inferno"
# Name of a photo of scikit-image: the square that is shown, as (top, left, side).
PHOTOS = {"chelsea": (0, 75, 300), "astronaut": (0, 120, 300), "coffee": (10, 110, 380)}


@cache
def photo(name: str = "chelsea", moved: int = 0) -> np.ndarray:
    """A square photo (PIXELS, PIXELS, 3), 0 to 1. moved: how many pixels further right the square is."""
    top, left, side = PHOTOS[name]
    whole = getattr(data, name)()
    return resize(whole[top : top + side, left + moved : left + moved + side], (PIXELS, PIXELS), anti_aliasing=True)


def decay_masks(decay: str | Mapping[str, Any]) -> np.ndarray:
    """The factors M (HEADS, N, N) of a decay before training, in layer 1 of a ViT-S."""
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig.from_preset("vit_small", prior={"decay": decay}, num_hidden_layers=1)
    return learned_decay_masks(sp.SparsePriorViTModel(config))[0].numpy()


def row_of(masks: np.ndarray, patch: tuple[int, int] = PATCH) -> np.ndarray:
    """What a patch has with every patch, (heads, SIDE, SIDE), of values (heads, N, N) over all pairs."""
    return masks[:, patch[0] * SIDE + patch[1]].reshape(-1, SIDE, SIDE)


def clean(axis: Any) -> None:
    """No ticks and no frame."""
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def frame(axis: Any, patch: tuple[int, int], colour: str = FRAME) -> None:
    """The outline of a patch."""
    step = PIXELS // SIDE
    corner = (patch[1] * step - 0.5, patch[0] * step - 0.5)
    axis.add_patch(pyplot().Rectangle(corner, step, step, fill=False, edgecolor=colour, linewidth=1.6))


def show_seen(axis: Any, image: np.ndarray, seen: np.ndarray, patch: tuple[int, int] | None = PATCH) -> None:
    """A photo in which the patches that are not seen are dark; seen (SIDE, SIDE), True or 1 for those that are."""
    over = over_pixels(seen.astype(float), PIXELS, PIXELS)[..., None]
    axis.imshow((DARKEST + (1 - DARKEST) * over) * image, vmin=0, vmax=1)
    if patch is not None:
        frame(axis, patch)


def show_heat(
    axis: Any, image: np.ndarray, values: np.ndarray, ends: tuple[float, float], patch: tuple[int, int] | None = PATCH
) -> None:
    """A photo in grey under colours for `values` (SIDE, SIDE), the darkest and the lightest for the two ends."""
    share = (over_pixels(values, PIXELS, PIXELS) - ends[0]) / (ends[1] - ends[0])
    axis.imshow(0.65 * pyplot().get_cmap(HEAT)(share)[..., :3] + 0.35 * image.mean(-1, keepdims=True), vmin=0, vmax=1)
    if patch is not None:
        frame(axis, patch)


def heat_bar(figure: Any, ends: tuple[float, float], place: Any, orientation: str = "horizontal") -> None:
    """The colours of `show_heat` with their ends, drawn in the axis `place`."""
    plt = pyplot()
    scale = plt.cm.ScalarMappable(plt.Normalize(*ends), HEAT)
    bar = figure.colorbar(scale, cax=place, orientation=orientation, ticks=list(ends))
    bar.ax.tick_params(labelsize=7, length=0, pad=1)
    set_labels = bar.ax.set_xticklabels if orientation == "horizontal" else bar.ax.set_yticklabels
    set_labels(["1" if end == 1 else f"{end:.2f}" for end in ends])


def few_colours(path: Path, passes: int = 0) -> Path:
    """The PNG with a palette, which is a third of the size. passes: of k-means, for pictures of many colours."""
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(224, kmeans=passes, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    return path
