import shutil
from importlib import import_module

import pytest
import torch

from hf_sparseprior import kernels
from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.attention import functional as ops
from hf_sparseprior.kernels import diagonal_cpu

MODULES = ("decayed_cpu", "diagonal_cpu", "listed_cpu", "predicted_cpu", "triton_device")


def test_the_core_reaches_the_kernels_and_expects_their_interface():
    # A guarded import that failed would silently leave everything slow.
    assert compiled_kernels.kernels_missing() is None
    for name in MODULES:
        assert getattr(compiled_kernels, name) is import_module(f"hf_sparseprior.kernels.{name}")
    assert compiled_kernels.EXPECTED_VERSION == compiled_kernels.INSTALLED_VERSION == kernels.API_VERSION


def test_a_machine_with_a_compiler_has_kernels():
    assert shutil.which("g++") is None or diagonal_cpu.ready() is None


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "the package hf_sparseprior is not installed, its kernels are not part of a saved model"),
        (kernels.API_VERSION + 1, "the installed kernels have interface 2, this code needs 1"),
    ],
)
def test_kernels_that_are_missing_or_of_another_version_are_not_called(monkeypatch, backend, installed, reason):
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", installed)
    x = torch.zeros(1, 2, 16, 4)
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot run this attention: {reason}"):
        ops.attention(x, x, x, "fibottention", backend=backend)
