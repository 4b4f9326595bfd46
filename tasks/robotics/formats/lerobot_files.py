"""What a LeRobotDataset of version 3 consists of: names of its files, videos, and the statistics that it keeps."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from tasks.robotics.formats.demonstrations import import_package

VERSION = "v3.0"
INFO, STATS, TASKS, EPISODES = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/episodes"
OURS = "meta/sparseprior.json"  # what the format has no place for: settings of the environment, seeds, split
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, VIDEO_PATH = f"data/{FILE}.parquet", "videos/{video_key}/" + FILE + ".mp4"
CHUNK_SIZE = 1000  # files in a folder
DATA_MEGABYTES, VIDEO_MEGABYTES = 100, 200  # a file is closed when it has so many
# What lerobot adds to every frame.
COUNTERS = {name: "int64" for name in ("frame_index", "episode_index", "index", "task_index")}
IMAGES = ("video", "image")
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
CODEC, PIXELS = "libx264", "yuv420p"
# A key frame every second frame, as lerobot has it, so that a frame is found quickly.
CODEC_OPTIONS = {"g": "2", "crf": "18", "bf": "0"}


def file_of(template: str, fields: Mapping[str, Any]) -> str:
    """A path within the data set from info.json's template.

    Raises:
        ValueError: for a template with other fields, or one that leads out of the data set.
    """
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if unknown := names - set(fields):
            raise ValueError(f"{template!r} has a field {min(unknown)!r}; allowed are {', '.join(fields)}")
        path = template.format(**fields)
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{template!r} is no template of a path ({error})") from None
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path or not path:
        raise ValueError(f"{path!r} leads out of the data set")
    return path


class FileNumbers:
    """The number of the file that is being written, and when the next one begins.

    Args:
        limit: bytes after which a file is closed.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.chunk, self.file = 0, 0

    def next(self) -> None:
        """Go on to the next file."""
        self.file += 1
        if self.file == CHUNK_SIZE:
            self.chunk, self.file = self.chunk + 1, 0

    @property
    def fields(self) -> dict[str, int]:
        """As the templates of paths take them."""
        return {"chunk_index": self.chunk, "file_index": self.file}


class VideoWriter:
    """A camera's images, episode after episode, in as many files as are needed.

    Args:
        root: folder of the data set.
        key: the camera's feature.
        fps: frames a second.
        limit: bytes after which a file is closed.
    """

    def __init__(self, root: Path, key: str, fps: int, limit: float) -> None:
        self.root, self.key, self.fps = root, key, fps
        self.numbers = FileNumbers(limit)
        self.frames = 0  # in this file
        self._bytes = 0  # of those that have left the encoder
        self._container: Any = None
        self._stream: Any = None

    def add(self, images: np.ndarray) -> dict[str, Any]:
        """Write an episode (T, H, W, 3), and return where it is, as meta/episodes has it."""
        av = import_package("av")
        if self._container is not None and self._bytes >= self.numbers.limit:
            self.close()
            self.numbers.next()
        if self._container is None:
            self.frames, self._bytes = 0, 0
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._container = av.open(str(self.path), "w")
            self._stream = self._container.add_stream(CODEC, rate=self.fps, options=CODEC_OPTIONS)
            self._stream.height, self._stream.width = images.shape[1:3]
            self._stream.pix_fmt = PIXELS
        first = self.frames
        for image in images:
            self._mux(self._stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        self.frames += len(images)
        values = {**self.numbers.fields, "from_timestamp": first / self.fps, "to_timestamp": self.frames / self.fps}
        return {f"videos/{self.key}/{name}": value for name, value in values.items()}

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return self.root / file_of(VIDEO_PATH, {"video_key": self.key, **self.numbers.fields})

    def close(self) -> None:
        """Write what the encoder still has."""
        if self._container is not None:
            self._mux(self._stream.encode())
            self._container.close()
            self._container = None

    def _mux(self, packets: Any) -> None:
        self._bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)


