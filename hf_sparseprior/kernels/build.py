"""Loading the CPU kernels: from the wheel, or compiled once for each machine and source and kept in the user's cache.

A wheel has a library for each of `VARIANTS`, compiled by setup.py. Without one that fits the processor the kernels are
compiled. A library of the cache is loaded if it and its checksum belong to the user, or to root, and if it has the
SHA-256 that was written when it was built and had run in a process of its own. Everything else is built again. A build
that failed is remembered with its reason, until `doctor` tries again; one that a full disk, too little memory or a
signal ended is tried again by the next process.

setup.py runs this file alone, without torch.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("hf_sparseprior.kernels")

FOLDER = Path(__file__).parent
# The ones that take longest come first.
ARITHMETIC = ("diagonal", "decayed", "listed", "predicted", "weights")
COMPILERS = ("g++", "clang++", "c++")
# No fast-math: -inf and the rounding of exp are needed.
# Libraries of several hosts may be in one process, so they show nothing of themselves but what a host asks for.
FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas"),
)
SECONDS = 900  # for all of a build
# What compilers and linkers print where the machine failed and not the sources.
PASSING = re.compile(
    "|".join(
        [r"\bsignal\b", r"\bkilled\b", "memory exhausted", "out of memory", "bad_alloc", "MemoryError"]
        + [re.escape(os.strerror(number)) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)]
        + [re.escape(os.strerror(number)) for number in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)]
    ),
    re.IGNORECASE,
)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
PREBUILT = FOLDER / "prebuilt"  # in a wheel
# Of a wheel's libraries, the best first: what /proc/cpuinfo has to name, and the compiler's flags.
V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
MACHINES: dict[str, dict[str, tuple[frozenset[str], tuple[str, ...]]]] = {
    "x86_64": {
        "avx512_bf16": (V4 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
        "avx512": (V4, ("-march=x86-64-v4",)),
        "avx2": (V3, ("-march=x86-64-v3",)),
    },
    "aarch64": {"neon": (frozenset({"asimd"}), ("-march=armv8-a",))},
}
VARIANTS = MACHINES.get(platform.machine(), {})
CHOICES = ("0", "compiled", *VARIANTS)  # of SPARSEPRIOR_KERNELS

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


REGISTERS = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).RegisterCustomOps"


def _torchs_library(compiler: Sequence[str], output: Path, start: float) -> list[str]:
    """What the linker needs for functions of torch, which are found when the library is loaded."""
    if sys.platform == "darwin":
        return ["-undefined", "dynamic_lookup"]
    # The library asks for libtorch_cpu, whose functions a process that has imported torch has. An empty one does to
    # link.
    stub = output.with_name("libtorch_cpu.so")
    words = ["-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libtorch_cpu.so", "-o", str(stub)]
    _run(Path(compiler[0]).name, [[*compiler, *words]], start, output.parent)
    return ["-Wl,--no-as-needed", "-L", str(stub.parent), "-ltorch_cpu"]


class Host(NamedTuple):
    """A program whose operators the kernels become, in a library of its own.

    title: for messages. file: begins the names of its libraries in the cache. own: sources and headers beside those of
    the arithmetic. trial: gives code that runs in a process of its own, with the library's path. links: gives what the
    linker needs, of compiler, output and the time at which the build began. flags: further words for the compiler.
    key: what else a library fits.
    """

    title: str
    file: str
    own: tuple[str, ...]
    trial: Callable[[], str]
    links: Callable[[Sequence[str], Path, float], list[str]] = lambda compiler, output, start: []
    flags: tuple[str, ...] = ()
    key: str = ""

    @property
    def sources(self) -> tuple[Path, ...]:
        """The ones that take longest come first."""
        own = tuple(name for name in self.own if name.endswith(".cpp"))
        arithmetic = [f"{name}_cpu.cpp" for name in ARITHMETIC]
        return tuple(FOLDER / name for name in (arithmetic[0], *own, *arithmetic[1:]))

    @property
    def headers(self) -> tuple[Path, ...]:
        """All that the sources include of these files."""
        own = tuple(name for name in self.own if name.endswith(".h"))
        return tuple(FOLDER / name for name in ("kernels.h", "vectors.h", "checks.h", "calls.h", *own))


TORCH = Host("CPU kernels", "attention_cpu", ("operators_cpu.cpp", "torch_abi.h"), lambda: TRIAL, _torchs_library)
PROGRAM = ("program_operators_cpu.cpp", "arrays.h", "program_operators.h")
ONNXRUNTIME = Host(
    "operators for ONNX Runtime", "onnxruntime_cpu", (*PROGRAM, "onnxruntime_cpu.cpp"), lambda: REGISTERS
)


class PassingFailure(RuntimeError):
    """A build that failed for a reason that may be gone at the next one, such as a full disk."""


# "reason": why there are no kernels, None once they are loaded; "library": where they were loaded from.
_state: dict[str, str | None] = {}


def load() -> str | None:
    """Make the kernels' operators available. Those that are not prebuilt are compiled at the first use on a machine.

    Returns:
        None, or the reason why there are none and what to do about it. A process finds out only once, and warns.
    """
    if "reason" not in _state:
        reason = _state["reason"] = _load()
        if reason:
            level = logging.INFO if os.environ.get("SPARSEPRIOR_KERNELS") == "0" else logging.WARNING
            logger.log(level, "no compiled CPU kernels, attention is slower without them: %s", reason)
    return _state["reason"]


def loaded_library() -> Path | None:
    """The file that the operators come from; None if there are none."""
    library = _state.get("library")
    return None if library is None else Path(library)


def _load() -> str | None:
    choice = os.environ.get("SPARSEPRIOR_KERNELS") or None
    if choice == "0":
        return "SPARSEPRIOR_KERNELS=0"
    if choice is not None and choice not in CHOICES:
        return f"SPARSEPRIOR_KERNELS={choice!r} must be one of {', '.join(CHOICES)}"
    try:
        library = prebuilt_library(choice)
        try:
            _open(library or compiled_library())
        except OSError as error:  # of a wheel for a newer system
            if library is None or choice is not None:
                raise
            logger.info("%s cannot be loaded (%s); the kernels are compiled instead", library, error)
            _open(compiled_library())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def _open(library: Path) -> None:
    """Load a library, which makes its operators torch's."""
    import torch

    torch.ops.load_library(str(library))
    _state["library"] = str(library)


