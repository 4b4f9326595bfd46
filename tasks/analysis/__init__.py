"""Numbers about models and mechanisms that need no training: python -m tasks.analysis.<what>."""
