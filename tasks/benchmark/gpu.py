"""Attention and whole models on a CUDA GPU: python -m tasks.benchmark.gpu

It checks the Triton kernels against `reference` in float64. Then it times operators and models in one process, where
contenders take turns. It prints one table: medians with their spread, the ratio to the copy bound (read Q, K, V and
write O once, at the bandwidth that a copy reaches here) and how many times faster than flash attention over all pairs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.attention_plan import AttentionPlan, plan_table
from hf_sparseprior.attention_request import AttentionRequest
from hf_sparseprior.decay import DECAYS
from hf_sparseprior.ops import run_plan
from hf_sparseprior.prior import resolve_prior
from hf_sparseprior.resolved import DecayTensors
from tasks.benchmark import timing
from tasks.common.environment import command_line, environment
from tasks.common.results import write_results

Call = timing.Call

HEADS, WIDTH, PREFIX = 12, 64, 1
BATCHES = {196: 128, 1024: 32, 4096: 8, 16384: 8}
FIBOTTENTION = {"name": "fibottention", "w_min": 5, "w_max": 65}
VIOLIN = {"name": "violin"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
CONTENDERS = ("triton", "flash", "masked", "flex", "reference")
# Hidden size, layers and heads of ViT-S and ViT-B; the MLP is four times as wide.
SIZES = {"ViT-S": (384, 12, 6), "ViT-B": (768, 12, 12)}
TURN_SECONDS = 0.02
COPY_BYTES = 1 << 30


# ---- time -----------------------------------------------------------------------------------------------------------


def seconds_per_call(call: Call, calls: int, device: torch.device) -> float:
    """Mean seconds of calls in a row, by events of the device."""
    if device.type != "cuda":
        return timing.seconds_per_call(call, calls, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000 / calls


def measure(set_ups: dict[str, Callable[[], Call]], rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Seconds of each contender: {"median", "low", "high", "calls"} or {"failed": why}. All take turns in every round.

    A set-up is run first and makes the call. What does not fit in memory or does not exist here fails with its reason.
    """
    calls: dict[str, tuple[Call, int]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, set_up in set_ups.items():
        try:
            call = set_up()
            seconds_per_call(call, 2, device)  # compiles
            estimate = seconds_per_call(call, 1, device)
            calls[name] = (call, max(1, min(200, round(TURN_SECONDS / max(estimate, 1e-6)))))
        except Exception as error:  # a contender may fail in ways of its own; which and why is part of the result
            results[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            seconds[name].append(seconds_per_call(*calls[name], device))
    for name, values in seconds.items():
        low, median, high = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
        results[name] = {"median": median, "low": low, "high": high, "calls": calls[name][1]}
    return {name: results[name] for name in set_ups}


def copy_bandwidth(device: torch.device, size: int = COPY_BYTES) -> float:
    """Bytes a second, read and written, that a copy of `size` bytes reaches."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(256)
    target = torch.empty_like(source)
    result = measure({"copy": lambda: lambda: target.copy_(source)}, 9, device)["copy"]
    return 2 * size / result["median"]


# ---- operators ------------------------------------------------------------------------------------------------------


def make_plan(support: Any, decay: Any, tokens: int, heads: int | None = None) -> AttentionPlan:
    """The plan of one layer on a square grid; `heads`: how many, by default `HEADS`."""
    side, heads = int(tokens**0.5), heads or HEADS
    prior = resolve_prior({"support": support, "decay": decay or "none"}, heads, (side, side))
    return AttentionPlan(heads, (side, side), PREFIX, prior["support"], prior["decay"], 0)


def make_inputs(
    batch: int, tokens: int, dtype: torch.dtype, device: torch.device, heads: int | None = None
) -> list[Tensor]:
    """q, k, v as projections give them, (B, T, H, D) transposed."""
    shape = (batch, tokens + PREFIX, heads or HEADS, WIDTH)
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)]


def make_decay(plan: AttentionPlan, device: torch.device) -> DecayTensors | None:
    """The learned scalars of the plan's decay, as a layer has them."""
    if plan.decay is None:
        return None
    settings = {key: value for key, value in plan.decay.items() if key != "name"}
    return DECAYS[plan.decay["name"]](plan.num_heads, **settings).to(device)()


def flex_call(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the support as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = plan_table(plan, "mask", q.device)
    tokens = q.shape[2]
    block_mask = create_block_mask(lambda b, h, i, j: mask[h, i, j], 1, HEADS, tokens, tokens, device=q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def contender(name: str, plan: AttentionPlan, inputs: list[Tensor], train: bool) -> Callable[[], Call]:
    """Set-up of one way to compute a layer's attention, forward or forward and backward."""

    def set_up() -> Call:
        decay = make_decay(plan, inputs[0].device)
        if name == "flash":
            run: Callable[..., Any] = F.scaled_dot_product_attention
        elif name == "flex":
            if decay is not None:
                raise ValueError("FlexAttention is not set up for a decay")
            run = flex_call(plan, *inputs)
        else:
            backend = {"masked": "sdpa"}.get(name, name)
            run = lambda q, k, v: run_plan(AttentionRequest(q, k, v, plan, decay), backend=backend)[0]  # noqa: E731
        if not train:

            def forward() -> Any:
                with torch.no_grad():
                    return run(*inputs)

            return forward
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
        scalars = [x for x in (decay or {}).values() if isinstance(x, Tensor) and x.requires_grad and name != "flash"]
        gradient = torch.randn_like(inputs[0])
        return lambda: torch.autograd.grad(run(*leaves), [*leaves, *scalars], gradient)

    return set_up


def operators(
    tokens: int, batch: int, names: list[str], dtype: torch.dtype, rounds: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Rows of the table for one number of tokens."""
    inputs = make_inputs(batch, tokens, dtype, device)
    for part, support, decay in (("fibottention", FIBOTTENTION, None), ("violin", "dense", VIOLIN)):
        plan = make_plan(support, decay, tokens)
        fitting = [name for name in names if decay is None or name not in ("masked", "flex")]
        fitting = [name for name in fitting if decay is not None or name != "reference"]
        for train in (False, True):
            set_ups = {name: contender(name, plan, inputs, train) for name in fitting}
            pass_name = "forward+backward" if train else "forward"
            for name, result in measure(set_ups, rounds, device).items():
                size = {"tokens": tokens, "batch": batch, "bytes": 4 * inputs[0].numel() * inputs[0].element_size()}
                yield {"part": part, "pass": pass_name, "contender": name, **size, **result}
            if device.type == "cuda":
                torch.cuda.empty_cache()


# ---- models ---------------------------------------------------------------------------------------------------------


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """All attention runs on one backend."""
    before = os.environ.get("SPARSEPRIOR_BACKEND")
    os.environ["SPARSEPRIOR_BACKEND"] = backend
    try:
        yield
    finally:
        os.environ.pop("SPARSEPRIOR_BACKEND")
        if before is not None:
            os.environ["SPARSEPRIOR_BACKEND"] = before


def model_call(
    size: tuple[int, int, int], prior: Any, backend: str, resolution: int, batch: int, train: bool,
    dtype: torch.dtype, device: torch.device,
) -> Callable[[], Call]:  # fmt: skip
    """Set-up of a whole model under autocast: inference, or a step with AdamW."""

    def set_up() -> Call:
        hidden, layers, heads = size
        config = SparsePriorViTConfig(
            prior=prior, image_size=resolution, patch_size=16, hidden_size=hidden, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=4 * hidden, num_labels=1000,
        )  # fmt: skip
        model = SparsePriorViTForImageClassification(config).to(device).train(train)
        pixels = torch.randn(batch, 3, resolution, resolution, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")

        def run() -> None:
            with forced(backend), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                if not train:
                    with torch.inference_mode():
                        model(pixels)
                    return
                loss = model(pixels, labels=labels).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    return set_up


def models(rounds: int, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of the table for whole models: ViT-S at 1024 px with a sparse support, ViT-B at 224 px with VIOLIN."""
    cases = [
        ("ViT-S", 1024, 8, "fibottention", {"support": FIBOTTENTION}, (True,)),
        ("ViT-B", 224, 128, "violin", {"decay": VIOLIN}, (False, True)),
    ]
    for size, resolution, batch, name, prior, passes in cases:
        for train in passes:
            set_ups = {
                "dense": model_call(SIZES[size], "dense", "sdpa", resolution, batch, train, dtype, device),
                name: model_call(SIZES[size], prior, "triton", resolution, batch, train, dtype, device),
            }
            for contender_name, result in measure(set_ups, rounds, device).items():
                step = "training step" if train else "inference"
                numbers = {"tokens": (resolution // 16) ** 2, "batch": batch}
                yield {
                    "part": f"{size} {resolution} px",
                    "pass": step,
                    "contender": contender_name,
                    **numbers,
                    **result,
                }


# ---- check ----------------------------------------------------------------------------------------------------------


def check(tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """For each setting, the largest difference of outputs and gradients from float64 `reference`, over the largest
    value.
    """
    worst = {}
    settings = [(FIBOTTENTION, None), ({**FIBOTTENTION, "mask_fill": "zero"}, None), (FIBOTTENTION, VIOLIN)]
    for support, decay in [*settings, ("dense", VIOLIN)]:
        plan = make_plan(support, decay, tokens)
        inputs = make_inputs(2, tokens, dtype, device)
        scalars = make_decay(plan, device)
        found = []
        for backend, wide in (("triton", dtype), ("reference", torch.float64)):
            leaves = [x.detach().to(wide).requires_grad_() for x in inputs]
            q, k, v = leaves
            out, _ = run_plan(AttentionRequest(q, k, v, plan, scalars), backend=backend)
            gradient = torch.ones_like(out)
            gradient[..., ::2] = -0.5
            found.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
        errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]
        fill = plan.mask_fill if support != "dense" else "dense"
        worst[f"{fill}{', violin' if decay else ''}"] = float(np.max(errors))  # NaN stays NaN
    return worst


# ---- command --------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], bandwidth: float) -> list[str]:
    """Lines of the printed table; adds the ratios to the rows."""
    head = f"{'what':<22}{'pass':<18}{'tokens':>7}{'batch':>6}  {'contender':<14}{'ms':>9}{'10..90 %':>20}"
    lines = [head + f"{'x copy':>8}{'x flash':>9}"]
    for row in rows:
        start = f"{row['part']:<22}{row['pass']:<18}{row['tokens']:>7}{row['batch']:>6}  {row['contender']:<14}"
        if "failed" in row:
            lines.append(f"{start}{row['failed']}")
            continue
        same = [r for r in rows if all(r[key] == row[key] for key in ("part", "pass", "tokens", "batch"))]
        dense = next((r for r in same if r["contender"] in ("flash", "dense") and "median" in r), None)
        row["times_faster_than_dense"] = dense["median"] / row["median"] if dense else None
        if row["pass"] == "forward":
            row["times_copy_bound"] = row["median"] * bandwidth / row["bytes"]
        copy = f"{row['times_copy_bound']:.1f}" if "times_copy_bound" in row else "-"
        faster = f"{row['times_faster_than_dense']:.2f}" if dense else "-"
        spread = f"{1e3 * row['low']:.3f}..{1e3 * row['high']:.3f}"
        lines.append(f"{start}{1e3 * row['median']:>9.3f}{spread:>20}{copy:>8}{faster:>9}")
    return lines


def benchmark(arguments: argparse.Namespace, device: torch.device) -> int:
    """Check, measure, print, write."""
    dtype = DTYPES[arguments.dtype]
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: numbers without meaning"
    print(f"{hardware}, torch {torch.__version__}, {arguments.dtype}\n{command_line()}")
    checked = {}
    for name in dict.fromkeys(("float32", arguments.dtype)):
        checked[name] = check(min(arguments.tokens), DTYPES[name], device)
        for setting, error in checked[name].items():
            right = error <= TOLERANCE[DTYPES[name]]
            print(f"{'ok   ' if right else 'WRONG'} {name}, {setting}: relative difference {error:.1e}")
            if not right:
                return 1
    bandwidth = copy_bandwidth(device, arguments.copy_bytes)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s read and written")
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        batch = arguments.batch or BATCHES.get(tokens, 8)
        rows += operators(tokens, batch, arguments.contenders, dtype, arguments.rounds, device)
    if arguments.models:
        rows += models(arguments.rounds, dtype, device)
    print("\n".join(table(rows, bandwidth)))
    results = {
        "task": "benchmark", "dtype": arguments.dtype, "heads": HEADS, "width": WIDTH, "rounds": arguments.rounds,
        "copy_bytes_per_second": bandwidth, "checked": checked, "rows": rows, "command": command_line(),
        **environment(),
    }  # fmt: skip
    write_results(arguments.out, results)
    print(arguments.out)
    return 0


def main(argv: list[str] | None = None, device: str = "cuda") -> int:
    """Command line; without a CUDA device it prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog="python -m tasks.benchmark.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(BATCHES), help="patch tokens, square numbers")
    parser.add_argument("--batch", type=int, help=f"default by tokens: {BATCHES}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-models", dest="models", action="store_false", help="operators only")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark/gpu.json"))
    arguments = parser.parse_args(argv)
    for tokens in arguments.tokens:
        if tokens < 1 or int(tokens**0.5) ** 2 != tokens:
            parser.error(f"--tokens {tokens} must be a square number, 1 or more")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} must be 1 or more")
    if device == "cuda" and not torch.cuda.is_available():
        print(f"{parser.prog}: needs a CUDA GPU, and torch {torch.__version__} finds none here", file=sys.stderr)
        return 2
    return benchmark(arguments, torch.device(device))


if __name__ == "__main__":
    sys.exit(main())
