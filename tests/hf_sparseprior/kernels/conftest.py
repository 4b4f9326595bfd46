"""Calls of the Triton kernels and of `reference` in float64 with the same inputs: the fixture `kernels`."""

import os
from importlib.util import find_spec

import pytest
import torch

from hf_sparseprior.decay import DECAYS
from hf_sparseprior.ops import attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


class Kernels:
    """Leaves of calls on one device, their outputs and gradients, and the comparison with the reference."""

    def __init__(self, device):
        self.device = device
        self.native = device == "cuda"

    def make(
        self, grid, prefix, *, heads=2, width=5, batch=1, decay=None, dtype=torch.float32, prefix_beta=True, seed=0
    ):
        """q, k, v as projections give them, (B, T, H, D) transposed, and the scalars of a decay."""
        generator = torch.Generator().manual_seed(seed)
        tokens = prefix + grid[0] * grid[1]
        leaves = {
            name: torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
            for name in "qkv"
        }
        if decay is not None:
            curves = DECAYS[decay].positions(DECAYS[decay].SETTINGS, (1, 1)).shape[0]
            leaves["alpha"] = torch.rand(heads, generator=generator) + 0.5
            leaves["beta"] = torch.randn(curves, heads, generator=generator) + 3
            if prefix_beta:
                leaves["prefix_beta"] = torch.randn(heads, generator=generator)
        return {name: leaf.to(self.device) for name, leaf in leaves.items()}

    def run(self, leaves, support, decay, grid, prefix, backend="triton", dtype=torch.float32, **options):
        """Output, and gradients of every leaf for a fixed direction."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: leaf.detach().to(dtype if name in "qkv" else wide).requires_grad_() for name, leaf in leaves.items()
        }
        spec = (
            None if decay is None else {"name": decay, **{name: leaves[name] for name in leaves if name not in "qkv"}}
        )
        inputs = (leaves["q"], leaves["k"], leaves["v"])
        out = attention(
            *inputs, support, spec, num_prefix_tokens=prefix, grid=grid, layer=1, backend=backend, **options
        )
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(self.device, dtype)
        grads = torch.autograd.grad((out * direction).sum(), list(leaves.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
        return {"out": out, **found}

    def check(self, leaves, support, decay, grid, prefix):
        """Outputs and gradients against `reference` in float64."""
        dtype = leaves["q"].dtype
        actual = self.run(leaves, support, decay, grid, prefix, dtype=dtype)
        expected = self.run(leaves, support, decay, grid, prefix, "reference", torch.float64)
        for name, value in expected.items():
            assert actual[name].shape == value.shape and not actual[name].isnan().any(), name
            if not value.numel():
                continue
            size = max(0.1, value.abs().max().item())
            if dtype != torch.float32 and name not in ("out", *"qkv"):
                # Sums over all rows of terms that cancel: what the rounded output takes from them goes with their
                # size and number, not with what is left of them.
                size = max(size, 1.0) * (leaves["q"].shape[0] * leaves["q"].shape[2]) ** 0.5
            difference = (actual[name].double() - value).abs().max().item()
            limit = TOLERANCE[dtype] * size
            assert difference <= limit, (name, difference, limit)


@pytest.fixture
def kernels(monkeypatch):
    if find_spec("triton") is None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), "triton is not installed"
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return Kernels("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # tests/conftest.py says why here and not for all tests
    return Kernels("cpu")
