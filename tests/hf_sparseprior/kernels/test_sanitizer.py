"""The C++ kernels under GCC's address and undefined behaviour sanitizers, in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def runtime():
    """What has to be loaded before everything else: the sanitizer, and the C++ library whose exceptions it follows."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    commands = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    paths = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in commands]
    return paths if all(map(os.path.isabs, paths)) else None


@pytest.mark.slow
def test_no_memory_error_in_a_random_sweep():
    libraries = runtime()
    if libraries is None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), "g++ with libasan is not installed"
        pytest.skip("g++ with libasan is not installed; on Debian and Ubuntu: apt-get install g++")
    folder = Path(__file__).parent
    environment = {
        "CXX": "env -u LD_PRELOAD g++",  # the compiler itself is not what is tested
        "SPARSEPRIOR_CXXFLAGS": FLAGS,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(folder.parents[2]),
    }
    process = subprocess.run(
        [sys.executable, str(folder / "sweep.py"), "120"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and process.stdout.endswith("120 calls\n"), process.stderr[-4000:]
