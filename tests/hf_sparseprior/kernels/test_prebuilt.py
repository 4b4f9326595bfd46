"""Libraries of a wheel: which one a processor gets, and that each gives what the one compiled here gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_sparseprior.kernels import build

ROOT = Path(__file__).parents[3]
V3 = "flags : fpu avx2 bmi1 bmi2 f16c fma movbe sse2"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel's folder with all libraries, which are empty files."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    for name in build.VARIANTS:
        (tmp_path / f"{name}.so").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{V4} avx512_bf16", "avx512_bf16"),
        (V4, "avx512"),
        (V4.replace("avx512vl", ""), "avx2"),  # Xeon Phi
        (V3, "avx2"),
        (V3.replace("fma", ""), None),
        ("x86_64", None),
    ],
)
def test_a_processor_gets_the_best_that_it_runs(wheel, monkeypatch, flags, expected):
    monkeypatch.setattr(build, "_processor", lambda: flags)
    found = build.prebuilt_library()
    assert found == (None if expected is None else wheel / f"{expected}.so")
    assert build.prebuilt_library("compiled") is None


def test_without_a_wheels_libraries_there_is_nothing_to_load(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    assert build.prebuilt_library() is None
    with pytest.raises(RuntimeError, match="SPARSEPRIOR_KERNELS=avx2: it is not there"):
        build.prebuilt_library("avx2")


def test_one_can_be_chosen_if_the_processor_runs_it(wheel, monkeypatch):
    monkeypatch.setattr(build, "_processor", lambda: V4)
    assert build.prebuilt_library("avx2") == wheel / "avx2.so"
    with pytest.raises(RuntimeError, match="SPARSEPRIOR_KERNELS=avx512_bf16: this processor has not all"):
        build.prebuilt_library("avx512_bf16")


def test_one_that_cannot_be_loaded_is_compiled_unless_it_was_chosen(cpp, wheel, monkeypatch):
    own = build.loaded_library()
    assert own is not None
    monkeypatch.setattr(build, "_processor", lambda: V3)
    monkeypatch.setattr(build, "compiled_library", lambda: own)
    monkeypatch.setattr(build, "_state", {})
    assert build._load() is None and build.loaded_library() == own
    monkeypatch.setenv("SPARSEPRIOR_KERNELS", "avx2")
    monkeypatch.setattr(build, "_state", {})
    assert "avx2.so" in build._load() and build.loaded_library() is None


def test_an_unknown_choice_is_named(monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_KERNELS", "sse2")
    assert build._load() == "SPARSEPRIOR_KERNELS='sse2' must be one of 0, compiled, avx512_bf16, avx512, avx2"


CALLS = """
import json, torch
import hf_sparseprior as sp
from hf_sparseprior.kernels import diagonal_cpu
assert diagonal_cpu.ready() is None, diagonal_cpu.ready()
torch.manual_seed(0)
outs = {}
for dtype in (torch.float32, torch.bfloat16):
    q, k, v = (torch.randn(2, 3, 37, 24).to(dtype).requires_grad_() for _ in range(3))
    for support in ("fibottention", "bigbird"):
        out = sp.ops.attention(q, k, v, support, num_prefix_tokens=1, grid=(6, 6), backend="cpp")
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        outs[f"{support} {dtype}"] = [x.float().tolist() for x in (out.detach(), *gradients)]
print(json.dumps([str(build.loaded_library()), outs]))
"""


def called(prebuilt, choice):
    """What a process computes with a library."""
    lines = ["from pathlib import Path", "from hf_sparseprior.kernels import build"]
    code = "\n".join([*lines, f"build.PREBUILT = Path({str(prebuilt)!r})", CALLS])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARSEPRIOR_KERNELS": choice}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_wheels_library_gives_what_the_compiled_one_gives(cpp, tmp_path):
    """Of the variants that this processor runs, the one that differs most from its own instructions: the last."""
    runs = [name for name, (needed, _) in build.VARIANTS.items() if needed <= set(build._processor().split())]
    if not runs:
        pytest.skip("wheels have no library for this processor")
    name = runs[-1]
    build.compile_library(build.find_compiler(), tmp_path / f"{name}.so", build.VARIANTS[name][1])
    library, found = called(tmp_path, name)
    assert library == str(tmp_path / f"{name}.so")
    library, expected = called(tmp_path, "compiled")
    assert library == str(build.library_path(build.find_compiler())) and found.keys() == expected.keys()
    assert len(found) == 4
    for case, tensors in expected.items():
        tolerance = 1e-5 if "float32" in case else 2e-2
        for one, other in zip(found[case], tensors, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_library_names_no_version_of_torch(cpp):
    """It needs libtorch_cpu and the system's libraries, and of torch the symbols of the stable interface alone."""
    library = str(build.loaded_library())
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].rstrip("]\n ") for line in needed.splitlines() if "(NEEDED)" in line}
    assert "libtorch_cpu.so" in libraries
    assert {name.split(".so")[0] for name in libraries} <= {
        "libtorch_cpu",
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-x86-64",
    }
    symbols = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], capture_output=True, text=True, check=True
    ).stdout
    undefined = {line.split()[-1] for line in symbols.splitlines() if " UND " in line}
    torchs = {name for name in undefined if "torch" in name or "c10" in name or name[:2] == "at"}
    assert torchs and all(name.startswith(("aoti_torch_", "torch_")) for name in torchs if "@" not in name), torchs
