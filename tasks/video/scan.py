"""Damaged videos, found before a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tasks.common.scans import drop_found, find_problems, remembered
from tasks.video.config import DataConfig
from tasks.video.data import VideoData
from tasks.video.decoding import count_frames, read_frames, reader_version


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
    return find_problems(partial(_look_at, paths), len(paths), "videos", workers=workers, show_progress=show_progress)


def _look_at(paths: Sequence[Path], index: int) -> None:
    read_frames(paths[index], [count_frames(paths[index]) // 2])


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
    return drop_found(data.splits, found, config.corrupt, "videos")


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