# ---- which library --------------------------------------------------------------------------------------------------


def prebuilt_file(variant: str, host: Host = TORCH) -> str:
    """The name of a wheel's library."""
    return f"{variant}.so" if host is TORCH else f"{host.file}-{variant}.so"


def prebuilt_library(choice: str | None = None, host: Host = TORCH) -> Path | None:
    """The best of a wheel's libraries that this processor runs, or the one of this name; None: compile.

    Raises:
        RuntimeError: for a name that the wheel does not have, or that this processor does not run.
    """
    if choice == "compiled":
        return None
    features = set(_processor().split())
    for name, (needed, _) in VARIANTS.items():
        library = PREBUILT / prebuilt_file(name, host)
        if choice in (None, name) and library.is_file() and needed <= features:
            return library
    if choice is not None:
        why = (
            "this processor has not all of its instructions"
            if (PREBUILT / prebuilt_file(choice, host)).is_file()
            else "it is not there"
        )
        raise RuntimeError(f"SPARSEPRIOR_KERNELS={choice}: {why}")
    return None


def compiled_library(host: Host = TORCH) -> Path:
    """The library that is compiled on this machine, compiled now if it is not there.

    Raises:
        RuntimeError: on other systems than Linux and macOS, if there is no compiler, or if it fails.
    """
    if sys.platform not in ("linux", "darwin"):
        raise RuntimeError(f"they are not built on {sys.platform}")
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(
            f"no C++ compiler ({', '.join(COMPILERS)}) is installed; on Debian and Ubuntu: apt-get install g++"
        )
    library = library_path(compiler, host)
    if misfit(library) is not None:
        build(compiler, library, host)
    return library


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


