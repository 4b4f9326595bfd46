"""Compiled attention: C++ kernels for CPUs, built into wheels or where they run, and Triton kernels for GPUs.

Nothing here imports another part of this package. `compiled_kernels` imports the kernels if the package is installed. A
saved model without the package runs on the backends of plain PyTorch.
"""

# Raised when a signature changes. `compiled_kernels.EXPECTED_VERSION` is the version that its callers were written for.
API_VERSION = 1
