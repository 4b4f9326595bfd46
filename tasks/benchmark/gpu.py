"""Attention and whole models on a CUDA GPU: python -m tasks.benchmark.gpu

It checks the Triton kernels against `reference` in float64, alone and in a CUDA graph. It tries sizes of a block and
keeps the fastest (`hf_sparseprior.kernels.triton_sizes`). Then it times operators and models in one process, where
contenders take turns. OUT/RESULTS.md has medians with their spread, the ratio to the copy bound (read Q, K, V and
write O once, at the bandwidth that a copy reaches here) and how many times faster than flash attention over all pairs,
next to the project's targets. OUT/records.json has everything as soon as it is known. No step begins after --budget
seconds; the same command goes on then.

--count needs no GPU: it counts what the kernels read and write, their launches, registers and shared memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.files import read_json_object, write_text
from hf_sparseprior.base.resolved import DecayTensors
from hf_sparseprior.patterns.decay import make_decay
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.prior import resolve_prior
from tasks.benchmark import commands, gpu_count, gpu_report, timing, window_contenders
from tasks.benchmark.commands import BATCHES, COPY_BYTES
from tasks.benchmark.contenders import Contender, Problem
from tasks.benchmark.records import sole_use
from tasks.common.command import run_command
from tasks.common.environment import command_line, environment
from tasks.common.results import write_results

Call = timing.Call

HEADS, WIDTH, PREFIX = 12, 64, 1
PROGRAM = "python -m tasks.benchmark.gpu"
FOLDER = commands.GPU_FOLDER
TUNED_TOKENS, COUNTED_TOKENS = 4096, (196, 1024, 4096)
FIBOTTENTION = gpu_count.FIBOTTENTION
VIOLIN = {"name": "violin"}
# What is timed: support and decay. With w_max N // 3 no band of keys is narrow.
PARTS: dict[str, tuple[Any, Any]] = {
    "fibottention": (FIBOTTENTION, None),
    "fibottention, w_max N // 3": ({"name": "fibottention", "w_min": 5}, None),
    "violin": ("dense", VIOLIN),
}
LARGEST_PAIRS = 20000  # patches: what forms all pairs in memory is not asked to do more
DTYPES = {name: getattr(torch, name) for name in commands.GPU_DTYPES}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
CONTENDERS = commands.GPU_CONTENDERS
# Hidden size, layers and heads of ViT-S and ViT-B; the MLP is four times as wide.
SIZES = {"ViT-S": (384, 12, 6), "ViT-B": (768, 12, 12)}
TURN_SECONDS = 0.02


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
    return AttentionPlan(LayerKey(heads, (side, side)), PREFIX, prior["support"], prior["decay"])


def make_inputs(
    batch: int, tokens: int, dtype: torch.dtype, device: torch.device, heads: int | None = None
) -> list[Tensor]:
    """q, k, v as projections give them, (B, T, H, D) transposed."""
    shape = (batch, tokens + PREFIX, heads or HEADS, WIDTH)
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)]


def decay_of(plan: AttentionPlan, device: torch.device) -> DecayTensors | None:
    """The learned scalars of the plan's decay, as a layer has them."""
    if plan.decay is None:
        return None
    return make_decay(plan.decay, plan.num_heads).to(device)()


