"""Configurations and models of every family."""
