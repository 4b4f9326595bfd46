"""Compiling and loading the CPU kernels: once for each machine, source and torch, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

logger = logging.getLogger("hf_sparseprior.kernels")

FOLDER = Path(__file__).parent
SOURCES = tuple(
    FOLDER / name for name in ("diagonal_cpu.cpp", "decayed_cpu.cpp", "listed_cpu.cpp", "predicted_cpu.cpp")
)
COMPILERS = ("g++", "clang++", "c++")
# The machine's own instructions, because the library never leaves it. No fast-math: -inf and the rounding of exp are
# needed.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas")
SECONDS = 900

_state: dict[str, str | None] = {}  # "reason": why there are no kernels, None once they are loaded


def load() -> str | None:
    """Make the kernels' operators available. Compiles them at the first use on a machine.

    Returns:
        None, or the reason why there are none and what to do about it. A process finds out only once.
    """
    if "reason" not in _state:
        _state["reason"] = _load()
        if _state["reason"]:
            logger.info("no compiled CPU kernels: %s", _state["reason"])
    return _state["reason"]


def _load() -> str | None:
    if os.environ.get("SPARSEPRIOR_KERNELS") == "0":
        return "SPARSEPRIOR_KERNELS=0"
    if sys.platform not in ("linux", "darwin"):
        return f"it is not built on {sys.platform}"
    compiler = find_compiler()
    if compiler is None:
        return f"no C++ compiler ({', '.join(COMPILERS)}) is installed; on Debian and Ubuntu: apt-get install g++"
    try:
        library = library_path(compiler)
        if not library.is_file():
            build(compiler, library)
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def find_compiler() -> str | None:
    """Path of the compiler: $CXX, or else the first of `COMPILERS` that is installed."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    return next((path for name in candidates if (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_sparseprior" / "kernels"


def library_path(compiler: str) -> Path:
    """The file of the compiled kernels for these sources, compiler, processor and torch."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    sources = [path.read_text(encoding="utf-8") for path in (*SOURCES, FOLDER / "vectors.h")]
    parts = [*sources, version, torch.__version__, " ".join(command(compiler)), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"attention_cpu-{digest}.so"


def _processor() -> str:
    """What decides which instructions `native` means."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def command(compiler: str) -> list[str]:
    """The compiler's command line without input and output; $SPARSEPRIOR_CXXFLAGS adds to it and overrides it."""
    from torch.utils.cpp_extension import include_paths, library_paths

    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    includes = [part for path in include_paths() for part in ("-isystem", path)]
    libraries = [part for path in library_paths() for part in ("-L", path)]
    # at::parallel_for is a template around OpenMP's pragma; without the flag it runs on one thread.
    system = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    added = shlex.split(os.environ.get("SPARSEPRIOR_CXXFLAGS", ""))
    return [compiler, *FLAGS, native, *includes, *libraries, *system, *added]


def build(compiler: str, library: Path) -> None:
    """Compile into the cache. Processes that start together wait for one of them.

    Raises:
        RuntimeError: the message has the compiler's first error.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.is_file():
            return
        logger.warning("compiling the CPU kernels with %s, once on this machine, about a minute", Path(compiler).name)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            output = Path(scratch) / library.name
            process = subprocess.run(
                [*command(compiler), *map(str, SOURCES), "-o", str(output), "-ltorch_cpu", "-lc10"],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            if process.returncode:
                errors = [line for line in process.stderr.splitlines() if "error" in line] or ["unknown error"]
                # clang comes without OpenMP.
                hint = "; on Debian and Ubuntu: apt-get install libomp-dev" if "omp.h" in errors[0] else ""
                raise RuntimeError(f"{Path(compiler).name} failed: {errors[0]}{hint}")
            os.replace(output, library)
        logger.info("compiled in %.0f s: %s", time.perf_counter() - start, library)
