"""Damaged videos, found before a run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from tasks.common.images.sources.images import short
from tasks.common.scans import NAMES_SHOWN, remembered
from tasks.video.config import DataConfig
from tasks.video.data import VideoData
from tasks.video.decoding import count_frames, read_frames, reader_version


class _Problems(Dataset):
    """index -> (index, what is wrong with the video or None)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, str | None]:
        try:
            read_frames(self.paths[index], [count_frames(self.paths[index]) // 2])
        except OSError as error:
            return index, str(error)
        return index, None


def find_corrupt(paths: Sequence[Path], workers: int = 0, show_progress: bool = False) -> dict[int, str]:
    """Read every video to its end, without decoding it, and decode the frame in its middle.

    Args:
        paths: files.
        workers: processes that read; 0: this one.
        show_progress: show a bar.

    Returns:
        {index: one line with the file's name and what is wrong with it} for files that are missing, empty, damaged, cut
        off or without video.
    """
    loader = DataLoader(_Problems(paths), batch_size=8, num_workers=workers, collate_fn=list)
    found = {}
    with tqdm(total=len(paths), desc="looking for damaged videos", unit=" videos", disable=not show_progress) as bar:
        for batch in loader:
            found.update({index: problem for index, problem in batch if problem is not None})
            bar.update(len(batch))
    return found


def drop_corrupt(
    data: VideoData, config: DataConfig, workers: int = 0, show_progress: bool = False
) -> dict[str, list[str]]:
    """Look for damaged videos in every split and do with them what `data.corrupt` says, as images have it.

    "fatal" raises, "skip" removes them from `data.splits` and prints a line for every split that had some, "unchecked"
    does not look. What a scan found is remembered by names, sizes and times of change of the files.

    Returns:
        {split: the files that were removed}, of splits that had some.

    Raises:
        ValueError: "fatal": count and first files of each split; "skip": if no video of a split is left.
    """
    if config.corrupt == "unchecked":
        return {}
    version = reader_version()
    found = {}
    for split, videos in data.splits.items():
        scan = partial(find_corrupt, videos.paths, workers, show_progress)
        if problems := remembered(_key(videos.paths, version), scan):
            found[split] = problems
    if found and config.corrupt == "fatal":
        lines = "; ".join(
            f"{split}: {len(problems)} of {len(data.splits[split].paths)}, "
            f"{', '.join(list(problems.values())[:NAMES_SHOWN])}"
            for split, problems in found.items()
        )
        raise ValueError(f"damaged videos ({lines}); data.corrupt=skip leaves them out")
    names = {}
    for split, problems in found.items():
        videos = data.splits[split]
        names[split] = [str(videos.paths[index]) for index in problems]
        if len(problems) == len(videos.paths):
            first = next(iter(problems.values()))
            raise ValueError(f"{split}: none of the {len(problems)} videos is readable, {first}")
        data.splits[split] = videos.subset(np.setdiff1d(np.arange(len(videos.paths)), list(problems)))
        print(
            f"{split}: {len(problems)} of {len(videos.paths)} videos are damaged and left out, "
            f"{short(names[split], NAMES_SHOWN)}",
            file=sys.stderr,
        )
    return names


def _key(paths: Sequence[Path], version: str) -> str:
    """Digest of what decides a scan's outcome: every file, and the version of what reads it."""
    digest = hashlib.sha256(f"videos {version}\n".encode())
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # reading it will say so
            stamp = f"missing {path}"
        else:
            stamp = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
        digest.update(stamp.encode() + b"\n")
    return digest.hexdigest()
