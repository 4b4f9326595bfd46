"""What the compiled operators count in torch's `FlopCounterMode`: two operations for each multiply-add of their
products, as torch counts scaled_dot_product_attention. Only pairs that are attended count; exponentials, the weights
of pairs and the floor of mask_fill "zero" do not, as torch counts no elementwise operation.

Shapes: B batch, H heads, T = P + N tokens, P prefix tokens, D head width, K places of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import register_flop_formula

# Products of a pair: forward q k and p v; backward the four gradients, and q k again where no probability is kept.
FORWARD, BACKWARD, BACKWARD_AGAIN = 2, 4, 5
MULTIPLY_ADDS: dict[str, Callable[..., int]] = {}  # by operator, of its arguments; of the operators that are loaded


def pairs_on_diagonals(offsets: Sequence[int], counts: Sequence[int], patches: int, prefix: int) -> int:
    """Pairs of one image that the kernels along diagonals attend, over all heads.

    Args:
        offsets: signed offsets, head after head. counts: how many each head has. patches: N. prefix: P.
    """
    total, begin = len(counts) * prefix * (prefix + 2 * patches), 0
    for count in counts:
        own = offsets[begin : begin + count]
        total += sum(max(0, patches - abs(offset)) for offset in own)
        if not prefix:  # patches without a partner see themselves
            smallest = min((abs(offset) for offset in own), default=patches)
            total += max(0, min(patches, smallest) - max(0, patches - smallest))
        begin += count
    return total


def _numbers(table: Tensor) -> list[int] | None:
    """What is in a table; None where it has no values, as within a compiler."""
    return table.tolist() if type(table) is Tensor and table.device.type != "meta" else None


def _on_diagonals(q: Tensor, offsets: Tensor, counts: list[int] | None, prefix: int) -> int:
    """Multiply-adds of one product over all pairs. Without values, all offsets are taken as whole diagonals."""
    batch, heads, tokens, width = q.shape
    patches, values = tokens - prefix, _numbers(offsets)
    if values is None or counts is None:
        pairs = heads * prefix * (prefix + 2 * patches) + offsets.shape[0] * patches
    else:
        pairs = pairs_on_diagonals(values, counts, patches, prefix)
    return batch * pairs * width


def _of_diagonals(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, prefix: int, *rest: Any) -> int:
    return _on_diagonals(q, offsets, _numbers(counts), prefix)


def _of_begins(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, begin: Tensor, *rest: Any) -> int:
    begins = _numbers(begin)
    counts = None if begins is None else [last - first for first, last in pairwise(begins)]
    return _on_diagonals(q, offsets, counts, next(value for value in rest if type(value) is int))


def _of_all_pairs(q: Tensor, *rest: Any) -> int:
    batch, heads, tokens, width = q.shape
    return batch * heads * tokens * tokens * width


def _of_lists(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, factor: Tensor | None, prefix_factor: Tensor | None, prefix: int,
    scale: float,
) -> int:  # fmt: skip
    batch, heads, tokens, width = q.shape
    return batch * heads * (prefix * tokens + (tokens - prefix) * keys.shape[-1]) * width


def _of_coefficients(q: Tensor, k: Tensor, down: Tensor, prefix: int, scale: float) -> int:
    """W_down k, and the product of each patch with its R rows."""
    batch, heads, tokens, width = q.shape
    return batch * heads * down.shape[0] * width * (down.shape[1] + tokens - prefix)


def count(name: str, products: int, formula: Callable[..., int], gradient: bool = False) -> None:
    """Register `products` products of a formula's size for an operator of ours.

    Args:
        name: of the operator. gradient: whether its first argument is the gradient of the output.
    """
    operator = getattr(torch.ops.hf_sparseprior, name)

    def multiply_adds(*args: Any) -> int:
        return products * formula(*args[gradient:])

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return 2 * multiply_adds(*args)

    MULTIPLY_ADDS[f"hf_sparseprior::{name}"] = multiply_adds

    register_flop_formula(operator, get_raw=True)(flops)
    # The first call of a kernel loads it, perhaps while it is counted; a counter has copied torch's formulas by then.
    for mode in _get_current_dispatch_mode_stack():
        if (counter := getattr(mode, "counter", None)) is not None and hasattr(counter, "flop_registry"):
            counter.flop_registry[operator] = flops


def register_cpu() -> None:
    """The C++ operators."""
    for name in ("diagonal_forward", "diagonal_output"):
        count(name, FORWARD, _of_diagonals)
    count("diagonal_backward", BACKWARD, lambda q, k, v, out, *rest: _of_diagonals(q, k, v, *rest), gradient=True)
    count("decayed_forward", FORWARD, _of_all_pairs)
    count("decayed_backward", BACKWARD_AGAIN, _of_all_pairs, gradient=True)
    count("listed_forward", FORWARD, _of_lists)
    count("listed_backward", BACKWARD_AGAIN, _of_lists, gradient=True)
    count("predicted_coefficients", 1, _of_coefficients)
    count("predicted_keys", 1, lambda coefficients, basis, *rest: coefficients.numel() * basis.shape[1])


def register_diagonal_triton() -> None:
    """The Triton operators along diagonals."""
    count("diagonal_triton", FORWARD, _of_begins)
    skip = 2  # the output and what its softmax kept
    backward = "diagonal_triton_backward"
    count(backward, BACKWARD_AGAIN, lambda q, k, v, *rest: _of_begins(q, k, v, *rest[skip:]), gradient=True)


def register_decayed_triton() -> None:
    """The Triton operators over all pairs."""
    count("decayed_triton", FORWARD, _of_all_pairs)
    count("decayed_triton_backward", BACKWARD_AGAIN, _of_all_pairs, gradient=True)
