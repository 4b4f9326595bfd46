"""A search within a training by transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_sparseprior.compression.search import MaskSearch


class SearchCallback(TrainerCallback):
    """Updates the masks every `interval` steps and after the last step, after which they are 0 or 1.

    Args:
        search: on the model that is trained.
        interval: steps.
    """

    def __init__(self, search: MaskSearch, interval: int) -> None:
        self.search, self.interval = search, interval

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The masks go where the model is."""
        self.search.to(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the masks if it is time."""
        if state.global_step % self.interval == 0 or state.global_step == state.max_steps:
            self.search.update(state.global_step, state.max_steps)
