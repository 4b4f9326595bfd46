"""The configuration under which lerobot knows our policies."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.configs.policies import PreTrainedConfig

TRAIN = "python -m tasks.robotics.train trains these policies, python -m tasks.robotics.lerobot_export hands them over"


@PreTrainedConfig.register_subclass("sparseprior_crossway")
@dataclass
class SparsePriorCrosswayConfig(PreTrainedConfig):
    """A policy that `tasks.robotics.lerobot_export` wrote. What it is made of is in policy.json next to config.json.

    horizon, n_action_steps: as in lerobot's diffusion policy.
    """

    horizon: int = 16
    n_action_steps: int = 8

    @property
    def observation_delta_indices(self) -> list[int]:
        """Steps, relative to now, of the observations that are seen."""
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        """Steps, relative to now, of the actions that are planned."""
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.horizon))

    @property
    def reward_delta_indices(self) -> None:
        """No rewards are seen."""
        return None

    def get_optimizer_preset(self) -> None:
        """lerobot does not train it."""
        raise NotImplementedError(TRAIN)

    def get_scheduler_preset(self) -> None:
        """lerobot does not train it."""
        raise NotImplementedError(TRAIN)

    def validate_features(self) -> None:
        """The policy itself checks what it is shown."""
