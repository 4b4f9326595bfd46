"""Attention and whole models on a CUDA GPU.

It checks the Triton kernels against `reference` in float64, and that two calls and a CUDA graph give the same bits; a
wrong kernel is not timed, and the command ends with status 1. It tries sizes of a block and keeps the fastest in the
user's cache (`hf_sparseprior.kernels.triton_sizes`). Then it times a copy and operators; contenders take turns. The
table has times in copies (read q, k, v and write the output once, at the bandwidth that a copy of --copy-bytes
reaches). Nothing begins after --minutes; the same command goes on then.

--quick: correctness, the same bits, the kernels next to flash attention, and the host's time of a call.
--models: whole models, eager, compiled and in CUDA graphs.
Both have a folder in --out for each device, versions and source of the kernels, so measurements of other kernels are
not mixed; what was not reached stands in the table as "not measured".

--count needs no GPU: it counts what the kernels read and write, their launches, registers and shared memory. Nor does
--cards: it compiles every kernel for every card and says whether it fits.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.resolved import DecayTensors
from hf_sparseprior.kernels import triton_sizes
from hf_sparseprior.patterns.decay import make_decay
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.prior import resolve_prior
from hf_sparseprior.runs.environment import command_line, environment
from hf_sparseprior.runs.results import write_results
from tasks.benchmark import gpu_cards, gpu_count, gpu_report, gpu_tune, report
from tasks.benchmark.commands import BATCHES, MINUTES_OF_ALL
from tasks.benchmark.contenders import (
    DENSE,
    Contender,
    Setting,
    Size,
    contenders,
    make_problem,
    timed_call,
)
from tasks.benchmark.entry import Benchmark, Case, Row, Session, Target, WrongOutput
from tasks.benchmark.timing import Call, SetUp, interleave, measure, spread

HEADS, WIDTH, PREFIX = 12, 64, 1
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
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
WINDOWS = ("flash_window", "flex_window", "natten")
FORWARD, BOTH = "forward", "forward and backward"
CHECK, BITS, TUNE, COPY = "check", "same bits", "block sizes", "copy"
FLASH = "flash"
# The project's targets on an H200 in bfloat16: times of a copy, from and to these numbers of tokens; times of flash
# attention.
COPIES, COPIES_FROM, COPIES_TO, DENSE_TIMES = 1.5, 4096, 65536, 1.15


# ---- one layer ------------------------------------------------------------------------------------------------------


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


def triton_call(plan: AttentionPlan, inputs: list[Tensor], trains: bool) -> Call:
    """A layer's attention by the Triton kernels, forward or forward and backward."""
    decay = decay_of(plan, inputs[0].device)
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(trains) for x in inputs]
    q, k, v = leaves
    scalars = [x for x in (decay or {}).values() if isinstance(x, Tensor) and x.requires_grad]
    gradient = torch.randn_like(q)

    def call() -> Any:
        with torch.set_grad_enabled(trains):
            out = run_plan(AttentionRequest(q, k, v, plan, decay), backend="triton")[0]
        return (out.detach(), *torch.autograd.grad(out, [*leaves, *scalars], gradient)) if trains else (out,)

    return call


def _forced(backend: SDPBackend) -> Contender:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return Contender(f"{backend} over all pairs", lambda problem, trains: None, lambda problem: attend, dense=True)


# scaled_dot_product_attention by one of its kernels.
FORCED = {FLASH: _forced(SDPBackend.FLASH_ATTENTION), "cudnn": _forced(SDPBackend.CUDNN_ATTENTION)}


def gpu_contenders() -> dict[str, Contender]:
    """Those of `attention`, and the kernels of scaled_dot_product_attention one by one."""
    return {**contenders(), **FORCED}


def any_error(set_up: SetUp) -> SetUp:
    """A set-up whose errors are RuntimeErrors, those of a first call too: compilers have errors of their own."""

    def ready() -> Call:
        try:
            call = set_up()
            call()
        except Exception as error:
            raise error if isinstance(error, RuntimeError) else RuntimeError(error_text(error)) from error
        return call

    return ready


