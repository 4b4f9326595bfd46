"""Freed memory that the process keeps."""

import itertools
import platform
import resource
import statistics

import pytest
import torch

from hf_sparseprior.training.allocator import keep_freed_memory
from tests.processes import Started


def touch(keep):
    """Print how many pages a tensor of 48 MiB touches anew, the median of tensors made and freed one after the other."""
    assert not keep or keep_freed_memory()
    counts = []
    for _ in range(8):
        torch.empty(12 << 20).fill_(1.0)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(int(statistics.median(after - before for before, after in itertools.pairwise(counts))))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_is_touched_once(tmp_path):
    faults = {}
    for keep in (True, False):
        log = tmp_path / str(keep)
        assert Started(touch, keep, folder=tmp_path, log=log).wait(200) == 0, log.read_text()
        faults[keep] = int(log.read_text())
    assert 10 * faults[True] < faults[False], faults
