"""Demonstration files: robomimic's HDF5 layout and Diffusion Policy's zarr layout, behind one reader.

    demonstrations = open_demonstrations("lift.hdf5")
    demonstrations.read("demo_0", "agentview_image", 0, 2)  # uint8 (2, 84, 84, 3)
    environment = make_environment(**demonstrations.environment)
    check_environment(demonstrations, environment)

HDF5 (robomimic): data/demo_i/{actions, states, rewards, dones, obs/<key>}, attribute num_samples; data.attrs env_args,
JSON; mask/train and mask/valid, names of episodes. zarr, version 2 (Diffusion Policy): data/{img, state, action,
keypoint, n_contacts}, all episodes one after the other, and meta/episode_ends. Observation t is what action t was
chosen from. Beyond both layouts: executed_actions, which were the actions with noise, and each episode's seed, so that
an episode can be replayed exactly; and the environment's settings, without which actions mean nothing.

Published files have no such settings. Diffusion Policy's PushT is read as it is. robomimic's Lift and Can with absolute
actions (its image_abs.hdf5, made by Diffusion Policy) are converted when they are read: from positions in the world and
axis angles to ours. They were recorded by older robosuite versions in another image mode: `check_environment` says so.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.files import check_new, file_sha256, whole_file, whole_folder
from tasks.robotics.actions import POSE_ACTION_SIZE, matrix_from_axis_angle, matrix_to_6d
from tasks.robotics.environments import BASE_FRAME, POSE_ACTION, Environment

SPLITS = ("train", "valid")
VALID_EVERY = 10  # every tenth episode is for validation
ACTIONS, EXECUTED = "actions", "executed_actions"
# What has to be the same for recorded actions to mean the same; for images besides: mode and size.
ACTION_SETTINGS = ("environment", "action", "frame", "controller", "control_hz", "versions")
IMAGE_SETTINGS = ("image_mode", "image_size")
# robomimic: class of environments by number; environments by name; where the robot's base stands, metres.
ROBOSUITE_TYPE = 1
ROBOMIMIC_NAMES = {"Lift": "lift", "PickPlaceCan": "can"}
BASE_POSITIONS = {"lift": (-0.56, 0.0, 0.912), "can": (-0.5, -0.1, 0.912)}
# Of the zarr layout. keypoints and agent_pos are views of what it holds.
ZARR_IMAGE_CHUNK = 16
NUMBERS = "biuf"  # numpy's kinds of them
# Published PushT files carry no settings: these are theirs.
PUSHT_SETTINGS = {
    "environment": "pusht",
    "action": "target position of the pusher",
    "frame": "table, 512 units a side, origin top left",
    "controller": {"k_p": 100, "k_v": 20},
    "control_hz": 10,
    "image_mode": {"renderer": "pygame at 512, cv2.resize"},
}


class BrokenDemonstrations(ValueError):
    """A file of demonstrations is damaged or no such file; the text begins with its path."""


@dataclass(frozen=True)
class Episode:
    """One demonstration of T steps.

    Attributes:
        seed: with which the environment was reset.
        actions: float64 (T, A), what was to be done.
        executed: float64 (T, A), what was done: the same with noise.
        states: float64 (T, S), the simulator's own state before each action.
        rewards: float64 (T,), for each action.
        dones: bool (T,), whether the task was solved after it.
        observations: by key, before each action: (T, ...).
    """

    seed: int
    actions: np.ndarray
    executed: np.ndarray
    states: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    observations: dict[str, np.ndarray]

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        scratch = path.with_name(f"{path.name}.partial")
        with scratch.open("wb") as file:
            np.savez(
                file,
                seed=self.seed,
                actions=self.actions,
                executed=self.executed,
                states=self.states,
                rewards=self.rewards,
                dones=self.dones,
                **{f"obs/{key}": values for key, values in self.observations.items()},
            )
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> Episode:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        seed = int(arrays.pop("seed"))
        observations = {name.removeprefix("obs/"): arrays.pop(name) for name in list(arrays) if name.startswith("obs/")}
        return cls(seed=seed, observations=observations, **arrays)


# ---- reading --------------------------------------------------------------------------------------------------------


class Demonstrations(ABC):
    """A file of demonstrations, verified when it is opened, read when asked.

    It may be handed to other processes: each opens the file for itself.

    Attributes:
        path: of the file, or of the zarr folder.
        episodes: their names.
        lengths: steps of each episode, by name.
        seeds: with which the environment was reset for each episode, by name; None where the file does not say.
        shapes: shape of one step by observation key; images (H, W, 3), everything else (size,).
        action_size: numbers in an action.
        environment: keyword arguments of `make_environment` for the environment of the demonstrations.
        settings: that environment's `settings`.
    """

    episodes: tuple[str, ...]
    lengths: dict[str, int]
    seeds: dict[str, int | None]
    shapes: dict[str, tuple[int, ...]]
    action_size: int
    settings: dict[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._splits: dict[str, tuple[str, ...]] = {}
        self._handle: tuple[int, Any] | None = None
        try:
            self._verify(self._file())
        except (BrokenDemonstrations, ImportError):
            raise
        except Exception as error:  # what else a foreign or damaged file meets on the way
            raise self._fail(f"is damaged ({_first_line(error)})") from error

    @property
    def environment(self) -> dict[str, Any]:
        """Keyword arguments of `make_environment`."""
        settings = self.settings
        arguments = {"name": settings["environment"], "cameras": tuple(settings["cameras"])}
        return arguments | ({"image_size": settings["image_size"]} if settings["cameras"] else {})

    def split(self, name: str) -> tuple[str, ...]:
        """Episodes of "train" or "valid".

        Raises:
            ValueError: for another name.
        """
        if name not in SPLITS:
            raise ValueError(f"split {name!r} must be one of {', '.join(SPLITS)}")
        return self._splits[name]

    def read(self, episode: str, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Steps start to stop of one episode.

        Args:
            episode: its name.
            key: "actions", "executed_actions" or an observation key.
            start: first step.
            stop: the step after the last; None: the end of the episode.

        Returns:
            Images uint8 (steps, H, W, 3); executed_actions float64 (steps, A), which replay exactly; everything else
            float32 (steps, size).

        Raises:
            ValueError: for another episode or key, steps outside the episode, or a file that is damaged here or holds
                numbers that are not finite.
        """
        if episode not in self.lengths:
            raise ValueError(f"{self.path}: no episode {episode!r} among {len(self.episodes)}")
        if key not in self.shapes and key not in (ACTIONS, EXECUTED):
            raise ValueError(f"{self.path}: no key {key!r}; it has {', '.join((ACTIONS, *self.shapes))}")
        length = self.lengths[episode]
        stop = length if stop is None else stop
        if not 0 <= start < stop <= length:
            raise ValueError(f"{self.path}: steps {start} to {stop} of {episode} must lie within its {length}")
        try:
            values = self._read(self._file(), episode, key, start, stop)
            image = len(self.shapes.get(key, ())) == 3
            values = np.asarray(values, dtype=values.dtype if image else np.float64 if key == EXECUTED else np.float32)
        except Exception as error:  # what a damaged chunk raises depends on its codec
            raise self._fail(f"{episode}/{key} cannot be read ({_first_line(error)})") from error
        self._check_finite(f"{episode}/{key}", values)
        return values.astype(np.uint8, copy=False) if image else values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def _file(self) -> Any:
        """The open file of this process: handles of HDF5 must not be shared with forked workers."""
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = os.getpid(), self._open()
        return self._handle[1]

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _verify(self, file: Any) -> None: ...

    @abstractmethod
    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray: ...

    def _fail(self, what: str) -> BrokenDemonstrations:
        return BrokenDemonstrations(f"{self.path}: {what}")

    def _check_settings(self, settings: Any) -> dict[str, Any]:
        """The settings, if they are ones; cameras and image size at least."""
        if not isinstance(settings, dict) or not all(
            isinstance(settings.get(key), kind)
            for key, kind in (("environment", str), ("cameras", list), ("controller", dict))
        ):
            raise self._fail(
                "does not say its settings (environment, controller, frame, image mode); its actions cannot be trusted"
            )
        if settings["cameras"] and not isinstance(settings.get("image_size"), int):
            raise self._fail(f"image_size={settings.get('image_size')!r} in its settings must be an integer")
        return settings

    def _check_finite(self, name: str, values: np.ndarray) -> None:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise self._fail(f"{name} has numbers that are not finite")

    def _check_splits(self) -> None:
        train, valid = (self._splits[name] for name in SPLITS)
        if unknown := [name for name in (*train, *valid) if name not in self.lengths]:
            raise self._fail(f"its masks name {unknown[0]!r}, which is not there")
        for split, names in self._splits.items():
            if twice := [name for name in names if names.count(name) > 1]:
                raise self._fail(f"mask {split} names {twice[0]} twice")
        if shared := set(train) & set(valid):
            raise self._fail(f"{min(shared)} is in mask train and in mask valid")
        if not train:
            raise self._fail("mask train is empty")


