"""Where the Triton kernels run. Does not import triton, which takes a quarter of a second and few need."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Triton's own minimum; below 8.0 there is no bfloat16.
MIN_CAPABILITY = (7, 5)
MIN_CAPABILITY_BFLOAT16 = (8, 0)


def can_run(q: Tensor) -> str | None:
    """None if the Triton kernels can take q, k, v like this (B, H, T, D), else why not."""
    if q.dtype not in DTYPES:
        dtype = str(q.dtype).removeprefix("torch.")
        return f"the Triton kernels are for float16, bfloat16 and float32, not for {dtype}"
    if not 1 <= q.shape[-1] <= MAX_WIDTH:
        return f"head width {q.shape[-1]} must be in 1..{MAX_WIDTH}"
    if q.shape[0] * q.shape[1] * q.shape[2] >= 2**31:
        return f"batch * heads * tokens of {tuple(q.shape)} must be below 2^31"
    return device_reason(q.device.type, q.device.index, q.dtype == torch.bfloat16)


@torch._dynamo.assume_constant_result
def device_reason(device_type: str, index: int | None, bfloat16: bool) -> str | None:
    """None if the Triton kernels run on this device, else why not."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":  # on any device, in Python: for tests
        return None
    if device_type != "cuda":
        return f"the Triton kernels are for CUDA, not for {device_type}, unless TRITON_INTERPRET=1 is set"
    capability = torch.cuda.get_device_capability(index)
    needed = MIN_CAPABILITY_BFLOAT16 if bfloat16 else MIN_CAPABILITY
    if capability < needed:
        return f"compute capability {'.'.join(map(str, capability))} must be {'.'.join(map(str, needed))} or more"
    return None