def library_path(compiler: Sequence[str], host: Host = TORCH) -> Path:
    """The compiled kernels of these sources, compiler and processor, for every torch, or every release of a host."""
    said = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    version = said.decode("utf-8", "replace")
    sources = [path.read_text(encoding="utf-8") for path in (*host.sources, *host.headers)]
    parts = [*sources, version, " ".join(command(compiler)), *host.flags, host.key, _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"{host.file}-{digest}.so"


def _processor() -> str:
    """What decides which instructions `native` means."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def command(compiler: Sequence[str], flags: Sequence[str] | None = None) -> list[str]:
    """The compiler's command line without input and output; $SPARSEPRIOR_CXXFLAGS adds to it and overrides it.

    Args:
        compiler: as of `find_compiler`.
        flags: for which processor; default this machine's, because a library of the cache never leaves it.
    """
    if flags is None:
        flags = ["-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"]
    return [*compiler, *FLAGS, *flags, *_words("SPARSEPRIOR_CXXFLAGS")]


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


def build(compiler: Sequence[str], library: Path, host: Host = TORCH) -> None:
    """Compile into the cache. Processes that start together wait for one of them.

    Raises:
        RuntimeError: with the compiler's first error.
    """
    import fcntl  # which Windows does not have, where nothing is built

    _secure(library.parent.parent)
    _secure(library.parent)
    with open(library.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = misfit(library)
        if reason is None:
            return
        failed = library.with_suffix(".failed")
        if failed.is_file() and (said := failed.read_text(encoding="utf-8", errors="replace").strip()):
            raise RuntimeError(f"{said} (`python -m hf_sparseprior doctor` tries again)")
        for scratch in library.parent.glob(f"{library.stem}.build-*"):  # of builds that were killed
            shutil.rmtree(scratch, ignore_errors=True)
        if library.exists() or library.is_symlink():
            logger.warning("%s; it is built again", reason)
        try:
            _build(compiler, library, host)
        except PassingFailure:
            raise
        except RuntimeError as error:
            _remember(failed, str(error))
            raise


def _remember(failed: Path, said: str) -> None:
    """Write why a build failed, whole or not at all; if not at all, the next process builds again."""
    scratch = failed.with_suffix(".partial")
    try:
        scratch.write_text(said, encoding="utf-8")
        os.replace(scratch, failed)
    except OSError:
        scratch.unlink(missing_ok=True)


def _build(compiler: Sequence[str], library: Path, host: Host) -> None:
    name = Path(compiler[0]).name
    logger.warning("compiling the %s with %s, once on this machine, less than a minute", host.title, name)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}.build-", dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        for _ in range(2):  # a library that crashes is built once more
            compile_library(compiler, output, start=start, host=host)
            trial = subprocess.run(
                [sys.executable, "-c", host.trial(), str(output)], capture_output=True, timeout=SECONDS
            )
            if trial.returncode == 0:
                break
        else:
            said = trial.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
            passing = trial.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT) or PASSING.search(said[-1])
            raise (PassingFailure if passing else RuntimeError)(
                f"the kernels that {name} built end with status {trial.returncode}: {said[-1]}"
            )
        output.chmod(0o755)
        checksum = output.with_suffix(".sha256")
        checksum.write_text(_sha256(output), encoding="utf-8")
        checksum.chmod(0o644)
        os.replace(checksum, library.with_suffix(".sha256"))
        os.replace(output, library)
    logger.info("compiled in %.0f s: %s", time.perf_counter() - start, library)


def compile_library(
    compiler: Sequence[str],
    output: Path,
    flags: Sequence[str] | None = None,
    start: float | None = None,
    host: Host = TORCH,
) -> None:
    """Compile a host's sources side by side and link them.

    Args:
        compiler, flags: as of `command`.
        output: the library; intermediate files lie next to it, also those of a compiler that is killed.
        start: when the build began, for its limit; default now.

    Raises:
        RuntimeError: with the compiler's first error.
    """
    name, words = Path(compiler[0]).name, [*command(compiler, flags), *host.flags]
    start = time.perf_counter() if start is None else start
    objects = [output.with_name(f"{output.stem}-{source.stem}.o") for source in host.sources]
    pairs = zip(host.sources, objects, strict=True)
    _run(name, [[*words, "-c", str(source), "-o", str(to)] for source, to in pairs], start, output.parent)
    links = host.links(compiler, output, start)
    _run(name, [[*words, "-shared", *map(str, objects), "-o", str(output), *links]], start, output.parent)
    for path in objects:
        path.unlink()


def _run(name: str, commands: list[list[str]], start: float, scratch: Path) -> None:
    """Run compilers side by side, each with all of its own processes in a group that ends with it.

    `scratch` is where they put their intermediate files, which one that is killed leaves.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in commands:
            running.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    start_new_session=True, env={**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)},
                )
            )  # fmt: skip
        for process in running:
            said = process.communicate(timeout=max(0.0, start + SECONDS - time.perf_counter()))[1]
            if process.returncode:
                raise _failure(name, process.returncode, said.decode("utf-8", "replace").splitlines())
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _failure(name: str, status: int, lines: list[str]) -> RuntimeError:
    """The error of a compiler that ended with a status other than 0 and printed these lines."""
    passing = [line for line in lines if PASSING.search(line)]
    # Not the line in which a compiler says that its linker, which said why, failed.
    errors = [line for line in lines if "error" in line and not re.search("ld returned [0-9]+ exit status", line)]
    said = next(iter([*passing, *errors, *lines]), "no message")
    if status < 0:
        return PassingFailure(f"{name} was ended by signal {-status}: {said}")
    known = errors or any("ld: " in line for line in lines)
    return (PassingFailure if passing or not known else RuntimeError)(f"{name} failed: {said}")
