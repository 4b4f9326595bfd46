"""What every file of demonstrations gives, whatever its layout."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from tasks.robotics.formats.episode import Episode

SPLITS = {"train": "train", "validation": "valid"}  # our names and those of both layouts
VALID_EVERY = 10  # every tenth episode is for validation
ACTIONS, EXECUTED = "actions", "executed_actions"
NUMBERS = "biuf"  # numpy's kinds of them


class BrokenDemonstrations(ValueError):
    """A file of demonstrations is damaged or is no such file. The text begins with its path."""


class Demonstrations(ABC):
    """A file of demonstrations. It is verified when it is opened, and read when asked.

    It may be handed to other processes: each opens the file for itself.

    Attributes:
        path: the file, or the zarr folder.
        episodes: their names.
        lengths: steps of each episode, by name.
        seeds: seed of the environment's reset for each episode, by name; None if the file does not say.
        shapes: shape of one step by observation key; images (H, W, 3), everything else (size,).
        action_size: numbers in an action.
        environment: keyword arguments of `make_environment` for the environment of the demonstrations.
        settings: that environment's `settings`.
    """

    episodes: tuple[str, ...]
    lengths: dict[str, int]
    seeds: dict[str, int | None]
    shapes: dict[str, tuple[int, ...]]
    action_size: int
    settings: dict[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._splits: dict[str, tuple[str, ...]] = {}
        self._handle: tuple[int, Any] | None = None
        try:
            self._verify(self._file())
        except (BrokenDemonstrations, ImportError):
            raise
        except Exception as error:  # what else can be raised for a foreign or damaged file
            raise self._fail(f"is damaged ({first_line(error)})") from error

    @property
    def environment(self) -> dict[str, Any]:
        """Keyword arguments of `make_environment`."""
        settings = self.settings
        arguments = {"name": settings["environment"], "cameras": tuple(settings["cameras"])}
        if settings["cameras"]:
            arguments["image_size"] = settings["image_size"]
            if "robomimic" in settings:
                arguments["rendering"] = "robosuite"
        return arguments

    def split(self, name: str) -> tuple[str, ...]:
        """Episodes of "train" or "validation".

        Raises:
            ValueError: for another name.
        """
        if name not in SPLITS:
            raise ValueError(f"split {name!r} must be one of {', '.join(SPLITS)}")
        return self._splits[name]

    def read(self, episode: str, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Steps start to stop of one episode.

        Args:
            episode: its name.
            key: "actions", "executed_actions" or an observation key.
            start: first step.
            stop: the step after the last; None: the end of the episode.

        Returns:
            Images uint8 (steps, H, W, 3); executed_actions float64 (steps, A), which replay exactly; everything else
            float32 (steps, size).

        Raises:
            ValueError: for another episode or key, steps outside the episode, or a file that is damaged here or holds
                numbers that are not finite.
        """
        if episode not in self.lengths:
            raise ValueError(f"{self.path}: no episode {episode!r} among {len(self.episodes)}")
        if key not in self.shapes and key not in (ACTIONS, EXECUTED):
            raise ValueError(f"{self.path}: no key {key!r}; it has {', '.join((ACTIONS, *self.shapes))}")
        length = self.lengths[episode]
        stop = length if stop is None else stop
        if not 0 <= start < stop <= length:
            raise ValueError(f"{self.path}: steps {start} to {stop} of {episode} must lie within its {length}")
        try:
            values = self._read(self._file(), episode, key, start, stop)
            image = len(self.shapes.get(key, ())) == 3
            values = np.asarray(values, dtype=values.dtype if image else np.float64 if key == EXECUTED else np.float32)
        except Exception as error:  # what a damaged chunk raises depends on its codec
            raise self._fail(f"{episode}/{key} cannot be read ({first_line(error)})") from error
        self._check_finite(f"{episode}/{key}", values)
        return values.astype(np.uint8, copy=False) if image else values

    def episode(self, name: str) -> Episode:
        """One episode with all that the layout holds of it.

        Of what is not there, executed actions are the chosen ones, states are empty, rewards 0, and the last step is
        the one that is done.
        """
        length, rest = self.lengths[name], self._recorded(self._file(), name)
        actions = self.read(name, ACTIONS)
        executed = self.read(name, EXECUTED) if self._has_executed(self._file(), name) else actions
        rewards, dones = rest.get("rewards", np.zeros(length)), rest.get("dones", np.arange(length) == length - 1)
        for key, values in (("states", rest.get("states")), ("rewards", rewards)):
            if values is not None:
                self._check_finite(f"{name}/{key}", values)
        return Episode(
            seed=self.seeds[name],
            actions=actions.astype(np.float64),
            executed=executed.astype(np.float64),
            states=np.asarray(rest.get("states", np.zeros((length, 0))), dtype=np.float64),
            rewards=np.asarray(rewards, dtype=np.float64).reshape(length),
            dones=np.asarray(dones).astype(bool).reshape(length),
            observations={key: self.read(name, key) for key in self.shapes},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def _file(self) -> Any:
        """The open file of this process: handles of HDF5 must not be shared with forked workers."""
        if self._handle is None or self._handle[0] != os.getpid():
            self._handle = os.getpid(), self._open()
        return self._handle[1]

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _verify(self, file: Any) -> None: ...

    @abstractmethod
    def _read(self, file: Any, episode: str, key: str, start: int, stop: int) -> np.ndarray: ...

    @abstractmethod
    def _has_executed(self, file: Any, episode: str) -> bool: ...

    @abstractmethod
    def _recorded(self, file: Any, episode: str) -> dict[str, np.ndarray]:
        """What there is of states (T, S), rewards (T,) and dones (T,) of an episode."""

    def _fail(self, what: str) -> BrokenDemonstrations:
        return BrokenDemonstrations(f"{self.path}: {what}")

    def _check_settings(self, settings: Any) -> dict[str, Any]:
        """Return the settings if they are valid; cameras and image size are checked."""
        if not isinstance(settings, dict) or not all(
            isinstance(settings.get(key), kind)
            for key, kind in (("environment", str), ("cameras", list), ("controller", dict))
        ):
            raise self._fail(
                "does not say its settings (environment, controller, frame, image mode); its actions cannot be trusted"
            )
        if settings["cameras"] and not isinstance(settings.get("image_size"), int):
            raise self._fail(f"image_size={settings.get('image_size')!r} in its settings must be an integer")
        return settings

    def _check_finite(self, name: str, values: np.ndarray) -> None:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise self._fail(f"{name} has numbers that are not finite")

    def _check_splits(self) -> None:
        train, validation = (self._splits[name] for name in SPLITS)
        if unknown := [name for name in (*train, *validation) if name not in self.lengths]:
            raise self._fail(f"its masks name {unknown[0]!r}, which is not there")
        for split, names in self._splits.items():
            if twice := [name for name in names if names.count(name) > 1]:
                raise self._fail(f"mask {SPLITS[split]} names {twice[0]} twice")
        if shared := set(train) & set(validation):
            raise self._fail(f"{min(shared)} is in mask train and in mask valid")
        if not train:
            raise self._fail("mask train is empty")


def validation_episodes(count: int) -> np.ndarray:
    """bool (count,): every tenth episode is for validation, or the last one of fewer. A single one is for training."""
    held = np.arange(count) % VALID_EVERY == VALID_EVERY - 1
    if count > 1 and not held.any():
        held[-1] = True
    return held


def import_package(name: str) -> Any:
    """Import a package of the extra `robotics` where it is used. The error says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"demonstrations need {name}: pip install 'hf_sparseprior[robotics]'") from error
