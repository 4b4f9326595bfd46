"""The environments by name, with one small interface, and what has to be set before a simulator is imported.

    environment = make_environment("lift", cameras=("agentview", "robot0_eye_in_hand"), image_size=84)
    observation = environment.reset(seed=7)
    observation, reward, done, info = environment.step(action)

Images come from MuJoCo's software GL, or from pygame for PushT; neither needs a screen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hf_sparseprior.cli.doctor import gl_library
from tasks.robotics.environment import (
    GL_PACKAGES,
    IMAGE_SIZES,
    MAX_IMAGE_SIZE,
    MIN_IMAGE_SIZE,
    RENDERINGS,
    Environment,
)


def make_environment(
    name: str, cameras: Sequence[str] = (), image_size: int | None = None, rendering: str = "fast"
) -> Environment:
    """An environment by name.

    Args:
        name: "lift" or "can" (robosuite, Panda arm, action (10,): absolute position of the gripper, 6-D rotation,
            gripper from -1, open, to 1, closed) or "pusht" (action (2,): absolute position of the pusher in [0, 512]).
        cameras: what the observations show, "agentview" and "robot0_eye_in_hand" for arms, "image" for PushT. Without
            cameras nothing is rendered and no GL library is needed.
        image_size: height and width of the images; None: as in the published data sets (IMAGE_SIZES).
        rendering: of images of arms; "robosuite": with its multisampling, shadows and reflections, for policies of
            robomimic's published demonstrations.

    Raises:
        ValueError: for another name, camera, size or rendering.
        ImportError: if the simulator is missing; the message has the line that installs it.
        OSError: if images of an arm are wanted and no GL library is found.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment {name!r} must be one of {', '.join(ENVIRONMENTS)}")
    size = IMAGE_SIZES[name] if image_size is None else image_size
    if isinstance(size, bool) or not isinstance(size, int) or not MIN_IMAGE_SIZE <= size <= MAX_IMAGE_SIZE:
        raise ValueError(f"image_size={size!r} must be an integer from {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE}")
    if rendering not in RENDERINGS or (name == "pusht" and rendering != "fast"):
        allowed = "'fast' for pusht" if name == "pusht" else f"one of {', '.join(RENDERINGS)}"
        raise ValueError(f"rendering={rendering!r} must be {allowed}")
    if rendering == "fast":
        return ENVIRONMENTS[name](name, tuple(cameras), size)
    return _arm(name, tuple(cameras), size, rendering)


def _arm(name: str, cameras: tuple[str, ...], image_size: int, rendering: str = "fast") -> Environment:
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
    return RobosuiteArm(name, cameras, image_size, rendering)


def _pusht(name: str, cameras: tuple[str, ...], image_size: int) -> Environment:
    try:
        from tasks.robotics.pusht import PushT
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs gym-pusht ({error}): make robotics") from error
    return PushT(cameras, image_size)


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
