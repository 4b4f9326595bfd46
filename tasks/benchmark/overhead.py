"""What attention costs besides its work: python -m tasks.benchmark.overhead

First, small calls: microseconds of one layer's attention over few patches, without gradients, next to
`scaled_dot_product_attention` over all pairs. A call has the layer's part (decay, plan), the choice of the backend, and
the operator.

Second, whole layers over as many patches, next to a layer of transformers' ViT of the same sizes.

Third, new image sizes: milliseconds that the plans and tables of all layers of a model take when a size comes for
the first time. Times are taken around `AttentionPlan` and its tables, in forward passes at sizes that are new to the
model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel

from hf_sparseprior.attention.choice import choose_backend
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.models.modeling_sparseprior_vit import SparsePriorViTModel
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import parse_prior, resolve_prior
from tasks.benchmark import commands, report
from tasks.benchmark.model import preset_config
from tasks.benchmark.timing import interleave, spread
from tasks.common.command import run_command
from tasks.common.results import write_results

DENSE = "scaled_dot_product_attention"
STOCK = "transformers"
PATCH = 16  # pixels: the distance of two sizes with other grids


def small_calls(priors: list[str], side: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds of a layer's attention over side x side patches and a class token, by prior: spreads of the rounds."""
    dtype, device = report.machine_of(arguments)
    heads, width = arguments.heads, arguments.width
    drawn = torch.randn(3, 1, side * side + 1, heads, width, generator=torch.Generator().manual_seed(0))
    q, k, v = (tokens.to(device, dtype).transpose(1, 2) for tokens in drawn)
    calls: dict[str, Callable[[], object]] = {DENSE: lambda: F.scaled_dot_product_attention(q, k, v)}
    chosen = {DENSE: ""}
    for prior in priors:
        resolved = resolve_prior(parse_prior(prior), heads, (side, side))
        layer = PriorAttention(heads, resolved, head_dim=width).to(device).eval()

        def call(layer: PriorAttention = layer) -> object:
            return layer.attend(AttentionRequest(q, k, v, layer.plan((side, side), 1)))

        decay = layer.active_decay()
        request = AttentionRequest(q, k, v, layer.plan((side, side), 1), None if decay is None else decay())
        calls[prior], chosen[prior] = call, choose_backend(request)
    seconds = interleave(calls, device, arguments.budget, arguments.rounds)
    return {name: {"seconds": spread(values), "backend": chosen[name]} for name, values in seconds.items()}


def whole_layers(priors: list[str], side: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of a ViT layer over side x side patches and a class token, by prior: spreads of the rounds."""
    dtype, device = report.machine_of(arguments)
    hidden = arguments.heads * arguments.width
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": arguments.heads,
        "intermediate_size": 4 * hidden, "image_size": side * PATCH, "patch_size": PATCH,
    }  # fmt: skip
    stock = ViTModel(ViTConfig(**sizes, attn_implementation="sdpa")).to(device, dtype).eval()
    tokens = torch.randn(1, side * side + 1, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    calls: dict[str, Callable[[], object]] = {STOCK: partial(stock.layers[0], tokens)}
    for prior in ["dense", *priors]:
        model = SparsePriorViTModel(SparsePriorViTConfig(**sizes, prior=prior)).to(device, dtype).eval()
        calls[prior] = partial(model.layers[0], tokens, (side, side), 1)
    seconds = interleave(calls, device, arguments.budget, arguments.rounds)
    return {name: spread(values) for name, values in seconds.items()}


@contextmanager
def timed_plans() -> Iterator[list[float]]:
    """Seconds spent on plans and their tables inside, as the only element of the list."""
    spent = [0.0]

    def timed(function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    init, build = AttentionPlan.__init__, AttentionPlan.build_table
    AttentionPlan.__init__, AttentionPlan.build_table = timed(init), timed(build)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        AttentionPlan.__init__, AttentionPlan.build_table = init, build  # type: ignore[method-assign]


def new_sizes(prior: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Spread of the seconds for plans of a model at sizes around --pixels that it has not seen."""
    dtype, device = report.machine_of(arguments)
    torch.manual_seed(0)
    config = preset_config(arguments.preset, 224, prior)
    model = preset_family(arguments.preset).classifier(config).to(device, dtype).eval()
    seconds = []
    for number in range(arguments.sizes + 1):  # the first one warms up
        pixels = arguments.pixels - PATCH * ((arguments.sizes - number) if number else arguments.sizes + 1)
        images = torch.zeros(1, config.num_channels, pixels, pixels, device=device, dtype=dtype)
        with timed_plans() as spent:
            model(images)
        seconds.append(spent[0])
    return spread(seconds[1:])


def run(arguments: argparse.Namespace) -> None:
    """Measure, print and write."""
    report.check_file(arguments.out)
    counts = {name: getattr(arguments, name) for name in ("heads", "width", "rounds", "budget", "sizes")}
    report.check_positive(**counts, side=arguments.side)
    if arguments.pixels < PATCH * (arguments.sizes + 2):
        raise ValueError(
            f"--pixels {arguments.pixels} must be at least {PATCH * (arguments.sizes + 2)} for {arguments.sizes} sizes"
        )
    for prior in arguments.priors:
        preset_config(arguments.preset, 224, prior)
    report.machine_of(arguments)
    results = report.provenance("overhead", arguments)
    report.print_provenance(results)
    with torch.no_grad():
        results["calls"] = small_calls(arguments.priors, arguments.side, arguments)
        results["layers"] = whole_layers(arguments.priors, arguments.side, arguments)
        results["plans"] = {}
        for prior in arguments.priors:
            results["plans"][prior] = new_sizes(prior, arguments)
            print(f"{prior}: plans of a new size {1e3 * results['plans'][prior]['median']:.2f} ms", flush=True)
    rows = [
        [name, own["backend"], *(f"{1e6 * own['seconds'][key]:.1f}" for key in ("median", "lower", "upper"))]
        for name, own in results["calls"].items()
    ]
    print(f"\none layer, {arguments.side**2} patches, microseconds")
    print(report.text_table(["", "backend", "median", "first quartile", "third quartile"], rows))
    base = results["layers"][STOCK]["median"]
    rows = [
        [name, *(f"{1e6 * own[key]:.1f}" for key in ("median", "lower", "upper")), f"{own['median'] / base:.3f}"]
        for name, own in results["layers"].items()
    ]
    print(f"\none ViT layer, {arguments.side**2} patches, microseconds")
    print(report.text_table(["", "median", "first quartile", "third quartile", f"of {STOCK}"], rows))
    rows = [
        [name, *(f"{1e3 * own[key]:.2f}" for key in ("median", "lower", "upper"))]
        for name, own in results["plans"].items()
    ]
    print(f"\nplans of a new size, {arguments.preset} around {arguments.pixels} px, milliseconds")
    print(report.text_table(["", "median", "first quartile", "third quartile"], rows))
    write_results(arguments.out, results)
    print(f"\n{arguments.out}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.overhead()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
