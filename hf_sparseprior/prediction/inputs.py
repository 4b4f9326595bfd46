"""What images a command is to look at: folders, files, lists, columns of tables, videos."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import missing_path
from hf_sparseprior.base.json_files import DATA_BYTES, read_limited
from hf_sparseprior.cli.image_files import NO_IMAGE, PassedOver, as_text, decode_image, images_below, is_image
from hf_sparseprior.cli.labelled_images import decoding
from hf_sparseprior.cli.video_files import count_frames, iterate_frames, read_frames, sample_indices, segment_indices

TABLES = (".csv", ".tsv", ".parquet")
LISTS = (".txt", ".lst")
VIDEOS = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg")
PATH_COLUMNS = ("path", "file", "image", "filename", "file_name", "filepath")


@dataclass(frozen=True)
class Input:
    """What to look at: an image's file, a frame of a video, or for models of clips a whole video.

    name: what tables call it. frame: number from 0 in the video; None for an image.
    """

    name: str
    file: str
    frame: int | None = None


def places_of(images: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """What a user gave, one or several, as a list; FileNotFoundError for what does not exist."""
    places = [os.fspath(own) for own in ([images] if isinstance(images, (str, os.PathLike)) else images)]
    for place in places:
        if not os.path.exists(place):
            raise FileNotFoundError(missing_path(place, "give folders, images, lists, tables or videos"))
    return places


def find_inputs(
    given: Sequence[str | os.PathLike], column: str | None = None, every: int = 1, clips: bool = False
) -> tuple[list[Input], PassedOver]:
    """Images of folders (and of folders in them), files, lists, tables and videos, in this order, each once.

    With `clips` the same of videos, each as a whole.

    A folder's are in the order of their names. A list has a path in each line. Paths in lists and tables are relative
    to the file that names them.

    Args:
        column: of a table's paths; default the first of `PATH_COLUMNS` that it has.
        every: of a video each so many frames, from the first one on.

    Raises:
        OSError: for what does not exist or cannot be read.
        ValueError: for what is none of these, a table without such a column, and where nothing is found.
    """
    passed_over, found = PassedOver(), dict[str, Input]()
    places = places_of(given)
    for place in places:
        if column is not None and not place.lower().endswith(TABLES):
            raise ValueError(f"column={column!r} is for tables ({', '.join(TABLES)}), not for {place}")
        for own in _inputs_of(place, column, every, clips, passed_over):
            found.setdefault(own.name, own)
    if not found:
        line, what = passed_over.line(), "video" if clips else "image"
        raise ValueError(f"{', '.join(places)}: no {what} there" + (f"; {line}" if line else ""))
    return list(found.values()), passed_over


def is_video(name: str) -> bool:
    """Whether a file of this name is a video, by its ending."""
    return name.lower().endswith(VIDEOS)


def _inputs_of(place: str, column: str | None, every: int, clips: bool, passed_over: PassedOver) -> Iterator[Input]:
    kind = os.path.splitext(place)[1].lower()
    if os.path.isdir(place):
        wanted = (is_video, "no video") if clips else (is_image, NO_IMAGE)
        yield from (Input(as_text(path), path) for path in sorted(images_below(place, passed_over, *wanted)))
        return
    if kind in TABLES or kind in LISTS:
        root = os.path.dirname(place)
        paths = _column(Path(place), column) if kind in TABLES else _lines(Path(place))
        yield from (Input(as_text(path), os.path.join(root, path)) for path in paths)
    elif clips and kind not in VIDEOS:
        raise ValueError(
            f"{place} must be a video ({', '.join(VIDEOS)}), or a folder, list or table of videos, for a model of clips"
        )
    elif clips:
        yield Input(as_text(place), place)
    elif kind in VIDEOS:
        frames = range(0, count_frames(place, whole=False), every)
        yield from (Input(f"{as_text(place)}#{frame}", place, frame) for frame in frames)
    elif is_image(place):
        yield Input(as_text(place), place)
    else:
        raise ValueError(
            f"{place} must be a folder, an image, a list ({', '.join(LISTS)}), a table ({', '.join(TABLES)}) or a "
            f"video ({', '.join(VIDEOS)})"
        )


def _lines(file: Path) -> list[str]:
    text = read_limited(file, DATA_BYTES).decode("utf-8-sig", "surrogateescape")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _column(file: Path, column: str | None) -> list[str]:
    """Paths of a table.

    Raises:
        ValueError: for a missing column and a path that is empty or no text.
    """
    names, rows = _parquet(file) if file.suffix.lower() == ".parquet" else _csv(file)
    known = ", ".join(names)
    if column is None:
        column = next((name for name in PATH_COLUMNS if name in names), None)
        if column is None:
            raise ValueError(f"{file}: which column has the paths (column=)? It has {known}")
    elif column not in names:
        raise ValueError(f"{file}: column={column!r} must be one of {known}")
    paths = [row.get(column) for row in rows(column)]
    for number, path in enumerate(paths, 1):
        if not isinstance(path, str) or not path:
            raise ValueError(f"{file}, row {number}: {column}={path!r} must be a path")
    return paths


def _csv(file: Path) -> tuple[list[str], Any]:
    text = read_limited(file, DATA_BYTES).decode("utf-8-sig", "surrogateescape")
    reader = csv.DictReader(text.splitlines(), delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: {error}") from None
    return list(reader.fieldnames or ()), lambda column: rows


def _parquet(file: Path) -> tuple[list[str], Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema, read_table

    try:
        names = list(read_schema(file).names)
        return names, lambda column: read_table(file, columns=[column]).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{file}: {first_line(error)}") from None


class Reader:
    """Reads inputs as 8-bit RGB (PIL), videos as lists of frames. Frames of one video are to be asked for in order.

    Args:
        processor: of the model, whose settings `exif` and `depth16` say how files are decoded.
        num_frames: of a clip, for models of clips. every: how many frames they are apart, around the middle of the
            video; None: the middle ones of as many equal parts of the video.
    """

    def __init__(self, processor: Any = None, num_frames: int | None = None, every: int | None = None) -> None:
        self.settings = decoding(processor)
        self.num_frames, self.every = num_frames, every
        self._video: tuple[str, Iterator[Any], int] | None = None

    def __call__(self, wanted: Input) -> Any:
        """An image, or a list of a clip's frames.

        Raises:
            OSError, ValueError: as `decode_image`.
        """
        if self.num_frames is not None:
            return self._clip(wanted.file, self.num_frames)
        if wanted.frame is None:
            return decode_image(wanted.file, wanted.name, **self.settings)
        if self._video is None or self._video[0] != wanted.file or self._video[2] > wanted.frame:
            self._video = (wanted.file, iterate_frames(wanted.file), 0)
        place, frames, at = self._video
        for frame in frames:
            at += 1
            if at > wanted.frame:
                self._video = (place, frames, at)
                return _as_image(frame)
        raise OSError(f"{wanted.name}: the video has {at} frames")

    def _clip(self, place: str, num_frames: int) -> list[Any]:
        if not os.path.isfile(place):
            raise OSError(missing_path(place, "a list or a table names it"))
        total = count_frames(place)
        # As tests of video models choose theirs in `tasks.video`.
        if self.every is None:
            numbers = segment_indices(total, num_frames)
        else:
            numbers = sample_indices(total, num_frames, self.every)
        return [_as_image(frame) for frame in read_frames(place, numbers)]


def _as_image(frame: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(frame))
