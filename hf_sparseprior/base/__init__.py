"""Checks, limits, registries and files: what every other package uses."""
