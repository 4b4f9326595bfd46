"""The environments by name, with one small interface, and what has to be set before a simulator is imported.

    environment = make_environment("lift", cameras=("agentview", "robot0_eye_in_hand"), image_size=84)
    observation = environment.reset(seed=7)
    observation, reward, done, info = environment.step(action)

Images come from MuJoCo's software GL, or from pygame for PushT; neither needs a screen.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_sparseprior.cli.doctor import gl_library

Observation = dict[str, np.ndarray]
Bounds = tuple[np.ndarray, np.ndarray]  # lowest and highest numbers, float32 (size,)

GL_PACKAGES = "apt-get install libosmesa6, or libegl1 libegl-mesa0"
IMAGE_SIZES = {"lift": 84, "can": 84, "pusht": 96}  # pixels of the published data sets
# Actions and frame of the arms, as their settings name them.
POSE_ACTION, BASE_FRAME = "position 3, rotation 6 (rows of the matrix), gripper 1", "robot base"
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


def make_environment(name: str, cameras: Sequence[str] = (), image_size: int | None = None) -> Environment:
    """An environment by name.

    Args:
        name: "lift" or "can" (robosuite, Panda arm, action (10,): absolute position of the gripper, 6-D rotation,
            gripper from -1, open, to 1, closed) or "pusht" (action (2,): absolute position of the pusher in [0, 512]).
        cameras: what the observations show, "agentview" and "robot0_eye_in_hand" for arms, "image" for PushT. Without
            cameras nothing is rendered and no GL library is needed.
        image_size: height and width of the images; None: as in the published data sets (IMAGE_SIZES).

    Raises:
        ValueError: for another name, camera or size.
        ImportError: if the simulator is missing; the message has the line that installs it.
        OSError: if images of an arm are wanted and no GL library is found.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment {name!r} must be one of {', '.join(ENVIRONMENTS)}")
    size = IMAGE_SIZES[name] if image_size is None else image_size
    if isinstance(size, bool) or not isinstance(size, int) or not MIN_IMAGE_SIZE <= size <= MAX_IMAGE_SIZE:
        raise ValueError(f"image_size={size!r} must be an integer from {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE}")
    return ENVIRONMENTS[name](name, tuple(cameras), size)


def _arm(name: str, cameras: tuple[str, ...], image_size: int) -> Environment:
    use_software_gl()
    try:
        from tasks.robotics.robosuite_arm import RobosuiteArm
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs robosuite ({error}): make robotics") from error
    except (
        AttributeError,
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # GL library, which mujoco loads
        raise OSError(
            f"{name} cannot be imported with MUJOCO_GL={os.environ['MUJOCO_GL']} ({error}): {GL_PACKAGES}; "
            "without images MUJOCO_GL=disable does"
        ) from error
    return RobosuiteArm(name, cameras, image_size)


def _pusht(name: str, cameras: tuple[str, ...], image_size: int) -> Environment:
    try:
        from tasks.robotics.pusht import PushT
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs gym-pusht ({error}): make robotics") from error
    return PushT(cameras, image_size)


def bounds(*parts: tuple[float, float, int]) -> Bounds:
    """Bounds of numbers one after the other: (lowest, highest, how many)."""
    low, high, counts = zip(*parts, strict=True)
    return np.repeat(np.asarray(low, np.float32), counts), np.repeat(np.asarray(high, np.float32), counts)


ENVIRONMENTS = {"lift": _arm, "can": _arm, "pusht": _pusht}


def picture_problem(environment: Environment) -> str | None:
    """Why this environment cannot be drawn (arms need GL for that); None if it can."""
    if environment.name == "pusht":
        return None
    if gl_library() is None:
        return f"no GL library: {GL_PACKAGES}"
    try:
        environment.render(MIN_IMAGE_SIZE)
    except OSError as error:
        return str(error)
    return None


def use_software_gl() -> None:
    """Choose MuJoCo's GL before mujoco is imported, because mujoco reads the choice only once.

    If nothing is chosen, robosuite chooses EGL. If a screen's GL was chosen, no rendering works.

    Raises:
        ValueError: if mujoco was imported before, without a choice.
    """
    if os.environ.get("MUJOCO_GL"):
        return
    if "mujoco" in sys.modules:
        raise ValueError("mujoco was imported before MUJOCO_GL was set; set MUJOCO_GL=osmesa in the environment")
    # Without any library, low-dimensional observations still work, but mujoco would load osmesa's on import.
    os.environ["MUJOCO_GL"] = gl_library() or "disable"
