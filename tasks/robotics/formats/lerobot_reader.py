"""LeRobotDataset of version 3, read without lerobot.

    info.json           features with dtype and shape, frames a second, templates of the other paths
    meta/episodes/      length of each episode, in which files it lies, from where on
    data/               numbers of every frame, and images that are kept as PNG
    videos/             a film of each camera, of many episodes one after the other

Features are read by the names of `observation_key`, what our writer put into several features by the names that it had.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.cli.image_files import decode_image
from tasks.robotics.formats.demonstrations import (
    ACTIONS,
    EXECUTED,
    SPLITS,
    Demonstrations,
    import_package,
    validation_episodes,
)
from tasks.robotics.formats.lerobot_files import (
    COUNTERS,
    EPISODES,
    IMAGES,
    INFO,
    OURS,
    VERSION,
    file_of,
    video_frames,
)

ACTION, EXECUTED_ACTION = "action", "executed_action"
NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
VALIDATION = ("validation", "valid", "val")  # what data sets call it in info.json
LOCATED = ("data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index")


def observation_key(feature: str) -> str:
    """The name by which an observation is read: "observation.images.top" is top, "observation.state" is state.

    What is nested further is joined by _, because names of modules have no dots.
    """
    name = feature.removeprefix("observation.")
    return (name.removeprefix("images.") if name.startswith("images.") else name).replace(".", "_")


class LeRobotDemonstrations(Demonstrations):
    """A folder with meta/info.json of version 3."""

    def _open(self) -> Any:
        """Nothing stays open: files are opened when they are read."""
        return self.path

    def _verify(self, file: Any) -> None:
        self._info = self._read_info()
        self._features = self._read_features()
        self._parts = self._observation_parts()
        self.shapes = {key: shape for key, (_, shape, _) in self._parts.items()}
        self.action_size = self._features[ACTION][1][0]
        self._places = self._read_episodes()
        self.episodes = tuple(f"demo_{number}" for number in range(len(self._places)))
        self.lengths = {name: place["length"] for name, place in zip(self.episodes, self._places, strict=True)}
        seeds = self._ours.get("seeds", [None] * len(self.episodes))
        self.seeds = {
            name: None if seed is None else int(seed) for name, seed in zip(self.episodes, seeds, strict=True)
        }
        self.settings = self._read_settings()
        self._numbers = self._read_numbers()
        self._check_videos()
        self._check_finite(ACTION, self._numbers[ACTION])
        held = self._held_out()
        self._splits = {
            split: tuple(name for name, out in zip(self.episodes, held, strict=True) if out == (split == "validation"))
            for split in SPLITS
        }
        self._check_splits()

    # ---- what the data set says of itself ---------------------------------------------------------------------------

    def _read_info(self) -> dict[str, Any]:
        info = read_json_object(self.path / INFO)
        if info.get("codebase_version") != VERSION:
            raise self._fail(
                f"{INFO} has codebase_version={info.get('codebase_version')!r}, {VERSION} is read; lerobot's "
                "convert_dataset_v21_to_v30 makes it of v2.1"
            )
        fps = info.get("fps")
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
            raise self._fail(f"{INFO} has fps={fps!r}, which must be a number above 0, at most 1000")
        if not isinstance(info.get("features"), dict):
            raise self._fail(f"{INFO} has no features")
        ours = self.path / OURS
        self._ours = read_json_object(ours) if ours.exists() else {}
        return info

    def _read_features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{name: (dtype, shape)}; of images (height, width, 3), as `video_frames` gives them."""
        found = {}
        for name, feature in self._info["features"].items():
            dtype = feature.get("dtype") if isinstance(feature, dict) else None
            if dtype not in (*NUMBERS, *IMAGES):
                continue  # texts, and what later versions have
            shape = feature.get("shape")
            if not isinstance(shape, list) or not shape or not all(type(n) is int and 0 < n < 10**6 for n in shape):
                raise self._fail(f"{INFO}: {name} has shape={shape!r}, which must be positive integers")
            found[name] = dtype, self._image_shape(name, feature) if dtype in IMAGES else tuple(shape)
        if ACTION not in found or len(found[ACTION][1]) != 1:
            raise self._fail(f"{INFO} has no feature {ACTION!r} of numbers one after the other")
        return found

    def _image_shape(self, name: str, feature: Mapping[str, Any]) -> tuple[int, int, int]:
        shape, names = feature["shape"], feature.get("names")
        if len(shape) != 3:
            raise self._fail(f"{INFO}: {name} has shape={shape}, which must be height, width and channels")
        channels_first = isinstance(names, list) and str(names[:1]).find("channel") >= 0
        if not isinstance(names, list):
            channels_first = shape[2] != 3 and shape[0] == 3
        channels, height, width = shape if channels_first else (shape[2], *shape[:2])
        if channels != 3:
            raise self._fail(f"{INFO}: {name} has {channels} channels; images of 3 are read")
        return height, width, 3

    def _observation_parts(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """{key: (feature, shape of one step, where it begins in the feature)}."""
        parts: dict[str, tuple[str, tuple[int, ...], int]] = {}
        if self._ours:
            for feature, sizes in self._ours["observations"].items():
                first = 0
                for key, size in sizes.items():
                    shape = self._features[feature][1] if size is None else (int(size),)
                    parts[key] = feature, shape, first
                    first += 0 if size is None else int(size)
            return parts
        for feature, (dtype, shape) in self._features.items():
            if not feature.startswith("observation") or (dtype not in IMAGES and len(shape) != 1):
                continue
            key = observation_key(feature)
            if key in parts or key in (ACTIONS, EXECUTED):
                raise self._fail(f"{INFO}: {feature} and another feature would both be called {key!r}")
            parts[key] = feature, shape, 0
        return parts

    def _read_settings(self) -> dict[str, Any]:
        """Of other data sets there are none: they can be learned from, and no simulator is theirs."""
        if self._ours:
            return self._check_settings(self._ours.get("settings"))
        cameras = [key for key, shape in self.shapes.items() if len(shape) == 3]
        return {
            "environment": f"lerobot's {self._info.get('robot_type')}",
            "cameras": cameras,
            "controller": {},
            "control_hz": self._info["fps"],
            "image_size": self.shapes[cameras[0]][0] if cameras else None,
        }

    def _held_out(self) -> list[bool]:
        """Which episodes are for validation: as our writer or info.json says, else every tenth one."""
        count = len(self.episodes)
        if self._ours:
            return [number in self._ours["validation"] for number in range(count)]
        splits = self._info.get("splits")
        splits = splits if isinstance(splits, dict) else {}
        for name in VALIDATION:
            if bounds := re.fullmatch(r"(\d+):(\d+)", str(splits.get(name, ""))):
                return [int(bounds[1]) <= number < int(bounds[2]) for number in range(count)]
        return validation_episodes(count).tolist()

    # ---- episodes and frames ----------------------------------------------------------------------------------------

    def _read_episodes(self) -> list[dict[str, Any]]:
        """Length and places of each episode."""
        parquet = import_package("pyarrow.parquet")
        paths = sorted((self.path / EPISODES).glob("*/*.parquet"))
        if not paths:
            raise self._fail(f"has no {EPISODES}/chunk-000/file-000.parquet")
        videos = [name for name, (dtype, _) in self._features.items() if dtype == "video"]
        wanted = ["episode_index", "length", *LOCATED]
        for key in videos:
            wanted += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
        rows: list[dict[str, Any]] = []
        for path in paths:
            known = parquet.read_schema(path).names
            if missing := [name for name in wanted if name not in known]:
                raise self._fail(f"{path.relative_to(self.path)} has no column {missing[0]}")
            rows += parquet.read_table(path, columns=wanted).to_pylist()
        rows.sort(key=lambda row: row["episode_index"])
        first = 0
        for number, row in enumerate(rows):
            if missing := [name for name in wanted if row[name] is None]:
                raise self._fail(f"{EPISODES}: episode {number} does not say its {missing[0]}")
            ends = row["dataset_from_index"], row["dataset_to_index"]
            if row["episode_index"] != number or row["length"] < 1 or ends != (first, first + row["length"]):
                raise self._fail(f"{EPISODES}: episode {number} is not where the one before it ends, or is missing")
            first += row["length"]
        said = self._info.get("total_episodes"), self._info.get("total_frames")
        if said != (len(rows), first):
            raise self._fail(
                f"{EPISODES} has {len(rows)} episodes of {first} frames, {INFO} says {said[0]} and {said[1]}"
            )
        if not rows:
            raise self._fail("has no episodes")
        if self._ours and len(self._ours["seeds"]) != len(rows):
            raise self._fail(f"{OURS} has {len(self._ours['seeds'])} seeds for {len(rows)} episodes")
        return rows

    def _read_numbers(self) -> dict[str, np.ndarray]:
        """Everything but images, of all frames, after a check that frames are whole and in order."""
        parquet = import_package("pyarrow.parquet")
        features = {n: shape for n, (dtype, shape) in self._features.items() if dtype in NUMBERS and n not in COUNTERS}
        features = {name: shape for name, shape in features.items() if self._is_read(name)}
        columns = {name: [] for name in (*features, "timestamp", *COUNTERS)}  # type: dict[str, list[np.ndarray]]
        for path in dict.fromkeys(self._data_file(place) for place in self._places):
            if missing := [name for name in columns if name not in parquet.read_schema(self.path / path).names]:
                raise self._fail(f"{path} has no column {missing[0]}")
            table = parquet.read_table(self.path / path, columns=list(columns))
            for name in columns:
                columns[name].append(_array(table[name], features.get(name, (1,))))
        found = {name: np.concatenate(parts) for name, parts in columns.items()}
        lengths = [place["length"] for place in self._places]
        steps = np.concatenate([np.arange(length) for length in lengths])
        expected = {"index": np.arange(sum(lengths)), "frame_index": steps}
        expected["episode_index"] = np.repeat(np.arange(len(lengths)), lengths)
        for name, values in expected.items():
            if not np.array_equal(found.pop(name)[:, 0], values):
                raise self._fail(f"{name} of data does not count the frames of {EPISODES}")
        late = np.abs(found.pop("timestamp")[:, 0] - steps / self._info["fps"])
        if late.max() > 1e-3:
            raise self._fail(
                f"timestamp of frame {late.argmax()} is {late.max():.4f} s from where fps={self._info['fps']} puts it"
            )
        return found

    def _is_read(self, feature: str) -> bool:
        return feature in (ACTION, EXECUTED_ACTION) or any(feature == part[0] for part in self._parts.values())

    def _data_file(self, place: Mapping[str, Any]) -> str:
        fields = {"chunk_index": place["data/chunk_index"], "file_index": place["data/file_index"]}
        return self._within("data_path", fields)

    def _video_file(self, place: Mapping[str, Any], key: str) -> Path:
        fields = {name: place[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        return self.path / self._within("video_path", {"video_key": key, **fields})

    def _within(self, name: str, fields: Mapping[str, Any]) -> str:
        template = self._info.get(name)
        try:
            path = file_of(template if isinstance(template, str) else "", fields)
        except ValueError as error:
            raise self._fail(f"{INFO}: {name}: {error}") from None
        if not (self.path / path).is_file():
            raise self._fail(f"{path} is missing")
        return path

    def _check_videos(self) -> None:
        """Every film is whole, as far as its header says, and has the size and the rate that info.json says."""
        av = import_package("av")
        for key, (dtype, shape) in self._features.items():
            if dtype != "video" or not self._is_read(key):
                continue
            ends: dict[Path, float] = {}
            for place in self._places:
                path = self._video_file(place, key)
                end = place[f"videos/{key}/from_timestamp"] + place["length"] / self._info["fps"]
                ends[path] = max(ends.get(path, 0), end)
            for path, end in ends.items():
                name = path.relative_to(self.path)
                try:
                    with av.open(str(path)) as container:
                        stream = container.streams.video[0]
                        size = stream.height, stream.width
                        seconds = float((stream.duration or 0) * stream.time_base) or container.duration / 1e6
                except Exception as error:  # libav's errors, and a file without a film
                    raise self._fail(f"{name} is no whole video ({first_line(error)})") from error
                if size != shape[:2]:
                    raise self._fail(f"{name} has {size[0]}x{size[1]} pixels, {INFO} says {shape[0]}x{shape[1]}")
                if seconds < end - 0.5 / self._info["fps"]:
                    raise self._fail(f"{name} has {seconds:.3f} s, its episodes need {end:.3f}")

    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray:
        place = self._places[self.episodes.index(episode)]
        rows = slice(place["dataset_from_index"] + start, place["dataset_from_index"] + stop)
        if key == ACTIONS or (key == EXECUTED and EXECUTED_ACTION in self._numbers):
            return self._numbers[ACTION if key == ACTIONS else EXECUTED_ACTION][rows]
        if key not in self._parts:
            raise KeyError(f"there is no {key}")
        feature, shape, first = self._parts[key]
        if len(shape) == 1:
            return self._numbers[feature][rows, first : first + shape[0]]
        if self._features[feature][0] == "image":
            images = self._stored_images(place, feature, start, stop)
        else:
            fps = self._info["fps"]
            since = place[f"videos/{feature}/from_timestamp"] + start / fps
            images = video_frames(self._video_file(place, feature), since, stop - start, fps)
        if images.shape[1:] != shape:
            raise ValueError(f"images have shape {images.shape[1:]}, not {shape}")
        return images

    def _has_executed(self, file: Any, episode: str) -> bool:
        return EXECUTED_ACTION in self._numbers

    def _recorded(self, file: Any, episode: str) -> dict[str, np.ndarray]:
        parquet = import_package("pyarrow.parquet")
        place = self._places[self.episodes.index(episode)]
        first, last = place["dataset_from_index"], place["dataset_to_index"]
        names = {"states": "states", "rewards": "next.reward", "dones": "next.success"}
        names = {key: name for key, name in names.items() if name in self._features}
        table = parquet.read_table(
            self.path / self._data_file(place),
            columns=[*names.values()],
            filters=[("index", ">=", first), ("index", "<", last)],
        )
        return {key: _array(table[name], self._features[name][1]) for key, name in names.items()}

    def _stored_images(self, place: Mapping[str, Any], feature: str, start: int, stop: int) -> np.ndarray:
        """Images that are kept in the table itself."""
        parquet = import_package("pyarrow.parquet")
        first = place["dataset_from_index"]
        table = parquet.read_table(
            self.path / self._data_file(place),
            columns=[feature],
            filters=[("index", ">=", first + start), ("index", "<", first + stop)],
        )
        images: list[np.ndarray] = []
        for cell in table[feature].to_pylist():
            if not cell or not cell["bytes"]:
                raise ValueError(f"{feature} is not in the table, only the name of a file")
            images.append(np.asarray(decode_image(cell["bytes"], f"{feature} of frame {start + len(images)}")))
        return np.stack(images)


def _array(column: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A column of numbers, or of lists of them, as (rows, size)."""
    types = import_package("pyarrow").types
    size = int(np.prod(shape))
    if column.null_count:
        raise ValueError("a value is missing")
    parts = [np.empty((0, size))]
    for values in column.chunks:
        rows = len(values)
        while types.is_list(values.type) or types.is_fixed_size_list(values.type) or types.is_large_list(values.type):
            values = values.flatten()
        if len(values) != rows * size:
            raise ValueError(f"{len(values)} numbers for {rows} frames of {size}")
        parts.append(values.to_numpy(zero_copy_only=False).reshape(rows, size))
    return np.concatenate(parts[1:] or parts)
