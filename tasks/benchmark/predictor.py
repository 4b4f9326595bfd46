"""Sparsifiner's prediction and the ways to attend to predicted keys: python -m tasks.benchmark.predictor

This shows whether a prediction pays. It times dense attention without one, the prediction itself, attention over its
lists of keys (gathered, by the C++ kernel, and dense with a mask; these decide the crossovers of lists), and both
together as a layer does them, with the backend that it chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import resolve_prior
from tasks.benchmark import commands, report
from tasks.benchmark.timing import SetUp, measure
from tasks.common.command import run_command
from tasks.common.results import write_results

DENSE, PREDICTION, GATHERED, COMPILED, MASKED = "dense", "prediction", "gather", "cpp", "sdpa with a mask"
BOTH = "prediction and attention"
WAYS = (DENSE, PREDICTION, GATHERED, COMPILED, MASKED, BOTH)
PASSES = {False: "forward", True: "forward and backward"}


BACKENDS_OF = {GATHERED: "gather", COMPILED: "cpp", MASKED: "sdpa"}  # of the ways to attend to lists of keys


def set_ups(
    side: int, batch: int, keep_rate: float, trains: bool, arguments: argparse.Namespace
) -> tuple[dict[str, SetUp], dict[str, Callable[[], str | None]]]:
    """What is timed on a grid of side x side patches and a class token, by name, and what says why it cannot be.

    The prediction has no backward pass: no gradient flows from an attention to its predictor.
    """
    dtype, device = report.machine_of(arguments)
    grid, heads, width = (side, side), arguments.heads, arguments.width
    prior = resolve_prior({"predictor": {"name": "sparsifiner", "keep_rate": keep_rate}}, heads, grid)
    layer = PriorAttention(heads, prior, head_dim=width).to(device)
    predictor, plan = layer.predictor, layer.plan(grid, 1)
    assert predictor is not None
    shape = (3, batch, heads, side * side + 1, width)
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
        timed[BOTH] = passes(lambda: layer.attend(request)[0])
    return timed, {way: partial(BACKENDS[backend].can_run, listed) for way, backend in BACKENDS_OF.items()}


def measured(side: int, batch: int, keep_rate: float, trains: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """`timing.measure` of one size, keep rate and pass."""
    _, device = report.machine_of(arguments)
    own, forecasts = set_ups(side, batch, keep_rate, trains, arguments)
    result = measure(own, device, arguments.budget, arguments.rounds, (DENSE, MASKED), forecasts)
    for name, reason in result["left_out"].items():
        print(f"{side**2} x {batch}, {keep_rate:g}, {PASSES[trains]}: {name} is left out, {reason}")
    return {"tokens": side**2, "batch": batch, "keep_rate": keep_rate, "pass": PASSES[trains], **result}


def row(entry: dict[str, Any]) -> list[str]:
    """A line of the table."""
    contenders = entry["contenders"]
    cells = [f"{entry['tokens']} x {entry['batch']}", f"{entry['keep_rate']:g}", entry["pass"]]
    for name in WAYS:
        cells.append(report.milliseconds(contenders[name]["seconds"]) if name in contenders else "-")
    for name, other in (*((name, MASKED) for name in (GATHERED, COMPILED)), (BOTH, DENSE)):
        cells.append(f"{contenders[name][f'times_{other}']['median']:.2f}" if name in contenders else "-")
    return cells


def run(arguments: argparse.Namespace) -> None:
    """Measure, print and write."""
    report.check_file(arguments.out)
    report.check_positive(
        heads=arguments.heads, width=arguments.width, rounds=arguments.rounds, budget=arguments.budget
    )
    sizes = report.parse_sizes("--sizes", arguments.sizes)
    rates = report.from_yaml("--keep-rates", f"[{arguments.keep_rates}]")
    for rate in rates:
        if rate == 1:
            raise ValueError("--keep-rates 1 must be below 1: at 1 attention is dense, and nothing is predicted")
        resolve_prior({"predictor": {"name": "sparsifiner", "keep_rate": rate}}, arguments.heads, (2, 2))
    report.machine_of(arguments)
    results = report.provenance("predictor", arguments)
    report.print_provenance(results)
    results["entries"] = [
        measured(side, batch, rate, trains, arguments) for side, batch in sizes for rate in rates for trains in PASSES
    ]
    ratios = (*(f"{way} / mask" for way in (GATHERED, COMPILED)), "both / dense")
    header = ["patches x images", "keep rate", "pass", *WAYS, *ratios]
    print("\nmilliseconds, median (quartiles)\n" + report.text_table(header, [row(e) for e in results["entries"]]))
    write_results(arguments.out, results)
    print(f"\n{arguments.out}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.predictor()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
