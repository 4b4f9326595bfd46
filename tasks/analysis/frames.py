"""Attention over the frames of a clip: python -m tasks.analysis.frames RUN [RUN ...] --clip FILE (VIOLIN Figure 9)

For each model it draws, frame by frame, the attention of the class token (or the mean of all patches') in one layer,
and the patches that hold most of it. The size of the frames need not be that of training: support and decay are those
of the larger grid, and positions are interpolated to it. An animation shows all frames that were seen.

A model of images sees each frame alone. A SparsePriorTimesformer sees the clip, by default as many frames as it is
configured for. With divided and space-only attention a map is what the layer gives in space within one frame; with
joint attention the maps of all frames together are what one query gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis.attention_maps import class_token_map, mean_query_map
from hf_sparseprior.analysis.image_maps import Panel, darkened, draw_panels, with_heat
from hf_sparseprior.analysis.layers import attention_weights
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.families import family_of
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.saving.processor import takes_clips
from tasks.analysis import commands
from tasks.analysis.maps import chosen
from tasks.analysis.runs import (
    SavedModel,
    check_counts,
    open_models,
    preparation,
    shown_image,
    write_analysis,
)

SHOWN = 6  # frames in the picture


def read_frames(clip: Path, count: int | None) -> list[Image.Image]:
    """Frames of a video file, spread evenly; None: all of them.

    Raises:
        OSError: for a file that cannot be read as a video. ValueError: for more frames than it has.
    """
    if not clip.is_file():
        raise OSError(f"--clip {clip} is not a file")
    import av

    try:
        # All are decoded, because some files, such as Matroska's, do not say how many there are.
        with av.open(str(clip)) as container:
            frames = [frame.to_image() for frame in container.decode(video=0)]
    except (av.error.FFmpegError, IndexError) as error:  # no video, or none in it
        raise OSError(f"--clip {clip} cannot be read as a video ({first_line(error)})") from None
    if not frames:
        raise OSError(f"--clip {clip} has no frames")
    if count is None:
        return frames
    if count > len(frames):
        raise ValueError(f"--frames {count} must be at most {len(frames)}, the frames of {clip}")
    return [frames[place] for place in np.linspace(0, len(frames) - 1, count).round().astype(int)]


def most_of(attention: Tensor, mass: float) -> Tensor:
    """The fewest patches that hold this share of the attention, bool (height, width).

    Args:
        attention: (height, width), 0 or more. mass: in (0, 1].
    """
    values, order = attention.flatten().sort(descending=True)
    before = values.cumsum(0) - values  # of the patches with more attention
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[order] = before < mass * values.sum()
    return kept.view_as(attention)


def frame_size(saved: SavedModel, size: tuple[int, int] | None) -> tuple[int, int]:
    """The frames' (height, width): what is asked for or, by default, the model's.

    Raises:
        ValueError: for a size that is no multiple of the patch, and for models of other makers or with windows.
    """
    config = saved.model.config
    if family_of(config) is None:
        raise ValueError(f"{saved.name} is a model of transformers; make it ours: python -m hf_sparseprior convert")
    if not takes_clips(config):
        saved.attention.grid  # noqa: B018  refuses models whose layers do not see the whole image
    height, width = size or as_pair(config.image_size)
    patch = as_pair(config.patch_size)
    if height % patch[0] or width % patch[1]:
        raise ValueError(f"--size {height}x{width} must be a multiple of the {patch[0]}x{patch[1]} patch")
    return height, width


def clip_maps(saved: SavedModel, pixel_values: Sequence[Tensor], layer: int, device: str) -> list[Tensor]:
    """Attention over the patches of each frame in one layer of a model of clips, as `frame_maps` gives it."""
    config, prefix = saved.model.config, saved.attention.num_prefix_tokens
    patch, frames = as_pair(config.patch_size), len(pixel_values)
    grid = (pixel_values[0].shape[1] // patch[0], pixel_values[0].shape[2] // patch[1])
    weights = attention_weights(saved.model, torch.stack(list(pixel_values))[None].to(device))[layer].float().cpu()
    look = class_token_map if saved.attention.has_class_token else mean_query_map
    if not config.is_joint:
        return list(look(weights, grid, prefix))
    # The tokens of a joint clip are each patch's frames in a row: a grid of patches by frames.
    maps = look(weights[0], (grid[0] * grid[1], frames), prefix)
    return list(maps.movedim(-1, 0).unflatten(-1, grid))


def frame_maps(saved: SavedModel, pixel_values: Tensor, layer: int, device: str) -> Tensor:
    """Attention over the patches in one layer, (H, height, width) of the grid, on the CPU."""
    prefix, patch = saved.attention.num_prefix_tokens, as_pair(saved.model.config.patch_size)
    grid = (pixel_values.shape[1] // patch[0], pixel_values.shape[2] // patch[1])
    weights = attention_weights(saved.model, pixel_values[None].to(device))[layer][0].float()
    look = class_token_map if saved.attention.has_class_token else mean_query_map
    return look(weights, grid, prefix).cpu()


def work_on(saved: SavedModel, frames: Sequence[Image.Image], arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw picture and animation of one model and return what results say about it."""
    height, width = frame_size(saved, arguments.size)
    layers = len(saved.attention.layers)
    (layer,) = chosen([layers if arguments.layer is None else arguments.layer], layers, 1, "--layer")
    prepare = preparation(saved, size={"height": height, "width": width}, do_center_crop=False)
    if takes_clips(saved.model.config):
        count = min(arguments.frames or saved.model.config.num_frames, len(frames))
        frames = [frames[place] for place in np.linspace(0, len(frames) - 1, count).round().astype(int)]
        prepared = [prepare(frame).reshape(-1, height, width) for frame in frames]  # each as a clip of its own
        images = [shown_image(saved, pixel_values) for pixel_values in prepared]
        maps = clip_maps(saved, prepared, layer, arguments.device)
    else:
        images, maps = [], []
        for frame in tqdm(frames, desc=saved.name, disable=None, leave=False):
            pixel_values = prepare(frame)
            images.append(shown_image(saved, pixel_values))
            maps.append(frame_maps(saved, pixel_values, layer, arguments.device))
    shown = sorted({round(place) for place in np.linspace(0, len(frames) - 1, min(SHOWN, len(frames)))})
    heads = chosen(arguments.heads, len(maps[0]), 0, "--heads") if arguments.heads else []
    means, kept = [one.mean(0) for one in maps], [most_of(one.mean(0), arguments.mass) for one in maps]
    rows = [
        [Panel(images[number], title=f"frame {number + 1}") for number in shown],
        [Panel(images[number], heat=means[number].numpy()) for number in shown],
        [Panel(images[number], seen=kept[number].numpy()) for number in shown],
        *([Panel(images[number], heat=maps[number][head].numpy()) for number in shown] for head in heads),
    ]
    labels = ["frame", "attention", f"{100 * arguments.mass:g} % of it", *(f"head {head + 1}" for head in heads)]
    stem, source = saved.name.replace("/", "_"), "class token" if saved.attention.has_class_token else "all patches"
    heading = f"{saved.name}: attention of {source} in layer {layer + 1}, {width}x{height}"
    picture = draw_panels(rows, labels, arguments.out / f"{stem}_frames.png", heading)
    animation = arguments.out / f"{stem}_frames.gif"
    parts = [
        np.concatenate([image, with_heat(image, mean.numpy()), darkened(image, own.numpy())], 1)
        for image, mean, own in zip(images, means, kept, strict=True)
    ]
    films = [Image.fromarray((255 * part).round().astype(np.uint8)) for part in parts]
    films[0].save(animation, save_all=True, append_images=films[1:], duration=100, loop=0)
    share = [float(own.float().mean()) for own in kept]
    return {
        **saved.about(),
        "layer": layer + 1,
        "size": [height, width],
        "frames": len(frames),
        "mass": arguments.mass,
        "patches_with_it": share,
        "pictures": [str(picture), str(animation)],
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.frames()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        check_counts(arguments)
        if arguments.frames is not None and arguments.frames < 1:
            raise ValueError(f"--frames {arguments.frames} must be 1 or more")
        if not 0 < arguments.mass <= 1:
            raise ValueError(f"--mass {arguments.mass} must be above 0 and at most 1")
        frames = read_frames(arguments.clip, arguments.frames)
        arguments.out.mkdir(parents=True, exist_ok=True)
        models = [work_on(saved, frames, arguments) for saved in open_models(arguments)]
        write_analysis(arguments.out / "frames.json", {"task": "frames", "clip": arguments.clip.name, "models": models})
        for found in models:
            print("\n".join(f"picture: {picture}" for picture in found["pictures"]))
        print(f"results: {arguments.out}/frames.json")

    return run_command(parser.prog, work, "from the beginning")


if __name__ == "__main__":
    sys.exit(main())
