"""Additions to transformers' Trainer that the recipes of vision transformers need."""

from hf_sparseprior.training.arguments import SparsePriorTrainingArguments
from hf_sparseprior.training.distillation import (
    LOSSES,
    Distillation,
    Teacher,
    attention_loss,
    class_loss,
    register_loss,
    token_loss,
)
from hf_sparseprior.training.ema import WeightAverage
from hf_sparseprior.training.layer_decay import layer_depths, parameter_groups
from hf_sparseprior.training.mixing import Mixing, SoftTargetCollator
from hf_sparseprior.training.progress import OneLineProgress
from hf_sparseprior.training.sampling import Draw, DrawSampler
from hf_sparseprior.training.stopping import StopOnSignal, StopRequest
from hf_sparseprior.training.token_labels import LabelMaps, MapHeader, token_label_loss, token_targets, write_label_maps
from hf_sparseprior.training.trainer import SparsePriorTrainer, soft_target_loss

__all__ = [
    "LOSSES",
    "Distillation",
    "Draw",
    "DrawSampler",
    "LabelMaps",
    "MapHeader",
    "Mixing",
    "OneLineProgress",
    "SoftTargetCollator",
    "SparsePriorTrainer",
    "SparsePriorTrainingArguments",
    "StopOnSignal",
    "StopRequest",
    "Teacher",
    "WeightAverage",
    "attention_loss",
    "class_loss",
    "layer_depths",
    "parameter_groups",
    "register_loss",
    "soft_target_loss",
    "token_label_loss",
    "token_loss",
    "token_targets",
    "write_label_maps",
]
