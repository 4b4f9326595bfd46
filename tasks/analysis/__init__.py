"""Numbers and pictures of models and mechanisms: python -m tasks.analysis.<what>."""