def error_text(error: BaseException) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def usable(device: torch.device) -> bool:
    """Whether a device can still be used: after an illegal access it cannot, nor can torch's generator after a capture
    that failed.
    """
    try:
        torch.randn(1, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def fitting(names: Sequence[str], decay: Any, tokens: int) -> list[str]:
    """The contenders that are for this part: with a decay those over all pairs, otherwise those over a support."""
    if decay is not None:
        return [name for name in names if name in ("triton", DENSE, *FORCED, "reference")]
    # A mask of all pairs of so many patches and heads does not fit.
    unable = ("reference", *(("sdpa", "flex_offsets") if tokens > LARGEST_PAIRS else ()))
    return [name for name in names if name not in unable]


def operator(contender: Contender, setting: Setting, size: Size, trains: bool) -> SetUp:
    """A contender's set-up, with the patches alone where its package knows no prefix tokens.

    Raises:
        RuntimeError: when it is set up, if it cannot run.
    """

    def set_up() -> Call:
        own = Setting(**{**vars(setting), "prefix": setting.prefix if contender.prefix else 0})
        problem = make_problem(own, size, trains)
        if reason := contender.can_run(problem, trains):
            raise RuntimeError(reason)
        return timed_call(problem, contender, trains)

    return any_error(set_up)


# ---- before anything is timed ---------------------------------------------------------------------------------------


# What the Triton kernels are checked with, against `reference` and to the bit, and FlexAttention: support and decay.
KERNEL_CASES: dict[str, tuple[Any, Any]] = {
    "neg_inf": (FIBOTTENTION, None),
    "zero": ({**FIBOTTENTION, "mask_fill": "zero"}, None),
    "neg_inf, violin": (FIBOTTENTION, VIOLIN),
    "dense, violin": ("dense", VIOLIN),
}
FLEX_CASES: dict[str, tuple[Any, Any]] = {
    "random": ("random", None),
    "neighborhood": ({"name": "neighborhood", "window": 7}, None),
}


def check(
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "triton",
    logits: float = 1.0,
) -> dict[str, float]:
    """For each of `KERNEL_CASES` or `FLEX_CASES`, the largest difference of outputs and gradients from float64
    `reference`, over the largest value. `logits`: their standard deviation, before a decay; where they are large,
    gradients of most rows are nothing but rounding, so values below 0.01 count as that.
    """
    worst, least = {}, 0.01 if logits > 1 else 0.0
    for name, (support, decay) in (KERNEL_CASES if backend == "triton" else FLEX_CASES).items():
        plan = make_plan(support, decay, tokens)
        inputs = make_inputs(2, tokens, dtype, device)
        inputs[0] = inputs[0] * logits
        scalars = decay_of(plan, device)
        found = []
        for own, wide in ((backend, dtype), ("reference", torch.float64)):
            leaves = [x.detach().to(wide).requires_grad_() for x in inputs]
            q, k, v = leaves
            out, _ = run_plan(AttentionRequest(q, k, v, plan, scalars), backend=own)
            gradient = torch.ones_like(out)
            gradient[..., ::2] = -0.5
            found.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
        errors = [
            float((a.double() - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in zip(*found, strict=True)
        ]
        worst[name] = float(np.max(errors))  # NaN stays NaN
    return worst


def captured(call: Call) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call as a CUDA graph, and the tensors that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        written = call()
    graph.instantiate()
    return graph, written


def launches_of(graph: torch.cuda.CUDAGraph) -> int | None:
    """Kernels, copies and fills in a captured graph; None if the driver does not say."""
    count = ctypes.c_size_t()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return count.value if status == 0 else None


def same_bits(tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """How many elements of two calls, and on CUDA of a call and replays of its graph, differ in a bit: 0.

    Forward and backward of each of `KERNEL_CASES`, and inference, which keeps tables of a decay. Every sum of the
    kernels has a fixed order, so nothing may differ.
    """
    differing: dict[str, float] = {}
    for (name, (support, decay)), trains in product(KERNEL_CASES.items(), (True, False)):
        plan, inputs = make_plan(support, decay, tokens), make_inputs(2, tokens, dtype, device)
        run: Callable[[], Any] = triton_call(plan, inputs, trains)
        expected = [x.clone() for x in run()]
        found = {"two calls": run()}
        if device.type == "cuda":
            graph, written = captured(run)
            for replay in ("graph and call", "second replay and call"):
                graph.replay()
                torch.cuda.synchronize()
                found[replay] = [x.clone() for x in written]
        for pair, tensors in found.items():
            counts = [differing_elements(a, b) for a, b in zip(tensors, expected, strict=True)]
            differing[f"{name}, {'forward' if trains else 'inference'}, {pair}"] = counts[0]
            if trains:
                differing[f"{name}, backward, {pair}"] = sum(counts[1:])
    return differing


def differing_elements(first: Tensor, second: Tensor) -> int:
    """How many elements of two tensors do not have the same bits."""
    bits = [x.contiguous().view(torch.uint8).view(*x.shape, x.element_size()) for x in (first, second)]
    return int((bits[0] != bits[1]).any(-1).sum())


def tune_blocks(session: Session) -> dict[str, dict[str, Any]]:
    """Try sizes of a block on one call of each kernel, and keep the fastest in the user's table."""
    arguments, device, tokens = session.arguments, session.device, TUNED_TOKENS
    plans = {"diagonal": make_plan(FIBOTTENTION, None, tokens), "decayed": make_plan("dense", "violin", tokens)}
    inputs = make_inputs(BATCHES[tokens], tokens, getattr(torch, arguments.dtype), device)

    def seconds(set_ups: Mapping[str, SetUp]) -> dict[str, dict[str, Any]]:
        ready = {name: any_error(set_up) for name, set_up in set_ups.items()}
        found = measure(ready, device, arguments.seconds, arguments.rounds, {})
        return {n: {"median": spread(x["seconds"])["median"]} if "seconds" in x else x for n, x in found.items()}

    found = {}
    for kernel in triton_sizes.KERNELS:
        family, direction = kernel.split("_")
        run = triton_call(plans[family], inputs, direction == "backward")
        found[kernel] = gpu_tune.fastest(kernel, inputs[0], run, seconds)
    chosen = {result["key"]: result["chosen"] for result in found.values() if result["chosen"]}
    if chosen and (key := triton_sizes.device_key(device)):
        print(f"block sizes: {triton_sizes.keep_tuned(key, chosen)}")
    return found


# ---- the entry ------------------------------------------------------------------------------------------------------


class Gpu(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """--tokens, --minutes."""
        report.check_positive(rounds=arguments.rounds)
        limit_time(arguments, MINUTES_OF_ALL)
        arguments.tokens = arguments.tokens or list(BATCHES)
        for tokens in arguments.tokens:
            if tokens < 1 or int(tokens**0.5) ** 2 != tokens:
                raise ValueError(f"--tokens {tokens} must be a square number, 1 or more")

    def variant(self, arguments: argparse.Namespace) -> Benchmark:
        """--quick, --models."""
        if not (arguments.quick or arguments.models):
            return self
        from tasks.benchmark import gpu_models, gpu_quick  # which need this module

        return gpu_quick.BENCHMARK if arguments.quick else gpu_models.BENCHMARK

    def instead(self, arguments: argparse.Namespace) -> Callable[[], None] | None:
        """--count or --cards."""
        if arguments.cards is not None:
            return partial(gpu_cards.check_cards, arguments)
        if not arguments.count:
            return None
        arguments.tokens = arguments.tokens or list(COUNTED_TOKENS)
        self.check(arguments)
        return partial(count_only, arguments)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Checks, sizes of blocks, the copy, operators. Forward passes come first: targets are about them."""
        smallest = min(arguments.tokens)
        size = {"tokens": smallest, "batch": 2, "pass": BOTH}
        for dtype in dict.fromkeys(("float32", arguments.dtype)):
            yield [{"part": f"{CHECK} {dtype}", **size, "contender": "triton"}]
        if arguments.device == "cuda":
            yield from ([{"part": part, **size, "contender": "triton"}] for part in (BITS, TUNE))
        yield [{"part": COPY, "tokens": 0, "batch": 1, "pass": FORWARD, "contender": COPY}]
        for key in (FORWARD, BOTH):
            for tokens in arguments.tokens:
                for part, (_, decay) in PARTS.items():
                    size = {"tokens": tokens, "batch": arguments.batch or BATCHES.get(tokens, 8), "pass": key}
                    names = fitting(arguments.contenders, decay, tokens)
                    yield [{"part": part, **size, "contender": name} for name in names]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """A step; one that fails leaves the reason.

        Raises:
            WrongOutput: for a kernel that gives something else than `reference`.
        """
        try:
            found = self.step(cases, session)
        except WrongOutput:
            raise
        except Exception as error:  # which step failed and why is part of the result
            checked = str(cases[0].get("part")).startswith((CHECK, BITS))  # what does not run is not right
            found = [{**case, "failed": f"{'wrong: ' if checked else ''}{error_text(error)}"} for case in cases]
        if session.device.type == "cuda":
            if any("failed" in own for own in found) and not usable(session.device):
                return [{**own, "device_lost": True} for own in found]
            torch.cuda.empty_cache()
        return found

    def step(self, cases: list[Case], session: Session) -> list[Case]:
        """`measure`, with its errors."""
        case = cases[0]
        part, tokens, batch, trains = case["part"], case["tokens"], case["batch"], case["pass"] != FORWARD
        if part.startswith(CHECK):
            name = part.removeprefix(f"{CHECK} ")
            return [{**case, "checked": right(check(tokens, getattr(torch, name), session.device), TOLERANCE[name])}]
        if part == BITS:
            return [{**case, "checked": right(same_bits(tokens, session.dtype, session.device), 0.0)}]
        if part == TUNE:
            return [{**case, "tuned": tune_blocks(session)}]
        if part == COPY:
            return [{**case, **copy_seconds(session)}]
        support, decay = PARTS[part]
        setting = Setting(HEADS, WIDTH, support, decay, PREFIX, session.dtype, device=session.device)
        known = gpu_contenders()
        set_ups = {own["contender"]: operator(known[own["contender"]], setting, Size(tokens, batch), trains)
                   for own in cases}  # fmt: skip
        size = copied_bytes(tokens, batch, session.dtype)
        return [{**own, "bytes": size} for own in session.in_turns(cases, set_ups)]

    def complete_all(self, rows: Sequence[dict[str, Any]]) -> None:
        """Forward passes in copies."""
        add_copies(rows)

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """Of copies, and of VIOLIN next to flash attention."""
        for tokens in BATCHES:
            where = {"pass": FORWARD, "tokens": tokens}
            if COPIES_FROM <= tokens <= COPIES_TO:
                yield Target({"part": "fibottention", **where}, COPY, COPIES, among=("triton",))
            yield Target({"part": "violin", **where}, DENSE, DENSE_TIMES, among=("triton",))

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What was checked and tuned, and Fibottention next to the fastest window."""
        lines = [
            f"{own['part']}, {what}: {error_size(value)}"
            for own in records
            for what, value in own.get("checked", {}).items()
        ]
        for own in records:
            for kernel, found in own.get("tuned", {}).items():
                lines.append(f"{kernel}: {found['chosen'] or 'default'} of {found['tried']}")
        medians = {(row["tokens"], row["contender"]): row["seconds"]["median"] for row in rows
                   if "seconds" in row and (row["part"], row["pass"]) == ("fibottention", FORWARD)}  # fmt: skip
        for tokens in sorted({size for size, name in medians if name == "triton"}):
            if windows := [medians[tokens, name] for name in WINDOWS if (tokens, name) in medians]:
                ratio = medians[tokens, "triton"] / min(windows)
                lines.append(f"Fibottention over the fastest window of equal width, {tokens} patches: {ratio:.2f}, "
                             f"{'met' if ratio < 1 else 'MISSED'} (below 1)")  # fmt: skip
        return "\n".join(f"- {line}" for line in lines)


def right(found: dict[str, float], tolerance: float) -> dict[str, float]:
    """Differences, none above the tolerance.

    Raises:
        WrongOutput: if one is.
    """
    for what, error in found.items():
        if not error <= tolerance:
            raise WrongOutput(f"WRONG {what}: {error:.1e}, allowed {tolerance:.0e}")
    return found


def error_size(value: float | None) -> str:
    """A difference as text. NaN is null in a file of records."""
    return "nan" if value is None else f"{value:.1e}"


def limit_time(arguments: argparse.Namespace, minutes: float) -> None:
    """--minutes as the runner's --for-seconds; without either, `minutes`.

    Raises:
        ValueError: for both, or a time that is not above 0.
    """
    if arguments.for_seconds is not None and arguments.minutes is not None:
        raise ValueError(f"--for-seconds {arguments.for_seconds:g}: --minutes {arguments.minutes:g} says it already")
    if arguments.for_seconds is None:
        given = minutes if arguments.minutes is None else arguments.minutes
        report.check_positive(minutes=given)
        arguments.for_seconds = 60 * given


def copied_bytes(tokens: int, batch: int, dtype: torch.dtype) -> int:
    """What a layer reads and writes at least: q, k, v and the output."""
    return 4 * batch * (tokens + PREFIX) * HEADS * WIDTH * dtype.itemsize


def copy_seconds(session: Session) -> Case:
    """A copy of --copy-bytes, timed."""
    source = torch.empty(session.arguments.copy_bytes, dtype=torch.uint8, device=session.device).random_(256)
    target = torch.empty_like(source)
    copy = {COPY: lambda: target.copy_(source)}
    seconds = interleave(copy, session.device, session.arguments.seconds, 9)[COPY]
    return {"bytes": 2 * session.arguments.copy_bytes, "seconds": seconds}


def add_copies(rows: Sequence[dict[str, Any]]) -> None:
    """Add to forward passes their time in copies."""
    copy = next((row for row in rows if row["part"] == COPY and "seconds" in row), None)
    if copy is None:
        return
    for row in rows:
        size = row["records"][0].get("bytes")
        if size and row["part"] != COPY and row["pass"] == FORWARD and "seconds" in row:
            bound = size * copy["seconds"]["median"] / copy["records"][0]["bytes"]
            row["times"][COPY] = {key: row["seconds"][key] / bound for key in ("median", "lower", "upper")}


def count_only(arguments: argparse.Namespace) -> None:
    """Count, draw and write; no GPU is needed.

    Raises:
        ValueError: if Triton or ptxas cannot be counted with.
    """
    try:
        cases = gpu_count.count(arguments.cases, arguments.tokens, arguments.dtype)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    write_results(arguments.out / "counted.json", {"command": command_line(), "cases": cases, **environment()})
    gpu_report.draw_counted(cases, arguments.out / "counted.png")
    text = gpu_report.counted_text(cases)
    write_text(arguments.out / "counted.md", text)
    print(f"{text}\n{arguments.out / 'counted.md'}")


BENCHMARK = Gpu(
    name="gpu",
    keys=("part", "tokens", "batch", "pass", "contender"),
    same=("batch", "contenders", "copy_bytes"),
    bases=(DENSE,),
    size="tokens",
    columns={"copies": lambda row: report.ratio_text(row["times"].get(COPY))},
)
