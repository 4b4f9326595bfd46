"""Freed memory that the process keeps."""

import platform
import subprocess
import sys

import pytest

from hf_sparseprior.training import allocator

# Pages touched anew by ten tensors of 48 MiB that are made and freed one after the other.
SCRIPT = """
import resource, runpy, sys, torch
if sys.argv[1] == "keep":
    assert runpy.run_path(sys.argv[2])["keep_freed_memory"]()
def use():
    torch.empty(12 << 20).fill_(1.0)
for _ in range(10):  # each of the first leaves a small piece behind it, which glibc keeps, so the next finds no place
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_is_touched_once():
    faults = {}
    for how in ("keep", "system"):  # the file alone: its package would import transformers
        words = [sys.executable, "-c", SCRIPT, how, allocator.__file__]
        faults[how] = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert 10 * faults["keep"] < faults["system"], faults
