"""The backends of attention, each registered once, and which of them runs a call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hf_sparseprior.attention.plain_operations import plain
from hf_sparseprior.attention.request import AttentionRequest, is_transformed
from hf_sparseprior.base.checks import did_you_mean

logger = logging.getLogger("hf_sparseprior.ops")


class Crossover(NamedTuple):
    """From where on a sparse path is faster than the dense path that it replaces."""

    tokens: int  # the fewest patches
    density: float  # the largest share of the pairs in a large call
    # What a call costs more than the dense path's, whatever its size, counted in pairs of heads of width 64 that the
    # dense path would compute in that time. Of small calls only a smaller share of the pairs is worth it.
    pairs: int = 0

    def largest_density(self, request: AttentionRequest) -> float:
        """The largest share of the pairs with which the sparse path is faster."""
        if not self.pairs:
            return self.density
        batch, heads, tokens, width = request.q.shape
        return self.density * (1 - self.pairs / max(1.0, batch * heads * tokens**2 * width / 64))


# (device type or family of cards as of `device_family`, whether gradients are wanted, dense backend that would run
# instead), and if a fourth part follows, the dtype for which alone it holds.
CrossoverKey = tuple[str, bool, str] | tuple[str, bool, str, torch.dtype]


@dataclass(frozen=True)
class Backend:
    """A way to run attention; see `register_backend`."""

    can_run: Callable[[AttentionRequest], str | None]
    run: Callable[[AttentionRequest], tuple[Tensor, Tensor | None]]
    priority: float
    dense: bool = False
    crossovers: Mapping[CrossoverKey, Crossover] = field(default_factory=dict)
    only_measured: bool = False


BACKENDS: dict[str, Backend] = {}
_by_priority: list[str] = []  # their names, the highest priority first
_dense: list[str] = []  # of these, those that form all pairs
_registered = [0]  # how often backends were registered or taken out, after which kept choices no longer hold


def register_backend(
    name: str,
    *,
    can_run: Callable[[AttentionRequest], str | None],
    run: Callable[[AttentionRequest], tuple[Tensor, Tensor | None]],
    priority: float,
    dense: bool = False,
    crossovers: Mapping[CrossoverKey, Crossover] | None = None,
    only_measured: bool = False,
) -> None:
    """Add a backend to the choice, to `backend=` and SPARSEPRIOR_BACKEND, to tests and to the benchmark.

    Args:
        name: its name everywhere.
        can_run: returns None if it can run a request, otherwise why not, as half a sentence. A plan keeps the answer
            for all requests with the same shapes, dtype, device, gradients and options, so it must not depend on values
            of tensors.
        run: returns the output (B, H, T, E) in the dtype of q, and the weights (B, H, T, T) if
            `request.needs_all_weights()`, otherwise None. It agrees with `reference`, forward and backward. The first
            line of its docstring describes it.
        priority: of the backends that can run and are not slower than dense attention, the one with the highest
            priority runs. The package's own have 0 (`reference`) to 50.
        dense: whether it forms all pairs. The others compete with the dense backend of the highest priority that can
            run.
        crossovers: from where on it is faster than a dense backend, by (device type, whether gradients are wanted,
            dense backend), or for one dtype by (..., dtype). Without an entry it counts as faster everywhere.
        only_measured: it is chosen only where an entry says so, and entries are for families of cards: "cuda 9.0"
            stands for a GPU of that compute capability instead of a device type.

    Raises:
        ValueError: if the name is taken.
    """
    if name in BACKENDS or name == "auto":
        raise ValueError(f"backend {name!r} is registered already")
    BACKENDS[name] = Backend(can_run, run, priority, dense, crossovers or {}, only_measured)
    _sort_backends()


def unregister_backend(name: str) -> None:
    """Take a backend out again."""
    del BACKENDS[name]
    _sort_backends()


def _sort_backends() -> None:
    _registered[0] += 1
    _by_priority[:] = sorted(BACKENDS, key=lambda name: -BACKENDS[name].priority)
    _dense[:] = [name for name in _by_priority if BACKENDS[name].dense]


def is_sparse(request: AttentionRequest) -> bool:
    """Whether some pairs are left out."""
    return request.plan.offsets is not None or request.key_ids is not None


def slower_than_dense(backend: Backend, request: AttentionRequest, trains: bool, dense_path: str) -> str | None:
    """Why a backend would be slower than the dense backend `dense_path`; None if it would not."""
    if not is_sparse(request):
        return None
    if not backend.crossovers:
        return "not measured on any device" if backend.only_measured else None
    plan, q = request.plan, request.q
    device_type = q.device.type if q.device.type in ("cpu", "cuda") else "cuda"
    if backend.only_measured:
        device_type = device_family(q.device.type, q.device.index)
    key = (device_type, trains, dense_path)
    limits = backend.crossovers.get((*key, q.dtype)) or backend.crossovers.get(key)
    if limits is None:
        return f"not measured on {device_type}" if backend.only_measured else None
    if plan.num_tokens < limits.tokens:
        return f"dense is faster below {limits.tokens} patches"
    density = plan.cost_density if request.key_ids is None else request.key_ids.shape[-1] / plan.total
    largest = limits.largest_density(request)
    if density > limits.density or _known(density > largest):
        if torch.compiler.is_compiling():
            return "dense is faster"  # a number here would make a graph of this batch alone
        if largest <= 0:
            return "dense is faster in so small a call"
        return f"dense is faster with more than {100 * largest:.1f} % of the pairs"
    return None


@torch._dynamo.assume_constant_result
def device_family(device_type: str, index: int | None) -> str:
    """The type of a device, with the compute capability of a GPU: "cuda 9.0"."""
    if device_type != "cuda":
        return device_type
    return "cuda {}.{}".format(*torch.cuda.get_device_capability(index))


def _known(condition: bool) -> bool:
    """The condition; in a graph for any batch only if it holds for every one.

    Otherwise the graph would be for those batches alone where it comes out as it did.
    """
    return statically_known_true(condition) if torch.compiler.is_compiling() else condition


def forced_backend(backend: str) -> tuple[str, str]:
    """What forces a backend, and its name ("auto" if nothing does). An unknown name is a ValueError."""
    source = "backend"
    heeds_environment = (block := plain()) is None or block.noticed
    if backend == "auto" and heeds_environment and (forced := os.environ.get("SPARSEPRIOR_BACKEND")):
        source, backend = "SPARSEPRIOR_BACKEND", forced
    if backend != "auto" and backend not in BACKENDS:
        hint = did_you_mean(backend, ("auto", *BACKENDS))
        raise ValueError(f"{source}={backend!r} must be one of auto, {', '.join(BACKENDS)}{hint}")
    return source, backend


class Choice(NamedTuple):
    """The backend that runs a request, by name, and why those of a higher priority do not, by theirs."""

    name: str
    refused: tuple[tuple[str, str], ...] = ()
    forced: bool = False


def choose_backend(request: AttentionRequest, backend: str = "auto") -> str:
    """Name of the backend to run.

    `backend` forces one, or else the environment variable SPARSEPRIOR_BACKEND does. Otherwise the fastest that can run
    is taken, or within `plain_operations` the first of its backends that can. A forced backend that cannot run is an
    error; it is never replaced by another.
    """
    source, backend = forced_backend(backend)
    if backend == "auto" and plain() is not None:
        return _first_plain(request)
    return _chosen(request, source, backend).name


def _chosen(request: AttentionRequest, source: str, backend: str) -> Choice:
    """The choice for a request; `source` is what forces a backend that is not "auto"."""
    if backend != "auto":
        if reason := BACKENDS[backend].can_run(request):
            raise ValueError(f"{source}={backend!r} cannot run this attention: {reason}")
        return Choice(backend, forced=True)
    dense_path = _dense_path(request) if is_sparse(request) else ""
    refused: list[tuple[str, str]] = []
    for name in _by_priority:
        candidate = BACKENDS[name]
        reason = slower_than_dense(candidate, request, wants_gradients(request), dense_path)
        reason = reason or candidate.can_run(request)
        if reason is None:
            return Choice(name, tuple(refused))
        refused.append((name, reason))
    raise AssertionError("unreachable: reference runs everything")


def wants_gradients(request: AttentionRequest) -> bool:
    """Whether gradients are wanted, now or when activation checkpointing calls again."""
    q, k, v = request.q, request.k, request.v
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return recorded or request.training


MOST_CHOICES = 256  # that a plan keeps; batches of many sizes must not collect them without limit


def bound_backend(request: AttentionRequest, backend: str = "auto") -> Backend:
    """The backend of `choose_backend`, asked once for all requests of a plan that are alike, and logged.

    Raises:
        ValueError: for tokens that do not fit the plan, or a forced backend that cannot run.
    """
    if torch.compiler.is_compiling() or plain() is not None:  # what is traced now is nobody's to keep
        check_request(request)
        return BACKENDS[choose_backend(request, backend)]
    forced = forced_backend(backend)
    kept, key = request.plan.choices, _kind(request, forced[1])
    try:
        choice = kept.get(key)
    except TypeError:  # sizes that are symbols
        key, choice = (), None
    if choice is None:
        check_request(request)
        choice = _chosen(request, *forced)
        if key:
            if len(kept) >= MOST_CHOICES:
                kept.clear()
            kept[key] = choice
    if logger.isEnabledFor(logging.DEBUG):
        _log(request, choice)
    return BACKENDS[choice.name]


def _kind(request: AttentionRequest, forced: str) -> tuple:
    """What the choice follows from, besides the plan: device, dtype, sizes, gradients, and what is asked for."""
    q, decay = request.q, request.decay
    of_decay = None
    if decay is not None:
        of_decay = decay.get("order") is not None, decay["beta"].requires_grad
    tensors = request.bias, request.token_ids, request.keep_mask, request.key_ids
    asked = (
        request.dropout_p > 0,
        request.renormalise,
        request.top_k,
        request.need_weights,
        request.weight_rows,
        *[None if tensor is None else tensor.shape for tensor in tensors],
    )
    state = torch.is_grad_enabled(), wants_gradients(request), is_transformed() is None, plain() is None
    return forced, _registered[0], q.shape, request.v.shape[-1], q.dtype, q.device, of_decay, state, asked


def check_request(request: AttentionRequest) -> None:
    """Raise ValueError unless the tokens of a request fit its plan, and what is asked for goes together."""
    plan, (batch, _, tokens, _) = request.plan, request.q.shape
    if request.token_ids is not None:
        if tuple(request.token_ids.shape) != (batch, tokens - plan.num_prefix_tokens):
            raise ValueError(
                f"token_ids of shape {tuple(request.token_ids.shape)} must name the {tokens - plan.num_prefix_tokens} "
                f"patches of each of {batch} images"
            )
    elif tokens != plan.total:
        raise ValueError(
            f"{tokens} tokens must be {plan.num_prefix_tokens} prefix tokens and a patch grid of {plan.grid}, "
            f"{plan.total} in all"
        )
    if (rows := request.weight_rows) is not None:
        if not 1 <= rows <= plan.num_prefix_tokens:
            raise ValueError(f"weight_rows={rows} must be between 1 and the {plan.num_prefix_tokens} prefix tokens")
        if request.bias is not None or request.keep_mask is not None:
            raise ValueError(f"weight_rows={rows} cannot be used with a bias or with dropped keys; take all weights")


def _first_plain(request: AttentionRequest) -> str:
    """The first backend of `plain_operations` that can run the request."""
    block = plain()
    assert block is not None
    for name in block.backends:
        if (reason := BACKENDS[name].can_run(request)) is None:
            block.ran[name] += 1
            return name
        block.refused.setdefault(name, reason)
    raise ValueError(f"none of the backends {', '.join(block.backends)} can run this attention")


def _dense_path(request: AttentionRequest) -> str:
    """The dense backend that would run the request."""
    for name in _dense:
        if BACKENDS[name].can_run(request) is None:
            return name
    raise AssertionError("unreachable: reference runs everything")


def _log(request: AttentionRequest, choice: Choice) -> None:
    plan = request.plan
    if choice.forced:
        logger.debug("layer %d: %s (forced)", plan.layer, choice.name)
        return
    if request.key_ids is None:
        size = f"{plan.num_tokens} patches, {100 * plan.density:.1f} % of the pairs kept"
    else:
        size = f"{plan.num_tokens} patches, up to {request.key_ids.shape[-1]} keys of each listed"
    others = "".join(f"; not {other}: {reason}" for other, reason in choice.refused)
    logger.debug("layer %d: %s (%s%s)", plan.layer, choice.name, size, others)
