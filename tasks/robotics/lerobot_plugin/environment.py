"""Our simulators among lerobot's environments: --env.type=sparseprior --env.task=PushT-v0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig

from tasks.robotics.environment import IMAGE_SIZES
from tasks.robotics.observation_groups import ENVIRONMENT, GROUPS, STATE, image_feature
from tasks.robotics.registration import GYMNASIUM_IDS, HORIZONS

ACTION_SIZES = {"lift": 10, "can": 10, "pusht": 2}
RATES = {"lift": 20, "can": 20, "pusht": 10}
CAMERAS = {"lift": ("agentview", "robot0_eye_in_hand"), "can": ("agentview", "robot0_eye_in_hand"), "pusht": ("image",)}


@EnvConfig.register_subclass("sparseprior")
@dataclass
class SparsePriorEnv(EnvConfig):
    """Lift, Can or PushT.

    task: "Lift-v0", "Can-v0" or "PushT-v0".
    cameras: what is seen; [] is nothing, null all that there are.
    image_size: pixels; null: as in the published data sets.
    episode_length: actions; null: as in the published evaluations.
    """

    task: str | None = "PushT-v0"
    cameras: list[str] | None = None
    image_size: int | None = None
    episode_length: int | None = None
    render_size: int = 256
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say what is seen and done."""
        name = self.simulator
        self.fps = RATES[name]
        self.cameras = list(CAMERAS[name]) if self.cameras is None else self.cameras
        size = self.image_size or IMAGE_SIZES[name]
        sizes = {feature: sum(parts.values()) for feature, parts in GROUPS[name].items()}
        self.features = {
            "action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION_SIZES[name],)),
            "agent_pos": PolicyFeature(type=FeatureType.STATE, shape=(sizes[STATE],)),
            "environment_state": PolicyFeature(type=FeatureType.ENV, shape=(sizes[ENVIRONMENT],)),
        }
        self.features_map = {"action": "action", "agent_pos": STATE, "environment_state": ENVIRONMENT}
        for camera in self.cameras:
            key = "pixels" if camera == "image" else f"pixels/{camera}"
            self.features[key] = PolicyFeature(type=FeatureType.VISUAL, shape=(size, size, 3))
            self.features_map[key] = image_feature(camera)

    @property
    def simulator(self) -> str:
        """Its name here.

        Raises:
            ValueError: for another task.
        """
        names = {name.removeprefix("sparseprior/"): task for task, name in GYMNASIUM_IDS.items()}
        if self.task not in names:
            raise ValueError(f"--env.task={self.task} must be one of {', '.join(names)}")
        return names[self.task]

    @property
    def package_name(self) -> str:
        """Whose import registers it."""
        return "tasks.robotics"

    @property
    def gym_id(self) -> str:
        """gymnasium's name."""
        return f"sparseprior/{self.task}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """What gymnasium.make takes."""
        return {
            "obs_type": "lerobot",
            "cameras": self.cameras,
            "image_size": self.image_size,
            "render_mode": "rgb_array",
            "render_size": self.render_size,
            "max_episode_steps": self.episode_length or HORIZONS[self.simulator],
        }
