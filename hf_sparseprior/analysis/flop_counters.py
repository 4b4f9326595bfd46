"""What the compiled operators count in other libraries' counters of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.attention.compiled_kernels import diagonal_cpu
from hf_sparseprior.attention.plain_operations import operators_in_traces


@contextmanager
def flop_handles() -> Iterator[dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]]:
    """Handles for counters that look at a graph of `torch.jit.trace`, to use within the block.

    `fvcore.nn.FlopCountAnalysis(model, images).set_op_handle(**handles)` and mmengine's `FlopAnalyzer` take them. They
    count multiply-adds, once each, of the pairs that are attended, and of torch's scaled_dot_product_attention, which
    these counters leave out. torch's `FlopCounterMode` needs none of this.

    Yields:
        {operator: function of the inputs and outputs of a node of the graph}.

    Raises:
        RuntimeError: where the kernels cannot be built; then a model runs PyTorch's operations, which are counted so.
    """
    if (reason := diagonal_cpu.ready()) is not None:
        raise RuntimeError(f"there are no compiled operators to count: {reason}")

    def handle(multiply_adds: Callable[..., int]) -> Callable[[Sequence[Any], Sequence[Any]], int]:
        return lambda inputs, outputs: multiply_adds(*map(_value, inputs))

    formulas = {**diagonal_cpu.flop_formulas.MULTIPLY_ADDS, "aten::scaled_dot_product_attention": _of_dense_attention}
    with operators_in_traces():
        yield {name: handle(multiply_adds) for name, multiply_adds in formulas.items()}


def _of_dense_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    return q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _value(node: Any) -> Any:
    """A constant of a graph, or a tensor of the shape that the graph has for it."""
    constant = node.toIValue()
    if constant is not None or node.type().kind() != "TensorType":
        return constant
    return torch.empty(node.type().sizes(), device="meta")
