"""Says of a training that cannot learn that it cannot: parts that get no gradient, and batches without a label."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from hf_sparseprior.models.blocks import checkpoint_layer, is_reentrant
from hf_sparseprior.priors.prior import PRIOR_MODULES

logger = logging.getLogger("hf_sparseprior.training")

STEPS = 10  # that are watched: more than it takes until no zero of a part's start hides another part's gradient
FEWEST = 4  # of a run that ends before; a warmup from 0, a head of zeros and LoRA's B hide three
PREDICTOR = "the prior's predictor"
PARTS = {
    "decay_bias": "the prior's decay",
    "predictor": PREDICTOR,
    "mixer": "the prior's mixer",
    "relative_position": "the prior's relative positions",
    "locality": "the prior's local convolutions",
    "token_pruning": "the prior's token pruning",
}


class LearningWatch:
    """Watches the first steps of a training, and warns once of what cannot learn.

    Gradients are read on their device before each of the first steps of the optimizer, in all of a part's parameters,
    and the device is waited for once, after the last of them. A part is what is trained of the backbone, the head, an
    adapter, or one module of the prior.

    messages: what was warned of, a line each.

    Args:
        model: what is trained.
        scores: whether a loss takes the scores of predictors. Without it they get no gradient, and are not judged.
        is_main: whether this process is the one that warns.
    """

    def __init__(self, model: nn.Module, scores: bool = False, is_main: bool = True) -> None:
        self.model, self.is_main = model, is_main
        self.messages: list[str] = []
        self.steps = 0
        parts = parameter_parts(model)
        self._part_of = {
            id(parameter): (parts[name], name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (scores or parts[name] != PREDICTOR)
        }
        self._largest: dict[str, Tensor] = {}  # gradient of each part so far; a part without any gradient is not in it
        self._labels: list[Tensor | bool] = []
        self._handle: Any = None

    @property
    def is_watching(self) -> bool:
        """Whether steps and labels are still watched."""
        return self._handle is not None

    def attach(self, optimizer: Any) -> None:
        """Begin with the next step of an optimizer of torch, or of one that accelerate or mmengine wraps."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed has its own
            self._handle = optimizer.register_step_pre_hook(self._see)

    def note_labels(self, present: Tensor | bool | None) -> None:
        """Note whether a batch holds a label, as `has_label` says it."""
        if self.is_watching and present is not None:
            self._labels.append(present)

    @torch.no_grad()
    def _see(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Hook of the optimizer: read the gradients of its next step."""
        gradients: dict[str, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._part_of:
                    gradients.setdefault(self._part_of[id(parameter)][0], []).append(parameter.grad)
        for part, found in gradients.items():
            largest = nn.utils.get_total_norm(found, float("inf"))
            self._largest[part] = torch.maximum(largest, self._largest.get(part, largest))
        self.steps += 1
        if self.steps == STEPS:
            self.finish()

    def finish(self) -> None:
        """Warn of what cannot learn, and stop watching. Every process calls it at the same step, once or more often."""
        if not self.is_watching:
            return
        self._handle.remove()
        self._handle = None
        labelled = self._has_labels()
        if labelled is False:
            self._warn(
                f"no batch of the first {max(self.steps, 1)} steps holds a label that the loss counts: nothing is "
                "learned from them; look at the labels and at the value that marks pixels or images without one"
            )
        elif self.steps >= FEWEST:
            for message in self._without_gradient():
                self._warn(message)

    def _warn(self, message: str) -> None:
        self.messages.append(message)
        if self.is_main:
            logger.warning(message)

    def _has_labels(self) -> bool | None:
        """Whether a noted batch of any process holds a label; None if none was noted."""
        if not self._labels:
            return None
        device = next((flag.device for flag in self._labels if isinstance(flag, Tensor)), None)
        if device is None:
            device = next(self.model.parameters()).device
        flags = torch.stack([torch.as_tensor(flag, device=device, dtype=torch.float32) for flag in self._labels]).amax()
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(flags, distributed.ReduceOp.MAX)
        return bool(flags)

    def _without_gradient(self) -> list[str]:
        """A line for each part whose gradients were all missing or zero. One that is not a number is no zero."""
        learned = {part for part, largest in self._largest.items() if largest.item() != 0}
        names: dict[str, list[str]] = {}
        for part, name in self._part_of.values():
            names.setdefault(part, []).append(name)
        return [
            f"{part} got no gradient in the first {self.steps} steps and does not learn ({len(members)} tensors, such "
            f"as {members[0]}): {self._reason(part, learned)}"
            for part, members in names.items()
            if part not in learned
        ]

    def _reason(self, part: str, learned: Collection[str]) -> str:
        if not learned:
            return "the loss depends on nothing that is trained"
        if any(
            getattr(module, "gradient_checkpointing", False) and _is_reentrant(module)
            for module in self.model.modules()
        ):
            return (
                "reentrant gradient checkpointing may give it none behind frozen layers; set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        if part not in self._largest:
            return "the loss does not depend on it, because the model does not use it or something detaches it"
        return "all of its gradients are exactly 0, because what follows it in the model is 0 or does not depend on it"


def learn_behind_frozen(model: nn.Module) -> None:
    """Let reentrant checkpoints of any model of transformers give gradients where its embeddings are frozen."""
    module: Any
    for module in model.modules():
        if _is_reentrant(module):
            module._gradient_checkpointing_func = partial(checkpoint_layer, module, module._gradient_checkpointing_func)


def _is_reentrant(module: Any) -> bool:
    """Whether a module has reentrant checkpoints as transformers sets them; those of our own layers are not meant."""
    checkpoint = vars(module).get("_gradient_checkpointing_func")
    return checkpoint is not None and getattr(module, "gradient_checkpointing", False) and is_reentrant(checkpoint)


def parameter_parts(model: nn.Module) -> dict[str, str]:
    """The part of each parameter, by its name: "the backbone", "the head", an adapter, or a module of the prior."""
    # Those that a head is built on. Every other model of transformers names the module in which it holds such a one.
    backbones = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and module.base_model is module
    )

    def part(name: str) -> str:
        modules = name.split(".")
        if any(module.startswith("lora_") for module in modules):
            return "the low-rank adapter"
        if "decay_biases" in modules:
            return "the adapter's decay"
        if of_prior := [module for module in modules if module in PRIOR_MODULES]:
            return PARTS.get(of_prior[0], "the prior")
        if not backbones:
            return "the model"
        return "the backbone" if name.startswith(backbones) else "the head"

    return {name: part(name) for name, _ in model.named_parameters()}


def has_label(batch: Mapping[str, Any], ignored: Collection[int] = (-100,)) -> Tensor | bool | None:
    """Whether a batch holds a label that a loss counts, without waiting for its device; None if that is unknown.

    Args:
        batch: as models of transformers take it: `labels` are class indices of any shape, class probabilities (B,
            classes), or the objects of each image; `class_labels` are the classes of each image's objects.
        ignored: indices that the loss leaves out.
    """
    labels = batch.get("labels", batch.get("class_labels"))
    if isinstance(labels, (list, tuple)):
        objects = [each.get("class_labels") if isinstance(each, Mapping) else each for each in labels]
        tensors = [each for each in objects if isinstance(each, Tensor)]
        return any(len(each) > 0 for each in tensors) if len(tensors) == len(objects) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    counted = torch.ones_like(labels, dtype=torch.bool)
    for index in ignored:
        counted &= labels != index
    return counted.any()
