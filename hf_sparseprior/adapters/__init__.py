"""Adapters by peft, which is imported only where it is used."""

from hf_sparseprior.adapters.lora import lora_config

__all__ = ["lora_config"]
