"""Compiled attention: C++ kernels for CPUs, built on the machine they run on, and Triton kernels for GPUs.

Nothing here imports anything else of this package: `compiled_kernels` of the core reaches it by a guarded import. A
saved model without the package runs the core's PyTorch paths.
"""

# Raised when a signature changes; `compiled_kernels.EXPECTED_VERSION` is what the core was written for.
API_VERSION = 1
