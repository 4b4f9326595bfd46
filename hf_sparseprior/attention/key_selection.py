"""Selection of keys for each image: those with a query's largest logits, or with a patch's largest predicted scores."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat

import torch
from torch import Tensor

from hf_sparseprior.attention.compiled_kernels import diagonal_cpu, kernels_missing, predicted_cpu
from hf_sparseprior.attention.plain_operations import plain

# Scores of pairs at once, outside graphs; of more, which would take seven times their own memory, an image at a time.
MOST_SCORES = 1 << 28


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """For scores whose order must not depend on rounding. On "meta", which has no numbers, there is no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def largest(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values of the last dimension; the first of equal values."""
    chosen = largest_indices(values.detach(), count, in_order=False)
    # Not True, which a graph of `torch.jit.trace` cannot have here.
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, chosen, 1)


def descending_places(values: Tensor) -> Tensor:
    """Indices of the values of the last dimension, the largest first, and the first of equal values before the others.

    In ONNX every sort does so, and its exporters refuse to be asked for it.
    """
    if torch.onnx.is_in_onnx_export():
        return torch.sort(values, dim=-1, descending=True).indices
    return torch.sort(values, dim=-1, descending=True, stable=True).indices


def largest_indices(values: Tensor, count: int, in_order: bool = True) -> Tensor:
    """Indices of the `count` largest values of the last dimension; the first of equal values.

    `in_order`: sorted, with the largest first. Otherwise they are in any order, which takes two thirds of the time.
    """
    if values.dtype == torch.float64 or plain() is not None:  # other programs have no bits of floats
        return descending_places(values)[..., :count]
    # topk is faster than a stable sort, but takes any of equal values. So the values become integers in the order of
    # the floats, followed by the place, which are never equal. Adding 0 makes -0 equal to 0.
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return torch.topk(ordered | places, count, dim=-1, sorted=in_order).indices


def predicted_keys(
    coefficients: Tensor, basis: Tensor, num_prefix_tokens: int, budget: int, threshold: float
) -> Tensor:
    """The `budget` tokens with the largest scores c W for each patch; coefficients c up to `threshold` count as 0.

    If the C++ kernel can run, it does this and never forms all pairs. The first of equal scores are taken. Kernel and
    PyTorch can choose differently between scores that differ by rounding alone.

    Args:
        coefficients: (B, H, n, R), A_down of Sparsifiner.
        basis: W_up, (R, N), or (B, 1, R, n) if each image has its own patches.
        num_prefix_tokens: P.
        budget: 1 to n.
        threshold: tau.

    Returns:
        Integers (B, H, n, P + budget): the prefix tokens, then patches, then -1 for those of the `budget` largest
        whose score is 0 (Sparsifiner 3.1: zeros are discarded after top-k). A patch without any key, which is possible
        with P = 0, sees itself.
    """
    if basis.dim() == 2 and coefficients.dtype == basis.dtype == torch.float32 and kernel_predicts(coefficients):
        return predicted_cpu.predicted_keys(coefficients, basis, num_prefix_tokens, budget, threshold)
    coefficients = torch.where(coefficients > threshold, coefficients, 0.0)
    in_graph = plain() is not None or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if in_graph or coefficients[..., 0].numel() * basis.shape[-1] <= MOST_SCORES:
        return keys_of_scores(coefficients @ basis, num_prefix_tokens, budget)
    images = zip(coefficients.split(1), basis.split(1) if basis.dim() == 4 else repeat(basis), strict=False)
    return torch.cat([keys_of_scores(one @ own, num_prefix_tokens, budget) for one, own in images])


def kernel_predicts(q: Tensor) -> bool:
    """Whether the C++ kernels of the prediction can run with this tensor (B, H, n, D)."""
    return not kernels_missing() and diagonal_cpu.can_run(q) is None


def keys_of_scores(scores: Tensor, num_prefix_tokens: int, budget: int) -> Tensor:
    """As `predicted_keys`, from scores (B, H, n, n); -inf is never chosen."""
    zero = scores == 0
    above = (scores > 0).sum(-1, keepdim=True)
    # Zeros are put last, because -1 must come after the rest; what they would have taken of the budget stays empty.
    places = torch.maximum(above.clamp_max(budget), budget - zero.sum(-1, keepdim=True))
    scores = scores.masked_fill(zero, -math.inf)
    chosen = largest_indices(scores, budget)
    empty = (scores.gather(-1, chosen) == -math.inf) | (torch.arange(budget, device=scores.device) >= places)
    chosen = torch.where(empty, -1, chosen + num_prefix_tokens)
    if not num_prefix_tokens:
        itself = torch.arange(scores.shape[-1], device=scores.device).unsqueeze(-1)
        return torch.where((chosen < 0).all(-1, keepdim=True), itself, chosen)
    always = torch.arange(num_prefix_tokens, device=scores.device).expand(*chosen.shape[:-1], -1)
    return torch.cat([always, chosen], -1)
