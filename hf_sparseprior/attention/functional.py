"""Attention over a support, with a decay.

`reference` is the specification: dense tensors, a few lines, any dtype. Every other backend agrees with it, forward and
backward. Each backend registers itself where it is written (`choice.register_backend`).

Shape letters: B batch, H heads, D head width, E width of a head's values (D in most models), N patch tokens, P prefix
tokens, T = P + N, C curves, A axes, K offsets of a head counted with both signs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.attention.choice import BACKENDS, bound_backend, choose_backend  # noqa: F401

# Importing a backend registers it. Errors list backends in this order.
from hf_sparseprior.attention.dense import leading_weights
from hf_sparseprior.attention.diagonal import diagonal  # noqa: F401
from hf_sparseprior.attention.flex import flex  # noqa: F401
from hf_sparseprior.attention.frames import frames  # noqa: F401
from hf_sparseprior.attention.gather import gather  # noqa: F401
from hf_sparseprior.attention.kernels import cpp  # noqa: F401
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.resolved import Time
from hf_sparseprior.patterns.decay import check_decay_tensors, decay_settings
from hf_sparseprior.patterns.supports import LayerKey, check_time, needs_grid, redraws, resolve_support


def run_plan(request: AttentionRequest, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Attention over a prepared plan.

    Args:
        request: the call.
        backend: "auto", or one of `BACKENDS` by name.

    Returns:
        out (B, H, T, E), and the attention weights if `need_weights`, otherwise None. The weights are (B, H, T, T), or
        (B, H, weight_rows, T) with `weight_rows`.

    Raises:
        ValueError: for tokens that do not fit the plan, or a forced backend that cannot run.
    """
    chosen = bound_backend(request, backend)
    # Autocast is for the projections, which are done; here it would round the float32 logits of a decay.
    device_type = request.q.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            out, weights = chosen.run(request)
    else:
        out, weights = chosen.run(request)
    if request.need_weights and request.weight_rows is not None:
        weights = leading_weights(request, request.weight_rows)
    return out, weights


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    support: str | dict[str, Any] | None = None,
    decay: dict[str, Any] | None = None,
    num_prefix_tokens: int = 0,
    layer: int = 0,
    grid: tuple[int, ...] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    dropout_p: float = 0.0,
    need_weights: bool = False,
    time: Time = "frame",
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention over a support, with a decay.

    Each call computes its support and tables anew and keeps none of them: nothing is cached globally. For repeated
    calls with the same settings use `SparsePriorAttention`, which keeps them, or an `AttentionPlan` with `run_plan`.

    Args:
        q, k, v: (B, H, T, D), any floating dtype, same device. T = num_prefix_tokens + N. v may be of another width, E.
        support: a registered name, a dict as in `prior`, or None for dense.
        decay: {"name": "violin", "curves": [...], "alpha": (H,) or None, "beta": (C, H)} with tensors, or None; for
            "learned_order" also "order" (1, height, width); without it, it is the order at the start.
        num_prefix_tokens: tokens before the patches; they attend to and are attended by everything.
        layer: layer number; with the support's `shuffle_seed` it decides which head has which support.
        grid: (height, width) of the patch tokens, or (frames, height, width) of those of a clip, frame after frame; may
            be left out if N is a square.
        scale: factor of the logits, default D ** -0.5.
        backend: "auto", or one of `BACKENDS` by name.
        dropout_p: dropout probability of the attention weights.
        need_weights: also return the weights (B, H, T, T).
        time: how support and decay see the frames of a clip, as in `AttentionPlan`.

    Returns:
        (B, H, T, E) in the dtype of q; with `need_weights` a pair with the weights.

    Raises:
        ValueError: for shapes, dtypes or settings that do not fit, or a forced backend that cannot run.
    """
    layer = check_integer("layer", layer, 0)
    _check_inputs(q, k, v)
    limits = f" and at most {q.shape[2] - 1}, tokens - 1"
    num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0, limits)
    if num_prefix_tokens >= q.shape[2]:
        raise ValueError(f"num_prefix_tokens={num_prefix_tokens} must be 0 or more{limits}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p} must be between 0 and 1")
    num_heads, num_tokens = q.shape[1], q.shape[2] - num_prefix_tokens
    needed_by = "a decay" if decay is not None else "this support" if needs_grid(support) else None
    grid = _check_grid(grid, num_tokens, needed_by)
    tensors = None if decay is None else check_decay_tensors(decay, num_heads)
    key = LayerKey(num_heads, grid, layer, check_time(time))
    resolved = resolve_support(support, num_heads, math.prod(key.own_grid), key.own_grid)
    if redraws(resolved):
        raise ValueError(
            f"support {resolved['name']!r} with redraw=True must have redraw=False: one call has no passes"
        )
    plan = AttentionPlan(key, num_prefix_tokens, resolved, decay_settings(tensors))
    request = AttentionRequest(q, k, v, plan, tensors, scale, dropout_p, need_weights=need_weights)
    out, weights = run_plan(request, backend)
    return (out, weights) if weights is not None else out


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be (batch, heads, tokens, head width)")
        width, but = (tensor.shape[-1], ", but for its width") if name == "v" else (q.shape[-1], "")
        if tensor.shape != (*q.shape[:3], width):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must have the shape of q, {tuple(q.shape)}{but}")
        if tensor.dtype != q.dtype or not tensor.is_floating_point():
            raise ValueError(f"{name} of dtype {tensor.dtype} must be floating and the dtype of q, {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} on {tensor.device} must be on the device of q, {q.device}")


def _check_grid(grid: tuple[int, ...] | None, num_tokens: int, needed_by: str | None) -> tuple[int, ...]:
    if grid is None:
        side = math.isqrt(num_tokens)
        if side * side == num_tokens:
            return side, side
        if needed_by is not None:
            raise ValueError(f"grid=None with {needed_by} needs a square number of patch tokens, got {num_tokens}")
        return 1, num_tokens
    sides_are_counts = all(isinstance(side, (int, np.integer)) and side > 0 for side in grid)
    if len(grid) not in (2, 3) or not sides_are_counts or math.prod(grid) != num_tokens:
        raise ValueError(
            f"grid={tuple(grid)} must be (height, width) or (frames, height, width) with {num_tokens} patch tokens"
        )
    return tuple(map(int, grid))
