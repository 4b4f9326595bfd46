"""Additions to transformers' Trainer."""

from hf_sparseprior.training.progress import OneLineProgress
from hf_sparseprior.training.trainer import SparsePriorTrainer

__all__ = ["OneLineProgress", "SparsePriorTrainer"]
