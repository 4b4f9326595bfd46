"""Devices without kernels of ours: a kernel that is asked for names the device.

The tensors are torch's fakes, which have a device and no data. A torch that was built without a device does not even
fake most operations there, so that attention itself runs on such a device is not tested.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_sparseprior.attention import functional as ops


@pytest.mark.parametrize("device", ["mps", "xpu"])
@pytest.mark.parametrize(("backend", "own"), [("cpp", "the CPU"), ("triton", "CUDA")])
@pytest.mark.parametrize("support", ["fibottention", "bigbird"])
def test_kernels_name_the_device(device, backend, own, support):
    if (backend, support) == ("triton", "bigbird"):
        own = None  # its pairs are off the diagonals, which comes first
    reason = "" if own is None else f".* for {own}, not for {device}"
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 17, 8, device=device) for _ in range(3))
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot run this attention: {reason}"):
            ops.attention(q, k, v, support, num_prefix_tokens=1, grid=(4, 4), backend=backend)
