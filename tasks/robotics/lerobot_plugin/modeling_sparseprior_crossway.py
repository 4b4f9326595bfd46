"""Our policies with lerobot's interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from tasks.robotics.lerobot_plugin.configuration_sparseprior_crossway import TRAIN, SparsePriorCrosswayConfig
from tasks.robotics.observation_groups import GROUPS, image_feature
from tasks.robotics.policy import CrosswayPolicy


class SparsePriorCrosswayPolicy(PreTrainedPolicy):
    """A `CrosswayPolicy` that is shown lerobot's features.

    Args:
        config: as lerobot reads it from config.json.
        policy: the policy; None: as `from_pretrained` reads it from `config.pretrained_path`.

    Raises:
        ValueError: without a folder: a policy is nothing without what it has learned from.
    """

    config_class = SparsePriorCrosswayConfig
    name = "sparseprior_crossway"

    def __init__(self, config: Any, policy: CrosswayPolicy | None = None, **kwargs: Any) -> None:
        super().__init__(config)
        if policy is None:
            raise ValueError(f"--policy.path must name a folder of a saved policy: {TRAIN}")
        self.policy = policy
        self.parts = feature_parts(policy)

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: Any = None, **kwargs: Any
    ) -> SparsePriorCrosswayPolicy:
        """The policy of a folder that `tasks.robotics.lerobot_export` wrote, in evaluation mode."""
        folder = Path(pretrained_name_or_path)
        if config is None:
            config = SparsePriorCrosswayConfig.from_pretrained(folder)
        return cls(config, CrosswayPolicy.from_pretrained(folder)).to(config.device).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        raise NotImplementedError(TRAIN)

    def get_optim_params(self) -> dict[str, Any]:
        """lerobot does not train it."""
        raise NotImplementedError(TRAIN)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        """lerobot does not train it."""
        raise NotImplementedError(TRAIN)

    def reset(self) -> None:
        """New episodes begin."""
        self.policy.reset()

    def predict_action_chunk(self, batch: Mapping[str, Tensor], **kwargs: Any) -> Tensor:
        """Actions (B, n_action_steps, A) from what lerobot shows of B episodes."""
        return self.policy.predict_action_chunk(self.seen(batch))

    def select_action(self, batch: Mapping[str, Tensor], **kwargs: Any) -> Tensor:
        """The next action (B, A) of B episodes."""
        return self.policy.select_action(self.seen(batch))

    def seen(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our observations from lerobot's features: images float32 (B, 3, H, W) in [0, 1], numbers (B, size).

        Raises:
            ValueError: for a feature that is missing.
        """
        found = {}
        for key, (feature, first, size) in self.parts.items():
            if feature not in batch:
                raise ValueError(f"{feature!r} is missing, of which the policy needs {key}; given: {', '.join(batch)}")
            value = batch[feature]
            if size is None:
                found[key] = (value * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            else:
                found[key] = value[:, first : first + size]
        return found


def feature_parts(policy: CrosswayPolicy) -> dict[str, tuple[str, int, int | None]]:
    """{observation: (feature, where it begins in it, size)}; of images (feature, 0, None).

    Raises:
        ValueError: for an observation that lerobot is not shown.
    """
    name = policy.about["environment"]["name"]
    parts: dict[str, tuple[str, int, int | None]] = {
        key: (image_feature(key), 0, None) for key in policy.config.cameras
    }
    for feature, sizes in GROUPS[name].items():
        first = 0
        for key, size in sizes.items():
            parts[key] = feature, first, size
            first += size
    if unknown := [key for key in policy.config.seen if key not in parts]:
        raise ValueError(f"observation {unknown[0]!r} of {name} is not among those that lerobot is shown")
    return {key: parts[key] for key in policy.config.seen}
