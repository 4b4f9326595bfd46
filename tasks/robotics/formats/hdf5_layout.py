"""robomimic's HDF5 layout, read and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import whole_file
from hf_sparseprior.base.json_files import parse_json
from tasks.robotics.actions import POSE_ACTION_SIZE, matrix_from_axis_angle, matrix_to_6d
from tasks.robotics.environment import BASE_FRAME, POSE_ACTION
from tasks.robotics.formats.demonstrations import (
    ACTIONS,
    EXECUTED,
    NUMBERS,
    SPLITS,
    BrokenDemonstrations,
    Demonstrations,
    import_package,
    validation_episodes,
)
from tasks.robotics.formats.episode import Episode
from tasks.robotics.formats.robomimic_check import COMPARED, HARMLESS, model_facts

# robomimic's numbers of classes of environments; names of environments; where the robot's base stands, metres.
ROBOSUITE_TYPE = 1
ROBOMIMIC_NAMES = {"Lift": "lift", "PickPlaceCan": "can"}
BASE_POSITIONS = {"lift": (-0.56, 0.0, 0.912), "can": (-0.5, -0.1, 0.912)}


class HDF5Demonstrations(Demonstrations):
    """robomimic's layout."""

    def _open(self) -> Any:
        h5py = import_package("h5py")
        try:
            return h5py.File(self.path, "r")
        except OSError as error:
            raise self._fail(f"is no whole HDF5 file ({first_line(error)})") from error

    def _verify(self, file: Any) -> None:
        h5py = import_package("h5py")
        data = file.get("data")
        if not isinstance(data, h5py.Group) or not len(data):
            raise self._fail("has no group data with episodes")
        try:
            arguments = parse_json(data.attrs["env_args"], finite=False)
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(f"has no env_args in JSON ({first_line(error)})") from error
        arguments = arguments if isinstance(arguments, dict) else {}
        self.episodes = tuple(sorted(data, key=_episode_number))
        self._published = "settings" not in arguments and arguments.get("env_name") in ROBOMIMIC_NAMES
        stored = self._published_settings(arguments, data) if self._published else arguments.get("settings")
        self.settings = self._check_settings(stored)
        self.lengths, self.seeds, self.shapes, self.action_size = {}, {}, {}, 0
        for name in self.episodes:
            try:
                self._verify_episode(name, data[name])
            except (BrokenDemonstrations, ImportError):
                raise
            except Exception as error:  # attributes and data may have foreign types
                raise self._fail(f"data/{name} cannot be read ({first_line(error)})") from error
        if self._published:
            self._check_absolute(data)
            self.action_size = POSE_ACTION_SIZE
        if self._published and "mask" not in file:
            held = validation_episodes(len(self.episodes))
            self._splits = {
                split: tuple(np.array(self.episodes)[held == (split == "validation")].tolist()) for split in SPLITS
            }
        else:
            self._splits = {split: self._mask(file, name) for split, name in SPLITS.items()}
        self._check_splits()

    def _published_settings(self, arguments: dict[str, Any], data: Any) -> dict[str, Any]:
        """What robomimic's env_args and the first episode say."""
        h5py = import_package("h5py")
        first = data[self.episodes[0]]
        seen = first.get("obs") if isinstance(first, h5py.Group) else None
        images = [key for key in seen or () if key.endswith("_image")]
        first_image = seen[images[0]] if seen is not None and images else None
        options = arguments.get("env_kwargs")
        options = options if isinstance(options, dict) else {}
        return {
            "environment": ROBOMIMIC_NAMES[arguments["env_name"]],
            "action": POSE_ACTION,
            "frame": BASE_FRAME,
            "controller": options.get("controller_configs"),
            "control_hz": options.get("control_freq"),
            "versions": {"robosuite": arguments.get("env_version")},
            "image_mode": {"renderer": "robosuite"},
            "image_size": int(first_image.shape[1]) if first_image is not None and first_image.ndim == 4 else None,
            "cameras": [key.removesuffix("_image") for key in images],
            "robomimic": {
                "robots": [robots] if isinstance(robots := options.get("robots"), str) else robots,
                "others": {
                    key: value
                    for key, value in options.items()
                    if key not in COMPARED | HARMLESS and value not in (None, "default")
                },
                "model": self._model(first),
            },
        }

    def _model(self, episode: Any) -> dict[str, dict[str, str]] | None:
        """Facts of the model that an episode was recorded with; None if it has none."""
        xml = getattr(episode, "attrs", {}).get("model_file")
        if not isinstance(xml, (str, bytes)):
            return None
        try:
            return model_facts(xml)
        except ValueError as error:
            raise self._fail(f"model_file of its first episode is {error}") from None

    def _check_absolute(self, data: Any) -> None:
        """Refuse relative actions. robomimic's files do not say whether actions are relative. Absolute rotations are
        about half a turn, because the gripper points down; relative ones are at most 1 in each direction.
        """
        if self.action_size != 7:
            raise self._fail(f"has actions of {self.action_size} numbers, not position 3, axis angle 3, gripper 1")
        turns = np.linalg.norm(data[self.episodes[0]][ACTIONS][:, 3:6], axis=1)
        if np.median(turns) < 2:
            raise self._fail("has relative actions; convert them to absolute ones first, as Diffusion Policy does")

    def _verify_episode(self, name: str, group: Any) -> None:
        h5py = import_package("h5py")
        if not isinstance(group, h5py.Group) or not isinstance(group.get("obs"), h5py.Group):
            raise self._fail(f"data/{name} has no obs")
        wanted = [ACTIONS, *(f"obs/{key}" for key in (self.shapes or group["obs"]))]
        if missing := [key for key in wanted if not isinstance(group.get(key), h5py.Dataset)]:
            raise self._fail(f"data/{name} has no {missing[0]}")
        actions = group[ACTIONS]
        size = self.action_size or (actions.shape[1] if actions.ndim == 2 else 0)
        length = int(group.attrs.get("num_samples", len(actions) if actions.ndim else 0))
        if not length or not size or actions.shape != (length, size):
            raise self._fail(f"data/{name}/{ACTIONS} has shape {actions.shape}, not {(length or 'T', size or 'A')}")
        if actions.dtype.kind not in NUMBERS:
            raise self._fail(f"data/{name}/{ACTIONS} is {actions.dtype}, not numbers")
        self._check_finite(f"data/{name}/{ACTIONS}", actions[:])
        shapes = {
            key: tuple(values.shape[1:])
            for key, values in group["obs"].items()
            if key in self.shapes or not self.shapes
        }
        for key, shape in shapes.items():
            values = group["obs"][key]
            image = key in _image_keys(self.settings)
            side = self.settings.get("image_size")
            wanted_shape = (side, side, 3) if image else self.shapes.get(key, shape)
            if values.dtype.kind not in NUMBERS:
                raise self._fail(f"data/{name}/obs/{key} is {values.dtype}, not numbers")
            whole = values.shape == (length, *wanted_shape)
            if not whole or (image and values.dtype != np.uint8):
                raise self._fail(
                    f"data/{name}/obs/{key} is {values.dtype} {values.shape}, not {'uint8 ' if image else ''}"
                    f"{(length, *wanted_shape)}"
                )
        if missing_images := set(_image_keys(self.settings)) - set(shapes):
            raise self._fail(f"data/{name}/obs has no {min(missing_images)}, which its settings promise")
        seed = group.attrs.get("seed")
        self.lengths[name], self.seeds[name] = length, None if seed is None else int(seed)
        self.shapes, self.action_size = shapes, size

    def _mask(self, file: Any, name: str) -> tuple[str, ...]:
        h5py = import_package("h5py")
        mask = file.get(f"mask/{name}")
        if not isinstance(mask, h5py.Dataset):
            raise self._fail(f"has no mask/{name}")
        if mask.ndim != 1:
            raise self._fail(f"mask/{name} has shape {mask.shape}, it is no list of names")
        return tuple(episode.decode() if isinstance(episode, bytes) else str(episode) for episode in mask[:])

    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray:
        values = file["data"][episode][key if key in (ACTIONS, EXECUTED) else f"obs/{key}"][start:stop]
        if key != ACTIONS or not self._published:
            return values
        position = values[:, :3] - np.array(BASE_POSITIONS[self.settings["environment"]])
        return np.concatenate([position, matrix_to_6d(matrix_from_axis_angle(values[:, 3:6])), values[:, 6:]], axis=1)

    def _has_executed(self, file: Any, episode: str) -> bool:
        return EXECUTED in file["data"][episode]

    def _recorded(self, file: Any, episode: str) -> dict[str, np.ndarray]:
        group = file["data"][episode]
        return {key: group[key][:] for key in ("states", "rewards", "dones") if key in group}


