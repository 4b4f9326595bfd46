"""Diffusion Policy's zarr layout of PushT, read and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import whole_folder
from tasks.robotics.formats.demonstrations import (
    ACTIONS,
    EXECUTED,
    SPLITS,
    Demonstrations,
    import_package,
    validation_episodes,
)
from tasks.robotics.formats.episode import Episode

IMAGE_CHUNK = 16
# The settings of published PushT files, which carry none.
PUSHT_SETTINGS = {
    "environment": "pusht",
    "action": "target position of the pusher",
    "frame": "table, 512 units a side, origin top left",
    "controller": {"k_p": 100, "k_v": 20},
    "control_hz": 10,
    "image_mode": {"renderer": "pygame at 512, cv2.resize"},
}


class ZarrDemonstrations(Demonstrations):
    """Diffusion Policy's layout of PushT."""

    _KEYS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
        ACTIONS: ("action", lambda values: values),
        EXECUTED: ("executed_action", lambda values: values),
        "image": ("img", lambda values: values),
        "agent_pos": ("state", lambda values: values[:, :2]),
        "state": ("state", lambda values: values),
        "keypoints": ("keypoint", lambda values: values.reshape(len(values), -1)),
    }

    def _open(self) -> Any:
        zarr = import_package("zarr")
        try:
            return zarr.open_group(str(self.path), mode="r", zarr_format=2)
        except Exception as error:  # zarr's errors differ between its stores
            raise self._fail(f"is no zarr group of version 2 ({first_line(error)})") from error

    def _verify(self, file: Any) -> None:
        arrays = {name: self._array(file, name) for name in ("data/state", "data/action", "meta/episode_ends")}
        ends = arrays["meta/episode_ends"][:]
        steps = arrays["data/action"].shape[0]
        if ends.ndim != 1 or not len(ends) or (np.diff(ends, prepend=0) <= 0).any() or ends[-1] != steps:
            raise self._fail(f"meta/episode_ends must rise and end at the {steps} steps of data/action")
        self.episodes = tuple(f"demo_{index}" for index in range(len(ends)))
        self._starts = dict(zip(self.episodes, (0, *map(int, ends[:-1])), strict=True))
        self.lengths = dict(zip(self.episodes, map(int, np.diff(ends, prepend=0)), strict=True))
        optional = {name: self._array(file, f"data/{name}") for name in ("img", "keypoint") if f"data/{name}" in file}
        stored = file.attrs.get("settings")
        image = optional.get("img")
        self.settings = (
            PUSHT_SETTINGS | {"cameras": ["image"] if image is not None else [], "image_size": 96}
            if stored is None
            else self._check_settings(stored)
        )
        side = self.settings.get("image_size")
        shapes = {"data/action": (2,), "data/state": (5,), "data/keypoint": None, "data/img": (side, side, 3)}
        for name, array in {**arrays, **{f"data/{key}": value for key, value in optional.items()}}.items():
            wanted = shapes.get(name)
            if name in shapes and (array.shape[0] != steps or wanted not in (None, array.shape[1:])):
                raise self._fail(f"{name} has shape {array.shape}, not {(steps, *(wanted or array.shape[1:]))}")
        if self.settings["cameras"] and image is None:
            raise self._fail("has no data/img, which its settings promise")
        self._check_finite("data/action", arrays["data/action"][:])
        self.action_size = 2
        self.shapes = {"agent_pos": (2,), "state": (5,)}
        if "keypoint" in optional:
            self.shapes["keypoints"] = (int(np.prod(optional["keypoint"].shape[1:])),)
        if image is not None:
            self.shapes["image"] = tuple(image.shape[1:])
        seeds = self._array(file, "meta/seed")[:] if "meta/seed" in file else [None] * len(ends)
        self.seeds = {
            name: None if seed is None else int(seed) for name, seed in zip(self.episodes, seeds, strict=True)
        }
        valid = self._array(file, "meta/valid")[:] if "meta/valid" in file else validation_episodes(len(ends))
        if len(valid) != len(ends):
            raise self._fail(f"meta/valid has {len(valid)} episodes, not {len(ends)}")
        self._splits = {
            split: tuple(
                name for name, held in zip(self.episodes, valid, strict=True) if bool(held) == (split == "validation")
            )
            for split in SPLITS
        }
        self._check_splits()

    def _array(self, file: Any, name: str) -> Any:
        """An array, after a check that every chunk exists: zarr reads a missing one as zeros."""
        zarr = import_package("zarr")
        try:
            array = file[name]
        except Exception as error:  # zarr's errors differ between its stores
            raise self._fail(f"has no {name}") from error
        if not isinstance(array, zarr.Array):
            raise self._fail(f"{name} is no array")
        if array.nchunks_initialized != array.nchunks:
            raise self._fail(f"{name} has {array.nchunks_initialized} of its {array.nchunks} chunks")
        # Blosc (published files) decompresses a file that is cut off without an error: it reads memory after its end.
        if any(codec.codec_id == "blosc" for codec in array.compressors):
            for chunk in (self.path / name).iterdir():
                if not chunk.name.startswith(".") and _blosc_bytes(chunk) != chunk.stat().st_size:
                    raise self._fail(f"{name}/{chunk.name} is cut off")
        return array

    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray:
        name, view = self._KEYS[key]
        first = self._starts[episode]
        return view(file[f"data/{name}"][first + start : first + stop])

    def _has_executed(self, file: Any, episode: str) -> bool:
        return "data/executed_action" in file

    def _recorded(self, file: Any, episode: str) -> dict[str, np.ndarray]:
        rows = slice(self._starts[episode], self._starts[episode] + self.lengths[episode])
        found = {"states": file["data/state"][rows]}
        if "data/reward" in file:
            rewards = self._array(file, "data/reward")[rows].reshape(-1)
            # The task is solved when the reward is 1; files of earlier versions do not say it otherwise.
            found |= {"rewards": rewards, "dones": rewards >= 1}
        if "data/done" in file:
            found["dones"] = self._array(file, "data/done")[rows].reshape(-1)
        return found


