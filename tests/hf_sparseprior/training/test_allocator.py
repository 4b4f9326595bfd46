"""Freed memory that the process keeps."""

import platform
import subprocess
import sys

import pytest

# Pages touched anew by ten tensors of 48 MiB that are made and freed one after the other.
SCRIPT = """
import resource, sys, torch
from hf_sparseprior.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    torch.empty(12 << 20).fill_(1.0)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_is_touched_once():
    faults = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "system")
    }
    assert 10 * faults["keep"] < faults["system"], faults
