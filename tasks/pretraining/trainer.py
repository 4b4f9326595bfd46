"""SparsePriorTrainer with what a step of DINO does besides: schedules, clipping, centre and teacher."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.runs.minutes import global_batch
from hf_sparseprior.training import SparsePriorTrainer
from tasks.pretraining.config import DinoConfig
from tasks.pretraining.dino import Dino
from tasks.pretraining.schedules import cosine, linear, warmed_up_cosine

logger = logging.getLogger("hf_sparseprior.pretraining")
COLLAPSED = 1e-4  # nats; below this the student has nothing left to learn from other views


class DinoTrainer(SparsePriorTrainer):
    """Trains a `Dino`. Its state is in the model and in the number of the step, so the Trainer's checkpoints hold it.

    As published, weight decay is for all parameters with two dimensions or more, position embedding and class token
    among them; a prior's have none.

    Args:
        dino: DINO's settings. knn_accuracy: accuracy of a backbone on the validation images.

    Raises:
        ValueError: for FSDP, DeepSpeed and several devices in one process.
    """

    model: Dino
    lr_scheduler: Any
    control: Any
    counted_input = "global_crops"

    def __init__(self, *args: Any, dino: DinoConfig, knn_accuracy: Callable[[Any], float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.n_gpu > 1:
            raise ValueError("DINO trains in one process for each device; start it with torchrun, without FSDP")
        if dino.head_batch_norm and self.args.world_size > 1:
            raise ValueError(
                f"dino.head_batch_norm=true sees the images of one process alone, and there are {self.args.world_size}"
            )
        self.dino, self.knn_accuracy = dino, knn_accuracy
        self.decayed = {id(self.model.get_parameter(name)) for name in self.get_decay_parameter_names(self.model)}
        self.add_callback(_DinoSteps(self))

    @property
    def steps_in_epoch(self) -> int:
        """Steps of an epoch."""
        assert self.train_sampler is not None
        return math.ceil(len(self.train_sampler) / global_batch(self.args))

    def get_decay_parameter_names(self, model: nn.Module, *args: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return [name for name, value in model.named_parameters() if value.dim() > 1 and not is_prior_weight(name)]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate by step."""
        if self.lr_scheduler is None:
            highest = self.args.learning_rate
            lowest, warmup = self.dino.min_learning_rate, round(self.dino.warmup_epochs * self.steps_in_epoch)
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer,
                lambda step: warmed_up_cosine(1.0, lowest / highest, step, num_training_steps, warmup),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a micro-batch, weighted so that a step's gradient is that of the mean over its images."""
        outputs = model(**inputs)
        self._record({"entropy": outputs["entropy"], "kl": outputs["kl"]})
        loss = self.share_of_step(outputs["loss"], inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As SparsePriorTrainer's; a collapse of the outputs is said once."""
        super().log(logs, start_time)
        if logs.get("loss_kl", math.inf) < COLLAPSED and not getattr(self, "_said", False):
            self._said = True
            logger.warning(
                "step %s: the teacher's output is the same for all views (KL %.2g, entropy %.4g of at most %.4g nats); "
                "the outputs have collapsed",
                self.state.global_step,
                logs["loss_kl"],
                logs["loss_entropy"],
                math.log(self.dino.output_size),
            )

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """k-NN accuracy of the teacher on the validation images."""
        metrics = {f"{metric_key_prefix}_knn_accuracy": self.knn_accuracy(self.model.teacher.backbone)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _DinoSteps(TrainerCallback):
    """What happens before and after the optimizer's step."""

    def __init__(self, trainer: DinoTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, dino = self.trainer, self.trainer.dino
        trainer.model.temperature = linear(
            dino.warmup_teacher_temperature,
            dino.teacher_temperature,
            int(state.epoch),
            dino.warmup_teacher_temperature_epochs,
        )
        decay = cosine(args.weight_decay, dino.weight_decay_end, state.global_step, state.max_steps)
        for group in trainer.optimizer.param_groups:
            if group["params"] and id(group["params"][0]) in trainer.decayed:
                group["weight_decay"] = decay

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, dino = self.trainer, self.trainer.dino
        trainer.accelerator.unscale_gradients(trainer.optimizer)  # of fp16
        if state.epoch < dino.freeze_last_layer_epochs:
            for parameter in trainer.model.last_layer.parameters():
                parameter.grad = None
        if dino.clip_gradient is not None:
            clip_each(trainer.model.student, dino.clip_gradient)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, dino = self.trainer.model, self.trainer.dino
        model.update_centre()
        model.update_teacher(cosine(dino.teacher_momentum, 1.0, state.global_step, state.max_steps))


@torch.no_grad()
def clip_each(module: nn.Module, largest: float) -> None:
    """Scale the gradient of each parameter down to this norm, if it is above; no wait for the device."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if gradients:
        norms = torch._foreach_norm(gradients)
        factors = [(largest / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
        torch._foreach_mul_(gradients, factors)