class HDF5Demonstrations(Demonstrations):
    """robomimic's layout."""

    def _open(self) -> Any:
        h5py = _import("h5py")
        try:
            return h5py.File(self.path, "r")
        except OSError as error:
            raise self._fail(f"is no whole HDF5 file ({_first_line(error)})") from error

    def _verify(self, file: Any) -> None:
        h5py = _import("h5py")
        data = file.get("data")
        if not isinstance(data, h5py.Group) or not len(data):
            raise self._fail("has no group data with episodes")
        try:
            arguments = json.loads(data.attrs["env_args"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(f"has no env_args in JSON ({_first_line(error)})") from error
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
            except Exception as error:  # attributes and data of foreign types
                raise self._fail(f"data/{name} cannot be read ({_first_line(error)})") from error
        if self._published:
            self._check_absolute(data)
            self.action_size = POSE_ACTION_SIZE
        if self._published and "mask" not in file:
            held = _valid(len(self.episodes))
            self._splits = {
                split: tuple(np.array(self.episodes)[held == (split == "valid")].tolist()) for split in SPLITS
            }
        else:
            self._splits = {split: self._mask(file, split) for split in SPLITS}
        self._check_splits()

    def _published_settings(self, arguments: dict[str, Any], data: Any) -> dict[str, Any]:
        """What robomimic's env_args and the first episode say."""
        h5py = _import("h5py")
        first = data[self.episodes[0]]
        seen = first.get("obs") if isinstance(first, h5py.Group) else None
        images = [key for key in seen or () if key.endswith("_image")]
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
            "image_size": int(seen[images[0]].shape[1]) if images and seen[images[0]].ndim == 4 else None,
            "cameras": [key.removesuffix("_image") for key in images],
        }

    def _check_absolute(self, data: Any) -> None:
        """robomimic's files do not say whether actions are relative. Absolute rotations are about half a turn, as the
        gripper points down; relative ones are at most 1 in each direction."""
        if self.action_size != 7:
            raise self._fail(f"has actions of {self.action_size} numbers, not position 3, axis angle 3, gripper 1")
        turns = np.linalg.norm(data[self.episodes[0]][ACTIONS][:, 3:6], axis=1)
        if np.median(turns) < 2:
            raise self._fail("has relative actions; convert them to absolute ones first, as Diffusion Policy does")

    def _verify_episode(self, name: str, group: Any) -> None:
        h5py = _import("h5py")
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

    def _mask(self, file: Any, split: str) -> tuple[str, ...]:
        h5py = _import("h5py")
        mask = file.get(f"mask/{split}")
        if not isinstance(mask, h5py.Dataset):
            raise self._fail(f"has no mask/{split}")
        if mask.ndim != 1:
            raise self._fail(f"mask/{split} has shape {mask.shape}, it is no list of names")
        return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in mask[:])

    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray:
        values = file["data"][episode][key if key in (ACTIONS, EXECUTED) else f"obs/{key}"][start:stop]
        if key != ACTIONS or not self._published:
            return values
        position = values[:, :3] - np.array(BASE_POSITIONS[self.settings["environment"]])
        return np.concatenate([position, matrix_to_6d(matrix_from_axis_angle(values[:, 3:6])), values[:, 6:]], axis=1)


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
        zarr = _import("zarr")
        try:
            return zarr.open_group(str(self.path), mode="r", zarr_format=2)
        except Exception as error:  # zarr's errors differ between its stores
            raise self._fail(f"is no zarr group of version 2 ({_first_line(error)})") from error

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
        valid = self._array(file, "meta/valid")[:] if "meta/valid" in file else _valid(len(ends))
        if len(valid) != len(ends):
            raise self._fail(f"meta/valid has {len(valid)} episodes, not {len(ends)}")
        self._splits = {
            split: tuple(
                name for name, held in zip(self.episodes, valid, strict=True) if bool(held) == (split == "valid")
            )
            for split in SPLITS
        }
        self._check_splits()

    def _array(self, file: Any, name: str) -> Any:
        """An array whose every chunk is there: zarr reads a missing one as zeros."""
        zarr = _import("zarr")
        try:
            array = file[name]
        except Exception as error:  # zarr's errors differ between its stores
            raise self._fail(f"has no {name}") from error
        if not isinstance(array, zarr.Array):
            raise self._fail(f"{name} is no array")
        if array.nchunks_initialized != array.nchunks:
            raise self._fail(f"{name} has {array.nchunks_initialized} of its {array.nchunks} chunks")
        # Blosc, in published files, decompresses what is cut off without a word, from memory behind its end.
        if any(codec.codec_id == "blosc" for codec in array.compressors):
            for chunk in (self.path / name).iterdir():
                if not chunk.name.startswith(".") and _blosc_bytes(chunk) != chunk.stat().st_size:
                    raise self._fail(f"{name}/{chunk.name} is cut off")
        return array

    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray:
        name, view = self._KEYS[key]
        first = self._starts[episode]
        return view(file[f"data/{name}"][first + start : first + stop])


