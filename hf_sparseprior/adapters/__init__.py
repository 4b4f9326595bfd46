"""Priors on models that were made without one: stock transformers models, and adapters of peft, imported on use."""

from hf_sparseprior.adapters.lora import lora_config

__all__ = ["lora_config"]
