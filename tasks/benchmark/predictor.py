"""Sparsifiner's prediction and the ways to attend to predicted keys.

This shows whether a prediction pays. It times dense attention without one, the prediction itself, attention over its
lists of keys (gathered, by the C++ kernel, and dense with a mask; these decide the crossovers of lists), and both
together as a layer does them, with the backend that it chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import resolve_prior
from tasks.benchmark import report
from tasks.benchmark.commands import DENSE
from tasks.benchmark.entry import Benchmark, Case, Session
from tasks.benchmark.timing import SetUp

PREDICTION, GATHERED, COMPILED, MASKED = "prediction", "gather", "cpp", "sdpa with a mask"
TOGETHER = "prediction and attention"
BACKENDS_OF = {GATHERED: "gather", COMPILED: "cpp", MASKED: "sdpa"}  # of the ways to attend to lists of keys
FORWARD, BACKWARD = "forward", "forward and backward"
# The prediction has no backward pass: no gradient flows from an attention to its predictor.
WAYS = {FORWARD: (DENSE, *BACKENDS_OF, PREDICTION, TOGETHER), BACKWARD: (DENSE, *BACKENDS_OF)}


def prior_of(keep_rate: float) -> dict[str, Any]:
    """Sparsifiner at a keep rate."""
    return {"predictor": {"name": "sparsifiner", "keep_rate": keep_rate}}


def set_ups_of(
    case: Case, arguments: argparse.Namespace
) -> tuple[dict[str, SetUp], dict[str, Callable[[], str | None]]]:
    """What is timed on a grid of side x side patches and a class token, by name, and what says why it cannot be."""
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    side, heads, width = case["side"], arguments.heads, arguments.width
    trains = case["pass"] == BACKWARD
    layer = PriorAttention(heads, resolve_prior(prior_of(case["keep_rate"]), heads, (side, side)), head_dim=width)
    layer = layer.to(device)
    predictor, plan = layer.predictor, layer.plan((side, side), 1)
    assert predictor is not None
    shape = (3, case["batch"], heads, side * side + 1, width)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    q, k, v = (tensor.detach().requires_grad_(trains) for tensor in drawn.unbind(0))
    request = AttentionRequest(q, k, v, plan)

    def passes(forward: Any) -> SetUp:
        def call() -> None:
            with torch.set_grad_enabled(trains):
                out = forward()
            if trains:
                torch.autograd.grad(out.sum(), [q, k, v])

        return lambda: call

    listed = request._replace(key_ids=predictor(request))
    timed = {DENSE: passes(lambda: F.scaled_dot_product_attention(q, k, v))}
    for way, backend in BACKENDS_OF.items():
        timed[way] = passes(lambda backend=backend: run_plan(listed, backend=backend)[0])
    if not trains:
        timed[PREDICTION] = lambda: lambda: predictor(request)
        timed[TOGETHER] = passes(lambda: layer.attend(request)[0])
    return timed, {way: partial(BACKENDS[backend].can_run, listed) for way, backend in BACKENDS_OF.items()}


class Predictor(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """Sizes and keep rates."""
        report.check_positive(heads=arguments.heads, width=arguments.width)
        report.parse_sizes("--sizes", arguments.sizes)
        for rate in report.from_yaml("--keep-rates", f"[{arguments.keep_rates}]"):
            if rate == 1:
                raise ValueError("--keep-rates 1 must be below 1: at 1 attention is dense, and nothing is predicted")
            resolve_prior(prior_of(rate), arguments.heads, (2, 2))

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """All ways of each size, keep rate and pass."""
        for side, batch in report.parse_sizes("--sizes", arguments.sizes):
            for rate in report.from_yaml("--keep-rates", f"[{arguments.keep_rates}]"):
                for key, ways in WAYS.items():
                    size = {"side": side, "batch": batch, "keep_rate": rate, "pass": key}
                    yield [{**size, "contender": way} for way in ways]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """All ways in turns."""
        set_ups, forecasts = set_ups_of(cases[0], session.arguments)
        return session.in_turns(cases, set_ups, {}, forecasts)


BENCHMARK = Predictor(
    name="predictor",
    keys=("side", "batch", "keep_rate", "pass", "contender"),
    same=("heads", "width"),
    bases=(DENSE, MASKED),
    size="side",
)
