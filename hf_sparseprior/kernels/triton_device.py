"""Where the Triton kernels run. It does not import triton, which takes a quarter of a second and few need."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_CAPABILITY = (8, 0)  # below it there is no bfloat16, and too little shared memory for wide heads


def can_run(q: Tensor) -> str | None:
    """None if the Triton kernels can take these q, k, v (B, H, T, D), otherwise why not."""
    if reason := device_reason(q.device.type, q.device.index):
        return reason
    if q.dtype not in DTYPES:
        dtype = str(q.dtype).removeprefix("torch.")
        return f"the Triton kernels are for float16, bfloat16 and float32, not for {dtype}"
    if not 1 <= q.shape[-1] <= MAX_WIDTH:
        return f"head width {q.shape[-1]} must be in 1..{MAX_WIDTH}"
    # Not in a graph, because an exported program would make it a limit that its caller has to state.
    if not torch.compiler.is_compiling() and q.shape[0] * q.shape[1] * q.shape[2] >= 2**31:
        return f"batch * heads * tokens of {tuple(q.shape)} must be below 2^31"
    return None


@torch._dynamo.assume_constant_result
def device_reason(device_type: str, index: int | None) -> str | None:
    """None if the Triton kernels run on this device, otherwise why not."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on any device, in Python: for tests
    if device_type != "cuda" and not interpreted:
        return f"the Triton kernels are for CUDA, not for {device_type}, unless TRITON_INTERPRET=1 is set"
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if interpreted:
        return None
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        has, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        card = torch.cuda.get_device_name(index)
        return (
            f"{card} has compute capability {has}, and the Triton kernels need {needed} or more; "
            "without a forced backend attention runs there in plain PyTorch"
        )
    return None


def kernels() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The Triton kernels: along diagonals, and over all pairs with a decay. Imports triton."""
    from hf_sparseprior.kernels import decayed_triton, diagonal_triton

    return diagonal_triton.diagonal_attention, decayed_triton.decayed_attention
