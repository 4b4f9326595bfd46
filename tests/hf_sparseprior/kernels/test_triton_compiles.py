"""The Triton kernels compile to machine code for a GPU, which takes the compiler only.

The interpreter takes more than the compiler does: it runs no branch that is not taken and knows no types. Launches of a
whole forward and backward pass are caught in a process of their own and compiled instead of run.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import sys
from types import ModuleType

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

# The modules it needs, without all that the package itself imports.
sys.modules["hf_sparseprior"] = package = ModuleType("hf_sparseprior")
package.__path__ = ["hf_sparseprior"]

from hf_sparseprior.kernels import decayed_triton, diagonal_triton, triton_sizes


class Compiler:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)


driver.set_active(Compiler())
launch, names = jit.JITFunction.run, set()


def compile_only(self, *arguments, grid, warmup, **options):
    assert launch(self, *arguments, grid=grid, warmup=True, **options).asm["cubin"]
    names.add(self.fn.__name__)


jit.JITFunction.run = compile_only
# Three parts, of which two are joined first.
triton_sizes.TRIED["diagonal_forward 2 16"] = {"ROWS": 4, "num_warps": 4}
diagonal_triton.JOINED_PARTS = 2
offsets, begin = torch.tensor([1, -1, 2, -2], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
decay = [torch.rand(15), torch.tensor([0, 0, 8, 8]), torch.rand(2), torch.rand(2)]
for dtype, prefix, zero_fill, weights, dropout_p, one_launch in [
    (torch.bfloat16, 1, False, [], 0.1, True),
    (torch.bfloat16, 1, False, decay, 0.0, False),
    (torch.float16, 0, True, decay, 0.0, True),
]:
    diagonal_triton.ONE_LAUNCH_TOKENS = 1000 * one_launch
    q, k, v = (torch.randn(1, 2, prefix + 9, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    out = diagonal_triton.diagonal_attention(
        q, k, v, offsets, begin, prefix, 0.1, zero_fill, *(weights or [None] * 4), dropout_p=dropout_p
    )
    out.backward(torch.ones_like(out))
    positions, log_gamma = torch.zeros(3, 1, 9, dtype=torch.int32), torch.zeros(3, 2, requires_grad=bool(weights))
    gamma = torch.ones(2) if weights else None
    out = decayed_triton.decayed_attention(
        q, k, v, positions, log_gamma, torch.ones(2), gamma, prefix, 0.1, dropout_p
    )
    out.backward(torch.ones_like(out))
print(len(names))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_compiles(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    kernels = sum(
        line.startswith(("def _forward_", "def _backward_"))
        for name in ("diagonal_triton_forward", "diagonal_triton_backward", "decayed_triton_kernels")
        for line in (root / f"hf_sparseprior/kernels/{name}.py").read_text().splitlines()
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == kernels
