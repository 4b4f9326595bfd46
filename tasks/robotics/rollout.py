"""A policy in its simulator: episodes with held-out seeds, and their summary."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_sparseprior.runs.tables import wilson_interval
from tasks.robotics.environment import Environment
from tasks.robotics.environments import make_environment
from tasks.robotics.formats import check_settings
from tasks.robotics.policy import CrosswayPolicy

ENVIRONMENT_KEYS = {"name", "cameras", "image_size", "rendering"}  # of `make_environment`


@dataclass
class Episode:
    """The outcome of one episode.

    seed: seed of environment and policy. success: solved within `steps` actions. max_reward: in [0, 1]. coverage: share
    of PushT's target that is covered at the end; None elsewhere. frames: uint8 (size, size, 3), if pictures were
    wanted.
    """

    seed: int
    success: bool
    max_reward: float
    steps: int
    coverage: float | None = None
    frames: list[np.ndarray] = field(default_factory=list, repr=False)


def make_matching_environment(about: Mapping[str, Any], source: str) -> Environment:
    """The environment of the demonstrations that a policy learned from.

    Args:
        about: "environment", arguments of `make_environment`, and "settings", as the file of demonstrations has them.
        source: file or folder that says so, for errors.

    Raises:
        ValueError: if the environment that is made here has other settings (controller, frame, images, versions), or if
            `about` has no environment or settings.
    """
    arguments, settings = about.get("environment"), about.get("settings")
    if not isinstance(arguments, Mapping) or not {"name"} <= set(arguments) <= ENVIRONMENT_KEYS:
        raise ValueError(f"{source} does not say its environment: {arguments!r}")
    if not isinstance(settings, Mapping) or not isinstance(settings.get("cameras"), list):
        raise ValueError(f"{source} does not say the settings of its environment")
    environment = make_environment(**about["environment"])
    try:
        check_settings(settings, source, environment)
    except ValueError:
        environment.close()
        raise
    return environment


def rollout(
    policy: CrosswayPolicy,
    environment: Environment,
    seed: int,
    max_steps: int | None = None,
    picture_size: int = 0,
    on_step: Callable[[int, int], None] = lambda step, horizon: None,
) -> Episode:
    """Let a policy act until the task is solved or time is up.

    The first observation is repeated for the steps before it. The first `action_steps` actions of a plan are executed.

    Args:
        policy: in evaluation mode.
        environment: like the one in which the demonstrations were recorded.
        seed: seeds the episode and the policy's noise.
        max_steps: actions; None: the environment's horizon.
        picture_size: pixels of the frames that are kept; 0: none.
        on_step: called after each action with how many there were and how many there can be.
    """
    generator = torch.Generator().manual_seed(seed)
    observation = environment.reset(seed)
    seen = deque([observation] * policy.config.observation_steps, maxlen=policy.config.observation_steps)
    episode = Episode(seed, environment.success(), 0.0, 0)
    horizon = environment.horizon if max_steps is None else max_steps
    if picture_size:
        episode.frames.append(environment.render(picture_size))
    while not episode.success and episode.steps < horizon:
        stacked = {key: np.stack([step[key] for step in seen]) for key in policy.config.seen}
        for action in policy.act(stacked, generator)[: horizon - episode.steps]:
            observation, reward, episode.success, info = environment.step(action)
            seen.append(observation)
            episode.steps += 1
            on_step(episode.steps, horizon)
            episode.max_reward = max(episode.max_reward, float(reward))
            episode.coverage = info.get("coverage")
            if picture_size:
                episode.frames.append(environment.render(picture_size))
            if episode.success:
                break
    return episode


def summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """success with its 95 % interval, mean max_reward and, if there is one, mean final coverage."""
    solved = sum(episode.success for episode in episodes)
    found: dict[str, Any] = {
        "success": solved / len(episodes),
        "success_interval": list(wilson_interval(solved, len(episodes))),
        "max_reward": float(np.mean([episode.max_reward for episode in episodes])),
    }
    if all(episode.coverage is not None for episode in episodes):
        found["final_coverage"] = float(np.mean([episode.coverage for episode in episodes]))
    return found