def write_hdf5(
    path: Path, episodes: Sequence[Path], settings: dict[str, Any], held: Sequence[bool] | None = None
) -> None:
    """`write_demonstrations` for arms."""
    h5py = import_package("h5py")
    arguments = {
        "env_name": settings["environment"],
        "env_version": settings.get("versions", {}).get("robosuite"),
        "type": ROBOSUITE_TYPE,
        "env_kwargs": {"controller_configs": settings["controller"], "control_freq": settings["control_hz"]},
        "settings": settings,
    }
    # Each chunk has a checksum: a damaged one is refused, not read. Each image is a chunk, because images are read in
    # any order.
    with whole_file(path) as scratch, h5py.File(scratch, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(arguments)
        data.attrs["total"] = 0
        for index, source in enumerate(episodes):
            episode = Episode.load(source)
            group = data.create_group(f"demo_{index}")
            group.attrs["num_samples"] = len(episode.actions)
            if episode.seed is not None:
                group.attrs["seed"] = episode.seed
            arrays = {
                ACTIONS: episode.actions.astype(np.float32),
                EXECUTED: episode.executed,
                "states": episode.states,
                "rewards": episode.rewards,
                "dones": episode.dones.astype(np.int64),
                **{f"obs/{key}": values for key, values in episode.observations.items()},
            }
            for key, values in arrays.items():
                image = values.ndim == 4
                options = (
                    {"chunks": (1, *values.shape[1:]), "compression": "gzip", "compression_opts": 1} if image else {}
                )
                group.create_dataset(key, data=values, fletcher32=True, **options)
            data.attrs["total"] += len(episode.actions)
        valid = validation_episodes(len(episodes)) if held is None else held
        for split, name in SPLITS.items():
            names = [f"demo_{index}" for index, out in enumerate(valid) if out == (split == "validation")]
            file.create_dataset(f"mask/{name}", data=np.array(names, dtype="S"))


def _image_keys(settings: dict[str, Any]) -> list[str]:
    return [f"{camera}_image" if camera != "image" else camera for camera in settings["cameras"]]


def _episode_number(name: str) -> tuple[int, str]:
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1, name
