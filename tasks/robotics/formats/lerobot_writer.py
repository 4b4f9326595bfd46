"""LeRobotDataset of version 3, written without lerobot, for its training and its tools.

`observation.state` holds what a robot knows of itself, `observation.environment_state` what only a simulator knows,
`action` the chosen actions. `executed_action`, `states` and `meta/sparseprior.json` are additions of ours, which
lerobot leaves alone; with them demonstrations come back as they were, except for what a video loses.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_sparseprior.base.files import whole_folder
from tasks.robotics.formats.demonstrations import import_package, validation_episodes
from tasks.robotics.formats.episode import Episode
from tasks.robotics.formats.lerobot_files import (
    CHUNK_SIZE,
    COUNTERS,
    DATA_MEGABYTES,
    DATA_PATH,
    EPISODES,
    FILE,
    INFO,
    OURS,
    STATS,
    TASKS,
    VERSION,
    VIDEO_MEGABYTES,
    VIDEO_PATH,
    FileNumbers,
    ImageHistogram,
    VideoWriter,
    file_of,
    flattened,
    joined,
    names_of,
    number_statistics,
    video_info,
)
from tasks.robotics.observation_groups import ENVIRONMENT, INSTRUCTIONS, STATE, image_feature

ROBOTS = {"lift": "panda", "can": "panda", "pusht": "pusht"}
SIMULATED = ("object", "keypoints", "state")  # observations of which a robot knows nothing
KINDS = ("video", "image")
MEGABYTE = 2**20


def feature_of(key: str, image: bool) -> str:
    """lerobot's name for the feature that holds an observation."""
    if image:
        return image_feature(key)
    return ENVIRONMENT if key in SIMULATED else STATE


def write_lerobot(
    path: Path,
    episodes: Iterable[Episode],
    settings: Mapping[str, Any],
    images: str = "video",
    megabytes: tuple[float, float] = (DATA_MEGABYTES, VIDEO_MEGABYTES),
    held: Sequence[bool] | None = None,
) -> None:
    """Write a data set, whole or not at all.

    Args:
        path: the new folder.
        episodes: in order; one is in memory at a time.
        settings: the environment's.
        images: "video", H.264 with a small loss, or "image", PNG without.
        megabytes: after which files of data and of videos are closed.
        held: which episodes are for validation; None: every tenth.

    Raises:
        ValueError: for another kind of images, sides that are odd in a video, or no episode.
        OSError: if the folder exists.
    """
    if images not in KINDS:
        raise ValueError(f"images={images!r} must be one of {', '.join(KINDS)}")
    with whole_folder(path) as root:
        writer = _Writer(root, settings, images, megabytes)
        try:
            for episode in episodes:
                writer.add(episode)
        finally:
            writer.close()
        writer.finish(held)