def open_demonstrations(path: str | Path) -> Demonstrations:
    """Open a file (HDF5) or a folder (zarr) of demonstrations.

    Raises:
        OSError: if there is none.
        ValueError: naming the file and what is broken or missing in it.
        ImportError: if the package that reads it is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no demonstrations at {path}: python -m tasks.robotics.demonstrate makes some")
    return ZarrDemonstrations(path) if path.is_dir() else HDF5Demonstrations(path)


def demonstrations_sha256(path: Path) -> str:
    """SHA-256 of a file; of a zarr folder's files with their names, in order."""
    if path.is_file():
        return file_sha256(path)
    digest = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def check_environment(demonstrations: Demonstrations, environment: Environment) -> None:
    """Refuse an environment in which the demonstrations' actions or images mean something else.

    Published PushT files do not say their versions; those are not compared then.

    Raises:
        ValueError: naming the first setting (controller, frame, image mode, versions, ...) that differs.
    """
    there, here = demonstrations.settings, environment.settings
    compared = ACTION_SETTINGS + (IMAGE_SETTINGS if here["cameras"] else ())
    for key in compared:
        if (key in there and there[key] != here[key]) or (key not in there and key != "versions"):
            was, now = _difference(there.get(key), here[key])
            raise ValueError(
                f"{demonstrations.path} was made with {key} {was}, this environment has {now}; "
                "make the demonstrations again or use the environment they were made in"
            )
    if missing := [camera for camera in here["cameras"] if camera not in there["cameras"]]:
        raise ValueError(f"{demonstrations.path} has no images of camera {missing[0]!r}")


