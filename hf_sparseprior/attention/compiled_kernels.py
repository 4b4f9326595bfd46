"""The package's compiled kernels, for the files that a saved model carries. They are None without the package."""

from __future__ import annotations

from hf_sparseprior.attention.plain_operations import plain

try:
    from hf_sparseprior.kernels import API_VERSION as INSTALLED_VERSION
    from hf_sparseprior.kernels import decayed_cpu, diagonal_cpu, listed_cpu, predicted_cpu, triton_device, weights_cpu
except ImportError:
    INSTALLED_VERSION = None  # type: ignore[assignment]
    decayed_cpu = diagonal_cpu = listed_cpu = predicted_cpu = triton_device = None  # type: ignore[assignment]
    weights_cpu = None  # type: ignore[assignment]

# The kernels' interface that this code was written for. The installed package may have another version than a saved
# model.
EXPECTED_VERSION = 1


def kernels_missing() -> str | None:
    """Why the compiled kernels cannot be called, None if they can."""
    if plain() is not None:
        return "the graph is for programs that do not know the compiled kernels"
    if INSTALLED_VERSION is None:
        return "the package hf_sparseprior is not installed, its kernels are not part of a saved model"
    if INSTALLED_VERSION != EXPECTED_VERSION:
        return f"the installed kernels have interface {INSTALLED_VERSION}, this code needs {EXPECTED_VERSION}"
    return None
