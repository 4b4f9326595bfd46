"""What `doctor` says, with and without what it looks for."""

import shutil

import pytest

from hf_sparseprior import doctor
from hf_sparseprior.kernels import build, diagonal_cpu


def test_with_a_compiler():
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)
    lines = list(doctor.report())
    assert any(line.startswith("ok       compiled CPU kernels") for line in lines)
    assert sum("kernel against the reference" in line for line in lines) == 3
    assert not any(line.startswith("WRONG") for line in lines)


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_state", {})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (line,) = (line for line in doctor.report() if "compiled CPU kernels" in line)
    assert line.startswith("missing") and "apt-get install g++" in line


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(diagonal_cpu, "ready", lambda: None)
    monkeypatch.setattr(doctor, "kernel_errors", lambda: {"diagonals": 0.5, "decay": 1e-7})
    lines = list(doctor.report())
    assert lines[-2].startswith("WRONG    kernel against the reference, diagonals") and lines[-1].startswith("ok ")


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": ("nothing", ".[none]")})
    assert "missing  no-such-package (nothing): pip install '.[none]'" in list(doctor.report())
