"""`gpu --quick`: correctness, the same bits, the kernels next to flash attention, and the host's time of a call.

What a target names comes first. Kernels and calls of all contenders take turns: `kernel` is a replay of the CUDA graph
of one call, `call` the same from Python. Launches are the nodes of that graph. `host` is the time until a call returns,
of two images, where the device waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tasks.benchmark import gpu, report
from tasks.benchmark.commands import QUICK_CONTENDERS
from tasks.benchmark.contenders import DENSE, Contender, Problem, Setting, Size
from tasks.benchmark.entry import Case, Row, Session, Target, WrongOutput
from tasks.benchmark.gpu import BITS, BOTH, CHECK, COPY, FIBOTTENTION, FLASH, FORWARD, VIOLIN
from tasks.benchmark.gpu_cells import Cells
from tasks.benchmark.timing import Call, SetUp, interleave, measure

KERNEL, CALL, HOST = "kernel", "call", "host"
OURS = "triton"
OVER = "us over the kernel"


@dataclass(frozen=True)
class Part:
    """What is attended. frozen: the decay does not learn. anew: no table of the decay is kept between calls."""

    support: Any
    decay: Any = None
    frozen: bool = False
    anew: bool = False


# A forward pass of `violin` finds its table, because nothing changes the decay; with gradients the decay learns.
PARTS = {
    "violin": Part("dense", VIOLIN),
    "violin, table made in the call": Part("dense", VIOLIN, anew=True),
    "violin, frozen": Part("dense", VIOLIN, frozen=True),
    "fibottention": Part(FIBOTTENTION),
    "fibottention and violin": Part(FIBOTTENTION, VIOLIN),
    "random": Part("random"),  # pairs off the diagonals, which FlexAttention may take over
}
ANEW, FROZEN = "violin, table made in the call", "violin, frozen"
SIZES = {196: 128, 1024: 32, 4096: 8}  # images by patches
# Patches, dtypes. A layer of more than 1100 tokens has launches of its own; 1601 fill no block.
CHECKED = ((196, "float32"), (196, "bfloat16"), (1600, "bfloat16"))
# Logits up to about 1000, where the error of `reference` in float32 is 8e-5; FlexAttention.
LARGE, LARGE_LOGITS, LARGE_TOLERANCE = f"{CHECK} large logits", 300.0, 2e-4
FLEX, FLEX_CONTENDERS = f"{CHECK} flex", ("flex", "sdpa", FLASH)
HOST_SIZES, HOST_IMAGES = (196, 1024), 2
Shape = tuple[str, int, int, str]  # part, patches, images, pass


def named_by_targets() -> list[Shape]:
    """The cells that a target is about, in the order in which they are measured."""
    violin = [(part, *size, FORWARD) for size in SIZES.items() for part in ("violin", ANEW)]
    trained = [(part, *size, BOTH) for size in SIZES.items() for part in ("violin", FROZEN)]
    own = [("fibottention", *size, way) for size in ((1024, 32), (196, 128)) for way in (FORWARD, BOTH)]
    return [*violin, *trained, *own, ("fibottention", 65536, 1, FORWARD)]


def others() -> list[Shape]:
    """The cells of no target."""
    own = [("fibottention", 4096, 8), ("fibottention and violin", 196, 128), ("fibottention and violin", 1024, 32),
           ("fibottention", 16384, 8)]  # fmt: skip
    own += [("random", 1024, 32), ("random", 4096, 8)]
    return [(*size, way) for size in own for way in (FORWARD, BOTH)]


class Quick(Cells):
    """The entry."""

    def cells(self) -> Iterable[list[Case]]:
        """Checks, the copy, what targets name, the host's time, the rest."""
        for kind in (CHECK, BITS):
            for tokens, dtype in CHECKED:
                yield [self.case(f"{kind} {dtype}", tokens, 2, BOTH, CALL, OURS)]
        yield [self.case(f"{LARGE} float32", 196, 2, BOTH, CALL, OURS)]
        yield [self.case(COPY, 0, 1, FORWARD, CALL, COPY)]
        for shape in named_by_targets():
            yield self.cell(shape)
        for part in ("fibottention", "violin"):
            for tokens in HOST_SIZES:
                for key in (FORWARD, BOTH):
                    yield [self.case(part, tokens, HOST_IMAGES, key, HOST, name) for name in (OURS, DENSE)]
        yield [self.case(f"{FLEX} bfloat16", 1024, 2, BOTH, CALL, "flex")]
        for shape in others():
            yield self.cell(shape)

    def case(self, *values: Any) -> Case:
        """A case by its keys' values."""
        return dict(zip(self.keys, values, strict=True))

    def cell(self, shape: Shape) -> list[Case]:
        """Kernel and call of each contender."""
        names = FLEX_CONTENDERS if shape[0] == "random" else QUICK_CONTENDERS
        return [self.case(*shape, way, name) for way in (KERNEL, CALL) for name in names]

    def step(self, cases: list[Case], session: Session) -> list[Case]:
        """A cell, with its errors."""
        (case, *_), device = cases, session.device
        kind, _, dtype = case["part"].rpartition(" ")
        if kind in (CHECK, LARGE, FLEX, BITS):
            checks: dict[str, tuple[Callable[..., dict[str, float]], float]] = {
                CHECK: (gpu.check, gpu.TOLERANCE[dtype]), BITS: (gpu.same_bits, 0.0),
                LARGE: (partial(gpu.check, logits=LARGE_LOGITS), LARGE_TOLERANCE),
                FLEX: (partial(gpu.check, backend="flex"), gpu.TOLERANCE[dtype]),
            }  # fmt: skip
            function, tolerance = checks[kind]
            found = function(case["tokens"], getattr(torch, dtype), device)
            try:
                return [{**case, "checked": gpu.right(found, tolerance)}]
            except WrongOutput as error:
                return [{**case, "checked": found, "failed": str(error).replace("WRONG", "wrong:")}]
        if case["part"] == COPY:
            return [{**case, **gpu.copy_seconds(session)}]
        part, size = PARTS[case["part"]], Size(case["tokens"], case["batch"])
        setting = Setting(
            gpu.HEADS, gpu.WIDTH, part.support, part.decay, gpu.PREFIX, session.dtype, device=device, frozen=part.frozen
        )
        known, trains = gpu.gpu_contenders(), case["pass"] == BOTH
        ours = {OURS: made_anew(known[OURS])} if part.anew else {}
        names = list(dict.fromkeys(own["contender"] for own in cases))
        set_ups = {name: gpu.operator((known | ours)[name], setting, size, trains) for name in names}
        return self.timed(cases, set_ups, session)

    def timed(self, cases: list[Case], set_ups: Mapping[str, SetUp], session: Session) -> list[Case]:
        """All ways of all contenders in turns."""
        arguments, device = session.arguments, session.device
        calls: dict[str, Call] = {}

        def noted(name: str) -> SetUp:
            def ready() -> Call:
                calls[name] = set_ups[name]()
                return calls[name]

            return ready

        about = measure({name: noted(name) for name in set_ups}, device, arguments.seconds, 0, {})
        ways: dict[tuple[str, str], Call] = {}
        unable: dict[tuple[str, str], Case] = {}
        for case in cases:
            way, name = case["way"], case["contender"]
            if "failed" in about[name]:
                continue
            if way != KERNEL:
                ways[way, name] = calls[name]
                continue
            try:
                ways[way, name], launches = graph_of(calls[name], device)
                about[name]["launches"] = launches
            except RuntimeError as error:
                unable[way, name] = {"failed": gpu.error_text(error)}
        timer = host_seconds if cases[0]["way"] == HOST else None
        keys = {f"{way} {name}": call for (way, name), call in ways.items()}
        seconds = interleave(keys, device, arguments.seconds, arguments.rounds, timer)
        found = []
        for case in cases:
            way, name = case["way"], case["contender"]
            record = {**case, **about[name], **unable.get((way, name), {})}
            if own := seconds.get(f"{way} {name}"):
                record["seconds"] = own
                if way != HOST:  # whose time says nothing of bytes
                    record["bytes"] = gpu.copied_bytes(case["tokens"], case["batch"], session.dtype)
            found.append(record)
        return found

    def complete_all(self, rows: Sequence[dict[str, Any]]) -> None:
        """Forward passes in copies, and what a call takes more than its kernel."""
        gpu.add_copies(rows)
        kernels = {self.cell_of(row): row["seconds"]["median"] for row in rows
                   if row["way"] == KERNEL and "seconds" in row}  # fmt: skip
        for row in rows:
            alone = kernels.get(self.cell_of({**row, "way": KERNEL}))
            if row["way"] == CALL and alone is not None and "seconds" in row:
                more = {key: 1e6 * (row["seconds"][key] - alone) for key in ("median", "lower", "upper")}
                row["times"][OVER] = more

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """Of VIOLIN and small sizes next to flash attention, of calls next to their kernels, and of the largest."""

        def shape(part: str, size: tuple[int, int], key: str, way: str = KERNEL) -> dict[str, Any]:
            return {"part": part, "tokens": size[0], "batch": size[1], "pass": key, "way": way}

        def ours(where: dict[str, Any], base: str, limit: float, faster: bool = False, says: str = "") -> Target:
            return Target(where, base, limit, faster=faster, among=(OURS,), says=says)

        for size in SIZES.items():
            yield ours(shape("violin", size, FORWARD), FLASH, 1.25)
            yield ours(shape(ANEW, size, FORWARD), FLASH, 1.55 if size[0] == 4096 else 1.3)
            yield ours(shape("violin", size, BOTH), FLASH, 1.7)
            yield ours(shape(FROZEN, size, BOTH), FLASH, 1.3)
        for part in ("fibottention", "violin"):
            for key, limit in ((FORWARD, 40), (BOTH, 100)):
                says = f"a call takes at most {limit} us more than its kernel"
                yield ours(shape(part, (1024, 32), key, CALL), OVER, limit, says=says)
                for tokens in HOST_SIZES:
                    yield ours(shape(part, (tokens, HOST_IMAGES), key, HOST), DENSE, 1.5)
        yield ours(shape("fibottention", (196, 128), FORWARD), FLASH, 1.0, faster=True)
        yield ours(shape("fibottention", (196, 128), BOTH), FLASH, 1.5, faster=True)
        yield ours(shape("fibottention", (65536, 1), FORWARD), COPY, 1.5)

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What was checked."""
        lines = []
        for own in records:
            for what, value in own.get("checked", {}).items():
                bits = f"{value:.0f} elements differ" if own["part"].startswith(BITS) else gpu.error_size(value)
                lines.append(f"- {own['part']}, {own['tokens']} patches, {what}: {bits}")
        return "\n".join(lines)


def made_anew(contender: Contender) -> Contender:
    """A contender whose calls find no table of an earlier one."""

    def prepare(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        # None is kept, as while a CUDA graph is captured: warm-up and capture compile and launch the same.
        problem.plan.decay_tables = None
        return contender.prepare(problem)

    return replace(contender, prepare=prepare)


def graph_of(call: Call, device: torch.device) -> tuple[Call, int | None]:
    """A replay of a call's CUDA graph, and its launches.

    Raises:
        RuntimeError: without CUDA.
    """
    if device.type != "cuda":
        raise RuntimeError(f"CUDA graphs are for CUDA, not for {device.type}")
    graph, _ = gpu.captured(call)
    return graph.replay, gpu.launches_of(graph)


def host_seconds(call: Call, calls: int, device: torch.device) -> float:
    """Mean seconds until one of `calls` calls in a row returns; at most 100, so that no queue is full."""
    calls = min(calls, 100)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds


def launches_text(row: Row) -> str:
    """Launches of a call."""
    counts = [own["launches"] for own in row["records"] if own.get("launches") is not None]
    return str(counts[0]) if counts else "-"


def over_text(row: Row) -> str:
    """Microseconds that a call takes more than its kernel."""
    return report.digits(row["times"][OVER]["median"]) if OVER in row["times"] else "-"


BENCHMARK = Quick(
    name="gpu_quick",
    keys=("part", "tokens", "batch", "pass", "way", "contender"),
    machine=("dtype", "device"),
    same=("kernels", "triton", "block_sizes", "copy_bytes"),
    bases=(FLASH, DENSE),
    size="tokens",
    by_base=False,
    one_cpu=False,
    attempts=2,
    columns={
        "launches": launches_text,
        "copies": lambda row: report.ratio_text(row["times"].get(COPY)),
        OVER: over_text,
    },
)
