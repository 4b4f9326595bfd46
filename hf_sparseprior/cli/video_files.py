"""Frames of video files, by PyAV."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# From this many frames on seeking is faster than decoding.
SEEK_FROM = 100
# FFmpeg's names of the formats that have an index for seeking.
INDEXED = {"matroska", "mov", "avi"}
# This many frames may be missing at a video's end before it counts as broken off.
SPARE_FRAMES = 3


def _pyav(work: str = "reading") -> Any:
    """PyAV, which models of images do without."""
    try:
        import av
        import av.video.reformatter
    except ImportError:
        raise ImportError(f"{work} video needs PyAV: pip install 'hf_sparseprior[video]'") from None
    return av


@contextmanager
def _open(path: str | os.PathLike) -> Any:
    """The container and its video stream. Every error of FFmpeg in the block becomes one that names the file."""
    av = _pyav()
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


def reader_version() -> str:
    """PyAV's version.

    Raises:
        ImportError: without PyAV; the message says what installs it.
    """
    return str(_pyav().__version__)


def _other_streams(container: Any) -> str:
    kinds = sorted({stream.type for stream in container.streams})
    return f"only {' and '.join(kinds)}" if kinds else "and nothing else"


def count_frames(path: str | os.PathLike, whole: bool = True) -> int:
    """Number of frames of a video, without decoding them.

    They are counted, because the number in the container may include frames that are cut away or (AVI) be ticks of its
    clock.

    Args:
        path: the file.
        whole: whether a file that is broken off is an error.

    Raises:
        OSError: for a file that is missing, empty, damaged, broken off, or without video or frames. It is named.
    """
    with _open(path) as (container, stream):
        packets = _packets(path, container, stream) if whole else container.demux(stream)
        count = sum(_shows(packet) for packet in packets)
    if not count:
        raise OSError(f"{path} holds no frames")
    return count


def read_frames(
    path: str | os.PathLike, indices: Sequence[int] | None = None, short_side: int | None = None
) -> np.ndarray:
    """Frames of a video as uint8 (F, height, width, 3), RGB, turned as the file says (telephones write that).

    Args:
        path: the file.
        indices: numbers of the frames from 0, in any order and repeated if wanted; None: all.
        short_side: pixels that the shorter side is scaled to; None: as it is.

    Raises:
        OSError: for a file that is missing, empty, damaged, without video, shorter than `indices` or, if all of it is
            read, broken off. The message names it.
    """
    wanted = None if indices is None else sorted(set(indices))
    times = _times(path) if wanted and wanted[0] >= SEEK_FROM else []
    found = _found(path, wanted, short_side, times)
    if wanted and any(number not in found for number in wanted if number < len(times)):
        found = _found(path, wanted, short_side, [])  # a seek that came too late
    if not found:
        raise OSError(f"{path} has no frame {wanted[0]}" if wanted else f"{path} holds no frames")
    numbers: Iterable[int] = sorted(found) if indices is None else indices
    if missing := [number for number in numbers if number not in found]:
        raise OSError(f"{path} has no frame {missing[0]}; it ends or breaks off before it")
    return np.stack([found[number] for number in numbers])


def iterate_frames(path: str | os.PathLike) -> Iterator[np.ndarray]:
    """Frames of a video one after the other, each as in `read_frames`, as far as they can be decoded.

    Raises:
        OSError: as `read_frames`, but not for a video that is broken off.
    """
    with _open(path) as (container, stream):
        scaler = _pyav().video.reformatter.VideoReformatter()
        for frame in container.decode(stream):
            yield _pixels(frame, None, scaler, path)


def _found(
    path: str | os.PathLike, wanted: list[int] | None, short_side: int | None, times: list[int]
) -> dict[int, np.ndarray]:
    """The wanted frames (None: all) that exist. With `times` they are sought, otherwise counted from the start."""
    found: dict[int, np.ndarray] = {}
    with _open(path) as (container, stream):
        scaler = _pyav().video.reformatter.VideoReformatter()  # one for all frames; each would otherwise set up its own
        numbered: Iterable[tuple[int, Any]]
        numbered = enumerate(frame for packet in _packets(path, container, stream) for frame in packet.decode())
        if times and wanted:
            container.seek(times[min(wanted[0], len(times) - 1)], stream=stream)
            number_of = {time: number for number, time in enumerate(times)}
            numbered = ((number_of.get(frame.pts, -1), frame) for frame in container.decode(stream))
        for number, frame in numbered:
            if wanted is None or number in wanted:
                found[number] = _pixels(frame, short_side, scaler, path)
            if wanted is not None and (not wanted or number >= wanted[-1]):
                break
    return found


def _shows(packet: Any) -> bool:
    """Whether a packet holds a frame that is shown, not one that an edit list cuts away."""
    return packet.size > 0 and not packet.is_discard


def _times(path: str | os.PathLike) -> list[int]:
    """Presentation times of all frames, in order; empty if they do not tell which frame a seek has found."""
    with _open(path) as (container, stream):
        if not INDEXED & set(container.format.name.split(",")):
            return []  # times after a seek are FFmpeg's guesses
        times = [packet.pts for packet in _packets(path, container, stream) if _shows(packet)]
    return [] if None in times or len(set(times)) < len(times) else sorted(times)


def _packets(path: str | os.PathLike, container: Any, stream: Any) -> Iterator[Any]:
    """All packets of a stream. After the last, OSError if the frames end earlier than the file says."""
    times: list[int] = []
    end = 0
    for packet in container.demux(stream):
        if packet.pts is not None:
            end = max(end, packet.pts + (packet.duration or 0))
            if _shows(packet):
                times.append(packet.pts)
        yield packet
    times.sort()
    rate: Fraction | None = stream.average_rate
    gaps = [after - before for before, after in pairwise(times)] + ([1 / rate / stream.time_base] if rate else [])
    said = _said_end(container, stream, times[0]) if times else None
    # A last frame's duration is not always given, and clocks are rounded. Only a larger difference is an error.
    if said is not None and gaps and said - end > max(SPARE_FRAMES * sum(gaps) / len(gaps), *gaps):
        seconds = [float(time * stream.time_base) for time in (end, said)]
        raise OSError(f"{path} breaks off: its frames end at {seconds[0]:.2f} s, not at {seconds[1]:.2f} s as it says")


def _said_end(container: Any, stream: Any, first: int) -> Fraction | None:
    """Where a file says that its video ends, whatever its sound does, in ticks of the stream; None if it does not.

    An AVI's length is not used: its clock may count from 0 or from the first frame, and FFmpeg scales it by the file.
    """
    kinds = container.format.name.split(",")
    if "matroska" in kinds:  # FFmpeg's tag; another program's may be out of date, but not both times
        try:
            hours, minutes, seconds = stream.metadata["DURATION"].split(":")
            end = (int(hours) * 60 + int(minutes)) * 60 + Fraction(seconds)
        except (KeyError, ValueError):
            return None
        if container.duration is not None:
            end = min(end, Fraction(container.duration, _pyav().time_base))
        return end / stream.time_base
    # Without a number of frames (fragmented mp4) the duration may be a guess from the bit rate.
    if "mov" in kinds and stream.frames and stream.duration:
        return Fraction(first + stream.duration)
    return None


def _pixels(frame: Any, short_side: int | None, scaler: Any, path: str | os.PathLike) -> np.ndarray:
    width, height = frame.width, frame.height
    if short_side is not None:
        scale = short_side / min(width, height)
        width, height = round(width * scale), round(height * scale)
    pixels = scaler.reformat(frame, width, height, "rgb24", interpolation="AREA").to_ndarray()
    if frame.rotation % 90:
        raise OSError(f"{path} asks to be turned by {frame.rotation} degrees, which must be a multiple of 90")
    # PyAV counts degrees counterclockwise, and so does rot90.
    return np.rot90(pixels, frame.rotation // 90) if frame.rotation else pixels


def sample_indices(total: int, num_frames: int, stride: int = 1, place: float = 0.5) -> list[int]:
    """Numbers of the frames of a clip: `num_frames`, each `stride` after the one before.

    Args:
        total: number of frames of the video. If it is shorter than the clip, its first and last frame are repeated for
            what lies outside.
        num_frames, stride: those of the clip. A clip of one frame has the frame in the middle.
        place: where the clip lies in the video, from 0 (at its start) to 1 (at its end).
    """
    room = total - 1 - (num_frames - 1) * stride
    start = room / 2 if room < 0 else place * room
    return [min(max(int(start + number * stride + 0.5), 0), total - 1) for number in range(num_frames)]


def segment_indices(total: int, num_frames: int, places: float | Sequence[float] | np.ndarray = 0.5) -> list[int]:
    """Numbers of the frames of a clip that spans the whole video: one frame of each of `num_frames` equal segments.

    Source: Temporal Segment Networks (Wang et al. 2016, Section 3.1); SlowFast's reader of Something-Something v2.

    Args:
        total: number of frames of the video. If there are fewer than segments, frames are repeated.
        num_frames: number of segments.
        places: where the frame lies in its segment, from 0 (its start) to 1 (its end), for all or for each. Where it is
            drawn evenly, every frame of a segment is as likely as any other.
    """
    positions = (np.arange(num_frames) + np.asarray(places, np.float64)) * total / num_frames
    return np.minimum(positions.astype(np.int64), total - 1).tolist()


def write_video(path: str | os.PathLike, frames: np.ndarray, rate: int = 25) -> None:
    """Write frames uint8 (F, height, width, 3) without loss (FFV1), each on its own. The ending decides the format.

    A frame's bytes do not depend on the other frames.
    """
    av = _pyav("writing")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = "bgr0", 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
