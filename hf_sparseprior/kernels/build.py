"""Compiling and loading the CPU kernels: once for each machine, source and torch, kept in the user's cache.

A library is loaded if it and its folder belong to the user, or to root, and if it has the SHA-256 that was written when
it was built and had run in a process of its own. Everything else is built again. A build that failed is remembered with
its reason, until `doctor` tries again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

logger = logging.getLogger("hf_sparseprior.kernels")

FOLDER = Path(__file__).parent
# The ones that take longest come first.
NAMES = ("diagonal", "operators", "decayed", "listed", "predicted", "weights")
SOURCES = tuple(FOLDER / f"{name}_cpu.cpp" for name in NAMES)
HEADERS = (FOLDER / "kernels.h", FOLDER / "vectors.h")
COMPILERS = ("g++", "clang++", "c++")
# The machine's own instructions, because the library never leaves it. No fast-math: -inf and the rounding of exp are
# needed.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas")
SECONDS = 900  # for all of a build
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# A small call of each operator.
TRIAL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
call, x, ones = torch.ops.hf_sparseprior, torch.ones(1, 1, 2, 4), torch.ones(1)
index = lambda *size: torch.zeros(size, dtype=torch.int32)
outs = [
    call.diagonal_forward(x, x, x, index(1), index(1) + 1, 0, 1.0, False, None, None, None, None, None, False)[0],
    call.decayed_forward(x, x, x, torch.zeros(1, 1, 2), -torch.ones(1, 1), ones, ones, 0, 1.0),
    call.listed_forward(x, x, x, index(1, 1, 2, 1), None, None, 0, 1.0),
]
assert all((out - 1).abs().max() < 1e-5 for out in outs)
assert call.pair_weights(x, index(1), index(1) + 1, index(1).long(), -torch.ones(1, 1), ones, 4).shape == (4,)
assert call.predicted_keys(x, torch.ones(4, 2), 0, 1, 0.0).shape == (1, 1, 2, 1)
"""

_state: dict[str, str | None] = {}  # "reason": why there are no kernels, None once they are loaded


def load() -> str | None:
    """Make the kernels' operators available. Compiles them at the first use on a machine.

    Returns:
        None, or the reason why there are none and what to do about it. A process finds out only once, and warns.
    """
    if "reason" not in _state:
        reason = _state["reason"] = _load()
        if reason:
            level = logging.INFO if os.environ.get("SPARSEPRIOR_KERNELS") == "0" else logging.WARNING
            logger.log(level, "no compiled CPU kernels, attention is slower without them: %s", reason)
    return _state["reason"]


def _load() -> str | None:
    if os.environ.get("SPARSEPRIOR_KERNELS") == "0":
        return "SPARSEPRIOR_KERNELS=0"
    if sys.platform not in ("linux", "darwin"):
        return f"it is not built on {sys.platform}"
    try:
        compiler = find_compiler()
        if compiler is None:
            return f"no C++ compiler ({', '.join(COMPILERS)}) is installed; on Debian and Ubuntu: apt-get install g++"
        library = library_path(compiler)
        if misfit(library) is not None:
            build(compiler, library)
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


# ---- which library --------------------------------------------------------------------------------------------------


def _words(variable: str) -> list[str]:
    """An environment variable as a shell would split it."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise RuntimeError(f"{variable}={value!r} cannot be split into words: {error}") from None


def find_compiler() -> list[str] | None:
    """The compiler as words of a command: $CXX ("ccache g++"), else the first of `COMPILERS` that is installed."""
    for words in [_words("CXX")] if _words("CXX") else [[name] for name in COMPILERS]:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
    return None


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_sparseprior" / "kernels"


def library_path(compiler: Sequence[str]) -> Path:
    """The compiled kernels of these sources, compiler, processor and torch."""
    said = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    version = said.decode("utf-8", "replace")
    sources = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
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


def command(compiler: Sequence[str]) -> list[str]:
    """The compiler's command line without input and output; $SPARSEPRIOR_CXXFLAGS adds to it and overrides it."""
    from torch.utils.cpp_extension import include_paths

    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    includes = [part for path in include_paths() for part in ("-isystem", path)]
    # at::parallel_for is a template around OpenMP's pragma: without the flag it runs on one thread.
    system = [] if sys.platform == "darwin" else ["-fopenmp"]
    return [*compiler, *FLAGS, native, *includes, *system, *_words("SPARSEPRIOR_CXXFLAGS")]


