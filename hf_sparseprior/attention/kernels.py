"""`cpp` and `triton`: attention by the compiled kernels of the package. Shape letters as in `ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.attention.choice import Crossover, register_backend
from hf_sparseprior.attention.compiled_kernels import (
    decayed_cpu,
    diagonal_cpu,
    kernels_missing,
    listed_cpu,
    triton_device,
    weights_cpu,
)
from hf_sparseprior.attention.gather import gather_can_run
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import (
    AttentionRequest,
    check_listed_decay,
    drops_unformed_pairs,
    in_order,
    in_raster,
    is_transformed,
    leaves_diagonals,
    listed_decay,
    needs_all_logits,
    request_keys,
)
from hf_sparseprior.patterns.decay import DECAYS, log_gamma, prefix_weights


def _kernel_can_run(request: AttentionRequest) -> str | None:
    """None, or what none of the compiled kernels along diagonals and over all pairs with a decay can do."""
    if request.plan.offsets is None and request.decay is None:
        return "dense attention without a decay is what scaled_dot_product_attention is for"
    if reason := needs_all_logits(request) or leaves_diagonals(request):
        return reason
    if request.needs_all_weights():
        return "the compiled kernels do not return attention weights"
    if request.decay is not None and DECAYS[request.decay["name"]].learns_positions(request.decay):
        return "the compiled kernels have tables of whole ranks, and this order is learned"
    return kernels_missing() or drops_unformed_pairs(request) or is_transformed()


def cpp_can_run(request: AttentionRequest) -> str | None:
    """None, or which part of the request the C++ kernels cannot do."""
    if request.has_lists():
        return gather_can_run(request) or kernels_missing() or diagonal_cpu.can_run(request.q)
    if request.plan.offsets is None and request.dropout_p > 0:
        return "the C++ kernel has no dropout of dense attention"
    return _kernel_can_run(request) or diagonal_cpu.can_run(request.q)


def triton_can_run(request: AttentionRequest) -> str | None:
    """None, or which part of the request the Triton kernels cannot do."""
    return _kernel_can_run(request) or triton_device.can_run(request.q)


def cpp(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """The C++ kernels: along diagonals, over lists of keys, or over all pairs with a decay."""
    return (_cpp(request) if request.one_width() else _at_one_width(request, _cpp)), None


def _cpp(request: AttentionRequest) -> Tensor:
    if request.has_lists():
        return _listed_kernel(request)
    if request.plan.offsets is not None:
        return _diagonal_kernel(request, diagonal_cpu.diagonal_attention, "offset_counts")
    scalars = _of_decay(request, _decay_scalars)
    positions = plan_table(request.plan, "positions_float32", request.q.device)
    return decayed_cpu.decayed_attention(
        request.q, request.k, request.v, positions, *scalars, request.plan.num_prefix_tokens, request.logit_scale()
    )


def triton(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """The Triton kernels: along diagonals, or over all pairs with a decay."""
    return (_triton(request) if request.one_width() else _at_one_width(request, _triton)), None


def _triton(request: AttentionRequest) -> Tensor:
    diagonal_attention, decayed_attention = triton_device.kernels()
    if request.plan.offsets is not None:
        return _diagonal_kernel(request, diagonal_attention, "offset_begin")
    scalars = _decay_scalars(request)
    positions = plan_table(request.plan, "positions_int32", request.q.device)
    prefix, scale = request.plan.num_prefix_tokens, request.logit_scale()
    return decayed_attention(
        request.q,
        request.k,
        request.v,
        positions,
        *scalars,
        prefix,
        scale,
        dropout_p=request.dropout_p,
        tables=request.plan.decay_tables,
    )


def _at_one_width(request: AttentionRequest, run: Callable[[AttentionRequest], Tensor]) -> Tensor:
    """What a kernel computes, (B, H, T, E), which takes queries, keys and values of one width.

    Zeros fill up what is narrower; they change neither a logit nor another channel. With values twice as wide that is a
    third more work, and still four times as fast as plain PyTorch along the diagonals of 196 patches.
    """
    more = request.v.shape[-1] - request.q.shape[-1]
    if more < 0:
        return run(request._replace(v=F.pad(request.v, (0, -more))))[..., :more]
    q, k = (F.pad(tensor, (0, more)) for tensor in (request.q, request.k))
    return run(request._replace(q=q, k=k, scale=request.logit_scale()))


class DecayScalars(NamedTuple):
    """A decay's scalars in float32: log gamma (C, H), alpha (H,), gamma of pairs with a prefix token (H,)."""

    log_gamma: Tensor
    alpha: Tensor
    prefix_gamma: Tensor


