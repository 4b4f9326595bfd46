"""Training arguments of ViT recipes that transformers' own lack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


@dataclass
class SparsePriorTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with layer decay and an exponential moving average of the weights.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    layer_decay: float = field(
        default=1.0,
        metadata={"help": "Learning rate of layer l of L: learning_rate * layer_decay ** (L + 1 - l); 1 for none."},
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Decay per step of the moving average that is evaluated beside the weights; None for none."},
    )

    def __post_init__(self) -> None:
        if not _is_number(self.layer_decay) or not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay={self.layer_decay!r} must be above 0 and at most 1")
        if self.ema_decay is not None and not (_is_number(self.ema_decay) and 0 <= self.ema_decay < 1):
            raise ValueError(f"ema_decay={self.ema_decay!r} must be in [0, 1), or null for none")
        super().__post_init__()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
