"""One small interface for all simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Observation = dict[str, np.ndarray]
Bounds = tuple[np.ndarray, np.ndarray]  # lowest and highest numbers, float32 (size,)

GL_PACKAGES = "apt-get install libosmesa6, or libegl1 libegl-mesa0"
IMAGE_SIZES = {"lift": 84, "can": 84, "pusht": 96}  # pixels of the published data sets
# Actions and frame of the arms, as their settings name them.
POSE_ACTION, BASE_FRAME = "position 3, rotation 6 (rows of the matrix), gripper 1", "robot base"
RENDERINGS = ("fast", "robosuite")  # of images of arms
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 16, 1024


class Environment(ABC):
    """A simulator, which runs one episode at a time. The same seed gives the same episode, whatever ran before.

    Attributes:
        name: as `make_environment` takes it.
        action_size: numbers in an action.
        horizon: steps after which the published evaluations give up.
        fps: actions a second.
        cameras: observation key of each camera's image, by camera.
        image_size: height and width of these images.
        action_bounds: between which actions make sense. Others are taken too, if they are finite.
        state_bounds: between which observations lie that are no images, by key.
        settings: everything that decides whether recorded actions and images mean the same here, as JSON values.
            `formats.check_environment` compares them.
    """

    name: str
    action_size: int
    horizon: int
    fps: int
    cameras: dict[str, str]
    image_size: int
    action_bounds: Bounds
    state_bounds: dict[str, Bounds]
    settings: dict[str, Any]

    @abstractmethod
    def reset(self, seed: int) -> Observation:
        """Start the episode of this seed.

        Returns:
            Observations by name: images uint8 (H, W, 3), upright; everything else float32 (size,).
        """

    @abstractmethod
    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Execute one action (action_size,).

        Returns:
            The next observation, the reward in [0, 1], whether the task is solved, and further measurements.

        Raises:
            ValueError: for another shape or numbers that are not finite.
        """

    def playable(self, action: np.ndarray) -> np.ndarray:
        """The action, within `action_bounds`, or the nearest one that the simulator can execute."""
        return action

    def state(self) -> np.ndarray:
        """The simulator's state, float64 (size,), for recording demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} has no state to record")

    @abstractmethod
    def success(self) -> bool:
        """Whether the task is solved now."""

    @abstractmethod
    def render(self, size: int) -> np.ndarray:
        """A picture to look at, uint8 (size, size, 3), upright; never an observation."""

    @abstractmethod
    def close(self) -> None:
        """Free the simulator; a second call does nothing."""

    def checked_action(self, action: np.ndarray) -> np.ndarray:
        """The action as float64, of the right size and finite."""
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (self.action_size,) or not np.isfinite(action).all():
            raise ValueError(f"action={action} of {self.name} must be {self.action_size} finite numbers")
        return action

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def bounds(*parts: tuple[float, float, int]) -> Bounds:
    """Bounds of numbers one after the other: (lowest, highest, how many)."""
    low, high, counts = zip(*parts, strict=True)
    return np.repeat(np.asarray(low, np.float32), counts), np.repeat(np.asarray(high, np.float32), counts)