KEPT_BYTES = 1 << 18  # of a layer; beyond it computing anew takes little of a call
Made = TypeVar("Made", bound=Sequence[Tensor])


def _of_decay(request: AttentionRequest, make: Callable[[AttentionRequest], Made]) -> Made:
    """What a function makes of the plan and the decay's scalars alone, kept in the plan while these are the same.

    Without gradients, and on the CPU, where to compare scalars costs less than to make anything of them. By their
    values, not by versions, which do not count what is written to `.data`.
    """
    decay, plan = request.decay, request.plan
    assert decay is not None
    # Tensors of other types are being traced, or lie elsewhere.
    plain_tensor = type(request.q) is Tensor and request.q.device.type == "cpu"
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not plain_tensor:
        return make(request)
    scalars = decay["beta"], decay.get("alpha"), decay.get("prefix_beta")
    kept = plan.of_decay.get(make)
    if kept is not None and all(map(_same, kept[0], scalars)):
        return kept[1]
    made = make(request)
    if sum(tensor.nbytes for tensor in made) <= KEPT_BYTES:
        plan.of_decay[make] = [None if tensor is None else tensor.clone() for tensor in scalars], made
    return made


def _same(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None:
        return before is now
    return before.dtype == now.dtype and torch.equal(before, now)


def _decay_scalars(request: AttentionRequest) -> DecayScalars:
    assert request.decay is not None
    alpha_H, gamma_H = request.decay.get("alpha"), prefix_weights(request.decay, torch.float32)
    if alpha_H is None or gamma_H is None:
        ones = torch.ones(request.plan.num_heads, device=request.q.device)
        alpha_H, gamma_H = ones if alpha_H is None else alpha_H, ones if gamma_H is None else gamma_H
    # Kernels read them one after the other.
    return DecayScalars(log_gamma(request.decay["beta"].float()), alpha_H.float().contiguous(), gamma_H.contiguous())


def _listed_kernel(request: AttentionRequest) -> Tensor:
    """Attention over lists of keys by the C++ kernel."""
    key_ids, factor, prefix_factor = request_keys(request).int(), None, None
    if request.decay is not None:
        scalars = _decay_scalars(request)
        factor = _listed_weights(request, scalars, key_ids)
        prefix_factor = scalars.alpha * scalars.prefix_gamma
    prefix, scale = request.plan.num_prefix_tokens, request.logit_scale()
    return listed_cpu.listed_attention(request.q, request.k, request.v, key_ids, prefix, scale, factor, prefix_factor)


def _listed_weights(request: AttentionRequest, scalars: DecayScalars, key_ids: Tensor) -> Tensor:
    """Factors of the logits of listed pairs, (1 or B, H, n, K)."""
    assert request.decay is not None
    learned = DECAYS[request.decay["name"]].learns_positions(request.decay)
    if request.token_ids is not None or learned:  # positions of each image, or such as have gradients
        return listed_decay(request, key_ids, torch.float32) * scalars.alpha.view(-1, 1, 1)
    check_listed_decay(request, 2 * key_ids.numel())  # keys and factors
    positions = plan_table(request.plan, "positions_float32", key_ids.device)
    prefix = request.plan.num_prefix_tokens
    return weights_cpu.listed_weights(
        positions, key_ids, prefix, scalars.log_gamma, scalars.alpha, scalars.prefix_gamma
    )


def _diagonal_weights(request: AttentionRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the logits: of the pairs of each offset, with a prefix token, and of a patch with itself alone."""
    scalars = _decay_scalars(request)
    return _pair_weights(request.plan, scalars), scalars.alpha * scalars.prefix_gamma, scalars.alpha


def _pair_weights(plan: AttentionPlan, scalars: DecayScalars) -> Tensor:
    """Weights of the pairs of each offset, head after head, in the order of "pair_begin"."""
    device = scalars.alpha.device
    if device.type == "cpu" and diagonal_cpu.ready() is None:
        return weights_cpu.pair_weights(
            plan_table(plan, "positions_in_order", device),
            plan_table(plan, "signed_offsets", device),
            plan_table(plan, "offset_counts", device),
            plan_table(plan, "pair_begin", device),
            scalars.log_gamma,
            scalars.alpha,
            plan.offset_pairs,
        )
    distances = plan_table(plan, "pair_distances", device)
    log_gamma, alpha = (_of_pairs(scalar, plan.head_pairs) for scalar in (scalars.log_gamma, scalars.alpha))
    return torch.exp(distances * log_gamma).mean(0) * alpha


def _of_pairs(scalars: Tensor, counts: Sequence[int]) -> Tensor:
    """The scalars (..., H) of each head, once for each of its pairs: (..., pairs).

    On a GPU the gradient of `repeat_interleave` would be added up in an order that changes from run to run.
    """
    heads = zip(scalars.unbind(-1), counts, strict=True)
    return torch.cat([scalar.unsqueeze(-1).expand(*scalar.shape, count) for scalar, count in heads], -1)


def _diagonal_kernel(request: AttentionRequest, kernel: Callable[..., Tensor], heads_table: str) -> Tensor:
    """Attention along diagonals. `heads_table` names the table by which the kernel knows the offsets of a head."""
    plan, device = request.plan, request.q.device
    weights = {}
    if request.decay is not None:
        pair_weights, prefix_weight, self_weight = _of_decay(request, _diagonal_weights)
        weights = {
            "pair_weights": pair_weights,
            "pair_begin": plan_table(plan, "pair_begin", device),
            "prefix_weight": prefix_weight,
            "self_weight": self_weight,
        }
    q, k, v = request.q, request.k, request.v
    if plan.ranks is not None:
        q, k, v = (in_order(plan, tokens) for tokens in (q, k, v))
    out = kernel(
        q,
        k,
        v,
        plan_table(plan, "signed_offsets", device),
        plan_table(plan, heads_table, device),
        plan.num_prefix_tokens,
        request.logit_scale(),
        zero_fill=plan.mask_fill == "zero",
        dropout_p=request.dropout_p,
        **weights,
    )
    return out if plan.ranks is None else in_raster(plan, out)


# Medians, measured interleaved on one core of an AMD EPYC: windows of growing width, 4 to 400 patches, 6 heads of 64,
# batches of 1 and 8, against the faster of `sdpa` and `reference`, and with VIOLIN's decay against `reference`.
# `tasks.benchmark chooser` checks them.
register_backend(
    "cpp",
    can_run=cpp_can_run,
    run=cpp,
    priority=50,
    crossovers={
        ("cpu", False, "sdpa"): Crossover(1, 0.57, pairs=300),
        ("cpu", True, "sdpa"): Crossover(1, 0.48, pairs=4600),
        ("cpu", False, "sdpa", torch.bfloat16): Crossover(1, 0.77),
        ("cpu", True, "sdpa", torch.bfloat16): Crossover(9, 0.6),
        ("cpu", False, "reference"): Crossover(1, 0.8),
        ("cpu", True, "reference"): Crossover(1, 0.55),
        ("cpu", False, "reference", torch.bfloat16): Crossover(1, 1.0),
        ("cpu", True, "reference", torch.bfloat16): Crossover(1, 0.65),
    },
)
# On an H100 calls from Python were faster than flash attention from 703 patches on, with gradients from 1103, and
# kernels in CUDA graphs from 293 (docs/gpu.md); these kernels are newer, and were not timed yet.
register_backend(
    "triton",
    can_run=triton_can_run,
    run=triton,
    priority=40,
    crossovers={
        ("cuda", trains, dense): Crossover(400, 1 / 16) for trains in (False, True) for dense in ("sdpa", "reference")
    },
)