def flex_call(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the support as a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = plan_table(plan, "mask", q.device)
    tokens = q.shape[2]
    block_mask = create_block_mask(lambda b, h, i, j: mask[h, i, j], 1, HEADS, tokens, tokens, device=q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def window_call(
    rival: Contender, plan: AttentionPlan, inputs: list[Tensor], train: bool
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A sliding window and its inputs: the patches alone where the package knows no prefix tokens."""
    prefix = plan.num_prefix_tokens if rival.prefix else 0
    own = [x[:, :, plan.num_prefix_tokens - prefix :] for x in inputs]
    q, k, v = own
    problem = Problem(AttentionPlan(LayerKey(plan.num_heads, plan.grid), prefix, plan.support), q, k, v, q, None)
    if reason := rival.can_run(problem, train):
        raise ValueError(reason)
    return rival.prepare(problem), own


def contender(name: str, plan: AttentionPlan, inputs: list[Tensor], train: bool) -> Callable[[], Call]:
    """Set-up of one way to compute a layer's attention, forward or forward and backward."""

    def set_up() -> Call:
        decay, given = decay_of(plan, inputs[0].device), inputs
        if name == "flash":
            run: Callable[..., Any] = F.scaled_dot_product_attention
        elif name == "flex":
            run = flex_call(plan, *inputs)
        elif name in (windows := window_contenders.windows()):
            run, given = window_call(windows[name], plan, inputs, train)
        else:
            backend = {"masked": "sdpa"}.get(name, name)
            run = lambda q, k, v: run_plan(AttentionRequest(q, k, v, plan, decay), backend=backend)[0]  # noqa: E731
        if not train:

            def forward() -> Any:
                with torch.no_grad():
                    return run(*given)

            return forward
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in given]
        scalars = [x for x in (decay or {}).values() if isinstance(x, Tensor) and x.requires_grad and name != "flash"]
        gradient = torch.randn_like(given[0])
        return lambda: torch.autograd.grad(run(*leaves), [*leaves, *scalars], gradient)

    return set_up


def fitting(names: list[str], decay: Any, tokens: int) -> list[str]:
    """The contenders that are for this part: with a decay those over all pairs, otherwise those over a support."""
    if decay is not None:
        return [name for name in names if name in ("triton", "flash", "reference")]
    # A mask of all pairs of so many patches and heads does not fit.
    unable = ("reference", *(("masked", "flex") if tokens > LARGEST_PAIRS else ()))
    return [name for name in names if name not in unable]


def operators(
    tokens: int, batch: int, part: str, train: bool, names: list[str], dtype: torch.dtype, rounds: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of the table for one number of tokens, one of `PARTS` and one pass."""
    inputs = make_inputs(batch, tokens, dtype, device)
    support, decay = PARTS[part]
    plan = make_plan(support, decay, tokens)
    set_ups = {name: contender(name, plan, inputs, train) for name in fitting(names, decay, tokens)}
    size = {"tokens": tokens, "batch": batch, "bytes": 4 * inputs[0].numel() * inputs[0].element_size()}
    for name, result in measure(set_ups, rounds, device).items():
        yield {
            "part": part, "pass": "forward+backward" if train else "forward", "contender": name, **size, **result,
        }  # fmt: skip
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
        scalars = decay_of(plan, device)
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


def check_graph(tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Forward and backward replayed from a CUDA graph, for each setting the largest difference from a plain call: 0."""
    worst = {}
    cases = [("support", FIBOTTENTION, None), ("support, violin", FIBOTTENTION, VIOLIN), ("violin", "dense", VIOLIN)]
    for name, support, decay in cases:
        plan, inputs = make_plan(support, decay, tokens), make_inputs(2, tokens, dtype, device)
        run: Callable[[], Any] = contender("triton", plan, inputs, train=True)()
        expected = [x.clone() for x in run()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
        torch.cuda.synchronize()
        worst[f"CUDA graph, {name}"] = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return worst


# ---- steps ----------------------------------------------------------------------------------------------------------

RECORDS, COUNTED, TEXT = "records.json", "counted.json", "RESULTS.md"
# What all records of a folder share: a step that is done is not done again with other options.
OPTIONS = ("dtype", "batch", "rounds", "contenders", "copy_bytes")
SAME = ("hardware_name", "torch", "heads", "width", *OPTIONS)
Step = Callable[[dict[str, Any]], None]


def steps(arguments: argparse.Namespace, device: torch.device) -> dict[str, Step]:
    """What is done, by name, in order: checks, sizes of blocks, the copy bound, operators, models.

    A step adds to the records. Forward passes come first, because the targets are about them.
    """
    dtype, smallest = DTYPES[arguments.dtype], min(arguments.tokens)
    found: dict[str, Step] = {}

    def checking(name: str) -> Step:
        def run(records: dict[str, Any]) -> None:
            records["checked"][name] = check(smallest, DTYPES[name], device)
            for setting, error in records["checked"][name].items():
                if not error <= TOLERANCE[DTYPES[name]]:
                    raise WrongError(f"WRONG {name}, {setting}: relative difference {error:.1e}")

        return run

    def graphs(records: dict[str, Any]) -> None:
        records["checked"]["CUDA graph"] = check_graph(smallest, dtype, device)
        for setting, error in records["checked"]["CUDA graph"].items():
            if error != 0:
                raise WrongError(f"WRONG {setting}: a difference of {error:.1e}")

    def tune(records: dict[str, Any]) -> None:
        records["tuned"] = tune_blocks(TUNED_TOKENS, BATCHES[TUNED_TOKENS], dtype, arguments.rounds, device)

    def copy(records: dict[str, Any]) -> None:
        records["copy_bytes_per_second"] = copy_bandwidth(device, arguments.copy_bytes)

    def measuring(tokens: int, part: str, train: bool) -> Step:
        batch = arguments.batch or BATCHES.get(tokens, 8)

        def run(records: dict[str, Any]) -> None:
            names, rounds = arguments.contenders, arguments.rounds
            records["rows"] += operators(tokens, batch, part, train, names, dtype, rounds, device)

        return run

    for name in dict.fromkeys(("float32", arguments.dtype)):
        found[f"check {name}"] = checking(name)
    if device.type == "cuda":
        found["check CUDA graphs"] = graphs
        found["tune"] = tune
    found["copy"] = copy
    for train in (False, True):
        for tokens in arguments.tokens:
            for part in PARTS:
                pass_name = "forward+backward" if train else "forward"
                found[f"{part}, {tokens}, {pass_name}"] = measuring(tokens, part, train)
    if arguments.models:
        found["models"] = lambda records: records["rows"].extend(models(arguments.rounds, dtype, device))
    return found


class WrongError(RuntimeError):
    """A kernel gives something else than `reference`: nothing is timed then."""


def tune_blocks(
    tokens: int, batch: int, dtype: torch.dtype, rounds: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Try sizes of a block on one call of each kernel, and keep the fastest in the user's table."""
    from hf_sparseprior.kernels import triton_sizes
    from tasks.benchmark import gpu_tune

    plans = {"diagonal": make_plan(FIBOTTENTION, None, tokens), "decayed": make_plan("dense", "violin", tokens)}
    inputs = make_inputs(batch, tokens, dtype, device)
    found = {}
    for kernel in triton_sizes.KERNELS:
        family, direction = kernel.split("_")
        run = contender("triton", plans[family], inputs, direction == "backward")()
        found[kernel] = gpu_tune.fastest(kernel, inputs[0], run, lambda calls: measure(calls, rounds, device))
    chosen = {result["key"]: result["chosen"] for result in found.values() if result["chosen"]}
    if chosen and (key := triton_sizes.device_key(device)):
        print(f"block sizes: {triton_sizes.keep_tuned(key, chosen)}")
    return found


def open_records(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The records of a folder so far, or new ones.

    Raises:
        ValueError: if they are of another GPU, torch, dtype or shape.
    """
    path = out / RECORDS
    records = read_json_object(path) if path.exists() else {}
    pairs = [(key, records.get(key), about[key]) for key in SAME]
    different = [f"{key}: {there!r} there, {here!r} here" for key, there, here in pairs if there != here]
    if records and different:
        raise ValueError(f"{path} has other measurements ({'; '.join(different)}); choose another --out")
    new = {"task": "benchmark", "checked": {}, "done": [], "failed": {}, "rows": [], **environment()}
    return records or {**about, **new}


def write(out: Path, records: dict[str, Any]) -> None:
    """Everything of a folder that follows from its records and from what was counted."""
    if records:
        gpu_report.add_ratios(records["rows"], records.get("copy_bytes_per_second", 0.0))
        write_results(out / RECORDS, records)
        gpu_report.draw_measured(records["rows"], out / "measured.png")
    counted = read_json_object(out / COUNTED)["cases"] if (out / COUNTED).exists() else []
    write_text(out / TEXT, gpu_report.results_text(records, counted))


def benchmark(arguments: argparse.Namespace, device: torch.device) -> int:
    """Check, tune, measure, draw, write, within the budget; a later call does what is left."""
    began, out = time.monotonic(), arguments.out
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: numbers without meaning"
    about = {
        "hardware_name": name, "torch": torch.__version__, "heads": HEADS, "width": WIDTH,
        **{key: getattr(arguments, key) for key in OPTIONS}, "command": command_line(),
    }  # fmt: skip
    records = open_records(out, about)
    print(f"{name}, torch {torch.__version__}, {arguments.dtype}\n{about['command']}")
    for step, run in steps(arguments, device).items():
        if step in records["done"]:
            continue
        if time.monotonic() - began > arguments.budget:
            print(f"--budget {arguments.budget:g} s are over; the same command goes on with: {step}")
            return 3
        try:
            run(records)
        except WrongError as error:
            print(error, file=sys.stderr)
            return 1
        except Exception as error:  # as of a contender: which step failed and why is part of the result
            records["failed"][step] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        records["done"].append(step)
        write(out, records)
        print(f"{time.monotonic() - began:5.0f} s  {step}  {records['failed'].get(step, '')}", flush=True)
    print(gpu_report.measured_table(records["rows"]))
    print(out / TEXT)
    return 0


# ---- command --------------------------------------------------------------------------------------------------------


def count_only(arguments: argparse.Namespace) -> int:
    """Count, draw and write; no GPU is needed.

    Raises:
        ValueError: if Triton or ptxas cannot be counted with.
    """
    try:
        cases = gpu_count.count(arguments.cases, arguments.tokens, arguments.dtype)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    counted = {"command": command_line(), "cases": cases, **environment()}
    write_results(arguments.out / COUNTED, counted)
    gpu_report.draw_counted(cases, arguments.out / "counted.png")
    path = arguments.out / RECORDS
    write(arguments.out, read_json_object(path) if path.exists() else {})
    print(gpu_report.counted_tables(cases))
    print(arguments.out / TEXT)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments of the command line, checked."""
    parser = commands.gpu()
    arguments = parser.parse_args(argv)
    arguments.tokens = arguments.tokens or list(COUNTED_TOKENS if arguments.count else BATCHES)
    for tokens in arguments.tokens:
        if tokens < 1 or int(tokens**0.5) ** 2 != tokens:
            parser.error(f"--tokens {tokens} must be a square number, 1 or more")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} must be 1 or more")
    return arguments


def run(arguments: argparse.Namespace, device: str) -> int:
    """Count, or check, tune and measure, in a folder that no other process writes.

    Raises:
        ValueError: without a CUDA device and without --count, or if another process writes there.
    """
    if device == "cuda" and not arguments.count and not torch.cuda.is_available():
        raise ValueError(f"needs a CUDA GPU, and torch {torch.__version__} finds none here; --count needs none")
    with sole_use(arguments.out):
        return count_only(arguments) if arguments.count else benchmark(arguments, torch.device(device))


def main(argv: list[str] | None = None, device: str = "cuda") -> int:
    """Command line: 0; 1 for a wrong kernel, 3 when the budget is over; else as of `run_command`."""
    arguments, status = parse(argv), 0

    def work() -> None:
        nonlocal status
        status = run(arguments, device)

    return run_command(PROGRAM, work, "after the last finished step") or status


if __name__ == "__main__":
    sys.exit(main())