def _link_options() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    system = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return ["-shared", *(part for path in library_paths() for part in ("-L", path)), *system, "-ltorch_cpu", "-lc10"]


# ---- what is in the cache -------------------------------------------------------------------------------------------


def misfit(library: Path) -> str | None:
    """Why a library in the cache is not loaded; None if it is the one that was built there."""
    checksum = library.with_suffix(".sha256")
    try:
        for path in (library, checksum):
            status = path.lstat()
            owned = status.st_uid in (0, os.getuid()) and not status.st_mode & OTHERS_WRITE
            if not owned or not stat.S_ISREG(status.st_mode):
                return f"others than its owner can write {path}"
        if checksum.read_text(encoding="utf-8", errors="replace") != _sha256(library):
            return f"{library} has another checksum than when it was built"
    except FileNotFoundError:
        return "it is not built yet"
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _secure(folder: Path) -> None:
    """Make a folder of the cache that nobody else can write."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise RuntimeError(f"{folder} belongs to user {status.st_uid}; set XDG_CACHE_HOME to a folder of your own")
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)


def forget_failures() -> None:
    """Let builds that failed be tried again."""
    for path in cache_folder().glob("*.failed"):
        path.unlink(missing_ok=True)


# ---- building -------------------------------------------------------------------------------------------------------


def build(compiler: Sequence[str], library: Path) -> None:
    """Compile into the cache. Processes that start together wait for one of them.

    Raises:
        RuntimeError: with the compiler's first error.
    """
    _secure(library.parent.parent)
    _secure(library.parent)
    with open(library.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = misfit(library)
        if reason is None:
            return
        failed = library.with_suffix(".failed")
        if failed.is_file():
            said = failed.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{said} (`python -m hf_sparseprior doctor` tries again)")
        for scratch in library.parent.glob(f"{library.stem}.build-*"):  # of builds that were killed
            shutil.rmtree(scratch, ignore_errors=True)
        if library.exists() or library.is_symlink():
            logger.warning("%s; it is built again", reason)
        try:
            _build(compiler, library)
        except RuntimeError as error:
            failed.write_text(str(error), encoding="utf-8")
            raise


def _build(compiler: Sequence[str], library: Path) -> None:
    name = Path(compiler[0]).name
    logger.warning("compiling the CPU kernels with %s, once on this machine, less than a minute", name)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}.build-", dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        for _ in range(2):  # a library that crashes is built once more
            objects = [Path(scratch) / f"{source.stem}.o" for source in SOURCES]
            pairs = zip(SOURCES, objects, strict=True)
            _run(name, [[*command(compiler), "-c", str(source), "-o", str(to)] for source, to in pairs], start)
            link = [*command(compiler), *map(str, objects), "-o", str(output), *_link_options()]
            _run(name, [link], start)
            trial = subprocess.run([sys.executable, "-c", TRIAL, str(output)], capture_output=True, timeout=SECONDS)
            if trial.returncode == 0:
                break
        else:
            said = trial.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
            raise RuntimeError(f"the kernels that {name} built end with status {trial.returncode}: {said[-1]}")
        output.chmod(0o755)
        checksum = output.with_suffix(".sha256")
        checksum.write_text(_sha256(output), encoding="utf-8")
        checksum.chmod(0o644)
        os.replace(checksum, library.with_suffix(".sha256"))
        os.replace(output, library)
    logger.info("compiled in %.0f s: %s", time.perf_counter() - start, library)


def _run(name: str, commands: list[list[str]], start: float) -> None:
    """Run compilers side by side, each with all of its own processes in a group that ends with it."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in commands:
            running.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )  # fmt: skip
        for process in running:
            said = process.communicate(timeout=max(0.0, start + SECONDS - time.perf_counter()))[1]
            if process.returncode:
                lines = said.decode("utf-8", "replace").splitlines()
                errors = [line for line in lines if "error" in line] or ["unknown error"]
                # clang comes without OpenMP.
                hint = "; on Debian and Ubuntu: apt-get install libomp-dev" if "omp.h" in errors[0] else ""
                raise RuntimeError(f"{name} failed: {errors[0]}{hint}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
