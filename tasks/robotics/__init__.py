"""Diffusion policies that see through hf_sparseprior's models, and the simulators in which they act."""