# ---- writing --------------------------------------------------------------------------------------------------------


def write_demonstrations(path: Path, episodes: Sequence[Path], settings: dict[str, Any]) -> None:
    """Write a file of episodes, whole or not at all, in the layout of the task: HDF5 for arms, zarr for PushT.

    Args:
        path: of the new file.
        episodes: files of `Episode.save`, in order; one is in memory at a time.
        settings: of the environment.

    Raises:
        OSError: if the path exists.
    """
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    (_write_zarr if settings["environment"] == "pusht" else _write_hdf5)(path, episodes, settings)


def _write_hdf5(path: Path, episodes: Sequence[Path], settings: dict[str, Any]) -> None:
    h5py = _import("h5py")
    arguments = {
        "env_name": settings["environment"],
        "env_version": settings["versions"].get("robosuite"),
        "type": ROBOSUITE_TYPE,
        "env_kwargs": {"controller_configs": settings["controller"], "control_freq": settings["control_hz"]},
        "settings": settings,
    }
    # Each chunk has a checksum: a damaged one is refused, not read. Images a chunk each, as they are read in any order.
    with whole_file(path) as scratch, h5py.File(scratch, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(arguments)
        data.attrs["total"] = 0
        for index, source in enumerate(episodes):
            episode = Episode.load(source)
            group = data.create_group(f"demo_{index}")
            group.attrs["num_samples"] = len(episode.actions)
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
        valid = _valid(len(episodes))
        for split in SPLITS:
            names = [f"demo_{index}" for index, held in enumerate(valid) if held == (split == "valid")]
            file.create_dataset(f"mask/{split}", data=np.array(names, dtype="S"))


def _write_zarr(path: Path, episodes: Sequence[Path], settings: dict[str, Any]) -> None:
    zarr = _import("zarr")
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
                "keypoint": seen["keypoints"].reshape(-1, 8, 2),
                "reward": episode.rewards.astype(np.float32),
                **({"img": seen["image"]} if "image" in seen else {}),
            }
            for name, part in values.items():
                if index == 0:
                    arrays[name] = root.create_array(
                        f"data/{name}",
                        shape=(int(ends[-1]), *part.shape[1:]),
                        dtype=part.dtype,
                        chunks=(ZARR_IMAGE_CHUNK if name == "img" else int(ends[-1]), *part.shape[1:]),
                        compressors=GZip(level=1),  # with a checksum
                        config={"write_empty_chunks": True},
                    )
                arrays[name][ends[index] - len(part) : ends[index]] = part
        meta = {
            "episode_ends": ends.astype(np.int64),
            "seed": np.array([Episode.load(source).seed for source in episodes], dtype=np.int64),
            "valid": _valid(len(episodes)),
        }
        for name, numbers in meta.items():
            array = root.create_array(
                f"meta/{name}",
                shape=numbers.shape,
                dtype=numbers.dtype,
                chunks=numbers.shape,
                config={"write_empty_chunks": True},
            )
            array[:] = numbers


# ---- helpers --------------------------------------------------------------------------------------------------------


def _valid(count: int) -> np.ndarray:
    """bool (count,): every tenth episode, and the last of fewer, is for validation; the only one is for training."""
    held = np.arange(count) % VALID_EVERY == VALID_EVERY - 1
    if count > 1 and not held.any():
        held[-1] = True
    return held


def _blosc_bytes(path: Path) -> int:
    """Size of a compressed chunk according to its header, whose fourth number (uint32) it is; 0 without one."""
    with path.open("rb") as file:
        header = file.read(16)
    return int.from_bytes(header[12:], "little") if len(header) == 16 else 0


def _image_keys(settings: dict[str, Any]) -> list[str]:
    return [f"{camera}_image" if camera != "image" else camera for camera in settings["cameras"]]


def _episode_number(name: str) -> tuple[int, str]:
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1, name


def _difference(there: Any, here: Any) -> tuple[str, str]:
    """Two values that differ, dictionaries by their first key that does."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *there):
            if there.get(key) != here.get(key):
                was, now = _difference(there.get(key), here.get(key))
                return f"{key} {was}", f"{key} {now}"
    return repr(there), repr(here)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"demonstrations need {name}: pip install 'hf_sparseprior[robotics]'") from error