class _Writer:
    def __init__(self, root: Path, settings: Mapping[str, Any], images: str, megabytes: tuple[float, float]) -> None:
        self.root, self.settings, self.images, self.megabytes = root, settings, images, megabytes
        self.fps = settings["control_hz"]
        self.features: dict[str, dict[str, Any]] = {}
        self.observations: dict[str, dict[str, int | None]] = {}
        self.videos: dict[str, VideoWriter] = {}
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.histograms: dict[str, ImageHistogram] = {}
        self.rows: list[dict[str, Any]] = []
        self.seeds: list[int | None] = []
        self.frames = 0
        self.data = FileNumbers(megabytes[0] * MEGABYTE)
        self._file: Any = None
        self._bytes = 0

    # ---- episodes ---------------------------------------------------------------------------------------------------

    def add(self, episode: Episode) -> None:
        """Write an episode's frames and remember its row of meta/episodes."""
        if not self.rows:
            self._begin(episode)
        number, length = len(self.rows), len(episode.actions)
        columns = self._columns(episode, number, length)
        pictures = {
            feature: episode.observations[key]
            for feature, sizes in self.observations.items()
            for key, size in sizes.items()
            if size is None
        }
        row: dict[str, Any] = {"episode_index": number, "tasks": [self._task], "length": length}
        row |= self._write_data(columns, pictures if self.images == "image" else {})
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        statistics = {name: number_statistics(values) for name, values in columns.items()}
        for feature, values in pictures.items():
            if self.images == "video":
                row |= self.videos[feature].add(values)
            statistics[feature] = ImageHistogram().add(values).statistics()
            self.histograms[feature].add(values)
        for name, values in columns.items():
            self.numbers.setdefault(name, []).append(values)
        place = {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self.rows.append(row | dict(flattened(statistics)) | place)
        self.seeds.append(episode.seed)
        self.frames += length

    @property
    def _task(self) -> str:
        name = self.settings["environment"]
        return INSTRUCTIONS.get(name, name)

    def _begin(self, episode: Episode) -> None:
        """Features, as the first episode has them."""
        self.features = {}
        for key, values in episode.observations.items():
            image = values.ndim == 4
            feature = feature_of(key, image)
            # PushT's `state` is the simulator's own, which is kept anyway.
            if key == "state" and self.settings["environment"] == "pusht":
                feature = "states"
            self.observations.setdefault(feature, {})[key] = None if image else values.shape[1]
            if image:
                self._begin_camera(feature, values)
        for feature in (STATE, ENVIRONMENT):
            if feature in self.observations:
                sizes = {key: int(size or 0) for key, size in self.observations[feature].items()}
                self._number(feature, "float32", sum(sizes.values()), names_of(sizes))
        self._number("action", "float32", episode.actions.shape[1])
        self._number("executed_action", "float64", episode.executed.shape[1])
        if episode.states.shape[1]:
            self._number("states", "float64", episode.states.shape[1])
        self._number("next.reward", "float32", 1)
        self._number("next.done", "bool", 1)
        self._number("next.success", "bool", 1)
        self._number("timestamp", "float32", 1)
        for name, dtype in COUNTERS.items():
            self._number(name, dtype, 1)

    def _begin_camera(self, feature: str, values: np.ndarray) -> None:
        height, width = values.shape[1:3]
        if self.images == "video" and (height % 2 or width % 2):
            raise ValueError(
                f"{feature} has {height}x{width} pixels; a video needs even sides, images='image' does not"
            )
        self.features[feature] = {
            "dtype": self.images, "shape": [height, width, 3], "names": ["height", "width", "channels"],
        }  # fmt: skip
        self.histograms[feature] = ImageHistogram()
        if self.images == "video":
            self.videos[feature] = VideoWriter(self.root, feature, self.fps, self.megabytes[1] * MEGABYTE)

    def _number(self, name: str, dtype: str, size: int, names: list[str] | None = None) -> None:
        self.features[name] = {"dtype": dtype, "shape": [size], "names": names}

    def _columns(self, episode: Episode, number: int, length: int) -> dict[str, np.ndarray]:
        """Everything but images, (T, size) or (T,)."""
        steps = np.arange(length)
        columns = {
            feature: joined([episode.observations[key] for key in self.observations[feature]], "float32")
            for feature in (STATE, ENVIRONMENT)
            if feature in self.observations
        }
        return {
            **columns,
            "action": episode.actions.astype(np.float32),
            "executed_action": episode.executed.astype(np.float64),
            **({"states": episode.states.astype(np.float64)} if episode.states.shape[1] else {}),
            "next.reward": episode.rewards.astype(np.float32),
            "next.done": steps == length - 1,
            "next.success": episode.dones.astype(bool),
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, number),
            "index": self.frames + steps,
            "task_index": np.zeros(length, np.int64),
        }

    def _write_data(self, columns: Mapping[str, np.ndarray], pictures: Mapping[str, np.ndarray]) -> dict[str, int]:
        pa, parquet = import_package("pyarrow"), import_package("pyarrow.parquet")
        arrays = {name: _png(values) for name, values in pictures.items()}
        for name, values in columns.items():
            flat = pa.array(values.reshape(-1))
            # lerobot keeps features of one number as numbers.
            listed = values.ndim == 2 and values.shape[1] > 1
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if listed else flat
        # In the order of the features, as lerobot does it.
        table = pa.table({name: arrays[name] for name in self.features if name in arrays})
        if self._file is not None and self._bytes >= self.data.limit:
            self._file.close()
            self._file = None
            self.data.next()
        if self._file is None:
            place = self.root / file_of(DATA_PATH, self.data.fields)
            place.parent.mkdir(parents=True, exist_ok=True)
            table = table.replace_schema_metadata({"huggingface": json.dumps(_hugging_face(self.features))})
            self._schema, self._bytes = table.schema, 0
            self._file = parquet.ParquetWriter(place, self._schema, compression="snappy")
        self._file.write_table(table.replace_schema_metadata(self._schema.metadata))
        self._bytes += table.nbytes
        return {f"data/{name}": value for name, value in self.data.fields.items()}

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all files."""
        if self._file is not None:
            self._file.close()
        for video in self.videos.values():
            video.close()

    def finish(self, held: Sequence[bool] | None = None) -> None:
        """Write everything in meta/; `held` as in `write_lerobot`."""
        if not self.rows:
            raise ValueError("there is no episode to write")
        pa, parquet = import_package("pyarrow"), import_package("pyarrow.parquet")
        place = self.root / EPISODES / (FILE.format(chunk_index=0, file_index=0) + ".parquet")
        place.parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(self.rows), place)
        import_package("pandas").DataFrame({"task_index": [0]}, index=[self._task]).to_parquet(self.root / TASKS)
        for feature, video in self.videos.items():
            first = self.root / file_of(VIDEO_PATH, {"video_key": feature, "chunk_index": 0, "file_index": 0})
            self.features[feature]["info"] = video_info(first)
            assert video.frames
        numbers = {name: number_statistics(np.concatenate(parts)) for name, parts in self.numbers.items()}
        pictures = {name: histogram.statistics() for name, histogram in self.histograms.items()}
        valid = validation_episodes(len(self.rows)) if held is None else held
        info = {
            "codebase_version": VERSION,
            "robot_type": ROBOTS.get(self.settings["environment"]),
            "total_episodes": len(self.rows),
            "total_frames": self.frames,
            "total_tasks": 1,
            "chunks_size": CHUNK_SIZE,
            "data_files_size_in_mb": DATA_MEGABYTES,
            "video_files_size_in_mb": VIDEO_MEGABYTES,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self.rows)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self.videos else None,
            "features": self.features,
        }
        ours = {
            "settings": dict(self.settings),
            "observations": self.observations,
            "seeds": self.seeds,
            "validation": np.flatnonzero(valid).tolist(),
        }
        for name, content in ((INFO, info), (STATS, numbers | pictures), (OURS, ours)):
            (self.root / name).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _png(images: np.ndarray) -> Any:
    """Images (T, H, W, 3) as a column of PNG files."""
    pa = import_package("pyarrow")
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        files.append(file.getvalue())
    kinds = [pa.field("bytes", pa.binary()), pa.field("path", pa.string())]
    return pa.StructArray.from_arrays([pa.array(files, pa.binary()), pa.nulls(len(files), pa.string())], fields=kinds)


def _hugging_face(features: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The columns as `datasets` describes them in a parquet file."""
    found: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            found[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            value = {"dtype": feature["dtype"], "_type": "Value"}
            size = feature["shape"][0]
            found[name] = value if size == 1 else {"feature": value, "length": size, "_type": "List"}
    return {"info": {"features": found}}
