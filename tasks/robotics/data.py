"""Windows of demonstrations as Diffusion Policy cuts them (Chi et al. 2023), in memory.

A window is `horizon` steps of one episode. The policy sees its first `observation_steps` observations. It may begin
before the episode and end after it; there the first and the last step are repeated. So the first observation is also
seen alone, and every step of the episode is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.robotics.normalizer import ACTIONS, Normalizer
from tasks.robotics.policy import scaled_images
from tasks.robotics.policy_config import PolicyConfig


def window_starts(length: int, observation_steps: int, horizon: int, action_steps: int) -> range:
    """First steps of the windows of an episode; negative if a window begins before it.

    A window has at most `observation_steps` - 1 repeated steps before the episode and `action_steps` - 1 after it.
    """
    return range(1 - observation_steps, length - horizon + action_steps)


class Windows:
    """All windows of some episodes.

    Args:
        episodes: observations (steps, ...) by key, and "actions" (steps, A), for each episode.
        config: the policy's; it says what it needs.

    Raises:
        ValueError: if there is no window.
    """

    def __init__(self, episodes: Sequence[dict[str, np.ndarray]], config: PolicyConfig) -> None:
        self.config = config
        lengths = [len(episode[ACTIONS]) for episode in episodes]
        self.arrays = {
            key: torch.from_numpy(np.concatenate([episode[key] for episode in episodes]))
            for key in (*config.observations, ACTIONS)
        }
        steps = np.arange(config.horizon)
        rows, first = [np.empty((0, config.horizon), np.int64)], 0
        for length in lengths:
            starts = np.asarray(
                window_starts(length, config.observation_steps, config.horizon, config.action_steps), dtype=np.int64
            )
            rows.append(first + np.clip(starts[:, None] + steps, 0, length - 1))
            first += length
        self.rows = torch.from_numpy(np.concatenate(rows))  # (windows, horizon), indices into `arrays`
        if not len(self.rows):
            raise ValueError(
                f"{len(episodes)} episodes of {lengths[:3]}... steps hold no window of horizon={config.horizon}"
            )

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.rows)

    def batch(self, windows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Observations {key: (B, O, ...)} and actions (B, T, A) of these windows, int64 (B,)."""
        rows = self.rows[windows]
        seen = rows[:, : self.config.observation_steps]
        return {key: self.arrays[key][seen] for key in self.config.observations}, self.arrays[ACTIONS][rows]


def read_episodes(demonstrations: Any, names: Sequence[str], config: PolicyConfig) -> list[dict[str, np.ndarray]]:
    """Whole episodes, images scaled to what the policy sees before it crops.

    Args:
        demonstrations: as `formats.open_demonstrations` gives them.
        names: names of the episodes.
        config: the policy's.
    """
    episodes = []
    for name in names:
        episode = {key: demonstrations.read(name, key) for key in (*config.observations, ACTIONS)}
        for key in config.cameras:
            episode[key] = scaled_images(torch.from_numpy(episode[key]), config.image_shape(key)).numpy()
        episodes.append(episode)
    return episodes


def check_shapes(demonstrations: Any, config: PolicyConfig) -> None:
    """Refuse demonstrations whose observations or actions are not those of the policy.

    Raises:
        ValueError: the message has the file, the key and both shapes.
    """
    for key, shape in config.observations.items():
        if key not in demonstrations.shapes:
            raise ValueError(
                f"{demonstrations.path} has no observation {key!r}; it has {', '.join(sorted(demonstrations.shapes))}"
            )
        if tuple(demonstrations.shapes[key]) != tuple(shape):
            raise ValueError(
                f"{demonstrations.path}: {key} has shape {list(demonstrations.shapes[key])}, "
                f"policy.observations says {list(shape)}"
            )
    if demonstrations.action_size != config.action_size:
        raise ValueError(
            f"{demonstrations.path} has actions of {demonstrations.action_size} numbers, policy.action_size is "
            f"{config.action_size}"
        )


def fit_normalizer(
    episodes: Sequence[dict[str, np.ndarray]], config: PolicyConfig, floor: float, floors: dict[str, Any]
) -> Normalizer:
    """Ranges of the training episodes.

    Args:
        episodes: training episodes alone.
        config: the policy's.
        floor: smallest range of a dimension.
        floors: other floors for some keys, a number or one for each dimension; None for what stays as it is.

    Raises:
        ValueError: for floors of other keys or sizes.
    """
    sizes = {key: config.observations[key][0] for key in config.states} | {ACTIONS: config.action_size}
    if unknown := set(floors) - set(sizes):
        raise ValueError(f"data.floors has {', '.join(sorted(unknown))}; allowed: {', '.join(sizes)}")
    for key, values in floors.items():
        if isinstance(values, Sequence) and len(values) != sizes[key]:
            raise ValueError(f"data.floors: {key}={values} must be one number or {sizes[key]}")
    return Normalizer.fit(
        {key: [episode[key] for episode in episodes] for key in sizes}, {key: floors.get(key, floor) for key in sizes}
    )
