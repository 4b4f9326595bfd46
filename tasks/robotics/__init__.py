"""Diffusion policies that see through hf_sparseprior's models, and the simulators in which they act.

Importing this makes `gymnasium.make("sparseprior/PushT-v0")` work, see `gymnasium_env`.
"""

from tasks.robotics.registration import register_environments

register_environments()
