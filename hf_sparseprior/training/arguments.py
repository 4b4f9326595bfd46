"""Training arguments of ViT recipes that transformers does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import SchedulerType, TrainingArguments

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.training.finite import STOP, check_setting
from hf_sparseprior.training.progressive import check_sizes


@dataclass
class SparsePriorTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with layer decay, a moving average of the weights, and what pruned models need.

    Raises:
        ValueError: the message has the field, the value and what is allowed.
    """

    layer_decay: float = field(
        default=1.0,
        metadata={"help": "Learning rate of layer l of L: learning_rate * layer_decay ** (L + 1 - l); 1 for none."},
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Decay per step of the moving average, evaluated as well as the weights; None for none."},
    )

    backbone_learning_rate: float = field(
        default=1.0,
        metadata={"help": "Learning rate of all parameters that are not a prior's, as a share of learning_rate."},
    )
    keep_rate_start_epoch: float = field(
        default=0.0,
        metadata={"help": "Until this epoch EViT's keep rate is 1."},
    )
    keep_rate_epochs: float = field(
        default=0.0,
        metadata={"help": "Epochs in which it then falls to the prior's keep rate, as a cosine; 0: at once."},
    )
    learning_rate_steps: list[float] | None = field(
        default=None,
        metadata={
            "help": "After each of these epochs the learning rate falls to a tenth (lr_scheduler_type constant)."
        },
    )
    progressive_sizes: list[int] | None = field(
        default=None,
        metadata={
            "help": "Rising sizes of the training images, the last one the model's image_size, each for as many steps; "
            "a size that is repeated has more of them. None for the model's size alone."
        },
    )
    nonfinite_loss: str = field(
        default=STOP,
        metadata={"help": "At a loss or weights that are not finite: 'stop' before anything is saved, or 'continue'."},
    )
    early_stopping: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations in a row without a better metric_for_best_model; None for never."
        },
    )
    effective_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples in a step over all processes, devices and accumulated micro-batches. It replaces "
            "per_device_train_batch_size; None for that."
        },
    )

    def __post_init__(self) -> None:
        check_setting("nonfinite_loss", self.nonfinite_loss)
        if not is_number(self.layer_decay) or not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay={self.layer_decay!r} must be above 0 and at most 1")
        if self.ema_decay is not None and not (is_number(self.ema_decay) and 0 <= self.ema_decay < 1):
            raise ValueError(f"ema_decay={self.ema_decay!r} must be in [0, 1), or null for none")
        if not is_number(self.backbone_learning_rate) or not 0 <= self.backbone_learning_rate <= 1:
            raise ValueError(f"backbone_learning_rate={self.backbone_learning_rate!r} must be between 0 and 1")
        for name in ("keep_rate_start_epoch", "keep_rate_epochs"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a number of 0 or more")
        if self.progressive_sizes is not None:
            check_sizes(self.progressive_sizes)
        super().__post_init__()
        self._check_steps()
        self._check_early_stopping()
        if self.effective_batch_size is not None:
            self.per_device_train_batch_size = self._device_share(self.effective_batch_size)

    def _check_steps(self) -> None:
        steps = self.learning_rate_steps
        if steps is None:
            return
        listed = isinstance(steps, (list, tuple)) and steps and all(is_number(step) and step > 0 for step in steps)
        if not listed or sorted(set(steps)) != list(steps) or steps[-1] >= self.num_train_epochs:
            raise ValueError(
                f"learning_rate_steps={steps!r} must be rising epochs above 0 and below "
                f"num_train_epochs={self.num_train_epochs}"
            )
        if self.lr_scheduler_type != SchedulerType.CONSTANT:
            raise ValueError(
                f"learning_rate_steps={steps!r} is a schedule of its own; lr_scheduler_type="
                f"{self.lr_scheduler_type.value} must be constant"
            )

    def _check_early_stopping(self) -> None:
        patience = self.early_stopping
        if patience is None:
            return
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ValueError(f"early_stopping={patience!r} must be an integer of 1 or more, or null")
        if self.eval_strategy == "no":
            raise ValueError(
                f"early_stopping={patience} needs a validation split; eval_strategy=no does not look at one"
            )
        if not self.load_best_model_at_end:
            raise ValueError(f"early_stopping={patience} needs load_best_model_at_end=true")

    def _device_share(self, size: Any) -> int:
        """Samples of one device in one micro-batch, if a step has `size` samples."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"effective_batch_size={size!r} must be an integer of 1 or more, or null")
        devices, accumulated = self.world_size * max(1, self.n_gpu), self.gradient_accumulation_steps
        if size % (devices * accumulated):
            raise ValueError(
                f"effective_batch_size={size} must be a multiple of {devices * accumulated}: {devices} devices times "
                f"gradient_accumulation_steps={accumulated}"
            )
        return size // (devices * accumulated)
