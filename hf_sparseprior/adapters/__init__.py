"""Priors on models that were made without them: stock transformers models, and peft."""
