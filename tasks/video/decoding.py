"""Frames of video files, by PyAV."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

try:
    import av
    import av.video.reformatter
except ImportError:  # said by `_open`, where it is needed
    av = None

# Behind so many frames seeking is worth its while.
SEEK_FROM = 100


@contextmanager
def _open(path: str | os.PathLike) -> Any:
    """The container and its video stream; every error of FFmpeg in the block becomes one that names the file."""
    if av is None:
        raise ImportError("reading video needs PyAV: pip install 'hf_sparseprior[video]'")
    if not Path(path).is_file():
        raise OSError(f"{path} does not exist")
    if not Path(path).stat().st_size:
        raise OSError(f"{path} is empty")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise OSError(f"{path} holds no video, {_other_streams(container)}")
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        raise OSError(f"{path} cannot be decoded: {error.strerror}") from None


def _other_streams(container: Any) -> str:
    kinds = sorted({stream.type for stream in container.streams})
    return f"only {' and '.join(kinds)}" if kinds else "and nothing else"


def count_frames(path: str | os.PathLike) -> int:
    """Number of frames of a video, without decoding them where the file does not say it itself.

    Raises:
        OSError: naming the file, for one that is missing, empty, damaged or without video or frames.
    """
    with _open(path) as (container, stream):
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
    if not count:
        raise OSError(f"{path} holds no frames")
    return count


def read_frames(
    path: str | os.PathLike, indices: Sequence[int] | None = None, short_side: int | None = None
) -> np.ndarray:
    """Frames of a video as uint8 (F, height, width, 3), RGB.

    Args:
        path: of the file.
        indices: numbers of the frames from 0, in any order, repeated where wanted; None: all.
        short_side: pixels that the shorter side is scaled to; None: as it is.

    Raises:
        OSError: naming the file, for one that is missing, empty, damaged, without video, or shorter than `indices`.
    """
    wanted = None if indices is None else sorted(set(indices))
    found: dict[int, np.ndarray] = {}
    with _open(path) as (container, stream):
        scaler = av.video.reformatter.VideoReformatter()  # one for all frames, which would each set up their own
        for number, frame in _numbered(container, stream, wanted[0] if wanted else 0):
            if wanted is None or number in wanted:
                found[number] = _pixels(frame, short_side, scaler)
            if wanted is not None and len(found) == len(wanted):
                break
    if not found:
        raise OSError(f"{path} holds no frames" if wanted is None else f"{path} has no frame {wanted[0]}")
    numbers: Iterable[int] = sorted(found) if indices is None else indices
    if missing := [number for number in numbers if number not in found]:
        raise OSError(f"{path} has no frame {missing[0]}; it ends or breaks off before it")
    return np.stack([found[number] for number in numbers])


def _numbered(container: Any, stream: Any, first: int) -> Any:
    """Pairs of number and decoded frame from `first` on, or from before it."""
    rate: Fraction | None = stream.average_rate
    start = stream.start_time or 0
    if first >= SEEK_FROM and rate and stream.time_base:
        container.seek(start + int(first / rate / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.pts is not None:
                yield round((frame.pts - start) * stream.time_base * rate), frame
        return
    yield from enumerate(container.decode(stream))


def _pixels(frame: Any, short_side: int | None, scaler: Any) -> np.ndarray:
    width, height = frame.width, frame.height
    if short_side is not None:
        scale = short_side / min(width, height)
        width, height = round(width * scale), round(height * scale)
    return scaler.reformat(frame, width, height, "rgb24", interpolation="AREA").to_ndarray()


def sample_indices(total: int, num_frames: int, stride: int = 1, place: float = 0.5) -> list[int]:
    """Numbers of the frames of a clip: `num_frames`, each `stride` behind the one before.

    Args:
        total: frames of the video. Where it is shorter than the clip, its first and last frame stand for what lies
            outside.
        num_frames, stride: of the clip; one frame is that in the middle.
        place: of the clip in the video, from 0, at its start, to 1, at its end. 0.5: in its middle.
    """
    room = total - 1 - (num_frames - 1) * stride
    start = room / 2 if room < 0 else place * room
    return [min(max(int(start + number * stride + 0.5), 0), total - 1) for number in range(num_frames)]


def write_video(path: str | os.PathLike, frames: np.ndarray, rate: int = 25) -> None:
    """Write frames uint8 (F, height, width, 3) without loss (FFV1), each one by itself; the ending decides the format.

    A frame's bytes do not depend on the other frames.
    """
    if av is None:
        raise ImportError("writing video needs PyAV: pip install 'hf_sparseprior[video]'")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = "bgr0", 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
