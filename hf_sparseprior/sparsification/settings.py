"""Settings of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_sparseprior.base.checks import (
    check_boolean,
    check_finite,
    check_integer,
    check_keys,
    check_within,
    first_line,
    python_value,
)
from hf_sparseprior.cli.arguments import TUNING_AFTERWARDS
from hf_sparseprior.cli.deployment import checked_sides

OF_RECOVERY = ("tuning", "learning_rate", "recover_all", "micro_batch")


@dataclass(frozen=True)
class Settings:
    """How a search is done.

    image_size: height and width in pixels, or one number; None: the model's.
    batch: images at once in what is timed. device: None: a GPU if there is one.
    seed: of the division of the images and of recovery.
    candidates: what layers may have, see `parse_candidates`; None: `default_candidates`.
    calibration, test: images of the search and of the test at most.
    seconds: of each timing, which has three rounds at least.
    minutes: of recovery; 0: none. tuning: "full" or "lora". learning_rate: None: 3e-5, with LoRA 5e-4.
    recover_all: train what the result is compared with as long, too. micro_batch: images at once in recovery, whose
    steps have 16; fewer need less memory.
    """

    image_size: Any = None
    batch: int = 1
    device: str | None = None
    seed: int = 0
    candidates: Any = None
    calibration: int = 64
    test: int = 1000
    seconds: float = 5.0
    minutes: float = 0.0
    tuning: str = TUNING_AFTERWARDS[0]
    learning_rate: float | None = None
    recover_all: bool = False
    micro_batch: int = 16

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Settings:
        """Settings of a mapping.

        Raises:
            ValueError: for an unknown one and a bad value.
        """
        given = dict(given or {})
        check_keys(given, [field.name for field in fields(cls)], "sparsify")
        settings = cls(**given)
        for name in ("batch", "calibration", "test", "micro_batch"):
            check_integer(name, getattr(settings, name), 1)
        check_integer("seed", settings.seed, 0)
        check_finite("seconds", settings.seconds, zero=False)
        check_finite("minutes", settings.minutes)
        if settings.learning_rate is not None:
            check_finite("learning_rate", settings.learning_rate, zero=False)
        check_device(settings.device)
        if settings.tuning not in TUNING_AFTERWARDS:
            raise ValueError(f"tuning={settings.tuning!r} must be one of {', '.join(TUNING_AFTERWARDS)}")
        check_boolean("recover_all", settings.recover_all)
        default = cls()
        changed = [name for name in OF_RECOVERY if getattr(settings, name) != getattr(default, name)]
        if not settings.minutes and changed:
            raise ValueError(f"{', '.join(OF_RECOVERY)} are of recovery, for which minutes is 0")
        return settings

    @property
    def place(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of the images; None: the model's."""
        return None if self.image_size is None else checked_sides(self.image_size)


def check_device(device: Any) -> None:
    """Raise ValueError for a device that there is not, or whose times are not known here."""
    try:
        if device is not None and torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r}: {first_line(error).rstrip('.')}") from None


def check_budget(budget: Any) -> float:
    """`budget` if it is above 0 and below 1."""
    budget = python_value(budget)
    check_within("budget", budget, 0.0, 1.0, "a share of the dense model's time, above 0 and below 1")
    if budget in (0, 1):
        raise ValueError(f"budget={budget!r} must be a share of the dense model's time, above 0 and below 1")
    return float(budget)
