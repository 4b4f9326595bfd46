"""Devices without kernels of ours: attention runs in plain PyTorch, and a kernel that is asked for names the device.

The tensors are torch's fakes, which have a device and no data; nothing here ran on a real one.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_sparseprior.attention import functional as ops

DEVICES = ("mps", "xpu")


def attention(device, support, **options):
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 17, 8, device=device) for _ in range(3))
        return ops.attention(q, k, v, support, num_prefix_tokens=1, grid=(4, 4), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("backend", "support"), [("diagonal", "fibottention"), ("gather", "bigbird"), ("reference", "dense")]
)
def test_attention_runs_without_kernels(device, backend, support):
    """Not sdpa: which of torch's it takes needs a build for the device."""
    out = attention(device, support, backend=backend)
    assert out.shape == (1, 2, 17, 8) and out.device.type == device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backend", "own"), [("cpp", "the CPU"), ("triton", "CUDA")])
def test_kernels_name_the_device(device, backend, own):
    with pytest.raises(
        ValueError, match=f"backend='{backend}' cannot run this attention: .* for {own}, not for {device}"
    ):
        attention(device, "fibottention", backend=backend)
