"""Demonstration files: robomimic's HDF5, Diffusion Policy's zarr and lerobot's LeRobotDataset, with one interface.

    demonstrations = open_demonstrations("lift.hdf5")
    demonstrations.read("demo_0", "agentview_image", 0, 2)  # uint8 (2, 84, 84, 3)
    environment = make_environment(**demonstrations.environment)
    check_environment(demonstrations, environment)

HDF5 (robomimic) has data/demo_i/{actions, states, rewards, dones, obs/<key>} with the attribute num_samples; data.attrs
env_args, JSON; mask/train and mask/valid, names of episodes. zarr, version 2 (Diffusion Policy), has data/{img, state,
action, keypoint, n_contacts}, all episodes one after the other, and meta/episode_ends. Action t was chosen from
observation t. All layouts have three additions of ours: executed_actions, which are the actions with noise, and each
episode's seed, so that an episode can be replayed exactly; and the environment's settings, without which actions mean
nothing. LeRobotDataset (version 3: parquet, mp4, JSON) is read by `lerobot_reader` and written by `lerobot_writer`.

Published files have no such settings. Diffusion Policy's PushT is read as it is. robomimic's Lift and Can with absolute
actions (its image_abs.hdf5, made by Diffusion Policy) are converted when they are read: from positions in the world and
axis angles to ours. They were recorded by older robosuite versions in another image mode: `check_environment` compares
their model, controller and cameras with those here (`robomimic_check`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.base.files import check_new, file_sha256
from tasks.robotics.environment import Environment
from tasks.robotics.formats.demonstrations import BrokenDemonstrations, Demonstrations
from tasks.robotics.formats.episode import Episode
from tasks.robotics.formats.hdf5_layout import HDF5Demonstrations, write_hdf5
from tasks.robotics.formats.lerobot_files import INFO
from tasks.robotics.formats.lerobot_reader import LeRobotDemonstrations
from tasks.robotics.formats.lerobot_writer import write_lerobot
from tasks.robotics.formats.robomimic_check import published_differences
from tasks.robotics.formats.zarr_layout import ZarrDemonstrations, write_zarr

__all__ = [
    "BrokenDemonstrations",
    "Demonstrations",
    "Episode",
    "check_environment",
    "check_settings",
    "demonstrations_sha256",
    "open_demonstrations",
    "write_demonstrations",
    "write_lerobot",
]

# What has to be the same for recorded actions to mean the same. Images also need the same mode and size.
ACTION_SETTINGS = ("environment", "action", "frame", "controller", "control_hz", "versions")
IMAGE_SETTINGS = ("image_mode", "image_size")
LEROBOT = ".lerobot"


def open_demonstrations(path: str | Path) -> Demonstrations:
    """Open a file (HDF5) or a folder (zarr, LeRobotDataset) of demonstrations.

    Raises:
        OSError: if there is none.
        ValueError: the message names the file and what is broken or missing in it.
        ImportError: if the package that reads it is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no demonstrations at {path}: python -m tasks.robotics.demonstrate makes some")
    if (path / INFO).exists():
        return LeRobotDemonstrations(path)
    return ZarrDemonstrations(path) if path.is_dir() else HDF5Demonstrations(path)


def demonstrations_sha256(path: Path, dated: bool = False) -> str:
    """SHA-256 of a file, or of all files of a folder with their names, in order.

    The chunks of a zarr folder are compressed by gzip and say when that was done, which is left out: the same
    demonstrations, recorded again, are the same. `dated`: it counts, as it did for the first runs of this repository.
    """
    if path.is_file():
        return file_sha256(path)
    digest = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        content = file.read_bytes() if not dated and _is_gzip(file) else None
        own = file_sha256(file) if content is None else hashlib.sha256(content[:4] + bytes(4) + content[8:]).hexdigest()
        digest.update(f"{file.relative_to(path).as_posix()}\0{own}\n".encode())
    return digest.hexdigest()


def _is_gzip(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(2) == b"\x1f\x8b"


def check_environment(demonstrations: Demonstrations, environment: Environment) -> None:
    """Refuse an environment in which the demonstrations' actions or images mean something else.

    Published PushT files do not say their versions, so these are not compared.

    Raises:
        ValueError: the message names the first setting (controller, frame, image mode, versions, ...) that differs.
    """
    check_settings(demonstrations.settings, demonstrations.path, environment)


def check_settings(settings: Mapping[str, Any], source: str | Path, environment: Environment) -> None:
    """`check_environment` with the settings of an environment that are stored in `source`."""
    here = environment.settings
    if "robomimic" in settings:
        if found := published_differences(settings, environment):
            raise ValueError(f"{source}: robomimic's environment is not made alike here: {'; '.join(found)}")
        return
    compared = ACTION_SETTINGS + (IMAGE_SETTINGS if here["cameras"] else ())
    for key in compared:
        if (key in settings and settings[key] != here[key]) or (key not in settings and key != "versions"):
            was, now = _difference(settings.get(key), here[key])
            raise ValueError(
                f"{source} was made with {key} {was}, this environment has {now}; "
                "make the demonstrations again or use the environment they were made in"
            )
    if missing := [camera for camera in here["cameras"] if camera not in settings["cameras"]]:
        raise ValueError(f"{source} has no images of camera {missing[0]!r}")


def write_demonstrations(
    path: Path,
    episodes: Sequence[Path],
    settings: dict[str, Any],
    held: Sequence[bool] | None = None,
    images: str = "video",
) -> None:
    """Write a file of episodes, whole or not at all, in the layout of the task: HDF5 for arms, zarr for PushT.

    Args:
        path: the new file; a name that ends in .lerobot becomes a LeRobotDataset.
        episodes: files of `Episode.save`, in order; one is in memory at a time.
        settings: the environment's.
        held: which episodes are for validation; None: every tenth.
        images: of a LeRobotDataset, as in `write_lerobot`.

    Raises:
        OSError: if the path exists.
    """
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == LEROBOT:
        write_lerobot(path, (Episode.load(source) for source in episodes), settings, images, held=held)
        return
    (write_zarr if settings["environment"] == "pusht" else write_hdf5)(path, episodes, settings, held)


def _difference(stored: Any, current: Any) -> tuple[str, str]:
    """Two values that differ; of dictionaries, those of the first key that differs."""
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in (*current, *stored):
            if stored.get(key) != current.get(key):
                was, now = _difference(stored.get(key), current.get(key))
                return f"{key} {was}", f"{key} {now}"
    return repr(stored), repr(current)
