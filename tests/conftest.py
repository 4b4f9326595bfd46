"""Without a GPU, the Triton kernels are tested in Triton's interpreter.

It has to be chosen before triton is imported, which transformers does, so before any test module is collected. Then the
variable is removed again. Kernels that were defined under it stay interpreted in this process, while `can_run` refuses
them on the CPU as it does for users. tests/hf_sparseprior/kernels sets it for its own tests.
Processes that tests start do not see it. Nothing else in the tests uses Triton on a machine without a GPU.
"""

import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from hf_sparseprior.kernels import decayed_triton, diagonal_triton  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

# Processes that tests start in other folders find `tasks`, which is not installed.
ROOT = str(Path(__file__).parents[1])
if ROOT not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, paths)])


# A test that waits for the disk learns nothing from it. What is written through, and when, tests see from the calls.
os.fsync = lambda descriptor: None

# An iterator of several processes that the garbage collector ends waits for each of them in vain, as its queues went
# first: five seconds, in whatever test comes next. They are idle then and get their SIGTERM at once.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1

# Every save of a model looks twice for the files that its code imports; while tests run, they stay the same.
dynamic_module_utils.get_relative_import_files = cache(dynamic_module_utils.get_relative_import_files)

MEMORY = Path("/dev/shm")
CONTAINERS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
GIBIBYTE = 2**30


@pytest.fixture
def interruptible():
    """SIGINT interrupts: a shell that starts the tests in the background has it ignored."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


def pytest_addoption(parser):
    text = "of a test with more cases than N only N, evenly spaced; default: all"
    parser.addoption("--sample", type=int, metavar="N", help=text)


def pytest_configure(config):
    """Tests write their folders, 2 GiB in all, to memory if there is enough; with --basetemp they are kept."""
    if not config.option.basetemp and "PYTEST_DEBUG_TEMPROOT" not in os.environ and memory() > 12 * GIBIBYTE:
        folder = tempfile.mkdtemp(prefix="tests_", dir=MEMORY)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # workers of pytest-xdist inherit it
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")


class FailuresAtOnce:
    """Names a failed test when it fails: a run that is ended from outside prints no summary."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr).partition("\n")[0]
            terminal.write_line(f"\nFAILED {report.nodeid} - {message[:300]}")


def pytest_terminal_summary(terminalreporter):
    """Of a run of many minutes, the files that took longest: which test of a file trains what all share is chance."""
    seconds = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if type(report) is pytest.TestReport:  # those of subtests are part of their test's
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > 300:
        terminalreporter.section(f"seconds by file, {seconds.total():.0f} in all")
        for file, number in seconds.most_common(60):
            terminalreporter.write_line(f"{number:6.0f} {file}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.scheduling import FileScheduling

    return FileScheduling(config, log)


def memory():
    """Bytes that may be used; 0 where it is not known or no file system is in it."""
    try:
        space = shutil.disk_usage(MEMORY).free
        free = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        limits = [path.read_text().strip() for path in CONTAINERS if path.is_file()]
    except OSError:
        return 0
    amounts = [int(free[1]) * 1024 if free else 0, *(int(limit) for limit in limits if limit.isdigit())]
    return min(amounts) if space > 4 * GIBIBYTE and os.access(MEMORY, os.W_OK) else 0


@pytest.hookimpl(trylast=True)  # a sample of what -k and -m choose
def pytest_collection_modifyitems(items, config):
    """Files with slow tests come first, so that two processes which take file after file end at about the same time."""
    if number := config.getoption("sample"):
        take_sample(items, number, config)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """What was imported and collected stays, so that the collector, which the Trainer calls in every run, skips it."""
    gc.freeze()


def pytest_sessionfinish():
    """So that everything is collected at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_backend_is_forced(monkeypatch):
    """A variable that an earlier test or the caller set forces none on the next test."""
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)


@pytest.fixture(scope="module", autouse=True)
def left_by_a_file():
    """The collector need not look at it again: it would take a second each time after some hundred files."""
    yield
    gc.collect()
    gc.freeze()


def take_sample(items, number, config):
    """At most so many cases of each test, the same ones every time."""
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for found in cases.values():
        chosen |= {found[i * len(found) // number] for i in range(number)} if len(found) > number else set(found)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_ignore_collect(collection_path, config):
    """With -m "not slow", files that are slow as a whole are not imported, because frameworks take half a minute."""
    if config.getoption("markexpr") != "not slow" or not collection_path.name.startswith("test_"):
        return None
    return True if re.search(r"^pytestmark = \[?pytest\.mark\.slow\b", collection_path.read_text(), re.M) else None


@pytest.fixture
def registries():
    """The registries of supports, decays, backends and families, which afterwards hold what they held before."""
    from hf_sparseprior.attention.choice import BACKENDS, _sort_backends
    from hf_sparseprior.base.families import FAMILIES, unregister_family
    from hf_sparseprior.patterns.decay import DECAYS
    from hf_sparseprior.patterns.supports import SUPPORTS

    registries = SUPPORTS, DECAYS, BACKENDS
    before, families = [dict(registry) for registry in registries], set(FAMILIES)
    yield
    for name in FAMILIES.keys() - families:
        unregister_family(name)
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    _sort_backends()


@pytest.fixture
def own_file(tmp_path, monkeypatch, registries):
    """A file with a support and a decay of a user, as `--import` takes it, in a process that has imported none."""
    import sys

    from hf_sparseprior.base import own_files
    from tests.own_file import OWN

    monkeypatch.setattr(own_files, "IMPORTED", {})
    monkeypatch.setattr("hf_sparseprior.saving.code.IMPORTED", own_files.IMPORTED)
    file = tmp_path / "cross.py"
    file.write_text(OWN)
    yield file
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
