"""Libraries of a wheel: which one a processor gets, and that each equals the reference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_processor_gets_the_best_that_it_runs(wheel, monkeypatch):
    for flags, expected in (
        (f"{V4} avx512_bf16", "avx512_bf16"),
        (V4, "avx512"),
        (V4.replace("avx512vl", ""), "avx2"),  # Xeon Phi
        (V3, "avx2"),
        (V3.replace("fma", ""), None),
        ("x86_64", None),
    ):
        monkeypatch.setattr(build, "_processor", lambda flags=flags: flags)
        found = build.prebuilt_library()
        assert found == (None if expected is None else wheel / f"{expected}.so"), flags
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


RUNS = [name for name, (needed, _) in build.VARIANTS.items() if needed <= set(build._processor().split())]
# pytest, where the kernels come from the wheel's libraries in a folder; which one was loaded is the last line.
PYTEST = """
import sys
from pathlib import Path
import pytest

class Wheel:
    def pytest_sessionstart(self):
        from hf_sparseprior.kernels import build

        build.PREBUILT = Path(sys.argv[1])

status = pytest.main(sys.argv[2:], plugins=[Wheel()])
from hf_sparseprior.kernels import build
print(build.loaded_library())
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS[1:] or RUNS)  # the first has the instructions of the library compiled here
def test_a_wheels_library_equals_the_reference(tmp_path, monkeypatch, name):
    """Compiled as for a wheel, but into the cache, and run by tests of each kernel in a process of its own."""
    if build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    with monkeypatch.context() as patch:
        patch.setenv("SPARSEPRIOR_CXXFLAGS", " ".join(build.VARIANTS[name][1]))
        shutil.copy(build.compiled_library(), tmp_path / f"{name}.so")
    command = [sys.executable, "-c", PYTEST, str(tmp_path), "-q", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).with_name(file)) for file in ("test_diagonal_cpu.py", "test_every_cpu_kernel.py")]
    command += ["-k", "several_pieces or rounded or any_head_width or extreme_logits"]
    environment = {**os.environ, "SPARSEPRIOR_KERNELS": name, "CI_NEEDS_KERNELS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and " passed" in process.stdout and "skipped" not in process.stdout, process.stdout
    assert process.stdout.splitlines()[-1] == str(tmp_path / f"{name}.so")


@pytest.mark.slow
def test_a_library_names_no_version_of_torch(cpp):
    """It needs libtorch_cpu and the system's libraries, and of torch the symbols of the stable interface alone."""
    library = str(build.loaded_library())
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].rstrip("]\n ") for line in needed.splitlines() if "(NEEDED)" in line}
    assert "libtorch_cpu.so" in libraries
    system = {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}
    assert {name.split(".so")[0] for name in libraries} <= {"libtorch_cpu", *system}
    command = ["readelf", "-W", "--dyn-syms", library]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1] for line in symbols.splitlines() if " UND " in line}
    torchs = {name for name in undefined if "torch" in name or "c10" in name or name[:2] == "at"}
    assert torchs and all(name.startswith(("aoti_torch_", "torch_")) for name in torchs if "@" not in name), torchs
