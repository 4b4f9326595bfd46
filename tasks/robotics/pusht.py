"""PushT of Diffusion Policy, in gym-pusht's copy: a round pusher moves a T-shaped block over a target."""

from __future__ import annotations

import math
import os
import sys
import warnings
from importlib.metadata import version
from typing import Any

import cv2
import numpy as np

from tasks.robotics.environment import Environment, Observation, bounds
from tasks.robotics.registration import HORIZONS

# pygame draws where there is no screen, too, and prints no greeting.
if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely

CAMERAS = {"image": "image"}
TABLE = 512  # side of the table, in the units of positions and actions
IMAGE_MODE = {"renderer": "pygame at 512, cv2.resize"}
SMALLEST_PICTURE = 96  # pixels; the lines of the cross would have no width below
# The table has walls, which give way a little when the block is pushed against them.
PLACE = (-TABLE, 2 * TABLE)


class PushT(Environment):
    """PushT.

    Observations: agent_pos (2), position of the pusher; state (5), position of pusher and block and the block's angle
    in [0, 2 pi); keypoints (16), x and y of the block's eight corners; image from above. The reward is the covered
    part of the target divided by 0.95, at most 1. The task is solved when it is 1.

    Args:
        cameras: ("image",) or none.
        image_size: height and width of the image, pixels.

    Raises:
        ValueError: for another camera.
    """

    name = "pusht"
    action_size = 2
    horizon = HORIZONS["pusht"]
    fps = 10
    action_bounds = bounds((0, TABLE, 2))
    state_bounds = {
        "agent_pos": bounds((*PLACE, 2)),
        "state": bounds((*PLACE, 4), (0, 2 * math.pi, 1)),
        "keypoints": bounds((*PLACE, 16)),
    }

    def __init__(self, cameras: tuple[str, ...], image_size: int) -> None:
        if unknown := [camera for camera in cameras if camera not in CAMERAS]:
            raise ValueError(f"camera {unknown[0]!r} of pusht must be one of {', '.join(CAMERAS)}")
        self.cameras = {camera: CAMERAS[camera] for camera in cameras}
        self.image_size = image_size
        self._env = PushTEnv(obs_type="state", observation_width=image_size, observation_height=image_size)
        self._env._get_coverage = self._covered
        self._coverage = 0.0
        self.settings = {
            "environment": self.name,
            "action": "target position of the pusher",
            "frame": f"table, {TABLE} units a side, origin top left",
            "controller": {"k_p": self._env.k_p, "k_v": self._env.k_v},
            "control_hz": self.fps,
            "versions": {package: version(package) for package in ("gym-pusht", "pymunk")},
            "image_mode": IMAGE_MODE,
            "image_size": image_size,
            "cameras": list(cameras),
        }

    def reset(self, seed: int) -> Observation:
        """Place pusher and block as this seed says."""
        self._env.reset(seed=seed)
        self._env._last_action = None  # pictures would show it
        self._coverage = self._env._get_coverage()
        return self._observe()

    def restore(self, state: np.ndarray) -> None:
        """Place pusher and block, both at rest, in an episode that has begun: state (5,) as in the observations."""
        agent, block = self._env.agent, self._env.block
        agent.position, agent.velocity = tuple(map(float, state[:2])), (0.0, 0.0)
        block.angle = float(state[4])
        block.position = tuple(map(float, state[2:4]))
        block.velocity, block.angular_velocity = (0.0, 0.0), 0.0
        self._env.space.reindex_shapes_for_body(agent)
        self._env.space.reindex_shapes_for_body(block)

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Pull the pusher towards a position for 1 / fps seconds."""
        action = np.clip(self.checked_action(action), 0, TABLE)
        _, reward, success, _, info = self._env.step(action)
        self._coverage = float(info["coverage"])
        info = {"success": bool(success), "coverage": self._coverage, "contacts": info["n_contacts"]}
        return self._observe(), float(reward), bool(success), info

    def pull(self, action: np.ndarray) -> None:
        """What `step` does with the bodies, bit for bit, without measuring and observing anything: for imagined steps.

        gym-pusht's own loop computes with arrays.
        """
        env = self._env
        target, agent = np.clip(action, 0, TABLE).tolist(), env.agent
        for _ in range(int(1 / (env.dt * env.control_hz))):
            (x, y), (speed_x, speed_y) = agent.position, agent.velocity
            agent.velocity = (
                speed_x + (env.k_p * (target[0] - x) + env.k_v * (0 - speed_x)) * env.dt,
                speed_y + (env.k_p * (target[1] - y) + env.k_v * (0 - speed_y)) * env.dt,
            )
            env.space.step(env.dt)

    def ignore_contacts(self) -> None:
        """Count no contacts in the episode that has begun. It takes time, and changes nothing of what happens."""
        self._env.collision_handeler.post_solve = lambda arbiter, space, data: None

    def success(self) -> bool:
        """Whether more than 95 % of the target is covered."""
        return self._coverage > self._env.success_threshold

    def render(self, size: int) -> np.ndarray:
        """The table from above, with a red cross at the target of the last action."""
        drawn = max(size, SMALLEST_PICTURE)
        self._env.visualization_width = self._env.visualization_height = drawn
        picture = self._env.render()
        return picture if drawn == size else cv2.resize(picture, (size, size), interpolation=cv2.INTER_AREA)

    def close(self) -> None:
        """Nothing is held."""
        self._env.close()

    def state(self) -> np.ndarray:
        """float64 (5,), as in the observations."""
        return self._env.get_obs()

    def keypoints(self) -> np.ndarray:
        """Corners of the block, float64 (8, 2)."""
        return self._env.get_keypoints(self._env._block_shapes)

    def _covered(self) -> float:
        """Share of the target that the block covers, as gym-pusht computes it, but its two shapes in order.

        pymunk gives them as a set, whose order differs from process to process, and with it the sum of their areas.
        """
        shapes = self._env._block_shapes
        goal = pymunk_to_shapely(self._env.get_goal_pose_body(self._env.goal_pose), shapes)
        return goal.intersection(pymunk_to_shapely(self._env.block, shapes)).area / goal.area

    def _observe(self) -> Observation:
        state = self.state()
        values = {"agent_pos": state[:2], "state": state, "keypoints": self.keypoints().reshape(-1)}
        images = {key: self._env._render() for key in self.cameras.values()}
        return {**{key: value.astype(np.float32) for key, value in values.items()}, **images}
