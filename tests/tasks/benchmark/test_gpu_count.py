"""What is counted without a GPU: against bytes and registers worked out by hand."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tasks.benchmark import gpu, gpu_count, gpu_report

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (32, 0, 4, 16),  # 64 warps
        (128, 0, 4, 4),  # 65,536 registers are 16 warps of 128
        (129, 0, 4, 3),  # a warp gets 136 registers a thread: 15 warps
        (255, 0, 16, 0),  # one block does not fit
        (16, 0, 1, 32),  # at most 32 blocks
        (32, 100 * 1024, 4, 2),  # 2 x 101 KiB of 228
    ],
)
def test_blocks_at_once(registers, shared, warps, expected):
    assert gpu_count.blocks_at_once(registers, shared, warps) == expected


def test_sectors_are_counted_once_for_a_launch_and_once_for_each_program():
    found = gpu_count.Addresses()
    for _ in range(300):  # programs, more than are kept apart
        found.note("read", np.arange(0, 128, dtype=np.uint64), np.arange(128) < 65)  # sectors 0, 1, 2
        found.note("read", np.array([70, 71], dtype=np.uint64), np.array(True))  # sector 2 again
        found.note("written", np.array([1000], dtype=np.uint64), np.array([True]))
        found.next_program()
    assert found.sizes() == {"memory": 32 * 4, "cache": 300 * 32 * 4}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    out = tmp_path_factory.mktemp("count")
    cases = ["fibottention", "fibottention, zero fill", "violin"]
    assert gpu.main(["--count", "--tokens", "9", "--cases", *cases, "--out", str(out)]) == 0
    return out


@needs_triton
@pytest.mark.slow
def test_bytes_and_launches_of_a_small_layer(counted):
    rows = {row["case"]: row for row in json.loads((counted / "counted.json").read_text())["cases"]}
    row = rows["fibottention"]
    names = {way: [x["name"] for x in row["launches"] if x["pass"] == way] for way in ("forward", "backward")}
    assert names == {"forward": ["_forward_tokens"], "backward": ["_backward_tokens"]}
    # q, k, v and the output once; 8 bytes of softmax for each row of 512; some tables of 32 bytes.
    assert 1 + 8 / 512 <= gpu_report.total(row, "forward", "memory") < 1.06
    # Backward also reads the output and its gradient (expanded from one number here), and writes three.
    assert 1.75 <= gpu_report.total(row, "backward", "memory") < 2.1
    for launch in row["launches"]:
        assert launch["spilled"] == 0 and 16 <= launch["registers"] <= 255 and 0 < launch["occupancy"] <= 1
    # What torch itself starts is counted too: the sum of v forward, that of the parts backward.
    torch_launches = [x["name"] for x in rows["fibottention, zero fill"]["launches"] if x["name"].startswith("torch")]
    assert len(torch_launches) == 2 and all("sum" in name for name in torch_launches)
    assert rows["violin"]["tokens"] == 9


@needs_triton
@pytest.mark.slow
def test_the_file_says_that_no_gpu_ran(counted):
    text = (counted / "RESULTS.md").read_text()
    assert gpu_report.NEVER in text and "`_backward_tokens`" in text and "ms" not in text.split()
    assert (counted / "counted.png").read_bytes().startswith(b"\x89PNG")


@needs_triton
@pytest.mark.slow
def test_spills_are_seen():
    """A kernel that holds more than 255 registers a thread, compiled in a process of its own."""
    code = """
import torch, triton, triton.language as tl
from tasks.benchmark import gpu_count

@triton.jit
def wide(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    one, two = tl.load(x + at), tl.load(x + SIZE + at)
    tl.debug_barrier()
    tl.store(y + at, tl.cumsum(one) * two + tl.cumsum(two) * one)

found = []
with gpu_count.compiling(found):
    wide[(1,)](torch.empty(1 << 15), torch.empty(1 << 14), SIZE=1 << 14, num_warps=1)
print(found[0]["registers"], found[0]["spilled"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    registers, spilled = map(int, done.stdout.split()[-2:])
    assert registers == 255 and spilled > 0
