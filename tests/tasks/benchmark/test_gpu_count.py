"""What is counted without a GPU: against bytes and registers worked out by hand."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from tasks.benchmark import gpu_count, gpu_report
from tasks.benchmark.__main__ import main
from tests.each import each

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@each(
    "registers, shared, warps, expected",
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
    assert main(["gpu", "--count", "--tokens", "9", "--cases", *cases, "--out", str(out)]) == 0
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
    # q, k, v, the output and its gradient are read once, three gradients are written once: 8 tensors are 2 copies.
    assert 2 + 8 / 512 <= gpu_report.total(row, "backward", "memory") < 2.1
    for launch in row["launches"]:
        assert launch["spilled"] == 0 and 16 <= launch["registers"] <= 255 and 0 < launch["occupancy"] <= 1
    # What torch itself starts is counted too: the sum of v forward, that of the parts backward.
    torch_launches = [x["name"] for x in rows["fibottention, zero fill"]["launches"] if x["name"].startswith("torch")]
    assert len(torch_launches) == 2 and all("sum" in name for name in torch_launches)
    assert rows["violin"]["tokens"] == 9


@needs_triton
@pytest.mark.slow
def test_the_file_says_that_no_gpu_ran(counted):
    text = (counted / "counted.md").read_text()
    assert gpu_report.NEVER in text and "`_backward_tokens`" in text and "ms" not in text.split()
    assert (counted / "counted.png").read_bytes().startswith(b"\x89PNG")


@needs_triton
@pytest.mark.parametrize(("limit", "spills"), [(24, True), (255, False)])
def test_registers_and_spills_are_ptxas(limit, spills):
    """64 numbers are read before the first is written, so that with 24 registers most of them spill."""
    count = 64
    body = [f"ld.volatile.global.u32 %r{i},[%rd1+{4 * i}];" for i in range(count)]
    body += [f"st.volatile.global.u32 [%rd1+{4 * i}],%r{count - 1 - i};" for i in range(count)]
    ptx = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) .maxnreg {limit} {{
.reg .b64 %rd<2>; .reg .b32 %r<{count}>; ld.param.u64 %rd1,[p];
{" ".join(body)} ret; }}
"""
    found = gpu_count.resources(ptx)
    assert (found["registers"] == limit and found["spilled"] > 100) if spills else found["registers"] >= count
    assert spills or found["spilled"] == 0
