"""Measurements: python -m tasks.benchmark.<what>."""
