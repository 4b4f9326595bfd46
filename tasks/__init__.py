"""Downstream tasks: each folder trains and evaluates hf_sparseprior's models in one framework."""
