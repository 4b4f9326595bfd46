"""Scales actions and low-dimensional observations to [-1, 1] and back, by the range of the training episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ACTIONS = "actions"  # the key of actions; the others are observations


class Normalizer(nn.Module):
    """Maps x to (x - centre) / half in every dimension of every key, so that the maximum is 1 and the minimum -1.

    In a dimension that hardly moves `half` is half the floor. Stretched to [-1, 1], the noise of a rotation would count
    as much as the motion of the hand.

    Args:
        bounds: {key: (minimum, maximum)}, each (D,).
        floors: {key: smallest range that a dimension is taken to have, a number or one for each dimension}.

    Raises:
        ValueError: for bounds that are not finite or in the wrong order, and floors that are not above 0.
    """

    def __init__(self, bounds: Mapping[str, Sequence[Any]], floors: Mapping[str, Any]) -> None:
        super().__init__()
        self.bounds: dict[str, list[list[float]]] = {}
        self.floors: dict[str, list[float]] = {}
        for key, (low, high) in bounds.items():
            low, high = (np.asarray(bound, np.float64) for bound in (low, high))
            floor = np.broadcast_to(np.asarray(floors[key], np.float64), low.shape)
            if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
                raise ValueError(f"{key}: minimum {low.tolist()} and maximum {high.tolist()} are no range")
            if not (floor > 0).all():
                raise ValueError(f"{key}: floor {floor.tolist()} of the range must be above 0")
            self.bounds[key] = [low.tolist(), high.tolist()]
            self.floors[key] = floor.tolist()
            half = np.maximum(high - low, floor) / 2
            self.register_buffer(f"centre_{key}", torch.tensor((low + high) / 2, dtype=torch.float32))
            self.register_buffer(f"half_{key}", torch.tensor(half, dtype=torch.float32))

    @classmethod
    def fit(cls, values: Mapping[str, Sequence[np.ndarray]], floors: Mapping[str, Any]) -> Normalizer:
        """A normaliser from the arrays (T, D) of each key. What has the floor None stays as it is."""
        bounds, numbers = {}, {}
        for key, arrays in values.items():
            low, high = np.min([array.min(0) for array in arrays], 0), np.max([array.max(0) for array in arrays], 0)
            own = np.broadcast_to(np.asarray(floors[key], object), low.shape)
            stays = np.array([floor is None for floor in own])
            bounds[key] = np.where(stays, -1.0, low), np.where(stays, 1.0, high)
            numbers[key] = np.where(stays, 2.0, own).astype(np.float64)
        return cls(bounds, numbers)

    def forward(self, key: str, values: Tensor) -> Tensor:
        """Scale (..., D) of this key to about [-1, 1]."""
        return (values - self.get_buffer(f"centre_{key}")) / self.get_buffer(f"half_{key}")

    def undo(self, key: str, values: Tensor) -> Tensor:
        """The inverse of `forward`."""
        return values * self.get_buffer(f"half_{key}") + self.get_buffer(f"centre_{key}")

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON, from which `Normalizer(**...)` makes this one again."""
        return {"bounds": self.bounds, "floors": self.floors}
