"""Calls of the C++ kernels with shapes and layouts at random, forward and backward: python sweep.py CALLS

What it looks for is memory errors, which a sanitizer reports (test_sanitizer.py).
"""
# ruff: noqa: E402

import random
import sys
from pathlib import Path
from types import ModuleType

import torch

# The modules it needs, without all that the package itself imports.
sys.modules["hf_sparseprior"] = package = ModuleType("hf_sparseprior")
package.__path__ = [str(Path(__file__).parents[3] / "hf_sparseprior")]

from conftest import Kernels

from hf_sparseprior.kernels import diagonal_cpu
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS

cpp = Kernels("cpu", "cpp")


def laid_out(leaf, layout):
    """The shape, dtype and device of a leaf (B, H, T, D) with other strides; nothing lies after its last element."""
    if layout == "contiguous":
        return leaf.contiguous()
    if layout == "row elements apart":
        return leaf.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "one element":
        return leaf.new_ones(()).expand_as(leaf)
    if layout == "one element a row":
        return leaf[..., 0].clone().unsqueeze(-1).expand_as(leaf)
    if layout == "end of a projection":
        batch, heads, tokens, width = leaf.shape
        return leaf.new_ones(batch, tokens, heads, 3 * width).transpose(1, 2)[..., 2 * width :]
    return leaf


LAYOUTS = ["projection", "contiguous", "row elements apart", "one element", "one element a row", "end of a projection"]


def one_call(values, seed):
    grid, prefix = (values.randint(1, 9), values.randint(1, 9)), values.randint(0, 5)
    sizes = {
        "heads": values.randint(1, 4),
        "batch": values.randint(0, 3),
        "width": values.choice([values.randint(1, 130), 32, 64]),
    }
    if values.random() < 0.07:  # several pieces of rows, and memory that no cache keeps
        grid, sizes = (values.randint(16, 26), 25), {"heads": 4, "batch": 4, "width": values.choice([24, 64, 70])}
    dtype = values.choice([torch.float32, torch.bfloat16])
    decay = values.choice([None, *DECAYS])
    support = values.choice(
        [
            {"name": "fibottention"},
            {"name": "fibottention", "w_min": 1, "w_max": values.randint(1, 600)},
            {"name": "window", "w": values.randint(1, 90), "diagonal": values.random() < 0.5},
        ]
    )
    support["mask_fill"] = values.choice(MASK_FILLS)
    if decay is not None and values.random() < 0.5:
        support = {"name": "dense"}
        if sizes["batch"] == 4:  # two groups of images, which take no more than this
            grid, sizes = (values.randint(14, 16), 25), {"heads": 2, "batch": 4, "width": 70}
    drops = support.get("mask_fill") == "neg_inf" and values.random() < 0.5
    leaves = cpp.make(grid, prefix, decay=decay, prefix_beta=values.random() < 0.5, dtype=dtype, seed=seed, **sizes)
    for name in "qkv":
        leaves[name] = laid_out(leaves[name], values.choice(LAYOUTS))
    if decay is not None:
        leaves["beta"] = leaves["beta"] + values.choice([-8, 0, 17])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    out = cpp.attend(leaves, support, decay, grid, prefix, dropout_p=0.2 if drops else 0.0)
    direction = laid_out(out.detach(), values.choice(LAYOUTS))
    grads = torch.autograd.grad(out, list(leaves.values()), direction, allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in (out, *grads))


if __name__ == "__main__":
    assert diagonal_cpu.ready() is None, diagonal_cpu.ready()
    generator = random.Random(0)
    for number in range(int(sys.argv[1])):
        one_call(generator, number)
    print(f"{sys.argv[1]} calls")