def write_zarr(
    path: Path, episodes: Sequence[Path], settings: dict[str, Any], held: Sequence[bool] | None = None
) -> None:
    """`write_demonstrations` for PushT."""
    zarr = import_package("zarr")
    from numcodecs import GZip

    lengths = [len(Episode.load(source).actions) for source in episodes]
    ends = np.cumsum(lengths)
    with whole_folder(path) as folder:
        root = zarr.create_group(str(folder), zarr_format=2, overwrite=True, attributes={"settings": settings})
        arrays: dict[str, Any] = {}
        for index, source in enumerate(episodes):
            episode = Episode.load(source)
            seen = episode.observations
            values = {
                "state": episode.states.astype(np.float32),
                "action": episode.actions.astype(np.float32),
                "executed_action": episode.executed,
                "keypoint": seen["keypoints"].reshape(len(episode.actions), -1, 2),
                "reward": episode.rewards.astype(np.float32),
                "done": episode.dones,
                **({"img": seen["image"]} if "image" in seen else {}),
            }
            for name, part in values.items():
                if index == 0:
                    arrays[name] = root.create_array(
                        f"data/{name}",
                        shape=(int(ends[-1]), *part.shape[1:]),
                        dtype=part.dtype,
                        chunks=(IMAGE_CHUNK if name == "img" else int(ends[-1]), *part.shape[1:]),
                        compressors=GZip(level=1),  # with a checksum
                        config={"write_empty_chunks": True},
                    )
                arrays[name][ends[index] - len(part) : ends[index]] = part
        seeds = [Episode.load(source).seed for source in episodes]
        meta = {
            "episode_ends": ends.astype(np.int64),
            "valid": validation_episodes(len(episodes)) if held is None else np.array(held, dtype=bool),
        }
        if None not in seeds:
            meta["seed"] = np.array(seeds, dtype=np.int64)
        for name, numbers in meta.items():
            array = root.create_array(
                f"meta/{name}",
                shape=numbers.shape,
                dtype=numbers.dtype,
                chunks=numbers.shape,
                config={"write_empty_chunks": True},
            )
            array[:] = numbers


def _blosc_bytes(path: Path) -> int:
    """Size of a compressed chunk: the fourth number (uint32) of its header; 0 without a header."""
    with path.open("rb") as file:
        header = file.read(16)
    return int.from_bytes(header[12:], "little") if len(header) == 16 else 0
