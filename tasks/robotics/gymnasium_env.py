"""The simulators as gymnasium's environments.

    import gymnasium
    import tasks.robotics

    env = gymnasium.make("sparseprior/Lift-v0", cameras=["agentview"], render_mode="rgb_array")
    observation, info = env.reset(seed=7)  # the episode of `make_environment("lift").reset(7)`
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

An episode is terminated when it is solved, and truncated after HORIZONS steps. `RecordVideo` films episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle

from tasks.robotics.environment import Observation
from tasks.robotics.environments import make_environment, picture_problem
from tasks.robotics.observation_groups import ENVIRONMENT, GROUPS, INSTRUCTIONS, STATE, image_feature
from tasks.robotics.video import write_video

LARGEST_SEED = 2**32 - 1  # of PushT's generator
RENDER_SIZE = 256
OBSERVATIONS = ("named", "lerobot")


class SimulatorEnv(gymnasium.Env, EzPickle):
    """A simulator of `make_environment` with gymnasium's interface.

    Observations are its observations, by name: images uint8 (H, W, 3), everything else float32 (size,). Actions are
    float32 (size,). All have the bounds that the simulator states. Of arms, an action whose two rows of a rotation are
    zero or parallel keeps the hand's rotation. `info` has `seed`, from which `reset` makes this episode again, and
    `is_success`; after a step also what else the simulator measures.

    Args:
        task: "lift", "can" or "pusht".
        cameras, image_size: as `make_environment` takes them; without cameras no images are made.
        render_mode: "rgb_array", or None if nothing is to be drawn; gymnasium makes "human" and "rgb_array_list" of it.
        render_size: height and width of what `render` draws, pixels.
        obs_type: "named", or "lerobot" for what its `preprocess_observation` knows: `agent_pos`, `environment_state`
            and `pixels`, images by camera, of PushT the image itself.

    Raises:
        ValueError: for another task, camera, size, mode or type of observations.
        ImportError: if the simulator is missing.
        OSError: if images or pictures of an arm are wanted and no GL library is found.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        task: str,
        cameras: Sequence[str] = (),
        image_size: int | None = None,
        render_mode: str | None = None,
        render_size: int = RENDER_SIZE,
        obs_type: str = "named",
    ) -> None:
        EzPickle.__init__(self, task, cameras, image_size, render_mode, render_size, obs_type)
        if obs_type not in OBSERVATIONS:
            raise ValueError(f"obs_type={obs_type!r} must be one of {', '.join(OBSERVATIONS)}")
        if isinstance(cameras, str):
            raise ValueError(f"cameras={cameras!r} must be a list of names")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode={render_mode!r} must be one of rgb_array, None")
        if isinstance(render_size, bool) or not isinstance(render_size, int) or not 16 <= render_size <= 1024:
            raise ValueError(f"render_size={render_size!r} must be an integer from 16 to 1024")
        self.render_mode, self.render_size = render_mode, render_size
        self.simulator = make_environment(task, cameras, image_size)
        if render_mode is not None and (problem := picture_problem(self.simulator)):
            self.simulator.close()
            raise OSError(f"render_mode={render_mode!r} of {task}: {problem}")
        self.metadata = {**self.metadata, "render_fps": self.simulator.fps}
        self.obs_type, self.task, self.task_description = obs_type, task, INSTRUCTIONS[task]
        size = self.simulator.image_size
        lows, highs = ({key: each[side] for key, each in self.simulator.state_bounds.items()} for side in (0, 1))
        for key in self.simulator.cameras.values():
            lows[key], highs[key] = (np.full((size, size, 3), value, np.uint8) for value in (0, 255))
        self.observation_space = _boxes(self._shown(lows), self._shown(highs))
        low, high = self.simulator.action_bounds
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        self._episode: int | None = None  # its seed

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode: that of a seed, or the next one that the last seed leads to.

        Raises:
            ValueError: for options, of which there are none.
        """
        if options:
            raise ValueError(f"options={options!r}: {self.simulator.name} has none")
        super().reset(seed=seed)
        if seed is None:
            self._episode = int(self.np_random.integers(LARGEST_SEED + 1))
        elif seed <= LARGEST_SEED:
            self._episode = int(seed)
        else:
            self._episode = int(np.random.SeedSequence(seed).generate_state(1)[0])
        observation = self._shown(self.simulator.reset(self._episode))
        return observation, self._info({"success": self.simulator.success()})

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one action (size,).

        Raises:
            ValueError: for another shape or numbers that are not finite.
            gymnasium.error.ResetNeeded: before the first `reset`.
        """
        if self._episode is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        action = self.simulator.playable(self.simulator.checked_action(action))
        observation, reward, solved, info = self.simulator.step(action)
        return self._shown(observation), reward, solved, False, self._info(info)

    def render(self) -> np.ndarray | None:
        """The scene, uint8 (render_size, render_size, 3), if this was made with a render mode."""
        if self.render_mode is None:
            gymnasium.logger.warn('render draws nothing: make the environment with render_mode="rgb_array"')
            return None
        if self._episode is None:
            raise gymnasium.error.ResetNeeded("call reset before render")
        return self.simulator.render(self.render_size)

    def close(self) -> None:
        """Free the simulator; a second call does nothing."""
        self.simulator.close()

    def _shown(self, observation: Observation) -> dict[str, Any]:
        """The observation as `obs_type` wants it."""
        if self.obs_type == "named":
            return observation
        groups = GROUPS[self.task]
        found: dict[str, Any] = {
            name: np.concatenate([observation[key] for key in groups[feature]])
            for name, feature in (("agent_pos", STATE), ("environment_state", ENVIRONMENT))
        }
        images = {image_feature(key): observation[key] for key in self.simulator.cameras.values()}
        if "observation.image" in images:
            found["pixels"] = images["observation.image"]
        elif images:
            found["pixels"] = {name.removeprefix("observation.images."): image for name, image in images.items()}
        return found

    def _info(self, measured: dict[str, Any]) -> dict[str, Any]:
        return {"seed": self._episode, "is_success": measured["success"], **measured}


