"""Demonstration files: robomimic's HDF5 layout and Diffusion Policy's zarr layout, behind one reader.

    demonstrations = open_demonstrations("lift.hdf5")
    demonstrations.read("demo_0", "agentview_image", 0, 2)  # uint8 (2, 84, 84, 3)
    environment = make_environment(**demonstrations.environment)
    check_environment(demonstrations, environment)

HDF5 (robomimic): data/demo_i/{actions, states, rewards, dones, obs/<key>}, attribute num_samples; data.attrs env_args,
JSON; mask/train and mask/valid, names of episodes. zarr, version 2 (Diffusion Policy): data/{img, state, action,
keypoint, n_contacts}, all episodes one after the other, and meta/episode_ends. Observation t is what action t was
chosen from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Demonstrations:
    """A file of demonstrations, verified when it is opened, read when asked.

    Attributes:
        path: of the file, or of the zarr folder.
        episodes: their names.
        lengths: steps of each episode, by name.
        shapes: shape of one step by observation key; images (H, W, 3), everything else (size,).
        action_size: numbers in an action.
        environment: keyword arguments of `make_environment` for the environment of the demonstrations.
        settings: that environment's `settings`.
    """

    path: Path
    episodes: tuple[str, ...]
    lengths: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    action_size: int
    environment: dict[str, Any]
    settings: dict[str, Any]

    def split(self, name: str) -> tuple[str, ...]:
        """Episodes of "train" or "valid"."""
        raise NotImplementedError

    def read(self, episode: str, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Steps start to stop of one episode: "actions", float32 (steps, action_size), or an observation key, images
        uint8 (steps, H, W, 3), else float32 (steps, size).

        Raises:
            ValueError: for another episode or key, steps outside the episode, or a file that is damaged here.
        """
        raise NotImplementedError


def open_demonstrations(path: str | Path) -> Demonstrations:
    """Open a file (HDF5) or a folder (zarr) of demonstrations.

    Raises:
        OSError: if there is none.
        ValueError: naming the file and what is broken or missing in it.
    """
    raise NotImplementedError


def check_environment(demonstrations: Demonstrations, environment: Any) -> None:
    """Refuse an environment in which the demonstrations' actions or images mean something else.

    Raises:
        ValueError: naming the first setting (controller, frame, image mode, versions, ...) that differs.
    """
    raise NotImplementedError
