"""One progress bar for a training run."""

from __future__ import annotations

from typing import Any

from transformers import ProgressCallback


class OneLineProgress(ProgressCallback):
    """transformers' training bar with the latest numbers after it instead of a line per log entry."""

    SHOWN = {
        **{"loss": "loss", "data_wait": "waiting for data", "eval_loss": "val loss"},
        **{"eval_accuracy": "val acc", "eval_knn_accuracy": "val k-NN"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        """Show loss and validation numbers after the bar."""
        for key, label in self.SHOWN.items():
            if logs and key in logs:
                self.numbers[label] = f"{logs[key]:.4g}"
        if self.training_bar is not None:
            self.training_bar.set_postfix(self.numbers, refresh=False)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show evaluation's own bar only if there is no training bar."""
        if self.training_bar is None:
            super().on_prediction_step(args, state, control, **kwargs)
