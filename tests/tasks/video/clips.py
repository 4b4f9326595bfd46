"""Clips of a few frames, written as videos."""

from pathlib import Path

import numpy as np

SPLITS = {"train": 24, "validation": 8, "test": 8}


def moving(index, rightward, size=20):
    """A clip of a bright bar on grey that goes left or right; the middle frame is the same."""
    clip = np.full((5, size, size, 3), 10 * (index % 8), np.uint8)
    for step in range(-2, 3):
        column = size // 2 + 4 * step * (1 if rightward else -1)
        clip[step + 2, :, max(column - 2, 0) : column + 2] = 255
    return clip


def write_videos(folder: Path) -> Path:
    """folder/SPLIT/{left,right}/*.mkv"""
    from hf_sparseprior.cli.video_files import write_video  # needs PyAV

    for number, (split, count) in enumerate(SPLITS.items()):
        for index in range(count):
            name = ("left", "right")[index % 2]
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            write_video(folder / split / name / f"{index:02d}.mkv", moving(100 * number + index // 2, index % 2))
    return folder
