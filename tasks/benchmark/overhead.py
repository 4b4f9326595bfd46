"""What attention costs besides its work.

First, small calls: one layer's attention over few patches, without gradients, next to `scaled_dot_product_attention`
over all pairs. A call has the layer's part (decay, plan), the choice of the backend, and the operator. Second, whole
layers over as many patches, next to a layer of transformers' ViT of the same sizes. Third, new image sizes: what the
plans and tables of all layers of a model take when a size comes for the first time. Times are taken around
`AttentionPlan` and its tables, in forward passes at sizes that are new to the model; each size is a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
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
from tasks.benchmark import report
from tasks.benchmark.commands import STOCK
from tasks.benchmark.entry import Benchmark, Case, Session
from tasks.benchmark.model_contenders import preset_config
from tasks.benchmark.timing import interleave

SDPA = "scaled_dot_product_attention"
CALLS, LAYERS, PLANS = ("attention", "layer", "plans of a new size")
PATCH = 16  # pixels: the distance of two sizes with other grids
Calls = dict[str, Callable[[], object]]


def small_calls(priors: list[str], arguments: argparse.Namespace) -> tuple[Calls, dict[str, str]]:
    """A layer's attention over side x side patches and a class token, by prior, and the backends that are chosen."""
    device, grid = torch.device(arguments.device), (arguments.side, arguments.side)
    shape = (3, 1, arguments.side**2 + 1, arguments.heads, arguments.width)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q, k, v = (tokens.to(device, getattr(torch, arguments.dtype)).transpose(1, 2) for tokens in drawn)
    calls: Calls = {SDPA: lambda: F.scaled_dot_product_attention(q, k, v)}
    chosen: dict[str, str] = {}

    def attend(layer: PriorAttention) -> object:
        return layer.attend(AttentionRequest(q, k, v, layer.plan(grid, 1)))

    for prior in priors:
        layer = PriorAttention(
            arguments.heads, resolve_prior(parse_prior(prior), arguments.heads, grid), head_dim=arguments.width
        )
        layer = layer.to(device).eval()
        decay = layer.active_decay()
        calls[prior] = partial(attend, layer)
        request = AttentionRequest(q, k, v, layer.plan(grid, 1), None if decay is None else decay())
        chosen[prior] = choose_backend(request)
    return calls, chosen


def whole_layers(priors: list[str], arguments: argparse.Namespace) -> Calls:
    """A ViT layer over side x side patches and a class token, by prior."""
    dtype, device, side = getattr(torch, arguments.dtype), torch.device(arguments.device), arguments.side
    hidden = arguments.heads * arguments.width
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": arguments.heads,
        "intermediate_size": 4 * hidden, "image_size": side * PATCH, "patch_size": PATCH,
    }  # fmt: skip
    stock = ViTModel(ViTConfig(**sizes, attn_implementation="sdpa")).to(device, dtype).eval()
    tokens = torch.randn(1, side * side + 1, hidden, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    calls: Calls = {STOCK: partial(stock.layers[0], tokens)}
    for prior in ["dense", *priors]:
        model = SparsePriorViTModel(SparsePriorViTConfig(**sizes, prior=prior)).to(device, dtype).eval()
        calls[prior] = partial(model.layers[0], tokens, (side, side), 1)
    return calls


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


def new_sizes(prior: str, arguments: argparse.Namespace) -> list[float]:
    """Seconds for plans of a model at sizes around --pixels that it has not seen."""
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
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
    return seconds[1:]


class Overhead(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """Sizes and priors."""
        report.check_positive(
            **{name: getattr(arguments, name) for name in ("side", "heads", "width", "rounds", "sizes")}
        )
        if arguments.pixels < PATCH * (arguments.sizes + 2):
            least = f"must be at least {PATCH * (arguments.sizes + 2)} for {arguments.sizes} sizes"
            raise ValueError(f"--pixels {arguments.pixels} {least}")
        for prior in arguments.priors:
            preset_config(arguments.preset, 224, prior)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """The three parts; plans of one prior after another."""
        for part, names in ((CALLS, [SDPA]), (LAYERS, [STOCK, "dense"])):
            yield [{"part": part, "contender": name} for name in (*names, *arguments.priors)]
        yield from ([{"part": PLANS, "contender": prior}] for prior in arguments.priors)

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """Of one part. Plans are timed within a forward pass."""
        arguments, part = session.arguments, cases[0]["part"]
        chosen: dict[str, str] = {}
        with torch.no_grad():
            if part == PLANS:
                return [{**cases[0], "seconds": new_sizes(cases[0]["contender"], arguments)}]
            if part == CALLS:
                calls, chosen = small_calls(arguments.priors, arguments)
            else:
                calls = whole_layers(arguments.priors, arguments)
            seconds = interleave(calls, session.device, arguments.seconds, arguments.rounds)
        return [
            {**case, "seconds": seconds[case["contender"]], "ran": chosen.get(case["contender"], "")} for case in cases
        ]


BENCHMARK = Overhead(
    name="overhead",
    keys=("part", "contender"),
    same=("side", "heads", "width", "preset", "pixels", "sizes"),
    bases=(SDPA, STOCK),
    bar=("microseconds", lambda row: 1e6 * row["seconds"]["median"]),
)
