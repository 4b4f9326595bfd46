"""What runs on this machine, what does not, and how to get it: python -m hf_sparseprior doctor"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from hf_sparseprior import ops
from hf_sparseprior.kernels import build, diagonal_cpu

# Packages beside torch and transformers, and what needs them.
OPTIONAL = {
    "matplotlib": ("pictures", ".[classification]"),
    "accelerate": ("training", ".[classification]"),
    "datasets": ("parquet, arrow and hub data", ".[classification]"),
    "kornia": ("augmentation", ".[classification]"),
    "scikit-learn": ("the digits of the demo", ".[classification]"),
    "peft": ("LoRA and DoRA", "peft"),
}


def report() -> Iterator[str]:
    """One line for each thing looked at; compiles the CPU kernel if it can be and is not yet."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    yield f"CPU threads: {torch.get_num_threads()}; CUDA device: {gpu}"
    for name, (purpose, install) in OPTIONAL.items():
        try:
            yield f"ok       {name} {version(name)} ({purpose})"
        except PackageNotFoundError:
            yield f"missing  {name} ({purpose}): pip install '{install}'"
    reason = diagonal_cpu.ready()
    if reason is not None:
        yield f"missing  compiled CPU kernel: {reason}. Attention runs without it, slower."
        return
    yield f"ok       compiled CPU kernel, in {build.cache_folder()}"
    error = kernel_error()
    yield f"{'ok      ' if error < 1e-5 else 'WRONG   '} kernel against the reference: largest difference {error:.1e}"


def kernel_error() -> float:
    """Largest difference of the compiled kernel from float64 `reference` on a small case."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 50, 32, generator=generator) for _ in range(3))
    inputs = torch.stack((q, k, v))
    kernel, reference = (
        ops.attention(values[0], values[1], values[2], "fibottention", num_prefix_tokens=1, backend=backend)
        for backend, values in (("cpp", inputs), ("reference", inputs.double()))
    )
    assert isinstance(kernel, torch.Tensor) and isinstance(reference, torch.Tensor)
    return float((kernel - reference).abs().max())
