"""Films and contact sheets of episodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

SUFFIXES = (".mp4", ".gif")


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int) -> Path:
    """Write a film, whole or not at all: H.264 by PyAV for .mp4, a GIF by pillow for .gif.

    Args:
        path: has one of the two suffixes.
        frames: uint8 (H, W, 3), all of one size; H.264 needs even H and W.
        fps: frames a second.

    Returns:
        What was written: a .gif next to it if an .mp4 was asked for and PyAV is not installed.

    Raises:
        ValueError: for no frames, frames of several sizes or another suffix.
    """
    if not frames or any(frame.shape != frames[0].shape or frame.dtype != np.uint8 for frame in frames):
        raise ValueError(f"{path}: a film needs frames, all uint8 and of one size")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in {' or '.join(SUFFIXES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mp4":
        try:
            import av
        except ImportError:
            path = path.with_suffix(".gif")
    scratch = path.with_name(f".partial.{path.name}")
    if path.suffix == ".gif":
        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(scratch, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    else:
        with av.open(str(scratch), "w") as container:
            stream = container.add_stream("libx264", rate=fps)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    os.replace(scratch, path)
    return path


def contact_sheet(rows: Sequence[Sequence[np.ndarray]], columns: int = 8, gap: int = 4) -> Image.Image:
    """Episodes as rows of pictures on white, evenly spaced in time from first to last.

    Args:
        rows: frames uint8 (H, W, 3) of each episode, all of one size.
        columns: pictures in a row.
        gap: pixels between them.
    """
    height, width = rows[0][0].shape[:2]
    sheet = Image.new("RGB", (columns * (width + gap) - gap, len(rows) * (height + gap) - gap), color=(255, 255, 255))
    for row, frames in enumerate(rows):
        for column, index in enumerate(np.linspace(0, len(frames) - 1, columns).round().astype(int)):
            sheet.paste(Image.fromarray(frames[index]), (column * (width + gap), row * (height + gap)))
    return sheet
