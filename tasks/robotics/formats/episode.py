"""One recorded demonstration, before it goes into a file with others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Episode:
    """One demonstration of T steps.

    Attributes:
        seed: seed of the environment's reset; None if nobody knows it.
        actions: float64 (T, A), the chosen actions.
        executed: float64 (T, A), the executed actions: the same with noise.
        states: float64 (T, S), the simulator's own state before each action.
        rewards: float64 (T,), the reward of each action.
        dones: bool (T,), whether the task was solved after it.
        observations: by key, before each action: (T, ...).
    """

    seed: int | None
    actions: np.ndarray
    executed: np.ndarray
    states: np.ndarray
    rewards: np.ndarray
    dones: np.ndarray
    observations: dict[str, np.ndarray]

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        scratch = path.with_name(f"{path.name}.partial")
        with scratch.open("wb") as file:
            np.savez(
                file,
                **({} if self.seed is None else {"seed": self.seed}),
                actions=self.actions,
                executed=self.executed,
                states=self.states,
                rewards=self.rewards,
                dones=self.dones,
                allow_pickle=False,
                **{f"obs/{key}": values for key, values in self.observations.items()},
            )
        os.replace(scratch, path)

    @classmethod
    def load(cls, path: Path) -> Episode:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        seed = int(arrays.pop("seed")) if "seed" in arrays else None
        observations = {name.removeprefix("obs/"): arrays.pop(name) for name in list(arrays) if name.startswith("obs/")}
        return cls(seed=seed, observations=observations, **arrays)
