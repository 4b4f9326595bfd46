"""A Trainer that keeps the right parameters out of weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer


class SparsePriorTrainer(Trainer):
    """transformers' Trainer with the weight-decay groups of ViT recipes.

    No decay for parameters with one dimension (biases, norms, LayerScale, alpha) and for those that the model names in
    `no_weight_decay()` (beta, position embedding, prefix tokens), also below peft's wrappers.
    """

    def get_decay_parameter_names(self, model: nn.Module, *args: Any) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        exempt = {
            id(module.get_parameter(name))
            for module in model.modules()
            if callable(no_weight_decay := getattr(module, "no_weight_decay", None))
            for name in no_weight_decay()
        }
        return [
            name for name, parameter in model.named_parameters() if parameter.dim() > 1 and id(parameter) not in exempt
        ]
