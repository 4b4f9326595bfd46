"""Compiled attention: a C++ kernel for CPUs, built on the machine it runs on.

Nothing here imports anything else of this package, so that the core can reach it by a guarded import; a saved model
without the package runs the core's PyTorch paths.
"""

# What the core expects of this folder; a change of a signature raises it.
API_VERSION = 1
