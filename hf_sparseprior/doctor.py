"""What runs on this machine, what does not, and how to get it: python -m hf_sparseprior doctor"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_sparseprior import ops
from hf_sparseprior.kernels import build, diagonal_cpu, triton_device

# Packages beside torch and transformers, and what needs them.
OPTIONAL = {
    "matplotlib": ("pictures", ".[classification]"),
    "accelerate": ("training", ".[classification]"),
    "datasets": ("parquet, arrow and hub data", ".[classification]"),
    "kornia": ("augmentation", ".[classification]"),
    "scikit-learn": ("the digits of the demo", ".[classification]"),
    "peft": ("LoRA and DoRA", ".[peft]"),
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
    triton = triton_device.device_reason("cuda", None) if torch.cuda.is_available() else "there is no CUDA device"
    yield "ok       Triton kernels" if triton is None else f"missing  Triton kernels: {triton}"
    reason = diagonal_cpu.ready()
    if reason is not None:
        yield f"missing  compiled CPU kernels: {reason}. Attention runs without them, slower."
        return
    yield f"ok       compiled CPU kernels, in {build.cache_folder()}"
    for name, error in kernel_errors().items():
        verdict = "ok      " if error < 1e-5 else "WRONG   "
        yield f"{verdict} kernel against the reference, {name}: largest difference {error:.1e}"


def kernel_errors() -> dict[str, float]:
    """Largest difference of each compiled CPU kernel from float64 `reference` on a small case."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.stack([torch.randn(2, 4, 50, 32, generator=generator) for _ in range(3)])
    decay = {"name": "violin", "alpha": torch.ones(4), "beta": torch.full((8, 4), 4.0)}
    cases: list[tuple[str, str, dict[str, Any] | None]] = [
        ("diagonals", "fibottention", None),
        ("lists of keys", "bigbird", None),
        ("decay", "dense", decay),
    ]
    errors = {}
    for name, support, own_decay in cases:
        out, expected = (
            ops.attention(x[0], x[1], x[2], support, own_decay, num_prefix_tokens=1, backend=backend)
            for backend, x in (("cpp", inputs), ("reference", inputs.double()))
        )
        assert isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor)
        errors[name] = float((out - expected).abs().max())
    return errors