def video_info(path: Path) -> dict[str, Any]:
    """What lerobot keeps of a camera's first video in info.json."""
    av = import_package("av")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return {
            "video.height": stream.height,
            "video.width": stream.width,
            "video.codec": stream.codec.canonical_name,
            "video.pix_fmt": stream.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": int(stream.base_rate),
            "video.channels": 3,
            "has_audio": bool(container.streams.audio),
        }


def video_frames(path: Path, start: float, count: int, fps: float) -> np.ndarray:
    """The frames of a video at `start`, `start` + 1 / fps, ... seconds, uint8 (count, H, W, 3).

    Raises:
        ValueError: if one is missing.
    """
    av = import_package("av")
    found: list[np.ndarray | None] = [None] * count
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        if start > 0:
            # Half a frame earlier: times are rounded to the file's own unit.
            container.seek(int((start - 0.5 / fps) / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            place = (frame.time - start) * fps
            number = round(place)
            if 0 <= number < count and abs(place - number) < 0.25:
                found[number] = frame.to_ndarray(format="rgb24")
            if number >= count - 1:
                break
    if missing := [number for number, frame in enumerate(found) if frame is None]:
        raise ValueError(f"{path} has no frame at {start + missing[0] / fps:.3f} s")
    return np.stack(found)  # type: ignore[arg-type]


# ---- statistics -----------------------------------------------------------------------------------------------------


def number_statistics(values: np.ndarray) -> dict[str, list]:
    """lerobot's statistics of a feature (T, ...) over time, as lists; of numbers (T,) lists of one."""
    values = np.asarray(values)
    values = values.reshape(len(values), *(values.shape[1:] or (1,)))
    numbers = values.astype(np.float64)
    found = {
        "min": values.min(0), "max": values.max(0), "mean": numbers.mean(0), "std": numbers.std(0),
        **{name: np.quantile(numbers, share, axis=0) for name, share in QUANTILES.items()},
    }  # fmt: skip
    return {**{name: value.tolist() for name, value in found.items()}, "count": [len(values)]}


class ImageHistogram:
    """How often each value occurs in each channel, from which the statistics of images follow exactly."""

    def __init__(self) -> None:
        self.counts = np.zeros((3, 256), np.int64)
        self.images = 0

    def add(self, images: np.ndarray) -> ImageHistogram:
        """Count uint8 images (T, H, W, 3)."""
        self.counts += np.stack([np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)])
        self.images += len(images)
        return self

    def statistics(self) -> dict[str, list]:
        """lerobot's statistics of each channel, scaled to [0, 1], as nested lists (3, 1, 1)."""
        levels = np.arange(256) / 255
        total = self.counts.sum(1, keepdims=True)
        mean = (self.counts * levels).sum(1) / total[:, 0]
        variance = (self.counts * (levels - mean[:, None]) ** 2).sum(1) / total[:, 0]
        below = self.counts.cumsum(1) / total
        seen = self.counts > 0
        found = {
            "min": levels[seen.argmax(1)],
            "max": levels[255 - seen[:, ::-1].argmax(1)],
            "mean": mean,
            "std": np.sqrt(variance),
            **{name: levels[(below >= share).argmax(1)] for name, share in QUANTILES.items()},
        }
        nested = {name: value.reshape(3, 1, 1).tolist() for name, value in found.items()}
        return {**nested, "count": [self.images]}


def flattened(statistics: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Statistics of an episode as columns of meta/episodes."""
    for key, values in statistics.items():
        yield from ((f"stats/{key}/{name}", value) for name, value in values.items())


def names_of(parts: Mapping[str, int]) -> list[str]:
    """A name for each number of a feature that holds several observations one after the other."""
    return [f"{key}_{index}" if size > 1 else key for key, size in parts.items() for index in range(size)]


def joined(parts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Arrays (T, size) side by side."""
    return np.concatenate([np.asarray(part, dtype) for part in parts], axis=1)
