"""The robots' task, for comparisons: what tasks/common/compare.py needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_sparseprior.runs.config import Config
from tasks.robotics import train
from tasks.robotics.config import SECTIONS, check_config, load_config
from tasks.robotics.formats import demonstrations_sha256


class RoboticsTask:
    """Policies over rows and seeds, as `HFTask` is for what the Trainer trains.

    A run trains a policy and plays `trainer.test_episodes` episodes on the seeds of evaluation; rows are compared by
    the share that it solves, episode by episode.
    """

    name = "robotics"
    module = __name__
    sections = SECTIONS
    metric = "test_success"
    also = ()

    def __reduce__(self) -> str:
        """Pickled as its name, for other processes."""
        return "ROBOTICS"

    def load_config(self, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """A configuration file with overrides, checked."""
        return load_config(path, overrides)

    def check_config(self, config: Config) -> Config:
        """Refuse what is no row of a comparison, besides unknown keys and bad values."""
        _, policy, trainer = check_config(config)
        if not policy.cameras:
            raise ValueError("policy.observations names no camera; a comparison is one of priors in encoders of images")
        if not trainer.test_episodes:
            raise ValueError("trainer.test_episodes=0 must be 1 or more; a comparison is by solved episodes")
        if config["encoder"].get("pretrained") is not None:
            raise ValueError(
                f"encoder.pretrained={config['encoder']['pretrained']!r} is not for comparisons, whose records would "
                "not say from which weights a run started"
            )
        return config

    def run(
        self, config: Config, command: str | None = None, callbacks: Sequence[TrainerCallback] = ()
    ) -> dict[str, Any]:
        """Train and play. Returns the content of results.json."""
        return train.run(config, command, callbacks=callbacks)

    def data_sha256(self, config: Config) -> str | None:
        """SHA-256 of the demonstrations; None if they are not there."""
        path = Path(config["data"]["path"])
        return demonstrations_sha256(path) if path.exists() else None

    def models_read(self, config: Config) -> Sequence[str]:
        """No saved model is read."""
        return ()

    def check_start(self, model: Any) -> None:
        """Refuse nothing: runs start from random weights."""

    def start_sha256(self, model: Any) -> None:
        """None: runs start from random weights."""


ROBOTICS = RoboticsTask()