class RecordVideo(gymnasium.wrappers.RecordVideo):
    """gymnasium's RecordVideo with films by PyAV, which the extra `robotics` brings.

    gymnasium's own needs MoviePy, which does not go with the extra's pillow. Arguments and names of the films are
    gymnasium's, and so are the episodes that are filmed without a trigger: 0, 1, 8, 27, ... and every 1000th.
    """

    recorded_frames: list[Any]
    _video_name: str | None

    def __init__(self, env: gymnasium.Env, video_folder: str, **options: Any) -> None:
        if options.get("episode_trigger") is None and options.get("step_trigger") is None:
            options["episode_trigger"] = _is_cube  # the module of gymnasium's own schedule needs MoviePy, too
        # MoviePy is the last thing that is looked for.
        with suppress(gymnasium.error.DependencyNotInstalled):
            super().__init__(env, video_folder, **options)

    def stop_recording(self) -> None:
        """Write the film, VIDEO_FOLDER/NAME.mp4."""
        frames, self.recorded_frames, self.recording = self.recorded_frames, [], False
        if frames:
            write_video(Path(self.video_folder) / f"{self._video_name}.mp4", frames, self.frames_per_sec)
        else:
            gymnasium.logger.warn("Ignored saving a video as there were zero frames to save.")
        self._video_name = None


def _is_cube(episode: int) -> bool:
    """Whether an episode is one of 0, 1, 8, 27, ..., 729, and from 1000 on every 1000th."""
    return episode % 1000 == 0 if episode >= 1000 else round(episode ** (1 / 3)) ** 3 == episode


def _boxes(low: Any, high: Any) -> spaces.Space:
    """The space between two observations."""
    if isinstance(low, dict):
        return spaces.Dict({key: _boxes(low[key], high[key]) for key in low})
    return spaces.Box(low, high, dtype=low.dtype)
