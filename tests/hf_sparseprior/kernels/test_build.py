"""Building the C++ kernels, and what is loaded from the cache."""

import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_sparseprior.kernels import build
from tests.processes import wait_until

WITHOUT_A_COMPILER = """
import torch
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.kernels import diagonal_cpu
print(diagonal_cpu.ready())
x = torch.randn(1, 2, 401, 8)
print(attention(x, x, x, "fibottention", num_prefix_tokens=1).shape)
"""


@pytest.mark.slow
def test_without_a_compiler_everything_still_runs_and_says_why(tmp_path, in_a_process):
    said = in_a_process(WITHOUT_A_COMPILER, PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert "no C++ compiler" in said and "401" in said


def test_a_built_kernel_is_not_built_again(cpp, caplog):
    compiler = build.find_compiler()
    assert compiler is not None
    library = build.library_path(compiler)
    assert library.is_file()
    stamp = library.stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        build.build(compiler, library)
    assert library.stat().st_mtime_ns == stamp and not caplog.records


COMPILATIONS = len(build.TORCH.sources) + (
    2 if sys.platform == "linux" else 1
)  # the library, and what stands for libtorch

# ---- a compiler of a few lines of shell ------------------------------------------------------------------------------

FAKE = """#!/bin/sh
case "$*" in *--version*) printf 'fake \\351\\n'; exit 0;; esac
echo "$*" >> {log}
{more}
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Installs a compiler that does `more`; gives the library that it would build, and the log of its calls."""

    def install(more="", trial="pass", cxx="{}"):
        compiler, log = tmp_path / "g++", tmp_path / "log"
        compiler.write_text(FAKE.format(log=log, more=more))
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", cxx.format(compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(build, "TRIAL", trial)
        return build.library_path(build.find_compiler()), log

    return install


def calls(log):
    return len(log.read_text().splitlines())


@pytest.mark.parametrize("cxx", ["{}", "env A=1 {}"])
def test_sources_are_compiled_one_by_one_and_linked(fake, cxx):
    library, log = fake(cxx=cxx)  # its version is no UTF-8
    build.build(build.find_compiler(), library)
    assert build.misfit(library) is None and calls(log) == COMPILATIONS
    assert not list(library.parent.glob("*.build-*"))


def test_words_that_no_shell_would_split_are_one_line(fake, monkeypatch):
    fake()
    for variable in ("SPARSEPRIOR_CXXFLAGS", "CXX"):
        monkeypatch.setenv(variable, "g++ 'open")
        assert build._load() == f'{variable}="g++ \'open" cannot be split into words: No closing quotation'


def damage(library):
    library.write_bytes(b"damaged")


def plant(library):
    library.chmod(0o777)


def forget(library):
    library.with_suffix(".sha256").unlink()


@pytest.mark.parametrize("change", [damage, plant, forget])
def test_what_is_not_as_it_was_built_is_built_again(fake, caplog, change):
    library, log = fake()
    build.build(build.find_compiler(), library)
    change(library)
    assert build.misfit(library) is not None
    build.build(build.find_compiler(), library)
    assert build.misfit(library) is None and library.read_text() == "compiled\n"
    assert calls(log) == 2 * COMPILATIONS
    assert sum("it is built again" in record.message for record in caplog.records) == 1


def test_folders_that_others_can_write_are_closed_to_them(fake):
    library, _ = fake()
    library.parent.mkdir(parents=True)
    library.parent.chmod(0o777)
    build.build(build.find_compiler(), library)
    assert not library.parent.stat().st_mode & build.OTHERS_WRITE


def test_a_folder_of_another_user_is_refused(fake, monkeypatch):
    library, log = fake()
    library.parent.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if os.geteuid() == 0:  # to whom all folders of root are his own
        os.chown(library.parent, 54321, -1)
    with pytest.raises(RuntimeError, match=r"belongs to user \d+; set XDG_CACHE_HOME"):
        build.build(build.find_compiler(), library)
    assert not log.exists()


def test_kernels_that_crash_are_built_twice_and_refused_once_and_for_all(fake, caplog):
    library, log = fake(trial="import os; os.abort()")
    for _ in range(2):
        build._state.pop("reason", None)
        with pytest.raises(RuntimeError, match=f"g.. built end with status -{signal.SIGABRT:d}"):
            build.build(build.find_compiler(), library)
    assert calls(log) == 2 * COMPILATIONS and not library.exists()


def test_a_build_that_failed_is_remembered_until_doctor_forgets_it(fake, monkeypatch, caplog):
    library, log = fake(more='echo "x.cpp:1: error: no" >&2; exit 1')
    monkeypatch.setattr(build, "_state", {})
    assert "g++ failed: x.cpp:1: error: no" in build.load()
    assert not list(library.parent.rglob("*.so"))
    first = calls(log)
    assert [record.levelno for record in caplog.records if "slower without" in record.message] == [logging.WARNING]
    assert build.load() and sum("slower without" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(build, "_state", {})
    assert "doctor` tries again" in build.load() and calls(log) == first
    build.forget_failures()
    monkeypatch.setattr(build, "_state", {})
    build.load()
    assert calls(log) > first


PASSING = {
    "full disk": ("echo 'ld: final link failed: No space left on device' >&2; exit 1", "pass", "No space left"),
    "no reason": ("echo 'collect2: error: ld returned 1 exit status' >&2; exit 1", "pass", "g.. failed: collect2"),
    "nothing said": ("exit 1", "pass", "g.. failed: no message"),
    "killed": ("kill -KILL $$", "pass", f"g.. was ended by signal {signal.SIGKILL:d}"),
    "driver": ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "pass", "Killed"),
    "trial": ("", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", f"status -{signal.SIGKILL:d}"),
}


@pytest.mark.parametrize(("more", "trial", "said"), PASSING.values(), ids=PASSING)
def test_a_build_that_the_machine_ended_is_tried_again(fake, more, trial, said):
    library, log = fake(more, trial)
    with pytest.raises(RuntimeError, match=said):
        build.build(build.find_compiler(), library)
    assert not list(library.parent.glob("*.failed"))
    log.unlink(missing_ok=True)
    fake()  # the same compiler by its version
    build.build(build.find_compiler(), library)
    assert build.misfit(library) is None


def test_a_reason_that_could_not_be_written_is_not_remembered(fake, monkeypatch):
    library, _ = fake(more='echo "x.cpp:1: error: no" >&2; exit 1')
    with monkeypatch.context() as full:
        full.setattr(build.os, "replace", lambda *paths: os.open("/nowhere/full", os.O_RDONLY))
        with pytest.raises(RuntimeError, match=r"x\.cpp:1: error: no$"):
            build.build(build.find_compiler(), library)
    assert [path.suffix for path in library.parent.iterdir()] == [".lock"]
    library.with_suffix(".failed").touch()  # as earlier versions left it on a full disk
    fake()
    build.build(build.find_compiler(), library)
    assert build.misfit(library) is None


def test_a_compiler_that_takes_too_long_is_ended_with_all_its_processes(fake, monkeypatch, tmp_path):
    pids = tmp_path / "pids"
    pids.touch()
    library, _ = fake(more=f"sleep 1000 & echo $! >> {pids}; wait")

    times = itertools.count()

    def clock():
        """A second more at each look; at the second one all compilers have a process of their own."""
        if seconds := next(times):
            wait_until(lambda: len(pids.read_text().splitlines()) == len(build.TORCH.sources))
        return seconds

    monkeypatch.setattr(build, "SECONDS", 0.5)
    monkeypatch.setattr(build, "time", SimpleNamespace(perf_counter=clock))
    with pytest.raises(RuntimeError, match=r"g\+\+ took more than 0.5 s"):
        build.build(build.find_compiler(), library)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == len(build.TORCH.sources)
    wait_until(lambda: not any(runs(pid) for pid in started), seconds=60)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_killed_build_left_goes_with_the_next_one(fake):
    library, _ = fake()
    left = library.parent / f"{library.stem}.build-old"
    left.mkdir(parents=True)
    (left / "a.o").write_text("half")
    build.build(build.find_compiler(), library)
    assert not left.exists()


def test_the_trial_runs_every_operator(cpp):
    library = build.library_path(build.find_compiler())
    subprocess.run([sys.executable, "-c", build.TRIAL, str(library)], check=True)
    for name in ("diagonal_forward", "decayed_forward", "listed_forward", "predicted_keys"):
        assert f"call.{name}(" in build.TRIAL


def test_the_kernels_do_not_know_torch(tmp_path):
    """The kernels compile without torch's headers, and run under a program that lends them no threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), "g++ is not installed"
        pytest.skip("g++ is not installed")
    sources = [build.FOLDER / f"{name}_cpu.cpp" for name in build.ARITHMETIC]
    headers = [path for path in build.TORCH.headers if path.name != "torch_abi.h"]
    assert len(sources) == 5 and len(headers) == 4
    for path in (*sources, *headers):
        assert not re.search("torch|ATen|at::", re.sub("//.*", "", path.read_text())), path
    (tmp_path / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-O0", "-std=c++20", "-march=native", "-Wno-psabi", "-Wno-unknown-pragmas"]
    command += ["-I", str(build.FOLDER), "-o", str(tmp_path / "main"), str(tmp_path / "main.cpp")]
    command += [str(build.FOLDER / f"{name}_cpu.cpp") for name in ("listed", "decayed")]  # all are built like that
    subprocess.run(command, check=True, capture_output=True)
    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.split()
    # One head, three tokens of width 1, q = k = 0 and v = 1, 2, 6: each sees the two others alike with lists,
    # and all three in dense attention.
    assert [float(word) for word in said] == pytest.approx([4.0, 3.5, 1.5, 3.0, 3.0, 3.0], abs=1e-6)


PROGRAM = """
#include <cstdio>
#include "kernels.h"
using namespace sparseprior;
using Work = void(const void*, int64_t, int64_t);
void sparseprior::run_parallel(int64_t count, int64_t, Work* work, const void* context) { work(context, 0, count); }
int64_t sparseprior::parallel_threads() { return 1; }
View view(float* data) { return {(char*)data, 3, 3, 1, 1, 1, false}; }
int main() {
  float zero[3] = {0, 0, 0}, values[3] = {1, 2, 6}, out[3];
  const View q = view(zero), v = view(values), to = view(out);
  const int32_t keys[6] = {1, 2, 0, 2, 0, 1};
  listed_forward({q, q, v, 1, 1, 3, 0, 2, keys, nullptr, nullptr, false, false, 1.0f}, to);
  for (float x : out) std::printf("%g ", x);
  const float positions[3] = {0, 1, 2}, log_gamma = -1, one = 1;
  decayed_forward({q, q, v, 1, 1, 3, 0, 1, 1, positions, &log_gamma, &one, &one, 1.0f}, to);
  for (float x : out) std::printf("%g ", x);
}
"""
