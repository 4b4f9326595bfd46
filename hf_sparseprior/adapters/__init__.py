"""Priors on models that were made without them: stock transformers models, and peft, imported only where it is used."""

from hf_sparseprior.adapters.lora import lora_config

__all__ = ["lora_config"]
