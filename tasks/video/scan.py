"""Damaged videos, found before a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hf_sparseprior.cli.video_files import count_frames, read_frames, reader_version
from hf_sparseprior.runs.scans import drop_found, find_problems, refuse_found, remembered
from tasks.video.config import DataConfig
from tasks.video.data import SHORT_SIDE, TooSmall, VideoData, check_frames

Cut = tuple[tuple[int, int], str]  # (height, width) and whose it is


def find_corrupt(
    paths: Sequence[Path], workers: int = 0, show_progress: bool = False, cut: Cut | None = None
) -> dict[int, str]:
    """Read every video to its end, without decoding it, and decode the frame in its middle.

    Args:
        paths: files.
        workers: processes that read; 0: this one.
        show_progress: show a bar.
        cut: what has to fit into the frames.

    Returns:
        {index: one line with the file's name and what is wrong with it} for files that are missing, empty, damaged, cut
        off or without video, or whose frames are too small.
    """
    look, errors = partial(_look_at, paths, cut), (OSError, TooSmall)
    return find_problems(look, len(paths), "videos", errors, workers=workers, show_progress=show_progress)


def _look_at(paths: Sequence[Path], cut: Cut | None, index: int) -> None:
    frames = read_frames(paths[index], [count_frames(paths[index]) // 2])
    if cut is not None:
        try:
            check_frames(frames, *cut)
        except TooSmall as error:
            raise TooSmall(f"{paths[index]}: {error}") from None


def drop_corrupt(
    data: VideoData,
    config: DataConfig,
    workers: int = 0,
    show_progress: bool = False,
    cuts: Mapping[str, Cut] | None = None,
) -> dict[str, list[str]]:
    """Look for damaged videos in every split and do with them what `data.corrupt` says, as images have it.

    "fatal" raises, "skip" removes them from `data.splits` and prints a line for every split that had some, "unchecked"
    does not look. What a scan found is remembered by names, sizes and times of change of the files.

    Args:
        cuts: what has to fit into the frames of a split, as they are (with `data.short_side` they are scaled).

    Returns:
        {split: the files that were removed}, of splits that had some.

    Raises:
        ValueError: "fatal": count and first files of each split; "skip": if no video of a split is left. Either: for
            frames that are too small.
    """
    if config.corrupt == "unchecked":
        return {}
    version = reader_version()
    found = {}
    for split, videos in data.splits.items():
        cut = (cuts or {}).get(split) if config.short_side is None else None
        scan = partial(find_corrupt, videos.paths, workers, show_progress, cut)
        if problems := remembered(_key(videos.paths, version, cut), scan):
            found[split] = problems
    refuse_found(found, SHORT_SIDE, TooSmall, "videos")
    return drop_found(data.splits, found, config.corrupt, "videos")


def _key(paths: Sequence[Path], version: str, cut: Cut | None = None) -> str:
    """Digest of what decides a scan's outcome: every file, the version of what reads it, and what has to fit."""
    digest = hashlib.sha256(f"videos {version}{f' {cut}' if cut else ''}\n".encode())
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # reading it will say so
            stamp = f"missing {path}"
        else:
            stamp = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
        digest.update(stamp.encode() + b"\n")
    return digest.hexdigest()
